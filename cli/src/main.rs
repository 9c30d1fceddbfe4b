//! `steadfast`: runs a whole job on this machine, looks at a job and its checkpoints, serves the
//! embedded etcd.

mod audit;
mod checkpoint;
mod etcd;
mod format;
mod job_args;
mod job_master;
mod local;
mod output;
mod probe;
mod status;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Distributed training that no single failure stops.
#[derive(Debug, Parser)]
#[command(name = "steadfast", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Local(local::LocalArgs),
    Status(status::StatusArgs),
    Checkpoint(checkpoint::CheckpointArgs),
    Audit(audit::AuditArgs),
    Etcd(etcd::EtcdServerArgs),
    Probe(probe::ProbeArgs),
}

fn main() -> ExitCode {
    let matches = with_variables(Cli::command()).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    steadfast_process::run("steadfast", async {
        match cli.command {
            Command::Local(args) => local::run(args).await,
            Command::Status(args) => status::run(args).await,
            Command::Checkpoint(args) => checkpoint::run(args).await,
            Command::Audit(args) => audit::run(args).await,
            Command::Etcd(args) => etcd::run(args).await,
            Command::Probe(args) => probe::run(args).await,
        }
    })
}

/// Gives every flag of every subcommand its variable (`--data-dir`: `STEADFAST_DATA_DIR`). What
/// throws something away has none: it must be said each time.
fn with_variables(command: clap::Command) -> clap::Command {
    command.mut_subcommands(|command| {
        let command = command.mut_args(|arg| match arg.get_long() {
            Some("help" | "version" | "force") | None => arg,
            Some(long) => {
                let name = format!("STEADFAST_{}", long.replace('-', "_").to_uppercase());
                arg.env(name)
            }
        });
        with_variables(command)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        with_variables(Cli::command()).debug_assert();
    }
}
