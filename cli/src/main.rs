//! `steadfast`: runs a whole job on this machine, inspects and manages jobs and their checkpoints,
//! converts datasets, and serves the embedded etcd.

mod admin_client;
mod amend;
mod audit;
mod certs;
mod change;
mod checkpoint;
mod convert;
mod doctor;
mod drain;
mod etcd;
mod etcd_users;
mod etcd_version;
mod extend;
mod follow;
mod job_args;
mod job_master;
mod lists;
mod local;
mod output;
mod probe;
mod scale;
mod shell;
mod status;
mod top;
mod why;
mod worker;

use std::process::ExitCode;
use steadfast_process::print_line;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::output::Output;

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
    Run(Box<steadfast_agent::RunArgs>),
    Launch(Box<steadfast_launcher::LaunchArgs>),
    Rendezvous(steadfast_agent::RendezvousArgs),
    Status(status::StatusArgs),
    Why(why::WhyArgs),
    Members(lists::MembersArgs),
    Slots(lists::SlotsArgs),
    Tasks(lists::TasksArgs),
    Scale(scale::ScaleArgs),
    Drain(drain::DrainArgs),
    Extend(extend::ExtendArgs),
    Change(change::ChangeArgs),
    Top(top::TopArgs),
    Checkpoint(checkpoint::CheckpointArgs),
    Convert(convert::ConvertArgs),
    Audit(audit::AuditArgs),
    Etcd(etcd::EtcdServerArgs),
    Probe(probe::ProbeArgs),
    Certs(certs::CertsArgs),
    EtcdUsers(etcd_users::EtcdUsersArgs),
    Doctor(doctor::DoctorArgs),
    Worker(worker::WorkerArgs),
    Completions(shell::CompletionsArgs),
    Man(shell::ManArgs),
}

fn main() -> ExitCode {
    steadfast_supervise::run_guard_if_requested();
    let matches = with_variables(Cli::command()).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let form = form(&matches);
    steadfast_process::run("steadfast", async {
        let ended = match cli.command {
            Command::Local(args) => local::run(args).await,
            Command::Run(args) => steadfast_agent::run(*args).await,
            Command::Launch(args) => steadfast_launcher::launch(*args).await,
            Command::Rendezvous(args) => steadfast_agent::rendezvous(args).await,
            Command::Status(args) => status::run(args).await,
            Command::Why(args) => why::run(args).await,
            Command::Members(args) => lists::members(args).await,
            Command::Slots(args) => lists::slots(args).await,
            Command::Tasks(args) => lists::tasks(args).await,
            Command::Scale(args) => scale::run(args).await,
            Command::Drain(args) => drain::run(args).await,
            Command::Extend(args) => extend::run(args).await,
            Command::Change(args) => change::run(args).await,
            Command::Top(args) => top::run(args).await,
            Command::Checkpoint(args) => checkpoint::run(args).await,
            Command::Convert(args) => convert::run(args).await,
            Command::Audit(args) => audit::run(args).await,
            Command::Etcd(args) => etcd::run(args).await,
            Command::Probe(args) => probe::run(args).await,
            Command::Certs(args) => certs::run(args),
            Command::EtcdUsers(args) => etcd_users::run(args).await,
            Command::Doctor(args) => doctor::run(args).await,
            Command::Worker(args) => worker::run(&args).map(|never| match never {}),
            Command::Completions(args) => {
                Ok(shell::completions(&args, with_variables(Cli::command())))
            }
            Command::Man(args) => shell::man(&args, with_variables(Cli::command())),
        };
        // With JSON output, stdout holds one object even if the command fails.
        if let (Err(failure), Output::Json) = (&ended, form) {
            print_line(serde_json::json!({ "state": "error", "reason": failure.message }));
        }
        ended
    })
}

/// Returns the output format of the innermost subcommand; text if the subcommand has no such flag.
fn form(matches: &ArgMatches) -> Output {
    if let Some((_, matches)) = matches.subcommand() {
        return form(matches);
    }
    let is_short = matches!(matches.try_get_one::<bool>("json"), Ok(Some(true)));
    match matches.try_get_one::<Output>("output") {
        Ok(Some(Output::Json)) => Output::Json,
        _ if is_short => Output::Json,
        _ => Output::Text,
    }
}

/// Gives every flag of every subcommand an environment variable (`--data-dir`: `STEADFAST_DATA_DIR`), and a second name
/// with underscores, as torchrun has it.
/// `--force` has none: destructive operations need an explicit flag on each call.
fn with_variables(command: clap::Command) -> clap::Command {
    command.mut_subcommands(|command| {
        let command = command.mut_args(|arg| match arg.get_long() {
            Some("help" | "version" | "force") | None => arg,
            Some(long) => {
                let name = format!("STEADFAST_{}", long.replace('-', "_").to_uppercase());
                let names = arg.get_all_aliases().into_iter().flatten().chain([long]);
                let others: Vec<String> = names
                    .filter(|name| name.contains('-'))
                    .map(|name| name.replace('-', "_"))
                    .collect();
                arg.env(name).aliases(others)
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
