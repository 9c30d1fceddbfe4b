//! What was counted: which records of which pass the parameters reflect.
//!
//! Records are counted with a checksum that does not depend on their order: the sum, modulo 2⁶⁴, of
//! a hash of each record's name (a multiset hash by addition, Bellare and Micciancio 1997). Equal
//! sums of equal many records mean that the same records were counted equally often, but for a
//! chance of about 2⁻⁶⁴; against somebody who forges names it proves nothing.
//!
//! In asynchronous mode a push is named by the records that it holds: a pass, a task, and a range of
//! the task's records. So whoever computes it, and however often, it counts once.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::ids::{Pass, TaskId};

/// Checksum of some records of a task, named by their positions in the task's order of that pass.
pub fn checksum(pass: Pass, task: TaskId, positions: Range<u32>) -> u64 {
    let name = mix(u64::from(pass.0) << 32 | u64::from(task.0));
    positions.fold(0, |sum: u64, position| sum.wrapping_add(mix(name ^ u64::from(position))))
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit depends on every bit.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Records counted in one pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassTally {
    pub pass: Pass,
    pub records: u64,
    /// Sum of the records' [`checksum`]s.
    pub checksum: u64,
    /// Tasks of which only the first records were counted when the pass was left (asynchronous
    /// mode): they were given up, or lost.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub partial: BTreeMap<TaskId, u32>,
}

/// Consecutive records of one task: the name of a push in asynchronous mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskPiece {
    pub pass: Pass,
    pub task: TaskId,
    /// Positions in the task's order.
    pub from: u32,
    pub to: u32,
    /// Whether the task ends here.
    pub last: bool,
}

/// What a [`TaskPiece`] is to somebody who has counted before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not counted yet, and nothing is missing before it.
    Fresh,
    /// Counted before.
    Duplicate,
    /// It does not begin where the records counted so far end.
    Gap { counted: u32 },
}

/// Everything that some blocks of parameters reflect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Ascending; the last one is not over.
    pub passes: Vec<PassTally>,
    /// Tasks of the last pass that were counted wholly (asynchronous mode).
    #[serde(default, skip_serializing_if = "TaskRanges::is_empty")]
    pub done: TaskRanges,
    /// Records counted of tasks that were not (asynchronous mode).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub open: BTreeMap<TaskId, u32>,
}

impl Counted {
    /// Records counted over all passes.
    pub fn records(&self) -> u64 {
        self.passes.iter().map(|tally| tally.records).sum()
    }

    /// Counts records of `pass`, which is the present one or a later one.
    pub fn count(&mut self, pass: Pass, records: u64, checksum: u64) {
        let tally = self.enter(pass);
        tally.records += records;
        tally.checksum = tally.checksum.wrapping_add(checksum);
    }

    /// The tally of `pass`; leaves the pass before for good.
    fn enter(&mut self, pass: Pass) -> &mut PassTally {
        if self.passes.last().is_none_or(|tally| tally.pass < pass) {
            if let Some(left) = self.passes.last_mut() {
                left.partial = std::mem::take(&mut self.open);
            }
            self.done = TaskRanges::default();
            self.passes.push(PassTally { pass, ..PassTally::default() });
        }
        self.passes.last_mut().expect("it was just put there if there was none")
    }

    /// Whether `piece` counts. Passes do not overlap, so that whatever belongs to one before the
    /// present one was counted, or given up, before this one began.
    pub fn judge(&self, piece: &TaskPiece) -> Verdict {
        let present = self.passes.last().map(|tally| tally.pass);
        let counted = match present {
            Some(present) if piece.pass < present => return Verdict::Duplicate,
            Some(present) if piece.pass == present && self.done.contains(piece.task) => {
                return Verdict::Duplicate;
            }
            Some(present) if piece.pass == present => {
                self.open.get(&piece.task).copied().unwrap_or(0)
            }
            Some(_) | None => 0,
        };
        if piece.from == counted && piece.from < piece.to {
            Verdict::Fresh
        } else if piece.to <= counted {
            Verdict::Duplicate
        } else {
            Verdict::Gap { counted }
        }
    }

    /// Counts a piece that was judged fresh.
    pub fn count_piece(&mut self, piece: &TaskPiece, checksum: u64) {
        self.count(piece.pass, u64::from(piece.to.saturating_sub(piece.from)), checksum);
        if piece.last {
            self.open.remove(&piece.task);
            self.done.insert(piece.task);
        } else {
            self.open.insert(piece.task, piece.to);
        }
    }
}

/// A set of tasks, small when they are consecutive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(u32, u32)>", into = "Vec<(u32, u32)>")]
pub struct TaskRanges {
    /// First and last task of each range; ranges neither overlap nor touch.
    ranges: BTreeMap<u32, u32>,
}

impl TaskRanges {
    /// Whether there is no task.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether `task` is one of them.
    pub fn contains(&self, task: TaskId) -> bool {
        let before = self.ranges.range(..=task.0).next_back();
        before.is_some_and(|(_, last)| task.0 <= *last)
    }

    /// Adds a task.
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

    /// All tasks, ascending.
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

    fn piece(pass: u32, task: u32, from: u32, to: u32, last: bool) -> TaskPiece {
        TaskPiece { pass: Pass(pass), task: TaskId(task), from, to, last }
    }

    /// Counts whatever is fresh, as a pserver does.
    fn offer(counted: &mut Counted, piece: TaskPiece) -> Verdict {
        let verdict = counted.judge(&piece);
        if verdict == Verdict::Fresh {
            let sum = checksum(piece.pass, piece.task, piece.from..piece.to);
            counted.count_piece(&piece, sum);
        }
        verdict
    }

    /// I6: whoever computes a piece again, it counts once.
    #[test]
    fn a_piece_counts_once_however_often_it_comes() {
        let mut counted = Counted::default();
        assert_eq!(offer(&mut counted, piece(0, 7, 0, 10, false)), Verdict::Fresh);
        assert_eq!(offer(&mut counted, piece(0, 7, 0, 10, false)), Verdict::Duplicate);
        assert_eq!(offer(&mut counted, piece(0, 7, 10, 15, true)), Verdict::Fresh);
        for again in [piece(0, 7, 0, 10, false), piece(0, 7, 10, 15, true)] {
            assert_eq!(offer(&mut counted, again), Verdict::Duplicate);
        }
        assert_eq!(counted.records(), 15);
        assert_eq!(counted.passes[0].checksum, checksum(Pass(0), TaskId(7), 0..15));
    }

    /// F3: what a former pass left on its way counts for nothing once the next one has begun.
    #[test]
    fn a_piece_of_a_pass_that_is_over_does_not_count() {
        let mut counted = Counted::default();
        offer(&mut counted, piece(0, 1, 0, 4, false));
        offer(&mut counted, piece(1, 2, 0, 4, true));
        assert_eq!(offer(&mut counted, piece(0, 1, 4, 8, true)), Verdict::Duplicate);
        assert_eq!(counted.passes[0].partial, BTreeMap::from([(TaskId(1), 4)]));
        assert_eq!(counted.records(), 8);
    }

    /// I6: a piece that leaves records out, or overlaps others, is refused and not counted.
    #[test]
    fn a_piece_after_a_gap_is_refused() {
        let mut counted = Counted::default();
        assert_eq!(offer(&mut counted, piece(0, 1, 4, 8, true)), Verdict::Gap { counted: 0 });
        offer(&mut counted, piece(0, 1, 0, 4, false));
        assert_eq!(offer(&mut counted, piece(0, 1, 2, 8, true)), Verdict::Gap { counted: 4 });
        assert_eq!(counted.records(), 4);
    }

    #[test]
    fn the_checksum_tells_a_missing_a_doubled_and_an_exchanged_record() {
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
    fn ranges_of_tasks_grow_together_in_any_order() {
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
