//! The sum of one step's lanes, always along the same tree.

use std::collections::BTreeSet;

use steadfast_common::compression::Codec;
use steadfast_common::ids::Lane;
use steadfast_common::lane_tree::{LaneSums, LaneTree, Node};

use crate::contribution::{Contribution, LaneEnd, LaneShare};

/// What has been contributed to the present step.
#[derive(Clone, Debug)]
pub struct LaneSum {
    /// In whose arithmetic lanes are added.
    codec: Codec,
    tree: LaneTree,
    /// Lanes that ended in an earlier step of this pass.
    ended: BTreeSet<Lane>,
    /// Lanes that end with this step.
    ending: BTreeSet<Lane>,
    sums: LaneSums<Contribution>,
}

impl LaneSum {
    /// Waits for `lanes` lanes less those that have `ended`.
    pub fn new(lanes: u32, ended: BTreeSet<Lane>, codec: Codec) -> Self {
        let tree = LaneTree::new(lanes);
        let (ending, sums) = (BTreeSet::new(), LaneSums::new(tree));
        let mut new = Self { codec, tree, ended, ending, sums };
        new.begin();
        new
    }

    /// The tree along which lanes are added.
    pub fn tree(&self) -> LaneTree {
        self.tree
    }

    /// Lanes that ended in an earlier step of this pass.
    pub fn ended(&self) -> &BTreeSet<Lane> {
        &self.ended
    }

    /// Whether all lanes of a node are in, or ended before.
    pub fn has(&self, node: Node) -> bool {
        self.sums.has(node)
    }

    /// Lanes that the step still waits for.
    pub fn missing(&self) -> Vec<Lane> {
        let lanes = self.tree.root().lanes();
        lanes.filter(|lane| !self.sums.has(self.tree.leaf(*lane))).collect()
    }

    /// Whether every lane is in.
    pub fn is_complete(&self) -> bool {
        self.sums.whole().is_some()
    }

    /// Takes a checked contribution of a node's lanes, not all of which are in.
    pub fn take(&mut self, node: Node, shares: &[LaneShare], contribution: Contribution) {
        // What the node takes the place of said the same.
        self.ending.retain(|lane| !node.holds(self.tree.leaf(*lane)));
        let ending = node.lanes().zip(shares).filter(|(_, it)| it.end == LaneEnd::LastOfPass);
        self.ending.extend(ending.map(|(lane, _)| lane));
        let sum = (0 < contribution.records).then_some(contribution);
        self.sums.put(node, sum, |left, right| left.add(right, self.codec));
    }

    /// The sum over all lanes of a complete step; nothing if there is no record.
    pub fn sum(&self) -> Option<&Contribution> {
        self.sums.whole()?.as_ref()
    }

    /// Begins the next step; returns whether it belongs to the next pass.
    pub fn roll(&mut self) -> PassEnd {
        self.ended.append(&mut self.ending);
        let over = self.ended.len() == self.tree.root().lanes().count();
        if over {
            self.ended.clear();
        }
        self.begin();
        if over { PassEnd::Over } else { PassEnd::GoesOn }
    }

    fn begin(&mut self) {
        self.sums = LaneSums::new(self.tree);
        for lane in &self.ended {
            self.sums.put(self.tree.leaf(*lane), None, |left, right| left.add(right, self.codec));
        }
    }
}

/// Whether a step was the last one of its pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassEnd {
    GoesOn,
    Over,
}
