//! The blocks of one slot: values, optimizer state, and the record of what they reflect.
//!
//! Blocks are reference-counted. A reader or a checkpoint takes references; an update leaves a block as
//! it is, and makes another one, only while somebody else still holds it.

use std::collections::BTreeSet;
use std::sync::Arc;

use steadfast_common::compression::Codec;
use steadfast_common::ids::{Lane, Pass, Slot, Version};
use steadfast_common::layout::{Block, Layout};
use steadfast_common::spec::{JobSpec, LearningRateSpec, Mode, OptimizerSpec};
use steadfast_common::tally::{Counted, TaskPiece, Verdict};

use crate::contribution::{Contributed, Contribution, LaneEnd, LaneShare, Refusal};
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
            step: LaneSum::new(rules.lanes, cut.ended, rules.codec),
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

    /// Takes what lanes from `first` on contribute to the step from `version` on: the sum of a node
    /// of the [`LaneTree`](steadfast_common::lane_tree::LaneTree), with the share of each lane. After
    /// [`Contributed::Complete`] the caller calls [`Shard::finish_step`].
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
            return Ok(Contributed::Duplicate);
        }
        for (lane, share) in node.lanes().zip(shares) {
            match (self.step.ended().contains(&lane), share) {
                (true, LaneShare { records: 1.., .. }) => return Err(Refusal::LaneEnded { lane }),
                (false, LaneShare { records: 0, end: LaneEnd::MoreToCome }) => {
                    return Err(Refusal::EmptyLane { lane });
                }
                (true | false, LaneShare { .. }) => {}
            }
        }
        let named = shares.iter().map(|it| it.records).fold(0, u64::saturating_add);
        if named != contribution.records {
            return Err(Refusal::OtherRecords { records: contribution.records, named });
        }
        if self.step.has(node) {
            return Ok(Contributed::Duplicate);
        }
        contribution.check(&self.blocks)?;
        self.step.take(node, shares, contribution);
        Ok(if self.step.is_complete() { Contributed::Complete } else { Contributed::Waiting })
    }

    /// Whether every lane of the present step is in, so that [`Shard::finish_step`] may be called.
    pub fn is_step_complete(&self) -> bool {
        self.rules.mode == Mode::Sync && self.step.is_complete()
    }

    /// Squared norm of each block of the complete step's *mean* gradient (after clipping by
    /// value), summed from the first value to the last in `f64`.
    pub fn squares(&self) -> Vec<f64> {
        let Some(step) = self.step.sum() else { return vec![0.0; self.blocks.len()] };
        let mean = Mean::new(step.records, self.rules.optimizer.clip_value);
        step.blocks.iter().map(|sum| squares(mean, sum.values())).collect()
    }

    /// Applies the complete step and publishes the next version. `norm` is the global norm of the
    /// mean gradient over all slots, wanted when the job clips by it.
    pub fn finish_step(&mut self, norm: Option<f64>) {
        debug_assert!(self.step.is_complete());
        let (mut records, mut checksum) = (0, 0);
        if let Some(step) = self.step.sum() {
            (records, checksum) = (step.records, step.checksum);
            let OptimizerSpec { clip_value, clip_norm, .. } = self.rules.optimizer;
            let rate = learning_rate(&self.rules.learning_rate, self.updates);
            self.updates += 1;
            let mean = Mean::new(records, clip_value).shrunk(norm, clip_norm);
            let update = Update { optimizer: &self.optimizer, mean, rate, number: self.updates };
            let blocks = self.values.iter_mut().zip(&mut self.state).zip(&step.blocks);
            for ((values, state), sum) in blocks {
                let state = Arc::make_mut(state);
                update.apply(sum.values(), values, state);
            }
            self.position.loss = Some(step.loss_sum / records as f64);
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
        contribution.check(&self.blocks)?;
        let counts = self.counts.iter_mut().zip(&fresh);
        for (counted, _) in counts.filter(|(_, is_fresh)| **is_fresh) {
            counted.count_piece(piece, contribution.checksum);
        }
        self.apply_blocks(contribution, &fresh);
        self.position.examples = self.counts.iter().map(Counted::records).min().unwrap_or(0);
        self.position.pass = self.position.pass.max(piece.pass);
        Ok(Contributed::Complete)
    }

    fn apply_blocks(&mut self, contribution: Contribution, fresh: &[bool]) {
        let rate = learning_rate(&self.rules.learning_rate, self.updates);
        self.updates += 1;
        let mean = Mean::new(contribution.records, self.rules.optimizer.clip_value);
        let update = Update { optimizer: &self.optimizer, mean, rate, number: self.updates };
        let blocks = self.values.iter_mut().zip(&mut self.state).zip(contribution.blocks);
        for (((values, state), sum), count) in blocks.zip(&self.count_of) {
            if fresh[*count] {
                let state = Arc::make_mut(state);
                update.apply(sum.values(), values, state);
            }
        }
        self.position.loss = Some(contribution.loss_sum / contribution.records as f64);
        self.position.version = Version(self.position.version.0 + 1);
    }
}
