//! The blocks of one slot: values, optimizer state, and the record of what they reflect.
//!
//! Blocks are reference-counted. A reader or a checkpoint takes references; an update leaves a block as
//! it is, and makes another one, only while somebody else still holds it.

use std::collections::BTreeSet;
use std::sync::Arc;

use steadfast_common::compression::Codec;
use steadfast_common::ids::{Lane, Pass, Slot, Version};
use steadfast_common::lane_tree::Node;
use steadfast_common::layout::{Block, Layout};
use steadfast_common::spec::{JobSpec, LearningRateSpec, Mode, OptimizerSpec};
use steadfast_common::tally::{Counted, TaskPiece, Verdict};

use crate::contribution::{
    Contributed, Contribution, Finite, LaneEnd, LaneShare, Refusal, check_records, places,
};
use crate::lane_sum::{LaneSum, PassEnd};
use crate::learning_rate::learning_rate;
use crate::memory::Memory;
use crate::optimizer::Optimizer;
use crate::update::{Mean, Update, squares};
use crate::values::Values;

/// How updates are made.
#[derive(Clone, Debug)]
pub struct Rules {
    pub mode: Mode,
    pub lanes: u32,
    pub optimizer: OptimizerSpec,
    pub learning_rate: LearningRateSpec,
    /// How gradients travel, and are added.
    pub codec: Codec,
}

impl Rules {
    /// The rules of a job.
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

/// How far a shard is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Position {
    pub version: Version,
    pub pass: Pass,
    /// The version at which the pass began.
    pub pass_start: Version,
    /// Records that the values reflect.
    pub examples: u64,
    /// Mean loss of a record in the last update.
    pub loss: Option<f64>,
}

/// Everything that a shard is, by reference: what a checkpoint holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Cut {
    pub position: Position,
    /// Updates so far; steps without a record make none.
    pub updates: u64,
    /// Lanes that ended in the present pass.
    pub ended: BTreeSet<Lane>,
    /// What the blocks reflect; blocks that reflect the same share one. There is more than one only
    /// after blocks of several slots came together under asynchronous training.
    pub counts: Vec<Counted>,
    pub blocks: Vec<CutBlock>,
}

/// One block of a [`Cut`].
#[derive(Clone, Debug, PartialEq)]
pub struct CutBlock {
    pub number: u32,
    /// Which of [`Cut::counts`] is the block's.
    pub count: usize,
    pub values: Arc<Vec<f32>>,
    /// One vector for each of the optimizer's state names.
    pub state: Arc<Vec<Vec<f32>>>,
}

/// All values at one version, by reference.
#[derive(Clone, Debug)]
pub struct Parameters {
    pub position: Position,
    pub blocks: Arc<Vec<(u32, Block)>>,
    /// One vector a block.
    pub values: Vec<Arc<Vec<f32>>>,
}

/// The number of a block, and its values.
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
    counts: Vec<Counted>,
    /// Which of `counts` is each block's.
    count_of: Vec<usize>,
    step: LaneSum,
    /// Places of the blocks that reflect the present step already, before the others do.
    early: Vec<usize>,
    memory: Memory,
}

impl Shard {
    /// The numbers of a slot's blocks, with their places.
    pub fn blocks_of(layout: &Layout, slot: Slot, slots: u32) -> Vec<(u32, Block)> {
        let numbers = layout.blocks_of(slot, slots);
        numbers.into_iter().map(|number| (number, layout.blocks()[number as usize])).collect()
    }

    /// A shard with first values, one vector for each of the slot's blocks in order.
    pub fn new(
        layout: Arc<Layout>,
        blocks: Vec<(u32, Block)>,
        values: Vec<Vec<f32>>,
        rules: Rules,
    ) -> Self {
        let optimizer = Optimizer::new(&rules.optimizer);
        let cut = Cut {
            position: Position::default(),
            updates: 0,
            ended: BTreeSet::new(),
            counts: vec![Counted::default()],
            blocks: blocks
                .iter()
                .zip(values)
                .map(|((number, _), values)| CutBlock {
                    number: *number,
                    count: 0,
                    state: Arc::new(optimizer.initial_state(&values)),
                    values: Arc::new(values),
                })
                .collect(),
        };
        Self::restore(layout, blocks, cut, rules)
    }

    /// A shard as it was cut. `cut.blocks` are those of `blocks`, in the same order.
    pub fn restore(layout: Arc<Layout>, blocks: Vec<(u32, Block)>, cut: Cut, rules: Rules) -> Self {
        Self {
            optimizer: Optimizer::new(&rules.optimizer),
            step: LaneSum::new(rules.lanes, cut.ended, rules.codec, blocks.len()),
            early: Vec::new(),
            values: cut.blocks.iter().map(|block| Values::new(block.values.clone())).collect(),
            count_of: cut.blocks.iter().map(|block| block.count).collect(),
            state: cut.blocks.into_iter().map(|block| block.state).collect(),
            position: cut.position,
            updates: cut.updates,
            counts: cut.counts,
            layout,
            rules,
            blocks: Arc::new(blocks),
            memory: Memory::default(),
        }
    }

    /// All parameters of the model.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// This shard's blocks, in order.
    pub fn blocks(&self) -> &Arc<Vec<(u32, Block)>> {
        &self.blocks
    }

    /// Memory for contributions.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// How contributions are encoded.
    pub fn codec(&self) -> Codec {
        self.rules.codec
    }

    /// How far the shard is.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// The present values.
    pub fn parameters(&self) -> Parameters {
        Parameters {
            position: self.position.clone(),
            blocks: self.blocks.clone(),
            values: self.values.iter().map(|it| it.present().clone()).collect(),
        }
    }

    /// Lanes that the present step waits for.
    pub fn missing(&self) -> Vec<Lane> {
        self.step.missing()
    }

    /// Everything, by reference. Between the last contribution of a step and its update there is
    /// no cut: call it after [`Contributed::Complete`] was followed by [`Shard::finish_step`].
    pub fn cut(&self) -> Cut {
        let blocks = self.blocks.iter().zip(&self.count_of).zip(&self.values).zip(&self.state);
        Cut {
            position: self.position.clone(),
            updates: self.updates,
            ended: self.step.ended().clone(),
            counts: self.counts.clone(),
            blocks: blocks
                .map(|((((number, _), count), values), state)| CutBlock {
                    number: *number,
                    count: *count,
                    values: values.present().clone(),
                    state: state.clone(),
                })
                .collect(),
        }
    }

    /// Takes some blocks of what lanes from `first` on contribute to the step from `version` on: the
    /// sum of a node of the [`LaneTree`](steadfast_common::lane_tree::LaneTree), with the share of each
    /// lane. They count once [`Shard::contribute`] takes the rest, or the same of somebody else; until
    /// then they wait.
    ///
    /// # Errors
    /// See [`Refusal`]; nothing has changed then.
    pub fn take_part(
        &mut self,
        version: Version,
        first: Lane,
        shares: &[LaneShare],
        blocks: Vec<Finite>,
    ) -> Result<(), Refusal> {
        let Some(node) = self.open(version, first, shares)? else { return Ok(()) };
        let placed = places(blocks, &self.blocks)?;
        check_count(shares, placed.len(), self.blocks.len())?;
        self.step.take(node, shares, placed);
        Ok(())
    }

    /// Takes what lanes contribute to a step, as [`Shard::take_part`] does, or what is left of it; then
    /// it counts. After [`Contributed::Complete`] the caller calls [`Shard::finish_step`].
    ///
    /// # Errors
    /// See [`Refusal`]; nothing has changed then.
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

    /// The node of a contribution to the present step, if it is not in as a whole.
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
        // Also of what is in as a whole: it may not be in another slot, which would take this instead.
        self.step.check(node, shares)?;
        Ok((!self.step.has(node)).then_some(node))
    }

    /// Whether every lane of the present step is in, so that [`Shard::finish_step`] may be called.
    pub fn is_step_complete(&self) -> bool {
        self.rules.mode == Mode::Sync && self.step.is_complete()
    }

    /// Squared norm of each block of the complete step's *mean* gradient (after clipping by
    /// value), summed from the first value to the last in `f64`.
    pub fn squares(&self) -> Vec<f64> {
        let mean = Mean::new(self.step.records(), self.rules.optimizer.clip_value);
        let sums = (0..self.blocks.len()).map(|place| self.step.sum(place));
        sums.map(|sum| sum.map_or(0.0, |sum| squares(mean, sum.values()))).collect()
    }

    /// Whether [`Shard::apply_early`] has something to do.
    pub fn has_early(&self) -> bool {
        self.rules.optimizer.clip_norm.is_none() && self.step.has_ready()
    }

    /// Whether some blocks reflect a step that is not complete.
    pub fn is_under_way(&self) -> bool {
        !self.early.is_empty()
    }

    /// The blocks that reflect a step that is not complete, with the values that they have then, in the
    /// order in which they came to it.
    pub fn early(&self) -> Vec<EarlyBlock> {
        self.early_from(0)
    }

    fn early_from(&self, known: usize) -> Vec<EarlyBlock> {
        let value = |&place: &usize| (self.blocks[place].0, self.values[place].present().clone());
        self.early[known..].iter().map(value).collect()
    }

    /// Applies the present step to the blocks that all lanes are in of, before the others are, and
    /// returns them: nobody may believe them before the step is complete. Nothing where jobs clip by
    /// norm, which needs them all.
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

    /// Applies the complete step and publishes the next version. `norm` is the global norm of the
    /// mean gradient over all slots, wanted when the job clips by it.
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

    /// Applies a push at once to the blocks that do not reflect its records yet: to all or none of
    /// them, unless blocks of several slots came together here.
    ///
    /// # Errors
    /// See [`Refusal`]; nothing has changed then.
    pub fn apply(
        &mut self,
        piece: &TaskPiece,
        contribution: Contribution,
    ) -> Result<Contributed, Refusal> {
        if self.rules.mode != Mode::Async {
            return Err(Refusal::WrongMode("synchronous"));
        }
        let named = u64::from(piece.to.saturating_sub(piece.from));
        if named != contribution.records || named == 0 {
            return Err(Refusal::OtherRecords { records: contribution.records, named });
        }
        let mut fresh = Vec::new();
        for counted in &self.counts {
            fresh.push(match counted.judge(piece) {
                Verdict::Fresh => true,
                Verdict::Duplicate => false,
                Verdict::Gap { counted } => {
                    return Err(Refusal::Gap { task: piece.task, from: piece.from, counted });
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
            counted.count_piece(piece, checksum);
        }
        self.apply_blocks(records, placed, &fresh);
        self.position.loss = Some(loss_sum / records as f64);
        self.position.examples = self.counts.iter().map(Counted::records).min().unwrap_or(0);
        self.position.pass = self.position.pass.max(piece.pass);
        Ok(Contributed::Complete)
    }

    fn apply_blocks(&mut self, records: u64, placed: Vec<(usize, Finite)>, fresh: &[bool]) {
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

/// Checks that there are no blocks without records, and no more than there are.
fn check_count(shares: &[LaneShare], found: usize, blocks: usize) -> Result<(), Refusal> {
    let wanted = if shares.iter().all(|share| share.records == 0) { 0 } else { blocks };
    if found <= wanted { Ok(()) } else { Err(Refusal::WrongBlocks { found, wanted }) }
}
