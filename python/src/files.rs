//! The records of files, for datasets in Python.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::TaskId;
use steadfast_common::job::dataset::{Manifest, ReadOptions};
use steadfast_common::job::job_file;
use steadfast_common::job::spec::{DataFormat, DatasetSpec, EvaluationSpec};
use steadfast_data::DataError;
use steadfast_process::Failure;
use tokio::runtime::Runtime;

use crate::arrays;
use crate::error::{exception, raise};

/// Files whose records are read a group at a time.
#[pyclass(frozen, module = "steadfast._native")]
pub struct Files {
    manifest: Manifest,
    options: ReadOptions,
}

#[pymethods]
impl Files {
    /// Lists the files, and counts their records. `dataset` has the keys of `[dataset]` of a job file, as JSON; without
    /// `format` it is that of the name of the first source.
    #[new]
    fn new(py: Python<'_>, dataset: &str) -> PyResult<Self> {
        let spec = spec_of(py, dataset)?;
        let planned = py.detach(|| {
            let whole = EvaluationSpec::default();
            runtime()?.block_on(steadfast_data::plan(&spec, &whole, None)).map_err(failure)
        });
        let manifest = planned.map_err(|it| exception(py, &it))?;
        let options = ReadOptions::new(&spec, &manifest);
        Ok(Self { manifest, options })
    }

    /// Returns how many records each group has.
    fn groups(&self) -> Vec<u64> {
        (0..self.manifest.task_count()).map(|it| self.manifest.records_of(TaskId(it))).collect()
    }

    /// Reads a group: arrays by name of the column.
    fn read<'py>(&self, py: Python<'py>, group: u32) -> PyResult<Bound<'py, PyDict>> {
        let chunks = self.manifest.chunks_of(TaskId(group));
        let reading = steadfast_data::read(&self.manifest, &self.options, chunks);
        let read = py.detach(|| runtime()?.block_on(reading).map_err(failure));
        arrays::batch(py, read.map_err(|it| exception(py, &it))?)
    }
}

/// Returns a runtime for one call: processes of a loader are forked, and have none of the threads of another one.
fn runtime() -> Result<Runtime, Failure> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(|error| Failure::io("cannot read files", &error))
}

fn spec_of(py: Python<'_>, dataset: &str) -> PyResult<DatasetSpec> {
    let invalid = |message: String| raise(py, "InvalidError", message);
    let mut keys: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(dataset).map_err(|error| invalid(error.to_string()))?;
    if !keys.contains_key("format") {
        let source = keys.get("source").and_then(|it| it.get(0)).and_then(|it| it.as_str());
        let source = source.unwrap_or_default();
        let format = DataFormat::of_name(source).ok_or_else(|| {
            invalid(format!("the name of `{source}` does not tell its format; pass `format`"))
        })?;
        let name = serde_json::to_value(format).map_err(|error| invalid(error.to_string()))?;
        keys.insert("format".to_owned(), name);
    }
    // The rest of a job file does not matter: a job checks what is said of its dataset.
    let job = serde_json::json!({
        "name": "files",
        "dataset": keys,
        "model": { "kind": "python", "entry": "model:build" },
        "passes": 1,
    });
    let text = toml::to_string(&job).map_err(|error| invalid(error.to_string()))?;
    match job_file::parse(&text) {
        Ok(spec) if spec.dataset.follow => {
            Err(invalid("`follow` is for the streams of jobs; leave it out".to_owned()))
        }
        Ok(spec) => Ok(spec.dataset),
        Err(error) => {
            let errors = error.errors.iter().map(|it| crate::job::without_line(it).to_owned());
            Err(invalid(errors.collect::<Vec<_>>().join("\n")))
        }
    }
}

fn failure(error: DataError) -> Failure {
    let kind = match error.kind() {
        steadfast_data::ErrorKind::Permanent => ErrorKind::Invalid,
        steadfast_data::ErrorKind::Transient => ErrorKind::Unavailable,
    };
    Failure::new(kind, error.to_string())
}
