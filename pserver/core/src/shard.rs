//! The shard of a slot: one state machine for each training mode.

use std::sync::Arc;

use steadfast_common::ids::Version;
use steadfast_common::job::spec::Mode;
use steadfast_common::records::applied_records::TaskRanges;
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::Rows;
use steadfast_pserver_storage::StorageError;

use crate::async_shard::AsyncShard;
use crate::block_store::{BlockStore, Parameters, ShardSnapshot};
use crate::rules::Rules;
use crate::sync_shard::SyncShard;
use crate::tables::{TableRows, TablesSnapshot};

/// The shard of one slot, in the mode of its job.
#[derive(Debug)]
pub enum Shard {
    Sync(Box<SyncShard>),
    Async(Box<AsyncShard>),
}

impl Shard {
    /// Restores a shard from a snapshot of blocks of `layout`, and tables.
    pub fn restore(
        layout: Arc<Layout>,
        snapshot: ShardSnapshot,
        tables: TableRows,
        rules: Rules,
    ) -> Self {
        match rules.mode {
            Mode::Sync => Self::Sync(SyncShard::restore(layout, snapshot, tables, rules).into()),
            Mode::Async => Self::Async(AsyncShard::restore(layout, snapshot, tables, rules).into()),
        }
    }

    pub fn blocks(&self) -> &BlockStore {
        match self {
            Self::Sync(shard) => shard.blocks(),
            Self::Async(shard) => shard.blocks(),
        }
    }

    /// Returns the blocks, for reads of rows.
    pub fn blocks_mut(&mut self) -> &mut BlockStore {
        match self {
            Self::Sync(shard) => shard.blocks_mut(),
            Self::Async(shard) => shard.blocks_mut(),
        }
    }

    /// Returns rows of each table at `version`, if the shard has it.
    ///
    /// # Errors
    /// If the rows cannot be read.
    pub fn rows_at(
        &mut self,
        version: Version,
        ids: Vec<RowIds>,
    ) -> Result<Option<Vec<Rows>>, StorageError> {
        match self {
            Self::Sync(shard) => shard.rows_at(version, ids),
            Self::Async(shard) => {
                let is_current = shard.blocks().position().version == version;
                is_current.then(|| shard.rows(ids)).transpose()
            }
        }
    }

    /// Returns the values of the current version.
    pub fn parameters(&self) -> Parameters {
        match self {
            Self::Sync(shard) => shard.parameters(),
            Self::Async(shard) => shard.parameters(),
        }
    }

    /// Returns the values of `version`, if the shard has them.
    pub fn parameters_at(&self, version: Version) -> Option<Parameters> {
        match self {
            Self::Sync(shard) => shard.parameters_at(version),
            Self::Async(shard) => {
                let is_current = shard.blocks().position().version == version;
                is_current.then(|| shard.parameters())
            }
        }
    }

    /// Returns the averages of the parameters at `version`, if the job has them and no later step has changed them.
    pub fn averages_at(&self, version: Version) -> Option<Parameters> {
        let is_current = self.blocks().position().version == version
            && !self.as_sync().is_some_and(SyncShard::is_partly_applied);
        if is_current { self.blocks().averages() } else { None }
    }

    /// Takes a snapshot; see [`SyncShard::snapshot`].
    ///
    /// # Errors
    /// If the rows of a table cannot be read.
    pub fn snapshot(&mut self) -> Result<(ShardSnapshot, TablesSnapshot), StorageError> {
        match self {
            Self::Sync(shard) => shard.snapshot(),
            Self::Async(shard) => shard.snapshot(),
        }
    }

    /// Returns the tasks of the current pass that all blocks reflect (asynchronous mode).
    pub fn applied_tasks(&self) -> TaskRanges {
        let mut all = self.blocks().applied().iter().map(|applied| &applied.done);
        let first = all.next().cloned().unwrap_or_default();
        all.fold(first, |common, done| common.intersection(done))
    }

    /// Returns the shard, if the job is synchronous.
    pub fn as_sync(&self) -> Option<&SyncShard> {
        match self {
            Self::Sync(shard) => Some(shard),
            Self::Async(_) => None,
        }
    }

    /// Returns the shard for changes, if the job is synchronous.
    pub fn as_sync_mut(&mut self) -> Option<&mut SyncShard> {
        match self {
            Self::Sync(shard) => Some(shard),
            Self::Async(_) => None,
        }
    }
}
