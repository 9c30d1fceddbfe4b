//! `steadfast why`: who waits for whom, down to whoever waits for nobody.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::Value;
use steadfast_common::records::PserverRecord;
use steadfast_common::status::{JobState, JobStatus, TrainerStatus};
use steadfast_process::Failure;

use crate::admin_client;
use crate::format::{plain, rate};
use crate::job_args::{Job, JobArgs};
use crate::job_master::JobMaster;
use crate::output::{FormArgs, Output};

/// A job that got on in this time waits for nothing.
const LOOK: Duration = Duration::from_secs(1);

/// Say why a job does not go on: who waits for whom.
#[derive(Debug, Args)]
pub struct WhyArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// Somebody, and what it waits for.
#[derive(Debug, PartialEq, Serialize)]
struct Waits {
    what: String,
    because: Vec<Waits>,
}

impl Waits {
    fn on(what: impl Into<String>, because: Vec<Self>) -> Self {
        Self { what: what.into(), because }
    }

    fn end(what: impl Into<String>) -> Self {
        Self::on(what, Vec::new())
    }
}

/// Looks, and says.
pub async fn run(args: WhyArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find().await?;
    let found = look(&job).await;
    match args.form.output() {
        Output::Json => println!("{}", serde_json::json!(found)),
        Output::Text => print!("{}", plain(&text(&found))),
    }
    Ok(ExitCode::SUCCESS)
}

async fn look(job: &Job) -> Vec<Waits> {
    let mut master = JobMaster::new(job.etcd.clone(), job.keys.clone());
    let first = match master.status().await {
        Ok(status) => status,
        Err(failure) => {
            let master = Waits::end(format!("a master: {}", failure.message));
            return vec![Waits::on("everybody", vec![master])];
        }
    };
    if let Some(result) = &first.result {
        let reason = result.reason.as_deref().map_or_else(String::new, |it| format!(": {it}"));
        return vec![Waits::end(format!("nothing: the job is over{reason}"))];
    }
    tokio::time::sleep(LOOK).await;
    let status = match master.status().await {
        Ok(status) => status,
        Err(failure) => return vec![Waits::end(failure.message)],
    };
    let mut found: Vec<Waits> = status.waiting.iter().map(Waits::end).collect();
    let got_on = first.version < status.version || first.examples < status.examples;
    if got_on {
        let speed = rate(status.examples_per_second);
        found.push(Waits::end(format!(
            "nothing holds it up: it trains on {speed} records a second"
        )));
    } else if status.state == JobState::Training {
        found.push(step(job, &status).await);
    }
    found
}

/// Why the step is not complete.
async fn step(job: &Job, status: &JobStatus) -> Waits {
    let mut because = Vec::new();
    for slot in &status.slots {
        let Some(address) = &slot.address else { continue };
        let what = format!("slot {} (pserver {address})", slot.slot);
        let record: Option<PserverRecord> =
            job.etcd.get_json(&job.keys.ps(slot.slot)).await.ok().flatten();
        let said = match record {
            Some(record) => admin_client::status(&record.admin).await,
            None => Err(Failure::unavailable("it has no key in etcd")),
        };
        match said {
            Err(failure) => because.push(Waits::on(what, vec![Waits::end(failure.message)])),
            Ok(said) => {
                let lanes = lanes_missing(&said);
                if !lanes.is_empty() {
                    because.push(Waits::on(what, trainers(status, &lanes).await));
                }
            }
        }
    }
    if because.is_empty() {
        because = trainers(status, &[]).await;
    }
    Waits::on(format!("version {} of the parameters", status.version.0 + 1), because)
}

fn lanes_missing(said: &Value) -> Vec<u64> {
    let lanes = said["shard"]["waits_for_lanes"].as_array();
    lanes.into_iter().flatten().filter_map(Value::as_u64).collect()
}

/// Those who have the lanes, or all if none is named; and who has none of them.
async fn trainers(status: &JobStatus, lanes: &[u64]) -> Vec<Waits> {
    let mut found = Vec::new();
    let mut orphans: Vec<u64> = lanes.to_vec();
    for trainer in &status.trainers {
        let has = |lane: &u64| trainer.lanes.iter().any(|it| u64::from(it.0) == *lane);
        let its: Vec<u64> = lanes.iter().copied().filter(has).collect();
        orphans.retain(|lane| !its.contains(lane));
        if lanes.is_empty() || !its.is_empty() {
            found.push(Waits::end(one_trainer(trainer, &its).await));
        }
    }
    if !orphans.is_empty() {
        found.push(Waits::end(format!("{}, which nobody has", numbered(&orphans))));
    }
    found
}

async fn one_trainer(trainer: &TrainerStatus, lanes: &[u64]) -> String {
    let who = format!("trainer {} ({})", trainer.id, trainer.admin);
    let who = match lanes {
        [] => who,
        lanes => format!("{} of {who}", numbered(lanes)),
    };
    let why = match admin_client::status(&trainer.admin).await {
        Ok(said) => {
            let doing = said["doing"].as_str().unwrap_or("does not say what it does");
            format!("{doing}, with version {}", said["version"])
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

fn text(found: &[Waits]) -> String {
    let mut page = String::new();
    indent(&mut page, found, 0);
    page
}

fn indent(page: &mut String, found: &[Waits], depth: usize) {
    for waits in found {
        let on = match (waits.because.is_empty(), depth) {
            (true, _) => "",
            (false, 0) => " waits for",
            (false, _) => ", which waits for",
        };
        let _ = writeln!(page, "{:1$}{2}{on}", "", depth * 2, waits.what);
        indent(page, &waits.because, depth + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_told_from_the_job_down_to_whoever_is_to_blame() {
        let trainer = Waits::end("lane 2 of trainer t: it does not answer");
        let slot = Waits::on("slot 0 (pserver p)", vec![trainer]);
        let step = Waits::on("version 8 of the parameters", vec![slot]);
        let expected = "version 8 of the parameters waits for\n  slot 0 (pserver p), which waits for\n    \
                        lane 2 of trainer t: it does not answer\n";
        assert_eq!(text(&[step]), expected);
    }
}
