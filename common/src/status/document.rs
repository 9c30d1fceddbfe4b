//! A status as a document: labelled values, tables, curves and events, which views render without knowing the job.

use super::format::{bytes, figure, rate, span};
use super::training::TimelineEvent;
use super::waits::Wait;

/// A status, described for people and for metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    pub job: String,
    /// The phase of the job.
    pub state: String,
    pub level: Level,
    /// The kind of the job, such as `synchronous`; empty if it is not known.
    pub kind: &'static str,
    /// The share of the job that is done, from 0 to 1, if the end is known.
    pub done: Option<f64>,
    pub waits: Vec<Wait>,
    pub sections: Vec<Section>,
    /// Metrics that belong to no row.
    pub metrics: Vec<Metric>,
}

/// A part of a document.
#[derive(Clone, Debug, PartialEq)]
pub struct Section {
    /// The anchor on the page; letters only.
    pub id: &'static str,
    pub title: &'static str,
    pub body: Body,
}

/// The content of a section.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    Rows(Vec<Row>),
    Table(Table),
    /// Curves over the same time, with the events that may explain them.
    Curves(Vec<Curve>, Vec<Mark>),
    /// Events, the latest last.
    Events(Vec<TimelineEvent>),
}

/// A labelled value.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub label: String,
    pub value: Value,
    /// More about the value, after it; may be empty.
    pub note: String,
    /// When that was, in milliseconds since 1970.
    pub since_unix_ms: Option<u64>,
    pub level: Level,
    pub metrics: Vec<Metric>,
}

/// A table of the members of a job, or of other things of one kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// What the rows are, and how many: it stands above them.
    pub summary: Summary,
    pub columns: Vec<&'static str>,
    pub rows: Vec<Vec<Cell>>,
    /// The process in each row, by its name in [`Wait`]; empty if rows are no processes.
    pub processes: Vec<String>,
    /// Number of all rows; more than in `rows` if only some are listed.
    pub count: usize,
}

/// The line above a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    pub label: &'static str,
    pub text: String,
    pub metrics: Vec<Metric>,
}

/// A cell of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    pub value: Value,
    pub level: Level,
}

/// A value with its unit.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// There is none, or it is not known.
    None,
    Text(String),
    /// An identifier, which views may shorten to its first eight characters where space is scarce.
    Id(String),
    Count(u64),
    /// A count, and the count at the end if that is known.
    Of(u64, Option<u64>),
    /// A loss or a metric.
    Figure(f64),
    /// Per second.
    Rate(f64),
    Seconds(f64),
    /// A point in time in the past, in milliseconds since 1970: shown as the time since then.
    Since(u64),
    /// A point in time in the future, in milliseconds since 1970: shown as the time left.
    Until(u64),
    Bytes(u64),
    BytesPerSecond(f64),
    /// A share from 0 to 1.
    Share(f64),
    /// Counts of parts that are a whole together.
    Counts(Vec<(&'static str, u64)>),
    /// Amounts of parts that are a whole together, shown as shares of it.
    Shares(Vec<(&'static str, f64)>),
}

/// What a value means for the job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Level {
    #[default]
    Normal,
    Good,
    /// It may need attention.
    Warning,
    /// It holds the job up, or ended it.
    Bad,
}

/// A value over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    pub label: String,
    pub scale: Scale,
    /// Seconds since the first point of all curves, and values; all finite.
    pub points: Vec<(f64, f64)>,
}

/// The unit of a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Figure,
    Rate,
}

/// An event beside curves.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    /// Seconds since the first point of the curves.
    pub seconds: f64,
    pub kind: MarkKind,
    pub what: String,
}

/// The kinds of events that are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkKind {
    Checkpoint,
    Generation,
    Failure,
}

/// A number for monitoring.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// Without the suffix `_total` of counters.
    pub name: &'static str,
    pub help: &'static str,
    /// Tells apart the metrics of one name.
    pub label: Option<(&'static str, &'static str)>,
    pub kind: MetricKind,
    pub number: Number,
}

/// The kinds of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    Gauge,
    Counter,
}

/// The value of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    Integer(u64),
    Float(f64),
}

impl From<u64> for Number {
    fn from(number: u64) -> Self {
        Self::Integer(number)
    }
}

impl From<u32> for Number {
    fn from(number: u32) -> Self {
        Self::Integer(number.into())
    }
}

impl From<usize> for Number {
    fn from(number: usize) -> Self {
        Self::Integer(number as u64)
    }
}

impl From<f64> for Number {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}

impl Metric {
    pub fn gauge(name: &'static str, help: &'static str, number: impl Into<Number>) -> Self {
        Self { name, help, label: None, kind: MetricKind::Gauge, number: number.into() }
    }

    pub fn counter(name: &'static str, help: &'static str, number: impl Into<Number>) -> Self {
        Self { kind: MetricKind::Counter, ..Self::gauge(name, help, number) }
    }

    /// Adds a label.
    pub fn with(self, name: &'static str, value: &'static str) -> Self {
        Self { label: Some((name, value)), ..self }
    }

    /// Returns one gauge for each of `states`, which is 1 for the present state and 0 for the others, so that every
    /// state has a time series.
    pub fn states(
        name: &'static str,
        help: &'static str,
        states: &[&'static str],
        present: &str,
    ) -> Vec<Self> {
        let gauge = |state: &&'static str| {
            Self::gauge(name, help, u64::from(*state == present)).with("state", state)
        };
        states.iter().map(gauge).collect()
    }
}

impl Row {
    pub fn new(label: impl Into<String>, value: Value) -> Self {
        Self {
            label: label.into(),
            value,
            note: String::new(),
            since_unix_ms: None,
            level: Level::Normal,
            metrics: Vec::new(),
        }
    }

    pub fn text(label: impl Into<String>, text: impl Into<String>) -> Self {
        Self::new(label, Value::Text(text.into()))
    }

    /// Creates a row for an error.
    pub fn error(label: impl Into<String>, text: impl Into<String>) -> Self {
        Self { level: Level::Bad, ..Self::text(label, text) }
    }

    pub fn warning(label: impl Into<String>, text: impl Into<String>) -> Self {
        Self { level: Level::Warning, ..Self::text(label, text) }
    }

    pub fn note(self, note: impl Into<String>) -> Self {
        Self { note: note.into(), ..self }
    }

    /// Adds when that was.
    pub fn since(self, unix_ms: u64) -> Self {
        Self { since_unix_ms: Some(unix_ms), ..self }
    }

    /// Returns the value with its note in words, at the wall-clock time `now_unix_ms`.
    pub fn words(&self, now_unix_ms: u64) -> String {
        let ago = self.since_unix_ms.map_or_else(String::new, |at| {
            format!(" ({} ago)", Value::Since(at).text(now_unix_ms))
        });
        format!("{}{}{ago}", self.value.text(now_unix_ms), self.note)
    }

    /// Makes a gauge of the row.
    pub fn gauge(
        mut self,
        name: &'static str,
        help: &'static str,
        number: impl Into<Number>,
    ) -> Self {
        self.metrics.push(Metric::gauge(name, help, number));
        self
    }

    /// Makes a counter of the row.
    pub fn counter(
        mut self,
        name: &'static str,
        help: &'static str,
        number: impl Into<Number>,
    ) -> Self {
        self.metrics.push(Metric::counter(name, help, number));
        self
    }
}

impl Value {
    /// Returns the value in words, at the wall-clock time `now_unix_ms`.
    pub fn text(&self, now_unix_ms: u64) -> String {
        let percent = |part: f64, whole: f64| format!("{:.0} %", 100.0 * part / whole);
        match self {
            Self::None => "–".to_owned(),
            Self::Text(it) | Self::Id(it) => it.clone(),
            Self::Count(it) | Self::Of(it, None) => it.to_string(),
            Self::Of(it, Some(all)) => format!("{it} of {all}"),
            Self::Figure(it) => figure(*it),
            Self::Rate(it) => rate(*it),
            Self::Seconds(it) => span(*it),
            Self::Since(at) => span(now_unix_ms.saturating_sub(*at) as f64 / 1000.0),
            Self::Until(at) => {
                format!("{} left", span(at.saturating_sub(now_unix_ms) as f64 / 1000.0))
            }
            Self::Bytes(it) => bytes(*it),
            Self::BytesPerSecond(it) => format!("{:.1} MB/s", it / 1e6),
            Self::Share(it) => format!("{:.1} %", 100.0 * it),
            Self::Counts(parts) => {
                let parts = parts.iter().map(|(label, count)| format!("{count} {label}"));
                parts.collect::<Vec<_>>().join(", ")
            }
            Self::Shares(parts) => {
                let whole: f64 = parts.iter().map(|(_, amount)| amount).sum();
                let shown = parts.iter().filter(|(_, amount)| 0.005 * whole <= *amount);
                let shown =
                    shown.map(|(label, amount)| format!("{label} {}", percent(*amount, whole)));
                let shown: Vec<String> = shown.collect();
                if 0.0 < whole { shown.join(", ") } else { "–".to_owned() }
            }
        }
    }

    /// Returns the value in few words, for a narrow place.
    pub fn short(&self, now_unix_ms: u64) -> String {
        match self {
            Self::Id(id) => id.chars().take(8).collect(),
            _ => self.text(now_unix_ms),
        }
    }

    /// Creates a text, or none if it is absent.
    pub fn maybe_text(text: Option<impl Into<String>>) -> Self {
        text.map_or(Self::None, |it| Self::Text(it.into()))
    }

    /// Creates a count, or none if it is absent.
    pub fn maybe_count(count: Option<impl Into<u64>>) -> Self {
        count.map_or(Self::None, |it| Self::Count(it.into()))
    }
}

impl From<Value> for Cell {
    fn from(value: Value) -> Self {
        Self { value, level: Level::Normal }
    }
}

impl Cell {
    pub fn bad(value: Value) -> Self {
        Self { value, level: Level::Bad }
    }
}

impl Scale {
    /// Returns a value of the curve.
    pub fn value(self, number: f64) -> Value {
        match self {
            Self::Figure => Value::Figure(number),
            Self::Rate => Value::Rate(number),
        }
    }
}

impl Table {
    /// Returns the line about rows that are not shown, if at most `shown` are.
    pub fn more(&self, shown: usize) -> Option<String> {
        let shown = shown.min(self.rows.len());
        (shown < self.count).then(|| format!("and {} more", self.count - shown))
    }
}

impl Document {
    /// Returns the metrics of all rows and tables, and the others.
    pub fn all_metrics(&self) -> Vec<&Metric> {
        let in_sections = self.sections.iter().flat_map(|section| match &section.body {
            Body::Rows(rows) => rows.iter().flat_map(|row| &row.metrics).collect(),
            Body::Table(table) => table.summary.metrics.iter().collect(),
            Body::Curves(..) | Body::Events(_) => Vec::new(),
        });
        in_sections.chain(&self.metrics).collect()
    }
}
