//! The values under a job's keys in etcd, as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::{
    Attempt, Generation, Incarnation, Lane, Pass, RequestId, Slot, TaskId, TrainerId, Version,
};
use crate::layout::ParamSpec;
use crate::spec::JobSpec;

/// `job`: what the job is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    pub spec: JobSpec,
    /// [`JobSpec::digest`] of `spec`.
    pub digest: String,
    /// URL below which dataset manifest, checkpoints and model lie.
    pub store: String,
    /// [`crate::dataset::Manifest::digest`], which also names the manifest's object.
    pub manifest: String,
}

/// `master/lock`: who acts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockRecord {
    pub holder: Uuid,
}

/// `master/addr`: where the acting master listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterRecord {
    pub id: Uuid,
    pub address: String,
    pub admin: String,
}

/// `ps/<index>`: who holds a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PserverRecord {
    pub id: Uuid,
    pub address: String,
    pub admin: String,
}

/// `trainers/<uuid>`: a live trainer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerRecord {
    pub admin: String,
    /// Hash of a fixed small computation; equal on machines that compute the same bits.
    pub numerics: String,
}

/// `generation`: whose memory the parameters live in, and what they started from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerationRecord {
    pub generation: Generation,
    /// Incarnation of every slot's holder, by slot.
    pub slots: Vec<Incarnation>,
    /// The checkpoint to load; the parameters start anew when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
}

/// `init`: who gives the parameters of a generation their first values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitRecord {
    pub generation: Generation,
    /// Counts the initialisers of this generation, from 1.
    pub attempt: u64,
    pub trainer: TrainerId,
    pub done: bool,
}

/// `tasks/queue`: what cannot be derived about tasks that have no key of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRecord {
    /// Names the folder of this pass's task keys.
    pub round: u64,
    pub pass: Pass,
    /// Tasks of the pass's order before this position were dispatched at least once; those among
    /// them without a key are done.
    pub cursor: u32,
    /// The number that the next attempt gets.
    pub next_attempt: Attempt,
}

/// `tasks/<round>/<task>`: a task that is neither simply waiting nor done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "state")]
pub enum TaskRecord {
    /// Failed before and waits again.
    Todo {
        failures: u32,
        reason: String,
        /// The report that was counted last, so that its retry counts for nothing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        report: Option<RequestId>,
    },
    /// Held by a trainer.
    Pending { failures: u32, attempt: Attempt, trainer: TrainerId },
    /// Given up for the rest of the pass.
    Discarded { failures: u32, reason: String },
}

/// `tasks/replies/<trainer>`: the last answer to a trainer, so that its retry gets the same one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplyRecord {
    pub request: RequestId,
    /// Whether the report that the request carried counted.
    pub counted: bool,
    pub task: Option<DispatchRecord>,
}

/// A task given to a trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DispatchRecord {
    pub task: TaskId,
    pub attempt: Attempt,
    pub pass: Pass,
}

/// `evaluation`: the latest figures on held-out data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRecord {
    pub pass: Pass,
    pub version: Version,
    pub records: u64,
    pub loss: f64,
    pub metric: f64,
    pub metric_name: String,
}

/// `checkpoints/<id>`: one consistent cut over all slots and the data position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    pub generation: Generation,
    /// All parameters in order; blocks and placement follow from them.
    pub params: Vec<ParamSpec>,
    pub position: PositionRecord,
    pub shards: Vec<ShardRecord>,
    /// Where the task queues stood (asynchronous mode).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueSnapshot>,
}

/// How far the parameters of a checkpoint are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PositionRecord {
    pub version: Version,
    pub pass: Pass,
    /// The version at which the pass began.
    pub pass_start: Version,
    /// Records that the parameters reflect.
    pub examples: u64,
    /// Lanes that have no further records in this pass, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dry: Vec<Lane>,
}

/// One slot's part of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardRecord {
    pub slot: Slot,
    pub incarnation: Incarnation,
    /// Name of the object below the job's store.
    pub object: String,
    pub sha256: String,
    pub size_bytes: u64,
    /// Pushes applied when the shard was cut (asynchronous mode).
    pub version: Version,
}

/// The task queues at the moment of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSnapshot {
    pub pass: Pass,
    pub cursor: u32,
    /// Tasks before the cursor that were not done, with their failures so far.
    pub open: BTreeMap<TaskId, u32>,
    /// Tasks given up in this pass, with the reason.
    pub discarded: BTreeMap<TaskId, String>,
}

/// `result`: how the job ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResultRecord {
    pub state: JobOutcome,
    /// Why, when it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub passes: u32,
    pub steps: u64,
    pub examples: u64,
    pub loss: Option<f64>,
    pub metric: Option<f64>,
    pub metric_name: Option<String>,
    pub parameters_sha256: Option<String>,
    pub model: Option<String>,
    pub discarded: Vec<DiscardedTask>,
}

/// Ways in which a job ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobOutcome {
    Finished,
    Failed,
}

/// A task that was given up, for the user's eyes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiscardedTask {
    pub pass: Pass,
    pub task: TaskId,
    pub reason: String,
}
