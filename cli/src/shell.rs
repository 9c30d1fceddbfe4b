//! `steadfast completions` and `steadfast man`: shell completions and manual pages.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;
use steadfast_process::{Failure, print};

const NAME: &str = "steadfast";

/// Write shell completions to stdout.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    shell: Shell,
}

/// Write manual pages, one per command.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Directory for the pages; it is created.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

pub fn completions(args: &CompletionsArgs, mut command: Command) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, NAME, &mut script);
    print(String::from_utf8_lossy(&script));
    ExitCode::SUCCESS
}

pub fn man(args: &ManArgs, command: Command) -> Result<ExitCode, Failure> {
    let written = std::fs::create_dir_all(&args.dir)
        .and_then(|()| clap_mangen::generate_to(command, &args.dir));
    written.map_err(|error| {
        Failure::io(format!("cannot write the manual pages to {}", args.dir.display()), &error)
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_pages_are_written_to_a_new_directory() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("share/man");
        man(&ManArgs { dir: dir.clone() }, Command::new(NAME)).unwrap();
        assert!(dir.join("steadfast.1").is_file());
    }
}
