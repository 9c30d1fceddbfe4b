//! What an audit looks at, as somebody has read it.

use std::collections::BTreeSet;

use steadfast_common::dataset::Manifest;
use steadfast_common::ids::{Generation, Pass, Slot, TaskId};
use steadfast_common::records::{
    DiscardedTask, GenerationRecord, PositionRecord, QueueSnapshot, ResultRecord,
};
use steadfast_common::spec::JobSpec;
use steadfast_common::tally::Counted;

/// Everything that was read.
#[derive(Clone, Debug)]
pub struct Evidence {
    pub spec: JobSpec,
    pub manifest: Manifest,
    /// What a checkpoint says; absent if there is none.
    pub checkpoint: Option<Cut>,
    /// Tasks that etcd lists as given up.
    pub discarded: Vec<DiscardedTask>,
    /// All generations so far, ascending.
    pub generations: Vec<GenerationRecord>,
    pub result: Option<ResultRecord>,
}

/// What a checkpoint says.
#[derive(Clone, Debug, Default)]
pub struct Cut {
    pub id: String,
    /// The generation in which it was taken.
    pub generation: Generation,
    pub position: PositionRecord,
    /// What the shard files say, one for each slot.
    pub slots: Vec<SlotCounts>,
    /// Where the queues stood (asynchronous mode).
    pub queue: Option<QueueSnapshot>,
    /// Why nobody restores it any more.
    pub set_aside: Option<String>,
    /// SHA-256 of the parameters, if they were read wholly.
    pub parameters_sha256: Option<String>,
}

/// What the blocks of one slot reflect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotCounts {
    pub slot: Slot,
    pub groups: Vec<Group>,
}

/// Blocks that reflect the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub counted: Counted,
    pub blocks: usize,
}

impl Evidence {
    /// Tasks that are listed as given up in a pass.
    pub(crate) fn discarded_in(&self, pass: Pass) -> BTreeSet<TaskId> {
        let of_pass = self.discarded.iter().filter(|it| it.pass == pass);
        of_pass.map(|it| it.task).collect()
    }
}

impl Cut {
    /// All groups that hold blocks, with their slots.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (Slot, &Group)> {
        let of = |slot: &'_ SlotCounts| slot.slot;
        let all = self.slots.iter().flat_map(move |slot| {
            let number = of(slot);
            slot.groups.iter().map(move |group| (number, group))
        });
        all.filter(|(_, group)| 0 < group.blocks)
    }
}
