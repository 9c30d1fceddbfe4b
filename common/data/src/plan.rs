//! Makes the manifest of a dataset.

use std::collections::HashSet;

use futures::{StreamExt, TryStreamExt, stream};
use steadfast_common::dataset::{DataFile, Manifest};
use steadfast_common::spec::DatasetSpec;
use steadfast_store::{Location, StoreError};

use crate::columns::{self, Column};
use crate::cuts::{Shape, cut, task_size};
use crate::error::DataError;
use crate::parquet_file::ParquetFile;
use crate::source;
use crate::text::{self, Dialect};

/// Files that are looked at together.
const FILES_AT_ONCE: usize = 8;

/// Looks at every file of the dataset and cuts its records into tasks.
///
/// Text files are read once from end to end, of Parquet files only the metadata. Relative sources
/// start at the folder `base` (a path or a URL), or at the working directory.
pub async fn plan(
    spec: &DatasetSpec,
    evaluation_fraction: f64,
    base: Option<&str>,
) -> Result<Manifest, DataError> {
    if spec.records_per_task == Some(0) {
        return Err(DataError::BadTaskSize { value: 0 });
    }
    let locations = source::files(spec, base).await?;
    let mut manifest = Manifest::default();
    let mut shapes = Vec::new();
    // Collected, so that no closure is part of this future, which then is `Send` for callers.
    let looking: Vec<_> = locations.iter().map(|file| look(spec, file)).collect();
    let mut seen = stream::iter(looking).buffered(FILES_AT_ONCE);
    while let Some(file) = seen.try_next().await? {
        if !file.columns.is_empty() {
            agree(spec, &mut manifest, &file)?;
        }
        manifest.files.push(DataFile { url: file.url, size_bytes: file.size_bytes });
        shapes.push(file.shape);
    }
    let records = shapes.iter().map(|shape| shape.records).sum();
    if records == 0 {
        let (files, first) = (manifest.files.len(), manifest.files[0].url.clone());
        return Err(DataError::NoRecords { files, first });
    }
    let size = spec.records_per_task.unwrap_or_else(|| task_size(records));
    let cut = cut(&shapes, size)?;
    manifest.chunks = cut.chunks;
    manifest.task_ends = cut.task_ends;
    manifest.hold_out(evaluation_fraction);
    if manifest.held_out.len() == manifest.task_ends.len() {
        let tasks = manifest.task_count();
        return Err(DataError::NothingToTrain { tasks, fraction: evaluation_fraction });
    }
    Ok(manifest)
}

/// What was seen of one file.
struct Seen {
    url: String,
    size_bytes: u64,
    /// None in a text file without header and records.
    columns: Vec<Column>,
    shape: Shape,
}

async fn look(spec: &DatasetSpec, file: &Location) -> Result<Seen, DataError> {
    let url = file.url().to_owned();
    let Some(size_bytes) = file.size().await? else {
        return Err(StoreError::NotFound { url }.into());
    };
    let Some(dialect) = Dialect::of_spec(spec) else {
        let table = ParquetFile::open(file, size_bytes).await?;
        return Ok(Seen { url, size_bytes, columns: table.columns(), shape: table.shape() });
    };
    let layout = text::layout(file, size_bytes, dialect).await?;
    let columns = layout.choices();
    // A missing column explains itself better than the records do.
    if !columns.is_empty() {
        columns::resolve(spec, &url, &columns)?;
    }
    let shape = text::scan(file, size_bytes, dialect, &layout, spec.records_per_task).await?;
    Ok(Seen { url, size_bytes, columns, shape })
}

/// Makes sure that `file` has the features of the files before it.
fn agree(spec: &DatasetSpec, manifest: &mut Manifest, file: &Seen) -> Result<(), DataError> {
    let features = columns::resolve(spec, &file.url, &file.columns)?;
    if manifest.features.is_empty() {
        manifest.features = features;
        return Ok(());
    }
    if manifest.features == features {
        return Ok(());
    }
    let planned: HashSet<&String> = manifest.features.iter().collect();
    let found: HashSet<&String> = features.iter().collect();
    let missing = manifest.features.iter().find(|name| !found.contains(name));
    let added = features.iter().find(|name| !planned.contains(name));
    let difference = match (missing, added) {
        (Some(name), _) => format!("`{name}` is missing"),
        (None, Some(name)) => format!("`{name}` is new"),
        // Records are read by the names of their columns: the order of the first file holds.
        (None, None) => return Ok(()),
    };
    let first = manifest.files.first().map_or_else(String::new, |file| file.url.clone());
    Err(DataError::ColumnsDiffer { file: file.url.clone(), first, difference })
}
