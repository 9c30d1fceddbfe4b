//! CSV and TSV files: where their records lie, and what numbers they hold.

mod decode;
mod scan;

use steadfast_common::dataset::ReadOptions;
use steadfast_common::spec::{DataFormat, DatasetSpec, Header};
use steadfast_store::Location;

use crate::columns::{Column, Content};
use crate::error::DataError;

pub(crate) use decode::decode;
pub(crate) use scan::scan;

/// Bytes fetched to see the first line; more only if it is longer.
const HEAD_BYTES: u64 = 64 * 1024;
/// The longest record that is read at all. One that is longer has a quote that is never closed.
pub(crate) const RECORD_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// How fields are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dialect {
    pub delimiter: u8,
    pub header: Header,
}

impl Dialect {
    /// The way of a job's files; `None` for Parquet.
    pub fn of_spec(spec: &DatasetSpec) -> Option<Self> {
        Self::new(spec.format, spec.header)
    }

    /// The way in which the planner saw the files; `None` for Parquet.
    pub fn of_options(options: &ReadOptions) -> Option<Self> {
        let header = if options.has_header { Header::Present } else { Header::Absent };
        Self::new(options.format, header)
    }

    fn new(format: DataFormat, header: Header) -> Option<Self> {
        match format {
            DataFormat::Parquet => None,
            DataFormat::Csv => Some(Self { delimiter: b',', header }),
            DataFormat::Tsv => Some(Self { delimiter: b'\t', header }),
        }
    }

    /// Parses `bytes`, records of any number of fields, none of them a header.
    fn reader<'a>(&self, bytes: &'a [u8]) -> csv::Reader<&'a [u8]> {
        csv::ReaderBuilder::new()
            .delimiter(self.delimiter)
            .has_headers(false)
            .flexible(true)
            .from_reader(bytes)
    }
}

/// What the first record of a file says about all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    pub columns: Vec<String>,
    /// The byte after the header.
    pub data_start: u64,
    /// The line on which `data_start` lies, from 1.
    pub data_line: u64,
}

impl Layout {
    /// The columns for choosing among them; only reading tells whether they hold numbers.
    pub fn choices(&self) -> Vec<Column> {
        let column = |name: &String| Column { name: name.clone(), content: Content::Text };
        self.columns.iter().map(column).collect()
    }
}

/// Reads the first record of the file and no more of it than needed.
///
/// A file without any record has no columns, which is only fine if no header was promised.
pub(crate) async fn layout(
    file: &Location,
    size: u64,
    dialect: Dialect,
) -> Result<Layout, DataError> {
    let mut wanted = HEAD_BYTES;
    loop {
        let head = file.read_range(0..size.min(wanted)).await?;
        let mut reader = dialect.reader(&head);
        let mut first = csv::ByteRecord::new();
        let found = reader
            .read_byte_record(&mut first)
            .map_err(|error| DataError::bad_file(file.url(), error.to_string()))?;
        let end = reader.position().byte();
        if end >= head.len() as u64 && wanted < size {
            if wanted >= RECORD_BYTES_MAX {
                return Err(DataError::bad_file(
                    file.url(),
                    "its first line does not end; is it a text file, and are its quotes closed?",
                ));
            }
            wanted *= 4;
            continue;
        }
        return match dialect.header {
            Header::Present if !found => {
                Err(DataError::bad_file(file.url(), "it is empty, without even a header"))
            }
            Header::Present => {
                // The parser has not seen yet the second half of the line end `\r\n`.
                let line_end_is_split = head.get(end as usize - 1) == Some(&b'\r')
                    && head.get(end as usize) == Some(&b'\n');
                let data_start = end + u64::from(line_end_is_split);
                let newlines = head[..data_start as usize].iter().filter(|b| **b == b'\n').count();
                let columns = names(&first, file)?;
                Ok(Layout { columns, data_start, data_line: 1 + newlines as u64 })
            }
            Header::Absent => {
                let columns = (0..first.len()).map(|index| index.to_string()).collect();
                Ok(Layout { columns, data_start: 0, data_line: 1 })
            }
        };
    }
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
