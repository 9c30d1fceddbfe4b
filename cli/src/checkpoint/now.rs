//! `steadfast checkpoint now`: takes a checkpoint.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_process::{Failure, print_line};

use super::manifests;
use crate::job_args::{Job, JobArgs};
use crate::job_master::CheckpointOutcome;

/// The master retries a failed checkpoint several times.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Take a checkpoint now.
#[derive(Debug, Args)]
pub struct NowArgs {
    #[command(flatten)]
    job: JobArgs,
}

/// Requests a checkpoint from the acting master; prints its id to stdout.
pub async fn run(args: NowArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_with_checkpoints().await?;
    manifests::must_go_on(&job).await?;
    print_line(take(&job).await?);
    Ok(ExitCode::SUCCESS)
}

/// Requests a checkpoint from the acting master; returns its id.
///
/// # Errors
/// If none was taken.
pub async fn take(job: &Job) -> Result<String, Failure> {
    let mut master = job.master();
    let (why, latest) = match master.take_checkpoint(TIMEOUT).await? {
        CheckpointOutcome { latest: Some(id), error: None } => return Ok(id),
        CheckpointOutcome { latest, error: Some(error) } => (error, latest),
        CheckpointOutcome { latest: None, error: None } => {
            ("there is nothing to save yet".to_owned(), None)
        }
    };
    let latest = match latest {
        Some(id) => format!("the latest one is still {id}"),
        None => "there is none yet".to_owned(),
    };
    let message = format!("job {} took no checkpoint: {why}; {latest}", job.name);
    Err(Failure::new(ErrorKind::Unavailable, message))
}
