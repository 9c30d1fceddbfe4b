//! Metrics of every process: version and role, TLS, refusals, errors of etcd.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use steadfast_auth::refusals;
use steadfast_coord::error_counters;

use crate::Exposure;

/// Collects the metrics of a process of this role.
#[derive(Debug)]
pub(crate) struct ProcessMetrics {
    pub role: &'static str,
    pub exposure: Exposure,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Build {
    version: &'static str,
    role: &'static str,
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let build = Family::<Build, Gauge>::default();
        build.get_or_create(&Build { version: env!("CARGO_PKG_VERSION"), role: self.role }).set(1);
        write(&mut encoder, "steadfast_build_info", "1, labeled with version and role", &build)?;
        let error_counters = error_counters();
        write(
            &mut encoder,
            "steadfast_lease_losses",
            "Leases that ended before the process closed them",
            &ConstCounter::new(error_counters.leases_lost),
        )?;
        write(
            &mut encoder,
            "steadfast_etcd_failed_calls",
            "Calls to etcd that were refused or timed out",
            &ConstCounter::new(error_counters.calls_failed),
        )?;
        let plaintext = i64::from(matches!(self.exposure, Exposure::Plaintext));
        write(
            &mut encoder,
            "steadfast_insecure_plaintext",
            "Whether the process serves other machines without TLS",
            &ConstGauge::new(plaintext),
        )?;
        if let Some(credentials) = self.exposure.identity().credentials() {
            write(
                &mut encoder,
                "steadfast_certificate_not_after_seconds",
                "Expiry of the certificate of the process, in seconds since 1970",
                &ConstGauge::new(credentials.not_after),
            )?;
        }
        let refusals = refusals();
        write(
            &mut encoder,
            "steadfast_refused_connections",
            "Connections that were refused: no valid certificate, or too many from one address",
            &ConstCounter::new(refusals.connections),
        )?;
        write(
            &mut encoder,
            "steadfast_refused_calls",
            "Calls and requests that were refused: neither a permitted role nor a token",
            &ConstCounter::new(refusals.calls),
        )
    }
}

fn write(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)
}
