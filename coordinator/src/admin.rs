//! The admin ports of a coordinator and of a worker: health, metrics and status.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use steadfast_process::{AdminContent, Readiness};
use uuid::Uuid;

use crate::table::{Shared, Table, WorkerState};
use crate::worker::Load;

/// Returns what the admin port of a coordinator shows. Its status says whether the coordinator has ended, and why.
pub(crate) fn of_coordinator(
    id: Uuid,
    job: String,
    token: Option<String>,
    readiness: Readiness,
    shared: Arc<Shared>,
) -> AdminContent {
    let mut metrics = Registry::default();
    metrics.register_collector(Box::new(CoordinatorMetrics(shared.clone())));
    AdminContent {
        role: "coordinator",
        job,
        id: Box::new(move || id),
        readiness,
        metrics,
        token,
        shutdown: None,
        status: Box::new(move || status(&shared.lock())),
        page: None,
    }
}

/// Registers the metrics of a worker.
pub(crate) fn register_load(load: Arc<Load>, registry: &mut Registry) {
    registry.register_collector(Box::new(WorkerMetrics(load)));
}

#[derive(Debug)]
struct CoordinatorMetrics(Arc<Shared>);

impl Collector for CoordinatorMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (totals, waiting, runs_now, workers) = {
            let table = self.0.lock();
            let count = |state| table.workers().values().filter(|it| link(it) == state).count();
            let workers =
                ["connected", "unreachable", "stopped"].map(|state| (state, count(state)));
            (table.totals, table.waiting(), running(&table), workers)
        };
        let mut closures = encoder.encode_descriptor(
            "steadfast_coordinator_closures",
            "Closures that are over",
            None,
            MetricType::Counter,
        )?;
        for (outcome, count) in [
            ("returned", totals.returned),
            ("failed", totals.failed),
            ("cancelled", totals.cancelled),
        ] {
            let labels = [("outcome", outcome)];
            ConstCounter::new(count).encode(closures.encode_family(&labels)?)?;
        }
        let runs = ConstCounter::new(totals.runs);
        runs.encode(encoder.encode_descriptor(
            "steadfast_coordinator_runs",
            "Requests to workers to run a closure, repeated ones included",
            None,
            MetricType::Counter,
        )?)?;
        let gauges = [
            ("steadfast_coordinator_waiting", "Closures that wait for a worker", waiting as u64),
            ("steadfast_coordinator_running", "Closures that workers run", runs_now),
        ];
        for (name, help, value) in gauges {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value as i64).encode(metric)?;
        }
        let mut family = encoder.encode_descriptor(
            "steadfast_coordinator_workers",
            "Workers that were added",
            None,
            MetricType::Gauge,
        )?;
        for (state, count) in workers {
            let labels = [("state", state)];
            ConstGauge::new(count as i64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct WorkerMetrics(Arc<Load>);

impl Collector for WorkerMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let answered = ConstCounter::new(self.0.answered());
        answered.encode(encoder.encode_descriptor(
            "steadfast_worker_closures",
            "Closures that the worker has answered",
            None,
            MetricType::Counter,
        )?)?;
        for (name, help, value) in [
            (
                "steadfast_worker_running",
                "Closures that it has taken and not answered",
                self.0.running(),
            ),
            ("steadfast_worker_threads", "Threads that run closures", self.0.threads as usize),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value as i64).encode(metric)?;
        }
        Ok(())
    }
}

fn link(worker: &WorkerState) -> &'static str {
    match (worker.is_stopped, worker.threads) {
        (true, _) => "stopped",
        (false, Some(_)) => "connected",
        (false, None) => "unreachable",
    }
}

fn running(table: &Table) -> u64 {
    table.workers().values().map(|it| u64::from(it.running)).sum()
}

fn status(table: &Table) -> Value {
    let workers = table.workers().iter().map(|(index, it)| {
        json!({
            "index": index.0,
            "address": it.address,
            "state": link(it),
            "threads": it.threads,
            "running": it.running,
            "finished": it.finished,
            "reason": it.reason,
        })
    });
    let totals = table.totals;
    json!({
        "closures": {
            "waiting": table.waiting(),
            "running": running(table),
            "returned": totals.returned,
            "failed": totals.failed,
            "cancelled": totals.cancelled,
            "runs": totals.runs,
        },
        "workers": workers.collect::<Vec<_>>(),
        "ended": table.ended().map(|it| it.message.clone()),
    })
}
