//! Errors of operations on etcd.

use std::sync::Arc;
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
    #[error("etcd call `{operation}` failed: {}{}", refusal(source), advice(source))]
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
    #[error("the etcd endpoint `{endpoint}` is invalid: {reason}")]
    BadEndpoint { endpoint: String, reason: String },
    #[error("etcd refuses the user `{user}` with the password in {password_file}: {reason}")]
    LoginRefused {
        user: String,
        password_file: String,
        reason: String,
        /// Whether the login never succeeded, or has been refused for longer than a change of the password
        /// takes.
        is_final: bool,
    },
    #[error("{0}")]
    Login(Arc<CoordError>),
}

impl CoordError {
    /// Returns the kind of the error: what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unreachable { .. } | Self::TimedOut { .. } => ErrorKind::Unavailable,
            Self::Refused { source, .. } => refusal_kind(source),
            Self::BadValue { .. } | Self::BadFile { .. } | Self::BadEndpoint { .. } => {
                ErrorKind::Invalid
            }
            Self::LeaseLost | Self::Fenced { .. } => ErrorKind::Stale,
            Self::TooManyOperations { .. } => ErrorKind::TooLarge,
            Self::LoginRefused { is_final: true, .. } => ErrorKind::Denied,
            Self::LoginRefused { is_final: false, .. } => ErrorKind::Unavailable,
            Self::Login(error) => error.kind(),
        }
    }

    /// Returns the error of a first call: `unreachable` with the reason if etcd did not answer it.
    pub(crate) fn or_unreachable(self, unreachable: impl Fn(String) -> Self) -> Self {
        match &self {
            Self::Login(error)
                if matches!(**error, Self::TimedOut { .. } | Self::Refused { .. }) =>
            {
                unreachable(error.cause_text())
            }
            Self::TimedOut { .. } | Self::Refused { .. } => unreachable(self.cause_text()),
            _ => self,
        }
    }

    fn cause_text(&self) -> String {
        match self {
            Self::Refused { source, .. } => refusal(source),
            Self::TimedOut { .. } => "no answer in time".to_owned(),
            error => error.to_string(),
        }
    }

    /// Returns whether the reply of etcd is larger than what this client accepts.
    pub(crate) fn is_too_large(&self) -> bool {
        match self {
            Self::Refused { source, .. } => refusal(source).contains("message length too large"),
            _ => false,
        }
    }

    /// Returns whether etcd does not know the lease of a key that was to be put: it has ended.
    pub fn is_lease_gone(&self) -> bool {
        match self {
            Self::LeaseLost => true,
            Self::Refused { source, .. } => refusal(source).contains("requested lease not found"),
            _ => false,
        }
    }

    /// Returns whether the operation can be retried. It may already have been applied.
    pub fn is_transient(&self) -> bool {
        self.kind() == ErrorKind::Unavailable
    }
}

/// Returns the message of etcd's reply, or the reason why there is no reply.
pub(crate) fn refusal(error: &etcd_client::Error) -> String {
    match error {
        etcd_client::Error::GRpcStatus(status) => status.message().to_owned(),
        other => other.to_string(),
    }
}

/// Returns what to do about a refusal, if it is one of permissions.
fn advice(error: &etcd_client::Error) -> &'static str {
    match refusal_kind(error) {
        ErrorKind::Denied => {
            "; an administrator of etcd grants the keys of a job with `steadfast etcd-users --job NAME`"
        }
        _ => "",
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
