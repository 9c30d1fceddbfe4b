//! Metrics of a pserver.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use steadfast_common::error::ErrorKind;
use steadfast_pserver_core::contribution::Contributed;
use tokio::sync::watch;

use crate::event_loop::EventLoopHandle;

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

    /// Registers metrics of the rows of tables, which are read when they are requested.
    pub fn register_tables(
        registry: &mut Registry,
        event_loop: watch::Receiver<Option<EventLoopHandle>>,
    ) {
        registry.register_collector(Box::new(TableMetrics(event_loop)));
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

/// The rows of the slot that the process holds; nothing if its model has no tables.
#[derive(Debug)]
struct TableMetrics(watch::Receiver<Option<EventLoopHandle>>);

impl Collector for TableMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let published = self.0.borrow().as_ref().map(|it| it.published().borrow().clone());
        let shard = published.as_ref().and_then(|it| it.shard.as_ref());
        let Some(shard) = shard.filter(|it| !it.tables.names.is_empty()) else { return Ok(()) };
        let kind = ConstGauge::new(0_u64).metric_type();
        let help = "Rows of each table that exist in this slot";
        let mut rows = encoder.encode_descriptor("steadfast_pserver_rows", help, None, kind)?;
        for (name, count) in shard.tables.names.iter().zip(&shard.rows) {
            let labels = [("table", name.as_str())];
            ConstGauge::new(*count).encode(rows.encode_family(&labels)?)?;
        }
        for (name, help, unit, value) in [
            (
                "steadfast_pserver_rows_in_memory",
                "Rows of all tables in memory, with ids that are not admitted yet",
                None,
                shard.usage.rows_in_memory as u64,
            ),
            (
                "steadfast_pserver_row_memory",
                "Memory of these rows, with their index",
                Some(Unit::Bytes),
                shard.usage.memory_bytes as u64,
            ),
            (
                "steadfast_pserver_row_disk",
                "Files on the local disk with rows",
                Some(Unit::Bytes),
                shard.usage.disk_bytes,
            ),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, unit.as_ref(), kind)?)?;
        }
        let kind = ConstCounter::new(0_u64).metric_type();
        let help = "Accesses to rows that were in memory, or were read from the local disk";
        let mut accesses =
            encoder.encode_descriptor("steadfast_pserver_row_accesses", help, None, kind)?;
        for (from, count) in [("memory", shard.usage.hits), ("disk", shard.usage.misses)] {
            let labels = [("from", from)];
            ConstCounter::new(count).encode(accesses.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
