//! Job files and models, for the Python side.

use std::path::PathBuf;

use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use safetensors::{Dtype, SafeTensors};
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

/// Reads the float32 tensors of a safetensors file as arrays by name.
///
/// # Errors
/// `OSError`, or `ValueError` for another format.
#[pyfunction]
pub fn read_tensors(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let bytes = py.detach(|| std::fs::read(&path));
    let bytes = bytes.map_err(|error| PyOSError::new_err(named(&error)))?;
    let file = SafeTensors::deserialize(&bytes);
    let file = file.map_err(|error| PyValueError::new_err(named(&error)))?;
    let tensors = PyDict::new(py);
    for (name, tensor) in file.tensors() {
        if tensor.dtype() != Dtype::F32 {
            let message = format!("the tensor `{name}` is {:?}, not F32", tensor.dtype());
            return Err(PyValueError::new_err(named(&message)));
        }
        let (values, _) = tensor.data().as_chunks::<4>();
        let values: Vec<f32> = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let array = PyArray1::from_vec(py, values).reshape(tensor.shape().to_vec())?;
        tensors.set_item(name, array)?;
    }
    Ok(tensors)
}

/// Removes the line number of a file that the user has not written.
fn without_line(error: &str) -> String {
    let rest = error.strip_prefix("line ").and_then(|it| it.split_once(": "));
    rest.map_or(error, |(_, rest)| rest).to_owned()
}

fn bad(py: Python<'_>, errors: Vec<String>) -> PyErr {
    raise(py, "BadJobFile", errors)
}
