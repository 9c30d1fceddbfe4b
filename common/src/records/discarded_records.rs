//! Records that are left out because processes that compute them end: one entry for each, in the record of a generation.

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::ids::{Pass, TaskId};
use crate::job::schedule::record_order;
use crate::job::spec::JobSpec;

/// Maximum number of records that a job leaves out before it fails.
pub const DISCARDED_RECORDS_MAX: usize = 1000;

/// A record whose gradient, or whose evaluation, ends the process that computes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiscardedRecord {
    pub task: TaskId,
    /// The number of the record within its task, in the order of the files, from 0.
    pub record: u32,
    /// The first pass without it; of a stream, whose passes have different records, the only one. Of a held-out record,
    /// the number of passes before the first evaluation without it.
    pub from: Pass,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held_out: bool,
    /// Says how the processes ended.
    pub reason: String,
}

/// Tells which records a generation leaves out.
#[derive(Clone, Debug, Default)]
pub struct LeftOutRecords {
    records: Vec<DiscardedRecord>,
    seed: u64,
    /// Whether each pass has records of its own.
    is_stream: bool,
}

impl LeftOutRecords {
    /// Returns those of a generation with `records` in its record.
    pub fn new(records: &[DiscardedRecord], spec: &JobSpec) -> Self {
        Self { records: records.to_vec(), seed: spec.seed, is_stream: spec.dataset.follow }
    }

    /// Returns which of some positions are trained on, in a task of `records` records. Positions are those of the
    /// task's order in the pass. The others are left out and do not move.
    pub fn kept(&self, pass: Pass, task: TaskId, records: u32, positions: Range<u32>) -> Vec<u32> {
        let left_out = self.numbers(pass, task);
        if left_out.is_empty() {
            return positions.collect();
        }
        let order = record_order(records, self.seed, pass, task);
        let is_kept = |position: &u32| {
            order.get(*position as usize).is_none_or(|number| !left_out.contains(number))
        };
        positions.filter(is_kept).collect()
    }

    /// Returns the numbers within a held-out task of `records` records of those that are evaluated after so many passes,
    /// in the order of the files.
    pub fn evaluated(&self, passes: Pass, task: TaskId, records: u32) -> Vec<u32> {
        let held_out = self.records.iter().filter(|it| it.held_out);
        let of_task = held_out.filter(|it| it.task == task && it.from <= passes);
        let left_out: BTreeSet<u32> = of_task.map(|it| it.record).collect();
        (0..records).filter(|record| !left_out.contains(record)).collect()
    }

    /// Returns the number within its task of each record that a pass leaves out of it.
    fn numbers(&self, pass: Pass, task: TaskId) -> BTreeSet<u32> {
        let is_in = |it: &&DiscardedRecord| match self.is_stream {
            true => it.from == pass,
            false => it.from <= pass,
        };
        let trained = self.records.iter().filter(|it| !it.held_out);
        let of_task = trained.filter(|it| it.task == task).filter(is_in);
        of_task.map(|it| it.record).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left_out(is_stream: bool) -> LeftOutRecords {
        let record = DiscardedRecord {
            task: TaskId(3),
            record: 5,
            from: Pass(1),
            held_out: false,
            reason: "signal 6".to_owned(),
        };
        LeftOutRecords { records: vec![record], seed: 7, is_stream }
    }

    /// F9, I7: the other records of a pass keep their positions, so no other micro-batch changes.
    #[test]
    fn a_record_is_left_out_from_its_pass_on_and_moves_no_other() {
        let left_out = left_out(false);
        let all: Vec<u32> = (0..10).collect();
        assert_eq!(left_out.kept(Pass(0), TaskId(3), 10, 0..10), all);
        assert_eq!(left_out.kept(Pass(1), TaskId(4), 10, 0..10), all);
        for pass in [Pass(1), Pass(2)] {
            let order = record_order(10, 7, pass, TaskId(3));
            let position = order.iter().position(|number| *number == 5).unwrap() as u32;
            let others: Vec<u32> = all.iter().copied().filter(|it| *it != position).collect();
            assert_eq!(left_out.kept(pass, TaskId(3), 10, 0..10), others);
            assert!(left_out.kept(pass, TaskId(3), 10, position..position + 1).is_empty());
        }
    }

    #[test]
    fn a_record_of_a_stream_is_left_out_of_its_pass_alone() {
        let left_out = left_out(true);
        assert_eq!(left_out.kept(Pass(1), TaskId(3), 10, 0..10).len(), 9);
        assert_eq!(left_out.kept(Pass(2), TaskId(3), 10, 0..10).len(), 10);
    }
}
