//! The sum over the lanes of one step, always along the same tree.
//!
//! Each block is added on arrival, while it is in cache. Lanes may therefore be complete for some blocks
//! and missing for others, including blocks of a push that was cut off: a trainer that computes those
//! lanes again sends the same bits and the same shares.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::compression::Codec;
use steadfast_common::ids::Lane;
use steadfast_common::lane_tree::{LaneSums, LaneTree, Node};

use crate::contribution::{LaneEnd, LaneShare, Refusal, Total, ValidatedBlock};

/// The shares that lanes declared.
type Said = BTreeMap<Lane, LaneShare>;

/// The contributions to the current step.
#[derive(Clone, Debug)]
pub struct LaneSum {
    /// Its arithmetic adds lanes.
    codec: Codec,
    tree: LaneTree,
    /// Lanes exhausted in an earlier step of this pass.
    ended: BTreeSet<Lane>,
    /// The shares of lanes of which at least one block was received.
    said: Said,
    /// The shares of the previous step.
    said_before: Said,
    /// Totals of completely received contributions.
    totals: LaneSums<Total>,
    /// Sums of blocks, in the shard's order.
    blocks: Vec<LaneSums<ValidatedBlock>>,
    /// Blocks that have all lanes and whose sums were not taken yet.
    ready: Vec<usize>,
}

impl LaneSum {
    /// Creates the sum of `blocks` blocks over `lanes` lanes, less the exhausted lanes `ended`.
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

    /// Returns the tree along which lanes are added.
    pub fn tree(&self) -> LaneTree {
        self.tree
    }

    /// Returns the lanes exhausted in an earlier step of this pass.
    pub fn ended(&self) -> &BTreeSet<Lane> {
        &self.ended
    }

    /// Whether every lane of a node was completely received or is exhausted.
    pub fn has(&self, node: Node) -> bool {
        self.totals.has(node)
    }

    /// Whether every lane of a node was received for one block.
    pub fn has_block(&self, node: Node, place: usize) -> bool {
        self.blocks[place].has(node)
    }

    /// Returns the lanes that the step still waits for.
    pub fn missing(&self) -> Vec<Lane> {
        let lanes = self.tree.root().lanes();
        lanes.filter(|lane| !self.totals.has(self.tree.leaf(*lane))).collect()
    }

    /// Whether every lane was completely received.
    pub fn is_complete(&self) -> bool {
        self.totals.whole().is_some()
    }

    /// Checks the shares of a node's lanes against those declared before.
    ///
    /// # Errors
    /// If a lane declared another share before: its blocks, here or in another slot, would then reflect
    /// different records.
    pub fn check(&self, node: Node, shares: &[LaneShare]) -> Result<(), Refusal> {
        compare(&self.said, node, shares)
    }

    /// Checks shares against those of the previous step, which another slot may not have completed yet.
    ///
    /// # Errors
    /// As [`LaneSum::check`].
    pub fn check_before(&self, node: Node, shares: &[LaneShare]) -> Result<(), Refusal> {
        compare(&self.said_before, node, shares)
    }

    /// Adds validated blocks of a node's lanes at their indices.
    pub fn take(&mut self, node: Node, shares: &[LaneShare], blocks: Vec<(usize, ValidatedBlock)>) {
        self.said.extend(node.lanes().zip(shares.iter().copied()));
        for (place, values) in blocks {
            self.put(place, node, Some(values));
        }
    }

    /// Completes a contribution whose blocks were all received.
    pub fn close(&mut self, node: Node, shares: &[LaneShare], total: Option<Total>) {
        self.said.extend(node.lanes().zip(shares.iter().copied()));
        if total.is_none() {
            (0..self.blocks.len()).for_each(|place| self.put(place, node, None));
        }
        self.totals.put(node, total, Total::add);
    }

    fn put(&mut self, place: usize, node: Node, values: Option<ValidatedBlock>) {
        let sums = &mut self.blocks[place];
        if sums.has(node) {
            return;
        }
        sums.put(node, values, |left, right| left.add(&right, self.codec));
        if let Some(Some(_)) = sums.whole() {
            self.ready.push(place);
        }
    }

    /// Whether the sum of a block is ready to be taken.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Returns the sum of a block over all lanes, unless it was taken or has no records.
    pub fn sum(&self, place: usize) -> Option<&ValidatedBlock> {
        self.blocks[place].whole()?.as_ref()
    }

    /// Takes the sum of a block that has all lanes.
    pub fn take_ready(&mut self) -> Option<(usize, ValidatedBlock)> {
        let place = self.ready.pop()?;
        Some((place, self.blocks[place].take_whole()?))
    }

    /// Returns the number of records of all lanes; complete once every lane declared its share.
    pub fn records(&self) -> u64 {
        self.said.values().map(|share| share.records).fold(0, u64::saturating_add)
    }

    /// Returns the total over all lanes of a complete step; `None` without records.
    pub fn total(&self) -> Option<Total> {
        *self.totals.whole()?
    }

    /// Begins the next step; returns whether the pass is over.
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
    // Only the records determine the gradient; whether the lane ends does not matter here.
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
