//! How a worker ended.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use nix::sys::signal::Signal;

/// The end of a worker. It displays as `exit code 1` or `signal SIGKILL`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    pub ending: Ending,
    /// The last lines of its stderr, without control characters; empty if its output is inherited.
    pub last_lines: Vec<String>,
}

/// The exit status of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    Code(i32),
    /// Killed by the signal of this number.
    Signal(i32),
    /// The status is not known, for this reason.
    Unknown(String),
}

impl Exit {
    /// Returns whether the worker ended with exit code 0.
    pub fn is_success(&self) -> bool {
        self.ending == Ending::Code(0)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ending.fmt(f)
    }
}

impl From<ExitStatus> for Ending {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(number)) => Self::Signal(number),
            (None, None) => Self::Unknown("no exit status".to_owned()),
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(number) => match Signal::try_from(*number) {
                Ok(signal) => write!(f, "signal {signal}"),
                Err(_) => write!(f, "signal {number}"),
            },
            Self::Unknown(reason) => f.write_str(reason),
        }
    }
}
