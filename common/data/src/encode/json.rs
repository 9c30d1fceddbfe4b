//! JSON lines: one object in each line.

use serde::ser::{SerializeMap, Serializer};
use steadfast_common::job::columns::{Column, Shape};

use super::{Cell, failed};
use crate::error::DataError;

/// Appends a record to `bytes` as an object and a line feed.
pub(super) fn push(
    columns: &[Column],
    record: usize,
    bytes: &mut Vec<u8>,
) -> Result<(), DataError> {
    write(columns, record, bytes).map_err(failed)?;
    bytes.push(b'\n');
    Ok(())
}

fn write(columns: &[Column], record: usize, bytes: &mut Vec<u8>) -> serde_json::Result<()> {
    let mut json = serde_json::Serializer::new(bytes);
    let mut object = json.serialize_map(Some(columns.len()))?;
    for column in columns {
        let elements = column.elements_of(record);
        match column.shape {
            Shape::One => {
                object.serialize_entry(&column.name, &Cell::of(column, record, elements.start))?;
            }
            Shape::Fixed(_) | Shape::List => {
                let list: Vec<Cell> =
                    elements.map(|index| Cell::of(column, record, index)).collect();
                object.serialize_entry(&column.name, &list)?;
            }
        }
    }
    object.end()
}
