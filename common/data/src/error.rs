//! What can be wrong with a dataset, and what to do about it.

use std::any::Any;

use steadfast_store::{ErrorKind, StoreError};

/// A dataset that cannot be planned or read.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the dataset has no source; list at least one path or URL")]
    NoSource,
    #[error("the dataset has no records: {files} files were looked at, the first is {first}")]
    NoRecords { files: usize, first: String },
    #[error("`{value}` is no number of records for a task; use at least 1")]
    BadTaskSize { value: u32 },
    #[error("{tasks} tasks are too many; raise records_per_task")]
    TooManyTasks { tasks: usize },
    #[error(
        "holding out {fraction} of {tasks} tasks leaves none to train on; lower the fraction or \
         records_per_task"
    )]
    NothingToTrain { tasks: u32, fraction: f64 },
    #[error("{file} has no column `{column}`{}", suggestion(candidates))]
    UnknownColumn { column: String, file: String, candidates: Vec<String> },
    #[error("{file} has several columns called `{column}`; rename all but one")]
    DuplicateColumn { column: String, file: String },
    #[error("column `{column}` of {file} holds {found}, not numbers; leave it out or convert it")]
    NotNumeric { column: String, file: String, found: String },
    #[error("column `{column}` is both the label and a feature; leave it out of the features")]
    LabelAmongFeatures { column: String },
    #[error(
        "the features of {file} are not those of {first}: {difference}; all files of a dataset \
         need the same columns"
    )]
    ColumnsDiffer { file: String, first: String, difference: String },
    #[error(
        "record {record} of {file} (line {line}) has {found} fields instead of {expected}; is the \
         separator right?"
    )]
    FieldCount { file: String, record: u64, line: u64, expected: usize, found: usize },
    #[error("record {record} of {file}, column `{column}`: {reason}")]
    BadRecord { file: String, record: u64, column: String, reason: String },
    #[error("{file} cannot be read: {reason}")]
    BadFile { file: String, reason: String },
    #[error(
        "{file} has changed since the job was planned: {found_bytes} bytes instead of \
         {planned_bytes}; put it back, or start a new job"
    )]
    Changed { file: String, planned_bytes: u64, found_bytes: u64 },
    #[error("the manifest does not fit the dataset: {reason}; start a new job")]
    BadManifest { reason: String },
}

impl DataError {
    /// Says what the caller does next: permanent if the data (or the job file) are at fault,
    /// transient if only the way to them is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Store(error) => error.kind(),
            Self::NoSource
            | Self::NoRecords { .. }
            | Self::BadTaskSize { .. }
            | Self::TooManyTasks { .. }
            | Self::NothingToTrain { .. }
            | Self::UnknownColumn { .. }
            | Self::DuplicateColumn { .. }
            | Self::NotNumeric { .. }
            | Self::LabelAmongFeatures { .. }
            | Self::ColumnsDiffer { .. }
            | Self::FieldCount { .. }
            | Self::BadRecord { .. }
            | Self::BadFile { .. }
            | Self::Changed { .. }
            | Self::BadManifest { .. } => ErrorKind::Permanent,
        }
    }

    pub(crate) fn bad_file(file: &str, reason: impl Into<String>) -> Self {
        Self::BadFile { file: file.to_owned(), reason: reason.into() }
    }

    /// A decoder that panicked met a file that nobody had thought of: the file's fault, not ours.
    pub(crate) fn from_panic(file: &str, panic: &(dyn Any + Send)) -> Self {
        let text = panic
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no reason given");
        Self::bad_file(file, format!("its content is corrupt (the decoder gave up: {text})"))
    }
}

fn suggestion(candidates: &[String]) -> String {
    if candidates.is_empty() {
        return String::new();
    }
    let names: Vec<String> = candidates.iter().map(|name| format!("`{name}`")).collect();
    format!("; did you mean {}?", names.join(" or "))
}
