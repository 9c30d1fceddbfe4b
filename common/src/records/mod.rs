//! The values under a job's keys in etcd, as JSON.

pub mod amendment;
pub mod applied_records;
mod base64_text;
pub mod change;
pub mod closures;
pub mod code;
pub mod commits;
pub mod contribution;
pub mod course;
pub mod discarded_records;
pub mod extension;
pub mod given_up;
pub mod key_table;
pub mod keys;
pub mod launch;
pub mod position;
pub mod ranges;
pub mod rendezvous;
pub mod scale;
pub mod stream;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, UNIX_EPOCH};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

use crate::ids::{
    Attempt, Generation, Incarnation, Lane, Pass, RequestId, Slot, TaskId, TrainerId, Version,
};
use crate::job::spec::JobSpec;
use crate::records::change::Change;
use crate::records::discarded_records::DiscardedRecord;
use crate::records::extension::Extension;
use crate::records::given_up::{Discarded, PassRanges};
use crate::records::position::Position;
use crate::records::stream::LeftOut;
use crate::tensor::layout::{ParamSpec, invalid_tables};
use crate::tensor::placement::PlacementRecord;

/// The format of everything below a job's keys. It is raised whenever a record changes so that programs of the
/// version before cannot read it, or would misread it.
pub const FORMAT: u64 = 1;

/// `job`: the definition of the job. A record of another [`FORMAT`] is refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct JobRecord {
    /// [`FORMAT`]
    pub format: u64,
    pub spec: JobSpec,
    /// [`JobSpec::digest`] of the spec that the job was created with.
    pub digest: String,
    /// URL of the store with dataset manifest, checkpoints and model.
    pub store: String,
    /// [`crate::job::dataset::Manifest::digest`], which is part of the name of the manifest's object. For a stream, this
    /// manifest has the columns alone.
    pub manifest: String,
    /// The directory against which the sources of a stream are resolved: each master lists them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The file of [`JobSpec::start`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartRecord>,
    /// The extensions of the job; `spec` has the passes or steps after the last one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extensions: Vec<Extension>,
    /// The changes of the job's settings, in their order; `spec` has the settings after the last one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
}

impl JobRecord {
    /// Creates the record of a new job; `manifest` is the digest of its dataset manifest.
    pub fn new(spec: JobSpec, store: String, manifest: String) -> Self {
        let (digest, base, start) = (spec.digest(), None, None);
        let (format, extensions, changes) = (FORMAT, Vec::new(), Vec::new());
        Self { format, spec, digest, store, manifest, base, start, extensions, changes }
    }
}

/// The most updates that the state of an optimizer may reflect when a job begins.
pub const UPDATES_BEFORE_MAX: u64 = 1 << 53;

impl JobRecord {
    /// Returns the number of updates that the state of the optimizer reflects before the first one of the job.
    pub fn updates_before(&self) -> u64 {
        let optimizer = self.start.as_ref().and_then(|start| start.optimizer.as_ref());
        optimizer.map_or(0, |optimizer| optimizer.updates.min(UPDATES_BEFORE_MAX))
    }
}

/// Name of the object that holds the model of a job that has ended.
pub const MODEL: &str = "model.safetensors";

/// Name of the object that holds the averages of the parameters of a job that has ended.
pub const AVERAGE_MODEL: &str = "average.safetensors";

/// The file with the initial values of parameters, as it was when the job was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRecord {
    pub url: String,
    pub size_bytes: u64,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
    /// The file with the state of the optimizer, if that does not begin anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<StartOptimizer>,
}

/// The file with the state that the optimizer starts from, as it was when the job was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartOptimizer {
    pub url: String,
    pub size_bytes: u64,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
    /// Updates that the state reflects.
    pub updates: u64,
}

/// `fixed`: the object with the tensors that the model has beside its parameters, and that training does not change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FixedRecord {
    /// Name of the object in the job's store, a safetensors file.
    pub object: String,
    pub size_bytes: u64,
    /// SHA-256 of the object, in hexadecimal.
    pub sha256: String,
}

impl Serialize for JobRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for JobRecord {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        check_format(&value).map_err(D::Error::custom)?;
        if value["kind"] == "elastic" {
            return Err(D::Error::custom(
                "the job is elastic: it has agents (`steadfast run`), but no pservers, trainers and tasks",
            ));
        }
        Self::deserialize(value).map_err(D::Error::custom)
    }
}

/// Returns an error for a job record of another [`FORMAT`].
pub(crate) fn check_format(record: &serde_json::Value) -> Result<(), String> {
    let found = record["format"].as_u64().unwrap_or(0);
    match found == FORMAT {
        true => Ok(()),
        false => Err(format!(
            "the job has format {found}, and this version of Steadfast reads format {FORMAT}: use the \
             version that began the job, or delete its keys to start afresh"
        )),
    }
}

/// Tells how programs of a job work together: messages, records and rules. Members with another number are left out of a
/// job by its acting master. Raise it with each change that a program of before would misunderstand.
pub const PROTOCOL: u32 = 1;

/// `master/lock`: the acting master.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockRecord {
    pub holder: Uuid,
}

/// `master/addr`: the addresses of the acting master.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterRecord {
    pub id: Uuid,
    pub address: String,
    pub admin: String,
}

/// `master/waits`: what the acting master of a new job waits for before it listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitsRecord {
    pub waits_for: String,
}

/// `ps/<index>`: the pserver that holds a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PserverRecord {
    pub id: Uuid,
    pub address: String,
    /// Name of a Unix socket in the abstract namespace, at which processes of the same machine and user
    /// can reach the pserver as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unix: Option<String>,
    pub admin: String,
    /// Set when the holder lost its lease and acquired the slot again: the incarnation in which its shard
    /// was first in this slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_of: Option<Incarnation>,
    /// Set when the holder had followed the slot before it acquired it: the incarnation of the shard that it has a copy
    /// of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub followed: Option<Incarnation>,
    /// The [`PROTOCOL`] of the program; 0 for those from before it was written.
    #[serde(default)]
    pub protocol: u32,
}

impl PserverRecord {
    /// Returns the incarnation of the holder's shard; `create_revision` is that of the slot's key.
    pub fn incarnation(&self, create_revision: i64) -> Incarnation {
        self.memory_of.unwrap_or(Incarnation(create_revision))
    }
}

/// `followers/<index>`: the spare that has a copy of a slot's shard. The holder of the slot writes it, with the lease of
/// the spare. As long as the key exists, it shows no version of the shard that the spare lacks, and in asynchronous mode
/// acknowledges no push.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowerRecord {
    pub id: Uuid,
    pub address: String,
    pub admin: String,
    /// The incarnation of the shard.
    pub of: Incarnation,
    /// The generation of the shard.
    pub generation: Generation,
}

impl FollowerRecord {
    /// Returns whether the copy is what `slot` has in the generation `present`: in the one that the record names, or in
    /// the next one if that keeps the slot's memory.
    pub fn is_current(&self, slot: Slot, present: &GenerationRecord) -> bool {
        let is_same = self.generation == present.generation;
        let is_next = self.generation.0 + 1 == present.generation.0;
        let is_kept = is_same || is_next && present.kept.contains(&slot);
        is_kept && present.slots.get(slot.0 as usize) == Some(&self.of)
    }
}

/// `trainers/<uuid>`: a live trainer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerRecord {
    pub admin: String,
    /// Hash of a fixed small computation; equal on machines that compute the same bits.
    pub numerics: String,
    /// The [`PROTOCOL`] of the program; 0 for those from before it was written.
    #[serde(default)]
    pub protocol: u32,
}

/// `generation`, and `generations/<number>` as history: the pserver set that holds the parameters, and the
/// checkpoint that they were loaded from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GenerationRecord {
    pub generation: Generation,
    /// The incarnation of each slot's holder, by slot.
    pub slots: Vec<Incarnation>,
    /// The slots of the parameters' blocks.
    pub placement: PlacementRecord,
    /// The checkpoint to load; if absent, the parameters are initialized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Slots that keep their shard instead of loading the checkpoint: all of them if each lost one had a follower,
    /// otherwise some in asynchronous mode with `lost_pserver = "continue"`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Slot>,
    /// Why the previous generation ended.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Number of changes of the job's settings that it takes into account.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub changes: u32,
    /// The records that are left out of training, also those of earlier generations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub discarded_records: Vec<DiscardedRecord>,
    /// Names what the slots load in place of the checkpoint: the shards of the generation before, at one version, which
    /// its pservers have in memory. Their objects have no names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handover: Option<Box<CheckpointRecord>>,
}

impl GenerationRecord {
    /// Returns whether every slot keeps its shard.
    pub fn keeps_all(&self) -> bool {
        !self.slots.is_empty() && self.kept.len() == self.slots.len()
    }

    /// Returns whether the parameters have values when the generation begins, so that no trainer initializes them.
    pub fn has_values(&self) -> bool {
        self.checkpoint.is_some() || self.handover.is_some() || self.keeps_all()
    }
}

/// `init`: the trainer that initializes the parameters of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitRecord {
    pub generation: Generation,
    /// Counts the initializers of this generation, from 1.
    pub attempt: u64,
    pub trainer: TrainerId,
    pub done: bool,
}

/// `tasks/queue`: the state of all tasks that have no key of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRecord {
    /// The round, part of the prefix of this pass's task keys.
    pub round: u64,
    pub pass: Pass,
    /// Tasks before this position of the pass's order were dispatched at least once; those without a key
    /// are done.
    pub cursor: u32,
    /// The number of the next attempt.
    pub next_attempt: Attempt,
}

/// `tasks/<round>/<task>`: a task whose state [`QueueRecord`] does not imply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "state")]
pub enum TaskRecord {
    /// Failed before and is queued again.
    Todo {
        failures: u32,
        reason: String,
        /// The last report that was accepted, so that its retry has no effect.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        report: Option<RequestId>,
        /// Trainers that failed, at most two.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        failed_by: Vec<TrainerId>,
    },
    /// Held by a trainer.
    Pending {
        failures: u32,
        attempt: Attempt,
        trainer: TrainerId,
        /// The request that it was dispatched for, so that a retry gets it again.
        request: RequestId,
        /// Whether the report in the request was accepted.
        #[serde(rename = "counted")]
        accepted: bool,
        /// Trainers that failed before, at most two.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        failed_by: Vec<TrainerId>,
        /// The attempt of another trainer that lasts long, and that this one backs up: the first to finish counts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        backs_up: Option<Attempt>,
    },
    /// Given up for the rest of the pass.
    Discarded { failures: u32, reason: String },
}

/// `tasks/replies/<trainer>`: the last reply to a trainer without a task, so that a retry gets the same
/// reply. For a reply with a task, the task's record has the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplyRecord {
    pub request: RequestId,
    /// Whether the report in the request was accepted.
    #[serde(rename = "counted")]
    pub accepted: bool,
}

/// A task dispatched to a trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DispatchRecord {
    pub task: TaskId,
    pub attempt: Attempt,
    pub pass: Pass,
    /// Whether two trainers failed at the task before: a record of it may end the process that computes it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_suspected: bool,
}

/// `evaluation`: the latest evaluation on held-out data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRecord {
    pub pass: Pass,
    pub version: Version,
    pub records: u64,
    /// JSON has no number that is not finite: it writes null.
    #[serde(deserialize_with = "nan_if_null")]
    pub loss: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub metric: f64,
    pub metric_name: String,
    /// The further metrics, by name.
    #[serde(
        default,
        deserialize_with = "nans_if_null",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub further_metrics: BTreeMap<String, f64>,
    /// Says what follows from this evaluation and those before. Present if evaluations decide about the course of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub course: Option<Course>,
    /// The parameters, if they were written because they are the best so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<KeptModel>,
}

/// States what follows from the evaluations of a job so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Course {
    /// The best evaluation, which may be the latest.
    pub best: Best,
    /// Evaluations since the last improvement by more than `evaluation.min_delta`.
    pub without_improvement: u32,
    /// The number to which the latest improvement led.
    #[serde(deserialize_with = "nan_if_null")]
    pub improved: f64,
    /// The pass before which training ends early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<Pass>,
    /// The step after which training ends early, where evaluations do not follow passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_version: Option<Version>,
    /// Present if evaluations reduce the learning rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plateau: Option<Plateau>,
}

/// States how far evaluations have reduced the learning rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plateau {
    /// The number to which the latest improvement led.
    #[serde(deserialize_with = "nan_if_null")]
    pub improved: f64,
    /// Evaluations that count as ones without an improvement since the latest one, or the latest reduction.
    pub without_improvement: u32,
    /// Evaluations that are left of the cooldown.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cooldown: u32,
    /// The versions from which on the learning rate is reduced once more, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reductions: Vec<Version>,
}

/// An evaluation to which others are compared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Finished passes.
    pub pass: Pass,
    pub version: Version,
    #[serde(deserialize_with = "nan_if_null")]
    pub loss: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub metric: f64,
    /// The further metrics, by name.
    #[serde(
        default,
        deserialize_with = "nans_if_null",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub further_metrics: BTreeMap<String, f64>,
    /// The parameters, if the job keeps the best ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<KeptModel>,
}

impl Best {
    /// Describes the position of the evaluation.
    pub fn describe(&self) -> String {
        position_of(self.pass, self.version)
    }
}

impl EvaluationRecord {
    /// Describes the position of the evaluation.
    pub fn describe(&self) -> String {
        position_of(self.pass, self.version)
    }
}

fn position_of(pass: Pass, version: Version) -> String {
    let passes = if pass.0 == 1 { "pass" } else { "passes" };
    format!("after {pass} {passes} (step {version})")
}

/// A model that was written after an evaluation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptModel {
    pub url: String,
    pub parameters_sha256: String,
    /// SHA-256 of the file.
    pub file_sha256: String,
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

fn nan_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Reads numbers, of which those that are not finite are null in JSON.
///
/// # Errors
/// If the values are no numbers.
pub fn nans_if_null<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, f64>, D::Error> {
    let values: BTreeMap<String, Option<f64>> = BTreeMap::deserialize(deserializer)?;
    Ok(values.into_iter().map(|(name, it)| (name, it.unwrap_or(f64::NAN))).collect())
}

/// `checkpoints/<id>`: a consistent snapshot of all slots and the data position.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    pub generation: Generation,
    /// All parameters in order; they determine the blocks.
    pub params: Vec<ParamSpec>,
    /// The placement of the generation that took it: which shard holds which blocks.
    pub placement: PlacementRecord,
    /// The position that the parameters reflect.
    pub position: Position,
    /// Exhausted lanes of the pass, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exhausted: Vec<Lane>,
    pub shards: Vec<ShardRecord>,
    /// The task queues (asynchronous mode).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueSnapshot>,
    /// Commit time in milliseconds since 1970 by the master's clock; for display only.
    #[serde(default)]
    pub created_unix_ms: u64,
    /// States why the checkpoint is not restored any more: it is damaged, or the job was rolled back to an earlier
    /// one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invalidated: Option<String>,
}

/// The most row files of a shard, of some dozen megabytes each.
const ROW_FILES_MAX: u32 = 1 << 20;

/// Beginning of the reason with which a rollback invalidates the checkpoints that it abandons; the id of the one that
/// it returns to follows.
pub const ROLLED_BACK_TO: &str = "the job was rolled back to ";

impl CheckpointRecord {
    /// Returns the first pass that training from the checkpoint needs.
    pub fn first_pass(&self) -> Pass {
        self.queue.as_ref().map_or(self.position.pass, |queue| queue.pass)
    }

    /// Returns the first error of the manifest itself; `None` if it is valid. Does not check its objects.
    pub fn invalid_reason(&self) -> Option<String> {
        self.invalid_shards().or_else(|| self.invalid_params())
    }

    fn invalid_params(&self) -> Option<String> {
        let mut names = BTreeSet::new();
        for param in &self.params {
            if param.name.is_empty() || param.name == "__metadata__" {
                return Some(format!("`{}` is not a valid parameter name", param.name));
            }
            if !names.insert(&param.name) {
                return Some(format!("it has two parameters `{}`", param.name));
            }
        }
        let values = self.params.iter().map(ParamSpec::len).fold(0, usize::saturating_add);
        if values == 0 && self.params.iter().all(|param| param.table.is_none()) {
            return Some("it has no parameters".to_owned());
        }
        if let Some(reason) = invalid_tables(&self.params) {
            return Some(reason);
        }
        let bytes = self.shards.iter().map(|it| it.size_bytes).fold(0, u64::saturating_add);
        if bytes / 4 < values as u64 {
            return Some(format!("{values} parameters do not fit into shards of {bytes} bytes"));
        }
        None
    }

    fn invalid_shards(&self) -> Option<String> {
        let mut slots: Vec<u32> = self.shards.iter().map(|shard| shard.slot.0).collect();
        slots.sort_unstable();
        if slots.is_empty() {
            return Some("it has no shards".to_owned());
        }
        if !slots.iter().copied().eq(0..slots.len() as u32) {
            return Some(format!("its shards are of slots {slots:?}; expected each slot once"));
        }
        let placed = self.placement.slots();
        if placed as usize != slots.len() {
            return Some(format!("it has {} shards, placed on {placed} slots", slots.len()));
        }
        let mut objects = BTreeSet::new();
        for shard in &self.shards {
            let (slot, object) = (shard.slot, &shard.object);
            if object.is_empty() || !objects.insert(object) {
                return Some(format!("the shard of slot {slot} has no separate object"));
            }
            let is_hex = |it: u8| it.is_ascii_digit() || (b'a'..=b'f').contains(&it);
            if shard.sha256.len() != 64 || !shard.sha256.bytes().all(is_hex) {
                return Some(format!("the shard of slot {slot} has no valid SHA-256"));
            }
            let row_files = shard.rows.iter().map(|it| it.files).fold(0, u32::saturating_add);
            if ROW_FILES_MAX < row_files {
                return Some(format!("the shard of slot {slot} has {row_files} row files"));
            }
            // In synchronous mode, which has no queues, all shards have the same version.
            if self.queue.is_none() && shard.version != self.position.version {
                let (found, wanted) = (shard.version, self.position.version);
                return Some(format!(
                    "the shard of slot {slot} has version {found}; the checkpoint has {wanted}"
                ));
            }
        }
        None
    }
}

/// The shard of one slot in a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardRecord {
    pub slot: Slot,
    pub incarnation: Incarnation,
    /// Name of the object in the job's store.
    pub object: String,
    pub sha256: String,
    pub size_bytes: u64,
    /// In asynchronous mode: pushes applied when the snapshot was taken.
    pub version: Version,
    /// The row files of the shard's tables: first those with all rows at one time, then those with the rows that
    /// changed since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<RowFilesRecord>,
}

impl ShardRecord {
    /// Returns the record of a shard that its pserver has in memory, at a version.
    pub fn in_memory(slot: Slot, incarnation: Incarnation, version: Version) -> Self {
        let (object, sha256) = (String::new(), String::new());
        Self { slot, incarnation, object, sha256, size_bytes: 0, version, rows: Vec::new() }
    }

    /// Returns the total size of all objects of the shard, in bytes.
    pub fn all_bytes(&self) -> u64 {
        self.rows.iter().map(|it| it.size_bytes).fold(self.size_bytes, u64::saturating_add)
    }

    /// Returns the names of all objects of the shard: its own, and then those of its row files.
    pub fn objects(&self) -> impl Iterator<Item = String> + '_ {
        let row_files = self.rows.iter().flat_map(RowFilesRecord::objects);
        [self.object.clone()].into_iter().chain(row_files)
    }
}

/// Row files that were written together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowFilesRecord {
    /// The beginning of the names of the files.
    pub name: String,
    /// Number of files.
    pub files: u32,
    /// Total size of the files.
    pub size_bytes: u64,
}

impl RowFilesRecord {
    /// Returns the name of the object with row file `index` of those whose names begin with `name`.
    pub fn object(name: &str, index: u32) -> String {
        format!("{name}-rows-{index}.safetensors")
    }

    /// Returns the names of the objects of all files, but not of more than a shard may have, because a manifest may be
    /// forged.
    pub fn objects(&self) -> impl Iterator<Item = String> + '_ {
        // A manifest may be forged.
        (0..self.files.min(ROW_FILES_MAX)).map(|index| Self::object(&self.name, index))
    }
}

/// The task queues at the time of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSnapshot {
    pub pass: Pass,
    pub cursor: u32,
    /// Tasks before the cursor that were not done, with their failures so far.
    pub open: BTreeMap<TaskId, u32>,
    /// Tasks given up in this pass, with the reason.
    pub discarded: BTreeMap<TaskId, String>,
    /// The passes in which each task was given up so far.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub given_up: BTreeMap<TaskId, PassRanges>,
}

/// `result`: the outcome of the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResultRecord {
    pub state: JobOutcome,
    /// Why the job failed, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub passes: u32,
    pub steps: u64,
    pub examples: u64,
    pub loss: Option<f64>,
    pub metric: Option<f64>,
    pub metric_name: Option<String>,
    /// The further metrics, by name.
    #[serde(
        default,
        deserialize_with = "nans_if_null",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub further_metrics: BTreeMap<String, f64>,
    pub parameters_sha256: Option<String>,
    pub model: Option<String>,
    /// The checkpoint that holds the final parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Summary of the tasks that were given up; the keys below `given_up/` have all.
    pub discarded: Discarded,
    /// The files of a stream that could not be read.
    #[serde(default, skip_serializing_if = "LeftOut::is_empty")]
    pub left_out: LeftOut,
    /// When the job ended, by the clock of its master.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    /// The best evaluation, if evaluations decided about the course of the job. Its parameters are the model if the job
    /// keeps the best ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
}

impl ResultRecord {
    /// Describes how and when the job ended, for users who start something under its name.
    pub fn describe(&self) -> String {
        let ended = self.ended_unix_ms.map(|ms| UNIX_EPOCH + Duration::from_millis(ms));
        let at = ended.map_or_else(String::new, |at| {
            format!(" at {}", humantime::format_rfc3339_seconds(at))
        });
        match (self.state, self.reason.as_deref()) {
            (JobOutcome::Finished, _) => format!("it succeeded{at}"),
            (JobOutcome::Failed, None) => format!("it failed{at}"),
            (JobOutcome::Failed, Some(reason)) => format!("it failed{at}: {reason}"),
        }
    }
}

/// Outcomes of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobOutcome {
    Finished,
    Failed,
}

/// Consecutive records of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordRange {
    pub file: String,
    /// Index of the first record in the file, from 0.
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
            rows: Vec::new(),
        };
        CheckpointRecord {
            params: vec![ParamSpec::new("w", &[4, 4]), ParamSpec::new("b", &[4])],
            position: Position { version: Version(3), ..Position::default() },
            placement: PlacementRecord::LargestFirst { slots: 2 },
            shards: vec![shard(1), shard(0)],
            ..CheckpointRecord::default()
        }
    }

    fn reason_after(change: impl Fn(&mut CheckpointRecord)) -> String {
        let mut record = sound();
        change(&mut record);
        record.invalid_reason().expect("it is invalid")
    }

    /// A job of another format is refused with both numbers, whatever else its record says.
    #[test]
    fn a_job_of_another_format_is_rejected() {
        for (text, found) in [(r#"{"format":99,"spec":7}"#, 99), (r#"{"spec":{}}"#, 0)] {
            let error = serde_json::from_str::<JobRecord>(text).unwrap_err().to_string();
            let expected =
                format!("the job has format {found}, and this version of Steadfast reads format 1");
            assert!(error.starts_with(&expected), "{error}");
        }
    }

    /// Masters of other versions read whether a report was accepted under this key.
    #[test]
    fn the_records_of_tasks_and_replies_keep_their_keys() {
        let id = "0c1c5c9e-64d5-4bb5-8ea2-5e14b1a3b5a0";
        let reply = format!(r#"{{"request":"{id}","counted":true}}"#);
        let read: ReplyRecord = serde_json::from_str(&reply).unwrap();
        assert!(read.accepted);
        assert_eq!(serde_json::to_string(&read).unwrap(), reply);
        let pending = format!(
            r#"{{"state":"pending","failures":0,"attempt":1,"trainer":"{id}","request":"{id}","counted":true}}"#
        );
        let read: TaskRecord = serde_json::from_str(&pending).unwrap();
        assert!(matches!(read, TaskRecord::Pending { accepted: true, .. }));
        assert_eq!(serde_json::to_string(&read).unwrap(), pending);
    }

    /// A held-out record with probability zero makes the loss infinite; the job's status stays readable.
    #[test]
    fn an_evaluation_that_is_not_finite_is_read_back() {
        for loss in [f64::NAN, f64::INFINITY] {
            let written = EvaluationRecord {
                pass: Pass(0),
                version: Version(0),
                records: 1,
                loss,
                metric: 0.5,
                metric_name: "accuracy".to_owned(),
                further_metrics: BTreeMap::from([("top5".to_owned(), loss)]),
                course: None,
                model: None,
            };
            let text = serde_json::to_string(&written).unwrap();
            let read: EvaluationRecord = serde_json::from_str(&text).unwrap();
            assert!(read.loss.is_nan() && read.further_metrics["top5"].is_nan(), "{text}");
            assert_eq!(read.metric.to_bits(), 0.5_f64.to_bits());
        }
    }

    /// A parser that is off by one ulp would change the bits of a value.
    #[test]
    fn a_number_reads_back_as_it_was_written() {
        let mut bits = 0x3fee_a21d_8d2b_3c00_u64;
        for _ in 0..10_000 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // In [0.5, 1), where short decimal representations are rare.
            let loss = f64::from_bits(0x3fe0_0000_0000_0000 | bits >> 12);
            let written = EvaluationRecord {
                pass: Pass(0),
                version: Version(0),
                records: 1,
                loss,
                metric: 0.0,
                metric_name: String::new(),
                further_metrics: BTreeMap::new(),
                course: None,
                model: None,
            };
            let text = serde_json::to_string(&written).unwrap();
            let read: EvaluationRecord = serde_json::from_str(&text).unwrap();
            assert_eq!(read.loss.to_bits(), loss.to_bits(), "{text}");
        }
    }

    /// The bytes of a job with one metric are those of earlier versions.
    #[test]
    fn an_evaluation_with_one_metric_says_nothing_of_others() {
        let text = r#"{"pass":1,"version":2,"records":3,"loss":0.5,"metric":0.25,"metric_name":"accuracy"}"#;
        let read: EvaluationRecord = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
    }

    #[test]
    fn an_invalidated_checkpoint_still_has_a_valid_manifest() {
        assert_eq!(sound().invalid_reason(), None);
        let invalidated = CheckpointRecord { invalidated: Some("damaged".to_owned()), ..sound() };
        assert_eq!(invalidated.invalid_reason(), None);
    }

    /// F35
    #[test]
    fn a_manifest_names_one_object_for_each_slot() {
        assert_eq!(reason_after(|it| it.shards.clear()), "it has no shards");
        let slots = reason_after(|it| drop(it.shards.pop()));
        assert_eq!(slots, "its shards are of slots [1]; expected each slot once");
        let twice = reason_after(|it| it.shards[0].slot = Slot(0));
        assert_eq!(twice, "its shards are of slots [0, 0]; expected each slot once");
        let shared = reason_after(|it| it.shards[0].object = "shards/0".to_owned());
        assert_eq!(shared, "the shard of slot 0 has no separate object");
        for text in ["", "0a", &"0A".repeat(32)] {
            let unnamed = reason_after(|it| it.shards[1].sha256 = text.to_owned());
            assert_eq!(unnamed, "the shard of slot 0 has no valid SHA-256");
        }
    }

    /// F35
    #[test]
    fn the_parameters_of_a_manifest_fit_into_its_shards() {
        assert_eq!(reason_after(|it| it.params.clear()), "it has no parameters");
        assert_eq!(
            reason_after(|it| it.params[1].name = "w".to_owned()),
            "it has two parameters `w`"
        );
        let reserved = reason_after(|it| it.params[1].name = "__metadata__".to_owned());
        assert_eq!(reserved, "`__metadata__` is not a valid parameter name");
        let large = reason_after(|it| it.params[1].shape = vec![usize::MAX, 2]);
        assert!(large.ends_with("do not fit into shards of 200 bytes"), "{large}");
    }

    /// F35
    #[test]
    fn the_shards_of_a_synchronous_checkpoint_have_one_version() {
        let mixed = |it: &mut CheckpointRecord| it.shards[0].version = Version(4);
        assert_eq!(reason_after(mixed), "the shard of slot 1 has version 4; the checkpoint has 3");
        let mut asynchronous =
            CheckpointRecord { queue: Some(QueueSnapshot::default()), ..sound() };
        mixed(&mut asynchronous);
        assert_eq!(asynchronous.invalid_reason(), None);
    }
}
