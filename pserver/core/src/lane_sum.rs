//! The sum over the lanes of one step, always along the same tree.
//!
//! Each block is added on arrival, while it is in cache. Lanes may therefore be complete for some blocks
//! and missing for others, including blocks of a push that was cut off: a trainer that computes those
//! lanes again sends the same bits and the same shares.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::Lane;
use steadfast_common::records::contribution::{LaneEnd, LaneShare};
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::lane_tree::{LaneSums, LaneTree, Node};

use crate::contribution::{Divisor, Refusal, Total, ValidatedBlock};

/// The shares that lanes declared.
type Shares = BTreeMap<Lane, LaneShare>;

/// The contributions to the current step.
#[derive(Clone, Debug)]
pub struct LaneSum {
    /// The encoding whose arithmetic adds lanes.
    codec: Codec,
    tree: LaneTree,
    /// Lanes exhausted in an earlier step of this pass.
    exhausted: BTreeSet<Lane>,
    /// The shares of lanes of which at least one block was received.
    shares: Shares,
    /// The shares of the previous step.
    previous_shares: Shares,
    /// Totals of completely received contributions.
    totals: LaneSums<Total>,
    /// Sums of blocks, in the shard's order.
    blocks: Vec<LaneSums<ValidatedBlock>>,
    /// Blocks that have all lanes and whose sums were not taken yet.
    ready: Vec<usize>,
}

impl LaneSum {
    /// Creates the sum of `blocks` blocks over `lanes` lanes, less the `exhausted` lanes.
    pub fn new(lanes: u32, exhausted: BTreeSet<Lane>, codec: Codec, blocks: usize) -> Self {
        let tree = LaneTree::new(lanes);
        let mut new = Self {
            codec,
            tree,
            exhausted,
            shares: Shares::new(),
            previous_shares: Shares::new(),
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
    pub fn exhausted(&self) -> &BTreeSet<Lane> {
        &self.exhausted
    }

    /// Returns whether every lane of a node was completely received or is exhausted.
    pub fn has(&self, node: Node) -> bool {
        self.totals.has(node)
    }

    /// Returns whether every lane of a node was received for the block at index `place` of the shard.
    pub fn has_block(&self, node: Node, place: usize) -> bool {
        self.blocks[place].has(node)
    }

    /// Returns the lanes that the step still waits for.
    pub fn missing(&self) -> Vec<Lane> {
        let lanes = self.tree.root().lanes();
        lanes.filter(|lane| !self.totals.has(self.tree.leaf(*lane))).collect()
    }

    /// Returns whether every lane of the step was completely received.
    pub fn is_complete(&self) -> bool {
        self.totals.whole().is_some()
    }

    /// Checks the shares of a node's lanes against those declared before.
    ///
    /// # Errors
    /// If a lane declared another share before: its blocks, here or in another slot, would then reflect
    /// different records.
    pub fn check(&self, node: Node, shares: &[LaneShare]) -> Result<(), Refusal> {
        check_shares(&self.shares, node, shares)
    }

    /// Checks shares against those of the previous step, which another slot may not have completed yet.
    ///
    /// # Errors
    /// As [`LaneSum::check`].
    pub fn check_previous(&self, node: Node, shares: &[LaneShare]) -> Result<(), Refusal> {
        check_shares(&self.previous_shares, node, shares)
    }

    /// Adds validated blocks of a node's lanes at their indices.
    pub fn add(&mut self, node: Node, shares: &[LaneShare], blocks: Vec<(usize, ValidatedBlock)>) {
        self.shares.extend(node.lanes().zip(shares.iter().copied()));
        for (place, values) in blocks {
            self.add_block(place, node, Some(values));
        }
    }

    /// Completes a contribution whose blocks were all received.
    pub fn complete(&mut self, node: Node, shares: &[LaneShare], total: Option<Total>) {
        self.shares.extend(node.lanes().zip(shares.iter().copied()));
        if total.is_none() {
            (0..self.blocks.len()).for_each(|place| self.add_block(place, node, None));
        }
        self.totals.put(node, total, Total::add);
    }

    fn add_block(&mut self, place: usize, node: Node, values: Option<ValidatedBlock>) {
        let sums = &mut self.blocks[place];
        if sums.has(node) {
            return;
        }
        sums.put(node, values, |left, right| left.add(&right, self.codec));
        if let Some(Some(_)) = sums.whole() {
            self.ready.push(place);
        }
    }

    /// Returns whether the sum of some block has all lanes and was not taken yet.
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

    /// Returns what the sums over all lanes are divided by; complete once every lane declared its share. Weights are
    /// added in the order of lanes, however they were pushed.
    pub fn divisor(&self) -> Divisor {
        let records = self.shares.values().map(|share| u64::from(share.records)).sum();
        let weight = self.shares.values().map(LaneShare::weight).sum();
        Divisor { records, weight }
    }

    /// Returns the share of every lane of a complete step; an exhausted lane has no records.
    pub fn all_shares(&self) -> Arc<[LaneShare]> {
        let none = LaneShare { records: 0, checksum: 0, end: LaneEnd::LastOfPass, weight: None };
        let lanes = self.tree.root().lanes();
        lanes.map(|lane| self.shares.get(&lane).copied().unwrap_or(none)).collect()
    }

    /// Returns the total over all lanes of a complete step; `None` without records.
    pub fn total(&self) -> Option<&Total> {
        self.totals.whole()?.as_ref()
    }

    /// Takes the total over all lanes of a complete step.
    pub fn take_total(&mut self) -> Option<Total> {
        self.totals.take_whole()
    }

    /// Begins the next step; returns whether the pass has ended.
    pub fn begin_next(&mut self) -> PassState {
        self.previous_shares = std::mem::take(&mut self.shares);
        let ending =
            self.previous_shares.iter().filter(|(_, share)| share.end == LaneEnd::LastOfPass);
        self.exhausted.extend(ending.map(|(lane, _)| *lane));
        let has_ended = self.exhausted.len() == self.tree.root().lanes().count();
        if has_ended {
            self.exhausted.clear();
        }
        self.begin();
        if has_ended { PassState::Ended } else { PassState::Continues }
    }

    fn begin(&mut self) {
        self.totals = LaneSums::new(self.tree);
        self.blocks.fill(LaneSums::new(self.tree));
        self.ready.clear();
        for lane in self.exhausted.clone() {
            self.complete(self.tree.leaf(lane), &[], None);
        }
    }
}

fn check_shares(known: &Shares, node: Node, shares: &[LaneShare]) -> Result<(), Refusal> {
    for (lane, share) in node.lanes().zip(shares) {
        // Only the records determine the gradient; whether the lane ends does not matter here.
        let named = |it: &LaneShare| (it.records, it.checksum, it.weight.map(f64::to_bits));
        let conflicts = |known: &LaneShare| named(known) != named(share);
        if known.get(&lane).is_some_and(conflicts) {
            return Err(Refusal::ConflictingShare { lane });
        }
    }
    Ok(())
}

/// Whether the pass continues after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassState {
    Continues,
    Ended,
}
