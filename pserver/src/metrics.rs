//! Metrics of a pserver.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};
use steadfast_common::error::ErrorKind;
use steadfast_pserver_core::contribution::Contributed;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Reason {
    kind: &'static str,
}

/// Kinds of refusals. Registered at the start: `rate()` misses the first increment of a new series.
const REFUSALS: [&str; 5] = ["invalid", "stale", "not_yet", "unavailable", "other"];

/// Counters of one pserver.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pushes: Family<Outcome, Counter>,
    pushed: Counter,
    refused: Family<Reason, Counter>,
    pulls: Counter,
    pulled: Counter,
    checkpoints: Counter,
    saved: Counter,
}

impl Metrics {
    /// Registers the counters in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let m = &metrics;
        registry.register("steadfast_pserver_pushes", "Contributions by outcome", m.pushes.clone());
        registry.register_with_unit(
            "steadfast_pserver_pushed",
            "Gradient bytes received",
            Unit::Bytes,
            m.pushed.clone(),
        );
        registry.register(
            "steadfast_pserver_refused_pushes",
            "Pushes that were refused, by the kind of the error",
            m.refused.clone(),
        );
        registry.register("steadfast_pserver_pulls", "Pulls answered", m.pulls.clone());
        registry.register_with_unit(
            "steadfast_pserver_pulled",
            "Parameter bytes sent",
            Unit::Bytes,
            m.pulled.clone(),
        );
        registry.register("steadfast_pserver_shards_saved", "Shards saved", m.checkpoints.clone());
        registry.register_with_unit(
            "steadfast_pserver_saved",
            "Shard bytes saved",
            Unit::Bytes,
            m.saved.clone(),
        );
        for kind in REFUSALS {
            drop(metrics.refused.get_or_create(&Reason { kind }));
        }
        metrics
    }

    /// Counts a contribution.
    pub fn push(&self, outcome: Contributed, size_bytes: usize) {
        let outcome = match outcome {
            Contributed::Duplicate => "duplicate",
            Contributed::Waiting => "waiting",
            Contributed::Complete => "complete",
        };
        self.pushes.get_or_create(&Outcome { outcome }).inc();
        self.pushed.inc_by(size_bytes as u64);
    }

    /// Counts a push that was refused.
    pub fn refuse(&self, kind: ErrorKind) {
        let kind = match kind {
            ErrorKind::Invalid => "invalid",
            ErrorKind::Stale => "stale",
            ErrorKind::NotYet => "not_yet",
            ErrorKind::Unavailable => "unavailable",
            ErrorKind::NotFound
            | ErrorKind::Conflict
            | ErrorKind::TooLarge
            | ErrorKind::Denied
            | ErrorKind::Internal => "other",
        };
        self.refused.get_or_create(&Reason { kind }).inc();
    }

    /// Counts a pull.
    pub fn pull(&self, size_bytes: usize) {
        self.pulls.inc();
        self.pulled.inc_by(size_bytes as u64);
    }

    /// Counts a saved shard.
    pub fn checkpoint(&self, size_bytes: u64) {
        self.checkpoints.inc();
        self.saved.inc_by(size_bytes);
    }
}
