//! What every process says of itself: what it is, how safe it is, how it gets on with etcd.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use steadfast_coord::troubles;
use steadfast_host::refusals::refusals;
use steadfast_host::tls::{self, Exposure};

/// Of a process of that role.
#[derive(Debug)]
pub(crate) struct ProcessMetrics {
    pub role: &'static str,
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
        write(&mut encoder, "steadfast_build_info", "1, with what the process is", &build)?;
        let troubles = troubles();
        write(
            &mut encoder,
            "steadfast_lease_losses",
            "Leases that ended although the process wanted to keep them",
            &ConstCounter::new(troubles.leases_lost),
        )?;
        write(
            &mut encoder,
            "steadfast_etcd_failed_calls",
            "Calls that etcd refused or did not answer in time",
            &ConstCounter::new(troubles.calls_failed),
        )?;
        let exposure = tls::exposure();
        let plaintext = i64::from(matches!(exposure, Exposure::Plaintext));
        write(
            &mut encoder,
            "steadfast_insecure_plaintext",
            "Whether others than this machine's reach the process in the clear",
            &ConstGauge::new(plaintext),
        )?;
        if let Exposure::Tls(credentials) = exposure {
            write(
                &mut encoder,
                "steadfast_certificate_not_after_seconds",
                "When the certificate of the process ends, in seconds since 1970",
                &ConstGauge::new(credentials.current().not_after),
            )?;
        }
        let refusals = refusals();
        write(
            &mut encoder,
            "steadfast_refused_connections",
            "Connections that were refused for want of a certificate",
            &ConstCounter::new(refusals.connections),
        )?;
        write(
            &mut encoder,
            "steadfast_refused_calls",
            "Calls and requests that were refused for want of a role or a token",
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
