//! `steadfast scale`: sets the number of slots of a job.

use std::process::ExitCode;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_process::{Failure, print_line};

use crate::job_args::JobArgs;

/// Set the number of slots of a job, also while it runs.
///
/// Start additional pservers before, or stop surplus ones afterwards: the job waits until each slot has a
/// pserver. The number of trainers is independent of it; start and stop them at any time.
#[derive(Debug, Args)]
pub struct ScaleArgs {
    /// Number of slots.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    slots: u32,
    #[command(flatten)]
    job: JobArgs,
}

/// Writes the number of slots to etcd.
pub async fn run(args: ScaleArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_running().await?;
    if job.etcd.get(&job.keys.job()).await?.is_none() {
        let message = format!("etcd has no job {}; name another one with --job", job.name);
        return Err(Failure::new(ErrorKind::NotFound, message));
    }
    job.must_train(
        "it has no slots; start or stop agents (`steadfast run`) within the numbers of nodes of the job",
    )
    .await?;
    let key = job.keys.ps_desired();
    let before: Option<u32> = job.etcd.get_json(&key).await?;
    job.etcd.put(&key, args.slots.to_string().as_bytes()).await?;
    let before = before.map_or_else(|| "none".to_owned(), |it| it.to_string());
    print_line(format_args!("job {}: {} slots (was {before})", job.name, args.slots));
    Ok(ExitCode::SUCCESS)
}
