//! Compressed text files. They are detected by their first bytes and read from their start; positions
//! refer to the decompressed text.

use std::io::{self, BufRead, ErrorKind, Read};

use bytes::{Buf, Bytes};
use steadfast_host::task::blocking;
use steadfast_store::{Location, StoreError};

use super::BLOCK_BYTES;
use crate::error::DataError;
use crate::file_reader::FileReader;

/// The compression of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codec {
    Gzip,
    Zstd,
    Bzip2,
}

impl Codec {
    /// Detects a compressed file by its content, not by its name.
    pub fn detect(head: &[u8]) -> Option<Self> {
        match head {
            [0x1f, 0x8b, 0x08, ..] => Some(Self::Gzip),
            // A data frame, or a skippable frame, which some writers put first.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Self::Zstd),
            [b'B', b'Z', b'h', b'1'..=b'9', block @ ..]
                if block.starts_with(b"1AY&SY") || block.starts_with(b"\x17rE8P\x90") =>
            {
                Some(Self::Bzip2)
            }
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Bzip2 => "bzip2",
        }
    }

    /// Decompresses all members, frames or streams of a file in sequence.
    pub fn decoder(
        self,
        compressed: impl BufRead + Send + 'static,
    ) -> io::Result<Box<dyn Read + Send>> {
        Ok(match self {
            Self::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(compressed)),
            Self::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(compressed)?),
            Self::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(compressed)),
        })
    }

    /// Returns the cause of a decompression error: the store or the file.
    pub fn error(self, file: &str, error: io::Error) -> DataError {
        match error.downcast::<StoreError>() {
            Ok(error) => DataError::Store(error),
            Err(error) => DataError::bad_file(
                file,
                format!(
                    "its {} data is damaged or truncated ({error}); write it again",
                    self.name()
                ),
            ),
        }
    }
}

/// The beginning of a file's text.
pub(crate) struct Head {
    pub text: Bytes,
    /// Whether this is the whole text.
    pub is_all: bool,
}

/// Decompresses up to `limit` bytes of text from the first bytes of a file, which `rest` may follow.
pub(crate) async fn head(
    codec: Codec,
    file: &str,
    compressed: Bytes,
    rest: Rest,
    limit: u64,
) -> Result<Head, DataError> {
    let decompressing = move || {
        let mut text = Vec::new();
        let mut decoder = codec.decoder(compressed.reader())?.take(limit);
        match decoder.read_to_end(&mut text) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof && rest == Rest::Follows => {}
            Err(error) => return Err(error),
        }
        let is_all = rest == Rest::None && (text.len() as u64) < limit;
        Ok(Head { text: text.into(), is_all })
    };
    run_blocking(file, decompressing).await?.map_err(|error| codec.error(file, error))
}

/// Whether a file has more bytes than those given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    Follows,
    None,
}

/// Decompresses a file block by block. Memory is bounded by one block, one fetch, and the codec's window
/// (at most 128 MiB, the limit of zstd).
pub(crate) struct Decompressor {
    file: String,
    codec: Codec,
    /// Absent after an error.
    decoder: Option<Box<dyn Read + Send>>,
    /// Bytes of text left to skip.
    skip: u64,
}

impl Decompressor {
    /// Begins at byte `start` of the text of `file`, which has `size` bytes.
    pub async fn new(
        file: &Location,
        size: u64,
        codec: Codec,
        start: u64,
    ) -> Result<Self, DataError> {
        let compressed = FileReader::new(file, size);
        // Some decoders already read when they are created.
        let decoder = run_blocking(file.url(), move || codec.decoder(compressed)).await?;
        let decoder = decoder.map_err(|error| codec.error(file.url(), error))?;
        Ok(Self { file: file.url().to_owned(), codec, decoder: Some(decoder), skip: start })
    }

    /// Returns the next block of text; empty at its end.
    pub async fn next(&mut self) -> Result<Bytes, DataError> {
        loop {
            let mut block = self.step().await?;
            if block.is_empty() {
                return Ok(block);
            }
            let skipped = self.skip.min(block.len() as u64);
            self.skip -= skipped;
            block.advance(skipped as usize);
            if !block.is_empty() {
                return Ok(block);
            }
        }
    }

    async fn step(&mut self) -> Result<Bytes, DataError> {
        let Some(mut decoder) = self.decoder.take() else { return Ok(Bytes::new()) };
        let decompressing = move || {
            let mut block = Vec::new();
            decoder.by_ref().take(BLOCK_BYTES).read_to_end(&mut block)?;
            Ok((decoder, Bytes::from(block)))
        };
        let decompressed = run_blocking(&self.file, decompressing).await?;
        let (decoder, block) = decompressed.map_err(|error| self.codec.error(&self.file, error))?;
        self.decoder = Some(decoder);
        Ok(block)
    }
}

/// Runs a decoder on a blocking thread. Its panics become errors of the file.
async fn run_blocking<T: Send + 'static>(
    file: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, DataError> {
    blocking(work).await.map_err(|broken| DataError::broken(file, &broken))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use steadfast_store::ErrorKind;

    use super::*;

    /// The first bytes of a file, then a timeout.
    struct Interrupted(&'static [u8]);

    impl Read for Interrupted {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            match self.0.read(buffer)? {
                0 => Err(io::Error::other(StoreError::TimedOut {
                    url: "f".to_owned(),
                    operation: "reading",
                    limit: Duration::from_secs(1),
                })),
                count => Ok(count),
            }
        }
    }

    #[test]
    fn an_unreachable_store_is_not_reported_as_a_damaged_file() {
        let beginnings: [(Codec, &[u8]); 3] = [
            (Codec::Gzip, b"\x1f\x8b\x08\0\0\0\0\0\0\x03"),
            (Codec::Zstd, b"\x28\xb5\x2f\xfd\0"),
            (Codec::Bzip2, b"BZh91AY&SY"),
        ];
        for (codec, beginning) in beginnings {
            assert_eq!(Codec::detect(beginning), Some(codec));
            for count in [0, 4, beginning.len()] {
                let compressed = io::BufReader::new(Interrupted(&beginning[..count]));
                let mut text = Vec::new();
                let decoded =
                    codec.decoder(compressed).and_then(|mut it| it.read_to_end(&mut text));
                let error = codec.error("f", decoded.unwrap_err());
                assert_eq!(error.kind(), ErrorKind::Transient, "{error}");
            }
        }
    }
}
