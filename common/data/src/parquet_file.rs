//! Parquet files: schema, row groups, and the values in a range of rows.

mod deltas;
mod fixed_lists;
mod numbers;
mod pages;
mod records;
mod source;
mod values;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::schema::types::{SchemaDescriptor, TypePtr};
use steadfast_common::job::columns::{ColumnType, Shape as ListShape};
use steadfast_common::job::dataset::{Chunk, ReadOptions, Records};
use steadfast_store::Location;

use crate::columns::{Column, Content};
use crate::error::DataError;
use crate::format;
use crate::read::Wanted;
use crate::task_split::{Places, Shape};
use records::RowReader;
use source::Source;

/// Bytes fetched from the end of a file, which usually contain all its metadata.
const FOOTER_BYTES: u64 = 64 * 1024;
/// If the wanted columns of a row group have at most this size, they are fetched at once; otherwise only
/// the required pages, one after the other.
const GROUP_BYTES_MAX: u64 = 8 * 1024 * 1024;

/// A file with valid metadata.
#[derive(Clone)]
pub(crate) struct ParquetFile {
    file: Location,
    size: u64,
    /// The metadata of the file, with the page index.
    metadata: Arc<ParquetMetaData>,
    /// Rows in each row group.
    groups: Vec<u64>,
}

impl ParquetFile {
    /// Reads the metadata of `file`, which has `size` bytes.
    pub async fn open(file: &Location, size: u64) -> Result<Self, DataError> {
        let footer = size.saturating_sub(FOOTER_BYTES)..size;
        let source = Source::prefetch(file, size, &[footer]).await?;
        let loading = source.decode(|source| load(source).map_err(|error| source.error(&error)));
        let metadata = match loading.await {
            Ok(metadata) => metadata,
            Err(error) => return Err(explained(file, size, error).await),
        };
        let groups = row_groups(&metadata)
            .ok_or_else(|| DataError::bad_file(file.url(), "its row counts are invalid"))?;
        Ok(Self { file: file.clone(), size, metadata, groups })
    }

    /// Returns the top-level columns, in the order of the file.
    pub fn columns(&self) -> Vec<Column> {
        let lengths = fixed_lists::lengths(&self.metadata);
        let column = |column: &TypePtr| {
            let content = match (numbers::content(column), lengths.get(column.name())) {
                (Content::Typed(kind), Some(length)) if kind.shape == ListShape::List => {
                    Content::Typed(ColumnType { shape: ListShape::Fixed(*length), ..kind })
                }
                (content, _) => content,
            };
            Column { name: column.name().to_owned(), content }
        };
        self.schema().root_schema().get_fields().iter().map(column).collect()
    }

    /// Checks that the compression codecs of these columns are supported.
    pub fn check_codecs<'a>(
        &self,
        wanted: impl Iterator<Item = &'a String>,
    ) -> Result<(), DataError> {
        let wanted: HashSet<&str> = wanted.map(String::as_str).collect();
        for column in self.metadata.row_groups().iter().flat_map(|group| group.columns()) {
            let Some(name) = column.column_path().parts().first() else { continue };
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

    /// Checks that the differences of these columns can be decoded.
    pub async fn check_deltas<'a>(
        &self,
        wanted: impl Iterator<Item = &'a String>,
    ) -> Result<(), DataError> {
        let wanted: HashSet<&str> = wanted.map(String::as_str).collect();
        let schema = self.schema();
        let root = |leaf: usize| schema.get_column_root(leaf).name().to_owned();
        let leaves: Vec<usize> =
            (0..schema.num_columns()).filter(|leaf| wanted.contains(&*root(*leaf))).collect();
        let metadata = Arc::clone(&self.metadata);
        let source = Source::prefetch(&self.file, self.size, &[]).await?;
        let checking = source.decode(move |source| {
            deltas::first_too_wide(source, &metadata, &leaves).map_err(|error| source.error(&error))
        });
        match checking.await? {
            None => Ok(()),
            Some(leaf) => {
                let (column, file) = (root(leaf), self.file.url().to_owned());
                Err(DataError::WideDeltas { column, file })
            }
        }
    }

    /// Returns the number of records, and where the file can be split: within its row groups.
    pub fn shape(&self) -> Shape {
        let records = self.groups.iter().sum();
        Shape { records, places: Places::RowGroups(self.groups.clone()) }
    }

    pub async fn read(&self, chunk: Chunk, options: &ReadOptions) -> Result<Records, DataError> {
        let wanted = self.leaves(options)?;
        let (group, first_row) = self.group_of(&chunk)?;
        let fetched = self.prefetch_ranges(group, &wanted)?;
        let source = Source::prefetch(&self.file, self.size, &fetched).await?;
        let reader = RowReader {
            file: self.file.url().to_owned(),
            metadata: Arc::clone(&self.metadata),
            group,
            wanted,
            is_prefetched: !fetched.is_empty(),
            chunk,
            first_row: (chunk.start - first_row) as usize,
            options: options.clone(),
        };
        source.decode(move |source| reader.read(source)).await
    }

    fn schema(&self) -> &SchemaDescriptor {
        self.metadata.file_metadata().schema_descr()
    }

    /// Finds the leaves of the schema that are the wanted columns, and checks that they can be read.
    fn leaves(&self, options: &ReadOptions) -> Result<Wanted, DataError> {
        let (url, columns) = (self.file.url(), self.columns());
        let names: Vec<String> = columns.iter().map(|column| column.name.clone()).collect();
        let wanted = Wanted::find(options, &names, url)?;
        // A nested column may have none or several leaves; those that can be read have one.
        let mut leaves = vec![0; columns.len()];
        for leaf in 0..self.schema().num_columns() {
            leaves[self.schema().get_column_root_idx(leaf)] = leaf;
        }
        let number = |place: usize| columns[place].check_numeric(url).map(|()| leaves[place]);
        let label = |place: usize| match options.classes.is_empty() {
            true => number(place),
            false => columns[place].check_class(url).map(|()| leaves[place]),
        };
        let value = |place: usize| columns[place].check_readable(url).map(|()| leaves[place]);
        Ok(Wanted {
            features: wanted.features.into_iter().map(number).collect::<Result<_, _>>()?,
            label: wanted.label.map(label).transpose()?,
            has_text_label: wanted.label.is_some_and(|place| columns[place].is_text()),
            weight: wanted.weight.map(number).transpose()?,
            columns: wanted.columns.into_iter().map(value).collect::<Result<_, _>>()?,
        })
    }

    /// Returns the byte ranges of the wanted columns in a row group; an empty list if they have together more than
    /// [`GROUP_BYTES_MAX`] bytes and are not fetched whole.
    fn prefetch_ranges(&self, group: usize, wanted: &Wanted) -> Result<Vec<Range<u64>>, DataError> {
        let columns = self.metadata.row_group(group).columns();
        let mut places = Vec::new();
        let mut total = 0_u64;
        for column in wanted.all().map(|leaf| &columns[leaf]) {
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

    /// Returns the index of the row group that contains `chunk`, and its first row in the file.
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

/// Reads the metadata with the page index.
fn load(source: &Source) -> Result<Arc<ParquetMetaData>, ParquetError> {
    let metadata = ParquetMetaDataReader::new().parse_and_finish(source)?;
    pages::load_index(source, metadata).map(Arc::new)
}

fn row_groups(metadata: &ParquetMetaData) -> Option<Vec<u64>> {
    let mut total = 0_u64;
    let mut groups = Vec::new();
    for group in metadata.row_groups() {
        let rows = u64::try_from(group.num_rows()).ok()?;
        total = total.checked_add(rows).filter(|total| i64::try_from(*total).is_ok())?;
        groups.push(rows);
    }
    Some(groups)
}
