//! The input of an audit.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::de::DeserializeOwned;
use steadfast_common::ids::{Generation, Lane, Pass, Slot, TaskId, Version};
use steadfast_common::job::dataset::Manifest;
use steadfast_common::job::spec::JobSpec;
use steadfast_common::records::applied_records::AppliedRecords;
use steadfast_common::records::closures::{ClosureName, ClosureRecord};
use steadfast_common::records::code::{CodeChange, CodeRecord};
use steadfast_common::records::discarded_records::LeftOutRecords;
use steadfast_common::records::given_up::GivenUpRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::position::Position;
use steadfast_common::records::stream::{StreamPassRecord, StreamRecord};
use steadfast_common::records::{
    CheckpointRecord, Course, EvaluationRecord, GenerationRecord, QueueSnapshot, ResultRecord,
};

use crate::Sum;
use crate::sum::records_of;

/// The contents of etcd and of the files of a checkpoint.
#[derive(Clone, Debug)]
pub struct Evidence {
    pub spec: JobSpec,
    /// The manifest of the dataset. For a stream, it has only the columns.
    pub manifest: Manifest,
    /// The passes of the stream, if the dataset is followed.
    pub stream: Option<StreamEvidence>,
    /// The audited checkpoint; absent if there is none.
    pub checkpoint: Option<CheckpointEvidence>,
    /// Tasks that etcd lists as given up.
    pub discarded: BTreeMap<TaskId, GivenUpRecord>,
    /// All generations so far, ascending.
    pub generations: Vec<GenerationRecord>,
    pub result: Option<ResultRecord>,
    /// The latest evaluation, on which the course of a job may depend.
    pub evaluation: Option<EvaluationRecord>,
    /// Accepted changes of the code of the model.
    pub code_changes: Vec<CodeChange>,
    /// The closures of a coordinator that have a name.
    pub closures: BTreeMap<ClosureName, ClosureRecord>,
}

/// The passes of a stream.
#[derive(Clone, Debug, Default)]
pub struct StreamEvidence {
    pub record: StreamRecord,
    /// The passes from `record.first` on, with their manifests.
    pub passes: BTreeMap<Pass, (StreamPassRecord, Manifest)>,
}

/// The content of a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct CheckpointEvidence {
    pub id: String,
    /// The generation in which the checkpoint was taken.
    pub generation: Generation,
    pub position: Position,
    /// Exhausted lanes of the pass.
    pub exhausted: Vec<Lane>,
    /// Applied records from the shard files, one entry for each slot.
    pub slots: Vec<SlotCounts>,
    /// The state of the queues (asynchronous mode).
    pub queue: Option<QueueSnapshot>,
    /// Why the checkpoint was invalidated, if it was.
    pub invalidated: Option<String>,
    /// SHA-256 of the parameters, if all of them were read.
    pub parameters_sha256: Option<String>,
}

/// The applied records of one slot's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotCounts {
    pub slot: Slot,
    pub groups: Vec<Group>,
}

/// Blocks of a slot with the same applied records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub counted: AppliedRecords,
    pub blocks: usize,
}

/// A value in etcd is not the record that its key requires.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot parse the value of `{key}` in etcd: {reason}; `etcdctl get {key}` shows it")]
pub struct BadValue {
    pub key: String,
    pub reason: String,
}

impl Evidence {
    /// Collects the evidence that etcd holds, from all values of a job at one revision, by key. The caller adds what
    /// the store holds: the checkpoint, and the manifests of the dataset and of each pass of a stream.
    ///
    /// # Errors
    /// If a value is malformed.
    pub fn of_etcd<'a>(
        keys: &Keys,
        spec: JobSpec,
        values: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<Self, BadValue> {
        let (mut stream, mut generations) = (StreamEvidence::default(), Vec::new());
        let (mut discarded, mut result, mut code) = (BTreeMap::new(), None, CodeRecord::default());
        let (mut evaluation, mut closures) = (None, BTreeMap::new());
        for (key, value) in values {
            if key == keys.result() {
                result = Some(parse(key, value)?);
            } else if key == keys.evaluation() {
                evaluation = Some(parse(key, value)?);
            } else if let Some(name) = keys.closure_of(key) {
                closures.insert(name, parse(key, value)?);
            } else if key == keys.code() {
                code = parse(key, value)?;
            } else if key == keys.stream() {
                stream.record = parse(key, value)?;
            } else if let Some(pass) = keys.stream_pass_of(key) {
                stream.passes.insert(pass, (parse(key, value)?, Manifest::default()));
            } else if let Some(task) = keys.given_up_of(key) {
                discarded.insert(task, parse(key, value)?);
            } else if key.starts_with(&keys.generations_prefix()) {
                generations.push(parse::<GenerationRecord>(key, value)?);
            }
        }
        generations.sort_by_key(|it| it.generation);
        Ok(Self {
            stream: (spec.dataset.follow && !spec.model.has_closures()).then_some(stream),
            spec,
            manifest: Manifest::default(),
            checkpoint: None,
            discarded,
            generations,
            result,
            evaluation,
            code_changes: code.changes,
            closures,
        })
    }

    /// Returns the manifest of a pass. For an unknown pass of a stream, the manifest has no records.
    pub(crate) fn manifest_of(&self, pass: Pass) -> &Manifest {
        let of_stream = self.stream.as_ref().and_then(|stream| stream.passes.get(&pass));
        of_stream.map_or(&self.manifest, |(_, manifest)| manifest)
    }

    /// Returns the number of passes after which training ends, if it is known; none if evaluations ended it in a pass.
    pub(crate) fn passes(&self) -> Option<u32> {
        if self.ended_in_pass().is_some() {
            return None;
        }
        let of_stream = self.stream.as_ref().and_then(|stream| stream.record.end);
        let ends = [of_stream, self.course().and_then(|course| course.end)];
        ends.into_iter().flatten().map(|end| end.0).chain(self.spec.passes).min()
    }

    /// Returns the step after which evaluations ended training in a pass.
    fn ended_in_pass(&self) -> Option<Version> {
        self.course()?.end_version
    }

    /// Returns the number of steps after which training ends, if it is known.
    pub(crate) fn steps(&self) -> Option<u64> {
        self.ended_in_pass().map(|end| end.0).into_iter().chain(self.spec.steps).min()
    }

    /// Returns what followed from the evaluations, if the course of the job depends on them.
    pub(crate) fn course(&self) -> Option<&Course> {
        self.evaluation.as_ref()?.course.as_ref()
    }

    /// Returns the first pass whose records are known and are listed in every slot.
    pub(crate) fn first_pass(&self, checkpoint: &CheckpointEvidence) -> Pass {
        let known = self.stream.as_ref().map_or(Pass(0), |stream| stream.record.first);
        let listed = checkpoint.groups().map(|(_, group)| group.counted.earlier.end);
        listed.max().unwrap_or_default().max(known)
    }

    /// Returns the sum of consecutive positions of a task in one pass, without the records that are left out of training.
    pub(crate) fn sum_of(&self, pass: Pass, task: TaskId, positions: Range<u32>) -> Sum {
        let left_out = self.generations.last().map_or(&[][..], |it| &it.discarded_records);
        if left_out.is_empty() {
            return Sum::of(pass, task, positions);
        }
        let records = records_of(self.manifest_of(pass), task);
        let left_out = LeftOutRecords::new(left_out, &self.spec);
        Sum::of(pass, task, left_out.kept(pass, task, records, positions))
    }

    /// Returns the tasks that are listed as given up in a pass.
    pub(crate) fn discarded_in(&self, pass: Pass) -> BTreeSet<TaskId> {
        let of_pass = self.discarded.iter().filter(|(_, record)| record.passes.contains(pass));
        of_pass.map(|(task, _)| *task).collect()
    }
}

impl CheckpointEvidence {
    /// Creates the evidence of a checkpoint from its manifest and the applied records of its shard files.
    pub fn new(id: String, record: CheckpointRecord, slots: Vec<SlotCounts>) -> Self {
        Self {
            id,
            generation: record.generation,
            position: record.position,
            exhausted: record.exhausted,
            slots,
            queue: record.queue,
            invalidated: record.invalidated,
            parameters_sha256: None,
        }
    }

    /// Returns all groups that hold blocks, with their slots.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (Slot, &Group)> {
        let of = |slot: &'_ SlotCounts| slot.slot;
        let all = self.slots.iter().flat_map(move |slot| {
            let number = of(slot);
            slot.groups.iter().map(move |group| (number, group))
        });
        all.filter(|(_, group)| 0 < group.blocks)
    }
}

fn parse<T: DeserializeOwned>(key: &str, value: &[u8]) -> Result<T, BadValue> {
    serde_json::from_slice(value)
        .map_err(|error| BadValue { key: key.to_owned(), reason: error.to_string() })
}
