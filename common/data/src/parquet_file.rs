//! Parquet files: their schema and row groups, and the numbers of a range of rows.

mod numbers;
mod pages;
mod source;

use std::ops::Range;
use std::sync::Arc;

use arrow_array::{Array, RecordBatch};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use steadfast_common::dataset::{Chunk, ReadOptions, Records};
use steadfast_store::Location;

use crate::columns::{Column, Content};
use crate::cuts::{Places, Shape};
use crate::error::DataError;
use crate::read::{Wanted, narrow};
use source::Source;

/// Bytes at the end of a file that are fetched at once in the hope that its metadata are in there.
const FOOTER_BYTES: u64 = 64 * 1024;
/// A row group's columns of at most this size are fetched at once. Of larger ones only the pages
/// that are needed, one after the other.
const GROUP_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Rows decoded at a time.
const BATCH_ROWS: usize = 1024;

/// A file whose metadata were read and found sound.
#[derive(Clone)]
pub(crate) struct ParquetFile {
    file: Location,
    size: u64,
    metadata: ArrowReaderMetadata,
    /// The same with what the file lists of its pages.
    listed: ArrowReaderMetadata,
    /// Rows in each row group.
    groups: Vec<u64>,
}

impl ParquetFile {
    /// Reads the metadata of `file`, which has `size` bytes.
    pub async fn open(file: &Location, size: u64) -> Result<Self, DataError> {
        let footer = size.saturating_sub(FOOTER_BYTES)..size;
        let source = Source::prefetch(file, size, &[footer]).await?;
        let loading = source.decode(|source| load(source).map_err(|error| source.fault(&error)));
        let (metadata, listed) = loading.await?;
        let groups = row_groups(&metadata)
            .ok_or_else(|| DataError::bad_file(file.url(), "its row counts make no sense"))?;
        Ok(Self { file: file.clone(), size, metadata, listed, groups })
    }

    /// Its columns, in order.
    pub fn columns(&self) -> Vec<Column> {
        let content = |kind: &DataType| match kind.is_numeric() || *kind == DataType::Boolean {
            true => Content::Numbers,
            false => Content::Other(kind.to_string()),
        };
        let fields = self.metadata.schema().fields();
        fields
            .iter()
            .map(|field| Column { name: field.name().clone(), content: content(field.data_type()) })
            .collect()
    }

    /// Where it can be cut.
    pub fn shape(&self) -> Shape {
        let records = self.groups.iter().sum();
        Shape { records, places: Places::RowGroups(self.groups.clone()) }
    }

    /// Reads the rows of `chunk`.
    pub async fn read(&self, chunk: Chunk, options: &ReadOptions) -> Result<Records, DataError> {
        let url = self.file.url();
        let columns: Vec<String> =
            self.metadata.schema().fields().iter().map(|field| field.name().clone()).collect();
        let wanted = Wanted::find(options, &columns, url)?;
        let (group, first_row) = self.group_of(&chunk)?;
        let mask = ProjectionMask::roots(
            self.metadata.metadata().file_metadata().schema_descr(),
            wanted.features.iter().copied().chain([wanted.label]),
        );
        let fetched = self.worth_it(group, &mask)?;
        let source = Source::prefetch(&self.file, self.size, &fetched).await?;
        let (metadata, listed) = (self.metadata.clone(), self.listed.clone());
        let skipped = (chunk.start - first_row) as usize;
        let table = Table { file: url.to_owned(), chunk, options: options.clone() };
        let decoding = source.decode(move |source| {
            // Who has the whole group goes from page to page. A list of them that is wrong would pair rows
            // of one column with others of another.
            let is_listed = fetched.is_empty()
                && pages::are_as_listed(source, listed.metadata(), group, &mask, skipped);
            let metadata = if is_listed { listed } else { metadata };
            let batches =
                ParquetRecordBatchReaderBuilder::new_with_metadata(source.clone(), metadata)
                    .with_projection(mask)
                    .with_row_groups(vec![group])
                    .with_offset(skipped)
                    .with_limit(chunk.records as usize)
                    .with_batch_size(BATCH_ROWS)
                    .build()
                    .map_err(|error| source.fault(&error))?;
            let mut records = Records { width: table.options.features.len(), ..Records::default() };
            for batch in batches {
                table.append(&mut records, &batch.map_err(|error| source.fault(&error))?)?;
            }
            Ok(records)
        });
        decoding.await
    }

    /// The places of the wanted columns if fetching them whole is no waste.
    fn worth_it(&self, group: usize, mask: &ProjectionMask) -> Result<Vec<Range<u64>>, DataError> {
        let columns = self.metadata.metadata().row_group(group).columns();
        let mut places = Vec::new();
        let mut total = 0_u64;
        for (leaf, column) in columns.iter().enumerate() {
            if !mask.leaf_included(leaf) {
                continue;
            }
            let start = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
            let range = u64::try_from(start).ok().zip(u64::try_from(column.compressed_size()).ok());
            let place = range.and_then(|(start, size)| Some(start..start.checked_add(size)?));
            let place = place.filter(|place| place.end <= self.size).ok_or_else(|| {
                DataError::bad_file(self.file.url(), "it names places beyond its end")
            })?;
            total = total.saturating_add(place.end - place.start);
            places.push(place);
        }
        if total > GROUP_BYTES_MAX {
            places.clear();
        }
        Ok(places)
    }

    /// The row group that holds all of `chunk`, and its first row.
    fn group_of(&self, chunk: &Chunk) -> Result<(usize, u64), DataError> {
        let rows = chunk.end.saturating_sub(chunk.start);
        let mut first = 0;
        for (index, group) in self.groups.iter().enumerate() {
            let end = first + group;
            if (first..end).contains(&chunk.start)
                && chunk.end <= end
                && rows == u64::from(chunk.records)
            {
                return Ok((index, first));
            }
            first = end;
        }
        let (start, end) = (chunk.start, chunk.end);
        let reason = format!("{} has no row group with rows {start}..{end}", self.file);
        Err(DataError::BadManifest { reason })
    }
}

/// Reads the metadata, without and with the places of pages.
fn load(source: &Source) -> Result<(ArrowReaderMetadata, ArrowReaderMetadata), ParquetError> {
    // Only the physical file counts: what a writer's own schema adds is for its own readers.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let metadata = ArrowReaderMetadata::load(source, options.clone())?;
    let listed = pages::list(source, ParquetMetaData::clone(metadata.metadata()))?;
    let listed = ArrowReaderMetadata::try_new(Arc::new(listed), options)?;
    Ok((metadata, listed))
}

fn row_groups(metadata: &ArrowReaderMetadata) -> Option<Vec<u64>> {
    let mut total = 0_u64;
    let mut groups = Vec::new();
    for group in metadata.metadata().row_groups() {
        let rows = u64::try_from(group.num_rows()).ok()?;
        total = total.checked_add(rows).filter(|total| i64::try_from(*total).is_ok())?;
        groups.push(rows);
    }
    Some(groups)
}

/// What is being read, for filling in rows and for messages.
struct Table {
    file: String,
    chunk: Chunk,
    options: ReadOptions,
}

impl Table {
    fn append(&self, records: &mut Records, batch: &RecordBatch) -> Result<(), DataError> {
        let (rows, width) = (batch.num_rows(), records.width);
        let first_record = self.chunk.first_record + records.len() as u64;
        let labels = self.numbers(batch, &self.options.label, 1.0, first_record)?;
        let base = records.features.len();
        records.features.resize(base + rows * width, 0.0);
        for (column, name) in self.options.features.iter().enumerate() {
            let values = self.numbers(batch, name, self.options.feature_scale, first_record)?;
            for (row, value) in values.into_iter().enumerate() {
                records.features[base + row * width + column] = value;
            }
        }
        records.labels.extend(labels);
        Ok(())
    }

    fn numbers(
        &self,
        batch: &RecordBatch,
        name: &str,
        scale: f32,
        first_record: u64,
    ) -> Result<Vec<f32>, DataError> {
        let bad = |row: usize, reason: String| DataError::BadRecord {
            file: self.file.clone(),
            record: first_record + row as u64,
            column: name.to_owned(),
            reason,
        };
        let column = batch
            .column_by_name(name)
            .ok_or_else(|| DataError::bad_file(&self.file, format!("column `{name}` is gone")))?;
        // By way of 64 bits, as for text: so both formats give the same numbers.
        let wide = numbers::wide(column)
            .ok_or_else(|| bad(0, format!("{} is no number", column.data_type())))?;
        let value = |row: usize| match wide.is_null(row) {
            true => Err(bad(row, "it is empty (null)".to_owned())),
            false => narrow(wide.value(row), scale).map_err(|reason| bad(row, reason)),
        };
        (0..wide.len()).map(value).collect()
    }
}
