//! Log events on their way to Python's `logging`.

use std::fmt::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use steadfast_process::{Failure, LogArgs, LogIdentity, init_logging};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Log records that wait for the GIL. Further ones are lost: a program that holds it for long must not make
/// the trainer wait.
const QUEUE: usize = 1024;

/// Whether logging was started: once in a process, however many trainers it runs.
static STARTED: Mutex<bool> = Mutex::new(false);

/// Starts logging, unless it is started: to `emit` (called with logger, level and message), or to stderr.
///
/// # Errors
/// If the filter is invalid.
pub fn start(
    role: &'static str,
    job: &str,
    id: impl fmt::Display,
    args: &LogArgs,
    emit: Option<Py<PyAny>>,
) -> Result<LogIdentity, Failure> {
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    if *started {
        return Ok(LogIdentity::new(role, job, id));
    }
    let identity = match emit {
        None => init_logging(role, job, id, args)?,
        Some(emit) => {
            let filter: Targets = (args.filter.parse())
                .map_err(|error| Failure::invalid(format!("--log `{}`: {error}", args.filter)))?;
            let (tx, rx) = sync_channel(QUEUE);
            let thread = std::thread::Builder::new().name("steadfast-log".to_owned());
            thread
                .spawn(move || pass_on(&rx, &emit))
                .map_err(|error| Failure::io("cannot start threads", &error))?;
            let layers = tracing_subscriber::registry().with(ToPython(tx).with_filter(filter));
            layers
                .try_init()
                .map_err(|error| Failure::internal(format!("cannot start logging: {error}")))?;
            LogIdentity::new(role, job, id)
        }
    };
    *started = true;
    Ok(identity)
}

struct Record {
    logger: String,
    level: u8,
    message: String,
}

/// Passes records on until the interpreter ends.
fn pass_on(records: &Receiver<Record>, emit: &Py<PyAny>) {
    for Record { logger, level, message } in records {
        let emitted = Python::try_attach(|py| {
            if let Err(error) = emit.call1(py, (logger, level, message)) {
                error.write_unraisable(py, None);
            }
        });
        if emitted.is_none() {
            return;
        }
    }
}

struct ToPython(SyncSender<Record>);

impl<S: Subscriber> Layer<S> for ToPython {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut text = Text::default();
        event.record(&mut text);
        let record = Record {
            logger: metadata.target().replacen("steadfast_", "steadfast.", 1).replace("::", "."),
            level: level(*metadata.level()),
            message: text.message + &text.fields,
        };
        // A full queue drops the record.
        let _ = self.0.try_send(record);
    }
}

/// Returns the number of a level in Python's `logging`.
fn level(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// The message of an event, and its fields as ` name=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
