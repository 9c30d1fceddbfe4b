//! The rounds that a node joins, and how earlier ones ended.

use std::ops::Add;

use serde::{Deserialize, Serialize};
use steadfast_common::ids::{NodeId, Round};

/// Counts how earlier rounds ended for the workers of a node, or of several nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    /// Failures of workers, and losses of the registration. They explain that collectives of others failed.
    #[serde(default)]
    pub incidents: u64,
    /// Counts the times that workers left a round for a reason that their agent did not know.
    #[serde(default)]
    pub left: u64,
}

impl Add for Past {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { incidents: self.incidents + other.incidents, left: self.left + other.left }
    }
}

/// A round that this node has joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub round: Round,
    /// The members by rank.
    pub nodes: Vec<NodeId>,
    /// The rank of the first worker of this node.
    pub first_rank: u32,
    /// The number of workers of this node.
    pub workers: u32,
    /// Tells how earlier rounds ended for all members.
    pub past: Past,
}

impl Group {
    /// Returns whether workers left the round before this one although no node and no worker of it was lost:
    /// their collectives disagree, and would again.
    pub(super) fn follows_a_failure_of_its_own(&self, before: &Self) -> bool {
        before.nodes == self.nodes
            && before.past.incidents == self.past.incidents
            && before.past.left < self.past.left
    }
}
