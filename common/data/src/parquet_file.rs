//! Parquet files: their schema and row groups, and the numbers of a range of rows.

use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Float64Type;
use arrow_array::{Array, RecordBatch};
use arrow_schema::DataType;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::arrow::async_reader::{AsyncFileReader, ParquetRecordBatchStream};
use parquet::arrow::{ParquetRecordBatchStreamBuilder, ProjectionMask};
use parquet::errors::ParquetError;
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader};
use steadfast_common::dataset::{Chunk, ReadOptions, Records};
use steadfast_store::{Location, StoreError};

use crate::columns::{Column, Content};
use crate::cuts::{Places, Shape};
use crate::error::DataError;
use crate::read::{Wanted, narrow};

/// Bytes at the end of a file that are fetched at once in the hope that its metadata are in there.
const FOOTER_BYTES: usize = 64 * 1024;
/// Rows decoded at a time.
const BATCH_ROWS: usize = 1024;

/// A file whose metadata were read and found sound.
#[derive(Clone)]
pub(crate) struct ParquetFile {
    source: Source,
    metadata: ArrowReaderMetadata,
    /// Rows in each row group.
    groups: Vec<u64>,
}

impl ParquetFile {
    /// Reads the metadata of `file`, which has `size` bytes.
    pub async fn open(file: &Location, size: u64) -> Result<Self, DataError> {
        let mut source = Source { file: file.clone(), size };
        // Only the physical file counts: what a writer's own schema adds is for its own readers.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let loading = ArrowReaderMetadata::load_async(&mut source, options);
        let metadata = guarded(file.url(), loading).await?;
        let groups = row_groups(&metadata)
            .ok_or_else(|| DataError::bad_file(file.url(), "its row counts make no sense"))?;
        Ok(Self { source, metadata, groups })
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
        let file = self.source.file.url();
        let columns: Vec<String> =
            self.metadata.schema().fields().iter().map(|field| field.name().clone()).collect();
        let wanted = Wanted::find(options, &columns, file)?;
        let (group, first_row) = self.group_of(&chunk)?;
        let mask = ProjectionMask::roots(
            self.metadata.metadata().file_metadata().schema_descr(),
            wanted.features.iter().copied().chain([wanted.label]),
        );
        let offset = (chunk.start - first_row) as usize;
        let builder = ParquetRecordBatchStreamBuilder::new_with_metadata(
            self.source.clone(),
            self.metadata.clone(),
        );
        let building = async {
            builder
                .with_projection(mask)
                .with_row_groups(vec![group])
                .with_offset(offset)
                .with_limit(chunk.records as usize)
                .with_batch_size(BATCH_ROWS)
                .build()
        };
        let stream = guarded(file, building).await?;
        let table = Table { file, chunk, options };
        table.collect(stream).await
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
        let reason = format!("{} has no row group with rows {start}..{end}", self.source.file);
        Err(DataError::BadManifest { reason })
    }
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
struct Table<'a> {
    file: &'a str,
    chunk: Chunk,
    options: &'a ReadOptions,
}

impl Table<'_> {
    async fn collect(
        &self,
        mut stream: ParquetRecordBatchStream<Source>,
    ) -> Result<Records, DataError> {
        let mut records = Records { width: self.options.features.len(), ..Records::default() };
        loop {
            let next = async { stream.next().await.transpose() };
            let Some(batch) = guarded(self.file, next).await? else { return Ok(records) };
            self.append(&mut records, &batch)?;
        }
    }

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
            file: self.file.to_owned(),
            record: first_record + row as u64,
            column: name.to_owned(),
            reason,
        };
        let column = batch
            .column_by_name(name)
            .ok_or_else(|| DataError::bad_file(self.file, format!("column `{name}` is gone")))?;
        // By way of 64 bits, as for text: so both formats give the same numbers.
        let wide = arrow_cast::cast(column, &DataType::Float64)
            .map_err(|error| bad(0, error.to_string()))?;
        let wide = wide.as_primitive::<Float64Type>();
        let value = |row: usize| match wide.is_null(row) {
            true => Err(bad(row, "it is empty (null)".to_owned())),
            false => narrow(wide.value(row), scale).map_err(|reason| bad(row, reason)),
        };
        (0..wide.len()).map(value).collect()
    }
}

/// Does what may go wrong in the decoder; its panics are the file's fault.
async fn guarded<T>(
    file: &str,
    work: impl Future<Output = Result<T, ParquetError>>,
) -> Result<T, DataError> {
    match AssertUnwindSafe(work).catch_unwind().await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(ParquetError::External(error))) => match error.downcast::<StoreError>() {
            Ok(error) => Err(DataError::Store(*error)),
            Err(error) => Err(DataError::bad_file(file, error.to_string())),
        },
        Ok(Err(error)) => {
            Err(DataError::bad_file(file, format!("it is no sound Parquet file ({error})")))
        }
        Err(panic) => Err(DataError::from_panic(file, &*panic)),
    }
}

/// Hands the bytes of a file to the decoder.
#[derive(Clone)]
struct Source {
    file: Location,
    size: u64,
}

impl Source {
    /// Refuses a range that a corrupt file names before memory is set aside for it.
    fn check(&self, range: &Range<u64>) -> Result<(), ParquetError> {
        if range.start <= range.end && range.end <= self.size {
            return Ok(());
        }
        let (start, end, size) = (range.start, range.end, self.size);
        Err(ParquetError::EOF(format!("bytes {start}..{end} of {size} bytes were asked for")))
    }
}

impl AsyncFileReader for Source {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, ParquetError>> {
        async move {
            self.check(&range)?;
            self.file.read_range(range).await.map_err(external)
        }
        .boxed()
    }

    fn get_byte_ranges(
        &mut self,
        ranges: Vec<Range<u64>>,
    ) -> BoxFuture<'_, Result<Vec<Bytes>, ParquetError>> {
        async move {
            ranges.iter().try_for_each(|range| self.check(range))?;
            self.file.read_ranges(&ranges).await.map_err(external)
        }
        .boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        _options: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, Result<Arc<ParquetMetaData>, ParquetError>> {
        async move {
            let size = self.size;
            // With the places of pages, a part of a large row group is read without the rest.
            let reader = ParquetMetaDataReader::new()
                .with_offset_index_policy(PageIndexPolicy::Optional)
                .with_prefetch_hint(Some(FOOTER_BYTES));
            reader.load_and_finish(self, size).await.map(Arc::new)
        }
        .boxed()
    }
}

fn external(error: StoreError) -> ParquetError {
    ParquetError::External(Box::new(error))
}
