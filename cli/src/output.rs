//! Output formats of the commands.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use steadfast_process::Failure;

/// Output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Human-readable text.
    #[default]
    Text,
    /// JSON.
    Json,
}

/// Prints a line on stderr, if it has a reader: a job goes on, and is stopped in order, without one.
pub fn notice(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints one line on stderr and returns the exit code, for a command whose findings are on stdout already.
pub fn answered(failure: &Failure) -> ExitCode {
    notice(format_args!("steadfast: error: {failure}"));
    ExitCode::from(failure.kind.exit_code())
}

/// Flags that select the output format.
#[derive(Debug, Args)]
pub struct FormArgs {
    /// Output format.
    #[arg(long, short, value_name = "FORM", default_value = "text")]
    output: Output,
    /// Short for `--output json`.
    #[arg(long)]
    json: bool,
}

impl FormArgs {
    pub fn output(&self) -> Output {
        if self.json { Output::Json } else { self.output }
    }
}
