//! The shard of an asynchronous job: applies each push on arrival, and each record once.

use std::sync::Arc;

use steadfast_common::ids::Version;
use steadfast_common::records::applied_records::{AppliedRecords, RangeStatus, RecordRange};
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::Rows;
use steadfast_pserver_storage::StorageError;

use crate::block_store::{BlockStore, Parameters, ShardSnapshot};
use crate::contribution::{Contributed, Contribution, Divisor, Refusal, check_weight, locate};
use crate::rules::Rules;
use crate::tables::{TableRows, TablesSnapshot};

/// The shard of one slot of an asynchronous job.
#[derive(Debug)]
pub struct AsyncShard {
    blocks: BlockStore,
}

impl AsyncShard {
    /// Restores a shard from a snapshot of blocks of `layout`, and tables.
    pub fn restore(
        layout: Arc<Layout>,
        snapshot: ShardSnapshot,
        tables: TableRows,
        rules: Rules,
    ) -> Self {
        Self { blocks: BlockStore::restore(layout, snapshot, tables, rules) }
    }

    /// Returns the blocks, for reads of rows.
    pub fn blocks_mut(&mut self) -> &mut BlockStore {
        &mut self.blocks
    }

    /// Returns the current rows of each table.
    ///
    /// # Errors
    /// If the rows cannot be read.
    pub fn rows(&mut self, ids: Vec<RowIds>) -> Result<Vec<Rows>, StorageError> {
        self.blocks.read_rows(ids, self.blocks.position.pass, &[])
    }

    pub fn blocks(&self) -> &BlockStore {
        &self.blocks
    }

    /// Returns references to the current values of all blocks.
    pub fn parameters(&self) -> Parameters {
        self.blocks.parameters()
    }

    /// Applies a push at once to the blocks that do not reflect its records yet: to all or none of them,
    /// unless the shard combines blocks of several slots.
    ///
    /// # Errors
    /// See [`Refusal`]; on error nothing has changed, unless it is [fatal](Refusal::is_fatal).
    pub fn apply(
        &mut self,
        range: &RecordRange,
        contribution: Contribution,
    ) -> Result<Contributed, Refusal> {
        // A generation may leave out some of the records, or all.
        let named = u64::from(range.to.saturating_sub(range.from));
        if named < contribution.records || named == 0 {
            return Err(Refusal::RecordsMismatch { records: contribution.records, named });
        }
        contribution.weight.map_or(Ok(()), check_weight)?;
        let mut fresh = Vec::new();
        for applied in &self.blocks.applied {
            fresh.push(match applied.classify(range) {
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
        contribution.check_tables(&self.blocks.tables().held().widths)?;
        let Contribution { records, loss_sum, weight, checksum, blocks, rows } = contribution;
        let by = Divisor::new(records, weight);
        let (mut sums, wanted) = (locate(blocks, self.blocks.list())?, self.blocks.list().len());
        if sums.len() != wanted {
            return Err(Refusal::WrongBlocks { found: sums.len(), wanted });
        }
        sums.retain(|(index, _)| fresh[self.blocks.applied_of(*index)]);
        let mean = self.blocks.mean(by, None);
        self.blocks.apply(mean, sums.into_iter());
        self.blocks.apply_rows(mean, rows, range.pass, |applied| fresh[applied])?;
        self.blocks.updates += 1;
        let applied = self.blocks.applied.iter_mut().zip(&fresh);
        for (applied, _) in applied.filter(|(_, is_fresh)| **is_fresh) {
            applied.apply_range(range, records, checksum);
        }
        let examples = self.blocks.applied.iter().map(AppliedRecords::records).min().unwrap_or(0);
        let position = &mut self.blocks.position;
        position.version = Version(position.version.0 + 1);
        position.pass = position.pass.max(range.pass);
        position.examples = examples;
        position.loss = by.mean_of(loss_sum).or(position.loss);
        Ok(Contributed::Complete)
    }

    /// Takes a snapshot.
    ///
    /// # Errors
    /// If the rows of a table cannot be read.
    pub fn snapshot(&mut self) -> Result<(ShardSnapshot, TablesSnapshot), StorageError> {
        let tables = self.blocks.tables_snapshot()?;
        Ok((self.blocks.snapshot(), tables))
    }
}
