//! Metrics of a master's job, read from its status at each scrape.

use std::sync::atomic::AtomicU64;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Registry, Unit};
use steadfast_common::status::{JobPhase, JobStatus, StreamStatus, TimeBreakdown};
use tokio::sync::watch;

use crate::acting::Acting;
use crate::checkpoint::coordinator::Health;

/// Reads the acting master's status.
#[derive(Debug)]
pub struct Metrics {
    acting: watch::Receiver<Option<Acting>>,
    /// What this master waits for before it accepts calls. It holds the lock meanwhile.
    waits: watch::Receiver<Option<String>>,
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
struct Activity {
    activity: &'static str,
}

impl Metrics {
    /// Registers a collector that reports the job's metrics while this master acts.
    pub fn register(
        registry: &mut Registry,
        acting: watch::Receiver<Option<Acting>>,
        waits: watch::Receiver<Option<String>>,
    ) {
        registry.register_collector(Box::new(Self { acting, waits }));
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let acting = self.acting.borrow().clone();
        gauge(
            &mut encoder,
            "steadfast_master_acting",
            "1 if this master acts",
            i64::from(acting.is_some() || self.waits.borrow().is_some()),
        )?;
        let Some(acting) = acting else { return Ok(()) };
        let status = acting.status();
        staleness(&mut encoder, &acting)?;
        tasks(&mut encoder, &status)?;
        checkpoints(&mut encoder, &acting.checkpoints.health())?;
        state(&mut encoder, status.state)?;
        members(&mut encoder, &status)?;
        let recoveries = acting.handle.snapshot.borrow().recoveries_count;
        let help = "Completed recoveries from failures in this master's term";
        counter(&mut encoder, "steadfast_recoveries", help, recoveries)?;
        progress(&mut encoder, &status)?;
        if let Some(status) = &status.stream {
            stream(&mut encoder, status)?;
        }
        let help = "Failed attempts to evaluate and write the final model";
        gauge(&mut encoder, "steadfast_save_failures", help, i64::from(status.saving.failures))?;
        let help = "Tasks that were given up in at least one pass";
        gauge(&mut encoder, "steadfast_discarded_tasks", help, status.discarded.tasks as i64)?;
        time_breakdown(&mut encoder, status.time_breakdown)
    }
}

fn members(e: &mut DescriptorEncoder<'_>, status: &JobStatus) -> Result<(), std::fmt::Error> {
    gauge(e, "steadfast_generation", "Generation of the job", status.generation.0 as i64)?;
    gauge(e, "steadfast_trainers", "Live trainers", status.trainers.len() as i64)?;
    let held = status.slots.iter().filter(|slot| slot.address.is_some()).count();
    gauge(e, "steadfast_slots_held", "Pserver slots with a holder", held as i64)?;
    gauge(e, "steadfast_slots", "Pserver slots", i64::from(status.ps_desired))?;
    if let Some(last) = status.recoveries.last() {
        let help = "Duration of the last recovery from a failure";
        float(e, "steadfast_last_recovery_seconds", help, last.seconds)?;
    }
    Ok(())
}

fn progress(e: &mut DescriptorEncoder<'_>, status: &JobStatus) -> Result<(), std::fmt::Error> {
    gauge(e, "steadfast_pass", "Current pass of the job", i64::from(status.pass.0))?;
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

/// Reports the files of a stream, and how far training lags behind them.
fn stream(e: &mut DescriptorEncoder<'_>, status: &StreamStatus) -> Result<(), std::fmt::Error> {
    let help = "Files of the stream that became tasks";
    counter(e, "steadfast_stream_files", help, status.files)?;
    let help = "Files of the stream that are not tasks yet";
    gauge(e, "steadfast_stream_waiting_files", help, status.waiting_files as i64)?;
    let help = "Records of tasks of the stream that were not trained on";
    gauge(e, "steadfast_stream_waiting_records", help, status.waiting_records as i64)?;
    let help = "Age of the oldest file of the stream with records that were not trained on";
    float(e, "steadfast_stream_lag_seconds", help, status.oldest_seconds)?;
    let help = "Files of the stream that cannot be read and are left out";
    gauge(e, "steadfast_stream_left_out_files", help, status.left_out_files as i64)
}

fn staleness(e: &mut DescriptorEncoder<'_>, acting: &Acting) -> Result<(), std::fmt::Error> {
    let lead = acting.handle.staleness_gate.largest_lead() as i64;
    let help = "Largest lead in pushes that the staleness gate admitted";
    gauge(e, "steadfast_staleness_max", help, lead)?;
    match acting.max_staleness {
        Some(bound) => {
            let help = "Lead in pushes that the job file allows";
            gauge(e, "steadfast_staleness_bound", help, i64::from(bound))
        }
        None => Ok(()),
    }
}

/// Reports 1 for the current state and 0 for all others, so that every state has a time series.
fn state(e: &mut DescriptorEncoder<'_>, present: JobPhase) -> Result<(), std::fmt::Error> {
    let family = Family::<State, Gauge>::default();
    for (state, name) in [
        (JobPhase::Waiting, "waiting"),
        (JobPhase::Starting, "starting"),
        (JobPhase::Training, "training"),
        (JobPhase::Evaluating, "evaluating"),
        (JobPhase::Saving, "saving"),
        (JobPhase::Finished, "finished"),
        (JobPhase::Failed, "failed"),
    ] {
        family.get_or_create(&State { state: name }).set(i64::from(state == present));
    }
    let (name, help) = ("steadfast_job_state", "1 for the current state of the job");
    family.encode(e.encode_descriptor(name, help, None, family.metric_type())?)
}

fn time_breakdown(
    e: &mut DescriptorEncoder<'_>,
    time_breakdown: TimeBreakdown,
) -> Result<(), std::fmt::Error> {
    let family = Family::<Activity, Counter<f64, AtomicU64>>::default();
    for (activity, seconds) in [
        ("data", time_breakdown.data),
        ("compute", time_breakdown.compute),
        ("push", time_breakdown.push),
        ("wait", time_breakdown.wait),
        ("pull", time_breakdown.pull),
    ] {
        family.get_or_create(&Activity { activity }).inc_by(seconds);
    }
    let (name, help) = ("steadfast_trainer_time", "Time of all trainers together, by activity");
    family.encode(e.encode_descriptor(name, help, Some(&Unit::Seconds), family.metric_type())?)
}

fn checkpoints(
    encoder: &mut DescriptorEncoder<'_>,
    health: &Health,
) -> Result<(), std::fmt::Error> {
    let help = "Consecutive failed checkpoints";
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
