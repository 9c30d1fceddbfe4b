//! The list of tasks that were given up. It has one record per task and does not grow with the number
//! of passes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::records::given_up::{GivenUpRecord, PassRanges};

/// Tasks that were given up, in this pass or before. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GivenUp {
    of: Arc<BTreeMap<TaskId, GivenUpRecord>>,
    /// Sum of the records' `times`.
    times: u64,
}

impl FromIterator<(TaskId, GivenUpRecord)> for GivenUp {
    fn from_iter<I: IntoIterator<Item = (TaskId, GivenUpRecord)>>(records: I) -> Self {
        let of: BTreeMap<TaskId, GivenUpRecord> = records.into_iter().collect();
        let times = of.values().map(|record| record.times).fold(0, u64::saturating_add);
        Self { of: Arc::new(of), times }
    }
}

impl GivenUp {
    pub fn records(&self) -> &BTreeMap<TaskId, GivenUpRecord> {
        &self.of
    }

    /// Returns the number of passes in which each task was given up, summed over all tasks.
    pub fn times(&self) -> u64 {
        self.times
    }

    pub fn contains(&self, pass: Pass, task: TaskId) -> bool {
        self.of.get(&task).is_some_and(|record| record.passes.contains(pass))
    }

    pub fn in_pass(&self, pass: Pass) -> BTreeSet<TaskId> {
        let of_pass = self.of.iter().filter(|(_, record)| record.passes.contains(pass));
        of_pass.map(|(task, _)| *task).collect()
    }

    /// Returns the tasks given up in each pass from `first` on.
    pub fn from_pass(&self, first: Pass) -> BTreeMap<Pass, Arc<BTreeSet<TaskId>>> {
        let mut by_pass: BTreeMap<Pass, BTreeSet<TaskId>> = BTreeMap::new();
        for (task, record) in self.of.iter() {
            for (from, to) in record.passes.ranges() {
                for pass in from.0.max(first.0)..=to.0 {
                    by_pass.entry(Pass(pass)).or_default().insert(*task);
                }
            }
        }
        by_pass.into_iter().map(|(pass, tasks)| (pass, Arc::new(tasks))).collect()
    }

    /// Returns the record that `task` has after it is given up in `pass` as well.
    pub fn with(&self, task: TaskId, pass: Pass, reason: &str) -> GivenUpRecord {
        self.of.get(&task).cloned().unwrap_or_default().and(pass, reason)
    }

    /// Returns the passes in which each task was given up, for a checkpoint.
    pub fn passes(&self) -> BTreeMap<TaskId, PassRanges> {
        self.of.iter().map(|(task, record)| (*task, record.passes.clone())).collect()
    }

    /// Returns the records that change when the job restores a checkpoint with the passes in `to`. The checkpoint may
    /// be an earlier one or, if an operator chooses it, one of an abandoned generation. A task without a record was not
    /// given up.
    pub fn going_to(
        &self,
        to: &BTreeMap<TaskId, PassRanges>,
    ) -> Vec<(TaskId, Option<GivenUpRecord>)> {
        let tasks: BTreeSet<TaskId> = self.of.keys().chain(to.keys()).copied().collect();
        let changed = tasks.into_iter().filter_map(|task| {
            let known = self.of.get(&task);
            let reason = known.map_or("it was given up before", |it| it.reason.as_str());
            let record = to.get(&task).map(|passes| GivenUpRecord::of(passes, reason));
            let is_same = known.map(|it| &it.passes) == record.as_ref().map(|it| &it.passes);
            (!is_same).then_some((task, record))
        });
        changed.collect()
    }

    /// Puts or removes the record of a task.
    pub fn set(&mut self, task: TaskId, record: Option<GivenUpRecord>) {
        let of = Arc::make_mut(&mut self.of);
        let added = record.as_ref().map_or(0, |record| record.times);
        let removed = match record {
            Some(record) => of.insert(task, record),
            None => of.remove(&task),
        };
        self.times = (self.times - removed.map_or(0, |it| it.times)).saturating_add(added);
    }
}
