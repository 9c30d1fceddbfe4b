//! What a master shows of its job, read from its status at each scrape.

use std::sync::atomic::AtomicU64;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Registry, Unit};
use steadfast_common::status::{JobState, JobStatus, Spent};
use tokio::sync::watch;

use crate::acting::Acting;
use crate::checkpoints::Health;

/// Reads the acting master's status.
#[derive(Debug)]
pub struct Metrics {
    acting: watch::Receiver<Option<Acting>>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Queue {
    queue: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct State {
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct SpentOn {
    on: &'static str,
}

impl Metrics {
    /// Shows the job's figures in `registry` while this master acts.
    pub fn register(registry: &mut Registry, acting: watch::Receiver<Option<Acting>>) {
        registry.register_collector(Box::new(Self { acting }));
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let acting = self.acting.borrow().clone();
        gauge(
            &mut encoder,
            "steadfast_master_acting",
            "1 if this master acts",
            i64::from(acting.is_some()),
        )?;
        let Some(acting) = acting else { return Ok(()) };
        let status = acting.status();
        staleness(&mut encoder, &acting)?;
        tasks(&mut encoder, &status)?;
        checkpoints(&mut encoder, &acting.checkpoints.health())?;
        state(&mut encoder, status.state)?;
        members(&mut encoder, &status)?;
        let recoveries = acting.office.facts.borrow().recoveries_count;
        let help = "Pauses that failures made and that are over, while this master acts";
        counter(&mut encoder, "steadfast_recoveries", help, recoveries)?;
        progress(&mut encoder, &status)?;
        spent(&mut encoder, status.spent)
    }
}

fn members(e: &mut DescriptorEncoder<'_>, status: &JobStatus) -> Result<(), std::fmt::Error> {
    gauge(e, "steadfast_generation", "Generation of the job", status.generation.0 as i64)?;
    gauge(e, "steadfast_trainers", "Live trainers", status.trainers.len() as i64)?;
    let held = status.slots.iter().filter(|slot| slot.address.is_some()).count();
    gauge(e, "steadfast_slots_held", "Pserver slots with a holder", held as i64)?;
    gauge(e, "steadfast_slots", "Pserver slots", i64::from(status.ps_desired))?;
    if let Some(last) = status.recoveries.last() {
        let help = "Length of the last pause that a failure made";
        float(e, "steadfast_last_recovery_seconds", help, last.seconds)?;
    }
    Ok(())
}

fn progress(e: &mut DescriptorEncoder<'_>, status: &JobStatus) -> Result<(), std::fmt::Error> {
    gauge(e, "steadfast_pass", "Pass that the job is in", i64::from(status.pass.0))?;
    let version = status.version.0 as i64;
    gauge(e, "steadfast_version", "Steps that the parameters reflect", version)?;
    counter(e, "steadfast_examples", "Records trained on", status.examples)?;
    let done = match (status.examples_total, status.steps) {
        (Some(total), _) => Some(status.examples as f64 / total as f64),
        (None, Some(steps)) => Some(status.version.0 as f64 / steps as f64),
        (None, None) => None,
    };
    if let Some(done) = done {
        float(e, "steadfast_progress_ratio", "Share of the job that is done", done)?;
    }
    if let Some(loss) = status.loss {
        float(e, "steadfast_loss", "Mean loss of the last step or task", loss)?;
    }
    if let Some(evaluation) = &status.evaluation {
        let help = "Metric on held-out records";
        float(e, "steadfast_evaluation_metric", help, evaluation.metric)?;
    }
    Ok(())
}

fn staleness(e: &mut DescriptorEncoder<'_>, acting: &Acting) -> Result<(), std::fmt::Error> {
    let lead = acting.office.clocks.largest_lead() as i64;
    let help = "Largest lead in pushes that bounded staleness let through";
    gauge(e, "steadfast_staleness_max", help, lead)?;
    match acting.max_staleness {
        Some(bound) => {
            let help = "Lead in pushes that the job file allows";
            gauge(e, "steadfast_staleness_bound", help, i64::from(bound))
        }
        None => Ok(()),
    }
}

/// The present state has 1, all others 0, so that each can be drawn and asked for.
fn state(e: &mut DescriptorEncoder<'_>, present: JobState) -> Result<(), std::fmt::Error> {
    let family = Family::<State, Gauge>::default();
    for (state, name) in [
        (JobState::Waiting, "waiting"),
        (JobState::Starting, "starting"),
        (JobState::Training, "training"),
        (JobState::Saving, "saving"),
        (JobState::Finished, "finished"),
        (JobState::Failed, "failed"),
    ] {
        family.get_or_create(&State { state: name }).set(i64::from(state == present));
    }
    let (name, help) = ("steadfast_job_state", "1 for the state that the job is in");
    family.encode(e.encode_descriptor(name, help, None, family.metric_type())?)
}

fn spent(e: &mut DescriptorEncoder<'_>, spent: Spent) -> Result<(), std::fmt::Error> {
    let family = Family::<SpentOn, Counter<f64, AtomicU64>>::default();
    for (on, seconds) in [
        ("data", spent.data),
        ("compute", spent.compute),
        ("push", spent.push),
        ("wait", spent.wait),
        ("pull", spent.pull),
    ] {
        family.get_or_create(&SpentOn { on }).inc_by(seconds);
    }
    let (name, help) = ("steadfast_spent", "Time of all trainers together, by what it went to");
    family.encode(e.encode_descriptor(name, help, Some(&Unit::Seconds), family.metric_type())?)
}

fn checkpoints(
    encoder: &mut DescriptorEncoder<'_>,
    health: &Health,
) -> Result<(), std::fmt::Error> {
    let help = "Checkpoints that failed since the last one that succeeded";
    let failures = i64::from(health.failures_in_a_row);
    gauge(encoder, "steadfast_checkpoint_failures_in_a_row", help, failures)?;
    let help = "Checkpoints committed by this master";
    counter(encoder, "steadfast_checkpoints", help, health.committed)?;
    if let Some(last) = health.last {
        let help = "Time since this master committed a checkpoint";
        let age = last.elapsed().as_secs_f64();
        float(encoder, "steadfast_checkpoint_age_seconds", help, age)?;
    }
    Ok(())
}

fn tasks(encoder: &mut DescriptorEncoder<'_>, status: &JobStatus) -> Result<(), std::fmt::Error> {
    let queues = status.queues;
    let family = Family::<Queue, Gauge>::default();
    for (queue, count) in [
        ("todo", queues.todo),
        ("pending", queues.pending),
        ("done", queues.done),
        ("discarded", queues.discarded),
    ] {
        family.get_or_create(&Queue { queue }).set(i64::from(count));
    }
    let descriptor = encoder.encode_descriptor(
        "steadfast_tasks",
        "Tasks of the pass by queue",
        None,
        family.metric_type(),
    )?;
    family.encode(descriptor)
}

fn counter(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: u64,
) -> Result<(), std::fmt::Error> {
    let counter = ConstCounter::new(value);
    counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: i64,
) -> Result<(), std::fmt::Error> {
    let gauge = ConstGauge::new(value);
    gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
}

fn float(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: f64,
) -> Result<(), std::fmt::Error> {
    let gauge = ConstGauge::new(value);
    gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
}
