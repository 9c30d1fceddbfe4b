//! Reads the chunks of a task.

use std::collections::HashMap;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use steadfast_common::job::dataset::{Chunk, DataFile, Manifest, ReadOptions, Records};
use steadfast_common::job::spec::Transform;
use steadfast_host::task::blocking;
use steadfast_store::{Location, StoreError, open};

use crate::crosses;
use crate::error::DataError;
use crate::parquet_file::ParquetFile;
use crate::rows::{RowFile, RowFormat};
use crate::source::unix_ms_of;
use crate::text::{self, Dialect};

/// Files of a task that are read concurrently.
const FILES_AT_ONCE: usize = 4;

/// Reads exactly the records of `chunks`, in order.
///
/// Memory is bounded by these records and the column pages that contain them. A value that is not a
/// finite number is an error: records are never skipped.
pub fn read<'a>(
    manifest: &'a Manifest,
    options: &'a ReadOptions,
    chunks: &'a [Chunk],
) -> BoxFuture<'a, Result<Records, DataError>> {
    read_files(manifest, options, chunks).boxed()
}

async fn read_files(
    manifest: &Manifest,
    options: &ReadOptions,
    chunks: &[Chunk],
) -> Result<Records, DataError> {
    // Collected because this future must be `Send`, and a closure in it would prevent that.
    let reading: Vec<_> = chunks
        .chunk_by(|a, b| a.file == b.file)
        .map(|chunks| read_file(manifest, options, chunks))
        .collect();
    let mut parts = stream::iter(reading).buffered(FILES_AT_ONCE);
    let mut all = Records::new(options);
    while let Some(part) = parts.try_next().await? {
        all.extend(&part);
    }
    Ok(all)
}

/// Reads chunks of one file.
async fn read_file(
    manifest: &Manifest,
    options: &ReadOptions,
    chunks: &[Chunk],
) -> Result<Records, DataError> {
    let mut all = Records::new(options);
    let Some(index) = chunks.first().map(|chunk| chunk.file) else { return Ok(all) };
    let planned = manifest.files.get(index as usize).ok_or_else(|| {
        let files = manifest.files.len();
        DataError::BadManifest { reason: format!("it refers to file {index} of {files}") }
    })?;
    let file = open(&planned.url)?;
    check_unchanged(&file, planned).await?;
    let source = Source::open(&file, planned.size_bytes, options).await?;
    for chunk in chunks {
        let records = source.read(*chunk, options).await?;
        if records.len() != chunk.records as usize {
            let (found, planned) = (records.len(), chunk.records);
            let (start, end) = (chunk.start, chunk.end);
            return Err(DataError::bad_file(
                file.url(),
                format!("{found} records instead of {planned} in {start}..{end}; has it changed?"),
            ));
        }
        all.extend(&with_crosses(records, options, file.url(), *chunk).await?);
    }
    Ok(all)
}

/// Adds the crosses of the columns of a chunk's records.
async fn with_crosses(
    mut records: Records,
    options: &ReadOptions,
    file: &str,
    chunk: Chunk,
) -> Result<Records, DataError> {
    if options.crosses.is_empty() {
        return Ok(records);
    }
    let (url, crosses) = (file.to_owned(), options.crosses.clone());
    // As slow as parsing.
    let computing = blocking(move || {
        for cross in crosses {
            let computed = crosses::compute(&cross, &records.columns);
            let column = computed.map_err(|(record, reason)| DataError::BadRecord {
                file: url.clone(),
                record: chunk.first_record + record as u64,
                column: cross.column.name,
                reason,
            })?;
            records.columns.push(column);
        }
        Ok(records)
    });
    computing.await.unwrap_or_else(|error| Err(DataError::bad_file(file, error.to_string())))
}

/// Checks that a file has the size that it had when it was planned, and a file of a stream also the modification time.
pub(crate) async fn check_unchanged(
    location: &Location,
    planned: &DataFile,
) -> Result<(), DataError> {
    let file = location.url().to_owned();
    let Some((found_bytes, modified)) = location.size_and_modified().await? else {
        return Err(StoreError::NotFound { url: file }.into());
    };
    let planned_bytes = planned.size_bytes;
    if found_bytes != planned_bytes {
        let how = format!("{found_bytes} bytes instead of {planned_bytes}");
        return Err(DataError::Changed { file, how });
    }
    match (unix_ms_of(modified) / 1000, planned.modified_unix_s) {
        (found, Some(planned)) if found != planned => {
            let how = format!("modified {found} s after 1970 instead of {planned}");
            Err(DataError::Changed { file, how })
        }
        _ => Ok(()),
    }
}

/// An open file of the dataset.
enum Source {
    Table(ParquetFile),
    Rows(RowFile),
    Text { file: Location, size: u64, dialect: Dialect, layout: text::Layout },
}

impl Source {
    async fn open(file: &Location, size: u64, options: &ReadOptions) -> Result<Self, DataError> {
        if let Some(format) = RowFormat::of(options.format) {
            return RowFile::open(file, size, format).await.map(Self::Rows);
        }
        let Some(dialect) = Dialect::of_options(options) else {
            return ParquetFile::open(file, size).await.map(Self::Table);
        };
        let layout = text::layout(file, size, dialect).await?;
        Ok(Self::Text { file: file.clone(), size, dialect, layout })
    }

    async fn read(&self, chunk: Chunk, options: &ReadOptions) -> Result<Records, DataError> {
        let (file, size, dialect, layout) = match self {
            Self::Table(table) => return table.read(chunk, options).await,
            Self::Rows(file) => return file.read(chunk, options).await,
            Self::Text { file, size, dialect, layout } => (file, size, *dialect, layout.clone()),
        };
        let bytes = text::range(file, *size, layout.codec, chunk.start..chunk.end).await?;
        let (url, options) = (file.url().to_owned(), options.clone());
        // Parsing is slow and must not block the threads that serve requests.
        blocking(move || text::decode(&bytes, &url, chunk, dialect, &layout, &options))
            .await
            .unwrap_or_else(|error| Err(DataError::bad_file(file.url(), error.to_string())))
    }
}

/// Indexes of the wanted columns in a file: features, label and weight, or columns.
pub(crate) struct Wanted {
    pub features: Vec<usize>,
    pub label: Option<usize>,
    /// Whether the label is text, which names classes.
    pub has_text_label: bool,
    pub weight: Option<usize>,
    pub columns: Vec<usize>,
}

impl Wanted {
    /// Finds the planned columns among those of the file.
    pub fn find(options: &ReadOptions, columns: &[String], file: &str) -> Result<Self, DataError> {
        // Of duplicate names the first counts: the planner accepts no column with such a name.
        let mut places: HashMap<&str, usize> = HashMap::with_capacity(columns.len());
        for (place, column) in columns.iter().enumerate() {
            places.entry(column).or_insert(place);
        }
        let place = |name: &String| {
            places.get(name.as_str()).copied().ok_or_else(|| DataError::UnknownColumn {
                column: name.clone(),
                file: file.to_owned(),
                candidates: vec![],
            })
        };
        Ok(Self {
            features: options.features.iter().map(place).collect::<Result<_, _>>()?,
            label: options.label.as_ref().map(place).transpose()?,
            has_text_label: false,
            weight: options.weight.as_ref().map(place).transpose()?,
            columns: options.columns.iter().map(|it| place(&it.name)).collect::<Result<_, _>>()?,
        })
    }

    /// Returns the indexes of all wanted columns.
    pub fn all(&self) -> impl Iterator<Item = usize> {
        let numbers = self.features.iter().copied().chain(self.label).chain(self.weight);
        numbers.chain(self.columns.iter().copied())
    }
}

/// The conversion of a column's values to the numbers of records.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Conversion {
    /// Uses the values as they are, without a default, a transformation or a scale.
    Plain,
    /// As [`Conversion::Plain`], and refuses negative values.
    Weight,
    Feature {
        missing: Option<f32>,
        transform: Transform,
        scale: f32,
    },
}

impl Conversion {
    pub fn of_features(options: &ReadOptions) -> Self {
        let ReadOptions { missing, transform, feature_scale: scale, .. } = *options;
        Self::Feature { missing, transform, scale }
    }

    /// Converts the value of a record, and checks that the result is finite. If there is no value, the error is or
    /// begins with `empty`.
    pub fn convert(self, value: Option<f64>, empty: &str) -> Result<f32, String> {
        match self {
            Self::Plain => narrow(value.ok_or(empty)?, 1.0),
            Self::Weight => match narrow(value.ok_or(empty)?, 1.0)? {
                value if value < 0.0 => Err(format!("the weight {value} is negative")),
                value => Ok(value),
            },
            Self::Feature { missing, transform, scale } => {
                let value = value.or(missing.map(f64::from)).ok_or_else(|| {
                    format!("{empty}; `dataset.missing` sets the value of empty features")
                })?;
                narrow(transform.apply(value), scale)
            }
        }
    }
}

/// Converts a value, and checks that the result is finite.
fn narrow(value: f64, scale: f32) -> Result<f32, String> {
    let narrow = value as f32 * scale;
    match (narrow.is_finite(), value.is_finite()) {
        (true, _) => Ok(narrow),
        (false, true) => Err(format!("{value} is out of range")),
        (false, false) => Err(format!("{value} is not finite")),
    }
}
