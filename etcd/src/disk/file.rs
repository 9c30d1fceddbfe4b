//! File operations whose errors name the file.

use crate::error::Error;
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// The first bytes of every file; the digit is the format version.
pub const MAGIC: &[u8; 8] = b"SFETCD1\n";

/// Creates a file, or truncates one that a crash may have left.
pub fn create(path: &Path) -> Result<File, Error> {
    File::create(path).map_err(Error::disk("create", path))
}

/// Reads a whole file; `None` if it does not exist.
pub fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::disk("read", path)(error)),
    }
}

/// Makes the entries of a directory durable.
pub fn sync_dir(path: &Path) -> Result<(), Error> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(Error::disk("sync", path))
}

pub fn corrupt(path: &Path, offset: usize, reason: impl Into<String>) -> Error {
    let offset = u64::try_from(offset).unwrap_or(u64::MAX);
    Error::Corrupt { path: path.to_path_buf(), offset, reason: reason.into() }
}
