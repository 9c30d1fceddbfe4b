//! The blocks of one slot: values, optimizer state, and the record of what they reflect.
//!
//! Blocks are reference-counted. A reader or a checkpoint takes references; an update leaves a block as
//! it is, and makes another one, only while somebody else still holds it.

use std::collections::BTreeSet;
use std::sync::Arc;

use steadfast_common::ids::{Lane, Pass, Slot, Version};
use steadfast_common::layout::{Block, Layout};
use steadfast_common::spec::{JobSpec, LearningRateSpec, Mode, OptimizerSpec};
use steadfast_common::tally::{Counted, TaskPiece, Verdict};

use crate::contribution::{Contributed, Contribution, LaneEnd, Refusal};
use crate::lane_sum::{LaneSum, PassEnd, StepTotal};
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
}

impl Rules {
    /// The rules of a job.
    pub fn new(spec: &JobSpec) -> Self {
        Self {
            mode: spec.mode,
            lanes: spec.sync.lanes,
            optimizer: spec.optimizer.clone(),
            learning_rate: spec.learning_rate.clone(),
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
        let lens: Vec<usize> = match rules.mode {
            Mode::Sync => blocks.iter().map(|(_, block)| block.len).collect(),
            Mode::Async => Vec::new(),
        };
        Self {
            optimizer: Optimizer::new(&rules.optimizer),
            step: LaneSum::new(rules.lanes, cut.ended, &lens),
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

    /// Takes what `lane` contributes to the step from `version` on. After
    /// [`Contributed::Complete`] the caller calls [`Shard::finish_step`].
    ///
    /// # Errors
    /// See [`Refusal`]; nothing has changed then.
    pub fn contribute(
        &mut self,
        version: Version,
        lane: Lane,
        contribution: Contribution,
        end: LaneEnd,
    ) -> Result<Contributed, Refusal> {
        if self.rules.mode != Mode::Sync {
            return Err(Refusal::WrongMode("asynchronous"));
        }
        if self.rules.lanes <= lane.0 {
            return Err(Refusal::NoSuchLane { lane, lanes: self.rules.lanes });
        }
        if self.position.version < version {
            return Err(Refusal::Ahead { found: version, present: self.position.version });
        }
        // `has` counts lanes that ended earlier as in, so that they need no contribution.
        let ended = self.step.ended().contains(&lane);
        if version < self.position.version || (self.step.has(lane) && !ended) {
            return Ok(Contributed::Duplicate);
        }
        if ended && contribution.records == 0 {
            return Ok(Contributed::Duplicate);
        }
        if ended {
            return Err(Refusal::LaneEnded { lane });
        }
        if contribution.records == 0 && end == LaneEnd::MoreToCome {
            return Err(Refusal::EmptyLane { lane });
        }
        contribution.check(&self.blocks)?;
        self.step.take(lane, contribution, end);
        Ok(if self.step.is_complete() { Contributed::Complete } else { Contributed::Waiting })
    }

    /// Whether every lane of the present step is in, so that [`Shard::finish_step`] may be called.
    pub fn is_step_complete(&self) -> bool {
        self.rules.mode == Mode::Sync && self.step.is_complete()
    }

    /// Squared norm of each block of the complete step's *mean* gradient (after clipping by
    /// value), summed from the first value to the last in `f64`.
    pub fn squares(&self) -> Vec<f64> {
        let mean = Mean::new(self.step.total().records, self.rules.optimizer.clip_value);
        self.step.sum().iter().map(|sum| squares(mean, sum)).collect()
    }

    /// Applies the complete step and publishes the next version. `norm` is the global norm of the
    /// mean gradient over all slots, wanted when the job clips by it.
    pub fn finish_step(&mut self, norm: Option<f64>) {
        debug_assert!(self.step.is_complete());
        let StepTotal { records, loss_sum, checksum } = self.step.total();
        if 0 < records {
            let OptimizerSpec { clip_value, clip_norm, .. } = self.rules.optimizer;
            let rate = learning_rate(&self.rules.learning_rate, self.updates);
            self.updates += 1;
            let mean = Mean::new(records, clip_value).shrunk(norm, clip_norm);
            let update = Update { optimizer: &self.optimizer, mean, rate, number: self.updates };
            let sums = self.step.sum();
            for ((values, state), sum) in self.values.iter_mut().zip(&mut self.state).zip(sums) {
                let state = Arc::make_mut(state);
                update.apply(sum, values, state);
            }
            self.position.loss = Some(loss_sum / records as f64);
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
        let named = piece.to.saturating_sub(piece.from);
        if u64::from(named) != contribution.records || named == 0 {
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
