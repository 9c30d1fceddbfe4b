//! The types of columns; reads numeric ones as 64-bit floats.

use std::fmt::Display;

use half::f16;
use num_bigint::BigInt;
use parquet::basic::{ConvertedType, LogicalType, Repetition, Type as PhysicalType};
use parquet::column::page::PageReader;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::DataType;
use parquet::errors::ParquetError;
use parquet::schema::types::{ColumnDescPtr, Type};
use steadfast_common::job::columns::{ColumnType, Element};

use crate::columns::Content;

/// Maximum size of a decimal, which has up to 76 digits. Converting much longer ones would take long.
pub(super) const DECIMAL_BYTES_MAX: usize = 32;

/// Appends the next numbers of a column, each converted to the nearest float; nulls are `None`. Fails if
/// the column ends before.
pub(super) type Numbers = Box<dyn FnMut(usize, &mut Vec<Option<f64>>) -> Result<(), ParquetError>>;

/// Returns the content of a top-level column, according to its type.
pub(super) fn content(column: &Type) -> Content {
    let info = column.get_basic_info();
    let other = |name: &str| Content::Other(name.to_owned());
    let is_list = info.repetition() == Repetition::REPEATED
        || (column.is_group() && info.converted_type() == ConvertedType::LIST);
    if is_list {
        return match list_leaf(column).map(element) {
            Some(Ok(element)) if !element.is_string() => Content::Typed(ColumnType::list(element)),
            Some(Ok(_)) => other("lists of text"),
            Some(Err(found)) => Content::Other(format!("lists of {found}")),
            None => other("lists of nested values"),
        };
    }
    if column.is_group() {
        return other(match info.converted_type() {
            ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE => "maps",
            _ => "nested columns",
        });
    }
    element(column).map_or_else(Content::Other, |element| Content::Typed(ColumnType::one(element)))
}

/// Returns the type of a list's elements; `None` if these are nested.
fn list_leaf(column: &Type) -> Option<&Type> {
    let mut at = column;
    // The list, the repeated group, and the element; some writers leave out one.
    for _ in 0..3 {
        match at {
            Type::PrimitiveType { .. } => break,
            Type::GroupType { fields, .. } => match &fields[..] {
                [field] => at = field,
                _ => return None,
            },
        }
    }
    let repeated = {
        let (mut count, mut at) = (0, column);
        loop {
            count += u32::from(at.get_basic_info().repetition() == Repetition::REPEATED);
            match at {
                Type::GroupType { fields, .. } if fields.len() == 1 => at = &fields[0],
                _ => break count,
            }
        }
    };
    (at.is_primitive() && repeated == 1).then_some(at)
}

/// Returns the type of single values. The error describes values that cannot be read.
fn element(column: &Type) -> Result<Element, String> {
    let info = column.get_basic_info();
    let converted = info.converted_type();
    let physical = column.get_physical_type();
    let other = |name: &str| Err(name.to_owned());
    match (info.logical_type_ref(), converted, physical) {
        (Some(LogicalType::Unknown), ..) => other("only nulls"),
        (Some(LogicalType::Timestamp(_)), ..)
        | (_, ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIMESTAMP_MICROS, _)
        | (_, _, PhysicalType::INT96) => other("timestamps"),
        (Some(LogicalType::Time(_)), ..)
        | (_, ConvertedType::TIME_MILLIS | ConvertedType::TIME_MICROS, _) => other("times of day"),
        (_, ConvertedType::DATE, _) => other("dates"),
        (_, ConvertedType::INTERVAL, _) => other("intervals"),
        (_, ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON, _) => {
            Ok(Element::Text)
        }
        (Some(LogicalType::Decimal(_)), ..) | (_, ConvertedType::DECIMAL, _) => {
            Ok(if scale_of(column) == 0 { Element::Int64 } else { Element::Float64 })
        }
        (Some(LogicalType::Float16), ..) => Ok(Element::Float32),
        (_, ConvertedType::UINT_8, PhysicalType::INT32) => Ok(Element::Uint8),
        (_, _, PhysicalType::BOOLEAN) => Ok(Element::Bool),
        (_, _, PhysicalType::INT32 | PhysicalType::INT64) => Ok(Element::Int64),
        (_, _, PhysicalType::FLOAT) => Ok(Element::Float32),
        (_, _, PhysicalType::DOUBLE) => Ok(Element::Float64),
        (_, _, PhysicalType::BYTE_ARRAY | PhysicalType::FIXED_LEN_BYTE_ARRAY) => Ok(Element::Bytes),
    }
}

/// Returns the number of decimal places of a decimal.
fn scale_of(column: &Type) -> i32 {
    match column {
        Type::PrimitiveType { scale, .. } => *scale,
        Type::GroupType { .. } => 0,
    }
}

/// Opens a numeric column at row `first`.
pub(super) fn open(
    column: ColumnDescPtr,
    pages: Box<dyn PageReader>,
    first: usize,
) -> Result<Numbers, ParquetError> {
    let (converted, scale) = (column.converted_type(), column.type_scale());
    let is_float16 = column.logical_type_ref() == Some(&LogicalType::Float16);
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
        ColumnReader::FixedLenByteArrayColumnReader(it) if is_float16 => {
            numbers(it, first, |it| float16(it.data()))
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

pub(super) fn ended() -> ParquetError {
    ParquetError::EOF("a column has fewer rows than its row group".to_owned())
}

/// Converts the bytes of a 16-bit float; returns NaN if there are more or fewer than two.
pub(super) fn float16(bytes: &[u8]) -> f64 {
    match bytes {
        [low, high] => f16::from_le_bytes([*low, *high]).to_f64(),
        _ => f64::NAN,
    }
}

/// Converts an integer to the same number as the decimal's text would give in a text file.
pub(super) fn decimal(unscaled: impl Display, scale: i32) -> f64 {
    format!("{unscaled}e-{scale}").parse().unwrap_or(f64::NAN)
}

fn long_decimal(unscaled: &[u8], scale: i32) -> f64 {
    match unscaled.len() {
        1..=DECIMAL_BYTES_MAX => decimal(BigInt::from_signed_bytes_be(unscaled), scale),
        _ => f64::NAN,
    }
}
