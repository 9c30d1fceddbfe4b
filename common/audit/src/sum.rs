//! Sums over records: their number and their checksum.

use std::collections::BTreeMap;

use serde::Serialize;
use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::job::dataset::Manifest;
use steadfast_common::records::applied_records::{AppliedPass, checksum};

use crate::Evidence;

/// The number of some records and the sum of their checksums. Equal sums mean equal records, see
/// [`steadfast_common::records::applied_records`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Sum {
    pub records: u64,
    pub checksum: u64,
}

impl Sum {
    /// Returns the sum of the records at these positions of a task in one pass.
    pub fn of(pass: Pass, task: TaskId, positions: impl IntoIterator<Item = u32>) -> Self {
        let mut records = 0;
        let counted = positions.into_iter().inspect(|_| records += 1);
        let checksum = checksum(pass, task, counted);
        Self { records, checksum }
    }

    /// Adds `other`; both numbers wrap around on overflow.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            records: self.records.wrapping_add(other.records),
            checksum: self.checksum.wrapping_add(other.checksum),
        }
    }

    /// Subtracts `other`; both numbers wrap around if those of `other` are larger.
    #[must_use]
    pub fn less(self, other: Self) -> Self {
        Self {
            records: self.records.wrapping_sub(other.records),
            checksum: self.checksum.wrapping_sub(other.checksum),
        }
    }
}

impl From<&AppliedPass> for Sum {
    fn from(applied_pass: &AppliedPass) -> Self {
        Self { records: applied_pass.records, checksum: applied_pass.checksum }
    }
}

/// The sum of every task that one pass trains on.
#[derive(Clone, Debug)]
pub(crate) struct PassSums {
    pub pass: Pass,
    pub tasks: BTreeMap<TaskId, Sum>,
}

impl PassSums {
    /// Computes the sum of every task that `pass` trains on, without the records that are left out of training.
    pub fn new(evidence: &Evidence, pass: Pass) -> Self {
        let mut tasks = BTreeMap::new();
        let manifest = evidence.manifest_of(pass);
        for task in manifest.training_tasks() {
            let sum = evidence.sum_of(pass, task, 0..records_of(manifest, task));
            tasks.insert(task, sum);
        }
        Self { pass, tasks }
    }

    /// Returns the sum of one task; zero if the pass does not train on it.
    pub fn of(&self, task: TaskId) -> Sum {
        self.tasks.get(&task).copied().unwrap_or_default()
    }
}

/// Returns the number of records of a task in the type of positions; larger numbers become `u32::MAX`.
pub(crate) fn records_of(manifest: &Manifest, task: TaskId) -> u32 {
    u32::try_from(manifest.records_of(task)).unwrap_or(u32::MAX)
}
