//! Rows in memory: an index of ids, and slabs of rows.
//!
//! Each row takes, beside its values, 16 bytes for its id and counts, and 4.6 to 9.2 bytes of the index, whose
//! tables are between 7/16 and 7/8 full and have a byte of their own for each place.

use std::hash::BuildHasher;

use foldhash::fast::FixedState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::{RowCounts, RowMut, RowStore, RowStores, StorageError};

/// Rows in each slab. A slab never moves, so that memory grows by one slab at a time and not by half of all
/// rows.
const SLAB_ROWS: usize = 1 << 6;

/// The most rows of one store.
const ROWS_MAX: usize = u32::MAX as usize;

/// Keeps all rows in memory.
#[derive(Debug)]
pub struct MemoryStores;

impl RowStores for MemoryStores {
    fn open(&self, stride: usize) -> Result<Box<dyn RowStore>, StorageError> {
        Ok(Box::new(MemoryRows::new(stride)))
    }
}

/// Rows in memory.
#[derive(Debug)]
pub struct MemoryRows {
    stride: usize,
    /// Numbers of the rows.
    index: HashTable<u32>,
    ids: Vec<u64>,
    counts: Vec<RowCounts>,
    slabs: Vec<Box<[f32]>>,
    /// Numbers of removed rows.
    free: Vec<u32>,
}

impl MemoryRows {
    /// No rows, of `stride` values each.
    pub fn new(stride: usize) -> Self {
        Self {
            stride,
            index: HashTable::new(),
            ids: Vec::new(),
            counts: Vec::new(),
            slabs: Vec::new(),
            free: Vec::new(),
        }
    }

    fn find(&self, id: u64) -> Option<usize> {
        let found = self.index.find(hash_of(id), |number| self.ids[*number as usize] == id);
        found.map(|number| *number as usize)
    }

    fn values(&self, number: usize) -> &[f32] {
        let from = number % SLAB_ROWS * self.stride;
        &self.slabs[number / SLAB_ROWS][from..from + self.stride]
    }

    fn values_mut(&mut self, number: usize) -> &mut [f32] {
        let from = number % SLAB_ROWS * self.stride;
        &mut self.slabs[number / SLAB_ROWS][from..from + self.stride]
    }

    /// Makes space for the row `number`.
    fn grow(&mut self, number: usize) {
        if self.slabs.len() * SLAB_ROWS <= number {
            self.slabs.push(vec![0.0; SLAB_ROWS * self.stride].into());
        }
        if self.ids.len() <= number {
            self.ids.resize(number + 1, 0);
            self.counts.resize(number + 1, RowCounts::default());
        }
    }
}

impl RowStore for MemoryRows {
    fn stride(&self) -> usize {
        self.stride
    }

    fn len(&self) -> usize {
        self.index.len()
    }

    fn get(&mut self, id: u64) -> Result<Option<(RowCounts, &[f32])>, StorageError> {
        Ok(self.find(id).map(|number| (self.counts[number], self.values(number))))
    }

    fn entry(&mut self, id: u64) -> Result<RowMut<'_>, StorageError> {
        let next = self.free.last().map_or(self.ids.len(), |number| *number as usize);
        let ids = &self.ids;
        let is_it = |number: &u32| ids[*number as usize] == id;
        let entry = self.index.entry(hash_of(id), is_it, |number| hash_of(ids[*number as usize]));
        let (number, is_new) = match entry {
            Entry::Occupied(found) => (*found.get() as usize, false),
            Entry::Vacant(_) if ROWS_MAX <= next => {
                return Err(StorageError::TooMany { most: ROWS_MAX });
            }
            Entry::Vacant(place) => {
                place.insert(next as u32);
                (next, true)
            }
        };
        if is_new {
            self.free.pop();
            self.grow(number);
            self.ids[number] = id;
            self.counts[number] = RowCounts::default();
            self.values_mut(number).fill(0.0);
        }
        let from = number % SLAB_ROWS * self.stride;
        let values = &mut self.slabs[number / SLAB_ROWS][from..from + self.stride];
        Ok(RowMut { is_new, counts: &mut self.counts[number], values })
    }

    fn remove(&mut self, id: u64) -> Result<(), StorageError> {
        let ids = &self.ids;
        let found = self.index.find_entry(hash_of(id), |number| ids[*number as usize] == id);
        if let Ok(found) = found {
            self.free.push(found.remove().0);
        }
        Ok(())
    }

    fn scan(&mut self, each: &mut dyn FnMut(u64, RowCounts, &[f32])) -> Result<(), StorageError> {
        let mut numbers: Vec<u32> = self.index.iter().copied().collect();
        numbers.sort_unstable_by_key(|number| self.ids[*number as usize]);
        for number in numbers {
            let number = number as usize;
            each(self.ids[number], self.counts[number], self.values(number));
        }
        Ok(())
    }
}

/// The same in every process: an order of rows that differs from run to run would be hard to debug.
fn hash_of(id: u64) -> u64 {
    FixedState::default().hash_one(id)
}
