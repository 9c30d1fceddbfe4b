//! The metrics of an agent.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use steadfast_common::ids::Round;
use steadfast_proto::v1::NodeReport;

/// What an agent counts, shared by its loop, its status and its metrics.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub round: AtomicU64,
    /// Rounds that this node was a member of.
    pub rounds: AtomicU64,
    /// Restarts because of failures.
    pub restarts: AtomicU32,
    pub restarts_max: AtomicU32,
    /// Restarts because nodes came or went.
    pub changes: AtomicU64,
    pub workers: AtomicU32,
    /// How the program ended on this node, if it did.
    run: AtomicU8,
    /// The last round in which a worker failed.
    failed_round: AtomicU64,
    /// Which worker failed last, in which round, and how. Guards one text.
    last_exit: Mutex<String>,
}

/// How the program ended on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunResult {
    Success = 1,
    /// No restart is left.
    Failure,
}

impl Counts {
    /// Notes that the workers of this node have succeeded, or have failed for good.
    pub fn note_run(&self, result: RunResult) {
        self.run.store(result as u8, Ordering::Relaxed);
    }

    /// Returns the number of runs (0 or 1) with a result, with or without retries.
    fn runs(&self, result: RunResult, retries: Retries) -> u64 {
        let had_retries = match self.restarts.load(Ordering::Relaxed) {
            0 => Retries::None,
            _ => Retries::Some,
        };
        let is_result = self.run.load(Ordering::Relaxed) == result as u8;
        u64::from(is_result && had_retries == retries)
    }

    /// Returns the share of the allowed runs that failed, in percent, as torchrun defines it: 0 without
    /// failures, 100 when no restart is left.
    pub fn flakiness(&self) -> f64 {
        let max = f64::from(self.restarts_max.load(Ordering::Relaxed)) + 1.0;
        let left = max - f64::from(self.restarts.load(Ordering::Relaxed));
        100.0 - 100.0 * left / max
    }

    /// Notes that a worker has failed in a round.
    pub fn note_failure(&self, round: Round, what: String) {
        self.failed_round.store(round.0, Ordering::Relaxed);
        self.note_exit(what);
    }

    /// Notes how the last worker failed.
    pub fn note_exit(&self, exit: String) {
        *self.last_exit.lock().unwrap_or_else(PoisonError::into_inner) = exit;
    }

    /// Returns what the agent reports to the master, but for what its workers have told.
    pub fn report(&self) -> NodeReport {
        NodeReport {
            busy_us: 0,
            restarts: self.restarts.load(Ordering::Relaxed),
            restarts_max: self.restarts_max.load(Ordering::Relaxed),
            state: "running".to_owned(),
            changes: self.changes.load(Ordering::Relaxed),
            last_exit: self.last_exit.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            failed_round: self.failed_round.load(Ordering::Relaxed),
        }
    }

    pub fn status(&self) -> Value {
        json!({
            "round": self.round.load(Ordering::Relaxed),
            "workers": self.workers.load(Ordering::Relaxed),
            "restarts": self.restarts.load(Ordering::Relaxed),
            "restarts_max": self.restarts_max.load(Ordering::Relaxed),
            "changes": self.changes.load(Ordering::Relaxed),
            "last_exit": *self.last_exit.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }

    pub fn register(counts: &Arc<Self>, registry: &mut Registry) {
        registry.register_collector(Box::new(Metrics(counts.clone())));
    }
}

/// Whether workers were restarted after failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retries {
    None,
    Some,
}

#[derive(Debug)]
struct Metrics(Arc<Counts>);

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let counts = &self.0;
        let restarts = counts.restarts.load(Ordering::Relaxed);
        let left = counts.restarts_max.load(Ordering::Relaxed).saturating_sub(restarts);
        for (name, help, value) in [
            (
                "steadfast_agent_rounds",
                "Rounds that this node was a member of",
                counts.rounds.load(Ordering::Relaxed),
            ),
            ("steadfast_agent_restarts", "Restarts of workers after failures", u64::from(restarts)),
            (
                "steadfast_agent_round_changes",
                "Restarts because nodes came or went",
                counts.changes.load(Ordering::Relaxed),
            ),
        ] {
            let counter = ConstCounter::new(value);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        let help = "Runs of the program on this node that have ended";
        let kind = ConstCounter::new(0u64).metric_type();
        let mut runs = encoder.encode_descriptor("steadfast_agent_runs", help, None, kind)?;
        for (result, of_result) in
            [("success", RunResult::Success), ("failure", RunResult::Failure)]
        {
            for (retries, with) in [("none", Retries::None), ("some", Retries::Some)] {
                let labels = [("result", result), ("retries", retries)];
                let counter = ConstCounter::new(counts.runs(of_result, with));
                counter.encode(runs.encode_family(&labels)?)?;
            }
        }
        for (name, help, value) in [
            (
                "steadfast_agent_remaining_restarts",
                "Restarts after failures that are left",
                f64::from(left),
            ),
            (
                "steadfast_agent_flakiness",
                "Share of the allowed runs that failed, in percent",
                counts.flakiness(),
            ),
            (
                "steadfast_agent_workers",
                "Workers of this node that run",
                f64::from(counts.workers.load(Ordering::Relaxed)),
            ),
        ] {
            let gauge = ConstGauge::new(value);
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S003-54: what an agent counts can be read in the text format of Prometheus.
    #[test]
    fn the_metrics_of_an_agent_can_be_read() {
        let counts = Arc::new(Counts::default());
        counts.rounds.store(3, Ordering::Relaxed);
        counts.restarts_max.store(4, Ordering::Relaxed);
        counts.restarts.store(1, Ordering::Relaxed);
        let mut registry = Registry::default();
        Counts::register(&counts, &mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "steadfast_agent_rounds_total 3",
            "steadfast_agent_restarts_total 1",
            "steadfast_agent_remaining_restarts 3.0",
            "steadfast_agent_flakiness 20.0",
        ] {
            assert!(text.lines().any(|it| it == line), "{text}");
        }
    }

    /// S003-27: the flakiness is 0 without failures, and 100 when the last allowed run has failed.
    #[test]
    fn flakiness_is_the_share_of_the_allowed_runs_that_failed() {
        let counts = Counts::default();
        counts.restarts_max.store(3, Ordering::Relaxed);
        assert_eq!(counts.flakiness(), 0.0);
        counts.restarts.store(1, Ordering::Relaxed);
        assert_eq!(counts.flakiness(), 25.0);
        counts.restarts.store(4, Ordering::Relaxed);
        assert_eq!(counts.flakiness(), 100.0);
    }

    /// S003-27: a run counts once, by its result, and by whether workers were restarted.
    #[test]
    fn a_run_counts_by_its_result_and_its_retries() {
        let counts = Arc::new(Counts::default());
        let shown = || {
            let mut registry = Registry::default();
            Counts::register(&counts, &mut registry);
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let runs = text.lines().filter(|line| line.starts_with("steadfast_agent_runs_total"));
            let ended = runs.filter(|line| line.ends_with(" 1")).map(str::to_owned);
            ended.collect::<Vec<_>>()
        };
        assert!(shown().is_empty());
        counts.note_run(RunResult::Success);
        let labels = r#"steadfast_agent_runs_total{result="success",retries="none"} 1"#;
        assert_eq!(shown(), [labels]);
        counts.restarts.store(1, Ordering::Relaxed);
        counts.note_run(RunResult::Failure);
        let labels = r#"steadfast_agent_runs_total{result="failure",retries="some"} 1"#;
        assert_eq!(shown(), [labels]);
    }
}
