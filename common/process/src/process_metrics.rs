//! What every process says of its own safety.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use steadfast_host::refusals::refusals;
use steadfast_host::tls::{self, Exposure};

#[derive(Debug)]
pub(crate) struct ProcessMetrics;

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
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
