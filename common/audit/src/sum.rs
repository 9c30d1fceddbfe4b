//! Sums over records: how many, and their checksum.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;
use steadfast_common::dataset::Manifest;
use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::tally::{PassTally, checksum};

/// Some records: their number and the sum of their checksums. Equal sums mean equal records, as
/// [`steadfast_common::tally`] says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Sum {
    pub records: u64,
    pub checksum: u64,
}

impl Sum {
    /// Consecutive records of a task in one pass.
    pub fn of_piece(pass: Pass, task: TaskId, positions: Range<u32>) -> Self {
        Self { records: positions.len() as u64, checksum: checksum(pass, task, positions) }
    }

    /// Both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            records: self.records.wrapping_add(other.records),
            checksum: self.checksum.wrapping_add(other.checksum),
        }
    }

    /// What has to be added to `other` to get this; wraps around if `other` is more.
    #[must_use]
    pub fn less(self, other: Self) -> Self {
        Self {
            records: self.records.wrapping_sub(other.records),
            checksum: self.checksum.wrapping_sub(other.checksum),
        }
    }
}

impl From<&PassTally> for Sum {
    fn from(tally: &PassTally) -> Self {
        Self { records: tally.records, checksum: tally.checksum }
    }
}

/// The sum of every task that one pass trains on.
#[derive(Clone, Debug)]
pub(crate) struct PassSums {
    pub pass: Pass,
    pub tasks: BTreeMap<TaskId, Sum>,
}

impl PassSums {
    /// Adds up all records of `pass`.
    pub fn new(manifest: &Manifest, pass: Pass) -> Self {
        let mut tasks = BTreeMap::new();
        for task in manifest.training_tasks() {
            let sum = Sum::of_piece(pass, task, 0..records_of(manifest, task));
            tasks.insert(task, sum);
        }
        Self { pass, tasks }
    }

    /// The sum of one task; nothing if the pass does not train on it.
    pub fn of(&self, task: TaskId) -> Sum {
        self.tasks.get(&task).copied().unwrap_or_default()
    }
}

/// Records of a task, in the type of positions.
pub(crate) fn records_of(manifest: &Manifest, task: TaskId) -> u32 {
    u32::try_from(manifest.records_of(task)).unwrap_or(u32::MAX)
}
