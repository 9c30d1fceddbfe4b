//! Tasks that were given up: one record for each task, of bounded size for any number of passes.

use serde::{Deserialize, Serialize};

use crate::ids::{Pass, TaskId};
use crate::records::RecordRange;

/// Maximum number of ranges in one record. A task that is given up in every other pass adds a range each
/// time; beyond this the oldest ranges are dropped, but [`GivenUpRecord::times`] still counts them.
const RANGES_MAX: usize = 4096;

/// Maximum number of tasks that a [`Discarded`] lists.
pub const LISTED_MAX: usize = 50;

/// Maximum number of ranges, of passes or of records, in a listed [`DiscardedTask`].
const LISTED_RANGES_MAX: usize = 16;

/// A set of passes as ascending ranges, both ends included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PassRanges(#[serde(deserialize_with = "ascending")] Vec<(Pass, Pass)>);

fn ascending<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<(Pass, Pass)>, D::Error> {
    let ranges = Vec::<(Pass, Pass)>::deserialize(from)?;
    let is_apart =
        ranges.windows(2).all(|it| it[0].1.0.checked_add(1).is_some_and(|next| next < it[1].0.0));
    match is_apart && ranges.iter().all(|(first, last)| first <= last) {
        true => Ok(ranges),
        false => Err(serde::de::Error::custom("pass ranges are not ascending and separate")),
    }
}

impl PassRanges {
    /// Returns the passes from `first` to `last`, both included.
    pub fn of(first: Pass, last: Pass) -> Self {
        Self(if first <= last { vec![(first, last)] } else { Vec::new() })
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the ranges, ascending, both ends included.
    pub fn ranges(&self) -> &[(Pass, Pass)] {
        &self.0
    }

    pub fn contains(&self, pass: Pass) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < pass);
        self.0.get(at).is_some_and(|(first, _)| *first <= pass)
    }

    /// Returns the number of passes in all ranges.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|(first, last)| u64::from(last.0 - first.0) + 1).sum()
    }

    /// Adds a pass; returns whether it is new.
    pub fn insert(&mut self, pass: Pass) -> bool {
        if self.contains(pass) {
            return false;
        }
        let at = self.0.partition_point(|(_, last)| *last < pass);
        let follows = at.checked_sub(1).is_some_and(|before| self.0[before].1.0 + 1 == pass.0);
        let precedes = self.0.get(at).is_some_and(|(first, _)| pass.0 + 1 == first.0);
        match (follows, precedes) {
            (true, true) => {
                self.0[at - 1].1 = self.0[at].1;
                self.0.remove(at);
            }
            (true, false) => self.0[at - 1].1 = pass,
            (false, true) => self.0[at].0 = pass,
            (false, false) => self.0.insert(at, (pass, pass)),
        }
        true
    }
}

/// `given_up/<task>`: the passes in which a task was given up, and the reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenUpRecord {
    /// Empty for a held-out task, which evaluation skips.
    #[serde(default, skip_serializing_if = "PassRanges::is_empty")]
    pub passes: PassRanges,
    /// Number of passes in which it was given up. More than in `passes` if the oldest ranges were dropped.
    #[serde(default)]
    pub times: u64,
    /// The latest reason.
    pub reason: String,
}

impl GivenUpRecord {
    /// Creates the record of a held-out task.
    pub fn held_out(reason: &str) -> Self {
        Self { reason: reason.to_owned(), ..Self::default() }
    }

    /// Adds a pass in which the task was given up, and drops the oldest range of a record with too many. A pass that is
    /// in the record already changes nothing.
    pub fn and(mut self, pass: Pass, reason: &str) -> Self {
        if self.passes.insert(pass) {
            self.times += 1;
            reason.clone_into(&mut self.reason);
        }
        if RANGES_MAX < self.passes.0.len() {
            self.passes.0.remove(0);
        }
        self
    }

    /// Creates the record of a task that was given up in these passes.
    pub fn of(passes: &PassRanges, reason: &str) -> Self {
        Self { passes: passes.clone(), times: passes.count(), reason: reason.to_owned() }
    }
}

/// A task that was given up, as reported to users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiscardedTask {
    pub task: TaskId,
    /// Whether it is held out; then only evaluation lacks its records.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held_out: bool,
    /// Passes in which it was given up, counted from 0.
    pub passes: PassRanges,
    /// Number of these passes; more than in `passes` if that is shortened.
    pub times: u64,
    pub reason: String,
    /// The records of the task.
    pub records: Vec<RecordRange>,
}

impl DiscardedTask {
    /// Limits the number of ranges: keeps the latest passes and the first records.
    pub fn shortened(mut self) -> Self {
        let surplus = self.passes.0.len().saturating_sub(LISTED_RANGES_MAX);
        self.passes.0.drain(..surplus);
        self.records.truncate(LISTED_RANGES_MAX);
        self
    }
}

/// A summary of bounded size of all tasks that were given up: all are counted, some are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Discarded {
    /// Number of tasks, held-out ones included.
    pub tasks: u64,
    /// Number of passes in which each was given up, summed over all tasks.
    pub times: u64,
    /// The first [`LISTED_MAX`] tasks, each shortened.
    pub listed: Vec<DiscardedTask>,
    /// URL of the object with all tasks, one JSON object a line; set once the job is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list: Option<String>,
}

impl Discarded {
    pub fn is_empty(&self) -> bool {
        self.tasks == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(passes: &[u32]) -> PassRanges {
        let mut ranges = PassRanges::default();
        for pass in passes {
            ranges.insert(Pass(*pass));
        }
        ranges
    }

    fn text(ranges: &PassRanges) -> String {
        serde_json::to_string(ranges).unwrap()
    }

    #[test]
    fn passes_in_any_order_become_the_fewest_ranges() {
        assert_eq!(text(&ranges(&[0, 1, 2, 3])), "[[0,3]]");
        assert_eq!(text(&ranges(&[3, 1, 0, 2, 2])), "[[0,3]]");
        assert_eq!(text(&ranges(&[5, 0, 7, 1])), "[[0,1],[5,5],[7,7]]");
        for pass in [0, 1, 5, 7] {
            assert!(ranges(&[5, 0, 7, 1]).contains(Pass(pass)));
        }
        for pass in [2, 4, 6, 8] {
            assert!(!ranges(&[5, 0, 7, 1]).contains(Pass(pass)));
        }
        assert_eq!(ranges(&[5, 0, 7, 1]).count(), 4);
    }

    #[test]
    fn a_record_counts_each_pass_once_and_keeps_the_latest_reason() {
        let record = GivenUpRecord::default().and(Pass(1), "a").and(Pass(2), "b").and(Pass(1), "c");
        assert_eq!((record.times, record.reason.as_str()), (2, "b"));
        assert_eq!(GivenUpRecord::of(&record.passes, "b"), record);
    }

    /// S004-14: etcd limits the size of a value.
    #[test]
    fn the_record_of_a_task_stays_small_however_many_passes_there_are() {
        let every_other = (0..40_000).map(|pass| Pass(2 * pass));
        let record =
            every_other.fold(GivenUpRecord::default(), |record, pass| record.and(pass, "bad"));
        assert_eq!(record.times, 40_000);
        assert!(record.passes.contains(Pass(79_998)) && !record.passes.contains(Pass(0)));
        assert!(serde_json::to_vec(&record).unwrap().len() < 100_000);
        let every = (0..40_000).map(Pass);
        let record = every.fold(GivenUpRecord::default(), |record, pass| record.and(pass, "bad"));
        let expected = r#"{"passes":[[0,39999]],"times":40000,"reason":"bad"}"#;
        assert_eq!(serde_json::to_string(&record).unwrap(), expected);
    }

    /// F54
    #[test]
    fn ranges_that_overlap_or_run_backwards_are_rejected() {
        for text in ["[[1,0]]", "[[0,3],[2,5]]", "[[4,5],[0,1]]", "[[0,1],[2,3]]"] {
            assert!(serde_json::from_str::<PassRanges>(text).is_err(), "{text}");
        }
        assert!(serde_json::from_str::<PassRanges>("[[0,1],[3,4294967295]]").is_ok());
    }
}
