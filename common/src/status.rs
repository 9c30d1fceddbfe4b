//! The status of a job. The command-line tool, `/status` and the page all render this structure.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::given_up::Discarded;
use crate::ids::{Generation, Incarnation, Lane, Pass, Slot, TrainerId, Version};
use crate::records::{EvaluationRecord, ResultRecord};
use crate::spec::Mode;

/// A job at one point in time, as seen by its acting master.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    pub job: String,
    pub mode: Mode,
    pub state: JobPhase,
    /// What is blocked, by what, and why; empty if nothing is blocked.
    pub waiting: Vec<String>,
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
    /// Number of slots. The master does not see spare pservers.
    pub ps_desired: u32,
    pub trainers: Vec<TrainerStatus>,
    pub checkpoint: Option<String>,
    /// The error of the last checkpoint attempt; absent if it succeeded.
    #[serde(default)]
    pub checkpoint_error: Option<String>,
    /// Failed checkpoint attempts since the last successful one.
    #[serde(default)]
    pub checkpoint_failures: u32,
    /// State of saving the final model, once training is over.
    #[serde(default)]
    pub saving: Saving,
    /// Warnings about the division of the dataset into tasks; they do not stop the job.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Pauses caused by failures, the latest last.
    #[serde(default)]
    pub recoveries: Vec<Recovery>,
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
}

/// The figures of a job at one point in time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
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
}

/// Values over the seconds since the first point.
pub type Curve = Vec<(f64, f64)>;

/// The curves of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curves {
    pub loss: Curve,
    /// The metric on held-out records.
    pub metric: Curve,
    pub examples_per_second: Curve,
}

impl Curves {
    /// Computes the curves through points that are ordered by time, the latest last.
    pub fn through(points: &[Point]) -> Self {
        let first = points.first().map_or(0, |it| it.unix_ms);
        let at = |it: &Point| it.unix_ms.saturating_sub(first) as f64 / 1000.0;
        let over_time = |value: fn(&Point) -> Option<f64>| {
            points.iter().filter_map(|it| Some((at(it), value(it)?))).collect()
        };
        let rate = |two: &[Point]| {
            let trained = two[1].examples.saturating_sub(two[0].examples) as f64;
            (at(&two[1]), trained / (at(&two[1]) - at(&two[0])).max(1e-3))
        };
        Self {
            loss: over_time(|it| it.loss),
            metric: over_time(|it| it.metric),
            examples_per_second: points.windows(2).map(rate).collect(),
        }
    }
}

/// Phases of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobPhase {
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
}
