//! `steadfast worker`: a worker that runs the closures of coordinators, in Python.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use steadfast_process::Failure;

use crate::local::interpreter;

/// Run functions for programs with a coordinator: those of the modules that are named.
///
/// A module is an importable name, or the path of a Python file. This is `python -m steadfast.worker`, whose flags
/// follow the modules: `--listen ADDRESS`, `--threads N`, `--tls DIR` and others, which
/// `python -m steadfast.worker --help` lists.
#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// Python interpreter; by default the one beside this program, then that of the active environment, then
    /// `python3`.
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// Modules, followed by flags of the worker.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "MODULE"
    )]
    modules: Vec<OsString>,
}

/// Becomes the worker.
///
/// # Errors
/// If the interpreter cannot be started.
pub fn run(args: &WorkerArgs) -> Result<Infallible, Failure> {
    let programs = std::env::current_exe().ok().and_then(|it| Some(it.parent()?.to_owned()));
    let python = interpreter(args.python.as_deref(), programs.as_deref())?;
    let error = Command::new(&python).args(["-m", "steadfast.worker"]).args(&args.modules).exec();
    Err(Failure::io(format_args!("cannot start {} (--python)", python.display()), &error))
}
