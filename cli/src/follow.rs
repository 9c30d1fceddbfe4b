//! `steadfast scale --follow`: runs a command that starts and stops nodes or trainers when a job is to have another number
//! of workers. The workers of a training job are its trainers.

use std::process::{ExitCode, Stdio};
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::job::elastic::AnyJobRecord;
use steadfast_common::records::rendezvous::NodeRecord;
use steadfast_common::records::scale::ScaleRecord;
use steadfast_common::status::format::plural;
use steadfast_coord::{CoordError, Mirror, Range, View, backoff};
use steadfast_process::{Failure, Shutdown, print_line};
use steadfast_proto::v1::ScaleRequest;
use tokio::process::Command;

use crate::job_args::Job;

/// The longest pause before a command that has failed runs again.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The longest time that a command may take.
const COMMAND_MAX: Duration = Duration::from_secs(600);

/// Describes a command that follows the number of workers.
#[derive(Clone, Debug)]
pub struct Follow {
    /// The command and its arguments; `{workers}`, `{trainers}` and `{nodes}` are replaced.
    pub command: Vec<String>,
    /// The most workers that can be started.
    pub most: u32,
    /// Workers of one node; by default as many as the nodes that are there have.
    pub workers_per_node: Option<u32>,
}

/// Follows the number until the job has ended, or the process is told to end.
///
/// # Errors
/// If etcd or the master does not answer, or the command does not exist.
pub async fn run(job: &Job, follow: Follow) -> Result<ExitCode, Failure> {
    let shutdown = Shutdown::install()?;
    let startable = |workers| ScaleRequest { startable: Some(workers), ..ScaleRequest::default() };
    let is_elastic = job.is_elastic().await?;
    let scale = async |request| match is_elastic {
        true => job.master().scale(request).await,
        false => job.master().scale_trainers(request).await,
    };
    let (workers, key) = match is_elastic {
        true => ("workers", job.keys.workers_desired()),
        false => ("trainers", job.keys.trainers_desired()),
    };
    let record = scale(startable(follow.most)).await?;
    print_line(format_args!("job {}: {workers} {record}", job.name));
    let ended = follow_number(job, &follow, key);
    let ended = tokio::select! {
        ended = ended => ended,
        () = shutdown.drain() => Ok(()),
    };
    // Without this process, only the nodes that are there can be used.
    if job.etcd.get(&job.keys.result()).await?.is_none()
        && let Err(failure) = scale(startable(0)).await
    {
        print_line(format_args!("the master still counts on nodes that are started: {failure}"));
    }
    ended.map(|()| ExitCode::SUCCESS)
}

/// Runs the command for each number, until the job has ended.
async fn follow_number(job: &Job, follow: &Follow, key: String) -> Result<(), Failure> {
    let number = Mirror::start(&job.etcd, Range::Key(key)).await?;
    let result = Mirror::start(&job.etcd, Range::Key(job.keys.result())).await?;
    let (mut numbers, mut results) = (number.subscribe(), result.subscribe());
    let (mut done, mut pauses) = (None, backoff());
    loop {
        if !results.borrow_and_update().entries.is_empty() {
            print_line(format_args!("job {}: it has ended", job.name));
            return Ok(());
        }
        let workers = workers_of(&numbers.borrow_and_update(), follow.most)?;
        let mut pause = None;
        if done != Some(workers) {
            match start(job, follow, workers).await? {
                Ok(()) => (done, pauses) = (Some(workers), backoff()),
                Err(reason) => {
                    let next = pauses.next().unwrap_or(PAUSE_MAX);
                    print_line(format_args!("the command failed, and runs again: {reason}"));
                    pause = Some(next);
                }
            }
        }
        let pausing = async {
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = numbers.changed() => {}
            _ = results.changed() => {}
            () = pausing => {}
        }
    }
}

/// Returns for how many workers there should be nodes.
fn workers_of(view: &View, most: u32) -> Result<u32, CoordError> {
    let record: ScaleRecord = view.single()?.unwrap_or_default();
    Ok(record.nodes_for().map_or(most, |workers| workers.min(most)))
}

/// Runs the command; returns why it has failed.
async fn start(job: &Job, follow: &Follow, workers: u32) -> Result<Result<(), String>, Failure> {
    let per_node = match follow.workers_per_node {
        Some(per_node) => per_node,
        None => workers_per_node(job).await?,
    };
    let nodes = nodes_within(job, workers.div_ceil(per_node)).await?;
    let words: Vec<String> = filled(&follow.command, workers, nodes);
    let [program, args @ ..] = &words[..] else { return Ok(Ok(())) };
    print_line(format_args!(
        "job {}: {} on {}: {}",
        job.name,
        plural(workers as usize, "worker"),
        plural(nodes as usize, "node"),
        words.join(" ")
    ));
    let running = Command::new(program)
        .args(args)
        .env("STEADFAST_WORKERS", workers.to_string())
        .env("STEADFAST_NODES", nodes.to_string())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .status();
    let Ok(ended) = tokio::time::timeout(COMMAND_MAX, running).await else {
        return Ok(Err(format!("it was ended after {} minutes", COMMAND_MAX.as_secs() / 60)));
    };
    match ended {
        Ok(status) if status.success() => Ok(Ok(())),
        Ok(status) => Ok(Err(status.to_string())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Failure::new(ErrorKind::NotFound, format!("there is no program `{program}`")))
        }
        Err(error) => Ok(Err(error.to_string())),
    }
}

/// Returns a number of nodes that the job can have.
async fn nodes_within(job: &Job, nodes: u32) -> Result<u32, Failure> {
    Ok(match job.etcd.get_json::<AnyJobRecord>(&job.keys.job()).await? {
        Some(AnyJobRecord::Elastic(record)) => {
            nodes.min(record.spec.nodes.max).max(record.spec.nodes.min)
        }
        Some(AnyJobRecord::Training(_)) | None => nodes,
    })
}

fn filled(command: &[String], workers: u32, nodes: u32) -> Vec<String> {
    let filled = |word: &String| {
        let (workers, nodes) = (workers.to_string(), nodes.to_string());
        let word = word.replace("{workers}", &workers).replace("{trainers}", &workers);
        word.replace("{nodes}", &nodes)
    };
    command.iter().map(filled).collect()
}

/// Returns how many workers a node that is there runs; 1 if there is none.
async fn workers_per_node(job: &Job) -> Result<u32, Failure> {
    let view = job.etcd.list(&job.keys.nodes_prefix()).await?;
    let nodes = view.entries.values().filter_map(|entry| entry.json::<NodeRecord>().ok());
    Ok(nodes.map(|node| node.slots).max().unwrap_or(1).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use steadfast_common::records::scale::{ScaleMemory, ScaleReason};

    #[test]
    fn a_command_is_given_the_number_of_workers_and_nodes() {
        let command = ["docker", "compose", "up", "--scale", "agent={nodes}", "{workers}x"];
        let command = command.map(str::to_owned);
        let expected = ["docker", "compose", "up", "--scale", "agent=2", "7x"];
        assert_eq!(filled(&command, 7, 2), expected);
    }

    /// S002-10: the nodes of a job that tries fewer workers stay, since it may go back to them.
    #[test]
    fn nodes_stay_while_fewer_workers_are_tried() {
        let memory = ScaleMemory { before: Some(6), ..ScaleMemory::default() };
        let reason = ScaleReason::TriesFewer;
        let record = ScaleRecord { workers: Some(4), reason, memory, ..ScaleRecord::default() };
        assert_eq!(record.nodes_for(), Some(6));
        let record = ScaleRecord { reason: ScaleReason::FewerSuffice, ..record };
        assert_eq!(record.nodes_for(), Some(4));
        assert_eq!(ScaleRecord::default().nodes_for(), None);
    }
}
