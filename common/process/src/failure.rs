//! The error that ends a process: one clear line, and an exit code that says what to do about it.

use std::fmt;

use steadfast_common::error::ErrorKind;
use steadfast_common::job_file::JobFileError;
use steadfast_coord::CoordError;

/// Why a process ends. Its message is for a person who can act on it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub kind: ErrorKind,
    /// One fault a line.
    pub message: String,
}

impl Failure {
    /// Makes a failure of any kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Makes a failure that calls for other input.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Makes a failure that another try may cure.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    /// Makes a failure of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Makes a failure from an operation on a file: `cannot read x: no such file`.
    pub fn io(what: impl fmt::Display, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let (kind, reason) = match error.kind() {
            Io::NotFound => (ErrorKind::NotFound, "no such file or folder".to_owned()),
            Io::PermissionDenied => (ErrorKind::Denied, "permission denied".to_owned()),
            _ => (ErrorKind::Internal, error.to_string()),
        };
        Self::new(kind, format!("{what}: {reason}"))
    }

    /// Puts what was being done in front of the message.
    #[must_use]
    pub fn context(self, doing: impl fmt::Display) -> Self {
        Self { kind: self.kind, message: format!("{doing}: {}", self.message) }
    }
}

impl From<CoordError> for Failure {
    fn from(error: CoordError) -> Self {
        Self::new(error.kind(), error.to_string())
    }
}

impl From<JobFileError> for Failure {
    fn from(error: JobFileError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<tonic::Status> for Failure {
    fn from(status: tonic::Status) -> Self {
        Self::new(steadfast_proto::kind(&status), status.message())
    }
}

impl From<tonic::transport::Error> for Failure {
    fn from(error: tonic::transport::Error) -> Self {
        // tonic's own text is only "transport error"; the cause below it says more.
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        Self::unavailable(cause.unwrap_or_else(|| error.to_string()))
    }
}

impl From<steadfast_host::task::Broken> for Failure {
    fn from(error: steadfast_host::task::Broken) -> Self {
        Self::internal(format!("a task of this process broke: {error}"))
    }
}
