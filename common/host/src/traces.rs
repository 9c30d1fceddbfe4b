//! Traces go along with calls: whoever calls says of which trace that is, and whoever is called goes on
//! with it. How it is written in a call's headers is up to whoever exports traces. While nobody does, this
//! costs nothing.

use std::sync::OnceLock;

use http::HeaderMap;
use tracing::{Span, info_span};

/// Target of the spans that traces are made of; logs leave them out.
pub const TRACE: &str = "steadfast::trace";

/// Takes traces from process to process.
#[derive(Clone, Copy, Debug)]
pub struct Courier {
    /// Writes a span of the caller's into the headers of its call.
    pub send: fn(&Span, &mut HeaderMap),
    /// Makes a span go on with what the headers of a call say.
    pub receive: fn(&HeaderMap, &Span),
}

static COURIER: OnceLock<Courier> = OnceLock::new();

/// From now on, all calls of the process carry their traces. Only the first courier counts.
pub fn carry(courier: Courier) {
    let _ = COURIER.set(courier);
}

/// Says in a call's headers of which trace it is.
pub(crate) fn send(headers: &mut HeaderMap) {
    if let Some(courier) = COURIER.get() {
        (courier.send)(&Span::current(), headers);
    }
}

/// The span in which a call is answered.
pub(crate) fn receive(path: &str, headers: &HeaderMap) -> Span {
    let Some(courier) = COURIER.get() else { return Span::none() };
    let name = path.rsplit('/').next().unwrap_or(path);
    let span =
        info_span!(target: TRACE, parent: None, "serve", otel.name = name, otel.kind = "server");
    (courier.receive)(headers, &span);
    span
}
