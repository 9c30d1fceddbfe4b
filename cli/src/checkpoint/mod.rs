//! `steadfast checkpoint`: looks at a job's checkpoints, makes models of them, takes one, goes back
//! to one.

pub mod choice;
mod export;
mod list;
pub mod manifests;
mod now;
mod restore;
mod verify;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use steadfast_checkpoint::{Fault, is_in_place};
use steadfast_common::error::ErrorKind;
use steadfast_common::records::JobRecord;
use steadfast_process::Failure;
use steadfast_store::Location;

pub use manifests::pointer;

/// See to a job's checkpoints.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(list::ListArgs),
    Verify(verify::VerifyArgs),
    Export(export::ExportArgs),
    Now(now::NowArgs),
    Restore(restore::RestoreArgs),
}

/// Does what was asked for.
pub async fn run(args: CheckpointArgs) -> Result<ExitCode, Failure> {
    match args.command {
        Command::List(args) => list::run(args).await,
        Command::Verify(args) => verify::run(args).await,
        Command::Export(args) => export::run(args).await,
        Command::Now(args) => now::run(args).await,
        Command::Restore(args) => restore::run(args).await,
    }
}

/// Says what a fault calls for, and in which store it is.
pub async fn explain(fault: Fault, store: &Location, job: &JobRecord) -> Failure {
    let kind = match fault.is_permanent() {
        true => ErrorKind::Invalid,
        false => ErrorKind::Unavailable,
    };
    if let Fault::Missing { object } = &fault
        && matches!(is_in_place(store, job).await, Ok(false))
    {
        let message = format!(
            "{object} is missing, as is all else of the job: {store} is away or not the job's \
             store; make it reachable from here under this name"
        );
        return Failure::new(ErrorKind::Unavailable, message);
    }
    let cause = std::error::Error::source(&fault).and_then(std::error::Error::source);
    // Causes of libraries may have several lines.
    let cause = cause.map(|cause| format!(": {cause}").replace('\n', " ")).unwrap_or_default();
    Failure::new(kind, format!("{fault}{cause} (in {store})"))
}
