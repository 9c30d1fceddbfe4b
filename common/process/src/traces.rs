//! OpenTelemetry traces: off unless a collector is configured.
//!
//! OpenTelemetry's own variables, such as `OTEL_TRACES_SAMPLER`, apply as well. A slow or unreachable
//! collector never delays a step: spans wait in a bounded queue and are dropped when it is full.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::KeyValue;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{self, SdkTracerProvider, SpanData};
use steadfast_net::traces::{Propagator, TRACE, install};
use tracing::{Span, Subscriber, info, warn};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::registry::LookupSpan;

use crate::{Failure, LogIdentity};

/// OpenTelemetry's variables with the address of the collector.
const VARIABLES: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// Timeout of an export, also at the end of the process.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The provider, kept to export the remaining spans when the process ends.
static PROVIDER: OnceLock<SdkTracerProvider> = OnceLock::new();

/// Returns the address of the collector: `named`, or else that of the environment.
pub(crate) fn endpoint(named: Option<&str>) -> Option<String> {
    let variable = || VARIABLES.iter().find_map(|name| std::env::var(name).ok());
    named.map(str::to_owned).or_else(variable).filter(|it| !it.is_empty())
}

/// Exports the spans of [`TRACE`] to `endpoint`, and propagates their context with calls.
///
/// # Errors
/// If the endpoint is invalid.
pub(crate) fn layer<S>(
    endpoint: &str,
    identity: &LogIdentity,
) -> Result<impl Layer<S> + Send + Sync, Failure>
where
    S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync + 'static,
{
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(TIMEOUT)
        .build()
        .map_err(|error| Failure::invalid(format!("--otlp-endpoint `{endpoint}`: {error}")))?;
    let resource = Resource::builder()
        .with_service_name(format!("steadfast-{}", identity.role()))
        .with_attributes([
            KeyValue::new("service.instance.id", identity.id().to_owned()),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("steadfast.job", identity.job().to_owned()),
        ])
        .build();
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(LoggedExporter::new(exporter))
        .with_resource(resource)
        .build();
    let tracer = provider.tracer("steadfast");
    let _ = PROVIDER.set(provider);
    install(Propagator { send, receive });
    let ours = filter_fn(|metadata| metadata.target() == TRACE);
    // The hint lets the filter skip the more verbose spans of libraries entirely.
    let ours = ours.with_max_level_hint(LevelFilter::INFO);
    Ok(tracing_opentelemetry::layer().with_tracer(tracer).with_filter(ours))
}

/// Logs when exports begin to fail, and when they succeed again.
#[derive(Debug)]
struct LoggedExporter<E> {
    exporter: E,
    is_failing: AtomicBool,
}

impl<E> LoggedExporter<E> {
    fn new(exporter: E) -> Self {
        Self { exporter, is_failing: AtomicBool::new(false) }
    }
}

impl<E: trace::SpanExporter> trace::SpanExporter for LoggedExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let exported = self.exporter.export(batch).await;
        let was_failing = self.is_failing.swap(exported.is_err(), Ordering::Relaxed);
        match &exported {
            Err(error) if !was_failing => {
                warn!(%error, "cannot export spans to the collector; they are dropped");
            }
            Ok(()) if was_failing => info!("exporting spans to the collector again"),
            Err(_) | Ok(()) => {}
        }
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// Exports the remaining spans. Blocks for at most [`TIMEOUT`].
pub(crate) fn end() {
    if let Some(provider) = PROVIDER.get() {
        // Losing the last spans is acceptable.
        let _ = provider.shutdown_with_timeout(TIMEOUT);
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

struct HeadersMut<'a>(&'a mut HeaderMap);

impl Injector for HeadersMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(name), Ok(value)) = (http::HeaderName::try_from(key), value.try_into()) {
            self.0.insert(name, value);
        }
    }
}

fn send(span: &Span, headers: &mut HeaderMap) {
    TraceContextPropagator::new().inject_context(&span.context(), &mut HeadersMut(headers));
}

fn receive(headers: &HeaderMap, span: &Span) {
    // Fails for a span that is not exported, which needs no parent.
    let _ = span.set_parent(TraceContextPropagator::new().extract(&Headers(headers)));
}
