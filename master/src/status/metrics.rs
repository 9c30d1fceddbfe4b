//! Metrics of a master's job, read from its status at each scrape.

use std::fmt::Error;
use std::sync::atomic::AtomicU64;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use steadfast_common::status::{Metric, MetricKind, Number};

use crate::status::view::StatusView;

/// Reports the metrics of the status.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub status: StatusView,
}

/// The labels of a metric; without any, of one that has a name of its own.
type Labels = Vec<(&'static str, &'static str)>;

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let is_acting = u64::from(self.status.is_acting());
        let acting = Metric::gauge("steadfast_master_acting", "1 if this master acts", is_acting);
        family(&mut encoder, &[&acting])?;
        let document = self.status.document();
        let metrics = document.all_metrics();
        metrics
            .chunk_by(|one, next| one.name == next.name)
            .try_for_each(|of_one_name| family(&mut encoder, of_one_name))
    }
}

/// Writes metrics of one name, which differ by their label.
fn family(encoder: &mut DescriptorEncoder<'_>, metrics: &[&Metric]) -> Result<(), Error> {
    let Some(first) = metrics.first() else { return Ok(()) };
    let labels = |it: &Metric| -> Labels { it.label.into_iter().collect() };
    match (first.kind, first.number) {
        (MetricKind::Gauge, Number::Integer(_)) => {
            let family = Family::<Labels, Gauge>::default();
            for it in metrics {
                family.get_or_create(&labels(it)).set(integer(it.number) as i64);
            }
            encode(encoder, first, &family)
        }
        (MetricKind::Gauge, Number::Float(_)) => {
            let family = Family::<Labels, Gauge<f64, AtomicU64>>::default();
            for it in metrics {
                family.get_or_create(&labels(it)).set(float(it.number));
            }
            encode(encoder, first, &family)
        }
        (MetricKind::Counter, Number::Integer(_)) => {
            let family = Family::<Labels, Counter>::default();
            for it in metrics {
                family.get_or_create(&labels(it)).inc_by(integer(it.number));
            }
            encode(encoder, first, &family)
        }
        (MetricKind::Counter, Number::Float(_)) => {
            let family = Family::<Labels, Counter<f64, AtomicU64>>::default();
            for it in metrics {
                family.get_or_create(&labels(it)).inc_by(float(it.number));
            }
            encode(encoder, first, &family)
        }
    }
}

fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    metric: &Metric,
    family: &impl EncodeMetric,
) -> Result<(), Error> {
    family.encode(encoder.encode_descriptor(
        metric.name,
        metric.help,
        None,
        family.metric_type(),
    )?)
}

fn integer(number: Number) -> u64 {
    match number {
        Number::Integer(it) => it,
        Number::Float(it) => it as u64,
    }
}

fn float(number: Number) -> f64 {
    match number {
        Number::Integer(it) => it as f64,
        Number::Float(it) => it,
    }
}
