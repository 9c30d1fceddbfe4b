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

    /// Returns the last lines of the worker's stderr, if they may say why the worker ended: a worker cannot write
    /// anything about SIGKILL.
    pub fn reason_lines(&self) -> &[String] {
        match self.ending {
            Ending::Signal(signal) if signal == Signal::SIGKILL as i32 => &[],
            Ending::Code(_) | Ending::Signal(_) | Ending::Unknown(_) => &self.last_lines,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_of_a_worker_are_not_the_reason_of_a_kill() {
        let exit = |ending| Exit { ending, last_lines: vec!["a warning".to_owned()] };
        assert_eq!(exit(Ending::Code(1)).reason_lines(), ["a warning"]);
        assert_eq!(exit(Ending::Signal(Signal::SIGABRT as i32)).reason_lines(), ["a warning"]);
        assert!(exit(Ending::Signal(Signal::SIGKILL as i32)).reason_lines().is_empty());
    }
}
