//! Errors of object stores, and how to fix them.

use std::error::Error;
use std::io;
use std::time::Duration;

use crate::location::WRITING;

/// The longest cause in a message: a server may reply with an HTML page.
const CAUSE_CHARS_MAX: usize = 300;

/// The underlying error.
type Cause = Box<dyn Error + Send + Sync>;

/// What the caller of a failed operation should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The same call would fail again: user action is needed.
    Permanent,
    /// The same call may succeed later, or from another machine.
    Transient,
}

/// A failed operation on an object store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "`{url}` is not a valid location: {reason}; use a path or a URL that starts with \
         file://, memory://, s3://, gs://, az:// or https://"
    )]
    BadUrl { url: String, reason: String },
    #[error(
        "the URL of {url} contains a password; pass credentials in environment variables \
         (AWS_…, GOOGLE_…, AZURE_…)"
    )]
    PasswordInUrl { url: String },
    #[error(
        "`{name}` is not a valid name below {url}: it must be relative, without `..`, `//` or NUL"
    )]
    BadName { url: String, name: String },
    #[error("{url} requires the cargo feature `cloud` of steadfast-store; build with it")]
    CloudMissing { url: String },
    #[error(
        "the client of {url} cannot be configured: {}; check its environment variables",
        root(source)
    )]
    Configuration { url: String, source: Cause },
    #[error("{url} does not exist")]
    NotFound { url: String },
    #[error(
        "{operation} {url} failed: its bucket, container or directory does not exist: {}",
        root(source)
    )]
    NoContainer { url: String, operation: &'static str, source: Cause },
    #[error("nothing matches {pattern}; check the path and its wildcards")]
    NoMatch { pattern: String },
    #[error(
        "nothing matches {pattern} but names that cannot be part of a path, such as `{name}`; rename them"
    )]
    OddName { pattern: String, name: String },
    #[error(
        "access was denied while {operation} {url}: {}; check credentials and permissions",
        root(source)
    )]
    Denied { url: String, operation: &'static str, source: Cause },
    #[error("{url} is shorter than the range {start}..{end}; was it truncated?")]
    OutOfRange { url: String, start: u64, end: u64 },
    #[error(
        "the server of {url} does not support {operation}; use another store; \
         to read over HTTP, use a server with range requests and list the files individually"
    )]
    Unsupported { url: String, operation: &'static str, source: Cause },
    #[error("{operation} {url} took longer than {limit:?}; is the store reachable?")]
    TimedOut { url: String, operation: &'static str, limit: Duration },
    #[error("{operation} {url} failed: {}", root(source))]
    Failed { url: String, operation: &'static str, source: Cause },
}

impl StoreError {
    /// Classifies the error for the caller.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::BadUrl { .. }
            | Self::PasswordInUrl { .. }
            | Self::BadName { .. }
            | Self::CloudMissing { .. }
            | Self::Configuration { .. }
            | Self::NotFound { .. }
            | Self::NoContainer { .. }
            | Self::NoMatch { .. }
            | Self::OddName { .. }
            | Self::Denied { .. }
            | Self::OutOfRange { .. }
            | Self::Unsupported { .. } => ErrorKind::Permanent,
            Self::TimedOut { .. } | Self::Failed { .. } => ErrorKind::Transient,
        }
    }

    /// Classifies an error of `object_store`.
    pub(crate) fn sort(url: &str, operation: &'static str, cause: object_store::Error) -> Self {
        use object_store::Error as Source;
        let url = url.to_owned();
        match cause {
            // The object need not exist before a write, so its container is missing.
            Source::NotFound { .. } if operation == WRITING => {
                Self::NoContainer { url, operation, source: cause.into() }
            }
            Source::NotFound { .. } => Self::NotFound { url },
            Source::PermissionDenied { .. } | Source::Unauthenticated { .. } => {
                Self::Denied { url, operation, source: cause.into() }
            }
            Source::NotImplemented { .. } | Source::NotSupported { .. } => {
                Self::Unsupported { url, operation, source: cause.into() }
            }
            Source::InvalidPath { source } => {
                Self::BadUrl { url, reason: format!("a path is not valid ({source})") }
            }
            other if is_permission_denied(&other) => {
                Self::Denied { url, operation, source: other.into() }
            }
            other if other.to_string().contains("Range request not supported") => {
                Self::Unsupported { url, operation, source: other.into() }
            }
            other => Self::Failed { url, operation, source: other.into() },
        }
    }
}

/// Returns the root cause of an error on one line, because the errors above it only repeat the operation.
fn root(error: &Cause) -> String {
    let mut deepest: &(dyn Error + 'static) = error.as_ref();
    while let Some(next) = deepest.source() {
        deepest = next;
    }
    let text = deepest.to_string();
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(CAUSE_CHARS_MAX) {
        Some((end, _)) => format!("{} …", &line[..end]),
        None => line,
    }
}

/// Returns whether the operating system denied access to a local file, for which object_store has no variant.
fn is_permission_denied(error: &object_store::Error) -> bool {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return io.kind() == io::ErrorKind::PermissionDenied;
        }
        next = error.source();
    }
    false
}
