//! Local disks under RocksDB.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, DataBlockIndexType, Direction, IteratorMode,
    LogLevel, Options, ReadOptions, Snapshot, WriteBatch, WriteOptions,
};
use tempfile::TempDir;

use crate::StorageError;
use crate::disk::{Disk, DiskSnapshot, Disks, Key};

/// Beginning of the names of our directories.
const PREFIX: &str = "steadfast-rows-";
/// A file in such a directory, locked by the process that uses it.
const IN_USE: &str = "in-use";

/// Bytes of a key: space and id, big-endian, so that keys are in order.
const KEY_BYTES: usize = 12;

/// Bounds of what is written to memory before it is written to a file; there are up to three.
const BUFFER_BYTES: std::ops::RangeInclusive<usize> = 1 << 20..=64 << 20;
const BUFFERS: i32 = 3;
/// Bytes that are read for a row which is not in the cache of blocks.
const BLOCK_BYTES: usize = 2 << 10;

/// Bounds of the cache of file blocks. Indices and filters, of about 3 bytes for each row, are beside it.
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
    /// See [`local_disks`](crate::local_disks).
    pub fn new(directory: PathBuf, memory_bytes: usize) -> Self {
        Self { directory, memory_bytes }
    }

    fn failed(&self, reason: impl ToString) -> StorageError {
        StorageError::Disk { directory: self.directory.clone(), reason: reason.to_string() }
    }

    /// Removes what processes left behind that were killed.
    fn remove_abandoned(&self) -> Result<(), std::io::Error> {
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            let is_ours =
                path.file_name().is_some_and(|it| it.to_string_lossy().starts_with(PREFIX));
            let abandoned = is_ours.then(|| File::open(path.join(IN_USE))).and_then(Result::ok);
            if abandoned.is_some_and(|lock| lock.try_lock().is_ok()) {
                // Another process may do the same.
                let _ = fs::remove_dir_all(path);
            }
        }
        Ok(())
    }

    /// Creates a directory, and locks it until the file is closed.
    fn create(&self) -> Result<(TempDir, File), std::io::Error> {
        fs::create_dir_all(&self.directory)?;
        self.remove_abandoned()?;
        loop {
            let own = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&self.directory)?;
            let lock = File::create(own.path().join(IN_USE))?;
            // Unless another process took it for an abandoned one.
            if lock.try_lock().is_ok() {
                return Ok((own, lock));
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
        let (directory, lock) = self.create().map_err(|error| self.failed(error))?;
        let db = DB::open(&self.options(), directory.path());
        let mut write = WriteOptions::default();
        // Nothing outlives the process.
        write.disable_wal(true);
        Ok(Box::new(RocksDisk {
            db: Arc::new(db.map_err(|error| self.failed(error))?),
            write,
            own: Arc::new(Own { directory, _lock: lock }),
        }))
    }
}

/// A directory that is removed with the last user of its database.
#[derive(Debug)]
struct Own {
    directory: TempDir,
    _lock: File,
}

/// The fields are dropped in this order.
struct RocksDisk {
    db: Arc<DB>,
    write: WriteOptions,
    own: Arc<Own>,
}

impl fmt::Debug for RocksDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RocksDisk({})", self.path().display())
    }
}

fn encode(key: Key) -> [u8; KEY_BYTES] {
    let mut bytes = [0; KEY_BYTES];
    bytes[..4].copy_from_slice(&key.space.to_be_bytes());
    bytes[4..].copy_from_slice(&key.id.to_be_bytes());
    bytes
}

fn failed(directory: &Path, reason: impl ToString) -> StorageError {
    StorageError::Disk { directory: directory.to_owned(), reason: reason.to_string() }
}

impl RocksDisk {
    fn path(&self) -> &Path {
        self.own.directory.path()
    }
}

impl Disk for RocksDisk {
    fn read(&self, key: Key, content: &mut [u8]) -> Result<bool, StorageError> {
        let found = self.db.get_pinned(encode(key)).map_err(|it| failed(self.path(), it))?;
        let Some(found) = found else { return Ok(false) };
        if found.len() != content.len() {
            let (found, wanted) = (found.len(), content.len());
            let reason =
                format!("a row of {found} bytes was found where one of {wanted} was written");
            return Err(failed(self.path(), reason));
        }
        content.copy_from_slice(&found);
        Ok(true)
    }

    fn write(&mut self, rows: &[(Key, &[u8])]) -> Result<(), StorageError> {
        let mut batch = WriteBatch::default();
        rows.iter().for_each(|(key, content)| batch.put(encode(*key), content));
        self.db.write_opt(batch, &self.write).map_err(|it| failed(self.path(), it))
    }

    fn remove(&mut self, key: Key) -> Result<(), StorageError> {
        let removed = self.db.delete_opt(encode(key), &self.write);
        removed.map_err(|it| failed(self.path(), it))
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

/// The fields are dropped in this order.
struct RocksSnapshot {
    snapshot: Owned,
    own: Arc<Own>,
}

impl fmt::Debug for RocksSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RocksSnapshot({})", self.own.directory.path().display())
    }
}

impl DiskSnapshot for RocksSnapshot {
    fn scan(&self, space: u32, each: &mut dyn FnMut(u64, &[u8])) -> Result<(), StorageError> {
        let first = encode(Key { space, id: 0 });
        let mut options = ReadOptions::default();
        if let Some(space) = space.checked_add(1) {
            options.set_iterate_upper_bound(encode(Key { space, id: 0 }));
        }
        // A scan reads everything once; the cache is for the rows that training asks for.
        options.fill_cache(false);
        options.set_readahead_size(1 << 20);
        let mode = IteratorMode::From(&first, Direction::Forward);
        for entry in self.snapshot.borrow_dependent().0.iterator_opt(mode, options) {
            let (key, content) = entry.map_err(|it| failed(self.own.directory.path(), it))?;
            if let Some(id) = key.last_chunk() {
                each(u64::from_be_bytes(*id), &content);
            }
        }
        Ok(())
    }
}
