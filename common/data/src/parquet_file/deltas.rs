//! Finds columns that no reader decodes: some writers store differences of more than 32 bits for integers of 32 bits,
//! which the format does not allow.

use std::sync::Arc;

use parquet::basic::{ConvertedType, Encoding};
use parquet::column::reader::{ColumnReader, get_column_reader};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::file::statistics::Statistics;

use super::pages::CheckedPages;
use super::source::Source;

/// Rows decoded at a time.
const BATCH_ROWS: usize = 1024;
/// Parts of the decoder's errors.
const REFUSED: [&str; 2] = ["'min_delta' too large", "Invalid delta bit width"];

/// Returns the first of `leaves` with such differences. Only columns that may have them are decoded, which is seldom.
pub(super) fn first_too_wide(
    source: &Source,
    metadata: &ParquetMetaData,
    leaves: &[usize],
) -> Result<Option<usize>, ParquetError> {
    for group in metadata.row_groups() {
        for leaf in leaves {
            let (column, rows) = (group.column(*leaf), usize::try_from(group.num_rows())?);
            if !may_be_too_wide(column) {
                continue;
            }
            match decode(source, column, rows) {
                Err(error) if REFUSED.iter().any(|part| error.to_string().contains(part)) => {
                    return Ok(Some(*leaf));
                }
                decoded => decoded?,
            }
        }
    }
    Ok(None)
}

/// Returns whether a column stores differences, and its smallest and largest value are unknown or so far apart that a
/// difference may have 33 bits.
fn may_be_too_wide(column: &ColumnChunkMetaData) -> bool {
    if !column.encodings().any(|encoding| encoding == Encoding::DELTA_BINARY_PACKED) {
        return false;
    }
    let Some(Statistics::Int32(known)) = column.statistics() else {
        return column.column_type() == parquet::basic::Type::INT32;
    };
    let number = |value: &i32| match column.column_descr().converted_type() {
        ConvertedType::UINT_32 => i64::from(*value as u32),
        _ => i64::from(*value),
    };
    match (known.min_opt().map(number), known.max_opt().map(number)) {
        (Some(min), Some(max)) => i64::from(i32::MAX) < max - min,
        _ => true,
    }
}

fn decode(source: &Source, column: &ColumnChunkMetaData, rows: usize) -> Result<(), ParquetError> {
    let is_list = 0 < column.column_descr().max_rep_level();
    let pages = SerializedPageReader::new(Arc::new(source.clone()), column, rows, None)?;
    let pages = Box::new(CheckedPages { pages, is_list });
    let ColumnReader::Int32ColumnReader(mut reader) =
        get_column_reader(column.column_descr_ptr(), pages)
    else {
        return Ok(());
    };
    let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        values.clear();
        definitions.clear();
        repetitions.clear();
        let (found, ..) = reader.read_records(
            BATCH_ROWS,
            Some(&mut definitions),
            Some(&mut repetitions),
            &mut values,
        )?;
        if found == 0 {
            return Ok(());
        }
    }
}
