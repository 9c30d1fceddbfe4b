//! Applied records: the records of each pass that the parameters reflect.
//!
//! Each pass has a checksum that does not depend on the order of its records: the sum, modulo 2⁶⁴, of
//! a hash of each record's name (an additive multiset hash, Bellare and Micciancio 1997). Equal counts
//! with equal checksums mean that the same records were applied equally often, except with a probability
//! of about 2⁻⁶⁴. The checksum does not protect against forged names.
//!
//! In asynchronous mode the name of a push is its record range: a pass, a task, and a range of the task's
//! records. A range is applied once, no matter which trainer computes it and how often.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{Pass, TaskId};

/// Returns the checksum of records of a task, given by their positions in the task's order of that pass.
pub fn checksum(pass: Pass, task: TaskId, positions: impl IntoIterator<Item = u32>) -> u64 {
    let name = mix(u64::from(pass.0) << 32 | u64::from(task.0));
    positions
        .into_iter()
        .fold(0, |sum: u64, position| sum.wrapping_add(mix(name ^ u64::from(position))))
}

/// Applies the finalizer of SplitMix64 (Steele, Lea and Flood 2014): every output bit depends on every input bit.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Records applied in one pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppliedPass {
    pub pass: Pass,
    pub records: u64,
    /// Sum of the records' [`checksum`]s.
    pub checksum: u64,
    /// Tasks of which only the first records were applied when the pass ended (asynchronous mode),
    /// because the task was given up or lost.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub partial: BTreeMap<TaskId, u32>,
}

/// Consecutive records of one task: the name of a push in asynchronous mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordRange {
    pub pass: Pass,
    pub task: TaskId,
    /// Positions in the task's order; `to` is exclusive.
    pub from: u32,
    pub to: u32,
    /// Whether this is the last range of the task.
    pub last: bool,
}

/// Relation of a [`RecordRange`] to the records applied so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeStatus {
    /// Not applied yet, and begins where the applied records end.
    Fresh,
    /// Already applied.
    Duplicate,
    /// Does not begin where the applied records of the task end.
    Gap { counted: u32 },
}

/// Maximum number of passes that are listed on their own; of earlier passes only the sum is known, because a stream has
/// no last pass.
pub const PASSES_LISTED: usize = 4096;

/// Records applied in passes that are no longer listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlierPasses {
    /// The first pass that is listed.
    pub end: Pass,
    pub records: u64,
    /// Sum of the records' [`checksum`]s.
    pub checksum: u64,
}

impl EarlierPasses {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// All records that a set of parameter blocks reflects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppliedRecords {
    /// Passes before those in `passes`.
    #[serde(default, skip_serializing_if = "EarlierPasses::is_empty")]
    pub earlier: EarlierPasses,
    /// Ascending, at most [`PASSES_LISTED`]; the last one is the current pass.
    pub passes: Vec<AppliedPass>,
    /// Tasks of the current pass that were applied completely (asynchronous mode).
    #[serde(default, skip_serializing_if = "TaskRanges::is_empty")]
    pub done: TaskRanges,
    /// Number of records applied of the other tasks that were started (asynchronous mode).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub open: BTreeMap<TaskId, u32>,
}

impl AppliedRecords {
    /// Returns the number of records applied in all passes.
    pub fn records(&self) -> u64 {
        let listed = self.passes.iter().map(|applied_pass| applied_pass.records);
        listed.fold(self.earlier.records, u64::saturating_add)
    }

    /// Returns the sum, modulo 2⁶⁴, of the checksums of all records, over all passes.
    pub fn checksum(&self) -> u64 {
        let listed = self.passes.iter().map(|applied_pass| applied_pass.checksum);
        listed.fold(self.earlier.checksum, u64::wrapping_add)
    }

    /// Adds records of `pass`, which is the current or a later pass.
    pub fn count(&mut self, pass: Pass, records: u64, checksum: u64) {
        let applied_pass = self.enter(pass);
        applied_pass.records += records;
        applied_pass.checksum = applied_pass.checksum.wrapping_add(checksum);
    }

    /// Returns the entry of `pass`; a new pass closes the one before.
    fn enter(&mut self, pass: Pass) -> &mut AppliedPass {
        if self.passes.last().is_none_or(|applied_pass| applied_pass.pass < pass) {
            if let Some(left) = self.passes.last_mut() {
                left.partial = std::mem::take(&mut self.open);
            }
            self.done = TaskRanges::default();
            self.passes.push(AppliedPass { pass, ..AppliedPass::default() });
            if PASSES_LISTED < self.passes.len() {
                let AppliedPass { records, checksum, .. } = self.passes.remove(0);
                self.earlier.end = self.passes[0].pass;
                self.earlier.records += records;
                self.earlier.checksum = self.earlier.checksum.wrapping_add(checksum);
            }
        }
        self.passes.last_mut().expect("the entry was just inserted if absent")
    }

    /// Classifies `range`. Passes do not overlap: every range of an earlier pass was applied or given up
    /// before the current pass began.
    pub fn classify(&self, range: &RecordRange) -> RangeStatus {
        let current = self.passes.last().map(|applied_pass| applied_pass.pass);
        let applied = match current {
            Some(current) if range.pass < current => return RangeStatus::Duplicate,
            Some(current) if range.pass == current && self.done.contains(range.task) => {
                return RangeStatus::Duplicate;
            }
            Some(current) if range.pass == current => {
                self.open.get(&range.task).copied().unwrap_or(0)
            }
            Some(_) | None => 0,
        };
        if range.from == applied && range.from < range.to {
            RangeStatus::Fresh
        } else if range.to <= applied {
            RangeStatus::Duplicate
        } else {
            RangeStatus::Gap { counted: applied }
        }
    }

    /// Adds a range that [`Self::classify`] returned as fresh.
    pub fn apply_range(&mut self, range: &RecordRange, records: u64, checksum: u64) {
        self.count(range.pass, records, checksum);
        if range.last {
            self.open.remove(&range.task);
            self.done.insert(range.task);
        } else {
            self.open.insert(range.task, range.to);
        }
    }
}

/// A set of tasks; compact if they are consecutive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(u32, u32)>", into = "Vec<(u32, u32)>")]
pub struct TaskRanges {
    /// Last task of each range by its first; ranges neither overlap nor touch.
    ranges: BTreeMap<u32, u32>,
}

impl TaskRanges {
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub fn contains(&self, task: TaskId) -> bool {
        let before = self.ranges.range(..=task.0).next_back();
        before.is_some_and(|(_, last)| task.0 <= *last)
    }

    pub fn insert(&mut self, task: TaskId) {
        if self.contains(task) {
            return;
        }
        let (mut first, mut last) = (task.0, task.0);
        if let Some((before, end)) = self.ranges.range(..task.0).next_back()
            && end.checked_add(1) == Some(task.0)
        {
            first = *before;
        }
        if let Some(end) = task.0.checked_add(1).and_then(|next| self.ranges.remove(&next)) {
            last = end;
        }
        self.ranges.insert(first, last);
    }

    /// Returns the tasks that are in both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        let mut ranges = BTreeMap::new();
        let (mut left, mut right) = (self.ranges.iter().peekable(), other.ranges.iter().peekable());
        while let (Some(&(a, a_last)), Some(&(b, b_last))) = (left.peek(), right.peek()) {
            let (first, last) = (*a.max(b), *a_last.min(b_last));
            if first <= last {
                ranges.insert(first, last);
            }
            match a_last <= b_last {
                true => left.next(),
                false => right.next(),
            };
        }
        Self { ranges }
    }

    /// Returns all tasks, ascending.
    pub fn iter(&self) -> impl Iterator<Item = TaskId> + '_ {
        self.ranges.iter().flat_map(|(first, last)| (*first..=*last).map(TaskId))
    }
}

impl From<TaskRanges> for Vec<(u32, u32)> {
    fn from(set: TaskRanges) -> Self {
        set.ranges.into_iter().collect()
    }
}

impl From<Vec<(u32, u32)>> for TaskRanges {
    fn from(ranges: Vec<(u32, u32)>) -> Self {
        Self { ranges: ranges.into_iter().filter(|(first, last)| first <= last).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Tries all pairs of subsets of six tasks.
    #[test]
    fn an_intersection_has_the_tasks_of_both_sets() {
        let set_of = |bits: u32| {
            let mut set = TaskRanges::default();
            (0..6).filter(|bit| bits >> bit & 1 == 1).for_each(|bit| set.insert(TaskId(bit)));
            set
        };
        for (left, right) in (0..64).flat_map(|left| (0..64).map(move |right| (left, right))) {
            let found: BTreeSet<TaskId> =
                set_of(left).intersection(&set_of(right)).iter().collect();
            assert_eq!(found, set_of(left & right).iter().collect(), "{left:b} {right:b}");
        }
    }

    fn range(pass: u32, task: u32, from: u32, to: u32, last: bool) -> RecordRange {
        RecordRange { pass: Pass(pass), task: TaskId(task), from, to, last }
    }

    /// Applies a fresh range, as a pserver does.
    fn offer(applied: &mut AppliedRecords, range: RecordRange) -> RangeStatus {
        let status = applied.classify(&range);
        if status == RangeStatus::Fresh {
            let sum = checksum(range.pass, range.task, range.from..range.to);
            applied.apply_range(&range, (range.to - range.from).into(), sum);
        }
        status
    }

    /// I6: a range that is computed repeatedly is applied once.
    #[test]
    fn a_record_range_counts_once_however_often_it_arrives() {
        let mut applied = AppliedRecords::default();
        assert_eq!(offer(&mut applied, range(0, 7, 0, 10, false)), RangeStatus::Fresh);
        assert_eq!(offer(&mut applied, range(0, 7, 0, 10, false)), RangeStatus::Duplicate);
        assert_eq!(offer(&mut applied, range(0, 7, 10, 15, true)), RangeStatus::Fresh);
        for again in [range(0, 7, 0, 10, false), range(0, 7, 10, 15, true)] {
            assert_eq!(offer(&mut applied, again), RangeStatus::Duplicate);
        }
        assert_eq!(applied.records(), 15);
        assert_eq!(applied.passes[0].checksum, checksum(Pass(0), TaskId(7), 0..15));
    }

    /// F3: a delayed push of an earlier pass is not applied once the next pass has begun.
    #[test]
    fn a_record_range_of_a_finished_pass_does_not_count() {
        let mut applied = AppliedRecords::default();
        offer(&mut applied, range(0, 1, 0, 4, false));
        offer(&mut applied, range(1, 2, 0, 4, true));
        assert_eq!(offer(&mut applied, range(0, 1, 4, 8, true)), RangeStatus::Duplicate);
        assert_eq!(applied.passes[0].partial, BTreeMap::from([(TaskId(1), 4)]));
        assert_eq!(applied.records(), 8);
    }

    /// I6: a range that leaves a gap, or overlaps applied records, is refused.
    #[test]
    fn a_record_range_after_a_gap_is_rejected() {
        let mut applied = AppliedRecords::default();
        assert_eq!(offer(&mut applied, range(0, 1, 4, 8, true)), RangeStatus::Gap { counted: 0 });
        offer(&mut applied, range(0, 1, 0, 4, false));
        assert_eq!(offer(&mut applied, range(0, 1, 2, 8, true)), RangeStatus::Gap { counted: 4 });
        assert_eq!(applied.records(), 4);
    }

    /// S004-2: a stream may have any number of passes.
    #[test]
    fn of_many_passes_the_latest_are_listed_and_all_are_counted() {
        let mut applied = AppliedRecords::default();
        let passes = PASSES_LISTED as u32 + 100;
        let mut sum = 0_u64;
        for pass in 0..passes {
            offer(&mut applied, range(pass, 0, 0, 3, true));
            sum = sum.wrapping_add(checksum(Pass(pass), TaskId(0), 0..3));
        }
        assert_eq!((applied.passes.len(), applied.earlier.end), (PASSES_LISTED, Pass(100)));
        assert_eq!((applied.records(), applied.checksum()), (3 * u64::from(passes), sum));
        let delayed = range(7, 0, 3, 6, true);
        assert_eq!(offer(&mut applied, delayed), RangeStatus::Duplicate);
    }

    #[test]
    fn the_checksum_detects_a_missing_a_repeated_and_an_exchanged_record() {
        let all = checksum(Pass(0), TaskId(0), 0..100);
        let parts =
            checksum(Pass(0), TaskId(0), 40..100).wrapping_add(checksum(Pass(0), TaskId(0), 0..40));
        assert_eq!(all, parts);
        let others = [
            checksum(Pass(0), TaskId(0), 0..99),
            all.wrapping_add(checksum(Pass(0), TaskId(0), 5..6)),
            checksum(Pass(1), TaskId(0), 0..100),
            checksum(Pass(0), TaskId(1), 0..100),
        ];
        assert!(others.iter().all(|other| *other != all));
    }

    #[test]
    fn ranges_of_tasks_merge_in_any_order() {
        let mut set = TaskRanges::default();
        for task in [5, 1, 3, 4, 2, 9, 0, 7, u32::MAX, 5] {
            set.insert(TaskId(task));
        }
        let ranges = Vec::from(set.clone());
        assert_eq!(ranges, [(0, 5), (7, 7), (9, 9), (u32::MAX, u32::MAX)]);
        assert!(set.contains(TaskId(4)) && !set.contains(TaskId(6)));
        assert_eq!(
            set.iter().take(8).map(|task| task.0).collect::<Vec<_>>(),
            [0, 1, 2, 3, 4, 5, 7, 9]
        );
    }
}
