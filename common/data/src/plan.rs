//! Plans a dataset: creates its manifest.

use std::collections::HashSet;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use steadfast_common::ids::TaskId;
use steadfast_common::job::columns::ColumnSpec;
use steadfast_common::job::dataset::{Chunk, DataFile, Manifest};
use steadfast_common::job::spec::{DataFormat, DatasetSpec, EvaluationSpec};
use steadfast_common::records::stream::StreamFile;
use steadfast_store::{Location, StoreError};

use crate::columns::{self, Column, Typed};
use crate::crosses;
use crate::error::DataError;
use crate::format;
use crate::parquet_file::ParquetFile;
use crate::read::check_unchanged;
use crate::rows::{RowFile, RowFormat, Scanned, libsvm_columns};
use crate::source;
use crate::task_split::{Shape, split, task_size};
use crate::text::{self, Dialect};

/// Files that are inspected concurrently.
const FILES_AT_ONCE: usize = 8;

/// Inspects every file of the dataset and splits its records into tasks.
///
/// Reads only the metadata of Parquet files and only the headers of tar archives; reads all other files completely
/// once. Relative sources are resolved against `base` (a path or a URL), or the working directory.
pub fn plan<'a>(
    spec: &'a DatasetSpec,
    evaluation: &'a EvaluationSpec,
    base: Option<&'a str>,
) -> BoxFuture<'a, Result<Manifest, DataError>> {
    let planning = async move {
        if spec.source.is_empty() {
            return Err(DataError::NoSource);
        }
        let mut files = source::files(&spec.source, base).await?;
        let training = files.len();
        files.extend(source::files(&evaluation.source, base).await?);
        let (trained, held_out) = files.split_at(training);
        let urls: HashSet<&str> = trained.iter().map(Location::url).collect();
        if let Some(twice) = held_out.iter().find(|file| urls.contains(file.url())) {
            return Err(DataError::HeldOutTwice { file: twice.url().to_owned() });
        }
        let mut manifest = inspect_all(spec, &files, training, Manifest::default()).await?;
        if evaluation.source.is_empty() {
            manifest.hold_out(evaluation.fraction);
        }
        if manifest.held_out.len() == manifest.task_ends.len() {
            let (tasks, fraction) = (manifest.task_count(), evaluation.fraction);
            return Err(DataError::NothingToTrain { tasks, fraction });
        }
        Ok(manifest)
    };
    planning.boxed()
}

/// Plans one pass of a stream: these files, which must have the columns of `manifest` unless it has none. The result
/// has its columns.
///
/// # Errors
/// See [`plan`]; or if a file has changed since it was listed.
pub fn plan_pass<'a>(
    spec: &'a DatasetSpec,
    files: &'a [StreamFile],
    manifest: &'a Manifest,
) -> BoxFuture<'a, Result<Manifest, DataError>> {
    let planning = async move {
        let locations: Vec<Location> =
            files.iter().map(|file| steadfast_store::open(&file.url)).collect::<Result<_, _>>()?;
        let (features, mut columns) = (manifest.features.clone(), manifest.columns.clone());
        // They are no columns of the files.
        columns.retain(|column| !spec.crosses.contains_key(&column.name));
        let columns = Manifest { features, columns, ..Manifest::default() };
        let mut manifest = inspect_all(spec, &locations, locations.len(), columns).await?;
        for ((planned, listed), location) in manifest.files.iter_mut().zip(files).zip(&locations) {
            planned.modified_unix_s = Some(listed.modified_unix_ms / 1000);
            check_unchanged(location, planned).await?;
        }
        Ok(manifest)
    };
    planning.boxed()
}

/// Plans files with the columns of `manifest`, or with those of the first file if it has none. The first `training` files
/// are trained on; the tasks of the others are held out.
async fn inspect_all(
    spec: &DatasetSpec,
    locations: &[Location],
    training: usize,
    mut manifest: Manifest,
) -> Result<Manifest, DataError> {
    if spec.records_per_task == Some(0) {
        return Err(DataError::BadTaskSize { value: 0 });
    }
    let (mut shapes, mut index_max) = (Vec::new(), 0);
    // Collected because this future must be `Send`, and a closure in it would prevent that.
    let inspecting: Vec<_> = locations.iter().map(|file| inspect(spec, file)).collect();
    let mut inspected = stream::iter(inspecting).buffered(FILES_AT_ONCE);
    while let Some(file) = inspected.try_next().await? {
        check_columns(&mut manifest, &file.url, file.choice)?;
        index_max = index_max.max(file.index_max);
        manifest.files.push(DataFile {
            url: file.url,
            size_bytes: file.size_bytes,
            modified_unix_s: None,
        });
        shapes.push(file.shape);
    }
    let (trained, held_out) = shapes.split_at(training);
    let count = |shapes: &[Shape]| shapes.iter().map(|shape| shape.records).sum::<u64>();
    let first =
        |from: usize| manifest.files.get(from).map_or_else(String::new, |it| it.url.clone());
    if count(trained) == 0 {
        return Err(DataError::NoRecords { files: training, first: first(0) });
    }
    if !held_out.is_empty() && count(held_out) == 0 {
        return Err(DataError::NoHeldOut { files: held_out.len(), first: first(training) });
    }
    if spec.format == DataFormat::Libsvm && spec.columns.is_empty() && spec.categories.is_empty() {
        let first = &manifest.files[0].url;
        let columns = libsvm_columns(first, index_max)?;
        manifest.features = columns::resolve(spec, first, &columns)?;
    }
    let crosses = crosses::resolve(spec, &manifest.columns, &manifest.features)?;
    manifest.columns.extend(crosses);
    // Held-out files change nothing about the tasks that are trained on.
    let size = |shapes: &[Shape]| {
        spec.records_per_task.unwrap_or_else(|| {
            let size = task_size(count(trained), trained.iter().map(Shape::bytes).sum());
            shapes.iter().map(Shape::task_size_min).fold(size, u32::max)
        })
    };
    let tasks = split(trained, size(trained))?;
    manifest.chunks = tasks.chunks;
    manifest.task_ends = tasks.task_ends;
    let tasks = split(held_out, size(held_out))?;
    let (first_file, first_chunk) = (training as u32, manifest.chunks.len() as u32);
    let chunks = tasks.chunks.into_iter();
    manifest.chunks.extend(chunks.map(|it| Chunk { file: it.file + first_file, ..it }));
    let first_task = manifest.task_count();
    manifest.task_ends.extend(tasks.task_ends.iter().map(|end| end + first_chunk));
    manifest.held_out = (first_task..manifest.task_count()).map(TaskId).collect();
    Ok(manifest)
}

/// The properties of one file.
struct Inspected {
    url: String,
    size_bytes: u64,
    choice: Choice,
    shape: Shape,
    /// The largest index of a LibSVM file, whose features are known only from all files.
    index_max: u64,
}

/// The columns of a file that are used. There are none if the file has no records and only records tell the columns.
#[derive(Default)]
struct Choice {
    features: Vec<String>,
    columns: Vec<Typed>,
}

impl Choice {
    fn new(spec: &DatasetSpec, file: &str, columns: &[Column]) -> Result<Self, DataError> {
        let features = match spec.columns.is_empty() {
            true => columns::resolve(spec, file, columns)?,
            false => Vec::new(),
        };
        Ok(Self { features, columns: columns::resolve_typed(spec, file, columns)? })
    }

    fn names(&self) -> impl Iterator<Item = &String> {
        self.features.iter().chain(self.columns.iter().map(|column| &column.name))
    }
}

async fn inspect(spec: &DatasetSpec, file: &Location) -> Result<Inspected, DataError> {
    let url = file.url().to_owned();
    let Some(size_bytes) = file.size().await? else {
        return Err(match file.is_directory().await {
            true => DataError::Directory { url, ending: format::ending(spec.format) },
            false => StoreError::NotFound { url }.into(),
        });
    };
    let inspected =
        |choice, shape| Inspected { url: url.clone(), size_bytes, choice, shape, index_max: 0 };
    if let Some(format) = RowFormat::of(spec.format) {
        let file = RowFile::open(file, size_bytes, format).await?;
        let columns = file.columns().await?;
        let columns_are_later =
            format == RowFormat::Libsvm && spec.columns.is_empty() && spec.categories.is_empty();
        let choice = match columns.is_empty() || columns_are_later {
            true => Choice::default(),
            false => Choice::new(spec, &url, &columns)?,
        };
        let Scanned { shape, index_max } = file.scan(spec.records_per_task).await?;
        if columns.is_empty() && 0 < shape.records {
            // It has records, and these have no values at all.
            Choice::new(spec, &url, &columns)?;
        }
        return Ok(Inspected { index_max, ..inspected(choice, shape) });
    }
    let Some(dialect) = Dialect::of_spec(spec) else {
        let table = ParquetFile::open(file, size_bytes).await?;
        let choice = Choice::new(spec, &url, &table.columns())?;
        let label = (!spec.label.is_empty()).then_some(&spec.label);
        let others = label.into_iter().chain(&spec.weight);
        table.check_codecs(choice.names().chain(others.clone()))?;
        table.check_deltas(choice.names().chain(others)).await?;
        return Ok(inspected(choice, table.shape()));
    };
    let layout = text::layout(file, size_bytes, dialect).await?;
    // Columns first: a missing column gives a better message than the records would.
    let choice = match layout.choices() {
        columns if columns.is_empty() => Choice::default(),
        columns => Choice::new(spec, &url, &columns)?,
    };
    let shape = text::scan(file, size_bytes, dialect, &layout, spec.records_per_task).await?;
    Ok(inspected(choice, shape))
}

/// Checks that `file` has the same columns as the files before it. The types are those of the first file.
fn check_columns(manifest: &mut Manifest, file: &str, choice: Choice) -> Result<(), DataError> {
    let found: HashSet<&String> = choice.names().collect();
    if found.is_empty() {
        return Ok(());
    }
    let columns = manifest.columns.iter().map(|column| &column.name);
    let planned: Vec<&String> = manifest.features.iter().chain(columns).collect();
    if planned.is_empty() {
        let typed = |it: Typed| Ok(ColumnSpec { name: it.name, kind: it.kind? });
        manifest.columns =
            choice.columns.into_iter().map(typed).collect::<Result<_, DataError>>()?;
        manifest.features = choice.features;
        return Ok(());
    }
    let missing = planned.iter().find(|name| !found.contains(*name));
    let planned: HashSet<&String> = planned.iter().copied().collect();
    let added = choice.names().find(|name| !planned.contains(name));
    let difference = match (missing, added) {
        (Some(name), _) => format!("`{name}` is missing"),
        (None, Some(name)) => format!("`{name}` is new"),
        // Columns are found by name, so the order of the first file applies to all.
        (None, None) => return Ok(()),
    };
    let first = manifest.files.first().map_or("the files before", |file| &file.url).to_owned();
    Err(DataError::ColumnsDiffer { file: file.to_owned(), first, difference })
}
