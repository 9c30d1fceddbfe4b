//! Parses the text of a chunk into numbers.

use std::borrow::Cow;

use steadfast_common::job::dataset::{Chunk, ReadOptions, Records};

use super::{Beginning, Dialect, Layout};
use crate::error::DataError;
use crate::read::{Conversion, Wanted};
use crate::values::{Builder, Classes, EMPTY, Value, parse};

/// Parses `bytes`, the text of `chunk`.
pub(crate) fn decode(
    bytes: &[u8],
    file: &str,
    chunk: Chunk,
    dialect: Dialect,
    layout: &Layout,
    options: &ReadOptions,
) -> Result<Records, DataError> {
    let wanted = Wanted::find(options, &layout.columns, file)?;
    let mut records = Records { width: wanted.features.len(), ..Records::default() };
    let mut builders = Builder::all(options);
    let of_features = Conversion::of_features(options);
    let classes = Classes::of(options);
    let mut reader = dialect.reader(bytes, Beginning::at(chunk.start));
    let mut fields = csv::ByteRecord::new();
    let mut record = chunk.first_record;
    loop {
        let more = reader
            .read_byte_record(&mut fields)
            .map_err(|error| DataError::bad_file(file, error.to_string()))?;
        if !more {
            break;
        }
        if fields.len() != layout.columns.len() {
            let (expected, found) = (layout.columns.len(), fields.len());
            return Err(DataError::bad_file(
                file,
                format!(
                    "record {record} has {found} fields instead of {expected}; has it changed?"
                ),
            ));
        }
        let located = |column: usize, reason| DataError::BadRecord {
            file: file.to_owned(),
            record,
            column: layout.columns[column].clone(),
            reason,
        };
        let number = |column: usize, conversion| {
            number(&fields[column], conversion).map_err(|reason| located(column, reason))
        };
        for &column in &wanted.features {
            records.features.push(number(column, of_features)?);
        }
        if let Some(label) = wanted.label {
            let field = Value::Bytes(Cow::Borrowed(&fields[label]));
            let class = |classes: &Classes| classes.index(&field).map_err(|it| located(label, it));
            let number = || number(label, Conversion::Plain);
            records.labels.push(classes.as_ref().map_or_else(number, class)?);
        }
        if let Some(weight) = wanted.weight {
            records.weights.push(number(weight, Conversion::Weight)?);
        }
        for (builder, &column) in builders.iter_mut().zip(&wanted.columns) {
            let field = Value::Bytes(Cow::Borrowed(&fields[column]));
            builder.push(&field).map_err(|reason| located(column, reason))?;
        }
        record += 1;
    }
    records.columns = builders.into_iter().map(Builder::finish).collect();
    Ok(records)
}

fn number(field: &[u8], conversion: Conversion) -> Result<f32, String> {
    let text = std::str::from_utf8(field).map_err(|_| "it is not UTF-8".to_owned())?;
    let value = if text.trim().is_empty() { None } else { Some(parse(text)?) };
    conversion.convert(value, EMPTY)
}

#[cfg(test)]
mod tests {
    use steadfast_common::job::spec::Transform;

    use super::*;

    fn number(field: &[u8], scale: f32) -> Result<f32, String> {
        let transform = Transform::None;
        super::number(field, Conversion::Feature { missing: None, transform, scale })
    }

    #[test]
    fn only_finite_numbers_and_truth_values_are_numbers() {
        assert_eq!(number(b" 1.5 ", 2.0), Ok(3.0));
        assert_eq!(number(b"-2e3", 1.0), Ok(-2000.0));
        assert_eq!(number(b"true", 1.0), Ok(1.0));
        for bad in ["", " ", "x", "1,5", "NaN", "inf", "1e300", "1e-", "0x10", "null"] {
            assert!(number(bad.as_bytes(), 1.0).is_err(), "{bad}");
        }
        assert!(number(b"\xff", 1.0).is_err());
        assert!(number(b"3e38", 2.0).is_err());
        let lines = number(b"2,3\r\n4,5", 1.0).unwrap_err();
        assert_eq!(lines, "a field of several lines begins with `2,3`; is a quote not closed?");
        assert!(number("ä".repeat(100).as_bytes(), 1.0).unwrap_err().len() < 150);
    }
}
