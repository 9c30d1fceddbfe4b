//! Arguments and results of closures: from Python's objects to messages, and back.

use std::sync::Arc;

use prost::Message;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple,
};
use steadfast_coordinator::{ClosureId, WorkerValue};
use steadfast_proto::v1::value::Kind;
use steadfast_proto::v1::{Arguments, Array, Entry, Mapping, None as Nothing, Sequence, Value};

use crate::coordinator::{Coordinator, PerWorker, RemoteValue};
use crate::error::raise;

/// The maximum nesting of lists, tuples and dictionaries. The decoder of messages allows a hundred levels, of which a
/// dictionary takes three.
const DEPTH_MAX: usize = 30;

/// The references in the arguments of a call, in the order of their first mention.
pub struct References<'c> {
    coordinator: &'c Coordinator,
    /// The closures whose results are arguments.
    pub results: Vec<ClosureId>,
    /// The values of workers.
    pub values: Vec<Arc<WorkerValue>>,
}

impl<'c> References<'c> {
    /// Creates the references of a call of `coordinator`. Those to another one are errors.
    pub fn of(coordinator: &'c Coordinator) -> Self {
        Self { coordinator, results: Vec::new(), values: Vec::new() }
    }
}

/// Distinguishes arguments, which may contain references, from results.
enum Place<'a, 'c> {
    Argument(&'a mut References<'c>),
    Result,
}

/// Encodes the arguments of a call.
///
/// # Errors
/// `TypeError` for a value that does not travel, and errors of its conversion.
pub fn arguments(
    positional: &Bound<'_, PyAny>,
    named: Option<&Bound<'_, PyDict>>,
    references: &mut References<'_>,
) -> PyResult<Arguments> {
    let mut encoded = Arguments::default();
    let mut place = Place::Argument(references);
    for value in positional.try_iter()? {
        encoded.positional.push(encode(&value?, &mut place, 0)?);
    }
    for (name, value) in named.into_iter().flatten() {
        encoded.named.insert(name.extract()?, encode(&value, &mut place, 0)?);
    }
    Ok(encoded)
}

/// Encodes the result of a closure.
///
/// # Errors
/// Returns the errors of [`arguments`].
pub fn result(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    Ok(encode(value, &mut Place::Result, 0)?.encode_to_vec())
}

fn encode(value: &Bound<'_, PyAny>, place: &mut Place<'_, '_>, depth: usize) -> PyResult<Value> {
    if DEPTH_MAX < depth {
        return Err(PyValueError::new_err(format!("a value is nested more than {DEPTH_MAX} deep")));
    }
    let mut items = |values: Bound<'_, PyAny>| -> PyResult<Sequence> {
        let items = values.try_iter()?.map(|item| encode(&item?, place, depth + 1));
        Ok(Sequence { items: items.collect::<PyResult<_>>()? })
    };
    let kind = if value.is_none() {
        Kind::None(Nothing {})
    } else if let Ok(value) = value.cast::<PyBool>() {
        Kind::Boolean(value.is_true())
    } else if let Ok(number) = value.cast::<PyInt>() {
        match number.extract::<i64>() {
            Ok(number) => Kind::Integer(number),
            Err(_) => Kind::LargeInteger(number.str()?.to_string()),
        }
    } else if let Ok(number) = value.cast::<PyFloat>() {
        Kind::Number(number.value())
    } else if let Ok(text) = value.cast::<PyString>() {
        Kind::Text(text.to_cow()?.into_owned())
    } else if let Ok(data) = value.cast::<PyBytes>() {
        Kind::Data(data.as_bytes().to_vec().into())
    } else if let Ok(data) = value.cast::<PyByteArray>() {
        Kind::Data(data.to_vec().into())
    } else if value.is_instance_of::<PyList>() {
        Kind::List(items(value.clone())?)
    } else if value.is_instance_of::<PyTuple>() {
        Kind::Tuple(items(value.clone())?)
    } else if let Ok(mapping) = value.cast::<PyDict>() {
        let entries = mapping.iter().map(|(key, value)| {
            let key = Some(encode(&key, place, depth + 1)?);
            Ok(Entry { key, value: Some(encode(&value, place, depth + 1)?) })
        });
        Kind::Mapping(Mapping { entries: entries.collect::<PyResult<_>>()? })
    } else {
        other(value, place)?
    };
    Ok(Value { kind: Some(kind) })
}

/// Encodes references and arrays.
fn other(value: &Bound<'_, PyAny>, place: &mut Place<'_, '_>) -> PyResult<Kind> {
    if let Ok(Some(handle)) = value.getattr_opt("_handle") {
        let Place::Argument(references) = place else {
            let message = "a closure cannot return what stands for a result; return the value";
            return Err(PyTypeError::new_err(message));
        };
        let is_ours = match (handle.cast::<RemoteValue>(), handle.cast::<PerWorker>()) {
            (Ok(remote), _) => remote.get().is_of(references.coordinator),
            (_, Ok(per_worker)) => per_worker.get().is_of(references.coordinator),
            (Err(_), Err(_)) => true,
        };
        if !is_ours {
            let message = "it belongs to another coordinator; fetch the result, and pass that";
            return Err(raise(value.py(), "InvalidError", message));
        }
        if let Ok(remote) = handle.cast::<RemoteValue>() {
            let id = remote.get().id();
            let known = references.results.iter().position(|it| *it == id);
            let index = known.unwrap_or_else(|| {
                references.results.push(id);
                references.results.len() - 1
            });
            return Ok(Kind::Result(u32::try_from(index)?));
        }
        if let Ok(per_worker) = handle.cast::<PerWorker>() {
            references.values.push(per_worker.get().value());
            return Ok(Kind::PerWorker(per_worker.get().message()));
        }
    }
    if value.hasattr("__array__")? {
        return Ok(Kind::Array(array(value)?));
    }
    let kind = value.get_type().fully_qualified_name()?.to_string();
    Err(PyTypeError::new_err(format!(
        "a value of type `{kind}` does not travel between coordinator and worker: use None, numbers, text, bytes, arrays, \
         and lists, tuples and dictionaries of them"
    )))
}

fn array(value: &Bound<'_, PyAny>) -> PyResult<Array> {
    let numpy = value.py().import("numpy")?;
    let array = numpy.call_method1("asarray", (value,))?;
    let dtype = array.getattr("dtype")?;
    // Types of other packages, such as bfloat16, have a name that stands for bytes.
    let is_known = numpy.call_method1("dtype", (dtype.getattr("str")?,))?.eq(&dtype)?;
    let is_masked = value.hasattr("mask")? && value.hasattr("fill_value")?;
    let is_plain = is_known
        && !is_masked
        && !dtype.getattr("hasobject")?.extract::<bool>()?
        && dtype.getattr("names")?.is_none()
        && dtype.getattr("subdtype")?.is_none();
    if !is_plain {
        let kind = if is_masked {
            "masked arrays".to_owned()
        } else {
            format!("arrays of type `{dtype}`")
        };
        let message = format!("{kind} do not travel; use plain ones of numbers or text");
        return Err(PyTypeError::new_err(message));
    }
    let data = array.call_method0("tobytes")?;
    Ok(Array {
        dtype: dtype.getattr("str")?.extract()?,
        shape: array.getattr("shape")?.extract()?,
        data: data.cast::<PyBytes>()?.as_bytes().to_vec().into(),
    })
}

/// Encodes the arguments of a call without the numbers of per-worker values.
pub fn without_numbers(arguments: &Arguments) -> Vec<u8> {
    let mut plain = arguments.clone();
    plain.positional.iter_mut().chain(plain.named.values_mut()).for_each(clear_numbers);
    plain.encode_to_vec()
}

fn clear_numbers(value: &mut Value) {
    match &mut value.kind {
        Some(Kind::PerWorker(per_worker)) => per_worker.number = 0,
        Some(Kind::List(sequence) | Kind::Tuple(sequence)) => {
            sequence.items.iter_mut().for_each(clear_numbers);
        }
        Some(Kind::Mapping(mapping)) => {
            let parts = mapping.entries.iter_mut().flat_map(|it| [&mut it.key, &mut it.value]);
            parts.flatten().for_each(clear_numbers);
        }
        _ => {}
    }
}

/// The referents of arguments, at the worker.
pub struct Referred<'a, 'py> {
    /// The encoded results.
    pub results: &'a [bytes::Bytes],
    /// Called with the number, the function, the encoded arguments, and whether an iterator is wanted.
    pub per_worker: &'a Bound<'py, PyAny>,
}

/// Decodes arguments: the positional ones, and those by name.
///
/// # Errors
/// If they are damaged, and errors of `referred`.
pub fn decode_arguments<'py>(
    py: Python<'py>,
    encoded: &[u8],
    referred: &Referred<'_, 'py>,
) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
    let Arguments { positional, named } = Arguments::decode(encoded).map_err(damaged)?;
    let positional = positional
        .into_iter()
        .map(|value| decode(py, value, Some(referred)))
        .collect::<PyResult<Vec<_>>>()?;
    let by_name = PyDict::new(py);
    for (name, value) in named {
        by_name.set_item(name, decode(py, value, Some(referred))?)?;
    }
    Ok((PyTuple::new(py, positional)?, by_name))
}

/// Decodes the result of a closure. The result of one whose data had ended, which is empty, is `None`.
///
/// # Errors
/// If it is damaged.
pub fn decode_result<'py>(py: Python<'py>, encoded: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    if encoded.is_empty() {
        return Ok(py.None().into_bound(py));
    }
    decode(py, Value::decode(encoded).map_err(damaged)?, None)
}

fn decode<'py>(
    py: Python<'py>,
    value: Value,
    referred: Option<&Referred<'_, 'py>>,
) -> PyResult<Bound<'py, PyAny>> {
    let items = |sequence: Sequence| -> PyResult<Vec<Bound<'py, PyAny>>> {
        sequence.items.into_iter().map(|item| decode(py, item, referred)).collect()
    };
    Ok(match value.kind.ok_or_else(|| damaged("a value has no kind"))? {
        Kind::None(_) => py.None().into_bound(py),
        Kind::Boolean(value) => PyBool::new(py, value).to_owned().into_any(),
        Kind::Integer(number) => number.into_pyobject(py)?.into_any(),
        Kind::LargeInteger(digits) => py.get_type::<PyInt>().call1((digits,))?,
        Kind::Number(number) => PyFloat::new(py, number).into_any(),
        Kind::Text(text) => PyString::new(py, &text).into_any(),
        Kind::Data(data) => PyBytes::new(py, &data).into_any(),
        Kind::Array(array) => decode_array(py, &array)?,
        Kind::List(list) => PyList::new(py, items(list)?)?.into_any(),
        Kind::Tuple(tuple) => PyTuple::new(py, items(tuple)?)?.into_any(),
        Kind::Mapping(mapping) => {
            let dict = PyDict::new(py);
            for Entry { key, value } in mapping.entries {
                let key = key.ok_or_else(|| damaged("an entry has no key"))?;
                let value = value.ok_or_else(|| damaged("an entry has no value"))?;
                dict.set_item(decode(py, key, referred)?, decode(py, value, referred)?)?;
            }
            dict.into_any()
        }
        Kind::Result(index) => {
            let results = referred.map(|it| it.results).unwrap_or_default();
            let found = results.get(index as usize);
            decode_result(py, found.ok_or_else(|| damaged("a result is missing"))?)?
        }
        Kind::PerWorker(it) => {
            let referred = referred.ok_or_else(|| damaged("a result refers to a worker"))?;
            let arguments = PyBytes::new(py, &it.arguments);
            referred.per_worker.call1((it.number, it.function, arguments, it.iterates))?
        }
    })
}

fn decode_array<'py>(py: Python<'py>, array: &Array) -> PyResult<Bound<'py, PyAny>> {
    let numpy = py.import("numpy")?;
    let dtype = numpy.call_method1("dtype", (&array.dtype,))?;
    if dtype.getattr("hasobject")?.extract()? {
        return Err(damaged("an array holds objects"));
    }
    // Writable, and with memory of its own.
    let data = PyByteArray::new(py, &array.data);
    let shape = PyTuple::new(py, &array.shape)?;
    if array.data.is_empty() && !array.shape.contains(&0) {
        return Err(damaged("an array has no data"));
    }
    let whole = match array.data.is_empty() {
        true => numpy.call_method1("empty", (shape, dtype))?,
        false => {
            numpy.call_method1("frombuffer", (data, dtype))?.call_method1("reshape", (shape,))?
        }
    };
    match array.shape.is_empty() {
        // A number of NumPy.
        true => whole.get_item(()),
        false => Ok(whole),
    }
}

fn damaged(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("a value was damaged on its way: {error}"))
}
