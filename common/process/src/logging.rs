//! Structured logs on stderr; every line names its process.

use std::fmt;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use steadfast_common::ids::Incarnation;
use steadfast_net::traces::TRACE;
use tracing::Subscriber;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::filter::{FilterExt, LevelFilter, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

use crate::Failure;
use crate::args::LogArgs;
use crate::log_line::LogLine;
use crate::traces;

/// The process that writes a log. All clones share the incarnation.
#[derive(Clone, Debug)]
pub struct LogIdentity(Arc<Identity>);

#[derive(Debug)]
struct Identity {
    role: &'static str,
    job: String,
    id: String,
    /// The incarnation; 0 until the process has registered in etcd.
    incarnation: AtomicI64,
}

impl LogIdentity {
    /// Creates an identity without an incarnation.
    pub fn new(role: &'static str, job: &str, id: impl fmt::Display) -> Self {
        let (job, id) = (job.to_owned(), id.to_string());
        Self(Arc::new(Identity { role, job, id, incarnation: AtomicI64::new(0) }))
    }

    /// Sets the incarnation, the create-revision of the process's key, for subsequent lines.
    pub fn set_incarnation(&self, incarnation: Incarnation) {
        self.0.incarnation.store(incarnation.0, Ordering::Relaxed);
    }

    pub(crate) fn role(&self) -> &str {
        self.0.role
    }

    pub(crate) fn job(&self) -> &str {
        &self.0.job
    }

    pub(crate) fn id(&self) -> &str {
        &self.0.id
    }

    pub(crate) fn incarnation(&self) -> Option<Incarnation> {
        match self.0.incarnation.load(Ordering::Relaxed) {
            0 => None,
            revision => Some(Incarnation(revision)),
        }
    }
}

/// Starts logging to stderr, in color only on a terminal. `role` is `master`, `pserver`, …; `id` is
/// the id of the process in etcd.
///
/// # Errors
/// If the filter is invalid, or logging is already started.
pub fn init_logging(
    role: &'static str,
    job: &str,
    id: impl fmt::Display,
    args: &LogArgs,
) -> Result<LogIdentity, Failure> {
    let identity = LogIdentity::new(role, job, id);
    let filter: Targets = (args.filter.parse())
        .map_err(|error| Failure::invalid(format!("--log `{}`: {error}", args.filter)))?;
    let line = LogLine { format: args.format, identity: identity.clone() };
    let traces = match traces::endpoint(args.otlp_endpoint.as_deref()) {
        Some(endpoint) => Some(traces::layer(&endpoint, &identity)?.boxed()),
        None => None,
    };
    subscriber(filter, line, traces)
        .try_init()
        .map_err(|error| Failure::internal(format!("cannot start logging: {error}")))?;
    Ok(identity)
}

/// Builds the subscriber for log lines and, if configured, traces. Disabled spans and events, also those
/// of libraries, cost almost nothing, because every layer has a filter with a maximum level.
fn subscriber(
    filter: Targets,
    line: LogLine,
    traces: Option<BoxedLayer>,
) -> impl Subscriber + Send + Sync {
    let no_traces = filter_fn(|metadata| metadata.target() != TRACE);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .event_format(line)
        // A line that cannot be written (the disk may be full) is lost. Reporting that would also write to
        // standard error and panic.
        .log_internal_errors(false)
        .with_filter(filter.and(no_traces.with_max_level_hint(LevelFilter::TRACE)));
    let layers: Vec<BoxedLayer> = [lines.boxed()].into_iter().chain(traces).collect();
    tracing_subscriber::registry().with(layers)
}

type BoxedLayer = Box<dyn Layer<Registry> + Send + Sync>;

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::args::LogFormat;

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat, event: impl FnOnce(&LogIdentity)) -> String {
        let captured = Captured::default();
        let sink = captured.clone();
        let identity = LogIdentity::new("master", "digits", "1f");
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || sink.clone())
            .with_ansi(false)
            .event_format(LogLine { format, identity: identity.clone() })
            .finish();
        tracing::subscriber::with_default(subscriber, || event(&identity));
        let bytes = captured.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    /// The HTTP/2 library alone creates several spans for each frame.
    #[test]
    fn disabled_spans_are_not_created() {
        let identity = LogIdentity::new("master", "digits", "1f");
        let line = LogLine { format: LogFormat::Text, identity };
        let made = subscriber(Targets::new().with_default(LevelFilter::INFO), line, None);
        tracing::subscriber::with_default(made, || {
            assert!(!tracing::info_span!("a line may name it").is_disabled());
            assert!(tracing::trace_span!(target: "h2", "frame").is_disabled());
            assert!(tracing::info_span!(target: TRACE, "step").is_disabled());
        });
    }

    #[test]
    fn a_line_has_process_message_and_fields() {
        let text = logged(LogFormat::Text, |_| {
            tracing::warn!(task = 7, reason = "too late", "task lease expired");
        });
        let expected = " warn  master digits 1f steadfast_process::logging::tests: \
                        task lease expired task=7 reason=\"too late\"\n";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn a_json_line_is_one_object_with_the_incarnation_once_known() {
        let text = logged(LogFormat::Json, |identity| {
            identity.set_incarnation(Incarnation(12));
            tracing::info!(step = 3_u64, "done");
        });
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["role"], "master");
        assert_eq!(line["job"], "digits");
        assert_eq!(line["incarnation"], 12);
        assert_eq!(line["message"], "done");
        assert_eq!(line["fields"]["step"], 3);
    }

    #[test]
    fn text_from_outside_cannot_forge_a_line() {
        let text = logged(LogFormat::Text, |_| {
            tracing::info!(name = "a\nb\x1b[2J", "{}", "x\ny");
        });
        assert_eq!(text.matches('\n').count(), 1);
        assert!(!text.contains('\x1b'), "{text:?}");
    }
}
