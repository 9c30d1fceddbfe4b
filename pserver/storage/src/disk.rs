//! The disk below a limited amount of memory.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use crate::StorageError;

/// The key of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub space: u32,
    pub id: u64,
}

/// Opens disks.
pub trait Disks: fmt::Debug + Send + Sync {
    /// Opens an empty disk.
    ///
    /// # Errors
    /// If there is no space for the disk.
    fn open(&self) -> Result<Box<dyn Disk>, StorageError>;
}

/// Contents of rows by key. Nothing of it outlives the process.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Reads the rows with the given keys, which ascend. For each row that exists, passes the index of its key and its
    /// content to `each`.
    ///
    /// # Errors
    /// If the rows cannot be read.
    fn read(&self, keys: &[Key], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), StorageError>;

    /// Writes rows.
    ///
    /// # Errors
    /// If the rows cannot be written.
    fn write(&mut self, rows: &[(Key, &[u8])]) -> Result<(), StorageError>;

    /// Removes a row.
    ///
    /// # Errors
    /// If the row cannot be removed.
    fn remove(&mut self, key: Key) -> Result<(), StorageError>;

    /// Returns all rows as they are now.
    fn snapshot(&self) -> Box<dyn DiskSnapshot>;

    /// Returns the size of the disk's files in bytes.
    fn bytes(&self) -> u64;
}

/// The rows of a disk at one moment.
pub trait DiskSnapshot: fmt::Debug + Send + Sync {
    /// Passes id and content of the rows of a space to `each`, by ascending id beginning at `from`, until `each` breaks
    /// off.
    ///
    /// # Errors
    /// If the rows cannot be read.
    fn scan(
        &self,
        space: u32,
        from: u64,
        each: &mut dyn FnMut(u64, &[u8]) -> ControlFlow<()>,
    ) -> Result<(), StorageError>;
}

/// A stand-in for disks, in memory: for tests and simulations. It fails after a number of writes if it is told
/// to.
#[derive(Clone, Copy, Debug, Default)]
pub struct LosableDisks {
    pub fails_after: Option<u64>,
}

impl Disks for LosableDisks {
    fn open(&self) -> Result<Box<dyn Disk>, StorageError> {
        Ok(Box::new(LosableDisk { rows: BTreeMap::new(), writes_left: self.fails_after }))
    }
}

type Rows = BTreeMap<Key, Arc<[u8]>>;

#[derive(Debug)]
struct LosableDisk {
    rows: Rows,
    writes_left: Option<u64>,
}

#[derive(Debug)]
struct LosableSnapshot(Rows);

impl Disk for LosableDisk {
    fn read(&self, keys: &[Key], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), StorageError> {
        let found = |(index, key)| Some((index, self.rows.get(key)?));
        keys.iter().enumerate().filter_map(found).for_each(|(index, row)| each(index, row));
        Ok(())
    }

    fn write(&mut self, rows: &[(Key, &[u8])]) -> Result<(), StorageError> {
        if let Some(left) = &mut self.writes_left {
            let reason = || "No space left on device".to_owned();
            let full =
                || StorageError::Disk { directory: PathBuf::from("memory"), reason: reason() };
            *left = left.checked_sub(1).ok_or_else(full)?;
        }
        self.rows.extend(rows.iter().map(|(key, content)| (*key, (*content).into())));
        Ok(())
    }

    fn remove(&mut self, key: Key) -> Result<(), StorageError> {
        self.rows.remove(&key);
        Ok(())
    }

    fn snapshot(&self) -> Box<dyn DiskSnapshot> {
        Box::new(LosableSnapshot(self.rows.clone()))
    }

    fn bytes(&self) -> u64 {
        self.rows.values().map(|content| content.len() as u64).sum()
    }
}

impl DiskSnapshot for LosableSnapshot {
    fn scan(
        &self,
        space: u32,
        from: u64,
        each: &mut dyn FnMut(u64, &[u8]) -> ControlFlow<()>,
    ) -> Result<(), StorageError> {
        let all = Key { space, id: from }..=Key { space, id: u64::MAX };
        let _ = self.0.range(all).try_for_each(|(key, content)| each(key.id, content));
        Ok(())
    }
}
