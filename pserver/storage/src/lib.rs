//! Where the rows of embedding tables are kept: one store for each range of a table.
//!
//! A store is memory for rows that training changes. It makes nothing durable: a pserver that ends loses its
//! rows, and its successor restores them from a checkpoint.

mod memory;

use std::fmt;

pub use memory::{MemoryRows, MemoryStores};

/// What is counted of a row, for its admission and its expiry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// Number of updates; stops at the largest number.
    pub updates: u32,
    /// The pass of the last update.
    pub pass: u32,
}

impl RowCounts {
    /// Counts an update in `pass`.
    pub fn count(&mut self, pass: u32) {
        self.updates = self.updates.saturating_add(1);
        // Of several trainers, one may be a pass ahead.
        self.pass = self.pass.max(pass);
    }
}

/// A row in a store.
#[derive(Debug)]
pub struct RowMut<'a> {
    /// Whether the row was just created: its counts and all its values are zero.
    pub is_new: bool,
    pub counts: &'a mut RowCounts,
    /// Parameters, then the vectors of the optimizer's state.
    pub values: &'a mut [f32],
}

/// The reason why a store cannot go on; its rows are lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StorageError {
    #[error("a range of a table has more than {most} rows")]
    TooMany { most: usize },
}

/// Opens stores.
pub trait RowStores: fmt::Debug + Send + Sync {
    /// Opens a store without rows, for rows of `stride` values.
    ///
    /// # Errors
    /// If there is no space for it.
    fn open(&self, stride: usize) -> Result<Box<dyn RowStore>, StorageError>;
}

/// Rows by id.
pub trait RowStore: fmt::Debug + Send + Sync {
    /// Values of a row, with the optimizer's state.
    fn stride(&self) -> usize;

    /// Number of rows.
    fn len(&self) -> usize;

    /// Whether there are no rows.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a row.
    ///
    /// # Errors
    /// If the store cannot read it.
    fn get(&mut self, id: u64) -> Result<Option<(RowCounts, &[f32])>, StorageError>;

    /// Returns a row for changes; creates it if there is none.
    ///
    /// # Errors
    /// If the store cannot read it, or has no space.
    fn entry(&mut self, id: u64) -> Result<RowMut<'_>, StorageError>;

    /// Removes a row, if there is one.
    ///
    /// # Errors
    /// If the store cannot write.
    fn remove(&mut self, id: u64) -> Result<(), StorageError>;

    /// Passes all rows to `each`, by ascending id.
    ///
    /// # Errors
    /// If the store cannot read them.
    fn scan(&mut self, each: &mut dyn FnMut(u64, RowCounts, &[f32])) -> Result<(), StorageError>;
}
