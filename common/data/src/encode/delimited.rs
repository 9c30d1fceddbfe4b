//! CSV and TSV: a header with the names of the columns, and a line for each record.

use steadfast_common::job::columns::{Column, ColumnSpec};

use super::{Cell, failed};
use crate::error::DataError;

/// A file that is being written.
pub(crate) struct Delimited {
    delimiter: u8,
    /// The header, until it is written.
    header: Vec<u8>,
}

impl Delimited {
    pub fn new(delimiter: u8, columns: &[ColumnSpec]) -> Result<Self, DataError> {
        let mut this = Self { delimiter, header: Vec::new() };
        let mut header = Vec::new();
        this.line(&mut header, |csv| csv.write_record(columns.iter().map(|column| &column.name)))?;
        this.header = header;
        Ok(this)
    }

    /// Appends a record to `bytes`, with the header before the first record.
    pub fn push(
        &mut self,
        columns: &[Column],
        record: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        bytes.append(&mut self.header);
        self.line(bytes, |csv| {
            for column in columns {
                let cell = Cell::of(column, record, column.elements_of(record).start);
                csv.write_field(field(&cell))?;
            }
            csv.write_record(None::<&[u8]>)
        })
    }

    pub fn finish(self) -> Vec<u8> {
        self.header
    }

    fn line(
        &self,
        bytes: &mut Vec<u8>,
        write: impl FnOnce(&mut csv::Writer<&mut Vec<u8>>) -> csv::Result<()>,
    ) -> Result<(), DataError> {
        let mut csv = csv::WriterBuilder::new()
            .delimiter(self.delimiter)
            .buffer_capacity(1 << 10)
            .from_writer(bytes);
        write(&mut csv).map_err(failed)?;
        csv.flush().map_err(failed)
    }
}

fn field(cell: &Cell) -> String {
    match cell {
        Cell::Bool(value) => value.to_string(),
        Cell::Unsigned(value) => value.to_string(),
        Cell::Signed(value) => value.to_string(),
        Cell::Float32(value) if super::is_shortest_exact(*value) => format!("{value:?}"),
        Cell::Float32(value) => format!("{:?}", f64::from(*value)),
        Cell::Float64(value) => format!("{value:?}"),
        Cell::Text(text) => (*text).to_owned(),
    }
}
