//! NumPy arrays over the trainer's memory, and back.

use std::sync::Arc;

use numpy::ndarray::ArrayView1;
use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use steadfast_common::job::columns::{Column, Shape, Values};
use steadfast_common::job::dataset::Records;
use steadfast_common::tensor::layout::Layout;
use steadfast_trainer::{Parameters, TableRows, category_id};

/// Copies of more bytes than this release the GIL.
const BYTES_WITH_GIL: usize = 1 << 20;

/// Keeps values alive while arrays refer to them.
#[pyclass(frozen)]
struct Shared(#[expect(dead_code, reason = "it is only kept alive")] Arc<Vec<f32>>);

/// Returns read-only arrays over `parameters`, by name. They share memory with the trainer, and keep it
/// alive.
///
/// # Errors
/// If NumPy cannot be imported.
pub fn parameters<'py>(py: Python<'py>, parameters: &Parameters) -> PyResult<Bound<'py, PyDict>> {
    let values = parameters.shared();
    let owner = Bound::new(py, Shared(values.clone()))?;
    let arrays = PyDict::new(py);
    let layout = parameters.layout();
    for (index, param) in layout.params().iter().enumerate() {
        if param.table.is_some() {
            continue;
        }
        let view = ArrayView1::from(&values[layout.range_of(index)]);
        // SAFETY: the owner holds the vector, which nothing changes or moves while it is shared.
        let flat = unsafe { PyArray1::borrow_from_array(&view, owner.clone().into_any()) };
        flat.readwrite().make_nonwriteable();
        arrays.set_item(&param.name, flat.call_method1("reshape", (param.shape.clone(),))?)?;
    }
    for (param, table) in layout.tables().iter().zip(parameters.tables()) {
        arrays.set_item(&param.name, rows(py, table)?)?;
    }
    Ok(arrays)
}

/// Returns the rows of a table as `steadfast.Rows`, copied.
fn rows<'py>(py: Python<'py>, table: &TableRows) -> PyResult<Bound<'py, PyAny>> {
    let (count, width) = (table.rows.len(), table.rows.width());
    let ids = PyArray1::from_slice(py, table.rows.ids());
    let values = PyArray1::from_slice(py, table.rows.values()).reshape([count, width])?;
    let places = PyArray1::from_iter(py, table.places.iter().map(|place| i64::from(*place)));
    ids.readwrite().make_nonwriteable();
    values.readwrite().make_nonwriteable();
    places.readwrite().make_nonwriteable();
    py.import("steadfast.tables")?.getattr("Rows")?.call1((ids, values, places))
}

/// Returns the ids of categories as an array; see `steadfast.category_ids`.
///
/// # Errors
/// If a value is neither text nor bytes, or there is one text in place of a list.
#[pyfunction]
pub fn category_ids<'py>(
    py: Python<'py>,
    column: &str,
    values: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    if values.is_instance_of::<PyString>() || values.is_instance_of::<PyBytes>() {
        return Err(PyTypeError::new_err("`values` is one text; pass a list of them"));
    }
    let mut ids = Vec::new();
    for value in values.try_iter()? {
        let value = value?;
        ids.push(match value.cast::<PyString>() {
            Ok(text) => category_id(column, text.to_cow()?.as_bytes()),
            Err(_) => category_id(column, value.cast::<PyBytes>()?.as_bytes()),
        });
    }
    Ok(PyArray1::from_vec(py, ids))
}

/// Returns the columns of records as arrays by name. The memory of numbers moves to NumPy without a copy.
///
/// # Errors
/// If memory is exhausted.
pub fn batch(py: Python<'_>, records: Records) -> PyResult<Bound<'_, PyDict>> {
    let batch = PyDict::new(py);
    if !records.columns.is_empty() {
        for column in records.columns {
            let name = column.name.clone();
            batch.set_item(name, self::column(py, column)?)?;
        }
        return Ok(batch);
    }
    let Records { features, width, labels, weights, .. } = records;
    let features = PyArray1::from_vec(py, features).reshape([labels.len(), width])?;
    batch.set_item("features", features)?;
    batch.set_item("label", PyArray1::from_vec(py, labels))?;
    if !weights.is_empty() {
        batch.set_item("weight", PyArray1::from_vec(py, weights))?;
    }
    Ok(batch)
}

/// Returns a column as an array with one element, or one row, for each record; text and bytes become objects. Lists of
/// any length become a pair: the elements of all records, and where each record begins and the last one ends.
fn column(py: Python<'_>, column: Column) -> PyResult<Bound<'_, PyAny>> {
    let records = column.len();
    let Column { shape, values, offsets, .. } = column;
    let objects = |of: &dyn Fn(&[u8]) -> PyResult<Py<PyAny>>, bytes: &[u8]| {
        let ranges = offsets.windows(2).map(|ends| ends[0] as usize..ends[1] as usize);
        let objects: PyResult<Vec<Py<PyAny>>> = ranges.map(|range| of(&bytes[range])).collect();
        Ok(PyArray1::from_vec(py, objects?).into_any())
    };
    let text = |bytes: &[u8]| {
        let text = std::str::from_utf8(bytes).expect("readers check that text is UTF-8");
        Ok(PyString::new(py, text).into_any().unbind())
    };
    let array = match values {
        Values::Text(bytes) => return objects(&text, &bytes),
        Values::Bytes(bytes) => {
            return objects(&|bytes| Ok(PyBytes::new(py, bytes).into_any().unbind()), &bytes);
        }
        Values::Bool(values) => PyArray1::from_vec(py, values).into_any(),
        Values::Uint8(values) => PyArray1::from_vec(py, values).into_any(),
        Values::Int64(values) => PyArray1::from_vec(py, values).into_any(),
        Values::Uint64(values) => PyArray1::from_vec(py, values).into_any(),
        Values::Float32(values) => PyArray1::from_vec(py, values).into_any(),
        Values::Float64(values) => PyArray1::from_vec(py, values).into_any(),
    };
    match shape {
        Shape::One => Ok(array),
        Shape::Fixed(length) => array.call_method1("reshape", (records, length)),
        Shape::List => Ok((array, PyArray1::from_vec(py, offsets)).into_pyobject(py)?.into_any()),
    }
}

/// What happens to the values that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    Replace,
    /// Parameters without an array keep their values.
    Overwrite,
    Add,
}

/// Writes the arrays in `given`, one for each parameter by name, to `to`. Unless `write` says
/// otherwise, parameters without an array (or with `None`) count as zero.
///
/// # Errors
/// If an array has an unknown name, another shape, or a type that does not convert to float32.
pub fn write_to(
    py: Python<'_>,
    given: &Bound<'_, PyDict>,
    to: &mut Parameters,
    write: Write,
) -> PyResult<()> {
    let layout = to.layout().clone();
    let (mut used, mut tables) = (0, 0..);
    for (index, param) in layout.params().iter().enumerate() {
        let (to, shape) = match param.table.and_then(|_| tables.next()) {
            None => (&mut to.values_mut()[layout.range_of(index)], param.shape.clone()),
            Some(table) if to.tables().len() <= table => {
                if given.contains(&param.name)? {
                    return Err(PyValueError::new_err(format!(
                        "`{}` is a table, whose rows begin as its `initial` says; leave it out",
                        param.name
                    )));
                }
                continue;
            }
            Some(table) => {
                let rows = &mut to.table_mut(table).rows;
                let shape = vec![rows.len(), rows.width()];
                (rows.values_mut(), shape)
            }
        };
        let array = given.get_item(&param.name)?;
        used += usize::from(array.is_some());
        let Some(array) = array.filter(|array| !array.is_none()) else {
            if write == Write::Replace {
                to.fill(0.0);
            }
            continue;
        };
        let array = float32(&array, &param.name)?;
        if array.shape() != shape {
            return Err(PyValueError::new_err(format!(
                "`{}` has the shape {:?}, but an array of shape {:?} was given",
                param.name,
                shape,
                array.shape()
            )));
        }
        let from = array.as_slice().map_err(|error| PyValueError::new_err(error.to_string()))?;
        let mut put = || match write {
            Write::Replace | Write::Overwrite => to.copy_from_slice(from),
            Write::Add => to.iter_mut().zip(from).for_each(|(to, from)| *to += from),
        };
        if BYTES_WITH_GIL < size_of_val(from) {
            py.detach(put);
        } else {
            put();
        }
    }
    if used < given.len() {
        return Err(unknown(given, &layout));
    }
    Ok(())
}

/// Returns `array` as a contiguous array of float32; a copy only if it is not one.
pub fn float32<'py>(
    array: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<PyReadonlyArrayDyn<'py, f32>> {
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
