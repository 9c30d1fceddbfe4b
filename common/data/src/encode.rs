//! Encodes records as files of a format.

mod delimited;
mod json;
mod parquet;

use std::fmt::Display;

use serde::{Serialize, Serializer};
use steadfast_common::job::columns::{Column, ColumnSpec, Element, Shape, Values};
use steadfast_common::job::spec::DataFormat;

use crate::error::DataError;
use crate::rows::encode_example;
use crate::text::RECORD_BYTES_MAX;
use delimited::Delimited;
use parquet::ParquetEncoder;

/// A file that is being written.
pub(crate) enum Encoder {
    Parquet(Box<ParquetEncoder>),
    Delimited(Delimited),
    Jsonl,
    Tfrecord,
}

impl Encoder {
    /// Begins a file with these columns.
    ///
    /// # Errors
    /// If the format cannot hold one of them, or cannot be written.
    pub fn new(format: DataFormat, columns: &[ColumnSpec]) -> Result<Self, DataError> {
        for column in columns {
            check(format, column)?;
        }
        match format {
            DataFormat::Parquet => ParquetEncoder::new(columns).map(Box::new).map(Self::Parquet),
            DataFormat::Csv => Delimited::new(b',', columns).map(Self::Delimited),
            DataFormat::Tsv => Delimited::new(b'\t', columns).map(Self::Delimited),
            DataFormat::Jsonl => Ok(Self::Jsonl),
            DataFormat::Tfrecord => Ok(Self::Tfrecord),
            DataFormat::Libsvm => Err(DataError::ReadOnly { format: "LibSVM" }),
            DataFormat::Webdataset => Err(DataError::ReadOnly { format: "WebDataset" }),
        }
    }

    /// Appends records; returns the bytes that are complete.
    pub fn push(&mut self, columns: &[Column]) -> Result<Vec<u8>, DataError> {
        let records = columns.first().map_or(0, Column::len);
        let mut bytes = Vec::new();
        match self {
            Self::Parquet(file) => return file.push(columns),
            Self::Delimited(file) => {
                for record in 0..records {
                    within_limit(&mut bytes, |bytes| file.push(columns, record, bytes))?;
                }
            }
            Self::Jsonl => {
                for record in 0..records {
                    within_limit(&mut bytes, |bytes| json::push(columns, record, bytes))?;
                }
            }
            Self::Tfrecord => {
                for record in 0..records {
                    within_limit(&mut bytes, |bytes| {
                        encode_example(columns, record, bytes);
                        Ok(())
                    })?;
                }
            }
        }
        Ok(bytes)
    }

    /// Returns the rest of the file.
    pub fn finish(self) -> Result<Vec<u8>, DataError> {
        match self {
            Self::Parquet(file) => file.finish(),
            // A file without records still has its header.
            Self::Delimited(file) => Ok(file.finish()),
            Self::Jsonl | Self::Tfrecord => Ok(Vec::new()),
        }
    }
}

/// Appends one record, and checks that readers accept its size.
fn within_limit(
    bytes: &mut Vec<u8>,
    push: impl FnOnce(&mut Vec<u8>) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let before = bytes.len();
    push(bytes)?;
    match (bytes.len() - before) as u64 {
        size if RECORD_BYTES_MAX < size => Err(DataError::Encoding {
            reason: format!(
                "a record has {size} bytes, more than {RECORD_BYTES_MAX}: write Parquet"
            ),
        }),
        _ => Ok(()),
    }
}

/// Checks that a format has a place for all values of a column.
fn check(format: DataFormat, column: &ColumnSpec) -> Result<(), DataError> {
    const AS_TEXT: &str = "read it as `text` if it is UTF-8, or write Parquet or TFRecord";
    const OTHER: &str = "write Parquet or JSON lines";
    let (element, shape) = (column.kind.element, column.kind.shape);
    let refused = |format, way_out| {
        let (column, kind) = (column.name.clone(), column.kind);
        Err(DataError::CannotHold { column, kind, format, way_out })
    };
    match format {
        DataFormat::Csv | DataFormat::Tsv => match (element, shape) {
            _ if column.name.trim() != column.name => {
                refused("CSV or TSV with spaces around the name, which readers remove", OTHER)
            }
            (_, Shape::Fixed(_) | Shape::List) => refused("CSV or TSV", OTHER),
            (Element::Bytes, Shape::One) => refused("CSV or TSV", AS_TEXT),
            _ => Ok(()),
        },
        DataFormat::Jsonl if element == Element::Bytes => refused("JSON lines", AS_TEXT),
        DataFormat::Tfrecord if element == Element::Uint64 => refused(
            "TFRecord",
            "read it as `int64` if all values fit, or write Parquet or JSON lines",
        ),
        DataFormat::Tfrecord if element == Element::Float64 => refused(
            "TFRecord",
            "read it as `float32`, which rounds it, or write Parquet or JSON lines",
        ),
        DataFormat::Jsonl
        | DataFormat::Tfrecord
        | DataFormat::Parquet
        | DataFormat::Libsvm
        | DataFormat::Webdataset => Ok(()),
    }
}

/// A value of one record, or an element of its list.
enum Cell<'a> {
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float32(f32),
    Float64(f64),
    Text(&'a str),
}

impl Cell<'_> {
    /// Returns the number at `index` of the column's values; for text, the whole text of `record`.
    fn of(column: &Column, record: usize, index: usize) -> Cell<'_> {
        match &column.values {
            Values::Bool(values) => Cell::Bool(values[index]),
            Values::Uint8(values) => Cell::Unsigned(values[index].into()),
            Values::Int64(values) => Cell::Signed(values[index]),
            Values::Uint64(values) => Cell::Unsigned(values[index]),
            Values::Float32(values) => Cell::Float32(values[index]),
            Values::Float64(values) => Cell::Float64(values[index]),
            Values::Text(values) | Values::Bytes(values) => {
                let text = std::str::from_utf8(&values[column.elements_of(record)]);
                Cell::Text(text.expect("text columns are UTF-8, and bytes were refused"))
            }
        }
    }
}

/// Returns whether the shortest text of a 32-bit float is read as the same float by readers that parse numbers as
/// 64-bit floats first.
fn is_shortest_exact(value: f32) -> bool {
    format!("{value:?}").parse::<f64>().is_ok_and(|parsed| parsed as f32 == value)
}

impl Serialize for Cell<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Bool(value) => to.serialize_bool(value),
            Self::Unsigned(value) => to.serialize_u64(value),
            Self::Signed(value) => to.serialize_i64(value),
            Self::Float32(value) if is_shortest_exact(value) => to.serialize_f32(value),
            Self::Float32(value) => to.serialize_f64(value.into()),
            Self::Float64(value) => to.serialize_f64(value),
            Self::Text(value) => to.serialize_str(value),
        }
    }
}

fn failed(error: impl Display) -> DataError {
    DataError::Encoding { reason: error.to_string() }
}
