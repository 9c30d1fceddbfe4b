//! Reads the records of a chunk from the columns of its row group.

use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::metadata::page_index::PageIndexProvider;
use parquet::file::serialized_reader::SerializedPageReader;
use steadfast_common::dataset::{Chunk, ReadOptions, Records};

use super::numbers::{self, Numbers};
use super::pages::{self, FlatPages};
use super::source::Source;
use crate::error::DataError;
use crate::read::{Wanted, narrow};

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
    scale: f32,
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
                self.wanted.all(),
                self.first_row,
            ),
        };
        let open = |name, scale, leaf| match self.open(source, index, leaf) {
            Ok(numbers) => Ok(Column { name, scale, numbers }),
            Err(error) => Err(source.error(&error)),
        };
        let mut label = open(&self.options.label, 1.0, self.wanted.label)?;
        let mut features = Vec::with_capacity(self.options.features.len());
        for (name, leaf) in self.options.features.iter().zip(&self.wanted.features) {
            features.push(open(name, self.options.feature_scale, *leaf)?);
        }
        let width = features.len();
        let mut records = Records { width, ..Records::default() };
        while records.len() < self.chunk.records as usize {
            let first = records.len();
            let rows = BATCH_ROWS.min(self.chunk.records as usize - first);
            let labels = self.next(source, &mut label, first, rows)?;
            records.features.resize((first + rows) * width, 0.0);
            for (column, feature) in features.iter_mut().enumerate() {
                let values = self.next(source, feature, first, rows)?;
                for (row, value) in values.into_iter().enumerate() {
                    records.features[(first + row) * width + column] = value;
                }
            }
            records.labels.extend(labels);
        }
        Ok(records)
    }

    /// Opens a column at the first row of the chunk.
    fn open(
        &self,
        source: &Source,
        index: Option<&dyn PageIndexProvider>,
        leaf: usize,
    ) -> Result<Numbers, ParquetError> {
        let group = self.metadata.row_group(self.group);
        let (column, rows) = (group.column(leaf), usize::try_from(group.num_rows())?);
        let locations = index.and_then(|index| index.page_locations(self.group, leaf)).cloned();
        let source = Arc::new(source.clone());
        let pages = FlatPages(SerializedPageReader::new(source, column, rows, locations)?);
        numbers::open(column.column_descr_ptr(), Box::new(pages), self.first_row)
    }

    /// The next `rows` numbers of a column, which begin at record `first` of the chunk.
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
            let number = match value {
                Some(value) => narrow(value, column.scale),
                None => Err("it is empty (null)".to_owned()),
            };
            number.map_err(|reason| DataError::BadRecord {
                file: self.file.clone(),
                record: self.chunk.first_record + (first + row) as u64,
                column: column.name.to_owned(),
                reason,
            })
        };
        values.into_iter().enumerate().map(number).collect()
    }
}
