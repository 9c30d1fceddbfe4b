//! The write-ahead log: frames of facts, appended and synced before any reply is sent.

use super::file::{self, MAGIC};
use super::frame;
use super::wire;
use crate::core::Core;
use crate::error::Error;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use tracing::warn;

pub struct Log {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Log {
    /// Creates an empty log. The caller syncs the directory.
    pub fn create(path: PathBuf) -> Result<Self, Error> {
        let mut file = file::create(&path)?;
        file.write_all(MAGIC).map_err(Error::disk("write", &path))?;
        file.sync_all().map_err(Error::disk("sync", &path))?;
        Ok(Log { path, file, bytes: MAGIC.len() as u64 })
    }

    /// Opens the log that holds `bytes`, folds its facts into `core`, and truncates a torn tail.
    pub fn replay(path: PathBuf, bytes: &[u8], core: &mut Core) -> Result<Self, Error> {
        if MAGIC.starts_with(bytes) && bytes.len() < MAGIC.len() {
            warn!(path = %path.display(), "log truncated within its header, creating it again");
            return Log::create(path);
        }
        if !bytes.starts_with(MAGIC) {
            return Err(file::corrupt(&path, 0, "not a log of this version"));
        }
        let sound = fold(&path, bytes, core)?;
        let file = OpenOptions::new().append(true).open(&path);
        let file = file.map_err(Error::disk("open", &path))?;
        let log = Log { path, file, bytes: sound as u64 };
        if sound < bytes.len() {
            log.cut(bytes.len() - sound)?;
        }
        Ok(log)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends one batch of facts and syncs it to disk.
    pub fn append(&mut self, batch: &[u8]) -> Result<(), Error> {
        let frame = [&frame::header(batch)[..], batch].concat();
        self.file.write_all(&frame).map_err(Error::disk("append to", &self.path))?;
        self.file.sync_data().map_err(Error::disk("sync", &self.path))?;
        self.bytes += frame.len() as u64;
        Ok(())
    }

    fn cut(&self, lost: usize) -> Result<(), Error> {
        let path = self.path.display();
        warn!(%path, offset = self.bytes, bytes = lost, "torn tail of the log truncated");
        self.file.set_len(self.bytes).map_err(Error::disk("truncate", &self.path))?;
        self.file.sync_all().map_err(Error::disk("sync", &self.path))
    }
}

/// Folds every valid frame and returns the end of the last one.
fn fold(path: &Path, bytes: &[u8], core: &mut Core) -> Result<usize, Error> {
    let mut offset = MAGIC.len();
    while offset < bytes.len() {
        let Some(payload) = frame::payload(&bytes[offset..]) else {
            if frame::is_anywhere_in(&bytes[offset + 1..]) {
                return Err(file::corrupt(path, offset, "checksum mismatch"));
            }
            break;
        };
        wire::fold(payload, core).map_err(|reason| file::corrupt(path, offset, reason))?;
        offset += frame::HEADER_BYTES + payload.len();
    }
    Ok(offset)
}
