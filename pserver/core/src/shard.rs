//! The shard of a slot: one state machine for each training mode.

use std::sync::Arc;

use steadfast_common::ids::Version;
use steadfast_common::layout::Layout;
use steadfast_common::spec::Mode;

use crate::async_shard::AsyncShard;
use crate::block_store::{BlockStore, Parameters, ShardSnapshot};
use crate::rules::Rules;
use crate::sync_shard::SyncShard;

/// The shard of one slot, in the mode of its job.
#[derive(Debug)]
pub enum Shard {
    Sync(Box<SyncShard>),
    Async(Box<AsyncShard>),
}

impl Shard {
    /// Restores a shard from a snapshot of blocks of `layout`.
    pub fn restore(layout: Arc<Layout>, snapshot: ShardSnapshot, rules: Rules) -> Self {
        match rules.mode {
            Mode::Sync => Self::Sync(SyncShard::restore(layout, snapshot, rules).into()),
            Mode::Async => Self::Async(AsyncShard::restore(layout, snapshot, rules).into()),
        }
    }

    /// Returns the blocks.
    pub fn blocks(&self) -> &BlockStore {
        match self {
            Self::Sync(shard) => shard.blocks(),
            Self::Async(shard) => shard.blocks(),
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

    /// Takes a snapshot, by reference; see [`SyncShard::snapshot`].
    pub fn snapshot(&self) -> ShardSnapshot {
        match self {
            Self::Sync(shard) => shard.snapshot(),
            Self::Async(shard) => shard.snapshot(),
        }
    }

    /// Returns the shard of a synchronous job.
    pub fn as_sync(&self) -> Option<&SyncShard> {
        match self {
            Self::Sync(shard) => Some(shard),
            Self::Async(_) => None,
        }
    }

    /// Returns the shard of a synchronous job.
    pub fn as_sync_mut(&mut self) -> Option<&mut SyncShard> {
        match self {
            Self::Sync(shard) => Some(shard),
            Self::Async(_) => None,
        }
    }
}
