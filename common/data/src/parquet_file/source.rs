//! Hands the bytes of a file to the Parquet decoder, which asks for them piece by piece.

use std::fmt::Display;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use steadfast_store::{Location, StoreError};
use tokio::runtime::Handle;

use crate::error::DataError;

/// Bytes that are fetched when the decoder looks for the next page, whose length it cannot know.
const BLOCK_BYTES: u64 = 64 * 1024;

/// A file of known size. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Source(Arc<Inner>);

struct Inner {
    file: Location,
    size: u64,
    runtime: Handle,
    /// What was fetched beforehand: where each piece starts, and its bytes.
    ready: Vec<(u64, Bytes)>,
    state: Mutex<State>,
}

/// Guarded because the decoder wants to be able to ask from several threads; it uses one.
#[derive(Default)]
struct State {
    /// The block that was fetched last, and where it starts.
    block: (u64, Bytes),
    /// Why the store did not answer: the decoder keeps no more of an error than its text.
    failure: Option<StoreError>,
}

impl Source {
    /// Fetches `ranges`, which lie in the file; whatever else is needed comes on demand.
    pub async fn prefetch(
        file: &Location,
        size: u64,
        ranges: &[Range<u64>],
    ) -> Result<Self, DataError> {
        let pieces = file.read_ranges(ranges).await?;
        let starts = ranges.iter().map(|range| range.start);
        Ok(Self(Arc::new(Inner {
            file: file.clone(),
            size,
            runtime: Handle::current(),
            ready: starts.zip(pieces).collect(),
            state: Mutex::default(),
        })))
    }

    /// Runs the decoder where it may wait and compute. If it panics, that is the file's fault.
    pub async fn decode<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, DataError> + Send + 'static,
    ) -> Result<T, DataError> {
        let source = self.clone();
        let failed = match tokio::task::spawn_blocking(move || work(&source)).await {
            Ok(result) => return result,
            Err(failed) => failed,
        };
        let file = self.0.file.url();
        Err(match failed.try_into_panic() {
            Ok(panic) => DataError::from_panic(file, &*panic),
            Err(cancelled) => DataError::bad_file(file, cancelled.to_string()),
        })
    }

    /// Says why the decoder failed: because of the store, or of the file.
    pub fn fault(&self, error: &dyn Display) -> DataError {
        match self.state().failure.take() {
            Some(error) => DataError::Store(error),
            None => DataError::bad_file(
                self.0.file.url(),
                format!("it is no sound Parquet file ({error})"),
            ),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was fetched already of `range` from its start on, if that is anything.
    fn at_hand(&self, range: &Range<u64>) -> Option<Bytes> {
        let block = self.state().block.clone();
        let cut = |(start, bytes): &(u64, Bytes)| {
            let first = usize::try_from(range.start.checked_sub(*start)?).ok()?;
            let last = usize::try_from(range.end.checked_sub(*start)?).ok()?.min(bytes.len());
            (first < last).then(|| bytes.slice(first..last))
        };
        self.0.ready.iter().chain([&block]).find_map(cut)
    }

    fn fetch(&self, range: Range<u64>) -> Result<Bytes, ParquetError> {
        if range.start > range.end || range.end > self.0.size {
            let (start, end, size) = (range.start, range.end, self.0.size);
            return Err(ParquetError::EOF(format!("it refers to {start}..{end} of {size} bytes")));
        }
        let whole = |bytes: &Bytes| bytes.len() as u64 == range.end - range.start;
        if let Some(bytes) = self.at_hand(&range).filter(whole) {
            return Ok(bytes);
        }
        self.0.runtime.block_on(self.0.file.read_range(range)).map_err(|error| {
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

/// Reads on from some byte of the file. Fetches nothing until it is asked.
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
        // What is at hand is enough, however little it is: a page's head is short.
        self.bytes = match self.source.at_hand(&(start..end)) {
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
