//! `steadfast checkpoint`: lists, verifies, exports, takes and restores checkpoints of a job.

pub mod choice;
mod export;
mod follow;
mod list;
pub mod manifests;
pub mod now;
mod restore;
mod verify;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use steadfast_checkpoint::{CheckpointError, is_in_place};
use steadfast_common::error::ErrorKind;
use steadfast_common::records::JobRecord;
use steadfast_process::Failure;
use steadfast_store::Location;

pub use manifests::pointer;

/// Manage the checkpoints of a job.
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
    Follow(follow::FollowArgs),
    Now(now::NowArgs),
    Restore(restore::RestoreArgs),
}

pub async fn run(args: CheckpointArgs) -> Result<ExitCode, Failure> {
    match args.command {
        Command::List(args) => list::run(args).await,
        Command::Verify(args) => verify::run(args).await,
        Command::Export(args) => export::run(args).await,
        Command::Follow(args) => follow::run(args).await,
        Command::Now(args) => now::run(args).await,
        Command::Restore(args) => restore::run(args).await,
    }
}

/// Converts an error of a checkpoint in `store`, and checks whether the whole store is missing.
pub async fn explain(error: CheckpointError, store: &Location, job: &JobRecord) -> Failure {
    let kind = match error.is_permanent() {
        true => ErrorKind::Invalid,
        false => ErrorKind::Unavailable,
    };
    if let CheckpointError::Missing { object } = &error
        && matches!(is_in_place(store, job).await, Ok(false))
    {
        let message = format!(
            "{object} is missing, like all other objects of the job: {store} is unavailable or not the \
             job's store; make the job's store reachable under this name"
        );
        return Failure::new(ErrorKind::Unavailable, message);
    }
    let cause = std::error::Error::source(&error).and_then(std::error::Error::source);
    // Error messages of libraries can have several lines.
    let cause = cause.map(|cause| format!(": {cause}").replace('\n', " ")).unwrap_or_default();
    Failure::new(kind, format!("{error}{cause} (in {store})"))
}
