//! CSV and TSV files: the locations of their records, and the numbers in them.

mod compressed;
mod decode;
mod quotes;
mod scan;

use std::io::Read;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use steadfast_common::job::columns::{ColumnType, Element};
use steadfast_common::job::dataset::ReadOptions;
use steadfast_common::job::spec::{DataFormat, DatasetSpec, Header};
use steadfast_store::Location;

use crate::columns::{Column, Content};
use crate::error::DataError;
use crate::format;
use crate::values::Inference;
use compressed::{Decompressor, Head, Rest};

pub(crate) use compressed::Codec;
pub(crate) use decode::decode;
pub(crate) use scan::scan;

/// Size of the blocks in which a text is scanned.
const BLOCK_BYTES: u64 = 1024 * 1024;
/// Bytes fetched to read the first line; more if it is longer.
const HEAD_BYTES: u64 = 64 * 1024;
/// The longest record that is accepted.
pub(crate) const RECORD_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Where a text begins. A byte-order mark is one only at the start of a file; later it is a character of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beginning {
    OfFile,
    Within,
}

impl Beginning {
    /// Returns the place of the text that begins at byte `start` of a file.
    fn at(start: u64) -> Self {
        if start == 0 { Self::OfFile } else { Self::Within }
    }

    /// Returns a blank line to put before a text within a file, after which parsers take a byte-order mark for content.
    /// It is empty at the start of a file.
    fn blank_line(self) -> &'static [u8] {
        match self {
            Self::OfFile => b"",
            Self::Within => b"\n",
        }
    }
}

/// The format of fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dialect {
    pub delimiter: u8,
    pub header: Header,
}

impl Dialect {
    /// Returns the dialect of a job's files; `None` for other formats.
    pub fn of_spec(spec: &DatasetSpec) -> Option<Self> {
        Self::new(spec.format, spec.header)
    }

    /// Returns the dialect that the planner used; `None` for other formats.
    pub fn of_options(options: &ReadOptions) -> Option<Self> {
        let header = if options.has_header { Header::Present } else { Header::Absent };
        Self::new(options.format, header)
    }

    fn new(format: DataFormat, header: Header) -> Option<Self> {
        match format {
            DataFormat::Parquet
            | DataFormat::Jsonl
            | DataFormat::Tfrecord
            | DataFormat::Libsvm
            | DataFormat::Webdataset => None,
            DataFormat::Csv => Some(Self { delimiter: b',', header }),
            DataFormat::Tsv => Some(Self { delimiter: b'\t', header }),
        }
    }

    /// Returns the name of a file's first record, for messages.
    fn first_record(&self) -> &'static str {
        match self.header {
            Header::Present => "the header",
            Header::Absent => "record 0",
        }
    }

    /// Creates a parser of records with any number of fields; a header is a record like others.
    fn reader<'a>(&self, bytes: &'a [u8], beginning: Beginning) -> csv::Reader<impl Read + 'a> {
        csv::ReaderBuilder::new()
            .delimiter(self.delimiter)
            .has_headers(false)
            .flexible(true)
            .from_reader(beginning.blank_line().chain(bytes))
    }

    /// Creates a parser of the same dialect that works in blocks and without the content of fields.
    fn parser(&self, beginning: Beginning) -> csv_core::Reader {
        let mut parser = csv_core::ReaderBuilder::new().delimiter(self.delimiter).build();
        match beginning {
            Beginning::OfFile => {}
            Beginning::Within => {
                parser.read_record(beginning.blank_line(), &mut [0], &mut [0]);
                parser.set_line(1);
            }
        }
        parser
    }
}

/// The structure of a file, from its first record.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layout {
    pub columns: Vec<String>,
    /// The types that the first records suggest, by column.
    inferred: Vec<Inference>,
    /// The byte offset after the header.
    pub data_start: u64,
    /// The line of `data_start`, from 1.
    pub data_line: u64,
    /// The compression of the file. All positions refer to the decompressed text.
    pub codec: Option<Codec>,
}

impl Layout {
    /// Returns the columns to choose from. Whether they hold numbers is known only when they are read.
    pub fn choices(&self) -> Vec<Column> {
        let column = |(name, inference): (&String, &Inference)| {
            let content = match inference.finish() {
                Content::Typed(kind) => Content::Text(kind),
                Content::Ambiguous(found, shape) => Content::Ambiguous(found, shape),
                Content::Text(_) | Content::Unknown(_) | Content::Other(_) => {
                    Content::Text(ColumnType::one(Element::Text))
                }
            };
            Column { name: name.clone(), content }
        };
        self.columns.iter().zip(&self.inferred).map(column).collect()
    }
}

/// Reads the first record of the file, and no more than needed.
///
/// A file without records has no columns, which is an error if the job expects a header.
pub(crate) async fn layout(
    file: &Location,
    size: u64,
    dialect: Dialect,
) -> Result<Layout, DataError> {
    let mut wanted = HEAD_BYTES;
    loop {
        let bytes = file.read_range(0..size.min(wanted)).await?;
        let codec = Codec::detect(&bytes);
        let rest = if wanted < size { Rest::Follows } else { Rest::None };
        let Head { text: head, is_all } = match codec {
            Some(codec) => compressed::head(codec, file.url(), bytes, rest, wanted).await?,
            None => Head { text: bytes, is_all: rest == Rest::None },
        };
        format::expect_text(file.url(), &head)?;
        let mut reader = dialect.reader(&head, Beginning::OfFile);
        let mut first = csv::ByteRecord::new();
        let found = reader
            .read_byte_record(&mut first)
            .map_err(|error| DataError::bad_file(file.url(), error.to_string()))?;
        let end = reader.position().byte();
        if end >= head.len() as u64 {
            if !is_all && wanted < RECORD_BYTES_MAX {
                wanted *= 4;
                continue;
            }
            if let Some(quote) = quotes::open(dialect, &head, Beginning::OfFile) {
                return Err(DataError::UnclosedQuote {
                    file: file.url().to_owned(),
                    place: dialect.first_record().to_owned(),
                    line: 1 + quotes::lines(&head[..quote]),
                });
            }
            if !is_all {
                return Err(DataError::bad_file(
                    file.url(),
                    "its first line does not end; is it a text file?",
                ));
            }
        }
        if first.len() == 1 {
            format::expect_separator(file.url(), dialect.delimiter, &first[0])?;
        }
        return match dialect.header {
            Header::Present if !found => {
                Err(DataError::bad_file(file.url(), "it is empty, without even a header"))
            }
            Header::Present => {
                // The parser has not consumed the second byte of the line end `\r\n`.
                let line_end_is_split = head.get(end as usize - 1) == Some(&b'\r')
                    && head.get(end as usize) == Some(&b'\n');
                let data_start = end + u64::from(line_end_is_split);
                let data_line = 1 + quotes::lines(&head[..data_start as usize]);
                let columns = names(&first, file)?;
                let records = &head[data_start as usize..];
                let beginning = Beginning::at(data_start);
                let inferred = inferred(dialect, records, beginning, is_all, columns.len());
                Ok(Layout { columns, inferred, data_start, data_line, codec })
            }
            Header::Absent => {
                let columns = (0..first.len()).map(|index| index.to_string()).collect();
                let inferred = inferred(dialect, &head, Beginning::OfFile, is_all, first.len());
                Ok(Layout { columns, inferred, data_start: 0, data_line: 1, codec })
            }
        };
    }
}

/// Reads a byte range of the file's text.
pub(crate) async fn range(
    file: &Location,
    size: u64,
    codec: Option<Codec>,
    range: Range<u64>,
) -> Result<Bytes, DataError> {
    let Some(codec) = codec else { return Ok(file.read_range(range).await?) };
    let length = range.end.saturating_sub(range.start);
    let mut text = BytesMut::new();
    let mut decompressor = Decompressor::new(file, size, codec, range.start).await?;
    while (text.len() as u64) < length {
        let block = decompressor.next().await?;
        if block.is_empty() {
            let Range { start, end } = range;
            let reason = format!("its text has no bytes {start}..{end}; has it changed?");
            return Err(DataError::bad_file(file.url(), reason));
        }
        let missing = (length - text.len() as u64).min(block.len() as u64);
        text.extend_from_slice(&block[..missing as usize]);
    }
    Ok(text.freeze())
}

/// The text of a file, block by block.
enum Blocks<'a> {
    Plain { file: &'a Location, size: u64, position: u64 },
    Compressed(Decompressor),
}

impl<'a> Blocks<'a> {
    /// Begins at byte `start` of the text.
    async fn new(
        file: &'a Location,
        size: u64,
        codec: Option<Codec>,
        start: u64,
    ) -> Result<Self, DataError> {
        Ok(match codec {
            None => Self::Plain { file, size, position: start },
            Some(codec) => Self::Compressed(Decompressor::new(file, size, codec, start).await?),
        })
    }

    /// Returns the next block; empty at the end.
    async fn next(&mut self) -> Result<Bytes, DataError> {
        match self {
            Self::Plain { file, size, position } => {
                let start = *position;
                *position = (*size).min(start.saturating_add(BLOCK_BYTES));
                Ok(file.read_range(start..*position).await?)
            }
            Self::Compressed(decompressor) => decompressor.next().await,
        }
    }
}

/// Derives the types of columns from the records at the beginning of a file. If `is_all` is false, more text follows,
/// and the last record, which may be truncated, is left out.
fn inferred(
    dialect: Dialect,
    text: &[u8],
    beginning: Beginning,
    is_all: bool,
    columns: usize,
) -> Vec<Inference> {
    let mut inferred = vec![Inference::default(); columns];
    let mut reader = dialect.reader(text, beginning);
    let end = (beginning.blank_line().len() + text.len()) as u64;
    let mut fields = csv::ByteRecord::new();
    // The last record may be truncated, or damaged, which the scan reports.
    while reader.read_byte_record(&mut fields).unwrap_or(false) {
        if !is_all && reader.position().byte() >= end {
            break;
        }
        for (inference, field) in inferred.iter_mut().zip(&fields) {
            inference.add_text(&String::from_utf8_lossy(field));
        }
    }
    inferred
}

fn names(header: &csv::ByteRecord, file: &Location) -> Result<Vec<String>, DataError> {
    header
        .iter()
        .map(|name| {
            let name = std::str::from_utf8(name)
                .map_err(|_| DataError::bad_file(file.url(), "its header is not UTF-8"))?;
            Ok(name.trim().to_owned())
        })
        .collect()
}
