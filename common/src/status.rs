//! What a job looks like from outside. The command-line tool, `/status` and the page render this
//! one structure.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::ids::{Generation, Incarnation, Lane, Pass, Slot, TrainerId, Version};
use crate::records::{DiscardedTask, EvaluationRecord, ResultRecord};
use crate::spec::Mode;

/// A job at one moment, as its acting master sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    pub job: String,
    pub mode: Mode,
    pub state: JobState,
    /// Who waits for whom, and why; empty when nothing waits.
    pub waiting: Vec<String>,
    pub generation: Generation,
    pub pass: Pass,
    /// Passes to train, if the job is bounded by passes.
    pub passes: Option<u32>,
    /// Steps to train, if known.
    pub steps: Option<u64>,
    pub version: Version,
    pub queues: Queues,
    /// Records trained on so far.
    pub examples: u64,
    /// Records that the whole job trains on, if known.
    pub examples_total: Option<u64>,
    pub examples_per_second: f64,
    /// Mean loss of a record in the last step (synchronous) or finished task (asynchronous).
    pub loss: Option<f64>,
    pub evaluation: Option<EvaluationRecord>,
    pub master: MasterStatus,
    pub slots: Vec<SlotStatus>,
    /// Pservers that wait for a free slot are not seen by the master; this counts the slots.
    pub ps_desired: u32,
    pub trainers: Vec<TrainerStatus>,
    pub checkpoint: Option<String>,
    /// Why no checkpoint could be taken lately; absent while all is well.
    #[serde(default)]
    pub checkpoint_trouble: Option<String>,
    /// Pauses that failures made, the latest last.
    #[serde(default)]
    pub recoveries: Vec<Recovery>,
    pub discarded: Vec<DiscardedTask>,
    /// What trainers spent their time on while this master acts, those that are gone included.
    #[serde(default)]
    pub spent: Spent,
    /// Seconds until the end at the present rate.
    pub seconds_left: Option<f64>,
    /// What happened while this master acts, the latest last.
    #[serde(default)]
    pub happenings: Vec<Happening>,
    /// How the figures went while this master acts.
    #[serde(default)]
    pub points: Vec<Point>,
    pub result: Option<ResultRecord>,
}

/// What a trainer's time went to, in seconds, and what it moved meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// Waiting for records to be read.
    pub data: f64,
    /// Computing gradients.
    pub compute: f64,
    /// Pushing them, after they were computed.
    pub push: f64,
    /// Waiting for other trainers, or for a task.
    pub wait: f64,
    /// Receiving parameters.
    pub pull: f64,
    /// Bytes of gradients that were sent and of parameters that were received.
    #[serde(default)]
    pub moved_bytes: u64,
}

impl Spent {
    /// All of the time.
    pub fn total(&self) -> f64 {
        self.data + self.compute + self.push + self.wait + self.pull
    }

    /// Bytes moved in a second, over all of the time.
    pub fn bytes_per_second(&self) -> f64 {
        if 0.0 < self.total() { self.moved_bytes as f64 / self.total() } else { 0.0 }
    }
}

impl AddAssign for Spent {
    fn add_assign(&mut self, more: Self) {
        self.data += more.data;
        self.compute += more.compute;
        self.push += more.push;
        self.wait += more.wait;
        self.pull += more.pull;
        // What others tell may be anything.
        self.moved_bytes = self.moved_bytes.saturating_add(more.moved_bytes);
    }
}

/// A pause in training that a failure made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recovery {
    /// What had failed.
    pub cause: String,
    /// From when it was noticed to the next completed step.
    pub seconds: f64,
    /// When that step was completed, in milliseconds since 1970; for people only.
    pub ended_unix_ms: u64,
}

/// Something that happened to a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Happening {
    /// In milliseconds since 1970; for people only.
    pub unix_ms: u64,
    pub what: String,
}

/// A job's figures at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// In milliseconds since 1970; for people only.
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

/// What there is to draw of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curves {
    pub loss: Curve,
    /// On held-out records.
    pub metric: Curve,
    pub examples_per_second: Curve,
}

impl Curves {
    /// The curves through some points, the latest last.
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
pub enum JobState {
    /// Something needed is missing; `waiting` says what.
    Waiting,
    /// Pservers are there, the parameters are being given their first values or loaded.
    Starting,
    Training,
    /// All passes are done; the model is being evaluated and saved.
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
    /// The lock's create-revision: which reign this is.
    pub epoch: i64,
}

/// One pserver slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotStatus {
    pub slot: Slot,
    /// Absent while nobody holds the slot.
    pub address: Option<String>,
    pub incarnation: Option<Incarnation>,
}

/// One live trainer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerStatus {
    pub id: TrainerId,
    pub admin: String,
    /// Lanes in its care (synchronous mode).
    pub lanes: Vec<Lane>,
    /// Tasks that it holds (asynchronous mode).
    pub tasks: u32,
    #[serde(default)]
    pub spent: Spent,
    /// Pushes by which it is ahead of the slowest, if the job bounds that.
    #[serde(default)]
    pub lead: Option<u64>,
}
