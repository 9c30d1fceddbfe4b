//! The shard of a synchronous job: adds the lanes of a step, and applies each step once.
//!
//! A step is applied block by block, as soon as a block has all lanes. Until the step is complete, readers
//! get the previous version.

use std::sync::Arc;

use steadfast_common::ids::{Lane, Pass, Version};
use steadfast_common::records::contribution::{LaneShare, LanesName};
use steadfast_common::tensor::lane_tree::Node;
use steadfast_common::tensor::layout::{Block, Layout, UpdateRule};
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::{RANGES, Rows};
use steadfast_pserver_storage::StorageError;

use crate::block_store::{BlockStore, Parameters, ShardSnapshot};
use crate::contribution::{
    Contributed, Contribution, Refusal, ValidatedBlock, check_records, check_weight, locate,
};
use crate::lane_sum::{LaneSum, PassState};
use crate::rules::Rules;
use crate::tables::{TableRows, TablesSnapshot, squares_by_range};
use crate::update::squares;

/// The number and values of a block that was updated before its step completed.
pub type EarlyBlock = (u32, Arc<Vec<f32>>);

/// The shard of one slot of a synchronous job.
#[derive(Debug)]
pub struct SyncShard {
    blocks: BlockStore,
    lanes: u32,
    lane_sum: LaneSum,
    /// How often evaluations have reduced the learning rate of the current step, once a contribution names it.
    reductions: Option<u32>,
    /// Indices of the blocks updated by the current step before the step is complete.
    early: Vec<usize>,
    /// The values of the previous version, or of the current one while a step is partly applied: another
    /// slot may still be at that version, and a trainer that joins now needs all slots at one version.
    previous: Option<Parameters>,
    /// The rows of each table that the last step changed, as they were at the previous version.
    previous_rows: Vec<Rows>,
    /// The sums of blocks that were applied since they were last taken, if they are kept.
    applied_sums: Option<Vec<ValidatedBlock>>,
}

impl SyncShard {
    /// Restores a shard from a snapshot of blocks of `layout`, and tables.
    pub fn restore(
        layout: Arc<Layout>,
        mut snapshot: ShardSnapshot,
        tables: TableRows,
        rules: Rules,
    ) -> Self {
        let (lanes, blocks) = (rules.lanes, snapshot.blocks.len());
        let exhausted = std::mem::take(&mut snapshot.exhausted);
        Self {
            lane_sum: LaneSum::new(lanes, exhausted, rules.codec, blocks),
            blocks: BlockStore::restore(layout, snapshot, tables, rules),
            lanes,
            reductions: None,
            early: Vec::new(),
            previous: None,
            previous_rows: Vec::new(),
            applied_sums: None,
        }
    }

    /// Says whether the sums of applied blocks are kept for [`SyncShard::take_applied_sums`].
    pub fn keep_sums(&mut self, keep: bool) {
        self.applied_sums = keep.then(Vec::new);
    }

    /// Takes the kept sums over all lanes of the blocks that were applied since the last call.
    pub fn take_applied_sums(&mut self) -> Vec<ValidatedBlock> {
        self.applied_sums.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns the complete step as one contribution of all lanes, without the blocks that are applied. Another shard
    /// that gets it, and these blocks, comes to the same bits.
    pub fn whole_step(&self) -> (LanesName, Contribution) {
        let (version, first) = (self.blocks.position.version, Lane(0));
        let shares = self.lane_sum.all_shares();
        let reductions = self.reductions.unwrap_or_default();
        let name = LanesName { version, first, shares, reductions };
        let places = 0..self.blocks.list().len();
        let blocks = places.filter_map(|place| self.lane_sum.sum(place).cloned()).collect();
        let (mut records, mut loss_sum, mut checksum, mut rows) = (0, 0.0, 0, Vec::new());
        if let Some(total) = self.lane_sum.total() {
            (records, loss_sum, checksum) = (total.records, total.loss_sum, total.checksum);
            rows.clone_from(&total.rows);
        }
        (name, Contribution { records, loss_sum, weight: None, checksum, blocks, rows })
    }

    /// Returns the blocks. Their values are a mix of two versions while a step is partly applied.
    pub fn blocks(&self) -> &BlockStore {
        &self.blocks
    }

    /// Returns the values of the current version.
    pub fn parameters(&self) -> Parameters {
        match &self.previous {
            Some(previous) if self.is_partly_applied() => previous.clone(),
            Some(_) | None => self.blocks.parameters(),
        }
    }

    /// Returns the values of `version`, if it is the current or the previous one.
    pub fn parameters_at(&self, version: Version) -> Option<Parameters> {
        if version == self.blocks.position.version {
            return Some(self.parameters());
        }
        self.previous.as_ref().filter(|it| it.position.version == version).cloned()
    }

    /// Returns the blocks, for reads of rows.
    pub fn blocks_mut(&mut self) -> &mut BlockStore {
        &mut self.blocks
    }

    /// Returns rows of each table at `version`, if it is the current or the previous one. Rows change only when
    /// a step is complete.
    ///
    /// # Errors
    /// If the rows cannot be read.
    pub fn rows_at(
        &mut self,
        version: Version,
        ids: Vec<RowIds>,
    ) -> Result<Option<Vec<Rows>>, StorageError> {
        let position = self.blocks.position;
        if version == position.version {
            return self.blocks.read_rows(ids, position.pass, &[]).map(Some);
        }
        let Some(previous) = self.previous.as_ref().filter(|it| it.position.version == version)
        else {
            return Ok(None);
        };
        self.blocks.read_rows(ids, previous.position.pass, &self.previous_rows).map(Some)
    }

    /// Returns the lanes that the current step waits for.
    pub fn missing(&self) -> Vec<Lane> {
        self.lane_sum.missing()
    }

    /// Takes a snapshot, by reference. Between [`Contributed::Complete`] and [`SyncShard::finish_step`] the
    /// state is inconsistent; call it only after `finish_step`.
    ///
    /// # Errors
    /// If the rows of a table cannot be read.
    pub fn snapshot(&mut self) -> Result<(ShardSnapshot, TablesSnapshot), StorageError> {
        let exhausted = self.lane_sum.exhausted().clone();
        let tables = self.blocks.tables_snapshot()?;
        Ok((ShardSnapshot { exhausted, ..self.blocks.snapshot() }, tables))
    }

    /// Adds some blocks of a contribution of the lanes starting at `first` to the step that begins at
    /// `version`: the sum of a node of the [`LaneTree`](steadfast_common::tensor::lane_tree::LaneTree), with the
    /// share of each lane. They take effect once [`SyncShard::contribute`] receives the rest, from this push
    /// or from another one for the same lanes.
    ///
    /// # Errors
    /// See [`Refusal`]; on error nothing has changed.
    pub fn add_blocks(
        &mut self,
        version: Version,
        first: Lane,
        shares: &[LaneShare],
        blocks: Vec<ValidatedBlock>,
    ) -> Result<(), Refusal> {
        let Some(node) = self.open(version, first, shares)? else { return Ok(()) };
        let located = locate(blocks, self.blocks.list())?;
        check_count(shares, located.len(), self.blocks.list().len())?;
        self.lane_sum.add(node, shares, located);
        Ok(())
    }

    /// Sets how often evaluations have reduced the learning rate of a step, unless that step is complete. Each
    /// contribution to a step names it, and the caller passes it here before the contribution.
    ///
    /// # Errors
    /// If another contribution to the step named another number.
    pub fn set_reductions(&mut self, version: Version, reductions: u32) -> Result<(), Refusal> {
        if version != self.blocks.position.version {
            return Ok(());
        }
        match self.reductions.replace(reductions) {
            Some(known) if known != reductions => {
                Err(Refusal::ConflictingRate { found: reductions, known })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Adds a contribution of lanes to a step, or the blocks of it that [`SyncShard::add_blocks`] has not
    /// received. The caller calls [`SyncShard::finish_step`] after [`Contributed::Complete`].
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
        check_records(shares, contribution.records, contribution.checksum)?;
        if 0 < contribution.records {
            contribution.check_tables(&self.blocks.tables().held().widths)?;
        }
        let (blocks, total) = contribution.into_parts();
        let located = locate(blocks, self.blocks.list())?;
        let (found, wanted) = (located.len(), self.blocks.list().len());
        check_count(shares, found, wanted)?;
        let is_received =
            |index: &usize| located.binary_search_by_key(index, |(it, _)| *it).is_ok();
        let mut missing = (0..wanted).filter(|index| !self.lane_sum.has_block(node, *index));
        if total.is_some() && !missing.all(|index| is_received(&index)) {
            return Err(Refusal::WrongBlocks { found, wanted });
        }
        self.lane_sum.add(node, shares, located);
        self.lane_sum.complete(node, shares, total);
        Ok(if self.lane_sum.is_complete() { Contributed::Complete } else { Contributed::Waiting })
    }

    /// Returns the node of a contribution to the current step, unless it was completely received before.
    fn open(
        &self,
        version: Version,
        first: Lane,
        shares: &[LaneShare],
    ) -> Result<Option<Node>, Refusal> {
        let (count, lanes) = (shares.len(), self.lanes);
        let node = u32::try_from(count).ok().and_then(|it| self.lane_sum.tree().node(first, it));
        let node = node.ok_or(Refusal::NoSuchNode { first, count, lanes })?;
        let present = self.blocks.position.version;
        if present < version {
            return Err(Refusal::Ahead { found: version, present });
        }
        if version < present {
            if version.0 + 1 == present.0 {
                self.lane_sum.check_previous(node, shares)?;
            }
            return Ok(None);
        }
        for (lane, share) in node.lanes().zip(shares) {
            // One that has more to come may be empty: a generation may leave out its records.
            if 0 < share.records && self.lane_sum.exhausted().contains(&lane) {
                return Err(Refusal::LaneExhausted { lane });
            }
        }
        shares.iter().filter_map(|it| it.weight).try_for_each(check_weight)?;
        // Also for complete contributions: another slot may lack this one and accept the other.
        self.lane_sum.check(node, shares)?;
        Ok((!self.lane_sum.has(node)).then_some(node))
    }

    /// Returns whether every lane of the current step was received, so that [`SyncShard::finish_step`] may be called.
    pub fn is_step_complete(&self) -> bool {
        self.lane_sum.is_complete()
    }

    /// Returns, for each block and each range of a table, the squared norm of the complete step's *mean* gradient
    /// (after clipping by value), summed in order in `f64`. Ranges are numbered after all blocks of the layout.
    pub fn squares(&self) -> Vec<(u32, f64)> {
        let mean = self.blocks.mean(self.lane_sum.divisor(), None);
        let layout = self.blocks.layout();
        let of_block = |(index, (number, block)): (usize, &(u32, Block))| {
            let square = match layout.update_rule(block) {
                UpdateRule::Optimizer => {
                    self.lane_sum.sum(index).map_or(0.0, |sum| squares(mean, sum.values()))
                }
                // No gradient that is applied.
                UpdateRule::AddMean | UpdateRule::Frozen => 0.0,
            };
            (*number, square)
        };
        let of_blocks = self.blocks.list().iter().enumerate().map(of_block);
        let sums = self.lane_sum.total().map_or(&[][..], |total| &total.rows);
        let of_tables = (0..).zip(sums).flat_map(|(table, sum): (u32, &Rows)| {
            let first = layout.blocks().len() as u32 + table * RANGES;
            squares_by_range(mean, sum).into_iter().map(move |(range, it)| (first + range, it))
        });
        of_blocks.chain(of_tables).collect()
    }

    /// Returns whether a step that is not complete has updated some blocks.
    pub fn is_partly_applied(&self) -> bool {
        !self.early.is_empty()
    }

    /// Returns the blocks that were updated by a step that is not complete, with their new values, in order
    /// of update.
    pub fn early(&self) -> Vec<EarlyBlock> {
        self.early.iter().map(|index| self.blocks.block(*index)).collect()
    }

    /// Applies the current step to the blocks that have all lanes, before the step is complete, and returns
    /// those blocks. Their values are provisional until the step is complete. Does nothing in jobs that clip
    /// by global norm, which requires all blocks, or whose rule requires all blocks of a parameter.
    pub fn apply_early(&mut self) -> Vec<EarlyBlock> {
        let waits = self.blocks.clips_by_norm() || self.blocks.needs_whole_parameters();
        if waits || !self.lane_sum.has_ready() {
            return Vec::new();
        }
        let known = self.early.len();
        self.apply_ready(None);
        self.early[known..].iter().map(|index| self.blocks.block(*index)).collect()
    }

    fn apply_ready(&mut self, norm: Option<f64>) {
        if !self.is_partly_applied() {
            // A block has all lanes, so every slot has reached the current version: the previous one is
            // obsolete. It is dropped first: its memory is reused for the next.
            self.previous = None;
            self.previous = Some(self.blocks.parameters());
        }
        let mean = self.blocks.mean(self.lane_sum.divisor(), norm);
        self.blocks.reductions = self.reductions.unwrap_or_default();
        let Self { blocks, lane_sum, early, applied_sums, .. } = self;
        let ready = std::iter::from_fn(|| lane_sum.take_ready());
        let note = |(index, sum): &(usize, ValidatedBlock)| {
            early.push(*index);
            applied_sums.iter_mut().for_each(|sums| sums.push(sum.clone()));
        };
        blocks.apply(mean, ready.inspect(note));
    }

    /// Applies the complete step and publishes the next version. `norm` is the global norm of the mean
    /// gradient over all slots; required if the job clips by it.
    ///
    /// # Errors
    /// If the rows of a table cannot be read or written; the step can never be completed then.
    pub fn finish_step(&mut self, norm: Option<f64>) -> Result<(), StorageError> {
        debug_assert!(self.lane_sum.is_complete());
        self.apply_ready(norm);
        self.early.clear();
        self.previous_rows.clear();
        let (mut records, mut checksum) = (0, 0);
        if let Some(total) = self.lane_sum.take_total() {
            (records, checksum) = (total.records, total.checksum);
            let by = self.lane_sum.divisor();
            let (mean, pass) = (self.blocks.mean(by, norm), self.blocks.position.pass);
            self.previous_rows = self.blocks.apply_rows(mean, total.rows, pass, |_| true)?;
            self.blocks.updates += 1;
            let position = &mut self.blocks.position;
            position.loss = by.mean_of(total.loss_sum).or(position.loss);
        }
        let BlockStore { position, applied, .. } = &mut self.blocks;
        applied.iter_mut().for_each(|applied| applied.count(position.pass, records, checksum));
        position.examples += records;
        position.version = Version(position.version.0 + 1);
        self.reductions = None;
        if self.lane_sum.begin_next() == PassState::Ended {
            position.pass = Pass(position.pass.0 + 1);
            position.pass_start = position.version;
        }
        Ok(())
    }
}

/// Checks that a contribution without records has no blocks, and that none has more than the shard.
fn check_count(shares: &[LaneShare], found: usize, blocks: usize) -> Result<(), Refusal> {
    let wanted = if shares.iter().all(|share| share.records == 0) { 0 } else { blocks };
    if found <= wanted { Ok(()) } else { Err(Refusal::WrongBlocks { found, wanted }) }
}
