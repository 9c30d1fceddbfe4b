//! Reads the chunks of a task.

use futures::{StreamExt, TryStreamExt, stream};
use steadfast_common::dataset::{Chunk, DataFile, Manifest, ReadOptions, Records};
use steadfast_host::task::blocking;
use steadfast_store::{Location, StoreError, open};

use crate::error::DataError;
use crate::parquet_file::ParquetFile;
use crate::text::{self, Dialect};

/// Files of a task that are read at the same time.
const FILES_AT_ONCE: usize = 4;

/// Reads all records of `chunks`, in their order, and nothing else.
///
/// Memory is bounded by these records and the column pages that hold them. A value that is no
/// finite number is an error: a record is never left out.
pub async fn read(
    manifest: &Manifest,
    options: &ReadOptions,
    chunks: &[Chunk],
) -> Result<Records, DataError> {
    // Collected, so that no closure is part of this future, which then is `Send` for callers.
    let reading: Vec<_> = chunks
        .chunk_by(|a, b| a.file == b.file)
        .map(|chunks| read_file(manifest, options, chunks))
        .collect();
    let mut pieces = stream::iter(reading).buffered(FILES_AT_ONCE);
    let mut all = Records { width: options.features.len(), ..Records::default() };
    while let Some(piece) = pieces.try_next().await? {
        all.extend(&piece);
    }
    Ok(all)
}

/// Reads chunks of one file.
async fn read_file(
    manifest: &Manifest,
    options: &ReadOptions,
    chunks: &[Chunk],
) -> Result<Records, DataError> {
    let mut all = Records { width: options.features.len(), ..Records::default() };
    let Some(index) = chunks.first().map(|chunk| chunk.file) else { return Ok(all) };
    let planned = manifest.files.get(index as usize).ok_or_else(|| {
        let files = manifest.files.len();
        DataError::BadManifest { reason: format!("file {index} of {files} is asked for") }
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
        all.extend(&records);
    }
    Ok(all)
}

async fn check_unchanged(file: &Location, planned: &DataFile) -> Result<(), DataError> {
    let Some(found_bytes) = file.size().await? else {
        return Err(StoreError::NotFound { url: file.url().to_owned() }.into());
    };
    if found_bytes != planned.size_bytes {
        return Err(DataError::Changed {
            file: file.url().to_owned(),
            planned_bytes: planned.size_bytes,
            found_bytes,
        });
    }
    Ok(())
}

/// A file that chunks are read from.
enum Source {
    Table(ParquetFile),
    Text { file: Location, dialect: Dialect, layout: text::Layout },
}

impl Source {
    async fn open(file: &Location, size: u64, options: &ReadOptions) -> Result<Self, DataError> {
        let Some(dialect) = Dialect::of_options(options) else {
            return ParquetFile::open(file, size).await.map(Self::Table);
        };
        let layout = text::layout(file, size, dialect).await?;
        Ok(Self::Text { file: file.clone(), dialect, layout })
    }

    async fn read(&self, chunk: Chunk, options: &ReadOptions) -> Result<Records, DataError> {
        let (file, dialect, layout) = match self {
            Self::Table(table) => return table.read(chunk, options).await,
            Self::Text { file, dialect, layout } => (file, *dialect, layout.clone()),
        };
        let bytes = file.read_range(chunk.start..chunk.end).await?;
        let (url, options) = (file.url().to_owned(), options.clone());
        // Parsing takes a while; the threads that serve requests must not wait for it.
        blocking(move || text::decode(&bytes, &url, chunk, dialect, &layout, &options))
            .await
            .unwrap_or_else(|error| Err(DataError::bad_file(file.url(), error.to_string())))
    }
}

/// Places of the wanted columns in a file.
pub(crate) struct Wanted {
    pub features: Vec<usize>,
    pub label: usize,
}

impl Wanted {
    /// Finds the planned columns among those that the file has now.
    pub fn find(options: &ReadOptions, columns: &[String], file: &str) -> Result<Self, DataError> {
        let place = |name: &String| {
            columns.iter().position(|column| column == name).ok_or_else(|| {
                DataError::UnknownColumn {
                    column: name.clone(),
                    file: file.to_owned(),
                    candidates: vec![],
                }
            })
        };
        let features = options.features.iter().map(place).collect::<Result<_, _>>()?;
        Ok(Self { features, label: place(&options.label)? })
    }
}

/// Scales a value and makes sure that it is still a number.
pub(crate) fn narrow(value: f64, scale: f32) -> Result<f32, String> {
    let narrow = value as f32 * scale;
    if narrow.is_finite() { Ok(narrow) } else { Err(format!("{value} is out of range")) }
}
