//! Converts datasets: reads the records of some files and writes them in another format.

use std::ops::Range;

use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_common::ids::TaskId;
use steadfast_common::job::columns::{Column, ColumnSpec, Element};
use steadfast_common::job::dataset::{Manifest, ReadOptions};
use steadfast_common::job::spec::{DataFormat, DatasetSpec, EvaluationSpec};
use steadfast_store::{Created, Location, ObjectWriter};

use crate::encode::Encoder;
use crate::error::DataError;
use crate::format;
use crate::plan::plan;
use crate::read::read;

/// Says whether a file that exists is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfThere {
    Fail,
    Replace,
}

/// The files to write.
#[derive(Clone)]
pub struct Target {
    pub directory: Location,
    pub format: DataFormat,
    /// Number of files.
    pub shards: u32,
    /// The beginning of the files' names.
    pub prefix: String,
    pub if_there: IfThere,
}

/// The files that a conversion has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// The URLs of the files, in order.
    pub files: Vec<String>,
    pub records: u64,
    /// The columns with their types, which a job needs to read the same values from a format without types.
    pub columns: Vec<ColumnSpec>,
}

/// Writes the records of `spec.columns` to the target, in order.
///
/// Memory is bounded by the records of a task and of a row group. Each file appears under its name once it is whole.
/// In formats that write numbers as text, decimal numbers are read as `float64` unless `spec.types` says otherwise:
/// the narrower type that a job prefers would round them.
///
/// # Errors
/// If the source cannot be read, a value has no place in the target, or a file exists.
pub fn convert<'a>(
    spec: &'a DatasetSpec,
    target: &'a Target,
) -> BoxFuture<'a, Result<Converted, DataError>> {
    convert_all(spec, target).boxed()
}

async fn convert_all(spec: &DatasetSpec, target: &Target) -> Result<Converted, DataError> {
    let mut manifest = plan(spec, &EvaluationSpec::default(), None).await?;
    widen(spec, &mut manifest.columns);
    // Refuses columns before anything is written.
    Encoder::new(target.format, &manifest.columns)?;
    let records = manifest.training_records();
    let shards = u64::from(target.shards);
    if shards == 0 || records < shards {
        return Err(DataError::BadShards { shards: target.shards, records });
    }
    let places = target.places()?;
    if target.if_there == IfThere::Fail {
        for place in &places {
            if place.size().await?.is_some() {
                return Err(DataError::Exists { url: place.url().to_owned() });
            }
        }
    }
    let options = ReadOptions::new(spec, &manifest);
    let mut source = Source { manifest: &manifest, options, next: 0, columns: vec![], read: 0..0 };
    let files = places.iter().map(|place| place.url().to_owned()).collect();
    for (shard, place) in (0..shards).zip(places) {
        // Files differ by at most one record.
        let count = records * (shard + 1) / shards - records * shard / shards;
        write_file(&mut source, target, place, count).await?;
    }
    Ok(Converted { files, records, columns: manifest.columns.clone() })
}

/// Widens columns of `float32` to `float64` if the source writes numbers as text, so that decimal numbers keep the
/// precision with which they are written. Types that the job sets are not changed.
fn widen(spec: &DatasetSpec, columns: &mut [ColumnSpec]) {
    match spec.format {
        DataFormat::Parquet | DataFormat::Tfrecord | DataFormat::Webdataset => return,
        DataFormat::Csv | DataFormat::Tsv | DataFormat::Jsonl | DataFormat::Libsvm => {}
    }
    for column in columns {
        if column.kind.element == Element::Float32 && !spec.types.contains_key(&column.name) {
            column.kind.element = Element::Float64;
        }
    }
}

impl Target {
    fn places(&self) -> Result<Vec<Location>, DataError> {
        let (prefix, of, ending) = (&self.prefix, self.shards, format::ending(self.format));
        let name = |shard| format!("{prefix}-{shard:05}-of-{of:05}.{ending}");
        (0..of).map(|shard| Ok(self.directory.child(&name(shard))?)).collect()
    }
}

/// Writes the next `count` records to a file. After an error, it leaves no part of the file.
async fn write_file(
    source: &mut Source<'_>,
    target: &Target,
    place: Location,
    count: u64,
) -> Result<(), DataError> {
    let url = place.url().to_owned();
    let mut writer = ObjectWriter::new(place);
    if let Err(error) = write_records(source, target.format, &mut writer, count).await {
        writer.abort().await;
        return Err(error);
    }
    let ended = match target.if_there {
        IfThere::Replace => writer.finish().await.map(|()| Created::Now),
        IfThere::Fail => writer.finish_new().await,
    };
    match ended? {
        Created::Now => Ok(()),
        Created::Already => Err(DataError::Exists { url }),
    }
}

async fn write_records(
    source: &mut Source<'_>,
    format: DataFormat,
    writer: &mut ObjectWriter,
    count: u64,
) -> Result<(), DataError> {
    let mut encoder = Encoder::new(format, &source.manifest.columns)?;
    let mut left = count;
    while 0 < left {
        let columns = source.take(left).await?;
        left -= columns.first().map_or(left, |column| column.len() as u64);
        writer.push(&encoder.push(&columns)?).await?;
    }
    Ok(writer.push(&encoder.finish()?).await?)
}

/// The records of the source, one after the other.
struct Source<'a> {
    manifest: &'a Manifest,
    options: ReadOptions,
    /// The next task to read.
    next: u32,
    /// The columns of the task that was read last.
    columns: Vec<Column>,
    /// The records of `columns` that are not taken yet.
    read: Range<u32>,
}

impl Source<'_> {
    /// Returns the next records, at most `most`, and at least one unless there are no more.
    async fn take(&mut self, most: u64) -> Result<Vec<Column>, DataError> {
        while self.read.is_empty() && self.next < self.manifest.task_count() {
            let chunks = self.manifest.chunks_of(TaskId(self.next));
            self.columns = read(self.manifest, &self.options, chunks).await?.columns;
            let records = self.columns.first().map_or(0, Column::len);
            self.read = 0..u32::try_from(records).expect("records of a task are counted by u32");
            self.next += 1;
        }
        let end = u32::try_from(most)
            .map_or(self.read.end, |most| self.read.end.min(self.read.start.saturating_add(most)));
        let indices: Vec<u32> = (self.read.start..end).collect();
        self.read.start = end;
        Ok(self.columns.iter().map(|column| column.select(&indices)).collect())
    }
}
