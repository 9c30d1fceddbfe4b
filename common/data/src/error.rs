//! Errors of a dataset, and how to fix them.

use steadfast_common::job::columns::ColumnType;
use steadfast_host::task::Broken;
use steadfast_store::{ErrorKind, StoreError};

/// A dataset that cannot be planned or read.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the dataset has no source; list at least one path or URL")]
    NoSource,
    #[error("the dataset has no records in {files} files, the first of which is {first}")]
    NoRecords { files: usize, first: String },
    #[error("`evaluation.source` has no records in {files} files, the first of which is {first}")]
    NoHeldOut { files: usize, first: String },
    #[error(
        "{file} is in `dataset.source` and in `evaluation.source`; records that are trained on tell nothing about others"
    )]
    HeldOutTwice { file: String },
    #[error("a task cannot have {value} records; use at least 1")]
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
    #[error("{file} has several columns named `{column}`; rename all but one")]
    DuplicateColumn { column: String, file: String },
    #[error("column `{column}` of {file} holds {found}, not numbers; leave it out or convert it")]
    NotNumeric { column: String, file: String, found: String },
    #[error(
        "column `{column}` of {file} is compressed with {codec}, which cannot be read; write the \
         file again with zstd or snappy"
    )]
    UnknownCodec { column: String, file: String, codec: &'static str },
    #[error(
        "column `{column}` of {file} has integers of 32 bits with differences of more than 32 bits, which the \
         encoding DELTA_BINARY_PACKED does not allow; DuckDB writes such files with `PARQUET_VERSION v2`: write it \
         again with v1, or cast the column to BIGINT"
    )]
    WideDeltas { column: String, file: String },
    #[error("column `{column}` is both the label and a feature; leave it out of the features")]
    LabelAmongFeatures { column: String },
    #[error(
        "the columns of {file} are not those of {first}: {difference}; all files of a dataset \
         need the same columns"
    )]
    ColumnsDiffer { file: String, first: String, difference: String },
    #[error(
        "record {record} of {file} ({}) has {found} fields instead of {expected}; {}",
        lines(*line, *last_line),
        if line == last_line { "is the separator right?" } else { "is a quote not closed?" }
    )]
    FieldCount {
        file: String,
        record: u64,
        line: u64,
        last_line: u64,
        expected: usize,
        found: usize,
    },
    #[error(
        "the quote that opens in {place} of {file} (line {line}) is not closed; close it, or quote \
         the whole field and double the quotes in it"
    )]
    UnclosedQuote { file: String, place: String, line: u64 },
    #[error("{file} is {found}, not {expected}; {way_out}")]
    OtherFormat { file: String, expected: &'static str, found: String, way_out: String },
    #[error(
        "the fields of {file} are separated by {found}: its first line is one column, `{line}`; \
         {way_out}"
    )]
    Separator { file: String, found: &'static str, line: String, way_out: &'static str },
    #[error("{url} is a directory; name its files, for example `{url}/*.{ending}`")]
    Directory { url: String, ending: &'static str },
    #[error("record {record} of {file}, column `{column}`: {reason}")]
    BadRecord { file: String, record: u64, column: String, reason: String },
    #[error("record {record} of {file}: {reason}")]
    BadRow { file: String, record: u64, reason: String },
    #[error(
        "{file} has {features} features, and at most {max} are expanded; use `columns = [\"index\", \
         \"label\", \"value\"]` with a Python model"
    )]
    TooManyFeatures { file: String, features: u64, max: u64 },
    #[error("the cross `{cross}` has the name of a column; rename it")]
    CrossNamedAsColumn { cross: String },
    #[error(
        "the cross `{cross}` has the part `{column}`, which is not among `dataset.categories` or \
         `dataset.columns`; add it there"
    )]
    UnknownPart { cross: String, column: String },
    #[error(
        "the cross `{cross}` has the part `{column}`, which holds fractions; set its type in \
         `dataset.types`, or leave it out"
    )]
    FractionalPart { cross: String, column: String },
    #[error("`dataset.types` has `{column}`, which is none of the columns; remove it")]
    UnusedType { column: String },
    #[error("column `{column}` of {file} holds {found}; leave it out or {way_out}")]
    Untyped { column: String, file: String, found: String, way_out: &'static str },
    #[error("{file} cannot be read: {reason}")]
    BadFile { file: String, reason: String },
    #[error("{file} has changed since the job was planned: {how}; restore it, or start a new job")]
    Changed { file: String, how: String },
    #[error("column `{column}` is {kind}, and {format} cannot hold it; {way_out}, or leave it out")]
    CannotHold { column: String, kind: ColumnType, format: &'static str, way_out: &'static str },
    #[error("{format} can be read, not written; write Parquet, CSV, TSV, JSON lines or TFRecord")]
    ReadOnly { format: &'static str },
    #[error("{records} records cannot be divided into {shards} files; use 1 to {records}")]
    BadShards { shards: u32, records: u64 },
    #[error("{url} already exists; name another directory or prefix, or overwrite it with --force")]
    Exists { url: String },
    #[error("the records cannot be written: {reason}")]
    Encoding { reason: String },
    #[error("the manifest does not fit the dataset: {reason}; start a new job")]
    BadManifest { reason: String },
}

impl DataError {
    /// Classifies the error for the caller: permanent if the data or the job file cause it, transient if
    /// only the access to them does.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Store(error) => error.kind(),
            Self::NoSource
            | Self::NoRecords { .. }
            | Self::NoHeldOut { .. }
            | Self::HeldOutTwice { .. }
            | Self::BadTaskSize { .. }
            | Self::TooManyTasks { .. }
            | Self::NothingToTrain { .. }
            | Self::UnknownColumn { .. }
            | Self::DuplicateColumn { .. }
            | Self::NotNumeric { .. }
            | Self::UnknownCodec { .. }
            | Self::WideDeltas { .. }
            | Self::LabelAmongFeatures { .. }
            | Self::ColumnsDiffer { .. }
            | Self::FieldCount { .. }
            | Self::UnclosedQuote { .. }
            | Self::OtherFormat { .. }
            | Self::Separator { .. }
            | Self::Directory { .. }
            | Self::BadRecord { .. }
            | Self::BadRow { .. }
            | Self::TooManyFeatures { .. }
            | Self::CrossNamedAsColumn { .. }
            | Self::UnknownPart { .. }
            | Self::FractionalPart { .. }
            | Self::UnusedType { .. }
            | Self::Untyped { .. }
            | Self::BadFile { .. }
            | Self::Changed { .. }
            | Self::CannotHold { .. }
            | Self::ReadOnly { .. }
            | Self::BadShards { .. }
            | Self::Exists { .. }
            | Self::Encoding { .. }
            | Self::BadManifest { .. } => ErrorKind::Permanent,
        }
    }

    pub(crate) fn bad_file(file: &str, reason: impl Into<String>) -> Self {
        Self::BadFile { file: file.to_owned(), reason: reason.into() }
    }

    /// Treats a decoder that panicked as an error of the file.
    pub(crate) fn broken(file: &str, decoder: &Broken) -> Self {
        Self::bad_file(file, format!("its content is corrupt (the decoder panicked: {decoder})"))
    }
}

fn lines(first: u64, last: u64) -> String {
    if first == last { format!("line {first}") } else { format!("lines {first} to {last}") }
}

fn suggestion(candidates: &[String]) -> String {
    if candidates.is_empty() {
        return String::new();
    }
    let names: Vec<String> = candidates.iter().map(|name| format!("`{name}`")).collect();
    format!("; did you mean {}?", names.join(" or "))
}
