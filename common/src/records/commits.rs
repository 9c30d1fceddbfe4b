//! The commits of an elastic job with records: states of the program that all of its workers have, each together with
//! the position in the data that it has seen.

use serde::{Deserialize, Serialize};

use crate::ids::{Pass, Phase, Round};

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

/// `rendezvous/commit`: the last commit that was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitRecord {
    #[serde(flatten)]
    pub id: CommitId,
    #[serde(flatten)]
    pub position: DataPosition,
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
        let record = CommitRecord { id: id(3, 7), position };
        let text = r#"{"round":3,"phase":7,"pass":2,"used":512,"seen":120512}"#;
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        assert_eq!(serde_json::from_str::<CommitRecord>(text).unwrap(), record);
        assert_eq!(DataPosition::parse(&position.to_json()), Some(position));
        for json in ["", "{}", r#"{"pass":0,"used":-1,"seen":0}"#] {
            assert_eq!(DataPosition::parse(json.as_bytes()), None, "{json}");
        }
    }
}
