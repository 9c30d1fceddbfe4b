//! `steadfast checkpoint now`: has a checkpoint taken.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;

use super::manifests;
use crate::job_args::JobArgs;
use crate::job_master::{JobMaster, Taken};

/// A master tries several times before it gives up.
const PATIENCE: Duration = Duration::from_secs(300);

/// Take a checkpoint now.
#[derive(Debug, Args)]
pub struct NowArgs {
    #[command(flatten)]
    job: JobArgs,
}

/// Asks the acting master; the new checkpoint's id goes to stdout.
pub async fn run(args: NowArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find().await?;
    manifests::must_go_on(&job).await?;
    let mut master = JobMaster::new(job.etcd.clone(), job.keys.clone());
    let (why, latest) = match master.take_checkpoint(PATIENCE).await? {
        Taken { latest: Some(id), trouble: None } => {
            println!("{id}");
            return Ok(ExitCode::SUCCESS);
        }
        Taken { latest, trouble: Some(trouble) } => (trouble, latest),
        Taken { latest: None, trouble: None } => ("there is nothing to save yet".to_owned(), None),
    };
    let latest = match latest {
        Some(id) => format!("the latest is still {id}"),
        None => "there is none yet".to_owned(),
    };
    let message = format!("job {} took no checkpoint: {why}; {latest}", job.name);
    Err(Failure::new(ErrorKind::Unavailable, message))
}
