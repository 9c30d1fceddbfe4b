//! Errors of calls to the cluster.

use steadfast_common::error::ErrorKind;
use steadfast_coord::CoordError;

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The job rolled back to a checkpoint; the caller's current work is void.
    #[error("the job began another generation")]
    NewGeneration,
    /// The job ended.
    #[error("the job is over")]
    JobOver,
    #[error("{what} refused: {message}")]
    Refused { what: &'static str, kind: ErrorKind, message: String },
    #[error(transparent)]
    Coord(#[from] CoordError),
}

impl ClientError {
    /// Returns the kind of the error: what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NewGeneration | Self::JobOver => ErrorKind::Stale,
            Self::Refused { kind, .. } => *kind,
            Self::Coord(error) => error.kind(),
        }
    }
}
