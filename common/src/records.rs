//! The values under a job's keys in etcd, as JSON.

use std::collections::{BTreeMap, BTreeSet};

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
    /// Name of a Unix socket in the abstract namespace, which leads to the same place for processes of
    /// the same machine and user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unix: Option<String>,
    pub admin: String,
    /// The incarnation under which the holder's memory first held the slot, when it took the slot
    /// again after its lease had been lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_of: Option<Incarnation>,
}

impl PserverRecord {
    /// Which memory the slot's holder has; `create_revision` is that of the slot's key.
    pub fn incarnation(&self, create_revision: i64) -> Incarnation {
        self.memory_of.unwrap_or(Incarnation(create_revision))
    }
}

/// `trainers/<uuid>`: a live trainer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerRecord {
    pub admin: String,
    /// Hash of a fixed small computation; equal on machines that compute the same bits.
    pub numerics: String,
}

/// `generation`, and `generations/<number>` for the record: whose memory the parameters live in,
/// and what they started from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerationRecord {
    pub generation: Generation,
    /// Incarnation of every slot's holder, by slot.
    pub slots: Vec<Incarnation>,
    /// The checkpoint to load; the parameters start anew when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Slots that do not load it but go on with the memory that they have (asynchronous mode, when
    /// the job wants that).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Slot>,
    /// Why the generation before it ended.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
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
        /// Who failed, at most two of them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        failed_by: Vec<TrainerId>,
    },
    /// Held by a trainer.
    Pending {
        failures: u32,
        attempt: Attempt,
        trainer: TrainerId,
        /// The request that it was given out for, so that its retry gets it again.
        request: RequestId,
        /// Whether the report that the request carried counted.
        counted: bool,
        /// Who failed before, at most two of them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        failed_by: Vec<TrainerId>,
    },
    /// Given up for the rest of the pass.
    Discarded { failures: u32, reason: String },
}

/// `tasks/replies/<trainer>`: the last answer to a trainer that gave it no task, so that its retry gets the
/// same one. Where a task was given, the task's record tells for which request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplyRecord {
    pub request: RequestId,
    /// Whether the report that the request carried counted.
    pub counted: bool,
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    pub generation: Generation,
    /// All parameters in order; blocks and placement follow from them.
    pub params: Vec<ParamSpec>,
    pub position: PositionRecord,
    pub shards: Vec<ShardRecord>,
    /// Where the task queues stood (asynchronous mode).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueSnapshot>,
    /// When it was committed, in milliseconds since 1970 by the master's clock; for people only.
    #[serde(default)]
    pub created_unix_ms: u64,
    /// Why nobody restores it any more: it is damaged, or the job was set back behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set_aside: Option<String>,
}

impl CheckpointRecord {
    /// What is wrong with the manifest in itself, whatever the objects that it names are like.
    pub fn fault(&self) -> Option<String> {
        self.fault_of_shards().or_else(|| self.fault_of_params())
    }

    fn fault_of_params(&self) -> Option<String> {
        let mut names = BTreeSet::new();
        for param in &self.params {
            if param.name.is_empty() || param.name == "__metadata__" {
                return Some(format!("`{}` is no name of a parameter", param.name));
            }
            if !names.insert(&param.name) {
                return Some(format!("it has two parameters `{}`", param.name));
            }
        }
        let values = self.params.iter().map(ParamSpec::len).fold(0, usize::saturating_add);
        if values == 0 {
            return Some("it has no parameters".to_owned());
        }
        let bytes = self.shards.iter().map(|it| it.size_bytes).fold(0, u64::saturating_add);
        if bytes / 4 < values as u64 {
            return Some(format!("{values} parameters do not fit into shards of {bytes} bytes"));
        }
        None
    }

    fn fault_of_shards(&self) -> Option<String> {
        let mut slots: Vec<u32> = self.shards.iter().map(|shard| shard.slot.0).collect();
        slots.sort_unstable();
        if slots.is_empty() {
            return Some("it has no shards".to_owned());
        }
        if !slots.iter().copied().eq(0..slots.len() as u32) {
            return Some(format!("its shards are of slots {slots:?}, not of each slot once"));
        }
        let mut objects = BTreeSet::new();
        for shard in &self.shards {
            let (slot, object) = (shard.slot, &shard.object);
            if object.is_empty() || !objects.insert(object) {
                return Some(format!("the shard of slot {slot} has no object of its own"));
            }
            let is_hex = |it: u8| it.is_ascii_digit() || (b'a'..=b'f').contains(&it);
            if shard.sha256.len() != 64 || !shard.sha256.bytes().all(is_hex) {
                return Some(format!("the shard of slot {slot} has no SHA-256"));
            }
            // In synchronous mode, which has no queues, there is one version of all.
            if self.queue.is_none() && shard.version != self.position.version {
                let (found, wanted) = (shard.version, self.position.version);
                return Some(format!(
                    "the shard of slot {slot} is of version {found}, the checkpoint of {wanted}"
                ));
            }
        }
        None
    }
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
    /// The checkpoint that holds the final parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
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
    /// Which records those are.
    #[serde(default)]
    pub records: Vec<RecordRange>,
}

/// Consecutive records of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordRange {
    pub file: String,
    /// Number of the first record within the file, from 0.
    pub first: u64,
    pub records: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound() -> CheckpointRecord {
        let shard = |slot: u32| ShardRecord {
            slot: Slot(slot),
            incarnation: Incarnation(9),
            object: format!("shards/{slot}"),
            sha256: "0a".repeat(32),
            size_bytes: 100,
            version: Version(3),
        };
        CheckpointRecord {
            params: vec![ParamSpec::new("w", &[4, 4]), ParamSpec::new("b", &[4])],
            position: PositionRecord { version: Version(3), ..PositionRecord::default() },
            shards: vec![shard(1), shard(0)],
            ..CheckpointRecord::default()
        }
    }

    fn fault(change: impl Fn(&mut CheckpointRecord)) -> String {
        let mut record = sound();
        change(&mut record);
        record.fault().expect("it has a fault")
    }

    /// A reader that is an ulp off would make other bits of the same settings.
    #[test]
    fn a_number_is_read_as_it_was_written() {
        let mut bits = 0x3fee_a21d_8d2b_3c00_u64;
        for _ in 0..10_000 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // In [0.5, 1), where a short way to write one is seldom.
            let loss = f64::from_bits(0x3fe0_0000_0000_0000 | bits >> 12);
            let written = EvaluationRecord {
                pass: Pass(0),
                version: Version(0),
                records: 1,
                loss,
                metric: 0.0,
                metric_name: String::new(),
            };
            let text = serde_json::to_string(&written).unwrap();
            let read: EvaluationRecord = serde_json::from_str(&text).unwrap();
            assert_eq!(read.loss.to_bits(), loss.to_bits(), "{text}");
        }
    }

    #[test]
    fn a_checkpoint_that_was_set_aside_is_no_fault_of_its_manifest() {
        assert_eq!(sound().fault(), None);
        let aside = CheckpointRecord { set_aside: Some("damaged".to_owned()), ..sound() };
        assert_eq!(aside.fault(), None);
    }

    /// F35
    #[test]
    fn a_manifest_has_one_object_for_each_slot() {
        assert_eq!(fault(|it| it.shards.clear()), "it has no shards");
        let slots = fault(|it| drop(it.shards.pop()));
        assert_eq!(slots, "its shards are of slots [1], not of each slot once");
        let twice = fault(|it| it.shards[0].slot = Slot(0));
        assert_eq!(twice, "its shards are of slots [0, 0], not of each slot once");
        let shared = fault(|it| it.shards[0].object = "shards/0".to_owned());
        assert_eq!(shared, "the shard of slot 0 has no object of its own");
        for text in ["", "0a", &"0A".repeat(32)] {
            let unnamed = fault(|it| it.shards[1].sha256 = text.to_owned());
            assert_eq!(unnamed, "the shard of slot 0 has no SHA-256");
        }
    }

    /// F35
    #[test]
    fn a_manifest_has_parameters_that_fit_into_its_shards() {
        assert_eq!(fault(|it| it.params.clear()), "it has no parameters");
        assert_eq!(fault(|it| it.params[1].name = "w".to_owned()), "it has two parameters `w`");
        let reserved = fault(|it| it.params[1].name = "__metadata__".to_owned());
        assert_eq!(reserved, "`__metadata__` is no name of a parameter");
        let large = fault(|it| it.params[1].shape = vec![usize::MAX, 2]);
        assert!(large.ends_with("do not fit into shards of 200 bytes"), "{large}");
    }

    /// F35
    #[test]
    fn shards_of_a_synchronous_checkpoint_are_of_one_version() {
        let mixed = |it: &mut CheckpointRecord| it.shards[0].version = Version(4);
        assert_eq!(fault(mixed), "the shard of slot 1 is of version 4, the checkpoint of 3");
        let mut asynchronous =
            CheckpointRecord { queue: Some(QueueSnapshot::default()), ..sound() };
        mixed(&mut asynchronous);
        assert_eq!(asynchronous.fault(), None);
    }
}
