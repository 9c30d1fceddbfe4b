//! Datasets: splits files of records into tasks, reads the records of a task, and converts files to other formats.

mod columns;
mod convert;
mod crosses;
mod encode;
mod error;
mod file_reader;
mod format;
mod manifest_file;
mod parquet_file;
mod plan;
mod read;
mod rows;
mod source;
mod task_split;
mod text;
mod values;

pub use convert::{Converted, IfThere, Target, convert};
pub use error::DataError;
pub use manifest_file::{load_manifest, load_manifest_of, store_manifest, store_manifest_as};
pub use plan::{plan, plan_pass};
pub use read::read;
pub use source::{ODD_NAME, StreamListing, resolve, stream_files};
pub use steadfast_store::ErrorKind;
