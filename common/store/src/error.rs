//! What can go wrong with an object store, and what to do about it.

use std::error::Error;
use std::io;
use std::time::Duration;

/// What lies beneath an error of ours, for the log.
type Cause = Box<dyn Error + Send + Sync>;

/// What the caller of a failed operation does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The same call would fail again: someone has to change something.
    Permanent,
    /// The same call may work later, or from another machine.
    Transient,
}

/// A failed operation on an object store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "`{url}` is no place to store data: {reason}; give a path or a URL that starts with \
         file://, memory://, s3://, gs://, az:// or https://"
    )]
    BadUrl { url: String, reason: String },
    #[error(
        "the URL of {url} carries a password; pass credentials by environment variables \
         (AWS_…, GOOGLE_…, AZURE_…)"
    )]
    PasswordInUrl { url: String },
    #[error("`{name}` is no name below {url}: it must be relative, without `..`, `//` or NUL")]
    BadName { url: String, name: String },
    #[error("{url} needs the cargo feature `cloud` of steadfast-store; build with it")]
    CloudMissing { url: String },
    #[error("the client of {url} cannot be set up; check its environment variables")]
    Configuration { url: String, source: Cause },
    #[error("{url} does not exist")]
    NotFound { url: String },
    #[error("nothing matches {pattern}; check the path and its wildcards")]
    NoMatch { pattern: String },
    #[error("{url} may not be accessed while {operation} it; check credentials and permissions")]
    Denied { url: String, operation: &'static str, source: Cause },
    #[error("{url} has fewer bytes than the range {start}..{end}; has it been cut short?")]
    OutOfRange { url: String, start: u64, end: u64 },
    #[error(
        "the server of {url} does not support {operation}; use another store, or for reading \
         over HTTP a server that knows ranges and name the files one by one"
    )]
    Unsupported { url: String, operation: &'static str, source: Cause },
    #[error("{operation} {url} took longer than {limit:?}; is the store reachable?")]
    TimedOut { url: String, operation: &'static str, limit: Duration },
    #[error("{operation} {url} failed; is the store reachable?")]
    Failed { url: String, operation: &'static str, source: Cause },
}

impl StoreError {
    /// Says what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::BadUrl { .. }
            | Self::PasswordInUrl { .. }
            | Self::BadName { .. }
            | Self::CloudMissing { .. }
            | Self::Configuration { .. }
            | Self::NotFound { .. }
            | Self::NoMatch { .. }
            | Self::Denied { .. }
            | Self::OutOfRange { .. }
            | Self::Unsupported { .. } => ErrorKind::Permanent,
            Self::TimedOut { .. } | Self::Failed { .. } => ErrorKind::Transient,
        }
    }

    /// Sorts an error of the crate that talks to the store.
    pub(crate) fn sort(url: &str, operation: &'static str, cause: object_store::Error) -> Self {
        use object_store::Error as Theirs;
        let url = url.to_owned();
        match cause {
            Theirs::NotFound { .. } => Self::NotFound { url },
            Theirs::PermissionDenied { .. } | Theirs::Unauthenticated { .. } => {
                Self::Denied { url, operation, source: cause.into() }
            }
            Theirs::NotImplemented { .. } | Theirs::NotSupported { .. } => {
                Self::Unsupported { url, operation, source: cause.into() }
            }
            Theirs::InvalidPath { .. } => {
                Self::BadUrl { url, reason: "its path is not valid".to_owned() }
            }
            other if is_refused_by_the_system(&other) => {
                Self::Denied { url, operation, source: other.into() }
            }
            other if other.to_string().contains("Range request not supported") => {
                Self::Unsupported { url, operation, source: other.into() }
            }
            other => Self::Failed { url, operation, source: other.into() },
        }
    }
}

/// Whether the operating system denied access to a local file: object_store has no variant for it.
fn is_refused_by_the_system(error: &object_store::Error) -> bool {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return io.kind() == io::ErrorKind::PermissionDenied;
        }
        next = error.source();
    }
    false
}
