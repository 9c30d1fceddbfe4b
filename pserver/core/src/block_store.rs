//! The blocks of one slot: their values, optimizer state and applied records; and its tables.
//!
//! Blocks are reference-counted: readers and checkpoints hold references. An update changes a block in
//! place, or a copy of it while there are other references. Rows of tables are read by value.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::{Lane, Pass, Slot};
use steadfast_common::job::average::AVERAGE;
use steadfast_common::job::learning_rate::{learning_rate, reduced};
use steadfast_common::job::spec::OptimizerSpec;
use steadfast_common::records::applied_records::AppliedRecords;
use steadfast_common::records::position::Position;
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::{Block, Layout, UpdateRule};
use steadfast_common::tensor::placement::Placement;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::Rows;
use steadfast_pserver_storage::StorageError;

use crate::buffer_pool::BufferPool;
use crate::contribution::{Divisor, Refusal, ValidatedBlock};
use crate::optimizer::Optimizer;
use crate::rules::Rules;
use crate::tables::{Obsolete, RowUpdate, TableRows, Tables, TablesSnapshot};
use crate::update::{Mean, Measured, Update};
use crate::values::Values;

/// The complete state of a shard but its tables, by reference: the content of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardSnapshot {
    pub position: Position,
    /// Number of updates so far; steps without records make none.
    pub updates: u64,
    /// Lanes exhausted in the current pass (synchronous mode).
    pub exhausted: BTreeSet<Lane>,
    /// Applied records of the blocks; blocks with the same applied records share one entry. There is more
    /// than one entry only after blocks of several slots were combined in asynchronous training.
    pub applied: Vec<AppliedRecords>,
    pub blocks: Vec<SnapshotBlock>,
}

/// One block of a [`ShardSnapshot`].
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotBlock {
    pub number: u32,
    /// Index of the block's entry in [`ShardSnapshot::applied`].
    pub applied: usize,
    pub values: Arc<Vec<f32>>,
    /// One vector per state name of the optimizer.
    pub state: Arc<Vec<Vec<f32>>>,
}

impl ShardSnapshot {
    /// Creates the state of a slot before the first update, from the initial values of its blocks.
    ///
    /// # Errors
    /// If there is no space for rows of tables.
    pub fn initial(
        layout: &Layout,
        placement: &Placement,
        slot: Slot,
        values: Vec<Vec<f32>>,
        rules: &Rules,
    ) -> Result<(Self, TableRows), StorageError> {
        let optimizer = rules.optimizer();
        let blocks =
            placement.blocks_of(slot).iter().zip(values).map(|(number, values)| SnapshotBlock {
                number: *number,
                applied: 0,
                state: Arc::new(optimizer.initial_state(&values)),
                values: Arc::new(values),
            });
        let snapshot = Self {
            position: Position::default(),
            updates: 0,
            exhausted: BTreeSet::new(),
            applied: vec![AppliedRecords::default()],
            blocks: blocks.collect(),
        };
        Ok((snapshot, TableRows::new(layout, placement.ranges_of(slot), rules)?))
    }

    /// Replaces the state of the optimizer in the blocks for which one is given.
    ///
    /// # Errors
    /// [`Refusal`], if the vectors are not those of the optimizer, or do not fit a block.
    pub fn begin_with(
        &mut self,
        states: InitialStates,
        optimizer: &OptimizerSpec,
    ) -> Result<(), Refusal> {
        let InitialStates { mut names, mut blocks } = states;
        let own = Optimizer::new(optimizer).state_names();
        let given_vectors = names.len();
        let places: Vec<Option<usize>> =
            own.iter().map(|name| names.iter().position(|it| it == name)).collect();
        // An average of parameters begins anew.
        names.retain(|name| name != AVERAGE);
        if places.contains(&None) || !names.iter().all(|name| own.contains(name)) {
            return Err(Refusal::OtherStates { found: names, wanted: own });
        }
        for block in &mut self.blocks {
            let (number, len) = (block.number, block.values.len());
            let Some(given) = blocks.remove(&number) else { continue };
            let (found, wanted) = (given.len(), given_vectors * len);
            if found != wanted {
                let (found, wanted) = (found * size_of::<f32>(), wanted * size_of::<f32>());
                return Err(Refusal::WrongLength { block: number, found, wanted });
            }
            if !given.iter().all(|value| value.is_finite()) {
                return Err(Refusal::NotFinite { block: number });
            }
            let state = Arc::make_mut(&mut block.state);
            for (vector, place) in state.iter_mut().zip(places.iter().flatten()) {
                vector.copy_from_slice(&given[place * len..(place + 1) * len]);
            }
        }
        match blocks.first_key_value() {
            None => Ok(()),
            Some((block, _)) => Err(Refusal::UnexpectedBlock { block: *block }),
        }
    }
}

/// The state of the optimizer that blocks begin with, where they do not begin anew.
#[derive(Clone, Debug, Default)]
pub struct InitialStates {
    /// The names of the vectors.
    pub names: Vec<String>,
    /// The vectors of each block, one after the other, by number.
    pub blocks: BTreeMap<u32, Vec<f32>>,
}

/// All values at one version, by reference.
#[derive(Clone, Debug)]
pub struct Parameters {
    pub position: Position,
    pub blocks: Arc<Vec<(u32, Block)>>,
    /// One vector per block.
    pub values: Vec<Arc<Vec<f32>>>,
}

/// The blocks of one slot.
#[derive(Debug)]
pub struct BlockStore {
    layout: Arc<Layout>,
    rules: Rules,
    /// One rule for each block.
    optimizers: Vec<Optimizer>,
    blocks: Arc<Vec<(u32, Block)>>,
    values: Vec<Values>,
    state: Vec<Arc<Vec<Vec<f32>>>>,
    /// Index of each block's entry in `applied`.
    applied_of: Vec<usize>,
    buffers: BufferPool,
    tables: Tables,
    pub(crate) applied: Vec<AppliedRecords>,
    pub(crate) position: Position,
    pub(crate) updates: u64,
    /// How often evaluations have reduced the learning rate of the next update.
    pub(crate) reductions: u32,
}

impl BlockStore {
    /// Restores the blocks of a snapshot, which are blocks of `layout`, and its tables.
    pub(crate) fn restore(
        layout: Arc<Layout>,
        snapshot: ShardSnapshot,
        tables: TableRows,
        rules: Rules,
    ) -> Self {
        let ShardSnapshot { position, updates, applied, blocks, .. } = snapshot;
        let numbers = blocks.iter().map(|block| block.number);
        let located: Vec<(u32, Block)> =
            numbers.map(|number| (number, layout.blocks()[number as usize])).collect();
        Self {
            optimizers: rules.optimizers(&layout, located.iter().map(|(_, block)| block)),
            tables: Tables::new(&layout, tables),
            blocks: Arc::new(located),
            values: blocks.iter().map(|block| Values::new(block.values.clone())).collect(),
            applied_of: blocks.iter().map(|block| block.applied).collect(),
            state: blocks.into_iter().map(|block| block.state).collect(),
            buffers: BufferPool::default(),
            layout,
            rules,
            applied,
            position,
            updates,
            reductions: 0,
        }
    }

    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Returns rows of each table as they are in `pass`. Rows that `before` contains are returned as they are there.
    ///
    /// # Errors
    /// If the rows cannot be read.
    pub(crate) fn read_rows(
        &mut self,
        ids: Vec<RowIds>,
        pass: Pass,
        before: &[Rows],
    ) -> Result<Vec<Rows>, StorageError> {
        let ids = ids.into_iter().take(self.tables.held().widths.len());
        let read = |(table, ids)| self.tables.read(table, ids, pass, before.get(table));
        ids.enumerate().map(read).collect()
    }

    /// Applies the sums of the gradients of each table's rows as a part of the next update, to ranges with one of
    /// the entries `applied`; returns the rows that changed, as they were before.
    ///
    /// # Errors
    /// If a store cannot read or write; the update is incomplete then.
    pub(crate) fn apply_rows(
        &mut self,
        mean: Mean,
        mut sums: Vec<Rows>,
        pass: Pass,
        applied: impl Fn(usize) -> bool,
    ) -> Result<Vec<Rows>, StorageError> {
        let (learning_rate, plateau) = self.rules.learning_rate_at(self.position.version);
        let (updates, reductions) = (self.updates, self.reductions);
        let update = RowUpdate { mean, updates, pass, learning_rate, plateau, reductions };
        let apply = |(table, sum)| self.tables.apply(table, sum, &update, &applied);
        sums.iter_mut().enumerate().map(apply).collect()
    }

    /// Returns the layout of the whole model.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns the numbers and locations of the blocks, in order.
    pub fn list(&self) -> &Arc<Vec<(u32, Block)>> {
        &self.blocks
    }

    /// Returns the buffer pool for contributions.
    pub fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// Returns the encoding of contributions.
    pub fn codec(&self) -> Codec {
        self.rules.codec
    }

    /// Returns the applied records; blocks and ranges with the same ones share an entry.
    pub fn applied(&self) -> &[AppliedRecords] {
        &self.applied
    }

    /// Returns the position that the values reflect.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Returns references to the values of all blocks.
    pub(crate) fn parameters(&self) -> Parameters {
        Parameters {
            position: self.position,
            blocks: self.blocks.clone(),
            values: self.values.iter().map(|it| it.present().clone()).collect(),
        }
    }

    /// Returns the averages of the parameters in place of their values; `None` if the job has none.
    pub(crate) fn averages(&self) -> Option<Parameters> {
        self.rules.average?;
        let average = |state: &Arc<Vec<Vec<f32>>>| Some(Arc::new(state.last()?.clone()));
        Some(Parameters {
            position: self.position,
            blocks: self.blocks.clone(),
            values: self.state.iter().filter_map(average).collect(),
        })
    }

    /// Returns a reference to the values of one block, with its number.
    pub(crate) fn block(&self, index: usize) -> (u32, Arc<Vec<f32>>) {
        (self.blocks[index].0, self.values[index].present().clone())
    }

    /// Returns the rows of the tables as they are now.
    ///
    /// # Errors
    /// If the rows cannot be read.
    pub(crate) fn tables_snapshot(&mut self) -> Result<TablesSnapshot, StorageError> {
        self.tables.snapshot(self.position.pass)
    }

    /// Removes rows that no reader needs any more.
    ///
    /// # Errors
    /// If the rows cannot be removed; all rows of the slot are lost then.
    pub fn forget(&mut self, obsolete: Obsolete) -> Result<(), StorageError> {
        self.tables.forget(obsolete, self.position.pass)
    }

    /// Returns the state but that of tables, by reference.
    pub(crate) fn snapshot(&self) -> ShardSnapshot {
        let blocks = self.blocks.iter().zip(&self.applied_of).zip(&self.values).zip(&self.state);
        ShardSnapshot {
            position: self.position,
            updates: self.updates,
            exhausted: BTreeSet::new(),
            applied: self.applied.clone(),
            blocks: blocks
                .map(|((((number, _), applied), values), state)| SnapshotBlock {
                    number: *number,
                    applied: *applied,
                    values: values.present().clone(),
                    state: state.clone(),
                })
                .collect(),
        }
    }

    /// Returns the index of a block's entry in `applied`.
    pub(crate) fn applied_of(&self, index: usize) -> usize {
        self.applied_of[index]
    }

    /// Returns whether the job clips the next step by global norm, so that the norm over all slots must be known before its
    /// gradient is applied.
    pub fn clips_by_norm(&self) -> bool {
        self.rules.clip_at(self.position.version).1.is_some()
    }

    /// Returns the mean of a sum, clipped by value, and by the global `norm` if it is given.
    pub(crate) fn mean(&self, by: Divisor, norm: Option<f64>) -> Mean {
        let (clip_value, clip_norm) = self.rules.clip_at(self.position.version);
        Mean::new(by, clip_value).shrunk(norm, clip_norm)
    }

    /// Returns whether an update needs all blocks of a parameter, which the slot has then.
    pub(crate) fn needs_whole_parameters(&self) -> bool {
        self.optimizers.iter().any(|it| 0 < it.measuring_passes())
    }

    /// Applies the sums of some blocks as a part of the next update. A rule with norms needs those of all blocks of its
    /// parameter.
    pub(crate) fn apply(
        &mut self,
        mean: Mean,
        sums: impl Iterator<Item = (usize, ValidatedBlock)>,
    ) {
        let mut whole: BTreeMap<u32, BTreeMap<usize, ValidatedBlock>> = BTreeMap::new();
        for (index, sum) in sums {
            let block = &self.blocks[index].1;
            let is_updated = self.layout.update_rule(block) == UpdateRule::Optimizer;
            if is_updated && 0 < self.optimizers[index].measuring_passes() {
                whole.entry(block.param).or_default().insert(index, sum);
            } else {
                self.apply_block(mean, index, &sum, Vec::new());
            }
        }
        for blocks in whole.values() {
            let norms = self.norms(mean, blocks);
            blocks
                .iter()
                .for_each(|(index, sum)| self.apply_block(mean, *index, sum, norms.clone()));
        }
    }

    /// Returns the norms of a parameter with these blocks.
    fn norms(&self, mean: Mean, blocks: &BTreeMap<usize, ValidatedBlock>) -> Vec<Vec<f64>> {
        let Some(first) = blocks.keys().next() else { return Vec::new() };
        let mut update = self.update(mean, *first, Vec::new());
        let blocks = blocks.iter().map(|(index, sum)| Measured {
            sum: sum.values(),
            values: self.values[*index].present().as_slice(),
            state: self.state[*index].as_slice(),
        });
        update.measure(&blocks.collect::<Vec<_>>());
        update.norms
    }

    /// Returns the learning rate of the next update.
    fn rate(&self) -> f32 {
        let (spec, plateau) = self.rules.learning_rate_at(self.position.version);
        reduced(learning_rate(spec, self.updates), plateau, self.reductions)
    }

    /// Returns the next update of a block.
    fn update(&self, mean: Mean, index: usize, norms: Vec<Vec<f64>>) -> Update {
        let optimizer = self.optimizers[index].clone();
        let number = self.rules.updates_before + self.updates + 1;
        Update { optimizer, mean, rate: self.rate(), number, norms }
    }

    fn apply_block(
        &mut self,
        mean: Mean,
        index: usize,
        sum: &ValidatedBlock,
        norms: Vec<Vec<f64>>,
    ) {
        let update = self.update(mean, index, norms);
        let values = &mut self.values[index];
        match self.layout.update_rule(&self.blocks[index].1) {
            UpdateRule::Optimizer => {
                let state = Arc::make_mut(&mut self.state[index]);
                update.apply(sum.values(), values, state);
            }
            UpdateRule::AddMean => {
                update.add_mean(sum.values(), values);
                // Buffers have no average: theirs is their value.
                if let (Some(_), Some(average)) =
                    (self.rules.average, Arc::make_mut(&mut self.state[index]).last_mut())
                {
                    average.copy_from_slice(values.present());
                }
            }
            UpdateRule::Frozen => {}
        }
    }
}
