//! The members whose workers have failed: the others of their round go on to the next one without a wait for them.

use std::collections::BTreeSet;

use steadfast_common::ids::{NodeId, Round};

/// The members of a round that have reported the failure of a worker in it. They will ask for another round when
/// their other workers have ended. Not durable: after a takeover, the others hear of it when they ask.
#[derive(Debug, Default)]
pub(super) struct Failed {
    round: Round,
    nodes: BTreeSet<NodeId>,
}

impl Failed {
    /// Notes in which round a worker of a node has failed last. Only the last round of all counts.
    pub fn note(&mut self, node: NodeId, round: Round, last: Round) {
        if round != last || round == Round(0) {
            return;
        }
        if self.round != round {
            *self = Self { round, nodes: BTreeSet::new() };
        }
        self.nodes.insert(node);
    }

    /// Returns a node other than `node` on which a worker has failed in the last round.
    pub fn beside(&self, node: NodeId, last: Round) -> Option<NodeId> {
        let nodes = (self.round == last).then_some(&self.nodes)?;
        nodes.iter().find(|failed| **failed != node).copied()
    }

    /// Returns the number of nodes on which a worker has failed in the last round.
    pub fn count(&self, last: Round) -> usize {
        if self.round == last { self.nodes.len() } else { 0 }
    }
}
