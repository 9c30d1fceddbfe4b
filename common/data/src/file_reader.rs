//! Reads a file sequentially, in work of [`steadfast_host::task::blocking`].

use std::io::{self, BufRead, Read, Seek, SeekFrom};

use bytes::{Buf, Bytes};
use steadfast_host::task::wait;
use steadfast_store::Location;

/// Bytes per fetch.
const FETCH_BYTES: u64 = 4 * 1024 * 1024;

/// The bytes of a file, fetched on demand. Errors of the store are [`steadfast_store::StoreError`]s within
/// the I/O errors.
pub(crate) struct FileReader {
    file: Location,
    size: u64,
    /// The offset in the file at which the fetched bytes end.
    position: u64,
    bytes: Bytes,
}

impl FileReader {
    /// Begins at the start of `file`, which has `size` bytes.
    pub fn new(file: &Location, size: u64) -> Self {
        Self { file: file.clone(), size, position: 0, bytes: Bytes::new() }
    }
}

impl BufRead for FileReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.bytes.is_empty() && self.position < self.size {
            let range = self.position..self.size.min(self.position + FETCH_BYTES);
            self.position = range.end;
            let file = self.file.clone();
            let fetched = wait(async move { file.read_range(range).await });
            self.bytes = fetched.map_err(io::Error::other)?.map_err(io::Error::other)?;
        }
        Ok(&self.bytes)
    }

    fn consume(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

impl Read for FileReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}

/// Bytes that are skipped are not fetched.
impl Seek for FileReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let now = self.position - self.bytes.len() as u64;
        let target = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::Current(offset) => now.checked_add_signed(offset),
            SeekFrom::End(offset) => self.size.checked_add_signed(offset),
        };
        let target = target.ok_or(io::ErrorKind::InvalidInput)?;
        match target.checked_sub(now) {
            Some(ahead) if ahead <= self.bytes.len() as u64 => self.bytes.advance(ahead as usize),
            Some(_) | None => {
                self.bytes = Bytes::new();
                self.position = target;
            }
        }
        Ok(target)
    }
}
