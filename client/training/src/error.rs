//! Errors of calls to the cluster.

use steadfast_common::error::ErrorKind;
use steadfast_coord::CoordError;

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The job rolled back to a checkpoint; the caller's current work is void.
    #[error("the job began another generation")]
    NewGeneration,
    #[error("the job has ended")]
    JobEnded,
    /// The trainer must register again.
    #[error("the job was extended or changed")]
    Amended,
    #[error("{peer} rejected a request: {message}")]
    Rejected { peer: &'static str, kind: ErrorKind, message: String },
    #[error("cannot connect to a pserver: {0}")]
    BadAddress(String),
    #[error("a buffer of {found} values does not fit a model of {expected}")]
    WrongLength { expected: usize, found: usize },
    #[error(transparent)]
    Coord(#[from] CoordError),
}

impl ClientError {
    /// Returns the kind of the error: what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NewGeneration | Self::JobEnded | Self::Amended => ErrorKind::Stale,
            Self::Rejected { kind, .. } => *kind,
            Self::BadAddress(_) => ErrorKind::Invalid,
            Self::WrongLength { .. } => ErrorKind::Internal,
            Self::Coord(error) => error.kind(),
        }
    }
}
