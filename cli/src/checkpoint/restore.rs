//! `steadfast checkpoint restore`: sends a job back to a checkpoint.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use steadfast_process::Failure;

use super::manifests;
use crate::job_args::JobArgs;
use crate::job_master::{Force, JobMaster};

const PATIENCE: Duration = Duration::from_secs(60);

/// Send the job back to a checkpoint.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// Id of the checkpoint, or how it begins.
    #[arg(value_name = "ID", required = true)]
    id: Vec<String>,
    /// Throw away what was trained since.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// Asks the acting master; the generation that begins goes to stdout.
pub async fn run(args: RestoreArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find().await?;
    manifests::must_go_on(&job).await?;
    let id = manifests::read_one(&job, &args.id).await?.id;
    let force = match args.force {
        true => Force::Yes,
        false => Force::No,
    };
    let mut master = JobMaster::new(job.etcd.clone(), job.keys.clone());
    let generation = master.restore_checkpoint(&id, force, PATIENCE).await?;
    eprintln!("steadfast: job {} goes back to checkpoint {id}", job.name);
    println!("{generation}");
    Ok(ExitCode::SUCCESS)
}
