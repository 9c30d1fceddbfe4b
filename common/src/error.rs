//! What a caller does next about an error: the one classification that crosses process borders.

use std::fmt;

/// Kinds of errors, by what the caller does next. `proto` maps them to gRPC codes and back; the
/// command-line tool maps them to exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorKind {
    /// Mend the input; trying again as it is gives the same answer.
    Invalid,
    /// What was asked for is not there.
    NotFound,
    /// Something else stands in its place; choose another name or remove it.
    Conflict,
    /// The caller's view is out of date: look again, then decide anew.
    Stale,
    /// Nothing is wrong; ask again in a while.
    NotYet,
    /// The other side cannot be reached or is changing over; try again.
    Unavailable,
    /// A bound was reached; send less.
    TooLarge,
    /// The caller may not do this.
    Denied,
    /// A fault of ours; see the log of the process.
    Internal,
}

impl ErrorKind {
    /// The exit code of a process that ends because of such an error.
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
