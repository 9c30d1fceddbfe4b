//! Reads the records of a chunk from the columns of its row group.

use std::borrow::Cow;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::metadata::page_index::PageIndexProvider;
use parquet::file::serialized_reader::SerializedPageReader;
use steadfast_common::job::columns::{ColumnSpec, ColumnType, Element, Values};
use steadfast_common::job::dataset::{Chunk, ReadOptions, Records};

use super::numbers::{self, Numbers};
use super::pages::{self, CheckedPages};
use super::source::Source;
use super::values;
use crate::error::DataError;
use crate::read::{Conversion, Wanted};
use crate::values::{Builder, Classes, Large, NULL, Value};

/// Rows decoded at a time.
const BATCH_ROWS: usize = 1024;

/// The chunk being read.
pub(super) struct RowReader {
    pub file: String,
    pub metadata: Arc<ParquetMetaData>,
    pub group: usize,
    /// The columns, as leaves of the schema.
    pub wanted: Wanted,
    /// Whether the columns were fetched whole.
    pub is_prefetched: bool,
    pub chunk: Chunk,
    /// The first row of the chunk in its row group.
    pub first_row: usize,
    pub options: ReadOptions,
}

/// A column of the chunk.
struct Column<'a> {
    name: &'a str,
    conversion: Conversion,
    numbers: Numbers,
}

impl RowReader {
    /// Reads all records of the chunk.
    pub fn read(&self, source: &Source) -> Result<Records, DataError> {
        // The page index is not needed for columns that were fetched whole. A wrong index would combine
        // rows of one column with other rows of another, so it is checked before use.
        let index = match self.is_prefetched {
            true => None,
            false => pages::valid_index(
                source,
                &self.metadata,
                self.group,
                self.wanted.all().filter(|leaf| !self.is_list(*leaf)),
                self.first_row,
            ),
        };
        let open = |name, conversion, leaf| match self.open(source, index, leaf) {
            Ok(numbers) => Ok(Column { name, conversion, numbers }),
            Err(error) => Err(source.error(&error)),
        };
        let mut label = match (&self.options.label, self.wanted.label) {
            (Some(_), Some(_)) if self.wanted.has_text_label => None,
            (Some(name), Some(leaf)) => Some(open(name, Conversion::Plain, leaf)?),
            _ => {
                let columns = self.read_columns(source, index)?;
                return Ok(Records { columns, ..Records::default() });
            }
        };
        let of_features = Conversion::of_features(&self.options);
        let mut features = Vec::with_capacity(self.options.features.len());
        for (name, leaf) in self.options.features.iter().zip(&self.wanted.features) {
            features.push(open(name, of_features, *leaf)?);
        }
        let mut weight = match (&self.options.weight, self.wanted.weight) {
            (Some(name), Some(leaf)) => Some(open(name, Conversion::Weight, leaf)?),
            _ => None,
        };
        let width = features.len();
        let mut records = Records { width, ..Records::default() };
        let (total, classes) = (self.chunk.records as usize, Classes::of(&self.options));
        for first in (0..total).step_by(BATCH_ROWS) {
            let rows = BATCH_ROWS.min(total - first);
            if let Some(label) = &mut label {
                let labels = self.next(source, label, first, rows)?;
                records.labels.extend(labels);
            }
            records.features.resize((first + rows) * width, 0.0);
            for (column, feature) in features.iter_mut().enumerate() {
                let values = self.next(source, feature, first, rows)?;
                for (row, value) in values.into_iter().enumerate() {
                    records.features[(first + row) * width + column] = value;
                }
            }
            if let Some(weight) = &mut weight {
                records.weights.extend(self.next(source, weight, first, rows)?);
            }
        }
        if let Some(classes) = classes {
            records.labels = self.classes(source, index, &records.labels, &classes)?;
        }
        records.columns = self.read_columns(source, index)?;
        Ok(records)
    }

    /// Reads the columns of any type.
    fn read_columns(
        &self,
        source: &Source,
        index: Option<&dyn PageIndexProvider>,
    ) -> Result<Vec<steadfast_common::job::columns::Column>, DataError> {
        let columns = self.options.columns.iter().zip(&self.wanted.columns);
        columns.map(|(spec, leaf)| self.read_column(source, index, spec, *leaf)).collect()
    }

    fn read_column(
        &self,
        source: &Source,
        index: Option<&dyn PageIndexProvider>,
        spec: &ColumnSpec,
        leaf: usize,
    ) -> Result<steadfast_common::job::columns::Column, DataError> {
        let column = self.metadata.row_group(self.group).column(leaf).column_descr_ptr();
        let schema = self.metadata.file_metadata().schema_descr();
        let open = self.pages(source, index, leaf).and_then(|pages| {
            let root = schema.get_column_root(leaf);
            values::open(root, column, pages, self.first_row)
        });
        let mut read = open.map_err(|error| source.error(&error))?;
        let mut builder = Builder::new(spec, Large::of(&self.options));
        let records = self.chunk.records as usize;
        for first in (0..records).step_by(BATCH_ROWS) {
            let rows = BATCH_ROWS.min(records - first);
            let found = read(rows, &mut builder).map_err(|error| source.error(&error))?;
            found.map_err(|(row, reason)| self.bad_record(first + row, &spec.name, reason))?;
        }
        Ok(builder.finish())
    }

    /// Returns the classes that labels name: these numbers, or the texts of their column.
    fn classes(
        &self,
        source: &Source,
        index: Option<&dyn PageIndexProvider>,
        numbers: &[f32],
        classes: &Classes,
    ) -> Result<Vec<f32>, DataError> {
        let (Some(name), Some(leaf)) = (&self.options.label, self.wanted.label) else {
            return Ok(Vec::new());
        };
        let class = |(row, value): (usize, Value<'_>)| {
            classes.index(&value).map_err(|reason| self.bad_record(row, name, reason))
        };
        if !self.wanted.has_text_label {
            let numbers = numbers.iter().map(|number| Value::Float32(*number));
            return numbers.enumerate().map(class).collect();
        }
        let spec = ColumnSpec { name: name.clone(), kind: ColumnType::one(Element::Text) };
        let column = self.read_column(source, index, &spec, leaf)?;
        let Values::Text(text) = &column.values else { return Ok(Vec::new()) };
        let texts = column.offsets.windows(2).map(|ends| &text[ends[0] as usize..ends[1] as usize]);
        let values = texts.map(|text| Value::Bytes(Cow::Borrowed(text)));
        values.enumerate().map(class).collect()
    }

    /// Returns whether each row of the column has a list.
    fn is_list(&self, leaf: usize) -> bool {
        let column = self.metadata.row_group(self.group).column(leaf);
        0 < column.column_descr().max_rep_level()
    }

    /// Opens a numeric column at the first row of the chunk.
    fn open(
        &self,
        source: &Source,
        index: Option<&dyn PageIndexProvider>,
        leaf: usize,
    ) -> Result<Numbers, ParquetError> {
        let column = self.metadata.row_group(self.group).column(leaf).column_descr_ptr();
        numbers::open(column, self.pages(source, index, leaf)?, self.first_row)
    }

    /// Opens the pages of a column. If there is an index of them, reading begins at the page of the first row.
    fn pages(
        &self,
        source: &Source,
        index: Option<&dyn PageIndexProvider>,
        leaf: usize,
    ) -> Result<Box<CheckedPages>, ParquetError> {
        let group = self.metadata.row_group(self.group);
        let (column, rows) = (group.column(leaf), usize::try_from(group.num_rows())?);
        let is_list = self.is_list(leaf);
        // The number of rows in a page of lists is not checked, so its index is not used.
        let index = index.filter(|_| !is_list);
        let locations = index.and_then(|index| index.page_locations(self.group, leaf)).cloned();
        let source = Arc::new(source.clone());
        let pages = SerializedPageReader::new(source, column, rows, locations)?;
        Ok(Box::new(CheckedPages { pages, is_list }))
    }

    fn bad_record(&self, row: usize, column: &str, reason: String) -> DataError {
        DataError::BadRecord {
            file: self.file.clone(),
            record: self.chunk.first_record + row as u64,
            column: column.to_owned(),
            reason,
        }
    }

    /// Reads the next `rows` numbers of a column, which begin at record `first` of the chunk.
    fn next(
        &self,
        source: &Source,
        column: &mut Column,
        first: usize,
        rows: usize,
    ) -> Result<Vec<f32>, DataError> {
        let mut values = Vec::with_capacity(rows);
        (column.numbers)(rows, &mut values).map_err(|error| source.error(&error))?;
        let number = |(row, value): (usize, Option<f64>)| {
            // Converted through 64 bits, as for text, so that both formats give the same numbers.
            let number = column.conversion.convert(value, NULL);
            number.map_err(|reason| self.bad_record(first + row, column.name, reason))
        };
        values.into_iter().enumerate().map(number).collect()
    }
}
