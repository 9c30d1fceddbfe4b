//! The dataset manifest: all records, divided into tasks.
//!
//! The master plans it once and stores it next to the checkpoints; all processes read it. It never changes
//! during a job, so data that is derived from it (the order of a pass, the schedule of the lanes) is not
//! stored.

use std::collections::VecDeque;
use std::io::{self, BufReader, Read};

use bytes::{Buf, Bytes};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids::TaskId;
use crate::job::columns::{Column, ColumnSpec};
use crate::job::spec::{DataFormat, DatasetSpec, Transform};
use crate::records::RecordRange;

/// Buffer size for reading a manifest.
const READ_BYTES: usize = 64 << 10;

/// Records of one file that are read in one operation. JSON stores only an array of the five numbers,
/// because there may be millions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "ChunkRow", into = "ChunkRow")]
pub struct Chunk {
    /// Index into [`Manifest::files`].
    pub file: u32,
    /// First row (Parquet) or first byte (other formats; of the decompressed file).
    pub start: u64,
    /// One past the last row (Parquet) or byte.
    pub end: u64,
    /// Index of the first record in its file, from 0, for messages.
    pub first_record: u64,
    /// Records between `start` and `end`.
    pub records: u32,
}

type ChunkRow = (u32, u64, u64, u64, u32);

impl From<ChunkRow> for Chunk {
    fn from((file, start, end, first_record, records): ChunkRow) -> Self {
        Self { file, start, end, first_record, records }
    }
}

impl From<Chunk> for ChunkRow {
    fn from(Chunk { file, start, end, first_record, records }: Chunk) -> Self {
        (file, start, end, first_record, records)
    }
}

/// One file of the dataset at the time of planning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFile {
    pub url: String,
    pub size_bytes: u64,
    /// Modification time of a file of a stream, in seconds since 1970: a store's list of objects has more digits than
    /// the date of a single object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_unix_s: Option<u64>,
}

/// All tasks of a dataset. Task `i` consists of the chunks from the end of the previous task up to
/// `task_ends[i]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub files: Vec<DataFile>,
    pub chunks: Vec<Chunk>,
    pub task_ends: Vec<u32>,
    /// Names of the feature columns with globs expanded, in the order of a model's inputs.
    pub features: Vec<String>,
    /// The columns beside features and label: those of the files, and then crosses of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<ColumnSpec>,
    /// Held-out tasks, ascending.
    pub held_out: Vec<TaskId>,
}

impl Manifest {
    /// Returns the number of tasks, including held-out ones.
    pub fn task_count(&self) -> u32 {
        u32::try_from(self.task_ends.len()).expect("tasks are numbered by u32")
    }

    /// Returns the chunks of one task; empty if the task does not exist.
    pub fn chunks_of(&self, task: TaskId) -> &[Chunk] {
        let index = task.0 as usize;
        let start = match index {
            0 => 0,
            _ => self.task_ends.get(index - 1).copied().unwrap_or(0) as usize,
        };
        let end = self.task_ends.get(index).copied().unwrap_or(start as u32) as usize;
        self.chunks.get(start..end).unwrap_or(&[])
    }

    /// Returns the number of records in one task; 0 if the task does not exist.
    pub fn records_of(&self, task: TaskId) -> u64 {
        self.chunks_of(task).iter().map(|chunk| u64::from(chunk.records)).sum()
    }

    /// Returns the mean number of records in a task, rounded down, but at least 1.
    pub fn mean_records(&self) -> u64 {
        let all: u64 = self.chunks.iter().map(|chunk| u64::from(chunk.records)).sum();
        (all / u64::from(self.task_count()).max(1)).max(1)
    }

    /// Returns the records of a task by file, for display.
    pub fn records_named(&self, task: TaskId) -> Vec<RecordRange> {
        let named = self.chunks_of(task).iter().map(|chunk| RecordRange {
            file: self.files.get(chunk.file as usize).map_or_else(String::new, |it| it.url.clone()),
            first: chunk.first_record,
            records: chunk.records,
        });
        named.collect()
    }

    /// Returns the place of one record of a task, whose number within the task is in the order of the files, from 0.
    /// `None` if the task has no such record.
    pub fn record_named(&self, task: TaskId, record: u64) -> Option<RecordRange> {
        let mut left = record;
        let chunk = self.chunks_of(task).iter().find(|chunk| {
            let is_here = left < u64::from(chunk.records);
            left -= if is_here { 0 } else { u64::from(chunk.records) };
            is_here
        })?;
        let file = self.files.get(chunk.file as usize)?.url.clone();
        Some(RecordRange { file, first: chunk.first_record + left, records: 1 })
    }

    /// Returns the tasks that are not held out, ascending.
    pub fn training_tasks(&self) -> Vec<TaskId> {
        let held_out = |task: &TaskId| self.held_out.binary_search(task).is_ok();
        (0..self.task_count()).map(TaskId).filter(|task| !held_out(task)).collect()
    }

    /// Returns the number of records that one pass trains on: those of all tasks that are not held out.
    pub fn training_records(&self) -> u64 {
        self.training_tasks().iter().map(|task| self.records_of(*task)).sum()
    }

    /// Holds out `fraction` of the tasks, spread evenly: task `i` is held out if `i × fraction` and
    /// `(i + 1) × fraction` have different integer parts.
    pub fn hold_out(&mut self, fraction: f64) {
        let share = |count: u32| (f64::from(count) * fraction).floor() as u64;
        self.held_out = (0..self.task_count())
            .filter(|task| share(*task + 1) > share(*task))
            .map(TaskId)
            .collect();
    }

    /// Returns the SHA-256 of the manifest's JSON, in lower-case hexadecimal.
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(self).expect("a manifest is plain data");
        hex(&Sha256::digest(json))
    }
}

impl Manifest {
    /// Parses the manifest with this digest from the segments of its JSON. Each segment is freed as soon as
    /// it is read, because the JSON of millions of tasks should not be in memory together with the manifest.
    ///
    /// # Errors
    /// A message, if the JSON has another digest or cannot be parsed.
    pub fn parse(json: VecDeque<Bytes>, digest: &str) -> Result<Self, String> {
        let mut hash = Sha256::new();
        json.iter().for_each(|segment| hash.update(segment));
        let found = hex(&hash.finalize());
        if found != digest {
            return Err(format!("its SHA-256 is {found}, not {digest}"));
        }
        let reader = BufReader::with_capacity(READ_BYTES, Segments(json));
        serde_json::from_reader(reader).map_err(|error| error.to_string())
    }

    /// Returns the name of the object with the manifest of this digest.
    pub fn object_name(digest: &str) -> String {
        format!("manifest-{digest}.json")
    }
}

/// Reads segments in order, and frees those that are read.
struct Segments(VecDeque<Bytes>);

impl Read for Segments {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(segment) = self.0.front_mut() {
            if segment.has_remaining() {
                let some = buffer.len().min(segment.len());
                segment.copy_to_slice(&mut buffer[..some]);
                return Ok(some);
            }
            self.0.pop_front();
        }
        Ok(0)
    }
}

/// Options for reading chunks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReadOptions {
    pub format: DataFormat,
    pub has_header: bool,
    pub features: Vec<String>,
    /// `None` for a dataset of `columns`.
    pub label: Option<String>,
    /// The values of the label that are the classes 0, 1, …; empty if labels are numbers.
    pub classes: Vec<String>,
    /// The column with what each record counts.
    pub weight: Option<String>,
    pub missing: Option<f32>,
    pub transform: Transform,
    pub feature_scale: f32,
    /// The columns of the files.
    pub columns: Vec<ColumnSpec>,
    /// The columns that are computed from `columns`.
    pub crosses: Vec<Cross>,
}

/// A column of the combinations of other columns' categories.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cross {
    pub column: ColumnSpec,
    /// Indices of its parts among the columns of the files.
    pub parts: Vec<usize>,
}

impl ReadOptions {
    /// Combines the spec with the columns that the planner resolved.
    pub fn new(spec: &DatasetSpec, manifest: &Manifest) -> Self {
        let all = manifest.columns.iter().cloned();
        let (crosses, columns): (Vec<_>, Vec<_>) =
            all.partition(|column| spec.crosses.contains_key(&column.name));
        let place = |part: &String| columns.iter().position(|column| column.name == *part);
        let cross = |column: ColumnSpec| {
            let parts = spec.crosses[&column.name].iter().filter_map(place).collect();
            Cross { column, parts }
        };
        let crosses = crosses.into_iter().map(cross).collect();
        Self {
            format: spec.format,
            has_header: spec.header == crate::job::spec::Header::Present,
            features: manifest.features.clone(),
            label: spec.columns.is_empty().then(|| spec.label.clone()),
            classes: spec.classes.clone(),
            weight: spec.weight.clone(),
            missing: spec.missing,
            transform: spec.transform,
            feature_scale: spec.feature_scale,
            columns,
            crosses,
        }
    }

    /// Returns the columns of the records that are read: those of the files, and then the crosses.
    fn all_columns(&self) -> impl Iterator<Item = &ColumnSpec> {
        self.columns.iter().chain(self.crosses.iter().map(|cross| &cross.column))
    }
}

/// Records: features and labels as numbers, and columns of any type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Records {
    /// `records × width` values, row-major.
    pub features: Vec<f32>,
    /// Number of features in a record.
    pub width: usize,
    /// One label for each record: a class index or a number.
    pub labels: Vec<f32>,
    /// The columns of a dataset without features and label.
    pub columns: Vec<Column>,
    /// What each record counts; empty if each counts once.
    pub weights: Vec<f32>,
}

impl Records {
    /// Creates an empty set of records with the columns in `options`.
    pub fn new(options: &ReadOptions) -> Self {
        Self {
            width: options.features.len(),
            columns: options.all_columns().map(Column::new).collect(),
            ..Self::default()
        }
    }

    pub fn len(&self) -> usize {
        self.columns.first().map_or(self.labels.len(), Column::len)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory that features, labels and columns take, in bytes.
    pub fn size_bytes(&self) -> usize {
        let columns: usize = self.columns.iter().map(Column::size_bytes).sum();
        let numbers = [&self.features, &self.labels, &self.weights];
        numbers.map(|it| size_of_val(&it[..])).iter().sum::<usize>() + columns
    }

    /// Returns the records at `indices`, in that order.
    ///
    /// # Panics
    /// If an index is out of range.
    pub fn select(&self, indices: &[u32]) -> Records {
        let columns = self.columns.iter().map(|column| column.select(indices)).collect();
        let mut picked = Records { width: self.width, columns, ..Records::default() };
        if self.labels.is_empty() {
            return picked;
        }
        picked.features.reserve(indices.len() * self.width);
        for &index in indices {
            let index = index as usize;
            let row = &self.features[index * self.width..(index + 1) * self.width];
            picked.features.extend_from_slice(row);
            picked.labels.push(self.labels[index]);
            picked.weights.extend(self.weights.get(index));
        }
        picked
    }

    /// Appends all records of `other`, which has the same columns.
    pub fn extend(&mut self, other: &Records) {
        self.width = other.width;
        self.features.extend_from_slice(&other.features);
        self.labels.extend_from_slice(&other.labels);
        self.weights.extend_from_slice(&other.weights);
        match self.columns.is_empty() {
            true => self.columns.clone_from(&other.columns),
            false => {
                assert_eq!(self.columns.len(), other.columns.len(), "the same columns");
                for (column, other) in self.columns.iter_mut().zip(&other.columns) {
                    column.extend(other);
                }
            }
        }
    }
}

/// Returns the SHA-256 of bytes, in lower-case hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Formats bytes as lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_is_read_from_chunks_of_any_size_and_only_with_its_digest() {
        let chunk = Chunk { file: 0, start: 5, end: 40, first_record: 1, records: 7 };
        let manifest = Manifest {
            files: vec![DataFile {
                url: "file:///ä.csv".to_owned(),
                size_bytes: 40,
                modified_unix_s: None,
            }],
            chunks: vec![chunk; 3],
            task_ends: vec![1, 3],
            features: vec!["x".to_owned()],
            columns: vec![],
            held_out: vec![TaskId(1)],
        };
        let (json, digest) = (serde_json::to_vec(&manifest).unwrap(), manifest.digest());
        let segments = |json: &[u8], size| json.chunks(size).map(Bytes::copy_from_slice).collect();
        for size in [1, 2, 7, json.len()] {
            assert_eq!(Manifest::parse(segments(&json, size), &digest).as_ref(), Ok(&manifest));
        }
        let beyond = [&json[..], b" "].concat();
        let refused = Manifest::parse(segments(&beyond, 3), &digest).unwrap_err();
        assert!(refused.ends_with(&format!(", not {digest}")), "{refused}");
    }
}
