//! Plans a dataset: creates its manifest.

use std::collections::HashSet;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use steadfast_common::dataset::{DataFile, Manifest};
use steadfast_common::spec::DatasetSpec;
use steadfast_store::{Location, StoreError};

use crate::columns;
use crate::error::DataError;
use crate::format;
use crate::parquet_file::ParquetFile;
use crate::source;
use crate::task_split::{Shape, split, task_size};
use crate::text::{self, Dialect};

/// Files that are inspected concurrently.
const FILES_AT_ONCE: usize = 8;

/// Inspects every file of the dataset and splits its records into tasks.
///
/// Text files are read completely once, of Parquet files only the metadata. Relative sources are resolved
/// against `base` (a path or a URL), or the working directory.
pub fn plan<'a>(
    spec: &'a DatasetSpec,
    evaluation_fraction: f64,
    base: Option<&'a str>,
) -> BoxFuture<'a, Result<Manifest, DataError>> {
    inspect_all(spec, evaluation_fraction, base).boxed()
}

async fn inspect_all(
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
    // Collected because this future must be `Send`, and a closure in it would prevent that.
    let inspecting: Vec<_> = locations.iter().map(|file| inspect(spec, file)).collect();
    let mut inspected = stream::iter(inspecting).buffered(FILES_AT_ONCE);
    while let Some(file) = inspected.try_next().await? {
        if !file.features.is_empty() {
            check_features(&mut manifest, &file)?;
        }
        manifest.files.push(DataFile { url: file.url, size_bytes: file.size_bytes });
        shapes.push(file.shape);
    }
    let records = shapes.iter().map(|shape| shape.records).sum();
    if records == 0 {
        let (files, first) = (manifest.files.len(), manifest.files[0].url.clone());
        return Err(DataError::NoRecords { files, first });
    }
    let size = spec.records_per_task.unwrap_or_else(|| {
        shapes.iter().map(Shape::task_size_min).fold(task_size(records), u32::max)
    });
    let tasks = split(&shapes, size)?;
    manifest.chunks = tasks.chunks;
    manifest.task_ends = tasks.task_ends;
    manifest.hold_out(evaluation_fraction);
    if manifest.held_out.len() == manifest.task_ends.len() {
        let tasks = manifest.task_count();
        return Err(DataError::NothingToTrain { tasks, fraction: evaluation_fraction });
    }
    Ok(manifest)
}

/// The properties of one file.
struct Inspected {
    url: String,
    size_bytes: u64,
    /// Empty for a text file without header and records.
    features: Vec<String>,
    shape: Shape,
}

async fn inspect(spec: &DatasetSpec, file: &Location) -> Result<Inspected, DataError> {
    let url = file.url().to_owned();
    let Some(size_bytes) = file.size().await? else {
        return Err(match file.is_directory().await {
            true => DataError::Directory { url, ending: format::ending(spec.format) },
            false => StoreError::NotFound { url }.into(),
        });
    };
    let Some(dialect) = Dialect::of_spec(spec) else {
        let table = ParquetFile::open(file, size_bytes).await?;
        let features = columns::resolve(spec, &url, &table.columns())?;
        table.check_codecs(features.iter().chain([&spec.label]))?;
        return Ok(Inspected { url, size_bytes, features, shape: table.shape() });
    };
    let layout = text::layout(file, size_bytes, dialect).await?;
    // Columns first: a missing column gives a better message than the records would.
    let features = match layout.choices() {
        columns if columns.is_empty() => Vec::new(),
        columns => columns::resolve(spec, &url, &columns)?,
    };
    let shape = text::scan(file, size_bytes, dialect, &layout, spec.records_per_task).await?;
    Ok(Inspected { url, size_bytes, features, shape })
}

/// Checks that `file` has the same features as the files before it.
fn check_features(manifest: &mut Manifest, file: &Inspected) -> Result<(), DataError> {
    let features = &file.features;
    if manifest.features.is_empty() {
        manifest.features.clone_from(features);
        return Ok(());
    }
    if manifest.features == *features {
        return Ok(());
    }
    let planned: HashSet<&String> = manifest.features.iter().collect();
    let found: HashSet<&String> = features.iter().collect();
    let missing = manifest.features.iter().find(|name| !found.contains(name));
    let added = features.iter().find(|name| !planned.contains(name));
    let difference = match (missing, added) {
        (Some(name), _) => format!("`{name}` is missing"),
        (None, Some(name)) => format!("`{name}` is new"),
        // Columns are found by name, so the order of the first file applies to all.
        (None, None) => return Ok(()),
    };
    let first = manifest.files.first().map_or_else(String::new, |file| file.url.clone());
    Err(DataError::ColumnsDiffer { file: file.url.clone(), first, difference })
}
