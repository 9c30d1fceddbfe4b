//! `steadfast status`: how a job stands, as its master sees it, or else as etcd remembers it.

mod remains;
#[cfg(test)]
pub mod sample;
mod text;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use steadfast_common::error::ErrorKind;
use steadfast_common::keys::Keys;
use steadfast_common::status::{JobState, JobStatus};
use steadfast_coord::Etcd;
use steadfast_process::{EtcdArgs, Failure, job_name};

use crate::job_master::JobMaster;
use crate::local::read_endpoint;
use crate::output::Output;
use remains::Remains;

/// Time between looks with `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Puts the cursor of a terminal into the upper left corner and clears what is below.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Look at a job.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Name of the job; needed if etcd knows several.
    #[arg(long, value_name = "NAME", value_parser = job_name)]
    job: Option<String>,
    /// Where the job's keys lie in etcd [default: /jobs/<job>]; `/` is the bare layout.
    #[arg(long, value_name = "KEY")]
    root: Option<String>,
    #[command(flatten)]
    etcd: EtcdArgs,
    /// Look at the job that `steadfast local` runs in this folder.
    #[arg(long, value_name = "DIR", conflicts_with = "etcd_endpoints")]
    data_dir: Option<PathBuf>,
    /// Form of the answer on stdout.
    #[arg(long, value_name = "FORM", default_value = "text")]
    output: Output,
    /// Look again and again until the job has ended.
    #[arg(long)]
    watch: bool,
}

/// What is known of a job.
#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Picture {
    Live(Box<JobStatus>),
    /// No master answers.
    Remains(Box<Remains>),
}

/// Shows a job once, or until it has ended.
pub async fn run(args: StatusArgs) -> Result<ExitCode, Failure> {
    let mut options = args.etcd.options()?;
    if let Some(folder) = &args.data_dir {
        options.endpoints = vec![read_endpoint(folder)?];
    }
    let etcd = Etcd::connect(&options).await.map_err(|error| match &args.data_dir {
        Some(folder) => {
            Failure::from(error).context(format!("no run is under way in {}", folder.display()))
        }
        None => error.into(),
    })?;
    let (name, keys) = choose(&etcd, &args).await?;
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

/// Finds the job that is meant.
async fn choose(etcd: &Etcd, args: &StatusArgs) -> Result<(String, Keys), Failure> {
    if let Some(root) = &args.root {
        let name = args.job.clone().unwrap_or_else(|| root.clone());
        return Ok((name, Keys::below(root)));
    }
    if let Some(name) = &args.job {
        return Ok((name.clone(), Keys::of_job(name)));
    }
    // The root of a job without a name is what the roots of all jobs begin with.
    let prefix = Keys::of_job("").root().to_owned();
    let view = etcd.list(&prefix).await?;
    let names = job_names(view.entries.keys().map(String::as_str), &prefix);
    match names.as_slice() {
        [] => Err(Failure::new(ErrorKind::NotFound, "etcd knows no job")),
        [name] => Ok((name.clone(), Keys::of_job(name))),
        names => Err(Failure::invalid(format!(
            "etcd knows several jobs; choose one with --job: {}",
            names.join(", ")
        ))),
    }
}

/// The names of the jobs that keys belong to, each once.
fn job_names<'a>(keys: impl Iterator<Item = &'a str>, prefix: &str) -> Vec<String> {
    let mut names: Vec<String> = keys
        .filter_map(|key| key.strip_prefix(prefix)?.split('/').next().map(str::to_owned))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
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
    match args.output {
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
                JobState::Waiting | JobState::Starting | JobState::Training | JobState::Saving => {
                    false
                }
            },
            Self::Remains(remains) => remains.result.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_that_has_keys_is_named_once() {
        let keys = ["/jobs/b/job", "/jobs/a/job", "/jobs/a/ps/0", "/other/x"];
        assert_eq!(job_names(keys.into_iter(), "/jobs/"), ["a", "b"]);
    }

    #[test]
    fn watching_ends_with_the_job() {
        let live =
            |state| Picture::Live(Box::new(JobStatus { state, ..sample::training() })).has_ended();
        assert!(!live(JobState::Training));
        assert!(!live(JobState::Saving));
        assert!(live(JobState::Failed));
    }
}
