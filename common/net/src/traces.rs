//! Propagates traces with calls: the client writes the trace context into the headers of a call, and the
//! server continues that trace. The exporter of traces defines the format. Without an exporter this costs
//! nothing.

use std::sync::OnceLock;

use http::HeaderMap;
use tracing::{Span, info_span};

/// Target of trace spans; logs exclude it.
pub const TRACE: &str = "steadfast::trace";

/// Propagates the trace context between processes.
#[derive(Clone, Copy, Debug)]
pub struct Propagator {
    /// Writes the caller's span into the headers of a call.
    pub send: fn(&Span, &mut HeaderMap),
    /// Makes the span in the headers of a call the parent of a span.
    pub receive: fn(&HeaderMap, &Span),
}

static PROPAGATOR: OnceLock<Propagator> = OnceLock::new();

/// Installs the propagation for all calls of the process. Only the first call has an effect.
pub fn install(propagator: Propagator) {
    let _ = PROPAGATOR.set(propagator);
}

/// Writes the current trace context into the headers of a call.
pub(crate) fn send(headers: &mut HeaderMap) {
    if let Some(propagator) = PROPAGATOR.get() {
        (propagator.send)(&Span::current(), headers);
    }
}

/// Returns the span in which the server handles a call.
pub(crate) fn receive(path: &str, headers: &HeaderMap) -> Span {
    let Some(propagator) = PROPAGATOR.get() else { return Span::none() };
    let name = path.rsplit('/').next().unwrap_or(path);
    let span =
        info_span!(target: TRACE, parent: None, "serve", otel.name = name, otel.kind = "server");
    (propagator.receive)(headers, &span);
    span
}
