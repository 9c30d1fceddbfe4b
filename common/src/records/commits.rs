//! The commits of an elastic job with records: states of the program that all of its workers have, each together with
//! the position in the data that it has seen.

use serde::{Deserialize, Serialize};

use crate::ids::{Pass, Phase, Round};
use crate::records::ranges::{NUMBER_MAX, Ranges};

/// The tag at which the members of a round decide a commit. The first phase of a round is the state that all of its
/// workers begin with.
pub const COMMIT_TAG: &str = "steadfast.commit";

/// Bits of [`CommitId::number`] that count the commits of one round.
const PHASE_BITS: u32 = 32;

/// Identifies a commit: the round that decided it, and how many the round had decided before.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct CommitId {
    pub round: Round,
    pub phase: Phase,
}

impl CommitId {
    /// Returns one number for both, in the same order, by which workers name their states. It is 0 for no commit:
    /// rounds are numbered from 1.
    pub fn number(self) -> u64 {
        (self.round.0 << PHASE_BITS).saturating_add(self.phase.0)
    }
}

impl std::fmt::Display for CommitId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}", self.round, self.phase)
    }
}

/// A position in the data, which a state has reached.
///
/// The updates use the records of a pass in the order of that pass, so that `used` says which ones the state has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    /// Passes count from 0.
    pub pass: Pass,
    /// Records of this pass that the state has seen.
    pub used: u64,
    /// Records of all passes that it has seen. A pass that ends early leaves some out.
    pub seen: u64,
}

impl DataPosition {
    /// Reads what a member passes to the barrier of a commit.
    pub fn parse(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }

    /// Returns what a member passes to the barrier of a commit.
    pub fn to_json(self) -> Vec<u8> {
        serde_json::to_vec(&self).expect("a position is plain data")
    }
}

/// Says how the records of a job are dealt to its workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordOrder {
    /// Which records an update uses follows from the seed, the pass and the number of the update.
    #[default]
    Fixed,
    /// The master deals ranges of records to workers as they ask, so that fast ones use more of them.
    Dynamic,
}

impl RecordOrder {
    pub fn is_fixed(&self) -> bool {
        *self == Self::Fixed
    }
}

impl std::fmt::Display for RecordOrder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Fixed => "fixed",
            Self::Dynamic => "dynamic",
        })
    }
}

/// A member passes this to the barrier of a commit, if the order is [`RecordOrder::Dynamic`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Progress {
    /// The state that its workers begin the round with.
    State(BegunState),
    /// The records that its workers have used since the last commit of the round.
    Used(Ranges),
}

/// The state that the workers of a round begin with, if the order is [`RecordOrder::Dynamic`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BegunState {
    /// The [`CommitId::number`] of its commit; 0 if they begin anew.
    pub number: u64,
    /// The commit, as far as the workers know it. Of the last one they need not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<CommitRecord>,
}

impl BegunState {
    /// Returns the first commit of a round that begins with this state, which is the last one or an earlier one; `None`
    /// if it is not known which records the state has seen.
    pub fn begin(
        &self,
        id: CommitId,
        last: Option<&CommitRecord>,
        records: u64,
    ) -> Option<CommitRecord> {
        let last = match last {
            _ if self.number == 0 => return Some(CommitRecord::new(id, DataPosition::default())),
            Some(last) if last.id.number() == self.number => last,
            Some(last) => {
                let own = self.commit.as_ref().filter(|own| own.id.number() == self.number)?;
                own.is_before(last, records).then_some(own)?
            }
            None => return None,
        };
        Some(CommitRecord { id, ..last.clone() })
    }
}

impl Progress {
    /// Reads what a member passes to the barrier of a commit.
    pub fn parse(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }

    /// Returns what a member passes to the barrier of a commit.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("progress is plain data")
    }
}

/// `rendezvous/commit`: the last commit that was decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitRecord {
    #[serde(flatten)]
    pub id: CommitId,
    #[serde(flatten)]
    pub position: DataPosition,
    /// Records behind the position that the state has seen, too. Only with [`RecordOrder::Dynamic`].
    #[serde(default, skip_serializing_if = "Ranges::is_empty")]
    pub ahead: Ranges,
}

impl CommitRecord {
    /// Creates a commit that has seen the records up to a position.
    pub fn new(id: CommitId, position: DataPosition) -> Self {
        Self { id, position, ahead: Ranges::default() }
    }

    /// Returns the number of the first record that the state has not seen, of passes of `records`.
    pub fn first_unseen(&self, records: u64) -> u64 {
        let DataPosition { pass, used, .. } = self.position;
        u64::from(pass.0).saturating_mul(records).saturating_add(used).min(NUMBER_MAX)
    }

    /// Returns whether the other one has seen all that this one has.
    fn is_before(&self, other: &Self, records: u64) -> bool {
        let (own, others) = (self.first_unseen(records), other.first_unseen(records));
        let mut ahead = self.ahead.clone();
        ahead.remove(0..others);
        let is_whole = self.position.seen == own.saturating_add(self.ahead.count());
        own <= others && is_whole && other.ahead.contains_all(&ahead)
    }

    /// Returns the commit that has seen `used`, too: records that this one has not seen.
    #[must_use]
    pub fn and(&self, id: CommitId, used: &Ranges, records: u64) -> Self {
        let (mut first, mut ahead) = (self.first_unseen(records), self.ahead.clone());
        ahead.add_all(used);
        while let Some(range) = ahead.first().filter(|range| range.start <= first) {
            first = range.end.max(first);
            ahead.remove(range);
        }
        let pass = Pass(u32::try_from(first / records).unwrap_or(u32::MAX));
        let seen = self.position.seen.saturating_add(used.count());
        Self { id, position: DataPosition { pass, used: first % records, seen }, ahead }
    }
}

/// `rendezvous/dealt/<round>/<id>`: the records that a member of a round was given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DealtRecord {
    /// Counts those that it was given in the round.
    pub total: u64,
    /// Holds those of them that no commit had seen when it was given more.
    pub ranges: Ranges,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(round: u64, phase: u64) -> CommitId {
        CommitId { round: Round(round), phase: Phase(phase) }
    }

    #[test]
    fn numbers_of_commits_have_the_order_of_commits() {
        let ids = [CommitId::default(), id(1, 0), id(1, 1), id(1, 1 << 20), id(2, 0)];
        assert!(ids.is_sorted_by_key(|id| id.number()) && ids.is_sorted());
        assert_eq!(ids[0].number(), 0);
    }

    /// S003-51: the record of a commit reads well in etcdctl.
    #[test]
    fn the_record_of_a_commit_is_flat() {
        let position = DataPosition { pass: Pass(2), used: 512, seen: 120_512 };
        let record = CommitRecord::new(id(3, 7), position);
        let text = r#"{"round":3,"phase":7,"pass":2,"used":512,"seen":120512}"#;
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        assert_eq!(serde_json::from_str::<CommitRecord>(text).unwrap(), record);
        assert_eq!(DataPosition::parse(&position.to_json()), Some(position));
        for json in ["", "{}", r#"{"pass":0,"used":-1,"seen":0}"#] {
            assert_eq!(DataPosition::parse(json.as_bytes()), None, "{json}");
        }
    }

    /// S002-3: the record of a dynamic order lists what the state has seen behind its position.
    #[test]
    fn a_commit_has_seen_a_position_and_what_is_ahead_of_it() {
        let used = |ranges: &[(u64, u64)]| Ranges::try_from(ranges.to_vec()).unwrap();
        let none = CommitRecord::new(id(1, 0), DataPosition::default());
        let first = none.and(id(1, 1), &used(&[(4, 8), (12, 14)]), 10);
        let text = r#"{"round":1,"phase":1,"pass":0,"used":0,"seen":6,"ahead":[[4,8],[12,14]]}"#;
        assert_eq!(serde_json::to_string(&first).unwrap(), text);
        assert_eq!(serde_json::from_str::<CommitRecord>(text).unwrap(), first);
        let second = first.and(id(1, 2), &used(&[(0, 4), (8, 11)]), 10);
        let position = DataPosition { pass: Pass(1), used: 1, seen: 13 };
        assert_eq!((second.position, second.first_unseen(10)), (position, 11));
        assert_eq!(second.ahead, used(&[(12, 14)]));
    }

    #[test]
    fn what_members_pass_to_a_commit_survives_the_barrier() {
        let begun = BegunState { number: 7, commit: None };
        for progress in [Progress::State(begun), Progress::Used(Ranges::default())] {
            assert_eq!(Progress::parse(&progress.to_json()), Some(progress));
        }
        let used = (3..5).map(|it| it..it + 1).collect();
        assert_eq!(Progress::Used(used).to_json(), br#"{"used":[[3,5]]}"#);
        assert_eq!(Progress::parse(b"{}"), None);
    }

    /// S002-9: a round begins with the last state, an earlier one of which it is known what it has seen, or anew.
    #[test]
    fn a_round_begins_with_a_state_whose_records_are_known() {
        let used = |ranges: &[(u64, u64)]| Ranges::try_from(ranges.to_vec()).unwrap();
        let none = CommitRecord::new(id(1, 0), DataPosition::default());
        let first = none.and(id(1, 1), &used(&[(4, 8)]), 10);
        let last = first.and(id(1, 2), &used(&[(0, 4), (9, 10)]), 10);
        let begin = |number: u64, commit: Option<&CommitRecord>| {
            let state = BegunState { number, commit: commit.cloned() };
            state.begin(id(2, 0), Some(&last), 10).map(|it| (it.id, it.position.seen, it.ahead))
        };
        let number = |commit: &CommitRecord| commit.id.number();
        assert_eq!(begin(number(&last), None), Some((id(2, 0), 9, used(&[(9, 10)]))));
        assert_eq!(begin(number(&first), Some(&first)), Some((id(2, 0), 4, used(&[(4, 8)]))));
        assert_eq!(begin(0, None), Some((id(2, 0), 0, Ranges::default())));
        let later = last.and(id(1, 3), &used(&[(8, 9)]), 10);
        for (number, commit) in
            [(number(&first), None), (number(&first), Some(&last)), (number(&later), Some(&later))]
        {
            assert_eq!(begin(number, commit), None, "{number}");
        }
    }
}
