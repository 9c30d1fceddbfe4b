//! `steadfast completions` and `steadfast man`: for shells, and for whoever reads manuals.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;
use steadfast_process::Failure;

const NAME: &str = "steadfast";

/// Write completions for a shell to stdout.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    shell: Shell,
}

/// Write the manual, a page for each command.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Folder for the pages; it must be there.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

/// Writes completions.
pub fn completions(args: &CompletionsArgs, mut command: Command) -> ExitCode {
    clap_complete::generate(args.shell, &mut command, NAME, &mut io::stdout());
    ExitCode::SUCCESS
}

/// Writes the manual.
pub fn man(args: &ManArgs, command: Command) -> Result<ExitCode, Failure> {
    clap_mangen::generate_to(command, &args.dir).map_err(|error| {
        Failure::io(format!("cannot write the manual to {}", args.dir.display()), &error)
    })?;
    Ok(ExitCode::SUCCESS)
}
