//! Provides the bytes of a file to the Parquet decoder, on demand.

use std::fmt::Display;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use steadfast_host::task::{blocking, wait};
use steadfast_store::{Location, StoreError};

use crate::error::DataError;

/// Bytes fetched when the decoder reads the next page header, whose length is unknown.
const BLOCK_BYTES: u64 = 64 * 1024;

/// A file of known size. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Source(Arc<Inner>);

struct Inner {
    file: Location,
    size: u64,
    /// Prefetched ranges: the start of each, ascending, and its bytes.
    prefetched: Vec<(u64, Bytes)>,
    state: Mutex<State>,
}

/// Behind a mutex because the decoder requires `Sync`; it uses one thread.
#[derive(Default)]
struct State {
    /// The start and the bytes of the last fetched block.
    block: (u64, Bytes),
    /// The error of the store: the decoder keeps only the text of errors.
    failure: Option<StoreError>,
}

impl Source {
    /// Fetches `ranges`, which are within the file; other bytes are fetched on demand.
    pub async fn prefetch(
        file: &Location,
        size: u64,
        ranges: &[Range<u64>],
    ) -> Result<Self, DataError> {
        let fetched = file.read_ranges(ranges).await?;
        let starts = ranges.iter().map(|range| range.start);
        let mut prefetched: Vec<(u64, Bytes)> = starts.zip(fetched).collect();
        prefetched.sort_by_key(|(start, _)| *start);
        Ok(Self(Arc::new(Inner { file: file.clone(), size, prefetched, state: Mutex::default() })))
    }

    /// Runs the decoder on a blocking thread. Its panics become errors of the file.
    pub async fn decode<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, DataError> + Send + 'static,
    ) -> Result<T, DataError> {
        let source = self.clone();
        let decoded = blocking(move || work(&source)).await;
        decoded.unwrap_or_else(|broken| Err(DataError::broken(self.0.file.url(), &broken)))
    }

    /// Returns the cause of a decoder's error: an error of the store if there was one, or else an invalid file.
    pub fn error(&self, error: &dyn Display) -> DataError {
        match self.state().failure.take() {
            Some(error) => DataError::Store(error),
            None => DataError::bad_file(
                self.0.file.url(),
                format!("it is not a valid Parquet file ({error})"),
            ),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the cached bytes at the start of `range`, which may be fewer than the range has; `None` if none are
    /// cached.
    fn cached(&self, range: &Range<u64>) -> Option<Bytes> {
        let block = self.state().block.clone();
        let slice = |(start, bytes): &(u64, Bytes)| {
            let first = usize::try_from(range.start.checked_sub(*start)?).ok()?;
            let last = usize::try_from(range.end.checked_sub(*start)?).ok()?.min(bytes.len());
            (first < last).then(|| bytes.slice(first..last))
        };
        let prefetched = &self.0.prefetched;
        let after = prefetched.partition_point(|(start, _)| *start <= range.start);
        prefetched[..after].last().into_iter().chain([&block]).find_map(slice)
    }

    fn fetch(&self, range: Range<u64>) -> Result<Bytes, ParquetError> {
        if range.start > range.end || range.end > self.0.size {
            let (start, end, size) = (range.start, range.end, self.0.size);
            return Err(ParquetError::EOF(format!("it refers to bytes {start}..{end} of {size}")));
        }
        let whole = |bytes: &Bytes| bytes.len() as u64 == range.end - range.start;
        if let Some(bytes) = self.cached(&range).filter(whole) {
            return Ok(bytes);
        }
        let file = self.0.file.clone();
        let fetched = wait(async move { file.read_range(range).await });
        let fetched = fetched.map_err(|broken| ParquetError::General(broken.to_string()))?;
        fetched.map_err(|error| {
            let message = error.to_string();
            self.state().failure = Some(error);
            ParquetError::General(message)
        })
    }
}

impl Length for Source {
    fn len(&self) -> u64 {
        self.0.size
    }
}

impl ChunkReader for Source {
    type T = Window;

    fn get_read(&self, start: u64) -> Result<Window, ParquetError> {
        Ok(Window { source: self.clone(), position: start, bytes: Bytes::new() })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        self.fetch(start..start.saturating_add(length as u64))
    }
}

/// Reads sequentially from a byte of the file, and fetches on demand.
pub(crate) struct Window {
    source: Source,
    position: u64,
    bytes: Bytes,
}

impl Window {
    fn refill(&mut self) -> Result<(), ParquetError> {
        let start = self.position;
        let end = self.source.0.size.min(start.saturating_add(BLOCK_BYTES));
        if start >= end {
            return Ok(());
        }
        // Any cached bytes are enough, even if few: page headers are short.
        self.bytes = match self.source.cached(&(start..end)) {
            Some(bytes) => bytes,
            None => {
                let block = self.source.fetch(start..end)?;
                self.source.state().block = (start, block.clone());
                block
            }
        };
        self.position += self.bytes.len() as u64;
        Ok(())
    }
}

impl Read for Window {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.bytes.is_empty() {
            self.refill().map_err(io::Error::other)?;
        }
        let length = buffer.len().min(self.bytes.len());
        buffer[..length].copy_from_slice(&self.bytes.split_to(length));
        Ok(length)
    }
}
