//! Reads numeric columns as 64-bit floats.

use std::fmt::Display;

use half::f16;
use num_bigint::BigInt;
use parquet::basic::{ConvertedType, LogicalType, Repetition, Type as PhysicalType};
use parquet::column::page::PageReader;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::DataType;
use parquet::errors::ParquetError;
use parquet::schema::types::{ColumnDescPtr, Type};

use crate::columns::Content;

/// Maximum size of a decimal, which has up to 76 digits. Converting much longer ones would take long.
const DECIMAL_BYTES_MAX: usize = 32;

/// Appends the next numbers of a column, each converted to the nearest float; nulls are `None`. Fails if
/// the column ends before.
pub(super) type Numbers = Box<dyn FnMut(usize, &mut Vec<Option<f64>>) -> Result<(), ParquetError>>;

/// The content of a top-level column, according to its type.
pub(super) fn content(column: &Type) -> Content {
    let info = column.get_basic_info();
    let other = |name: &str| Content::Other(name.to_owned());
    if info.repetition() == Repetition::REPEATED {
        return other("lists");
    }
    let converted = info.converted_type();
    if column.is_group() {
        return other(match converted {
            ConvertedType::LIST => "lists",
            ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE => "maps",
            _ => "nested columns",
        });
    }
    let physical = column.get_physical_type();
    match (info.logical_type_ref(), converted, physical) {
        (Some(LogicalType::Unknown), ..) => other("only nulls"),
        (Some(LogicalType::Timestamp(_)), ..)
        | (_, ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIMESTAMP_MICROS, _)
        | (_, _, PhysicalType::INT96) => other("timestamps"),
        (Some(LogicalType::Time(_)), ..)
        | (_, ConvertedType::TIME_MILLIS | ConvertedType::TIME_MICROS, _) => other("times of day"),
        (_, ConvertedType::DATE, _) => other("dates"),
        (_, ConvertedType::UTF8, _) => other("text"),
        (Some(LogicalType::Integer(_) | LogicalType::Decimal(_) | LogicalType::Float16), ..)
        | (None, ConvertedType::DECIMAL, _)
        | (
            None,
            _,
            PhysicalType::BOOLEAN
            | PhysicalType::INT32
            | PhysicalType::INT64
            | PhysicalType::FLOAT
            | PhysicalType::DOUBLE,
        ) => Content::Numbers,
        _ => other(&physical.to_string()),
    }
}

/// Opens a numeric column at row `first`.
pub(super) fn open(
    column: ColumnDescPtr,
    pages: Box<dyn PageReader>,
    first: usize,
) -> Result<Numbers, ParquetError> {
    let (converted, scale) = (column.converted_type(), column.type_scale());
    let float16 = column.logical_type_ref() == Some(&LogicalType::Float16);
    match get_column_reader(column, pages) {
        ColumnReader::BoolColumnReader(it) => numbers(it, first, |it| f64::from(u8::from(*it))),
        ColumnReader::Int32ColumnReader(it) => match converted {
            ConvertedType::DECIMAL => numbers(it, first, move |it| decimal(it, scale)),
            ConvertedType::INT_8 => numbers(it, first, |it| f64::from(*it as i8)),
            ConvertedType::INT_16 => numbers(it, first, |it| f64::from(*it as i16)),
            ConvertedType::UINT_8 => numbers(it, first, |it| f64::from(*it as u8)),
            ConvertedType::UINT_16 => numbers(it, first, |it| f64::from(*it as u16)),
            ConvertedType::UINT_32 => numbers(it, first, |it| f64::from(*it as u32)),
            _ => numbers(it, first, |it| f64::from(*it)),
        },
        ColumnReader::Int64ColumnReader(it) => match converted {
            ConvertedType::DECIMAL => numbers(it, first, move |it| decimal(it, scale)),
            ConvertedType::UINT_64 => numbers(it, first, |it| *it as u64 as f64),
            _ => numbers(it, first, |it| *it as f64),
        },
        ColumnReader::FloatColumnReader(it) => numbers(it, first, |it| f64::from(*it)),
        ColumnReader::DoubleColumnReader(it) => numbers(it, first, |it| *it),
        ColumnReader::ByteArrayColumnReader(it) => {
            numbers(it, first, move |it| long_decimal(it.data(), scale))
        }
        ColumnReader::FixedLenByteArrayColumnReader(it) if float16 => {
            numbers(it, first, |it| match it.data() {
                [low, high] => f16::from_le_bytes([*low, *high]).to_f64(),
                _ => f64::NAN,
            })
        }
        ColumnReader::FixedLenByteArrayColumnReader(it) => {
            numbers(it, first, move |it| long_decimal(it.data(), scale))
        }
        ColumnReader::Int96ColumnReader(_) => {
            Err(ParquetError::General("a timestamp is not a number".to_owned()))
        }
    }
}

fn numbers<T: DataType>(
    mut column: ColumnReaderImpl<T>,
    first: usize,
    as_float: impl Fn(&T::T) -> f64 + 'static,
) -> Result<Numbers, ParquetError> {
    let ended = || ParquetError::EOF("a column has fewer rows than its row group".to_owned());
    if column.skip_records(first)? < first {
        return Err(ended());
    }
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    Ok(Box::new(move |rows, numbers| {
        values.clear();
        levels.clear();
        let (found, ..) = column.read_records(rows, Some(&mut levels), None, &mut values)?;
        if found < rows {
            return Err(ended());
        }
        let mut floats = values.iter().map(&as_float);
        match levels.is_empty() {
            // The column is required, so it has no nulls.
            true => numbers.extend(floats.map(Some)),
            false => numbers.extend(levels.iter().map(|level| match level {
                1 => floats.next(),
                _ => None,
            })),
        }
        Ok(())
    }))
}

/// Converts an integer to the same number as the decimal's text would give in a text file.
fn decimal(unscaled: impl Display, scale: i32) -> f64 {
    format!("{unscaled}e-{scale}").parse().unwrap_or(f64::NAN)
}

fn long_decimal(unscaled: &[u8], scale: i32) -> f64 {
    match unscaled.len() {
        1..=DECIMAL_BYTES_MAX => decimal(BigInt::from_signed_bytes_be(unscaled), scale),
        _ => f64::NAN,
    }
}
