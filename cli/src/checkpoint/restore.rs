//! `steadfast checkpoint restore`: rolls a job back to a checkpoint.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use steadfast_process::{Failure, print_line};

use super::manifests;
use crate::job_args::JobArgs;
use crate::job_master::Force;
use crate::output::notice;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Roll the job back to a checkpoint.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// Id of the checkpoint, or a unique prefix of it.
    #[arg(value_name = "ID", required = true)]
    id: Vec<String>,
    /// Discard what was trained after the checkpoint.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// Requests the rollback from the acting master; prints the new generation to stdout.
pub async fn run(args: RestoreArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_with_checkpoints().await?;
    manifests::must_go_on(&job).await?;
    let id = manifests::read_one(&job, &args.id).await?.id;
    let force = match args.force {
        true => Force::Yes,
        false => Force::No,
    };
    let mut master = job.master();
    let generation = master.restore_checkpoint(&id, force, TIMEOUT).await?;
    notice(format_args!("steadfast: job {} rolls back to checkpoint {id}", job.name));
    print_line(generation);
    Ok(ExitCode::SUCCESS)
}
