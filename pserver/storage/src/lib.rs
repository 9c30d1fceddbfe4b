//! Where the rows of embedding tables are kept: in memory alone ([`MemoryStores`]), or in a limited amount of
//! memory above a local disk ([`TieredStores`]).
//!
//! A store makes nothing durable: a pserver that ends loses its rows, and its successor restores them from a
//! checkpoint.

mod disk;
mod memory;
#[cfg(feature = "rocksdb")]
mod rocks;
mod slabs;
mod tiered;

use std::fmt;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

pub use disk::{Disk, DiskSnapshot, Disks, Key, LosableDisks};
pub use memory::MemoryStores;
pub use tiered::TieredStores;

/// The counts of a row that decide on its admission and its expiry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
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
    #[error("a table has more than {most} rows in memory")]
    TooMany { most: usize },
    #[error("rows of tables cannot be kept in {}: {reason}", directory.display())]
    Disk { directory: PathBuf, reason: String },
    #[error(
        "this program was built without RocksDB (the feature `rocksdb` of steadfast-pserver); `make build` builds \
         one with it"
    )]
    NoRocksDb,
}

/// The memory and disk space that a store takes, and the accesses to its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Rows in memory.
    pub rows_in_memory: usize,
    /// Bytes of the rows in memory, with their index.
    pub memory_bytes: usize,
    /// Bytes of files on the local disk.
    pub disk_bytes: u64,
    /// Accesses to rows in memory, and to those that were read from the disk, since the store was opened.
    pub hits: u64,
    pub misses: u64,
}

/// Opens stores.
pub trait RowStores: fmt::Debug + Send + Sync {
    /// Opens a store without rows. Its rows are in key spaces, numbered from 0; `strides` has the number of
    /// values of a row of each.
    ///
    /// # Errors
    /// If there is no space for the store.
    fn open(&self, strides: &[usize]) -> Result<Box<dyn RowStore>, StorageError>;
}

/// Returns local disks under RocksDB, in directories of their own below `directory`. Each takes about
/// `memory_bytes` for buffers and caches (at least 7 MiB).
///
/// # Errors
/// If this program was built without RocksDB.
pub fn local_disks(
    directory: PathBuf,
    memory_bytes: usize,
) -> Result<Arc<dyn Disks>, StorageError> {
    #[cfg(feature = "rocksdb")]
    return Ok(Arc::new(rocks::RocksDisks::new(directory, memory_bytes)));
    #[cfg(not(feature = "rocksdb"))]
    {
        let _ = (directory, memory_bytes);
        Err(StorageError::NoRocksDb)
    }
}

/// Rows by key space and id.
pub trait RowStore: fmt::Debug + Send + Sync {
    /// Returns the number of rows in a key space.
    fn len(&self, space: usize) -> usize;

    /// Returns the counts and values of a row, if it exists.
    ///
    /// # Errors
    /// If the store cannot read the row.
    fn get(&mut self, space: usize, id: u64) -> Result<Option<(RowCounts, &[f32])>, StorageError>;

    /// Reads rows that are accessed next, by space and id, from the disk into memory. Reading them together is cheaper.
    ///
    /// # Errors
    /// If the store cannot read the rows.
    fn fetch(&mut self, rows: &mut dyn Iterator<Item = (usize, u64)>) -> Result<(), StorageError> {
        let _ = rows;
        Ok(())
    }

    /// Returns a row for changes; creates it if it does not exist.
    ///
    /// # Errors
    /// If the store cannot read the row, or has no space.
    fn entry(&mut self, space: usize, id: u64) -> Result<RowMut<'_>, StorageError>;

    /// Removes a row if it exists and `is_wanted` returns false for it.
    ///
    /// # Errors
    /// If the store cannot read or write.
    fn retain(
        &mut self,
        space: usize,
        id: u64,
        is_wanted: &dyn Fn(RowCounts) -> bool,
    ) -> Result<(), StorageError>;

    /// Removes a row if it exists.
    ///
    /// # Errors
    /// If the store cannot read or write.
    fn remove(&mut self, space: usize, id: u64) -> Result<(), StorageError> {
        self.retain(space, id, &|_| false)
    }

    /// Returns a snapshot of all rows as they are now. Later changes do not affect the snapshot; while it exists, they
    /// take more memory: at most as much again as the rows that are in memory.
    ///
    /// # Errors
    /// If the store cannot read.
    fn snapshot(&mut self) -> Result<Box<dyn RowsSnapshot>, StorageError>;

    /// Returns how much memory and disk space the store takes, and how often its rows were accessed.
    fn usage(&self) -> Usage;
}

/// The rows of a store at one moment.
pub trait RowsSnapshot: fmt::Debug + Send + Sync {
    /// Returns the number of the store's snapshots before this one.
    fn number(&self) -> u32;

    /// Passes the rows of a space to `each`, by ascending id beginning at `from`, until `each` breaks off.
    ///
    /// # Errors
    /// If the rows cannot be read.
    fn scan(
        &self,
        space: usize,
        from: u64,
        each: &mut dyn FnMut(SnapshotRow<'_>) -> ControlFlow<()>,
    ) -> Result<(), StorageError>;
}

/// A row of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SnapshotRow<'a> {
    pub id: u64,
    pub counts: RowCounts,
    /// Number of the store's snapshots before the row was last changed: it has changed since the snapshot with
    /// [`RowsSnapshot::number`] n if this is larger than n.
    pub changed: u32,
    /// Parameters, then the vectors of the optimizer's state.
    pub values: &'a [f32],
}
