//! The data directory: one snapshot, one log, one server.
//!
//! ```text
//! lock                 held by the server that uses the directory
//! snapshot-<n>         the store at the start of log n; generation 0 starts with an empty store
//! log-<n>              every fact since
//! ```
//! Log n+1 replaces log n in this order: the snapshot n+1 is renamed into place, the log n+1 is created,
//! the files of n are removed. A crash between any two steps loses nothing, because the highest snapshot
//! covers every lower log.

mod file;
mod frame;
mod log;
mod snapshot;
mod wire;

#[cfg(test)]
mod tests;

pub use wire::{append_fact, fold};

use crate::core::{Core, Image};
use crate::error::Error;
use log::Log;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The open data directory. All its methods block.
pub struct Disk {
    dir: PathBuf,
    generation: u64,
    log: Log,
    snapshot_bytes: u64,
    log_bytes_max: u64,
    /// Released when the file is closed, at the latest when the process exits.
    _lock: File,
}

impl Disk {
    /// Locks a data directory and rebuilds the store from it.
    pub fn open(dir: &Path, log_bytes_max: u64) -> Result<(Disk, Core), Error> {
        fs::create_dir_all(dir).map_err(Error::disk("create", dir))?;
        let lock = lock(dir)?;
        let generation = newest_generation(dir)?;
        let mut snapshot_bytes = 0;
        let mut core = Core::default();
        let path = snapshot_path(dir, generation);
        if let Some(bytes) = file::read_if_there(&path)? {
            snapshot_bytes = bytes.len() as u64;
            core = Core::restore(snapshot::read(&path, &bytes)?, 0);
        }
        let path = log_path(dir, generation);
        let log = match file::read_if_there(&path)? {
            Some(bytes) => Log::replay(path, &bytes, &mut core)?,
            None => Log::create(path)?,
        };
        file::sync_dir(dir)?;
        let disk = Disk {
            dir: dir.to_path_buf(),
            generation,
            log,
            snapshot_bytes,
            log_bytes_max,
            _lock: lock,
        };
        disk.remove_leftovers();
        info!(dir = %dir.display(), revision = core.revision(), "data directory opened");
        Ok((disk, core))
    }

    /// Returns the size of log and snapshot.
    pub fn bytes(&self) -> u64 {
        self.log.bytes() + self.snapshot_bytes
    }

    /// Appends encoded facts (see [`append_fact`]) and syncs them to disk.
    pub fn append(&mut self, batch: &[u8]) -> Result<(), Error> {
        self.log.append(batch)
    }

    /// Returns whether a snapshot should replace the log. The log may grow as large as the last
    /// snapshot, which bounds the write amplification.
    pub fn is_snapshot_due(&self) -> bool {
        self.log.bytes() > self.log_bytes_max.max(self.snapshot_bytes)
    }

    /// Writes an image as the next snapshot and starts a new log.
    pub fn replace(&mut self, image: &Image) -> Result<(), Error> {
        let generation = self.generation + 1;
        self.snapshot_bytes = snapshot::write(&snapshot_path(&self.dir, generation), image)?;
        self.log = Log::create(log_path(&self.dir, generation))?;
        self.generation = generation;
        file::sync_dir(&self.dir)?;
        self.remove_leftovers();
        info!(generation, bytes = self.snapshot_bytes, "log replaced by a snapshot");
        Ok(())
    }

    /// Removes files of older generations and interrupted snapshots. A failure is only logged, because
    /// the files do no harm.
    fn remove_leftovers(&self) {
        for (path, entry) in entries(&self.dir).unwrap_or_default() {
            let stale = match entry {
                Entry::Snapshot(generation) | Entry::Log(generation) => {
                    generation < self.generation
                }
                Entry::Unfinished => true,
                Entry::Other => false,
            };
            if stale && let Err(error) = fs::remove_file(&path) {
                warn!(path = %path.display(), %error, "stale file not removed");
            }
        }
    }
}

/// The kind of a file in the data directory, by its name.
enum Entry {
    Snapshot(u64),
    Log(u64),
    Unfinished,
    Other,
}

/// A server that was just killed may hold the lock until it has exited.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_RETRY: Duration = Duration::from_millis(20);

fn lock(dir: &Path) -> Result<File, Error> {
    let path = dir.join("lock");
    let file = file::create(&path)?;
    let began = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if began.elapsed() < LOCK_TIMEOUT => {
                thread::sleep(LOCK_RETRY);
            }
            Err(TryLockError::WouldBlock) => return Err(Error::InUse { path: dir.to_path_buf() }),
            Err(TryLockError::Error(error)) => return Err(Error::disk("lock", &path)(error)),
        }
    }
}

/// Returns the generation of the newest snapshot, or 0 if there is none. Fails if a log continues a snapshot that is
/// missing.
fn newest_generation(dir: &Path) -> Result<u64, Error> {
    let entries = entries(dir)?;
    let snapshots = entries.iter().filter_map(|(_, entry)| match entry {
        Entry::Snapshot(generation) => Some(*generation),
        Entry::Log(_) | Entry::Unfinished | Entry::Other => None,
    });
    let newest = snapshots.max().unwrap_or(0);
    for (path, entry) in &entries {
        if let Entry::Log(generation) = entry
            && *generation > newest
        {
            return Err(file::corrupt(path, 0, "the snapshot that this log continues is missing"));
        }
    }
    Ok(newest)
}

fn entries(dir: &Path) -> Result<Vec<(PathBuf, Entry)>, Error> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(Error::disk("read", dir))? {
        let path = entry.map_err(Error::disk("read", dir))?.path();
        let kind = kind(path.file_name().and_then(|name| name.to_str()).unwrap_or_default());
        found.push((path, kind));
    }
    Ok(found)
}

fn kind(name: &str) -> Entry {
    if name.starts_with("snapshot-") && name.ends_with(".tmp") {
        return Entry::Unfinished;
    }
    let generation = |prefix| name.strip_prefix(prefix)?.parse().ok();
    if let Some(generation) = generation("snapshot-") {
        return Entry::Snapshot(generation);
    }
    generation("log-").map_or(Entry::Other, Entry::Log)
}

fn snapshot_path(dir: &Path, generation: u64) -> PathBuf {
    dir.join(format!("snapshot-{generation}"))
}

fn log_path(dir: &Path, generation: u64) -> PathBuf {
    dir.join(format!("log-{generation}"))
}
