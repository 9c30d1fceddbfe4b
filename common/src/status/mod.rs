//! The status of a job: typed values, which are its JSON, and the document that every view renders.
//!
//! A status is a struct of its kind ([`JobStatus`], [`ElasticStatus`], [`StoredStatus`], [`StandbyStatus`]). Each
//! describes itself as a [`Document`] of labelled values, tables and curves. The text, the page, the terminal and the
//! metrics render documents and know no kind, so a new value is a field and a row beside it.

mod document;
mod elastic;
pub mod format;
mod standby;
mod stored;
mod text;
mod training;
mod waits;

pub use document::{
    Body, Cell, Curve, Document, Level, Mark, MarkKind, Metric, MetricKind, Number, Row, Scale,
    Section, Summary, Table, Value,
};
pub use elastic::{
    DataStatus, ElasticPhase, ElasticStatus, HostStatus, LauncherStatus, NodePhase, NodeReport,
    NodeStatus, ScaleStatus, SpeedStatus, WorkersPhase,
};
pub use standby::StandbyStatus;
pub use stored::{StoredStatus, StoredTrainer};
pub use text::text;
pub use training::{
    JobPhase, JobStatus, MasterStatus, Point, Queues, Recovery, Saving, SlotStatus, SlotTables,
    StreamStatus, TimeBreakdown, TimelineEvent, TimelineKind, TrainerStatus,
};
pub use waits::{Chain, JOB, Wait, chains};
