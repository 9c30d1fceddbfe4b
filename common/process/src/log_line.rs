//! Format of a log line: time, level, process (role, job, id, incarnation), message and fields.

use std::fmt;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::registry::LookupSpan;

use crate::args::LogFormat;
use crate::logging::LogIdentity;

/// Formats each event as one line that names its process.
pub(crate) struct LogLine {
    pub format: LogFormat,
    pub identity: LogIdentity,
}

impl<S, N> FormatEvent<S, N> for LogLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        let spans = context.event_scope().map(|scope| {
            scope.from_root().map(|span| span.metadata().name()).collect::<Vec<_>>().join(":")
        });
        let line = Line { time, event, spans, fields };
        match self.format {
            LogFormat::Json => writeln!(writer, "{}", self.json(line)),
            LogFormat::Text => self.text(&mut writer, &line),
        }
    }
}

struct Line<'a> {
    time: String,
    event: &'a Event<'a>,
    spans: Option<String>,
    fields: Fields,
}

impl LogLine {
    fn json(&self, line: Line<'_>) -> Value {
        let metadata = line.event.metadata();
        let mut object = Map::new();
        object.insert("time".to_owned(), line.time.into());
        object.insert("level".to_owned(), metadata.level().as_str().to_lowercase().into());
        object.insert("role".to_owned(), self.identity.role().into());
        object.insert("job".to_owned(), self.identity.job().into());
        object.insert("id".to_owned(), self.identity.id().into());
        if let Some(incarnation) = self.identity.incarnation() {
            object.insert("incarnation".to_owned(), incarnation.0.into());
        }
        object.insert("target".to_owned(), metadata.target().into());
        if let Some(spans) = line.spans {
            object.insert("span".to_owned(), spans.into());
        }
        object.insert("message".to_owned(), line.fields.message.into());
        let fields: Map<String, Value> = line.fields.others.into_iter().collect();
        if !fields.is_empty() {
            object.insert("fields".to_owned(), fields.into());
        }
        Value::Object(object)
    }

    fn text(&self, writer: &mut Writer<'_>, line: &Line<'_>) -> fmt::Result {
        let metadata = line.event.metadata();
        let (dim, plain) =
            if writer.has_ansi_escapes() { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
        let level = level(*metadata.level());
        let tint = if writer.has_ansi_escapes() { tint(*metadata.level()) } else { "" };
        write!(writer, "{dim}{}{plain} {tint}{level}{plain} ", line.time)?;
        write!(writer, "{} {} {}", self.identity.role(), self.identity.job(), self.identity.id())?;
        if let Some(incarnation) = self.identity.incarnation() {
            write!(writer, " {incarnation}")?;
        }
        if let Some(spans) = &line.spans {
            write!(writer, " {spans}")?;
        }
        write!(writer, " {dim}{}:{plain} {}", metadata.target(), one_line(&line.fields.message))?;
        for (name, value) in &line.fields.others {
            match value {
                Value::String(text) if is_word(text) => write!(writer, " {name}={text}")?,
                value => write!(writer, " {name}={value}")?,
            }
        }
        writer.write_char('\n')
    }
}

fn level(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warn ",
        Level::INFO => "info ",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}

fn tint(level: Level) -> &'static str {
    match level {
        Level::ERROR => "\x1b[31m",
        Level::WARN => "\x1b[33m",
        Level::INFO => "\x1b[32m",
        Level::DEBUG | Level::TRACE => "\x1b[34m",
    }
}

/// Escapes control characters, so that external text can neither forge a line nor control a terminal.
fn one_line(text: &str) -> String {
    if !text.contains(char::is_control) {
        return text.to_owned();
    }
    text.chars()
        .flat_map(|it| {
            let escaped: Box<dyn Iterator<Item = char>> = if it.is_control() {
                Box::new(it.escape_default())
            } else {
                Box::new([it].into_iter())
            };
            escaped
        })
        .collect()
}

fn is_word(text: &str) -> bool {
    let plain = |it: char| it.is_alphanumeric() || "-_.:/,+%@".contains(it);
    !text.is_empty() && text.chars().all(plain)
}

/// The message of an event and its other fields, in order.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(String, Value)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: impl Into<Value>) {
        match (field.name(), value.into()) {
            ("message", Value::String(text)) => self.message = text,
            ("message", value) => self.message = value.to_string(),
            (name, value) => self.others.push((name.to_owned(), value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}"));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }
}
