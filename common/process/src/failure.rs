//! The error that ends a process: a message and an exit code.

use std::fmt;

use steadfast_common::error::ErrorKind;
use steadfast_common::job::job_file::JobFileError;
use steadfast_coord::CoordError;

/// The error with which a process ends. The message is for its operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub kind: ErrorKind,
    /// The message, one error a line.
    pub message: String,
}

impl Failure {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Creates a failure caused by invalid input.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Creates a failure that a retry may resolve.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    /// Creates a failure caused by an internal error.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Creates a failure from an I/O error: `cannot read x: no such file or directory`.
    pub fn io(what: impl fmt::Display, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let (kind, reason) = match error.kind() {
            Io::NotFound => (ErrorKind::NotFound, "no such file or directory".to_owned()),
            Io::PermissionDenied => (ErrorKind::Denied, "permission denied".to_owned()),
            Io::StorageFull | Io::QuotaExceeded => {
                (ErrorKind::TooLarge, "no space left on the device".to_owned())
            }
            _ => (ErrorKind::Internal, error.to_string()),
        };
        Self::new(kind, format!("{what}: {reason}"))
    }

    /// Prefixes the message with the failed operation.
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
        if status.code() == tonic::Code::Unimplemented {
            let message = "it does not know this call; use programs of one version";
            return Self::invalid(message);
        }
        Self::new(steadfast_proto::kind(&status), status.message())
    }
}

impl From<tonic::transport::Error> for Failure {
    fn from(error: tonic::transport::Error) -> Self {
        // tonic's own message is only "transport error"; its source is more specific.
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        Self::unavailable(cause.unwrap_or_else(|| error.to_string()))
    }
}

impl From<steadfast_host::task::Broken> for Failure {
    fn from(error: steadfast_host::task::Broken) -> Self {
        Self::internal(format!("a task of this process failed: {error}"))
    }
}
