//! `steadfast status`: shows the status of a job, from its master or else from etcd.

mod remains;
#[cfg(test)]
pub mod sample;
mod text;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use steadfast_common::keys::Keys;
use steadfast_common::status::{JobState, JobStatus};
use steadfast_coord::Etcd;
use steadfast_process::Failure;

use crate::job_args::{Job, JobArgs};
use crate::job_master::JobMaster;
use crate::output::{FormArgs, Output};
use remains::Remains;

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
enum Picture {
    Live(Box<JobStatus>),
    /// Read from etcd because no master answers.
    Remains(Box<Remains>),
}

/// Shows the status once, or with `--watch` until the job has ended.
pub async fn run(args: StatusArgs) -> Result<ExitCode, Failure> {
    let Job { name, etcd, keys } = match args.watch {
        // A copy of an ended run's etcd would never show the next run.
        true => args.job.find_running().await?,
        false => args.job.find().await?,
    };
    let mut master = JobMaster::new(etcd.clone(), keys.clone());
    let mut last = None;
    loop {
        let picture = look(&etcd, &keys, &name, &mut master).await?;
        let ended = picture.has_ended();
        if last.as_ref() != Some(&picture) {
            show(&picture, &args);
        }
        if !args.watch || ended {
            return Ok(ExitCode::SUCCESS);
        }
        last = Some(picture);
        tokio::time::sleep(WATCH_EVERY).await;
    }
}

async fn look(
    etcd: &Etcd,
    keys: &Keys,
    name: &str,
    master: &mut JobMaster,
) -> Result<Picture, Failure> {
    match master.status().await {
        Ok(status) => Ok(Picture::Live(Box::new(status))),
        Err(failure) => {
            let remains = Remains::read(etcd, keys, name, failure.message).await?;
            Ok(Picture::Remains(Box::new(remains)))
        }
    }
}

fn show(picture: &Picture, args: &StatusArgs) {
    match args.form.output() {
        Output::Json => println!("{}", serde_json::json!(picture)),
        Output::Text => {
            let text = match picture {
                Picture::Live(status) => text::live(status),
                Picture::Remains(remains) => text::remains(remains),
            };
            match (args.watch, std::io::stdout().is_terminal()) {
                (true, true) => print!("{CLEAR}{text}"),
                (true, false) => println!("{text}"),
                (false, _) => print!("{text}"),
            }
        }
    }
}

impl Picture {
    fn has_ended(&self) -> bool {
        match self {
            Self::Live(status) => match status.state {
                JobState::Finished | JobState::Failed => true,
                JobState::Waiting
                | JobState::Starting
                | JobState::Training
                | JobState::Evaluating
                | JobState::Saving => false,
            },
            Self::Remains(remains) => remains.result.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watching_ends_with_the_job() {
        let live =
            |state| Picture::Live(Box::new(JobStatus { state, ..sample::training() })).has_ended();
        assert!(!live(JobState::Training));
        assert!(!live(JobState::Saving));
        assert!(live(JobState::Failed));
    }
}
