//! Job files, for the Python side.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use steadfast_common::job::job_file as format;

use crate::error::raise;

/// Returns the keys, given as JSON, as a job file in TOML.
///
/// # Errors
/// `BadJobFile`, with one message for each error.
#[pyfunction]
pub fn job_file(py: Python<'_>, json: &str) -> PyResult<String> {
    let keys: serde_json::Value =
        serde_json::from_str(json).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let text = toml::to_string(&keys).map_err(|error| bad(py, vec![error.to_string()]))?;
    match format::parse(&text) {
        Ok(_) => Ok(text),
        Err(error) => Err(bad(py, error.errors.iter().map(|it| without_line(it)).collect())),
    }
}

/// Returns the contents of a TOML file as JSON.
///
/// # Errors
/// `BadJobFile`, if it is not valid TOML.
#[pyfunction]
pub fn toml_to_json(py: Python<'_>, text: &str) -> PyResult<String> {
    let keys: toml::Table =
        text.parse().map_err(|error: toml::de::Error| bad(py, vec![error.to_string()]))?;
    serde_json::to_string(&keys).map_err(|error| bad(py, vec![error.to_string()]))
}

/// Removes the line number of a file that the user has not written.
pub(crate) fn without_line(error: &str) -> String {
    let rest = error.strip_prefix("line ").and_then(|it| it.split_once(": "));
    rest.map_or(error, |(_, rest)| rest).to_owned()
}

fn bad(py: Python<'_>, errors: Vec<String>) -> PyErr {
    raise(py, "BadJobFile", errors)
}
