//! `steadfast status`: shows the status of a job, from its master or else from etcd.

pub mod elastic;
mod elastic_text;
#[cfg(test)]
pub mod sample;
mod stored_status;
mod text;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use steadfast_common::elastic_status::ElasticStatus;
use steadfast_common::status::{JobPhase, JobStatus};
use steadfast_host::time::unix_ms;
use steadfast_process::{Failure, print, print_line};

use crate::job_args::{Job, JobArgs};
use crate::job_master::JobMaster;
use crate::output::{FormArgs, Output};
use stored_status::StoredStatus;

/// Polling interval with `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Moves the cursor of a terminal to the upper left corner and clears the screen below it.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Show the status of a job.
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
    /// Refresh the status every second until the job has ended.
    #[arg(long)]
    watch: bool,
}

/// Status of a job from the best available source.
#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum AnyStatus {
    Live(Box<JobStatus>),
    /// Status read from etcd because no master answers.
    Stored(Box<StoredStatus>),
    /// Status of an elastic job; read from etcd if the job has no master.
    Elastic(Box<ElasticStatus>),
}

/// Shows the status once, or with `--watch` until the job has ended.
pub async fn run(args: StatusArgs) -> Result<ExitCode, Failure> {
    let job = match args.watch {
        // A copy of an ended run's etcd would never show the next run.
        true => args.job.find_running().await?,
        false => args.job.find().await?,
    };
    let mut master = job.master();
    let mut last = None;
    loop {
        let status = read_status(&job, &mut master).await?;
        let ended = status.has_ended();
        if last.as_ref() != Some(&status) {
            show(&status, &args);
        }
        if !args.watch || ended {
            return Ok(ExitCode::SUCCESS);
        }
        last = Some(status);
        tokio::time::sleep(WATCH_EVERY).await;
    }
}

async fn read_status(job: &Job, master: &mut JobMaster) -> Result<AnyStatus, Failure> {
    if let Some(status) = elastic::read(job, master).await? {
        return Ok(AnyStatus::Elastic(Box::new(status)));
    }
    match master.status().await {
        Ok(status) => Ok(AnyStatus::Live(Box::new(status))),
        Err(failure) => {
            let Job { etcd, keys, name, .. } = job;
            let stored = StoredStatus::read(etcd, keys, name, failure.message).await?;
            Ok(AnyStatus::Stored(Box::new(stored)))
        }
    }
}

fn show(status: &AnyStatus, args: &StatusArgs) {
    match args.form.output() {
        Output::Json => print_line(serde_json::json!(status)),
        Output::Text => {
            let text = match status {
                AnyStatus::Live(status) => text::live(status),
                AnyStatus::Stored(status) => text::stored(status),
                AnyStatus::Elastic(status) => elastic_text::of(status, unix_ms()),
            };
            match (args.watch, std::io::stdout().is_terminal()) {
                (true, true) => print(format_args!("{CLEAR}{text}")),
                (true, false) => print_line(text),
                (false, _) => print(text),
            }
        }
    }
}

impl AnyStatus {
    fn has_ended(&self) -> bool {
        match self {
            Self::Live(status) => match status.state {
                JobPhase::Finished | JobPhase::Failed => true,
                JobPhase::Waiting
                | JobPhase::Starting
                | JobPhase::Training
                | JobPhase::Evaluating
                | JobPhase::Saving => false,
            },
            Self::Stored(status) => status.result.is_some(),
            Self::Elastic(status) => status.result.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watching_ends_with_the_job() {
        let live = |state| {
            AnyStatus::Live(Box::new(JobStatus { state, ..sample::training() })).has_ended()
        };
        assert!(!live(JobPhase::Training));
        assert!(!live(JobPhase::Saving));
        assert!(live(JobPhase::Failed));
    }
}
