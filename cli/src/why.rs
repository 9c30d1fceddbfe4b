//! `steadfast why`: follows the wait chain of a job down to the processes that block it.

mod elastic;

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use steadfast_common::ids::Lane;
use steadfast_common::records::{JobOutcome, PserverRecord, ResultRecord};
use steadfast_common::status::format::{plain, plural, rate};
use steadfast_common::status::{Chain, JobPhase, JobStatus, TrainerStatus, Wait, chains};
use steadfast_host::time::unix_ms;
use steadfast_net::TlsIdentity;
use steadfast_process::{Failure, print, print_line};

use crate::admin_client;
use crate::job_args::{Job, JobArgs};
use crate::job_master::JobMaster;
use crate::output::{FormArgs, Output};
use crate::status::{self, AnyStatus};

/// The name of the next step of training in the graph of waits.
const STEP: &str = "step";

/// Observation period: a job that progresses within it is not blocked.
const LOOK: Duration = Duration::from_secs(2);

/// Minimum share of the observation period that steps wait longer for a straggler than for any other trainer.
const MUCH_WAITING: f64 = 0.5;

/// Show why a job does not progress: which process waits for which.
#[derive(Debug, Args)]
pub struct WhyArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// Observes the job and prints the wait chain.
pub async fn run(args: WhyArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find().await?;
    let found = chains(&waits(&job).await);
    match args.form.output() {
        Output::Json => print_line(serde_json::json!(found)),
        Output::Text => print(plain(&text(&found))),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns who waits for whom: what the master knows, and what the processes concerned answer.
async fn waits(job: &Job) -> Vec<Wait> {
    // The processes of a job that has ended have exited.
    match job.etcd.get_json::<ResultRecord>(&job.keys.result()).await {
        Ok(Some(result)) => return vec![Wait::of_job("", outcome(&result))],
        Ok(None) => {}
        Err(error) => return vec![Wait::of_job("", error.to_string())],
    }
    let mut master = job.master();
    match status::read(job, &mut master).await {
        Ok(AnyStatus::Live(status)) => training(job, &mut master, *status).await,
        Ok(AnyStatus::Elastic(status)) => elastic::waits(job, &status, unix_ms()).await,
        Ok(AnyStatus::Stored(status)) => without_master(&status.error),
        Err(failure) => without_master(&failure.message),
    }
}

fn without_master(error: &str) -> Vec<Wait> {
    let why = format!("an acting master: {error}");
    vec![Wait::of_job("master", "the job"), Wait::new("master", "", why)]
}

/// Observes a training job for a moment.
async fn training(job: &Job, master: &mut JobMaster, first: JobStatus) -> Vec<Wait> {
    if let Some(result) = &first.result {
        return vec![Wait::of_job("", outcome(result))];
    }
    let before = lane_waits(job, &first).await;
    tokio::time::sleep(LOOK).await;
    let status = match master.status().await {
        Ok(status) => status,
        Err(failure) => return vec![Wait::of_job("", failure.message)],
    };
    let mut found = status.waits.clone();
    let has_progressed = first.version < status.version || first.examples < status.examples;
    if has_progressed {
        let speed = rate(status.examples_per_second);
        let after = lane_waits(job, &status).await;
        match straggler(&status.trainers, &before, &after) {
            Some(why) => {
                found.push(Wait::of_job(STEP, format!("{speed} records/s: each step")));
                found.push(Wait::new(STEP, "", why));
            }
            None => {
                let unfollowed = unfollowed(&status).unwrap_or_default();
                let text = format!("not blocked: {speed} records/s{unfollowed}");
                found.push(Wait::of_job("", text));
            }
        }
    } else if status.state == JobPhase::Training {
        found.extend(step(job, &status).await);
    }
    found
}

/// Returns the seconds that steps have waited for each lane so far, as reported by the first slot that has a
/// pserver.
async fn lane_waits(job: &Job, status: &JobStatus) -> Vec<f64> {
    let Some(slot) = status.slots.iter().find(|it| it.address.is_some()) else { return Vec::new() };
    let record: Option<PserverRecord> =
        job.etcd.get_json(&job.keys.ps(slot.slot)).await.ok().flatten();
    let Some(record) = record else { return Vec::new() };
    let Ok(reply) = admin_client::status(&record.admin, &job.tls).await else { return Vec::new() };
    let seconds = reply["shard"]["lanes_waited_seconds"].as_array();
    seconds.into_iter().flatten().filter_map(Value::as_f64).collect()
}

/// Returns the trainer that steps wait for, if they wait for it much longer than for any other.
fn straggler(trainers: &[TrainerStatus], before: &[f64], after: &[f64]) -> Option<String> {
    // Without an answer of the slot, the wait times are unknown, not zero.
    if before.is_empty() || after.is_empty() {
        return None;
    }
    let of_lane = |lane: &Lane| {
        let at = |seconds: &[f64]| seconds.get(lane.0 as usize).copied().unwrap_or_default();
        at(after) - at(before)
    };
    let mut waits: Vec<(&TrainerStatus, f64)> = trainers
        .iter()
        .filter(|it| !it.lanes.is_empty())
        .map(|it| (it, it.lanes.iter().map(of_lane).fold(0.0, f64::max)))
        .collect();
    waits.sort_by(|one, other| other.1.total_cmp(&one.1));
    let [(straggler, longest), (_, next), ..] = waits.as_slice() else { return None };
    if longest - next < MUCH_WAITING * LOOK.as_secs_f64() {
        return None;
    }
    Some(format!(
        "trainer {} ({}): steps waited for its gradients alone in {longest:.1} of the last {:.1} s",
        straggler.id,
        straggler.admin,
        LOOK.as_secs_f64()
    ))
}

fn outcome(result: &ResultRecord) -> String {
    let reason = result.reason.as_deref().map_or_else(String::new, |it| format!(": {it}"));
    match result.state {
        JobOutcome::Finished => "not blocked: the job is finished".to_owned(),
        JobOutcome::Failed => format!("not blocked: the job has failed{reason}"),
    }
}

/// Returns why the step is not complete.
async fn step(job: &Job, status: &JobStatus) -> Vec<Wait> {
    let mut found = Vec::new();
    for slot in &status.slots {
        let Some(address) = &slot.address else { continue };
        let (name, what) =
            (format!("slot {}", slot.slot), format!("slot {} (pserver {address})", slot.slot));
        let record: Option<PserverRecord> =
            job.etcd.get_json(&job.keys.ps(slot.slot)).await.ok().flatten();
        let reply = match record {
            Some(record) => admin_client::status(&record.admin, &job.tls).await,
            None => Err(Failure::unavailable("it is not registered in etcd")),
        };
        let lanes = match &reply {
            Err(failure) => {
                found.push(Wait::new(&name, "", &failure.message));
                None
            }
            Ok(reply) => Some(lanes_missing(reply)).filter(|lanes| !lanes.is_empty()),
        };
        let follower = reply.as_ref().ok().and_then(waits_for_follower);
        let has_reason = reply.is_err() || lanes.is_some() || follower.is_some();
        found.extend(follower.map(|why| Wait::new(&name, "", why)));
        if has_reason {
            found.push(Wait::new(STEP, &name, what));
        }
        if let Some(lanes) = lanes {
            let whys = trainers(job, status, &lanes).await;
            found.extend(whys.into_iter().map(|why| Wait::new(&name, "", why)));
        }
    }
    if found.is_empty() {
        let whys = trainers(job, status, &[]).await;
        found.extend(whys.into_iter().map(|why| Wait::new(STEP, "", why)));
    }
    let what = format!("version {} of the parameters", status.version.0 + 1);
    found.push(Wait::of_job(STEP, what));
    found
}

/// Returns a remark on slots that lack the follower that the job file asks for.
fn unfollowed(status: &JobStatus) -> Option<String> {
    let to_follow = status.ps_desired.min(status.warm_spares) as usize;
    let followed = status.slots.iter().filter(|slot| slot.follower.is_some()).count();
    let lacking = to_follow.checked_sub(followed).filter(|lacking| 0 < *lacking)?;
    let slots = plural(lacking, "slot");
    Some(format!("; {slots} of {to_follow} to be followed without a follower"))
}

/// Returns the follower that a complete step of the slot waits for.
fn waits_for_follower(reply: &Value) -> Option<String> {
    let follower = &reply["follower"];
    let seconds = follower["waited_seconds"].as_f64().filter(|seconds| 0.0 < *seconds)?;
    let address = follower["address"].as_str()?;
    Some(format!("its follower {address}, which has not taken the step for {seconds:.1} s"))
}

fn lanes_missing(reply: &Value) -> Vec<u64> {
    let lanes = reply["shard"]["waits_for_lanes"].as_array();
    lanes.into_iter().flatten().filter_map(Value::as_u64).collect()
}

/// Returns the trainers of the lanes, or all trainers if `lanes` is empty; and the lanes without a trainer.
async fn trainers(job: &Job, status: &JobStatus, lanes: &[u64]) -> Vec<String> {
    let mut found = Vec::new();
    let mut unassigned: Vec<u64> = lanes.to_vec();
    for trainer in &status.trainers {
        let has = |lane: &u64| trainer.lanes.iter().any(|it| u64::from(it.0) == *lane);
        let its: Vec<u64> = lanes.iter().copied().filter(has).collect();
        unassigned.retain(|lane| !its.contains(lane));
        if lanes.is_empty() || !its.is_empty() {
            found.push(one_trainer(trainer, &its, &job.tls).await);
        }
    }
    if !unassigned.is_empty() {
        found.push(format!("{}, assigned to no trainer", numbered(&unassigned)));
    }
    found
}

async fn one_trainer(trainer: &TrainerStatus, lanes: &[u64], tls: &TlsIdentity) -> String {
    let who = format!("trainer {} ({})", trainer.id, trainer.admin);
    let who = match lanes {
        [] => who,
        lanes => format!("{} of {who}", numbered(lanes)),
    };
    let why = match admin_client::status(&trainer.admin, tls).await {
        Ok(reply) => {
            let activity = reply["doing"].as_str().unwrap_or("unknown activity");
            format!("{activity}, at version {}", reply["version"])
        }
        Err(failure) => failure.message,
    };
    format!("{who}: {why}")
}

fn numbered(lanes: &[u64]) -> String {
    let numbers: Vec<String> = lanes.iter().map(u64::to_string).collect();
    match lanes {
        [_] => format!("lane {}", numbers[0]),
        _ => format!("lanes {}", numbers.join(", ")),
    }
}

fn text(found: &[Chain]) -> String {
    let mut page = String::new();
    indent(&mut page, found, 0);
    page
}

fn indent(page: &mut String, found: &[Chain], depth: usize) {
    for chain in found {
        let on = match (chain.because.is_empty(), depth) {
            (true, _) => "",
            (false, 0) => " waits for",
            (false, _) => ", which waits for",
        };
        let _ = writeln!(page, "{:1$}{2}{on}", "", depth * 2, chain.what);
        indent(page, &chain.because, depth + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::sample;

    /// F12
    #[test]
    fn a_trainer_is_named_only_if_all_others_wait_for_it() {
        let mut trainers = sample::training().trainers;
        for (trainer, lanes) in trainers.iter_mut().zip([[0, 2], [1, 3]]) {
            trainer.lanes = lanes.map(Lane).to_vec();
        }
        let with = |waits: [f64; 2]| {
            let after: Vec<f64> = [0.0, 0.0, waits[0], waits[1]].map(|wait| 5.0 + wait).to_vec();
            straggler(&trainers, &[5.0; 4], &after)
        };
        let named = with([0.1, 1.8]).unwrap();
        assert!(named.starts_with("trainer 00000000-0000-0000-0000-000000000002 "), "{named}");
        assert!(named.contains("1.8 of the last 2.0 s"), "{named}");
        assert_eq!(with([0.9, 0.9]), None);
        assert_eq!(with([0.5, 0.1]), None);
    }

    #[test]
    fn a_wait_chain_leads_from_the_job_to_the_blocking_process() {
        let waits = [
            Wait::new("slot 0", "", "lane 2 of trainer t: it does not answer"),
            Wait::new(STEP, "slot 0", "slot 0 (pserver p)"),
            Wait::of_job(STEP, "version 8 of the parameters"),
        ];
        let expected = "version 8 of the parameters waits for\n  slot 0 (pserver p), which waits for\n    \
                        lane 2 of trainer t: it does not answer\n";
        assert_eq!(text(&chains(&waits)), expected);
    }
}
