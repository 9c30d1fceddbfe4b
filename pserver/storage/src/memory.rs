//! All rows in memory.

use crate::disk::Key;
use crate::slabs::{Mask, Slabs, SlabsSnapshot};
use crate::{RowCounts, RowMut, RowStore, RowStores, RowsSnapshot, StorageError, Usage};

/// Keeps all rows in memory.
#[derive(Debug)]
pub struct MemoryStores;

impl RowStores for MemoryStores {
    fn open(&self, strides: &[usize]) -> Result<Box<dyn RowStore>, StorageError> {
        Ok(Box::new(MemoryRows(strides.iter().map(|stride| Slabs::new(*stride)).collect())))
    }
}

/// The rows of each space.
#[derive(Debug)]
struct MemoryRows(Vec<Slabs>);

fn key(id: u64) -> Key {
    Key { space: 0, id }
}

impl RowStore for MemoryRows {
    fn len(&self, space: usize) -> usize {
        self.0[space].len()
    }

    fn get(&mut self, space: usize, id: u64) -> Result<Option<(RowCounts, &[f32])>, StorageError> {
        let rows = &self.0[space];
        Ok(rows.find(key(id)).map(|number| rows.row(number)))
    }

    fn entry(&mut self, space: usize, id: u64) -> Result<RowMut<'_>, StorageError> {
        let rows = &mut self.0[space];
        let found = rows.find(key(id));
        let number = match found {
            Some(number) => number,
            None => rows.insert(key(id))?,
        };
        let (counts, values) = rows.row_mut(number);
        Ok(RowMut { is_new: found.is_none(), counts, values })
    }

    fn retain(
        &mut self,
        space: usize,
        id: u64,
        is_wanted: &dyn Fn(RowCounts) -> bool,
    ) -> Result<(), StorageError> {
        let rows = &mut self.0[space];
        if let Some(number) = rows.find(key(id))
            && !is_wanted(rows.row(number).0)
        {
            rows.remove(number);
        }
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Box<dyn RowsSnapshot>, StorageError> {
        let all = |rows: &mut Slabs| rows.snapshot(|_| Mask::MAX);
        Ok(Box::new(MemorySnapshot(self.0.iter_mut().map(all).collect())))
    }

    fn usage(&self) -> Usage {
        Usage {
            rows_in_memory: self.0.iter().map(Slabs::len).sum(),
            memory_bytes: self.0.iter().map(Slabs::bytes).sum(),
            ..Usage::default()
        }
    }
}

#[derive(Debug)]
struct MemorySnapshot(Vec<SlabsSnapshot>);

impl RowsSnapshot for MemorySnapshot {
    fn scan(
        &self,
        space: usize,
        each: &mut dyn FnMut(u64, RowCounts, &[f32]),
    ) -> Result<(), StorageError> {
        let rows = &self.0[space];
        let mut order: Vec<(u64, u32)> =
            rows.numbers().map(|number| (rows.key(number).id, number)).collect();
        order.sort_unstable();
        for (id, number) in order {
            let (counts, values) = rows.row(number);
            each(id, counts, values);
        }
        Ok(())
    }
}
