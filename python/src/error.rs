//! Errors on their way between Python and the trainer.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;
use steadfast_trainer::ModelError;

/// Converts an exception of the user's code, with its traceback, which ends the trainer's log.
pub fn model_error(py: Python<'_>, error: &PyErr) -> ModelError {
    let traceback = error.traceback(py).and_then(|it| it.format().ok()).unwrap_or_default();
    ModelError::Failed { message: format!("{traceback}{error}").trim_end().to_owned() }
}

/// Converts the failure of the trainer to the exception of its kind.
pub fn exception(py: Python<'_>, failure: &Failure) -> PyErr {
    let class = match failure.kind {
        ErrorKind::Invalid => "InvalidError",
        ErrorKind::Unavailable => "UnavailableError",
        ErrorKind::Denied => "DeniedError",
        ErrorKind::NotFound => "NotFoundError",
        ErrorKind::Conflict => "ConflictError",
        _ => "SteadfastError",
    };
    let made = py
        .import("steadfast.errors")
        .and_then(|module| module.getattr(class))
        .and_then(|class| class.call1((failure.message.clone(),)));
    match made {
        Ok(made) => PyErr::from_value(made),
        Err(_) => PyRuntimeError::new_err(failure.message.clone()),
    }
}
