//! Errors on their way between Python and the trainer.

use pyo3::prelude::*;
use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;
use steadfast_trainer::ModelError;

/// Converts an exception of the user's code, with its traceback, which ends the trainer's log.
pub fn model_error(py: Python<'_>, error: &PyErr) -> ModelError {
    let described = py
        .import("steadfast.errors")
        .and_then(|module| module.getattr("described")?.call1((error.value(py),))?.extract());
    ModelError::Failed { message: described.unwrap_or_else(|_| error.to_string()) }
}

/// Converts the failure of the trainer to the exception of its kind.
pub fn exception(py: Python<'_>, failure: &Failure) -> PyErr {
    raise(py, class_of(failure.kind), failure.message.as_str())
}

/// Returns the exception `class` of `steadfast.errors`, made from `detail`.
pub fn raise<'py>(py: Python<'py>, class: &str, detail: impl IntoPyObject<'py>) -> PyErr {
    let made = py
        .import("steadfast.errors")
        .and_then(|module| module.getattr(class))
        .and_then(|class| class.call1((detail,)));
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Returns an error if this is another process than `process`, where the trainer's threads run.
///
/// # Errors
/// `ForkedError`.
pub fn check_process(py: Python<'_>, process: u32) -> PyResult<()> {
    if std::process::id() == process {
        return Ok(());
    }
    let message = "this process was forked from the one that has connected; start processes with \
                   `multiprocessing.get_context(\"spawn\")`, or connect in the child";
    Err(raise(py, "ForkedError", message))
}

fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "InvalidError",
        ErrorKind::Unavailable => "UnavailableError",
        ErrorKind::Denied => "DeniedError",
        ErrorKind::NotFound => "NotFoundError",
        ErrorKind::Conflict => "ConflictError",
        ErrorKind::Stale | ErrorKind::NotYet | ErrorKind::TooLarge | ErrorKind::Internal => {
            "SteadfastError"
        }
    }
}
