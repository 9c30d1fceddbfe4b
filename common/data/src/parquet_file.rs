//! Parquet files: schema, row groups, and the numbers in a range of rows.

mod numbers;
mod pages;
mod source;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use arrow_array::{Array, RecordBatch};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use steadfast_common::dataset::{Chunk, ReadOptions, Records};
use steadfast_store::Location;

use crate::columns::{Column, Content};
use crate::error::DataError;
use crate::format;
use crate::read::{Wanted, narrow};
use crate::task_split::{Places, Shape};
use source::Source;

/// Bytes fetched from the end of a file, which usually contain all its metadata.
const FOOTER_BYTES: u64 = 64 * 1024;
/// If the wanted columns of a row group have at most this size, they are fetched at once; otherwise only
/// the required pages, one after the other.
const GROUP_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Rows decoded at a time.
const BATCH_ROWS: usize = 1024;

/// A file with valid metadata.
#[derive(Clone)]
pub(crate) struct ParquetFile {
    file: Location,
    size: u64,
    metadata: ArrowReaderMetadata,
    /// The same with the file's page index.
    indexed: ArrowReaderMetadata,
    /// Rows in each row group.
    groups: Vec<u64>,
}

impl ParquetFile {
    /// Reads the metadata of `file`, which has `size` bytes.
    pub async fn open(file: &Location, size: u64) -> Result<Self, DataError> {
        let footer = size.saturating_sub(FOOTER_BYTES)..size;
        let source = Source::prefetch(file, size, &[footer]).await?;
        let loading = source.decode(|source| load(source).map_err(|error| source.error(&error)));
        let (metadata, indexed) = match loading.await {
            Ok(loaded) => loaded,
            Err(error) => return Err(explained(file, size, error).await),
        };
        let groups = row_groups(&metadata)
            .ok_or_else(|| DataError::bad_file(file.url(), "its row counts are invalid"))?;
        Ok(Self { file: file.clone(), size, metadata, indexed, groups })
    }

    /// The columns, in order.
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

    /// Checks that the compression codecs of these columns are supported.
    pub fn check_codecs<'a>(
        &self,
        wanted: impl Iterator<Item = &'a String>,
    ) -> Result<(), DataError> {
        let wanted: HashSet<&str> = wanted.map(String::as_str).collect();
        let metadata = self.metadata.metadata();
        for column in metadata.row_groups().iter().flat_map(|group| group.columns()) {
            // Nested columns are never read.
            let [name] = column.column_path().parts() else { continue };
            let codec = match column.compression() {
                Compression::UNCOMPRESSED
                | Compression::SNAPPY
                | Compression::GZIP(_)
                | Compression::LZ4
                | Compression::LZ4_RAW
                | Compression::ZSTD(_) => continue,
                Compression::BROTLI(_) => "Brotli",
                Compression::LZO => "LZO",
            };
            if wanted.contains(name.as_str()) {
                return Err(DataError::UnknownCodec {
                    column: name.clone(),
                    file: self.file.url().to_owned(),
                    codec,
                });
            }
        }
        Ok(())
    }

    /// Where the file can be split.
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
        let fetched = self.prefetch_ranges(group, &mask)?;
        let source = Source::prefetch(&self.file, self.size, &fetched).await?;
        let (metadata, indexed) = (self.metadata.clone(), self.indexed.clone());
        let skipped = (chunk.start - first_row) as usize;
        let table = Table { file: url.to_owned(), chunk, options: options.clone() };
        let decoding = source.decode(move |source| {
            // The page index is not needed for a group that was fetched whole. A wrong index would
            // combine rows of one column with other rows of another, so it is checked before use.
            let use_index = fetched.is_empty()
                && pages::is_index_valid(source, indexed.metadata(), group, &mask, skipped);
            let metadata = if use_index { indexed } else { metadata };
            let batches =
                ParquetRecordBatchReaderBuilder::new_with_metadata(source.clone(), metadata)
                    .with_projection(mask)
                    .with_row_groups(vec![group])
                    .with_offset(skipped)
                    .with_limit(chunk.records as usize)
                    .with_batch_size(BATCH_ROWS)
                    .build()
                    .map_err(|error| source.error(&error))?;
            let mut records = Records { width: table.options.features.len(), ..Records::default() };
            for batch in batches {
                table.append(&mut records, &batch.map_err(|error| source.error(&error))?)?;
            }
            Ok(records)
        });
        decoding.await
    }

    /// The byte ranges of the wanted columns; empty if these are too large to be fetched whole.
    fn prefetch_ranges(
        &self,
        group: usize,
        mask: &ProjectionMask,
    ) -> Result<Vec<Range<u64>>, DataError> {
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
                DataError::bad_file(self.file.url(), "its metadata refers to bytes beyond its end")
            })?;
            total = total.saturating_add(place.end - place.start);
            places.push(place);
        }
        if total > GROUP_BYTES_MAX {
            places.clear();
        }
        Ok(places)
    }

    /// The row group that contains `chunk`, and its first row.
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

/// Replaces the error by one that names the file's actual format, if it can be detected.
async fn explained(file: &Location, size: u64, error: DataError) -> DataError {
    let DataError::BadFile { .. } = &error else { return error };
    let head = file.read_range(0..size.min(format::HEAD_BYTES)).await.unwrap_or_default();
    format::not_parquet(file.url(), &head).unwrap_or(error)
}

/// Reads the metadata, without and with the page index.
fn load(source: &Source) -> Result<(ArrowReaderMetadata, ArrowReaderMetadata), ParquetError> {
    // Only the Parquet schema counts; the Arrow schema that a writer embeds is ignored.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let metadata = ArrowReaderMetadata::load(source, options.clone())?;
    let indexed = pages::load_index(source, ParquetMetaData::clone(metadata.metadata()))?;
    let indexed = ArrowReaderMetadata::try_new(Arc::new(indexed), options)?;
    Ok((metadata, indexed))
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

/// The chunk being read, to fill in rows and to name records in messages.
struct Table {
    file: String,
    chunk: Chunk,
    options: ReadOptions,
}

impl Table {
    fn append(&self, records: &mut Records, batch: &RecordBatch) -> Result<(), DataError> {
        let (rows, width) = (batch.num_rows(), records.width);
        let first_record = self.chunk.first_record + records.len() as u64;
        let schema = batch.schema();
        let mut columns: HashMap<&str, &dyn Array> = HashMap::with_capacity(batch.num_columns());
        for (field, column) in schema.fields().iter().zip(batch.columns()) {
            columns.entry(field.name()).or_insert(column);
        }
        let labels = self.numbers(&columns, &self.options.label, 1.0, first_record)?;
        let base = records.features.len();
        records.features.resize(base + rows * width, 0.0);
        for (column, name) in self.options.features.iter().enumerate() {
            let values = self.numbers(&columns, name, self.options.feature_scale, first_record)?;
            for (row, value) in values.into_iter().enumerate() {
                records.features[base + row * width + column] = value;
            }
        }
        records.labels.extend(labels);
        Ok(())
    }

    fn numbers(
        &self,
        columns: &HashMap<&str, &dyn Array>,
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
        let column = *columns.get(name).ok_or_else(|| {
            DataError::bad_file(&self.file, format!("column `{name}` is missing"))
        })?;
        // Converted through 64 bits, as for text, so that both formats give the same numbers.
        let wide = numbers::wide(column)
            .ok_or_else(|| bad(0, format!("{} is not a numeric type", column.data_type())))?;
        let value = |row: usize| match wide.is_null(row) {
            true => Err(bad(row, "it is empty (null)".to_owned())),
            false => narrow(wide.value(row), scale).map_err(|reason| bad(row, reason)),
        };
        (0..wide.len()).map(value).collect()
    }
}
