//! Recovers the durable state of a rendezvous from its records in etcd.

use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::records::commits::CommitId;
use steadfast_common::records::ranges::{NUMBER_MAX, Ranges};
use steadfast_common::records::rendezvous::{NodeState, SLOTS_MAX};

use super::state::{Fact, Rendezvous};

/// Counters beyond this were not counted; going on from them would overflow.
const COUNT_MAX: u64 = u64::MAX / 2;

/// A record that no master wrote. Decisions on it would overflow, or never end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRecord {
    #[error("node {node} has {slots} slots; 1 to {SLOTS_MAX} are allowed")]
    Slots { node: NodeId, slots: u32 },
    #[error("node {node} asked for a round after {after}, and the last one is {last}")]
    FutureRound { node: NodeId, after: Round, last: Round },
    #[error("the last round has the number {0}")]
    Round(Round),
    #[error("tag `{tag}` was released in phase {phase}")]
    Phase { tag: String, phase: Phase },
    #[error(
        "node {node} was given {total} records, which are fewer than those that it holds, or too many"
    )]
    Dealt { node: NodeId, total: u64 },
    #[error("node {node} was given records that another one holds as well")]
    DealtTwice { node: NodeId },
    #[error("the last commit is {id}, and the last round is {last}")]
    Commit { id: CommitId, last: Round },
    #[error("the shared state has the token {0}")]
    Token(u64),
}

impl Rendezvous {
    /// Returns the state that etcd holds. Each record is given as the fact that puts it, in any order.
    ///
    /// # Errors
    /// If a record is invalid.
    pub fn from_records(records: impl IntoIterator<Item = Fact>) -> Result<Self, InvalidRecord> {
        let mut state = Self::default();
        for fact in records {
            check(&fact)?;
            state.evolve(&fact);
        }
        // Facts in another order lead to the same state.
        state.follow_taken();
        state.check_dealt()?;
        state.check_nodes()?;
        state.check_last_commit()?;
        Ok(state)
    }

    /// Checks that the next commit can follow the last one.
    fn check_last_commit(&self) -> Result<(), InvalidRecord> {
        match &self.commit {
            Some(commit) if !(1..=self.number().0).contains(&commit.id.round.0) => {
                Err(InvalidRecord::Commit { id: commit.id, last: self.number() })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Checks that no record was given to two members.
    fn check_dealt(&self) -> Result<(), InvalidRecord> {
        let mut all = Ranges::default();
        for (node, record) in &self.dealt {
            if all.overlaps(&record.ranges) {
                return Err(InvalidRecord::DealtTwice { node: *node });
            }
            all.add_all(&record.ranges);
        }
        Ok(())
    }

    /// Checks that each node can get what it asked for: a round would be formed again and again otherwise.
    fn check_nodes(&self) -> Result<(), InvalidRecord> {
        let last = self.number();
        for (node, record) in &self.nodes {
            match record.state {
                NodeState::Asked { after } if last < after => {
                    return Err(InvalidRecord::FutureRound { node: *node, after, last });
                }
                NodeState::Asked { .. } | NodeState::Starting | NodeState::Late => {}
            }
        }
        Ok(())
    }
}

fn check(fact: &Fact) -> Result<(), InvalidRecord> {
    match fact {
        Fact::Node { node, record } if !(1..=SLOTS_MAX).contains(&record.slots) => {
            Err(InvalidRecord::Slots { node: *node, slots: record.slots })
        }
        Fact::Formed(record) if !(1..=COUNT_MAX).contains(&record.round.0) => {
            Err(InvalidRecord::Round(record.round))
        }
        Fact::Released { tag, phase, .. } if COUNT_MAX < phase.0 => {
            Err(InvalidRecord::Phase { tag: tag.clone(), phase: *phase })
        }
        Fact::Dealt { node, record, .. }
            if record.total < record.ranges.count() || NUMBER_MAX < record.total =>
        {
            Err(InvalidRecord::Dealt { node: *node, total: record.total })
        }
        Fact::Shared(record) if COUNT_MAX < record.token => Err(InvalidRecord::Token(record.token)),
        Fact::Node { .. }
        | Fact::Removed { .. }
        | Fact::Formed(_)
        | Fact::TagsDeleted { .. }
        | Fact::Entered { .. }
        | Fact::Released { .. }
        | Fact::EntriesDeleted { .. }
        | Fact::Dealt { .. }
        | Fact::DealtDeleted { .. }
        | Fact::Committed(_)
        | Fact::Scaled(_)
        | Fact::Shared(_)
        | Fact::Ended(_) => Ok(()),
    }
}
