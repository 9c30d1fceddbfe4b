//! Local disks under RocksDB.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, DEFAULT_COLUMN_FAMILY_NAME,
    DataBlockIndexType, Direction, IteratorMode, LogLevel, Options, ReadOptions, Snapshot,
    WriteBatch, WriteOptions,
};

use crate::StorageError;
use crate::disk::{Disk, DiskSnapshot, Disks, Key};

/// Beginning of the names of our directories.
const PREFIX: &str = "steadfast-rows-";
/// End of the name of the lock file beside a directory, which the process that uses the directory has locked.
const LOCK: &str = ".lock";

/// Bytes of a key: space and id, big-endian, so that keys are in order.
const KEY_BYTES: usize = 12;

/// Bounds of what is written to memory before it is written to a file; there are up to three.
const BUFFER_BYTES: std::ops::RangeInclusive<usize> = 1 << 20..=64 << 20;
const BUFFERS: i32 = 3;
/// Bytes that are read for a row which is not in the cache of blocks.
const BLOCK_BYTES: usize = 2 << 10;

/// Bounds of the cache of file blocks. Indices and filters, of about 3 bytes for each small row, are beside it.
const CACHE_BYTES: std::ops::RangeInclusive<usize> = 4 << 20..=1 << 30;

/// Bits of the filter by which most reads of rows that do not exist need no file.
const FILTER_BITS: f64 = 10.0;

const OPEN_FILES: i32 = 512;

/// Opens databases in directories of their own.
#[derive(Debug)]
pub struct RocksDisks {
    directory: PathBuf,
    memory_bytes: usize,
}

impl RocksDisks {
    /// Creates the disks that [`local_disks`](crate::local_disks) returns.
    pub fn new(directory: PathBuf, memory_bytes: usize) -> Self {
        Self { directory, memory_bytes }
    }

    fn failed(&self, reason: impl ToString) -> StorageError {
        StorageError::Disk { directory: self.directory.clone(), reason: reason.to_string() }
    }

    /// Removes the directories that killed processes left behind.
    fn remove_abandoned(&self) -> Result<(), io::Error> {
        for entry in fs::read_dir(&self.directory)? {
            let lock_path = entry?.path();
            let name = lock_path.file_name().unwrap_or_default().to_string_lossy();
            if !name.starts_with(PREFIX) || !name.ends_with(LOCK) {
                continue;
            }
            // Another process may be faster.
            let Ok(lock) = File::open(&lock_path) else { continue };
            if lock.try_lock().is_ok() {
                remove(&lock_path);
            }
        }
        Ok(())
    }

    /// Creates a directory, which belongs to this process until the result is dropped.
    fn create(&self) -> Result<Own, io::Error> {
        fs::create_dir_all(&self.directory)?;
        self.remove_abandoned()?;
        loop {
            let mut named = tempfile::Builder::new();
            let made = named.prefix(PREFIX).suffix(LOCK).tempfile_in(&self.directory)?;
            let (lock, lock_path) = made.keep().map_err(|error| error.error)?;
            match lock.try_lock() {
                Ok(()) => {}
                // Another process takes it for an abandoned one, and removes it.
                Err(TryLockError::WouldBlock) => continue,
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // It may have done so before we had the lock.
            let is_there = fs::metadata(&lock_path)
                .is_ok_and(|it| lock.metadata().is_ok_and(|ours| it.ino() == ours.ino()));
            if is_there {
                fs::create_dir(directory_of(&lock_path))?;
                return Ok(Own { lock_path, _lock: lock });
            }
        }
    }

    fn options(&self) -> Options {
        let within = |bytes: usize, bounds: std::ops::RangeInclusive<usize>| {
            bytes.clamp(*bounds.start(), *bounds.end())
        };
        let mut options = Options::default();
        options.create_if_missing(true);
        options.set_write_buffer_size(within(self.memory_bytes / 4, BUFFER_BYTES));
        options.set_max_write_buffer_number(BUFFERS);
        options.set_max_background_jobs(2);
        options.set_compaction_style(rocksdb::DBCompactionStyle::Universal);
        // Values of parameters hardly compress.
        options.set_compression_type(DBCompressionType::None);
        options.set_max_open_files(OPEN_FILES);
        options.set_log_level(LogLevel::Warn);
        options.set_keep_log_file_num(1);
        // The event loop is the only writer.
        options.set_allow_concurrent_memtable_write(false);
        // Most reads are of rows in files, not of those that were just written.
        options.set_memtable_prefix_bloom_ratio(0.1);
        options.set_memtable_whole_key_filtering(true);
        let mut table = BlockBasedOptions::default();
        table.set_block_cache(&Cache::new_lru_cache(within(self.memory_bytes / 8, CACHE_BYTES)));
        table.set_block_size(BLOCK_BYTES);
        table.set_data_block_index_type(DataBlockIndexType::BinaryAndHash);
        table.set_bloom_filter(FILTER_BITS, false);
        options.set_block_based_table_factory(&table);
        options
    }
}

impl Disks for RocksDisks {
    fn open(&self) -> Result<Box<dyn Disk>, StorageError> {
        let own = self.create().map_err(|error| self.failed(error))?;
        // Named, so that there is a handle of it.
        let families = [(DEFAULT_COLUMN_FAMILY_NAME, self.options())];
        let db = DB::open_cf_with_opts(&self.options(), own.directory(), families);
        let mut write = WriteOptions::default();
        // Nothing outlives the process.
        write.disable_wal(true);
        Ok(Box::new(RocksDisk {
            db: Arc::new(db.map_err(|error| self.failed(error))?),
            write,
            own: Arc::new(own),
        }))
    }
}

/// A directory that is removed with the last user of its database. Beside it is a file which its process has
/// locked, and which is removed last.
#[derive(Debug)]
struct Own {
    lock_path: PathBuf,
    _lock: File,
}

impl Own {
    fn directory(&self) -> PathBuf {
        directory_of(&self.lock_path)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        remove(&self.lock_path);
    }
}

/// Returns the directory that belongs to a lock file.
fn directory_of(lock_path: &Path) -> PathBuf {
    lock_path.with_extension("")
}

/// Removes a directory and its lock file. Keeps the lock file if the directory cannot be removed, so that the next
/// process tries again.
fn remove(lock_path: &Path) {
    match fs::remove_dir_all(directory_of(lock_path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {}
        Ok(()) | Err(_) => drop(fs::remove_file(lock_path)),
    }
}

/// An open database and its directory. The fields are dropped in this order.
struct RocksDisk {
    db: Arc<DB>,
    write: WriteOptions,
    own: Arc<Own>,
}

impl fmt::Debug for RocksDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RocksDisk({})", self.own.directory().display())
    }
}

fn encode(key: Key) -> [u8; KEY_BYTES] {
    let mut bytes = [0; KEY_BYTES];
    bytes[..4].copy_from_slice(&key.space.to_be_bytes());
    bytes[4..].copy_from_slice(&key.id.to_be_bytes());
    bytes
}

fn failed(own: &Own, reason: impl ToString) -> StorageError {
    StorageError::Disk { directory: own.directory(), reason: reason.to_string() }
}

impl Disk for RocksDisk {
    fn read(&self, keys: &[Key], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), StorageError> {
        let family = self.db.cf_handle(DEFAULT_COLUMN_FAMILY_NAME).expect("it was opened");
        let keys: Vec<_> = keys.iter().copied().map(encode).collect();
        let found = self.db.batched_multi_get_cf(family, &keys, true);
        for (index, row) in found.into_iter().enumerate() {
            if let Some(row) = row.map_err(|it| failed(&self.own, it))? {
                each(index, &row);
            }
        }
        Ok(())
    }

    fn write(&mut self, rows: &[(Key, &[u8])]) -> Result<(), StorageError> {
        let mut batch = WriteBatch::default();
        rows.iter().for_each(|(key, content)| batch.put(encode(*key), content));
        self.db.write_opt(batch, &self.write).map_err(|it| failed(&self.own, it))
    }

    fn remove(&mut self, key: Key) -> Result<(), StorageError> {
        let removed = self.db.delete_opt(encode(key), &self.write);
        removed.map_err(|it| failed(&self.own, it))
    }

    fn snapshot(&self) -> Box<dyn DiskSnapshot> {
        let snapshot = Owned::new(self.db.clone(), |db| Present(db.snapshot()));
        Box::new(RocksSnapshot { snapshot, own: self.own.clone() })
    }

    fn bytes(&self) -> u64 {
        let files = self.db.property_int_value("rocksdb.total-sst-files-size");
        files.ok().flatten().unwrap_or(0)
    }
}

/// A snapshot of the database that it borrows.
struct Present<'a>(Snapshot<'a>);

self_cell::self_cell!(
    struct Owned {
        owner: Arc<DB>,
        #[covariant]
        dependent: Present,
    }
);

/// A snapshot of a database, which stays open as long. The fields are dropped in this order.
struct RocksSnapshot {
    snapshot: Owned,
    own: Arc<Own>,
}

impl fmt::Debug for RocksSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RocksSnapshot({})", self.own.directory().display())
    }
}

impl DiskSnapshot for RocksSnapshot {
    fn scan(
        &self,
        space: u32,
        from: u64,
        each: &mut dyn FnMut(u64, &[u8]) -> ControlFlow<()>,
    ) -> Result<(), StorageError> {
        let first = encode(Key { space, id: from });
        let mut options = ReadOptions::default();
        if let Some(space) = space.checked_add(1) {
            options.set_iterate_upper_bound(encode(Key { space, id: 0 }));
        }
        // A scan reads everything once; the cache is for the rows that training asks for.
        options.fill_cache(false);
        let mode = IteratorMode::From(&first, Direction::Forward);
        for entry in self.snapshot.borrow_dependent().0.iterator_opt(mode, options) {
            let (key, content) = entry.map_err(|it| failed(&self.own, it))?;
            if let Some(id) = key.last_chunk()
                && each(u64::from_be_bytes(*id), &content).is_break()
            {
                break;
            }
        }
        Ok(())
    }
}
