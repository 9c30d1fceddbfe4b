//! What a master shows of its job, read from its status at each scrape.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;
use steadfast_common::status::JobStatus;
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
        let lead = acting.office.clocks.largest_lead() as i64;
        let help = "Largest lead in pushes that bounded staleness let through";
        gauge(&mut encoder, "steadfast_staleness_max", help, lead)?;
        tasks(&mut encoder, &status)?;
        checkpoints(&mut encoder, &acting.checkpoints.health())?;
        let e = &mut encoder;
        gauge(e, "steadfast_generation", "Generation of the job", status.generation.0 as i64)?;
        gauge(e, "steadfast_pass", "Pass that the job is in", i64::from(status.pass.0))?;
        gauge(
            e,
            "steadfast_version",
            "Steps that the parameters reflect",
            status.version.0 as i64,
        )?;
        gauge(e, "steadfast_trainers", "Live trainers", status.trainers.len() as i64)?;
        let held = status.slots.iter().filter(|slot| slot.address.is_some()).count();
        gauge(e, "steadfast_slots_held", "Pserver slots with a holder", held as i64)?;
        gauge(e, "steadfast_slots", "Pserver slots", i64::from(status.ps_desired))?;
        let examples = ConstCounter::new(status.examples);
        let descriptor = encoder.encode_descriptor(
            "steadfast_examples",
            "Records trained on",
            None,
            examples.metric_type(),
        )?;
        examples.encode(descriptor)?;
        if let Some(loss) = status.loss {
            float(&mut encoder, "steadfast_loss", "Mean loss of the last step or task", loss)?;
        }
        if let Some(evaluation) = &status.evaluation {
            let help = "Metric on held-out records";
            float(&mut encoder, "steadfast_evaluation_metric", help, evaluation.metric)?;
        }
        Ok(())
    }
}

fn checkpoints(
    encoder: &mut DescriptorEncoder<'_>,
    health: &Health,
) -> Result<(), std::fmt::Error> {
    let help = "Checkpoints that failed since the last one that succeeded";
    let failures = i64::from(health.failures_in_a_row);
    gauge(encoder, "steadfast_checkpoint_failures_in_a_row", help, failures)?;
    let committed = ConstCounter::new(health.committed);
    let (name, help) = ("steadfast_checkpoints", "Checkpoints committed by this master");
    committed.encode(encoder.encode_descriptor(name, help, None, committed.metric_type())?)?;
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
