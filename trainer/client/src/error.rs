//! Why a call to the cluster ends without an answer.

use steadfast_common::error::ErrorKind;
use steadfast_coord::CoordError;

/// A call did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The job went back to a checkpoint: what the caller was doing is void.
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
    /// What the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NewGeneration | Self::JobOver => ErrorKind::Stale,
            Self::Refused { kind, .. } => *kind,
            Self::Coord(error) => error.kind(),
        }
    }
}
