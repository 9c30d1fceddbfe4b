//! The blocks of one slot: values, optimizer state, and the records applied to them.
//!
//! Blocks are reference-counted: readers and checkpoints hold references. An update changes a block in
//! place, or a copy of it while there are other references.

use std::collections::BTreeSet;
use std::sync::Arc;

use steadfast_common::applied_records::{AppliedRecords, RangeStatus, RecordRange};
use steadfast_common::compression::Codec;
use steadfast_common::ids::{Lane, Pass, Slot, Version};
use steadfast_common::lane_tree::Node;
use steadfast_common::layout::{Block, Layout};
use steadfast_common::spec::{JobSpec, LearningRateSpec, Mode, OptimizerSpec};

use crate::buffer_pool::BufferPool;
use crate::contribution::{
    Contributed, Contribution, LaneEnd, LaneShare, Refusal, ValidatedBlock, check_records, places,
};
use crate::lane_sum::{LaneSum, PassEnd};
use crate::learning_rate::learning_rate;
use crate::optimizer::Optimizer;
use crate::update::{Mean, Update, squares};
use crate::values::Values;

/// The settings of a job that determine its updates.
#[derive(Clone, Debug)]
pub struct Rules {
    pub mode: Mode,
    pub lanes: u32,
    pub optimizer: OptimizerSpec,
    pub learning_rate: LearningRateSpec,
    /// Encoding of gradients, and the arithmetic that adds them.
    pub codec: Codec,
}

impl Rules {
    /// Returns the rules of a job.
    pub fn new(spec: &JobSpec) -> Self {
        Self {
            mode: spec.mode,
            lanes: spec.sync.lanes,
            optimizer: spec.optimizer.clone(),
            learning_rate: spec.learning_rate.clone(),
            codec: spec.gradients.codec(),
        }
    }
}

/// The training position of a shard.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Position {
    pub version: Version,
    pub pass: Pass,
    /// The version at the start of the pass.
    pub pass_start: Version,
    /// Number of records that the values reflect.
    pub examples: u64,
    /// Mean loss per record in the last update.
    pub loss: Option<f64>,
}

/// The complete state of a shard, by reference: the content of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardSnapshot {
    pub position: Position,
    /// Number of updates so far; steps without records make none.
    pub updates: u64,
    /// Lanes exhausted in the current pass.
    pub ended: BTreeSet<Lane>,
    /// Applied records of the blocks; blocks with the same applied records share one entry. There is more
    /// than one entry only after blocks of several slots were combined in asynchronous training.
    pub counts: Vec<AppliedRecords>,
    pub blocks: Vec<SnapshotBlock>,
}

/// One block of a [`ShardSnapshot`].
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotBlock {
    pub number: u32,
    /// Index of the block's entry in [`ShardSnapshot::counts`].
    pub count: usize,
    pub values: Arc<Vec<f32>>,
    /// One vector per state name of the optimizer.
    pub state: Arc<Vec<Vec<f32>>>,
}

/// All values at one version, by reference.
#[derive(Clone, Debug)]
pub struct Parameters {
    pub position: Position,
    pub blocks: Arc<Vec<(u32, Block)>>,
    /// One vector per block.
    pub values: Vec<Arc<Vec<f32>>>,
}

/// The number and values of a block that was updated before its step completed.
pub type EarlyBlock = (u32, Arc<Vec<f32>>);

/// The blocks of one slot.
#[derive(Debug)]
pub struct Shard {
    layout: Arc<Layout>,
    rules: Rules,
    optimizer: Optimizer,
    blocks: Arc<Vec<(u32, Block)>>,
    values: Vec<Values>,
    state: Vec<Arc<Vec<Vec<f32>>>>,
    position: Position,
    updates: u64,
    counts: Vec<AppliedRecords>,
    /// Index of each block's entry in `counts`.
    count_of: Vec<usize>,
    step: LaneSum,
    /// Indices of the blocks updated by the current step before the step is complete.
    early: Vec<usize>,
    memory: BufferPool,
}

impl Shard {
    /// Returns the numbers and locations of a slot's blocks.
    pub fn blocks_of(layout: &Layout, slot: Slot, slots: u32) -> Vec<(u32, Block)> {
        let numbers = layout.blocks_of(slot, slots);
        numbers.into_iter().map(|number| (number, layout.blocks()[number as usize])).collect()
    }

    /// Creates a shard with initial values, one vector for each of the slot's blocks in order.
    pub fn new(
        layout: Arc<Layout>,
        blocks: Vec<(u32, Block)>,
        values: Vec<Vec<f32>>,
        rules: Rules,
    ) -> Self {
        let optimizer = Optimizer::new(&rules.optimizer);
        let snapshot = ShardSnapshot {
            position: Position::default(),
            updates: 0,
            ended: BTreeSet::new(),
            counts: vec![AppliedRecords::default()],
            blocks: blocks
                .iter()
                .zip(values)
                .map(|((number, _), values)| SnapshotBlock {
                    number: *number,
                    count: 0,
                    state: Arc::new(optimizer.initial_state(&values)),
                    values: Arc::new(values),
                })
                .collect(),
        };
        Self::restore(layout, blocks, snapshot, rules)
    }

    /// Restores a shard from a snapshot. `snapshot.blocks` are those of `blocks`, in the same order.
    pub fn restore(
        layout: Arc<Layout>,
        blocks: Vec<(u32, Block)>,
        snapshot: ShardSnapshot,
        rules: Rules,
    ) -> Self {
        Self {
            optimizer: Optimizer::new(&rules.optimizer),
            step: LaneSum::new(rules.lanes, snapshot.ended, rules.codec, blocks.len()),
            early: Vec::new(),
            values: snapshot.blocks.iter().map(|block| Values::new(block.values.clone())).collect(),
            count_of: snapshot.blocks.iter().map(|block| block.count).collect(),
            state: snapshot.blocks.into_iter().map(|block| block.state).collect(),
            position: snapshot.position,
            updates: snapshot.updates,
            counts: snapshot.counts,
            layout,
            rules,
            blocks: Arc::new(blocks),
            memory: BufferPool::default(),
        }
    }

    /// Returns the layout of the whole model.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns this shard's blocks, in order.
    pub fn blocks(&self) -> &Arc<Vec<(u32, Block)>> {
        &self.blocks
    }

    /// Returns the buffer pool for contributions.
    pub fn memory(&self) -> &BufferPool {
        &self.memory
    }

    /// Returns the encoding of contributions.
    pub fn codec(&self) -> Codec {
        self.rules.codec
    }

    /// Returns the current position.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Returns the current values.
    pub fn parameters(&self) -> Parameters {
        Parameters {
            position: self.position.clone(),
            blocks: self.blocks.clone(),
            values: self.values.iter().map(|it| it.present().clone()).collect(),
        }
    }

    /// Returns the lanes that the current step waits for.
    pub fn missing(&self) -> Vec<Lane> {
        self.step.missing()
    }

    /// Takes a snapshot, by reference. Between [`Contributed::Complete`] and [`Shard::finish_step`] the
    /// state is inconsistent; call it only after `finish_step`.
    pub fn snapshot(&self) -> ShardSnapshot {
        let blocks = self.blocks.iter().zip(&self.count_of).zip(&self.values).zip(&self.state);
        ShardSnapshot {
            position: self.position.clone(),
            updates: self.updates,
            ended: self.step.ended().clone(),
            counts: self.counts.clone(),
            blocks: blocks
                .map(|((((number, _), count), values), state)| SnapshotBlock {
                    number: *number,
                    count: *count,
                    values: values.present().clone(),
                    state: state.clone(),
                })
                .collect(),
        }
    }

    /// Adds some blocks of a contribution of the lanes starting at `first` to the step that begins at
    /// `version`: the sum of a node of the [`LaneTree`](steadfast_common::lane_tree::LaneTree), with the
    /// share of each lane. They take effect once [`Shard::contribute`] receives the rest, from this push or
    /// from another one for the same lanes.
    ///
    /// # Errors
    /// See [`Refusal`]; on error nothing has changed.
    pub fn take_part(
        &mut self,
        version: Version,
        first: Lane,
        shares: &[LaneShare],
        blocks: Vec<ValidatedBlock>,
    ) -> Result<(), Refusal> {
        let Some(node) = self.open(version, first, shares)? else { return Ok(()) };
        let placed = places(blocks, &self.blocks)?;
        check_count(shares, placed.len(), self.blocks.len())?;
        self.step.take(node, shares, placed);
        Ok(())
    }

    /// Adds a contribution of lanes to a step, or the blocks of it that [`Shard::take_part`] has not
    /// received. The caller calls [`Shard::finish_step`] after [`Contributed::Complete`].
    ///
    /// # Errors
    /// See [`Refusal`]; on error nothing has changed.
    pub fn contribute(
        &mut self,
        version: Version,
        first: Lane,
        shares: &[LaneShare],
        contribution: Contribution,
    ) -> Result<Contributed, Refusal> {
        let Some(node) = self.open(version, first, shares)? else {
            return Ok(Contributed::Duplicate);
        };
        let total = contribution.total();
        let placed = places(contribution.blocks, &self.blocks)?;
        let (found, wanted) = (placed.len(), self.blocks.len());
        check_count(shares, found, wanted)?;
        let is_given = |place: &usize| placed.binary_search_by_key(place, |(it, _)| *it).is_ok();
        let mut missing = (0..wanted).filter(|place| !self.step.has_block(node, *place));
        if total.is_some() && !missing.all(|place| is_given(&place)) {
            return Err(Refusal::WrongBlocks { found, wanted });
        }
        check_records(shares, contribution.records, contribution.checksum)?;
        self.step.take(node, shares, placed);
        self.step.close(node, shares, total);
        Ok(if self.step.is_complete() { Contributed::Complete } else { Contributed::Waiting })
    }

    /// Returns the node of a contribution to the current step, unless it was completely received before.
    fn open(
        &self,
        version: Version,
        first: Lane,
        shares: &[LaneShare],
    ) -> Result<Option<Node>, Refusal> {
        if self.rules.mode != Mode::Sync {
            return Err(Refusal::WrongMode("asynchronous"));
        }
        let count = shares.len();
        let node = u32::try_from(count).ok().and_then(|it| self.step.tree().node(first, it));
        let lanes = self.rules.lanes;
        let node = node.ok_or(Refusal::NoSuchNode { first, count, lanes })?;
        if self.position.version < version {
            return Err(Refusal::Ahead { found: version, present: self.position.version });
        }
        if version < self.position.version {
            if version.0 + 1 == self.position.version.0 {
                self.step.check_before(node, shares)?;
            }
            return Ok(None);
        }
        for (lane, share) in node.lanes().zip(shares) {
            match (self.step.ended().contains(&lane), share) {
                (true, LaneShare { records: 1.., .. }) => return Err(Refusal::LaneEnded { lane }),
                (false, LaneShare { records: 0, end: LaneEnd::MoreToCome, .. }) => {
                    return Err(Refusal::EmptyLane { lane });
                }
                (true | false, LaneShare { .. }) => {}
            }
        }
        // Also for complete contributions: another slot may lack this one and accept the other.
        self.step.check(node, shares)?;
        Ok((!self.step.has(node)).then_some(node))
    }

    /// Whether every lane of the current step was received, so that [`Shard::finish_step`] may be called.
    pub fn is_step_complete(&self) -> bool {
        self.rules.mode == Mode::Sync && self.step.is_complete()
    }

    /// Returns, for each block, the squared norm of the complete step's *mean* gradient (after clipping by
    /// value), summed in order in `f64`.
    pub fn squares(&self) -> Vec<f64> {
        let mean = Mean::new(self.step.records(), self.rules.optimizer.clip_value);
        let sums = (0..self.blocks.len()).map(|place| self.step.sum(place));
        sums.map(|sum| sum.map_or(0.0, |sum| squares(mean, sum.values()))).collect()
    }

    /// Whether [`Shard::apply_early`] would update a block.
    pub fn has_early(&self) -> bool {
        self.rules.optimizer.clip_norm.is_none() && self.step.has_ready()
    }

    /// Whether some blocks were updated by a step that is not complete.
    pub fn is_under_way(&self) -> bool {
        !self.early.is_empty()
    }

    /// Returns the blocks that were updated by a step that is not complete, with their new values, in order
    /// of update.
    pub fn early(&self) -> Vec<EarlyBlock> {
        self.early_from(0)
    }

    fn early_from(&self, known: usize) -> Vec<EarlyBlock> {
        let value = |&place: &usize| (self.blocks[place].0, self.values[place].present().clone());
        self.early[known..].iter().map(value).collect()
    }

    /// Applies the current step to the blocks that have all lanes, before the step is complete, and returns
    /// those blocks. Their values are provisional until the step is complete. Does nothing in jobs that clip
    /// by global norm, which requires all blocks.
    pub fn apply_early(&mut self) -> Vec<EarlyBlock> {
        let known = self.early.len();
        if self.has_early() {
            self.apply_ready(None);
        }
        self.early_from(known)
    }

    fn apply_ready(&mut self, norm: Option<f64>) {
        let OptimizerSpec { clip_value, clip_norm, .. } = self.rules.optimizer;
        let rate = learning_rate(&self.rules.learning_rate, self.updates);
        let mean = Mean::new(self.step.records(), clip_value).shrunk(norm, clip_norm);
        let update = Update { optimizer: &self.optimizer, mean, rate, number: self.updates + 1 };
        while let Some((place, sum)) = self.step.take_ready() {
            let state = Arc::make_mut(&mut self.state[place]);
            update.apply(sum.values(), &mut self.values[place], state);
            self.early.push(place);
        }
    }

    /// Applies the complete step and publishes the next version. `norm` is the global norm of the mean
    /// gradient over all slots; required if the job clips by it.
    pub fn finish_step(&mut self, norm: Option<f64>) {
        debug_assert!(self.step.is_complete());
        self.apply_ready(norm);
        self.early.clear();
        let (mut records, mut checksum) = (0, 0);
        if let Some(total) = self.step.total() {
            (records, checksum) = (total.records, total.checksum);
            self.updates += 1;
            self.position.loss = Some(total.loss_sum / records as f64);
        }
        let pass = self.position.pass;
        self.counts.iter_mut().for_each(|counted| counted.count(pass, records, checksum));
        self.position.examples += records;
        self.position.version = Version(self.position.version.0 + 1);
        if self.step.roll() == PassEnd::Over {
            self.position.pass = Pass(self.position.pass.0 + 1);
            self.position.pass_start = self.position.version;
        }
    }

    /// Applies a push at once to the blocks that do not reflect its records yet: to all or none of them,
    /// unless the shard combines blocks of several slots.
    ///
    /// # Errors
    /// See [`Refusal`]; on error nothing has changed.
    pub fn apply(
        &mut self,
        range: &RecordRange,
        contribution: Contribution,
    ) -> Result<Contributed, Refusal> {
        if self.rules.mode != Mode::Async {
            return Err(Refusal::WrongMode("synchronous"));
        }
        let named = u64::from(range.to.saturating_sub(range.from));
        if named != contribution.records || named == 0 {
            return Err(Refusal::OtherRecords { records: contribution.records, named });
        }
        let mut fresh = Vec::new();
        for counted in &self.counts {
            fresh.push(match counted.classify(range) {
                RangeStatus::Fresh => true,
                RangeStatus::Duplicate => false,
                RangeStatus::Gap { counted } => {
                    return Err(Refusal::Gap { task: range.task, from: range.from, counted });
                }
            });
        }
        if !fresh.contains(&true) {
            return Ok(Contributed::Duplicate);
        }
        let Contribution { records, loss_sum, checksum, blocks } = contribution;
        let (placed, wanted) = (places(blocks, &self.blocks)?, self.blocks.len());
        if placed.len() != wanted {
            return Err(Refusal::WrongBlocks { found: placed.len(), wanted });
        }
        let counts = self.counts.iter_mut().zip(&fresh);
        for (counted, _) in counts.filter(|(_, is_fresh)| **is_fresh) {
            counted.apply_range(range, checksum);
        }
        self.apply_blocks(records, placed, &fresh);
        self.position.loss = Some(loss_sum / records as f64);
        self.position.examples = self.counts.iter().map(AppliedRecords::records).min().unwrap_or(0);
        self.position.pass = self.position.pass.max(range.pass);
        Ok(Contributed::Complete)
    }

    fn apply_blocks(&mut self, records: u64, placed: Vec<(usize, ValidatedBlock)>, fresh: &[bool]) {
        let rate = learning_rate(&self.rules.learning_rate, self.updates);
        self.updates += 1;
        let mean = Mean::new(records, self.rules.optimizer.clip_value);
        let update = Update { optimizer: &self.optimizer, mean, rate, number: self.updates };
        for (place, sum) in placed {
            if fresh[self.count_of[place]] {
                let state = Arc::make_mut(&mut self.state[place]);
                update.apply(sum.values(), &mut self.values[place], state);
            }
        }
        self.position.version = Version(self.position.version.0 + 1);
    }
}

/// Checks that a contribution without records has no blocks, and that none has more than the shard.
fn check_count(shares: &[LaneShare], found: usize, blocks: usize) -> Result<(), Refusal> {
    let wanted = if shares.iter().all(|share| share.records == 0) { 0 } else { blocks };
    if found <= wanted { Ok(()) } else { Err(Refusal::WrongBlocks { found, wanted }) }
}
