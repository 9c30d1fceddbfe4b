//! All rows in memory.

use std::ops::ControlFlow;

use crate::disk::Key;
use crate::slabs::{Mask, Slabs, SlabsSnapshot};
use crate::{
    RowCounts, RowMut, RowStore, RowStores, RowsSnapshot, SnapshotRow, StorageError, Usage,
};

/// Keeps all rows in memory.
#[derive(Debug)]
pub struct MemoryStores;

impl RowStores for MemoryStores {
    fn open(&self, strides: &[usize]) -> Result<Box<dyn RowStore>, StorageError> {
        let spaces = strides.iter().map(|stride| Slabs::new(*stride)).collect();
        Ok(Box::new(MemoryRows { spaces, snapshots: 0 }))
    }
}

#[derive(Debug)]
struct MemoryRows {
    spaces: Vec<Slabs>,
    /// Number of snapshots so far.
    snapshots: u32,
}

fn key(id: u64) -> Key {
    Key { space: 0, id }
}

impl RowStore for MemoryRows {
    fn len(&self, space: usize) -> usize {
        self.spaces[space].len()
    }

    fn get(&mut self, space: usize, id: u64) -> Result<Option<(RowCounts, &[f32])>, StorageError> {
        let rows = &self.spaces[space];
        Ok(rows.find(key(id)).map(|number| rows.row(number)))
    }

    fn entry(&mut self, space: usize, id: u64) -> Result<RowMut<'_>, StorageError> {
        let rows = &mut self.spaces[space];
        let found = rows.find(key(id));
        let number = match found {
            Some(number) => number,
            None => rows.insert(key(id))?,
        };
        let (counts, values) = rows.row_mut(number, self.snapshots);
        Ok(RowMut { is_new: found.is_none(), counts, values })
    }

    fn retain(
        &mut self,
        space: usize,
        id: u64,
        is_wanted: &dyn Fn(RowCounts) -> bool,
    ) -> Result<(), StorageError> {
        let rows = &mut self.spaces[space];
        if let Some(number) = rows.find(key(id))
            && !is_wanted(rows.row(number).0)
        {
            rows.remove(number);
        }
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Box<dyn RowsSnapshot>, StorageError> {
        let all = |rows: &mut Slabs| rows.snapshot(|_| Mask::MAX);
        let (spaces, number) = (self.spaces.iter_mut().map(all).collect(), self.snapshots);
        self.snapshots += 1;
        Ok(Box::new(MemorySnapshot { spaces, number }))
    }

    fn usage(&self) -> Usage {
        Usage {
            rows_in_memory: self.spaces.iter().map(Slabs::len).sum(),
            memory_bytes: self.spaces.iter().map(Slabs::bytes).sum(),
            ..Usage::default()
        }
    }
}

#[derive(Debug)]
struct MemorySnapshot {
    spaces: Vec<SlabsSnapshot>,
    number: u32,
}

impl RowsSnapshot for MemorySnapshot {
    fn number(&self) -> u32 {
        self.number
    }

    fn scan(
        &self,
        space: usize,
        from: u64,
        each: &mut dyn FnMut(SnapshotRow<'_>) -> ControlFlow<()>,
    ) -> Result<(), StorageError> {
        let rows = &self.spaces[space];
        let sorted = rows.sorted(rows.numbers(), from);
        let _ = sorted.into_iter().try_for_each(|(_, number)| each(rows.row(number)));
        Ok(())
    }
}
