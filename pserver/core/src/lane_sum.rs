//! The sum of one step's lanes, always along the same tree.
//!
//! Each block is added by itself, as soon as it comes, while it is in cache. So there may be more in of
//! one block than of another, also of a contribution that was cut off: whoever computes its lanes once
//! more sends the same bits, and says the same of itself.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::compression::Codec;
use steadfast_common::ids::Lane;
use steadfast_common::lane_tree::{LaneSums, LaneTree, Node};

use crate::contribution::{Finite, LaneEnd, LaneShare, Refusal, Total};

/// What lanes say of themselves.
type Said = BTreeMap<Lane, LaneShare>;

/// What has been contributed to the present step.
#[derive(Clone, Debug)]
pub struct LaneSum {
    /// In whose arithmetic lanes are added.
    codec: Codec,
    tree: LaneTree,
    /// Lanes that ended in an earlier step of this pass.
    ended: BTreeSet<Lane>,
    /// What those lanes said of themselves of which something is in.
    said: Said,
    /// The same of the step before.
    said_before: Said,
    /// Of contributions that are in as a whole.
    totals: LaneSums<Total>,
    /// In the shard's order.
    blocks: Vec<LaneSums<Finite>>,
    /// Blocks that all lanes are in of, and whose sums were not taken out yet.
    ready: Vec<usize>,
}

impl LaneSum {
    /// Waits for so many `blocks` of `lanes` lanes less those that have `ended`.
    pub fn new(lanes: u32, ended: BTreeSet<Lane>, codec: Codec, blocks: usize) -> Self {
        let tree = LaneTree::new(lanes);
        let mut new = Self {
            codec,
            tree,
            ended,
            said: Said::new(),
            said_before: Said::new(),
            totals: LaneSums::new(tree),
            blocks: vec![LaneSums::new(tree); blocks],
            ready: Vec::new(),
        };
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

    /// Whether all lanes of a node are in as a whole, or ended before.
    pub fn has(&self, node: Node) -> bool {
        self.totals.has(node)
    }

    /// Whether all lanes of a node are in of one block.
    pub fn has_block(&self, node: Node, place: usize) -> bool {
        self.blocks[place].has(node)
    }

    /// Lanes that the step still waits for.
    pub fn missing(&self) -> Vec<Lane> {
        let lanes = self.tree.root().lanes();
        lanes.filter(|lane| !self.totals.has(self.tree.leaf(*lane))).collect()
    }

    /// Whether every lane is in as a whole.
    pub fn is_complete(&self) -> bool {
        self.totals.whole().is_some()
    }

    /// Checks what a node's lanes say of themselves.
    ///
    /// # Errors
    /// If one of them said something else before: there would be blocks of both kinds, here or in
    /// another slot.
    pub fn check(&self, node: Node, shares: &[LaneShare]) -> Result<(), Refusal> {
        compare(&self.said, node, shares)
    }

    /// The same for the step before, which another slot may not have made yet.
    ///
    /// # Errors
    /// As [`LaneSum::check`].
    pub fn check_before(&self, node: Node, shares: &[LaneShare]) -> Result<(), Refusal> {
        compare(&self.said_before, node, shares)
    }

    /// Takes checked blocks of a node's lanes, by their places.
    pub fn take(&mut self, node: Node, shares: &[LaneShare], blocks: Vec<(usize, Finite)>) {
        self.said.extend(node.lanes().zip(shares.iter().copied()));
        for (place, values) in blocks {
            self.put(place, node, Some(values));
        }
    }

    /// Takes the rest of a contribution, whose blocks are all in.
    pub fn close(&mut self, node: Node, shares: &[LaneShare], total: Option<Total>) {
        self.said.extend(node.lanes().zip(shares.iter().copied()));
        if total.is_none() {
            (0..self.blocks.len()).for_each(|place| self.put(place, node, None));
        }
        self.totals.put(node, total, Total::add);
    }

    fn put(&mut self, place: usize, node: Node, values: Option<Finite>) {
        let sums = &mut self.blocks[place];
        if sums.has(node) {
            return;
        }
        sums.put(node, values, |left, right| left.add(&right, self.codec));
        if let Some(Some(_)) = sums.whole() {
            self.ready.push(place);
        }
    }

    /// Whether a block is ready to be taken out.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The sum of a block over all lanes, unless it was taken out or has no record.
    pub fn sum(&self, place: usize) -> Option<&Finite> {
        self.blocks[place].whole()?.as_ref()
    }

    /// Takes out the sum of a block that all lanes are in of.
    pub fn take_ready(&mut self) -> Option<(usize, Finite)> {
        let place = self.ready.pop()?;
        Some((place, self.blocks[place].take_whole()?))
    }

    /// Records of all lanes, once each of them said how many it has.
    pub fn records(&self) -> u64 {
        self.said.values().map(|share| share.records).fold(0, u64::saturating_add)
    }

    /// The total over all lanes of a complete step; nothing if there is no record.
    pub fn total(&self) -> Option<Total> {
        *self.totals.whole()?
    }

    /// Begins the next step; returns whether it belongs to the next pass.
    pub fn roll(&mut self) -> PassEnd {
        self.said_before = std::mem::take(&mut self.said);
        let ending = self.said_before.iter().filter(|(_, share)| share.end == LaneEnd::LastOfPass);
        self.ended.extend(ending.map(|(lane, _)| *lane));
        let over = self.ended.len() == self.tree.root().lanes().count();
        if over {
            self.ended.clear();
        }
        self.begin();
        if over { PassEnd::Over } else { PassEnd::GoesOn }
    }

    fn begin(&mut self) {
        self.totals = LaneSums::new(self.tree);
        self.blocks.fill(LaneSums::new(self.tree));
        self.ready.clear();
        for lane in self.ended.clone() {
            self.close(self.tree.leaf(lane), &[], None);
        }
    }
}

fn compare(said: &Said, node: Node, shares: &[LaneShare]) -> Result<(), Refusal> {
    let mut both = node.lanes().zip(shares).map(|(lane, share)| (lane, said.get(&lane), share));
    // Which records come later is none of the gradient's.
    let is_other = |said: &LaneShare, share: &LaneShare| {
        (said.records, said.checksum) != (share.records, share.checksum)
    };
    match both.find(|(_, said, share)| said.is_some_and(|said| is_other(said, share))) {
        Some((lane, ..)) => Err(Refusal::OtherShare { lane }),
        None => Ok(()),
    }
}

/// Whether a step was the last one of its pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassEnd {
    GoesOn,
    Over,
}
