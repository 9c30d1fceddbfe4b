//! NumPy arrays over the trainer's memory, and back.

use std::sync::Arc;

use numpy::ndarray::ArrayView1;
use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use steadfast_common::layout::Layout;
use steadfast_trainer::Parameters;

/// Copies of more bytes than this release the GIL.
const BYTES_WITH_GIL: usize = 1 << 20;

/// Keeps values alive while arrays refer to them.
#[pyclass(frozen)]
struct Values(#[expect(dead_code, reason = "it is only kept alive")] Arc<Vec<f32>>);

/// Returns read-only arrays over `parameters`, by name. They share memory with the trainer, and keep it
/// alive.
///
/// # Errors
/// If NumPy cannot be imported.
pub fn parameters<'py>(py: Python<'py>, parameters: &Parameters) -> PyResult<Bound<'py, PyDict>> {
    let values = parameters.shared();
    let owner = Bound::new(py, Values(values.clone()))?;
    let arrays = PyDict::new(py);
    let layout = parameters.layout();
    for (index, param) in layout.params().iter().enumerate() {
        let view = ArrayView1::from(&values[layout.range_of(index)]);
        // SAFETY: the owner holds the vector, which nothing changes or moves while it is shared.
        let flat = unsafe { PyArray1::borrow_from_array(&view, owner.clone().into_any()) };
        flat.readwrite().make_nonwriteable();
        arrays.set_item(&param.name, flat.call_method1("reshape", (param.shape.clone(),))?)?;
    }
    Ok(arrays)
}

/// Adds the arrays in `given`, one for each parameter by name, to `sum`. Parameters without an array (or
/// with `None`) count as zero.
///
/// # Errors
/// If an array has an unknown name, another shape, or a type that does not convert to float32.
pub fn add_to(py: Python<'_>, given: &Bound<'_, PyDict>, sum: &mut Parameters) -> PyResult<()> {
    let layout = sum.layout().clone();
    let values = sum.values_mut();
    let mut used = 0;
    for (index, param) in layout.params().iter().enumerate() {
        let Some(array) = given.get_item(&param.name)? else { continue };
        used += 1;
        if array.is_none() {
            continue;
        }
        let array = float32(&array, &param.name)?;
        if array.shape() != param.shape.as_slice() {
            return Err(PyValueError::new_err(format!(
                "`{}` has the shape {:?}, but an array of shape {:?} was given",
                param.name,
                param.shape,
                array.shape()
            )));
        }
        let from = array.as_slice().map_err(|error| PyValueError::new_err(error.to_string()))?;
        let to = &mut values[layout.range_of(index)];
        if BYTES_WITH_GIL < size_of_val(from) {
            py.detach(|| add(to, from));
        } else {
            add(to, from);
        }
    }
    if used < given.len() {
        return Err(unknown(given, &layout));
    }
    Ok(())
}

fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

/// Returns `array` as a contiguous array of float32; a copy only if it is not one.
fn float32<'py>(array: &Bound<'py, PyAny>, name: &str) -> PyResult<PyReadonlyArrayDyn<'py, f32>> {
    let py = array.py();
    let converted = py
        .import("numpy")?
        .call_method1("ascontiguousarray", (array, "float32"))
        .map_err(|error| PyTypeError::new_err(format!("the value of `{name}`: {error}")))?;
    // `ascontiguousarray` gives a scalar one dimension.
    let shape = array.getattr("shape").and_then(|it| it.extract::<Vec<usize>>()).ok();
    let converted = match shape {
        Some(shape) if shape.is_empty() => converted.call_method1("reshape", (shape,))?,
        Some(_) | None => converted,
    };
    Ok(converted.cast_into::<PyArrayDyn<f32>>()?.try_readonly()?)
}

fn unknown(given: &Bound<'_, PyDict>, layout: &Layout) -> PyErr {
    let known: Vec<&str> = layout.params().iter().map(|param| param.name.as_str()).collect();
    let names = given.keys();
    let unknown = names
        .iter()
        .find(|name| !name.extract::<String>().is_ok_and(|name| known.contains(&name.as_str())));
    let unknown = unknown.map(|name| name.to_string()).unwrap_or_default();
    PyValueError::new_err(format!(
        "there is no parameter `{unknown}`; the model has {}",
        known.join(", ")
    ))
}
