//! The classification of errors that crosses process boundaries.

use std::fmt;

/// Kinds of errors, by the action of the caller. `proto` maps them to gRPC codes and back; the command-line
/// tool maps them to exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorKind {
    /// Correct the input; a retry without changes fails again.
    Invalid,
    /// The requested item does not exist.
    NotFound,
    /// Something else exists in its place; choose another name or remove it.
    Conflict,
    /// The caller's view is out of date; read the state again and decide again.
    Stale,
    /// Not ready; retry later.
    NotYet,
    /// The peer is unreachable or failing over; retry.
    Unavailable,
    /// A limit was exceeded; send less.
    TooLarge,
    /// The caller lacks permission.
    Denied,
    /// A bug; see the log of the process.
    Internal,
}

impl ErrorKind {
    /// Returns the exit code of a process that fails with such an error.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Invalid => 2,
            Self::NotFound => 3,
            Self::Conflict => 4,
            Self::Stale => 5,
            Self::NotYet | Self::Unavailable => 6,
            Self::TooLarge => 7,
            Self::Denied => 8,
            Self::Internal => 1,
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Invalid => "invalid",
            Self::NotFound => "not found",
            Self::Conflict => "conflict",
            Self::Stale => "stale",
            Self::NotYet => "not yet",
            Self::Unavailable => "unavailable",
            Self::TooLarge => "too large",
            Self::Denied => "denied",
            Self::Internal => "internal",
        })
    }
}
