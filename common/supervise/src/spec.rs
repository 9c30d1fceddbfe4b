//! What to start, and why a start fails.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use steadfast_common::error::ErrorKind;

use crate::spawn::Leads;

/// A worker to start. It inherits the environment of this process, with the changes below.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// Identifies the worker in messages: `rank 3`.
    pub name: String,
    /// A path, or a name that is searched in `PATH`.
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Variables to set.
    pub env: Vec<(OsString, OsString)>,
    /// Inherited variables to remove.
    pub env_removed: Vec<OsString>,
    /// Working directory; by default that of this process.
    pub directory: Option<PathBuf>,
    pub input: Input,
    pub output: Output,
    /// An open descriptor that the worker inherits, under the same number.
    pub inherited: Option<Arc<OwnedFd>>,
}

/// Where stdin of a worker comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// An empty input, which ends at once.
    Empty,
    /// A pipe whose writing end [`crate::Worker::take_input`] returns.
    Pipe,
    /// Shares the standard input of this process. The worker leads a session of its own, so that it may read a
    /// terminal.
    Inherit,
}

impl Input {
    pub(crate) fn leads(self) -> Leads {
        match self {
            Self::Empty | Self::Pipe => Leads::Group,
            Self::Inherit => Leads::Session,
        }
    }
}

/// Where stdout and stderr of a worker go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Output goes to stdout and stderr of this process, unchanged and unwatched.
    Inherit,
    /// Output goes to stdout and stderr of this process, each line with this prefix: `[rank 3] `.
    Lines { prefix: String },
    /// Output is appended to `stdout.log` and `stderr.log` in this directory, which is created.
    Files { directory: PathBuf },
    /// Output goes to stdout and stderr of this process and to files, as in [`Output::Lines`] and [`Output::Files`].
    LinesAndFiles { prefix: String, directory: PathBuf },
    /// Stdout and stderr each to its own target.
    Separate { prefix: String, directory: PathBuf, stdout: Target, stderr: Target },
    /// Output is appended to this file by the worker itself, unwatched.
    File { path: PathBuf },
    /// Output waits in pipes until [`crate::Worker::assign`] says where it goes.
    Pending,
}

/// Where one stream of a worker goes. It is read in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Print,
    File,
    Both,
    Nowhere,
}

impl Target {
    /// Returns whether the lines of the stream are printed.
    pub fn is_printed(self) -> bool {
        match self {
            Self::Print | Self::Both => true,
            Self::File | Self::Nowhere => false,
        }
    }

    /// Returns whether the stream is written to a file.
    pub fn is_filed(self) -> bool {
        match self {
            Self::File | Self::Both => true,
            Self::Print | Self::Nowhere => false,
        }
    }
}

impl WorkerSpec {
    /// Creates a spec without arguments whose output is inherited.
    pub fn new(name: impl Into<String>, program: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            env_removed: Vec::new(),
            directory: None,
            input: Input::Empty,
            output: Output::Inherit,
            inherited: None,
        }
    }
}

impl Output {
    /// Returns the targets of stdout and stderr; `None` if this process does not read them.
    pub(crate) fn targets(&self) -> Option<[Target; 2]> {
        match self {
            Self::Inherit | Self::File { .. } | Self::Pending => None,
            Self::Lines { .. } => Some([Target::Print; 2]),
            Self::Files { .. } => Some([Target::File; 2]),
            Self::LinesAndFiles { .. } => Some([Target::Both; 2]),
            Self::Separate { stdout, stderr, .. } => Some([*stdout, *stderr]),
        }
    }

    /// Returns whether stdout and stderr are pipes.
    pub(crate) fn is_piped(&self) -> bool {
        *self == Self::Pending || self.targets().is_some()
    }

    pub(crate) fn prefix(&self) -> &str {
        match self {
            Self::Lines { prefix }
            | Self::LinesAndFiles { prefix, .. }
            | Self::Separate { prefix, .. } => prefix,
            Self::Inherit | Self::Files { .. } | Self::File { .. } | Self::Pending => "",
        }
    }

    pub(crate) fn directory(&self) -> Option<&Path> {
        match self {
            Self::Files { directory }
            | Self::LinesAndFiles { directory, .. }
            | Self::Separate { directory, .. } => Some(directory),
            Self::Inherit | Self::Lines { .. } | Self::File { .. } | Self::Pending => None,
        }
    }
}

/// Why a worker was not started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("program {} does not exist", program.display())]
    NoProgram { program: PathBuf },
    #[error("program {} is not executable", program.display())]
    NotExecutable { program: PathBuf },
    #[error("the interpreter in the first line of {} does not exist", program.display())]
    NoInterpreter { program: PathBuf },
    #[error("working directory {} does not exist", directory.display())]
    NoDirectory { directory: PathBuf },
    #[error("cannot write the output of {worker} to {}: {source}", path.display())]
    Output { worker: String, path: PathBuf, source: io::Error },
    #[error("cannot start the guard process: {source}")]
    Guard { source: io::Error },
    #[error("cannot start {}: {source}", program.display())]
    Other { program: PathBuf, source: io::Error },
}

impl StartError {
    /// Classifies the failure to start the program of `spec`.
    pub(crate) fn of(spec: &WorkerSpec, source: io::Error) -> Self {
        Self::of_program(&spec.program, spec.directory.as_deref(), source)
    }

    /// Classifies the failure to start a program.
    pub(crate) fn of_program(program: &Path, directory: Option<&Path>, source: io::Error) -> Self {
        let program = program.to_owned();
        // A name without a directory is searched in `PATH`: no file of that name was found.
        let path = directory.unwrap_or(Path::new("")).join(&program);
        let is_path = program.components().count() > 1;
        match source.kind() {
            io::ErrorKind::NotFound if is_path && path.is_file() => Self::NoInterpreter { program },
            io::ErrorKind::NotFound => Self::NoProgram { program },
            io::ErrorKind::PermissionDenied => Self::NotExecutable { program },
            _ => Self::Other { program, source },
        }
    }

    /// Returns the kind of the error: what the caller can do.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoProgram { .. } | Self::NoInterpreter { .. } | Self::NoDirectory { .. } => {
                ErrorKind::NotFound
            }
            Self::NotExecutable { .. } => ErrorKind::Denied,
            Self::Output { source, .. } | Self::Guard { source } | Self::Other { source, .. } => {
                kind_of(source)
            }
        }
    }
}

fn kind_of(error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::NotFound => ErrorKind::NotFound,
        io::ErrorKind::PermissionDenied => ErrorKind::Denied,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::TooLarge,
        // No more processes or memory at the moment.
        io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => ErrorKind::Unavailable,
        _ => ErrorKind::Internal,
    }
}
