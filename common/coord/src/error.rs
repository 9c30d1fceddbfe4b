//! Errors of operations on etcd.

use std::error::Error;
use std::time::Duration;

use steadfast_common::error::ErrorKind;

/// An operation on etcd failed.
#[derive(Debug, thiserror::Error)]
pub enum CoordError {
    #[error(
        "etcd at {endpoints} does not answer: {reason}; is it running, and is the address right?"
    )]
    Unreachable { endpoints: String, reason: String },
    #[error("etcd did not answer `{operation}` within {after:?}")]
    TimedOut { operation: &'static str, after: Duration },
    #[error("etcd call `{operation}` failed: {}", refusal(source))]
    Refused { operation: &'static str, source: Box<etcd_client::Error> },
    #[error("cannot parse the value of `{key}` in etcd: {reason}; `etcdctl get {key}` shows it")]
    BadValue { key: String, reason: String },
    #[error("the lease is lost")]
    LeaseLost,
    #[error("the lock `{key}` is held by another process")]
    Fenced { key: String },
    #[error("a commit of {operations} operations exceeds etcd's limit of {limit}")]
    TooManyOperations { operations: usize, limit: usize },
    #[error("cannot read {path}: {reason}")]
    BadFile { path: String, reason: String },
}

impl CoordError {
    /// What the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unreachable { .. } | Self::TimedOut { .. } => ErrorKind::Unavailable,
            Self::Refused { source, .. } => refusal_kind(source),
            Self::BadValue { .. } | Self::BadFile { .. } => ErrorKind::Invalid,
            Self::LeaseLost | Self::Fenced { .. } => ErrorKind::Stale,
            Self::TooManyOperations { .. } => ErrorKind::TooLarge,
        }
    }

    /// Whether the operation can be retried. It may already have been applied.
    pub fn is_transient(&self) -> bool {
        self.kind() == ErrorKind::Unavailable
    }
}

/// The message of etcd's reply, or the root cause of a transport error.
fn refusal(error: &etcd_client::Error) -> String {
    let mut deepest: &(dyn std::error::Error + 'static) = error;
    while let Some(next) = deepest.source() {
        deepest = next;
    }
    match error {
        // Without a cause below it, the status itself is the deepest error.
        etcd_client::Error::GRpcStatus(status) if status.source().is_none() => {
            status.message().to_owned()
        }
        _ => deepest.to_string(),
    }
}

fn refusal_kind(error: &etcd_client::Error) -> ErrorKind {
    // tonic's codes by number, so that this crate need not name tonic.
    match error {
        etcd_client::Error::GRpcStatus(status) => match i32::from(status.code()) {
            3 => ErrorKind::Invalid,
            5 => ErrorKind::NotFound,
            7 | 16 => ErrorKind::Denied,
            // Retry until an operator frees space.
            8 if status.message().contains("space exceeded") => ErrorKind::Unavailable,
            8 => ErrorKind::TooLarge,
            9 | 11 => ErrorKind::Stale,
            _ => ErrorKind::Unavailable,
        },
        etcd_client::Error::InvalidArgs(_) | etcd_client::Error::InvalidUri(_) => {
            ErrorKind::Invalid
        }
        _ => ErrorKind::Unavailable,
    }
}
