//! The status of a training job: its values, and the document of them.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use super::document::{
    Body, Cell, Curve, Document, Level, Mark, MarkKind, Metric, Row, Scale, Section, Summary,
    Table, Value,
};
use super::elastic::{ScaleStatus, SpeedStatus};
use super::format::{passes, plural, rate, span};
use super::waits::Wait;
use crate::ids::{Generation, Incarnation, Lane, Pass, Slot, TrainerId, Version};
use crate::job::spec::Mode;
use crate::records::given_up::{Discarded, DiscardedTask};
use crate::records::stream::LeftOut;
use crate::records::{EvaluationRecord, ResultRecord};

/// Maximum number of recoveries that are shown, latest first.
const RECOVERIES_SHOWN: usize = 3;

/// Maximum number of files of a stream that are listed as left out.
const LEFT_OUT_SHOWN: usize = 20;

/// A job at one point in time, as seen by its acting master.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    pub job: String,
    pub mode: Mode,
    pub state: JobPhase,
    /// What is blocked, by what, and why; empty if nothing is blocked.
    pub waiting: Vec<String>,
    /// Which process waits for which, with the same reasons.
    #[serde(default)]
    pub waits: Vec<Wait>,
    pub generation: Generation,
    pub pass: Pass,
    /// Passes to train, if the job is bounded by passes.
    pub passes: Option<u32>,
    /// Total steps to train, if known.
    pub steps: Option<u64>,
    pub version: Version,
    pub queues: Queues,
    /// Records trained on so far.
    pub examples: u64,
    /// Total records to train on, if known.
    pub examples_total: Option<u64>,
    pub examples_per_second: f64,
    /// Mean loss of a record in the last step (synchronous) or finished task (asynchronous).
    pub loss: Option<f64>,
    pub evaluation: Option<EvaluationRecord>,
    pub master: MasterStatus,
    pub slots: Vec<SlotStatus>,
    /// Number of slots. The master sees only the spare pservers that follow a slot.
    pub ps_desired: u32,
    /// Number of spares that are to follow a slot.
    #[serde(default)]
    pub warm_spares: u32,
    pub trainers: Vec<TrainerStatus>,
    pub checkpoint: Option<String>,
    /// The error of the last checkpoint attempt; absent if it succeeded.
    #[serde(default)]
    pub checkpoint_error: Option<String>,
    /// Failed checkpoint attempts since the last successful one.
    #[serde(default)]
    pub checkpoint_failures: u32,
    /// Checkpoints that this master has committed.
    #[serde(default)]
    pub checkpoints_committed: u64,
    /// State of saving the final model, once training is over.
    #[serde(default)]
    pub saving: Saving,
    /// Says how many trainers work, if that was chosen, or measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<ScaleStatus>,
    /// Tells how fast the trainers trained lately, by their number, as this master has measured it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub speeds: Vec<SpeedStatus>,
    /// Warnings about the division of the dataset into tasks; they do not stop the job.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Pauses caused by failures, the latest last.
    #[serde(default)]
    pub recoveries: Vec<Recovery>,
    /// Number of all such pauses in this master's term, including those no longer listed.
    #[serde(default)]
    pub recoveries_count: u64,
    /// The largest lead, in pushes, that the staleness gate has admitted.
    #[serde(default)]
    pub lead_max: u64,
    /// The lead that the job file allows, if it bounds it.
    #[serde(default)]
    pub lead_bound: Option<u32>,
    /// Tasks that were given up.
    pub discarded: Discarded,
    /// Time breakdown of all trainers in this master's term, including trainers that have left.
    #[serde(default)]
    pub time_breakdown: TimeBreakdown,
    /// Estimated seconds until the end, at the current rate.
    pub seconds_left: Option<f64>,
    /// Timeline of this master's term, the latest event last.
    #[serde(default)]
    pub events: Vec<TimelineEvent>,
    /// History of the figures in this master's term, the latest last.
    #[serde(default)]
    pub points: Vec<Point>,
    pub result: Option<ResultRecord>,
    /// Tells how far the dataset was read, if it is followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<StreamStatus>,
    /// The rows of embedding tables, by slot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<SlotTables>,
}

/// The rows of embedding tables in one slot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlotTables {
    pub slot: Slot,
    /// Number of rows of each table.
    pub rows: BTreeMap<String, u64>,
    /// Rows of all tables in memory, and what they take there.
    pub rows_in_memory: u64,
    pub memory_bytes: u64,
    /// Size of the files on the pserver's disk.
    pub disk_bytes: u64,
    /// Accesses to rows in memory, and to those that were read from the disk.
    pub hits: u64,
    pub misses: u64,
    /// Accesses of both kinds in a second.
    pub accesses_per_second: f64,
}

impl SlotTables {
    /// Returns the share of the rows that is in memory, from 0 to 1; 1 if there are no rows.
    pub fn share_in_memory(&self) -> f64 {
        share(self.rows_in_memory, self.rows.values().sum())
    }

    /// Returns the share of the accesses that found their row in memory, from 0 to 1; 1 if there were no accesses.
    pub fn hit_rate(&self) -> f64 {
        share(self.hits, self.hits.saturating_add(self.misses))
    }
}

/// Returns the share that `part` has of `whole`, at most 1; 1 if `whole` is 0.
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { (part as f64 / whole as f64).min(1.0) }
}

/// How far a followed dataset was read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StreamStatus {
    /// Files that became tasks so far.
    pub files: u64,
    /// Files that do not belong to a pass yet, complete or not, and their size.
    pub waiting_files: u64,
    pub waiting_bytes: u64,
    /// Records of tasks that were not trained on yet.
    pub waiting_records: u64,
    /// Age of the oldest file with records that were not trained on, in seconds, by the clocks of the master and of
    /// the store; 0 if there is none.
    pub oldest_seconds: f64,
    /// Files that cannot be read, so that the job goes on without them; some are listed with the reason.
    pub left_out_files: u64,
    pub left_out: Vec<(String, String)>,
    /// Whether the job is drained: it ends after the files that are there.
    pub is_draining: bool,
    /// The error of the last listing or reading of new files.
    pub error: Option<String>,
}

/// Time breakdown of a trainer, in seconds, and the bytes transferred in that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeBreakdown {
    /// Waiting for records to be read.
    pub data: f64,
    /// Computing gradients.
    pub compute: f64,
    /// Pushing gradients, after they were computed.
    pub push: f64,
    /// Waiting for other trainers, or for a task.
    pub wait: f64,
    /// Receiving parameters.
    pub pull: f64,
    /// Bytes of gradients sent and of parameters received.
    #[serde(default)]
    pub moved_bytes: u64,
}

impl TimeBreakdown {
    /// Returns the total time, in seconds.
    pub fn total(&self) -> f64 {
        self.data + self.compute + self.push + self.wait + self.pull
    }

    /// Returns the mean transfer rate over the total time; 0 if that is 0.
    pub fn bytes_per_second(&self) -> f64 {
        if 0.0 < self.total() { self.moved_bytes as f64 / self.total() } else { 0.0 }
    }
}

impl AddAssign for TimeBreakdown {
    fn add_assign(&mut self, more: Self) {
        self.data += more.data;
        self.compute += more.compute;
        self.push += more.push;
        self.wait += more.wait;
        self.pull += more.pull;
        // Trainers report this value, and it may be invalid.
        self.moved_bytes = self.moved_bytes.saturating_add(more.moved_bytes);
    }
}

/// State of saving the final model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saving {
    /// The saver: the trainer that evaluates and writes the model.
    pub trainer: Option<TrainerId>,
    /// Failed attempts.
    pub failures: u32,
    /// The last error, with the trainer that failed.
    pub error: Option<String>,
}

/// A pause in training caused by a failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recovery {
    /// The failure.
    pub cause: String,
    /// From detection to the next completed step.
    pub seconds: f64,
    /// When that step was completed, in milliseconds since 1970; for display only.
    pub ended_unix_ms: u64,
}

/// An event in the timeline of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimelineEvent {
    /// In milliseconds since 1970; for display only.
    pub unix_ms: u64,
    pub what: String,
    #[serde(default)]
    pub kind: TimelineKind,
}

/// The kinds of events in a timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TimelineKind {
    Checkpoint,
    /// A generation, or a round of an elastic job, began.
    Generation,
    /// A process was lost.
    Failure,
    #[default]
    Other,
}

/// The figures of a job at one point in time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// In milliseconds since 1970; for display only.
    pub unix_ms: u64,
    pub version: Version,
    /// Records trained on so far.
    pub examples: u64,
    /// Mean loss of a record in the last step or task.
    pub loss: Option<f64>,
    /// The latest metric on held-out records.
    pub metric: Option<f64>,
    /// The latest further metrics by name, those that are finite.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub further_metrics: BTreeMap<String, f64>,
}

/// Phases of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobPhase {
    #[default]
    /// Something required is missing; see `waiting`.
    Waiting,
    /// All slots are held; the parameters are being initialized or loaded.
    Starting,
    Training,
    /// All passes are done; the model is being evaluated on held-out records.
    Evaluating,
    /// The model is being written, and the last checkpoint taken.
    Saving,
    Finished,
    Failed,
}

/// Sizes of the task queues; they sum to the number of training tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queues {
    pub todo: u32,
    pub pending: u32,
    pub done: u32,
    pub discarded: u32,
}

/// The acting master.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterStatus {
    pub address: String,
    /// The lock's create-revision, which identifies the term.
    pub epoch: i64,
}

/// One pserver slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotStatus {
    pub slot: Slot,
    /// Absent while no pserver holds the slot.
    pub address: Option<String>,
    pub incarnation: Option<Incarnation>,
    /// The spare that has a copy of its shard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follower: Option<String>,
}

/// One live trainer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerStatus {
    pub id: TrainerId,
    pub admin: String,
    /// Lanes assigned to it (synchronous mode).
    pub lanes: Vec<Lane>,
    /// Tasks that it holds (asynchronous mode).
    pub tasks: u32,
    #[serde(default)]
    pub time_breakdown: TimeBreakdown,
    /// Pushes by which it is ahead of the slowest trainer, if the job bounds staleness.
    #[serde(default)]
    pub lead: Option<u64>,
    /// Set if it waits because enough trainers work.
    #[serde(default)]
    pub is_surplus: bool,
}

impl JobPhase {
    /// All phases, in the order of a job.
    const ALL: [Self; 7] = [
        Self::Waiting,
        Self::Starting,
        Self::Training,
        Self::Evaluating,
        Self::Saving,
        Self::Finished,
        Self::Failed,
    ];

    /// Returns the name, for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Starting => "starting",
            Self::Training => "training",
            Self::Evaluating => "evaluating",
            Self::Saving => "saving",
            Self::Finished => "finished",
            Self::Failed => "failed",
        }
    }

    fn level(self) -> Level {
        match self {
            Self::Waiting | Self::Failed => Level::Bad,
            Self::Starting => Level::Warning,
            Self::Training | Self::Evaluating | Self::Saving | Self::Finished => Level::Good,
        }
    }
}

impl JobStatus {
    /// Describes the status.
    pub fn document(&self) -> Document {
        let rows = Body::Rows(self.rows());
        let mut sections = vec![Section { id: "job", title: "Job", body: rows }];
        sections.extend(curves(&self.points, &self.events));
        sections.push(slots(&self.slots, Some(self.ps_desired), self.warm_spares));
        sections.extend(tables(&self.tables));
        sections.push(self.trainers());
        sections.extend(discarded(&self.discarded));
        let events = Body::Events(self.events.clone());
        sections.push(Section { id: "events", title: "Events", body: events });
        Document {
            job: self.job.clone(),
            state: self.state.name().to_owned(),
            level: self.state.level(),
            kind: kind(Some(self.mode)),
            done: self.done(),
            waits: self.waits.clone(),
            sections,
            metrics: self.metrics(),
        }
    }

    /// Returns the metrics that exist whether or not a row shows their value.
    fn metrics(&self) -> Vec<Metric> {
        let names = JobPhase::ALL.map(JobPhase::name);
        let help = "1 for the current state of the job";
        let mut metrics = Metric::states("steadfast_job_state", help, &names, self.state.name());
        let help = "Completed recoveries from failures in this master's term";
        metrics.push(Metric::counter("steadfast_recoveries", help, self.recoveries_count));
        let help = "Duration of the last recovery from a failure";
        let last = self.recoveries.last();
        metrics.extend(
            last.map(|it| Metric::gauge("steadfast_last_recovery_seconds", help, it.seconds)),
        );
        let help = "Largest lead in pushes that the staleness gate admitted";
        metrics.push(Metric::gauge("steadfast_staleness_max", help, self.lead_max));
        let help = "Failed attempts to evaluate and write the final model";
        metrics.push(Metric::gauge("steadfast_save_failures", help, self.saving.failures));
        let help = "Tasks that were given up in at least one pass";
        metrics.push(Metric::gauge("steadfast_discarded_tasks", help, self.discarded.tasks));
        metrics
    }

    /// Returns the share of the job that is done, from 0 to 1, if its end is known.
    fn done(&self) -> Option<f64> {
        match (self.examples_total, self.steps) {
            (Some(total), _) => Some(share(self.examples, total)),
            (None, Some(steps)) => Some(share(self.version.0, steps)),
            (None, None) => None,
        }
    }

    /// A line for each value, in the order in which they are read: progress, quality, durability, members.
    fn rows(&self) -> Vec<Row> {
        let mut rows = self.progress();
        rows.extend(self.stream.iter().flat_map(stream_rows));
        rows.extend(self.loss.map(|loss| {
            let help = "Mean loss of the last step or task";
            Row::new("loss", Value::Figure(loss)).gauge("steadfast_loss", help, loss)
        }));
        rows.extend(self.evaluation.iter().flat_map(evaluation_rows));
        rows.push(Row::new("generation", Value::Count(self.generation.0)).gauge(
            "steadfast_generation",
            "Generation of the job",
            self.generation.0,
        ));
        rows.extend(self.checkpoint_rows());
        rows.extend(self.warnings.iter().map(|it| Row::warning("warning", it)));
        rows.extend(self.recovery_rows());
        if let Some(bound) = self.lead_bound {
            let help = "Lead in pushes that the job file allows";
            let lead = Value::Of(self.lead_max, Some(bound.into()));
            let row = Row::new("lead", lead).note(" pushes that are allowed");
            rows.push(row.gauge("steadfast_staleness_bound", help, bound));
        }
        let (name, help) = ("steadfast_trainers_desired", "Trainers that work at most");
        rows.extend(self.scale.iter().flat_map(|it| it.rows("trainers", name, help)));
        if 1 < self.speeds.len() {
            let shown: Vec<String> = self.speeds.iter().map(|it| it.shown("trainer")).collect();
            rows.push(Row::text("speed", shown.join(", ")));
        }
        let master = &self.master;
        let text = format!("{} (epoch {})", master.address, master.epoch);
        rows.push(Row::text("master", text));
        rows.extend(self.result.iter().flat_map(result_rows));
        rows
    }

    fn progress(&self) -> Vec<Row> {
        let (pass, passes) = (self.pass.0.saturating_add(1), self.passes.map(u64::from));
        let pass = passes.map_or(u64::from(pass), |passes| passes.min(pass.into()));
        let help = "Current pass of the job";
        let row = Row::new("pass", Value::Of(pass, passes));
        let mut passes = row.gauge("steadfast_pass", help, self.pass.0);
        if let Some(done) = self.done() {
            let help = "Share of the job that is done";
            passes = passes.gauge("steadfast_progress_ratio", help, done);
        }
        let help = "Steps that the parameters reflect";
        let step = Row::new("step", Value::Of(self.version.0, self.steps)).gauge(
            "steadfast_version",
            help,
            self.version.0,
        );
        let queues = [
            ("todo", self.queues.todo),
            ("pending", self.queues.pending),
            ("done", self.queues.done),
            ("discarded", self.queues.discarded),
        ];
        let counts = queues.map(|(queue, count)| (queue, u64::from(count))).to_vec();
        let mut tasks = Row::new("tasks", Value::Counts(counts));
        tasks.metrics.extend(queues.map(|(queue, count)| {
            let gauge = Metric::gauge("steadfast_tasks", "Tasks of the pass by queue", count);
            gauge.with("queue", queue)
        }));
        let examples = Row::new("examples", Value::Of(self.examples, self.examples_total))
            .note(format!(", {} a second", rate(self.examples_per_second)))
            .counter("steadfast_examples", "Records trained on", self.examples);
        let mut rows = vec![passes, step, tasks, examples];
        rows.extend(self.seconds_left.map(|it| Row::new("left", Value::Seconds(it))));
        rows
    }

    fn checkpoint_rows(&self) -> Vec<Row> {
        let name = self.checkpoint.as_deref().unwrap_or("none");
        let help = "Checkpoints committed by this master";
        let row = Row::text("checkpoint", name);
        let row = row.counter("steadfast_checkpoints", help, self.checkpoints_committed);
        let (metric, help) =
            ("steadfast_checkpoint_failures_in_a_row", "Consecutive failed checkpoints");
        let row = row.gauge(metric, help, self.checkpoint_failures);
        let error = self.checkpoint_error.as_ref();
        let error = error.map(|it| Row::error("error", format!("no new checkpoint: {it}")));
        std::iter::once(row).chain(error).collect()
    }

    /// Returns a row for each of the last recoveries.
    fn recovery_rows(&self) -> Vec<Row> {
        let shown = self.recoveries.iter().rev().take(RECOVERIES_SHOWN);
        let rows = shown.map(|Recovery { cause, seconds, .. }| {
            Row::text("recovered", format!("{cause}; next step {seconds:.2} s later"))
        });
        rows.collect()
    }

    fn trainers(&self) -> Section {
        let has_leads = self.trainers.iter().any(|it| it.lead.is_some());
        let mut columns = vec!["trainer", "admin port", "works on", "time", "moved"];
        if has_leads {
            columns.push("pushes ahead");
        }
        let row = |it: &TrainerStatus| {
            let lanes: Vec<String> = ranges(&it.lanes);
            let work = match (lanes.is_empty(), it.is_surplus && it.tasks == 0) {
                (true, true) => "nothing: it is a spare".to_owned(),
                (true, false) => plural(it.tasks as usize, "task"),
                (false, _) => format!("lanes {}", lanes.join(" ")),
            };
            let time = &it.time_breakdown;
            let mut cells: Vec<Cell> = vec![
                Value::Id(it.id.to_string()).into(),
                Value::Text(it.admin.clone()).into(),
                Value::Text(work).into(),
                Value::Shares(time.parts()).into(),
                Value::BytesPerSecond(time.bytes_per_second()).into(),
            ];
            if has_leads {
                cells.push(Value::maybe_count(it.lead).into());
            }
            cells
        };
        let count = self.trainers.len();
        let mut metrics = vec![Metric::gauge("steadfast_trainers", "Live trainers", count)];
        let seconds = [
            ("data", self.time_breakdown.data),
            ("compute", self.time_breakdown.compute),
            ("push", self.time_breakdown.push),
            ("wait", self.time_breakdown.wait),
            ("pull", self.time_breakdown.pull),
        ];
        metrics.extend(seconds.map(|(activity, seconds)| {
            let help = "Time of all trainers together, by activity";
            Metric::counter("steadfast_trainer_time_seconds", help, seconds)
                .with("activity", activity)
        }));
        let table = Table {
            summary: Summary { metrics, ..summary("trainers", count.to_string()) },
            columns,
            rows: self.trainers.iter().map(row).collect(),
            processes: self.trainers.iter().map(|it| format!("trainer {}", it.id)).collect(),
            count,
        };
        Section { id: "trainers", title: "Trainers", body: Body::Table(table) }
    }
}

impl TimeBreakdown {
    /// Returns the seconds of each activity, by its name for users.
    fn parts(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("computing", self.compute),
            ("pushing", self.push),
            ("waiting", self.wait),
            ("pulling", self.pull),
            ("reading", self.data),
        ]
    }
}

/// Returns the name of a mode, for users.
pub(super) fn kind(mode: Option<Mode>) -> &'static str {
    match mode {
        Some(Mode::Sync) => "synchronous",
        Some(Mode::Async) => "asynchronous",
        None => "",
    }
}

pub(super) fn summary(label: &'static str, text: impl Into<String>) -> Summary {
    Summary { label, text: text.into(), metrics: Vec::new() }
}

/// Formats lanes as ranges, since most are adjacent: `0-3 6`.
fn ranges(lanes: &[Lane]) -> Vec<String> {
    let chunks = lanes.chunk_by(|left, right| left.0 + 1 == right.0);
    let ranges = chunks.map(|chunk| match chunk {
        [first, .., last] => format!("{first}-{last}"),
        lone => lone.iter().map(ToString::to_string).collect(),
    });
    ranges.collect()
}

pub(super) fn evaluation_rows(it: &EvaluationRecord) -> Vec<Row> {
    let loss = Value::Figure(it.loss).text(0);
    let mut note = format!(" (loss {loss}) on {} held-out records {}", it.records, it.describe());
    if let Some(course) = &it.course {
        note += &format!("; the best: {}", course.best.describe());
        let reductions = course.plateau.as_ref().map_or(0, |it| it.reductions.len());
        if 0 < reductions {
            note += &format!("; learning rate reduced {}", plural(reductions, "time"));
        }
    }
    let row = Row::new(&it.metric_name, Value::Figure(it.metric)).note(note);
    let row = row.gauge("steadfast_evaluation_metric", "Metric on held-out records", it.metric);
    std::iter::once(row).chain(further_rows(&it.further_metrics)).collect()
}

/// The further metrics, a row each.
fn further_rows(metrics: &BTreeMap<String, f64>) -> impl Iterator<Item = Row> {
    metrics.iter().map(|(name, it)| Row::new(name, Value::Figure(*it)))
}

pub(super) fn result_rows(result: &ResultRecord) -> Vec<Row> {
    let mut rows = Vec::new();
    rows.extend(result.reason.as_ref().map(|it| Row::error("reason", it)));
    let passes = match result.passes {
        1 => "1 pass".to_owned(),
        passes => format!("{passes} passes"),
    };
    let count = |count: u64, noun| plural(usize::try_from(count).unwrap_or(usize::MAX), noun);
    let (steps, examples) = (count(result.steps, "step"), count(result.examples, "example"));
    rows.push(Row::text("result", format!("{passes}, {steps}, {examples}")));
    rows.extend(result.loss.map(|it| Row::new("loss", Value::Figure(it))));
    let metric_name = result.metric_name.as_deref().unwrap_or("metric");
    rows.extend(result.metric.map(|it| Row::new(metric_name, Value::Figure(it))));
    rows.extend(further_rows(&result.further_metrics));
    rows.extend(result.parameters_sha256.as_ref().map(|it| Row::text("sha-256", it)));
    rows.extend(result.model.as_ref().map(|it| Row::text("model", it)));
    rows
}

pub(super) fn left_out_rows(left_out: &LeftOut) -> Vec<Row> {
    let listed = left_out.listed.iter().take(LEFT_OUT_SHOWN);
    let mut rows: Vec<Row> = listed
        .map(|(file, reason)| Row::warning("left out", format!("{file}: {reason}")))
        .collect();
    let more = left_out.files.saturating_sub(rows.len() as u64);
    if 0 < more && !rows.is_empty() {
        rows.push(Row::text("", format!("and {more} more")));
    }
    rows
}

/// How far a stream was read, and how far training lags behind.
fn stream_rows(stream: &StreamStatus) -> Vec<Row> {
    let drained = if stream.is_draining { "; being drained" } else { "" };
    let text = format!(
        "{} read; {} records and {} more files wait, the oldest for {}{drained}",
        plural(stream.files as usize, "file"),
        stream.waiting_records,
        stream.waiting_files,
        span(stream.oldest_seconds),
    );
    let read = "Files of the stream that became tasks";
    let unread = "Files of the stream that are not tasks yet";
    let records = "Records of tasks of the stream that were not trained on";
    let lag = "Age of the oldest file of the stream with records that were not trained on";
    let left_out = "Files of the stream that cannot be read and are left out";
    let row = Row::text("stream", text)
        .counter("steadfast_stream_files", read, stream.files)
        .gauge("steadfast_stream_waiting_files", unread, stream.waiting_files)
        .gauge("steadfast_stream_waiting_records", records, stream.waiting_records)
        .gauge("steadfast_stream_lag_seconds", lag, stream.oldest_seconds)
        .gauge("steadfast_stream_left_out_files", left_out, stream.left_out_files);
    let (files, listed) = (stream.left_out_files, stream.left_out.clone());
    let mut rows = vec![row];
    rows.extend(left_out_rows(&LeftOut { files, listed }));
    let error = stream.error.as_ref();
    rows.extend(error.map(|it| Row::error("error", format!("the stream is not read: {it}"))));
    rows
}

/// The slots and their holders; `desired` is the number of slots, if it is known. Their followers are shown if there are to
/// be any.
pub(super) fn slots(slots: &[SlotStatus], desired: Option<u32>, warm_spares: u32) -> Section {
    let held = slots.iter().filter(|slot| slot.address.is_some()).count();
    let text = match desired {
        Some(desired) => format!("{held} of {}", plural(desired as usize, "slot")),
        None => plural(held, "slot"),
    };
    let row = |it: &SlotStatus| {
        let holder = match &it.address {
            Some(address) => Value::Text(address.clone()).into(),
            None => Cell::bad(Value::Text("free".to_owned())),
        };
        let incarnation = Value::maybe_count(it.incarnation.map(|it| it.0 as u64));
        let mut row = vec![Value::Count(it.slot.0.into()).into(), holder, incarnation.into()];
        if 0 < warm_spares {
            let follower = it.follower.as_deref().unwrap_or("none");
            row.push(Value::Text(follower.to_owned()).into());
        }
        row
    };
    let mut columns = vec!["slot", "pserver", "incarnation"];
    let followed = slots.iter().filter(|slot| slot.follower.is_some()).count();
    let to_follow = desired.unwrap_or(0).min(warm_spares);
    let metrics = vec![
        Metric::gauge("steadfast_slots_held", "Pserver slots with a holder", held),
        Metric::gauge("steadfast_slots", "Pserver slots", desired.unwrap_or(0)),
        Metric::gauge("steadfast_slots_followed", "Pserver slots with a follower", followed),
        Metric::gauge("steadfast_slots_to_follow", "Pserver slots that are to have one", to_follow),
    ];
    if 0 < warm_spares {
        columns.push("follower");
    }
    let table = Table {
        summary: Summary { metrics, ..summary("pservers", text) },
        columns,
        rows: slots.iter().map(row).collect(),
        processes: slots.iter().map(|it| format!("slot {}", it.slot)).collect(),
        count: slots.len(),
    };
    Section { id: "slots", title: "Pservers", body: Body::Table(table) }
}

/// The rows of embedding tables by slot, if there are tables.
fn tables(slots: &[SlotTables]) -> Option<Section> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, count) in slots.iter().flat_map(|it| &it.rows) {
        *counts.entry(name).or_default() += count;
    }
    if counts.is_empty() {
        return None;
    }
    let text = counts.iter().map(|(name, it)| format!("{name} {}", plural(*it as usize, "row")));
    let row = |it: &SlotTables| {
        let cells = [
            Value::Count(it.slot.0.into()),
            Value::Count(it.rows.values().sum()),
            Value::Share(it.share_in_memory()),
            Value::Bytes(it.memory_bytes),
            Value::Bytes(it.disk_bytes),
            Value::Rate(it.accesses_per_second),
            Value::Share(it.hit_rate()),
        ];
        cells.map(Cell::from).to_vec()
    };
    let table = Table {
        summary: summary("tables", text.collect::<Vec<_>>().join(", ")),
        columns: vec![
            "slot",
            "rows",
            "in memory",
            "memory",
            "disk",
            "accesses/s",
            "found in memory",
        ],
        rows: slots.iter().map(row).collect(),
        processes: Vec::new(),
        count: slots.len(),
    };
    Some(Section { id: "tables", title: "Embedding tables", body: Body::Table(table) })
}

/// The tasks that were given up, if there are any.
pub(super) fn discarded(discarded: &Discarded) -> Option<Section> {
    let row = |task: &DiscardedTask| {
        vec![
            Value::Count(task.task.0.into()).into(),
            Value::Text(passes(task)).into(),
            Cell::bad(Value::Text(task.reason.clone())),
        ]
    };
    let table = Table {
        summary: summary("discarded", plural(discarded.tasks as usize, "task")),
        columns: vec!["task", "given up", "reason"],
        rows: discarded.listed.iter().map(row).collect(),
        processes: Vec::new(),
        count: discarded.tasks as usize,
    };
    let section = Section { id: "discarded", title: "Discarded tasks", body: Body::Table(table) };
    (!discarded.is_empty()).then_some(section)
}

/// The curves through points that are ordered by time, the latest last, and the events of that time.
fn curves(points: &[Point], events: &[TimelineEvent]) -> Option<Section> {
    let first = points.first()?.unix_ms;
    let at = |unix_ms: u64| unix_ms.saturating_sub(first) as f64 / 1000.0;
    let over_time = |value: &dyn Fn(&Point) -> Option<f64>| {
        points.iter().filter_map(|it| Some((at(it.unix_ms), value(it)?))).collect()
    };
    let speed = |two: &[Point]| {
        let trained = two[1].examples.saturating_sub(two[0].examples) as f64;
        let seconds = at(two[1].unix_ms) - at(two[0].unix_ms);
        (at(two[1].unix_ms), trained / seconds.max(1e-3))
    };
    let figure = |label: &str, value: &dyn Fn(&Point) -> Option<f64>| Curve {
        label: label.to_owned(),
        scale: Scale::Figure,
        points: over_time(value),
    };
    let mut curves =
        vec![figure("loss", &|it| it.loss), figure("held-out metric", &|it| it.metric)];
    let further = points.last().into_iter().flat_map(|it| it.further_metrics.keys());
    curves.extend(further.map(|name| {
        figure(&format!("held-out {name}"), &|it| it.further_metrics.get(name).copied())
    }));
    curves.push(Curve {
        label: "examples/s".to_owned(),
        scale: Scale::Rate,
        points: points.windows(2).map(speed).collect(),
    });
    let mark = |event: &TimelineEvent| {
        let kind = match event.kind {
            TimelineKind::Checkpoint => MarkKind::Checkpoint,
            TimelineKind::Generation => MarkKind::Generation,
            TimelineKind::Failure => MarkKind::Failure,
            TimelineKind::Other => return None,
        };
        Some(Mark { seconds: at(event.unix_ms), kind, what: event.what.clone() })
    };
    let marks = events.iter().filter(|it| first <= it.unix_ms).filter_map(mark).collect();
    Some(Section { id: "curves", title: "Curves", body: Body::Curves(curves, marks) })
}
