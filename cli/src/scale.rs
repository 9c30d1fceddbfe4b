//! `steadfast scale`: sets the number of slots or trainers of a training job, or of workers of an elastic job.

use std::process::ExitCode;

use clap::Args;
use steadfast_common::error::ErrorKind;
use steadfast_common::records::scale::{WORKERS_MAX, WORTH_PERCENT};
use steadfast_process::{Failure, print_line};
use steadfast_proto::v1::ScaleRequest;
use steadfast_proto::v1::scale_request::Mode;

use crate::follow::{self, Follow};
use crate::job_args::{Job, JobArgs};

/// Set the number of slots or trainers of a training job, or of workers of an elastic job, also while it runs.
///
/// For slots, start additional pservers before, or stop surplus ones afterwards; the job waits until each slot has a
/// pserver.
///
/// The number of trainers is independent of it; start and stop them at any time. At most as many work as are desired:
/// those that joined first. The others wait, and take the place of one that is lost.
///
/// For an elastic job, a round takes in nodes while all of their workers are not more than the number, but never fewer
/// nodes than the minimum. The others wait, and take the place of one that is lost. Workers that have to go finish
/// their step and commit first.
#[derive(Debug, Args)]
pub struct ScaleArgs {
    /// Number of slots of a training job.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000),
          required_unless_present_any = ["trainers", "workers", "auto", "advise", "off", "worth", "follow"])]
    slots: Option<u32>,
    /// Most trainers of a training job that work; `all` is as many as there are.
    #[arg(long, value_name = "N|all", value_parser = workers, conflicts_with_all = ["slots", "workers"])]
    trainers: Option<Workers>,
    /// Most workers of an elastic job; `all` is as many as its nodes can run.
    #[arg(long, value_name = "N|all", value_parser = workers, conflicts_with = "slots")]
    workers: Option<Workers>,
    /// Let the master try which number of workers or trainers pays, and use it.
    #[arg(long, conflicts_with_all = ["slots", "advise", "off"])]
    auto: bool,
    /// Let the master only say which number it would use (the default).
    #[arg(long, conflicts_with_all = ["slots", "off"])]
    advise: bool,
    /// Let the master say nothing about the number.
    #[arg(long, conflicts_with = "slots")]
    off: bool,
    /// Set what a worker or trainer has to add to be worth its price, in percent of what one brings on average.
    #[arg(long, value_name = "PERCENT", value_parser = worth, conflicts_with = "slots")]
    worth: Option<u32>,
    /// Run a command whenever a job is to have another number of workers, until the job has ended: it starts and stops
    /// nodes, or trainers of a training job. `{workers}` (or `{trainers}`) and `{nodes}` in its arguments are replaced by
    /// numbers, and `STEADFAST_WORKERS` and `STEADFAST_NODES` have them, too. A command that fails runs again.
    #[arg(long, requires_all = ["most", "command"],
          conflicts_with_all = ["slots", "trainers", "workers", "auto", "advise", "off", "worth"])]
    follow: bool,
    /// The most workers for which the command of --follow can start nodes, or the most trainers that it can start.
    #[arg(long, value_name = "N", requires = "follow",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MAX)))]
    most: Option<u32>,
    /// Workers of a node that the command of --follow starts [default: as many as a node that is there has, or 1].
    #[arg(long, value_name = "N", requires = "follow", value_parser = clap::value_parser!(u32).range(1..))]
    workers_per_node: Option<u32>,
    #[command(flatten)]
    job: JobArgs,
    /// The command of --follow.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// A number of workers or trainers; `None` is as many as there are.
#[derive(Clone, Copy, Debug)]
struct Workers(Option<u32>);

fn workers(text: &str) -> Result<Workers, String> {
    let number = text.parse().ok().filter(|number| (1..=WORKERS_MAX).contains(number));
    match (text, number) {
        ("all", _) => Ok(Workers(None)),
        (_, Some(number)) => Ok(Workers(Some(number))),
        (_, None) => Err(format!("use a number from 1 to {WORKERS_MAX}, or `all`")),
    }
}

fn worth(text: &str) -> Result<u32, String> {
    let percent = text.trim_end_matches('%').parse().ok();
    percent.filter(|percent| WORTH_PERCENT.contains(percent)).ok_or_else(|| {
        format!("use a number from {} to {}", WORTH_PERCENT.start(), WORTH_PERCENT.end())
    })
}

impl ScaleArgs {
    fn mode(&self) -> Mode {
        match (self.auto, self.advise, self.off) {
            (true, _, _) => Mode::Auto,
            (_, true, _) => Mode::Advise,
            (_, _, true) => Mode::Off,
            (false, false, false) => Mode::Kept,
        }
    }
}

/// Sets the number.
pub async fn run(args: ScaleArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_running().await?;
    if job.etcd.get(&job.keys.job()).await?.is_none() {
        let message = format!("etcd has no job {}; name another one with --job", job.name);
        return Err(Failure::new(ErrorKind::NotFound, message));
    }
    if let Some(most) = args.most {
        let (command, workers_per_node) = (args.command, args.workers_per_node);
        return follow::run(&job, Follow { command, most, workers_per_node }).await;
    }
    match args.slots {
        Some(slots) => set_slots(&job, slots).await,
        None => set_workers(&job, &args).await,
    }
}

/// Writes the number of slots to etcd.
async fn set_slots(job: &Job, slots: u32) -> Result<ExitCode, Failure> {
    job.must_train("it has no slots; use --workers").await?;
    let key = job.keys.ps_desired();
    let before: Option<u32> = job.etcd.get_json(&key).await?;
    job.etcd.put(&key, slots.to_string().as_bytes()).await?;
    let before = before.map_or_else(|| "none".to_owned(), |it| it.to_string());
    print_line(format_args!("job {}: {slots} slots (was {before})", job.name));
    Ok(ExitCode::SUCCESS)
}

/// Tells the acting master.
async fn set_workers(job: &Job, args: &ScaleArgs) -> Result<ExitCode, Failure> {
    let is_elastic = job.is_elastic().await?;
    let wrong = match (is_elastic, args.workers, args.trainers) {
        (true, _, Some(_)) => Some("is elastic: use --workers"),
        (false, Some(_), _) => Some("is not elastic: use --trainers or --slots"),
        _ => None,
    };
    if let Some(wrong) = wrong {
        return Err(Failure::invalid(format!("job {} {wrong}", job.name)));
    }
    let workers = args.workers.or(args.trainers);
    let workers = workers.map(|Workers(workers)| workers.unwrap_or(0));
    let mode = args.mode().into();
    let request = ScaleRequest { mode, workers, worth_percent: args.worth, startable: None };
    let (what, record) = match is_elastic {
        true => ("workers", job.master().scale(request).await?),
        false => ("trainers", job.master().scale_trainers(request).await?),
    };
    print_line(format_args!("job {}: {what} {record}", job.name));
    Ok(ExitCode::SUCCESS)
}
