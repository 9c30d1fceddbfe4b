//! `steadfast scale`: how many slots a job has.

use std::process::ExitCode;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;

use crate::job_args::JobArgs;

/// Change the number of slots of a job, also while it runs.
///
/// Start more pservers first, or stop some afterwards: the job waits until each slot has one. Trainers are
/// not counted; start and stop as many as you like.
#[derive(Debug, Args)]
pub struct ScaleArgs {
    /// How many.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    slots: u32,
    #[command(flatten)]
    job: JobArgs,
}

/// Changes it.
pub async fn run(args: ScaleArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_running().await?;
    if job.etcd.get(&job.keys.job()).await?.is_none() {
        let message = format!("etcd knows no job {}", job.name);
        return Err(Failure::new(ErrorKind::NotFound, message));
    }
    let key = job.keys.ps_desired();
    let before: Option<u32> = job.etcd.get_json(&key).await?;
    job.etcd.put(&key, args.slots.to_string().as_bytes()).await?;
    let before = before.map_or_else(|| "none".to_owned(), |it| it.to_string());
    println!("job {}: {} slots, before {before}", job.name, args.slots);
    Ok(ExitCode::SUCCESS)
}
