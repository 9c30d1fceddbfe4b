//! Metrics of a master's job, read from its status at each scrape.

use std::fmt::Error;
use std::sync::atomic::AtomicU64;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use steadfast_common::status::{Metric, MetricKind, Number};

use crate::status::view::StatusView;

/// Reports the metrics of the status.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub status: StatusView,
}

type Labels = [(&'static str, &'static str); 1];

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
    match (first.kind, first.number) {
        (MetricKind::Gauge, Number::Integer(_)) => labelled(
            encoder,
            metrics,
            |it| ConstGauge::new(integer(it) as i64),
            |family: &Family<Labels, Gauge>, labels, it| {
                family.get_or_create(labels).set(integer(it) as i64);
            },
        ),
        (MetricKind::Gauge, Number::Float(_)) => labelled(
            encoder,
            metrics,
            |it| ConstGauge::new(float(it)),
            |family: &Family<Labels, Gauge<f64, AtomicU64>>, labels, it| {
                family.get_or_create(labels).set(float(it));
            },
        ),
        (MetricKind::Counter, Number::Integer(_)) => labelled(
            encoder,
            metrics,
            |it| ConstCounter::new(integer(it)),
            |family: &Family<Labels, Counter>, labels, it| {
                family.get_or_create(labels).inc_by(integer(it));
            },
        ),
        (MetricKind::Counter, Number::Float(_)) => labelled(
            encoder,
            metrics,
            |it| ConstCounter::new(float(it)),
            |family: &Family<Labels, Counter<f64, AtomicU64>>, labels, it| {
                family.get_or_create(labels).inc_by(float(it));
            },
        ),
    }
}

/// Writes one metric without a label, or the family of those that have one.
fn labelled<One: EncodeMetric, All: EncodeMetric + Default>(
    encoder: &mut DescriptorEncoder<'_>,
    metrics: &[&Metric],
    alone: impl Fn(Number) -> One,
    set: impl Fn(&All, &Labels, Number),
) -> Result<(), Error> {
    let Some(first) = metrics.first() else { return Ok(()) };
    if first.label.is_none() {
        return encode(encoder, first, &alone(first.number));
    }
    let all = All::default();
    for it in metrics {
        it.label.iter().for_each(|label| set(&all, &[*label], it.number));
    }
    encode(encoder, first, &all)
}

fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    metric: &Metric,
    encoded: &impl EncodeMetric,
) -> Result<(), Error> {
    encoded.encode(encoder.encode_descriptor(
        metric.name,
        metric.help,
        None,
        encoded.metric_type(),
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

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    #[derive(Debug)]
    struct Fixed;

    impl Collector for Fixed {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
            let one = Metric::gauge("one", "One", 2_u64);
            let [a, b] = ["a", "b"].map(|it| Metric::counter("of", "Of", 0.5).with("part", it));
            family(&mut encoder, &[&one])?;
            family(&mut encoder, &[&a, &b])
        }
    }

    #[test]
    fn metrics_of_one_name_are_a_family_and_one_without_a_label_has_no_braces() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Fixed));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        assert!(text.contains("\none 2\n"), "{text}");
        assert!(text.contains("\nof_total{part=\"a\"} 0.5\n"), "{text}");
        assert!(text.contains("\nof_total{part=\"b\"} 0.5\n"), "{text}");
    }
}
