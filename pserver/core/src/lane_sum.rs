//! The sum of one step's lanes, always in the order of the lanes.
//!
//! Addition of floats is not associative, so the order is part of the result. A lane that arrives
//! early waits in a buffer until all lanes before it are in.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::Lane;

use crate::contribution::{Contribution, LaneEnd};

/// What has been contributed to the present step.
#[derive(Clone, Debug, Default)]
pub struct LaneSum {
    lanes: u32,
    /// Lanes that ended in an earlier step of this pass.
    ended: BTreeSet<Lane>,
    /// Lanes that end with this step.
    ending: BTreeSet<Lane>,
    /// The next lane to be added.
    next: u32,
    early: BTreeMap<Lane, Contribution>,
    /// Sum of the lanes before `next`, one vector a block; means nothing before there is a record.
    sum: Vec<Vec<f32>>,
    total: StepTotal,
}

/// What the lanes of a step hold together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTotal {
    pub records: u64,
    pub loss_sum: f64,
    /// Sum of the records' checksums.
    pub checksum: u64,
}

impl LaneSum {
    /// Waits for `lanes` lanes less those that have `ended`, over blocks of the given lengths.
    pub fn new(lanes: u32, ended: BTreeSet<Lane>, block_lens: &[usize]) -> Self {
        let sum = block_lens.iter().map(|len| vec![0.0; *len]).collect();
        let mut new = Self { lanes, ended, sum, ..Self::default() };
        new.skip_ended();
        new
    }

    /// Lanes that ended in an earlier step of this pass.
    pub fn ended(&self) -> &BTreeSet<Lane> {
        &self.ended
    }

    /// Whether `lane` has contributed to this step.
    pub fn has(&self, lane: Lane) -> bool {
        lane.0 < self.next || self.early.contains_key(&lane)
    }

    /// Lanes that the step still waits for.
    pub fn missing(&self) -> Vec<Lane> {
        let open = (self.next..self.lanes).map(Lane);
        open.filter(|lane| !self.ended.contains(lane) && !self.early.contains_key(lane)).collect()
    }

    /// Whether every lane is in.
    pub fn is_complete(&self) -> bool {
        self.next == self.lanes
    }

    /// Takes a checked contribution of a lane that has not contributed yet.
    pub fn take(&mut self, lane: Lane, contribution: Contribution, end: LaneEnd) {
        if end == LaneEnd::LastOfPass {
            self.ending.insert(lane);
        }
        self.early.insert(lane, contribution);
        while let Some(contribution) = self.early.remove(&Lane(self.next)) {
            let is_first = self.total.records == 0;
            for (sum, block) in self.sum.iter_mut().zip(contribution.blocks) {
                if is_first {
                    block.into_memory().swap(sum);
                } else {
                    sum.iter_mut().zip(block.values()).for_each(|(sum, value)| *sum += value);
                }
            }
            self.total.records += contribution.records;
            self.total.loss_sum += contribution.loss_sum;
            self.total.checksum = self.total.checksum.wrapping_add(contribution.checksum);
            self.next += 1;
            self.skip_ended();
        }
    }

    fn skip_ended(&mut self) {
        while self.next < self.lanes && self.ended.contains(&Lane(self.next)) {
            self.next += 1;
        }
    }

    /// The sum over all lanes, one vector a block; means nothing if there is no record.
    pub fn sum(&self) -> &[Vec<f32>] {
        &self.sum
    }

    /// The records that were summed up.
    pub fn total(&self) -> StepTotal {
        self.total
    }

    /// Begins the next step; returns whether it belongs to the next pass.
    pub fn roll(&mut self) -> PassEnd {
        self.ended.append(&mut self.ending);
        let over = self.ended.len() == self.lanes as usize;
        if over {
            self.ended.clear();
        }
        self.total = StepTotal::default();
        self.next = 0;
        self.skip_ended();
        if over { PassEnd::Over } else { PassEnd::GoesOn }
    }
}

/// Whether a step was the last one of its pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassEnd {
    GoesOn,
    Over,
}
