//! Reads columns of any type: numbers, text, bytes, and lists of numbers.

use std::borrow::Cow;
use std::fmt::Display;

use num_bigint::BigInt;
use parquet::basic::{ConvertedType, LogicalType, Repetition};
use parquet::column::page::PageReader;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::DataType;
use parquet::errors::ParquetError;
use parquet::schema::types::{ColumnDescPtr, Type};

use super::numbers::{DECIMAL_BYTES_MAX, decimal, ended, float16};
use crate::values::{Builder, Value};

/// Appends the values of the next rows to a column. Fails if the file's column ends before; the inner error
/// is that of a row, counted from the first of the call.
pub(super) type Reader =
    Box<dyn FnMut(usize, &mut Builder) -> Result<Result<(), BadRow>, ParquetError>>;

/// A row whose value does not have the type of the column, and why.
pub(super) type BadRow = (usize, String);

/// Opens a column at row `first`. `root` is its top-level type.
pub(super) fn open(
    root: &Type,
    column: ColumnDescPtr,
    pages: Box<dyn PageReader>,
    first: usize,
) -> Result<Reader, ParquetError> {
    let levels = Levels::new(root, &column);
    let (converted, scale) = (column.converted_type(), column.type_scale());
    let logical = column.logical_type_ref().cloned();
    let is_decimal =
        converted == ConvertedType::DECIMAL || matches!(logical, Some(LogicalType::Decimal(_)));
    match get_column_reader(column, pages) {
        ColumnReader::BoolColumnReader(it) => read(it, first, levels, |it| Value::Bool(*it)),
        ColumnReader::Int32ColumnReader(it) => read(it, first, levels, move |it| {
            if is_decimal {
                return exact(it, scale);
            }
            Value::Int(match converted {
                ConvertedType::INT_8 => i64::from(*it as i8),
                ConvertedType::INT_16 => i64::from(*it as i16),
                ConvertedType::UINT_8 => i64::from(*it as u8),
                ConvertedType::UINT_16 => i64::from(*it as u16),
                ConvertedType::UINT_32 => i64::from(*it as u32),
                _ => i64::from(*it),
            })
        }),
        ColumnReader::Int64ColumnReader(it) => read(it, first, levels, move |it| match converted {
            _ if is_decimal => exact(it, scale),
            ConvertedType::UINT_64 if *it < 0 => Value::Uint(*it as u64),
            _ => Value::Int(*it),
        }),
        ColumnReader::FloatColumnReader(it) => read(it, first, levels, |it| Value::Float32(*it)),
        ColumnReader::DoubleColumnReader(it) => read(it, first, levels, |it| Value::Float(*it)),
        ColumnReader::ByteArrayColumnReader(it) => {
            read(it, first, levels, move |it| match is_decimal {
                true => long_exact(it.data(), scale),
                false => Value::Bytes(Cow::Borrowed(it.data())),
            })
        }
        ColumnReader::FixedLenByteArrayColumnReader(it) => {
            read(it, first, levels, move |it| match logical {
                Some(LogicalType::Float16) => Value::Float(float16(it.data())),
                _ if is_decimal => long_exact(it.data(), scale),
                _ => Value::Bytes(Cow::Borrowed(it.data())),
            })
        }
        ColumnReader::Int96ColumnReader(_) => {
            Err(ParquetError::General("a timestamp is no value of a column".to_owned()))
        }
    }
}

/// Converts a decimal without fractions to the integer that it is, which a float may not be. Other decimals become
/// floats.
fn exact(unscaled: impl Display, scale: i32) -> Value<'static> {
    match scale {
        0 => Value::written(unscaled.to_string()),
        _ => Value::Float(decimal(unscaled, scale)),
    }
}

fn long_exact(unscaled: &[u8], scale: i32) -> Value<'static> {
    match unscaled.len() {
        1..=DECIMAL_BYTES_MAX => exact(BigInt::from_signed_bytes_be(unscaled), scale),
        _ => Value::Float(f64::NAN),
    }
}

/// The definition levels of a column that distinguish its values.
#[derive(Clone, Copy)]
struct Levels {
    /// The level of a value that is present.
    value: i16,
    /// The level of an empty list; `None` for a column without lists.
    empty_list: Option<i16>,
}

impl Levels {
    fn new(root: &Type, column: &ColumnDescPtr) -> Self {
        let empty_list = (0 < column.max_rep_level()).then(|| above_repeated(root));
        Self { value: column.max_def_level(), empty_list }
    }
}

/// Counts the optional types above the repeated one.
fn above_repeated(mut at: &Type) -> i16 {
    let mut optional = 0;
    loop {
        match at.get_basic_info().repetition() {
            Repetition::REPEATED => return optional,
            Repetition::OPTIONAL => optional += 1,
            Repetition::REQUIRED => {}
        }
        match at {
            Type::GroupType { fields, .. } if !fields.is_empty() => at = &fields[0],
            _ => return optional,
        }
    }
}

fn read<T: DataType>(
    mut column: ColumnReaderImpl<T>,
    first: usize,
    levels: Levels,
    of: impl for<'a> Fn(&'a T::T) -> Value<'a> + 'static,
) -> Result<Reader, ParquetError> {
    if column.skip_records(first)? < first {
        return Err(ended());
    }
    let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    Ok(Box::new(move |rows, builder| {
        values.clear();
        definitions.clear();
        repetitions.clear();
        let (found, ..) = column.read_records(
            rows,
            Some(&mut definitions),
            Some(&mut repetitions),
            &mut values,
        )?;
        if found < rows {
            return Err(ended());
        }
        let mut present = values.iter().map(&of);
        let Some(empty_list) = levels.empty_list else {
            for row in 0..rows {
                let is_null = definitions.get(row).is_some_and(|level| *level < levels.value);
                let value = if is_null { None } else { present.next() };
                if let Err(reason) = builder.push(&value.unwrap_or(Value::Missing)) {
                    return Ok(Err((row, reason)));
                }
            }
            return Ok(Ok(()));
        };
        let (mut row, mut start) = (0, 0);
        while start < definitions.len() {
            // A list ends where the next one begins.
            let next = repetitions.iter().skip(start + 1).position(|level| *level == 0);
            let end = next.map_or(definitions.len(), |next| start + 1 + next);
            let value = match definitions[start] {
                level if level < empty_list => Value::Missing,
                level if level == empty_list => Value::List(Vec::new()),
                _ => Value::List(
                    definitions[start..end]
                        .iter()
                        .map(|level| match *level == levels.value {
                            true => present.next().unwrap_or(Value::Missing),
                            false => Value::Missing,
                        })
                        .collect(),
                ),
            };
            if let Err(reason) = builder.push(&value) {
                return Ok(Err((row, reason)));
            }
            (row, start) = (row + 1, end);
        }
        match row == rows {
            true => Ok(Ok(())),
            false => Err(ended()),
        }
    }))
}
