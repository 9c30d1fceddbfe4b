//! A gradient on its way into a shard, and why one is refused.

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Lane, TaskId, Version};
use steadfast_common::layout::Block;
use steadfast_common::pieces::Pieces;

/// The sum of some records' gradients, for all blocks of a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Contribution {
    /// Records that were summed up.
    pub records: u64,
    /// Sum of their losses.
    pub loss_sum: f64,
    /// Sum of their checksums (see [`steadfast_common::tally`]).
    pub checksum: u64,
    /// Values of the shard's blocks, in the shard's order, as little-endian `f32`; empty when no
    /// record was summed up.
    pub blocks: Vec<Pieces>,
}

/// Whether a lane goes on after this contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneEnd {
    MoreToCome,
    /// The lane has no further records in this pass.
    LastOfPass,
}

/// What became of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contributed {
    /// The same name came before; nothing changed.
    Duplicate,
    /// It waits for the other lanes of its step.
    Waiting,
    /// It was the last one of its step, or was applied at once.
    Complete,
}

/// Why nothing was applied.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("block {block} has {found} bytes; {wanted} are wanted")]
    WrongLength { block: u32, found: usize, wanted: usize },
    #[error("{found} blocks were sent; the shard has {wanted}")]
    WrongBlocks { found: usize, wanted: usize },
    #[error(
        "the gradient of block {block} is not finite; a lower learning rate or clipping may help"
    )]
    NotFinite { block: u32 },
    #[error("there is no lane {lane}; the job has {lanes}")]
    NoSuchLane { lane: Lane, lanes: u32 },
    #[error("lane {lane} ended before, yet sends records")]
    LaneEnded { lane: Lane },
    #[error("lane {lane} sends no record and goes on")]
    EmptyLane { lane: Lane },
    #[error("the contribution is for version {found}; the shard is at {present}")]
    Ahead { found: Version, present: Version },
    #[error("the push begins at record {from} of task {task}; {counted} are counted so far")]
    Gap { task: TaskId, from: u32, counted: u32 },
    #[error("the push holds {records} records and names {named}")]
    OtherRecords { records: u64, named: u32 },
    #[error("the shard of a {0} job takes no such contribution")]
    WrongMode(&'static str),
}

impl Refusal {
    /// What the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Ahead { .. } => ErrorKind::Stale,
            Self::WrongLength { .. }
            | Self::WrongBlocks { .. }
            | Self::NotFinite { .. }
            | Self::NoSuchLane { .. }
            | Self::LaneEnded { .. }
            | Self::EmptyLane { .. }
            | Self::Gap { .. }
            | Self::OtherRecords { .. }
            | Self::WrongMode(_) => ErrorKind::Invalid,
        }
    }
}

impl Contribution {
    /// Checks everything before anything is applied.
    ///
    /// # Errors
    /// If blocks are missing, of the wrong length, or hold a value that is not finite.
    pub fn check(&self, blocks: &[(u32, Block)]) -> Result<(), Refusal> {
        if self.records == 0 && self.blocks.is_empty() {
            return Ok(());
        }
        if self.blocks.len() != blocks.len() {
            return Err(Refusal::WrongBlocks { found: self.blocks.len(), wanted: blocks.len() });
        }
        for (data, (number, block)) in self.blocks.iter().zip(blocks) {
            let wanted = block.len * size_of::<f32>();
            if data.len() != wanted {
                return Err(Refusal::WrongLength { block: *number, found: data.len(), wanted });
            }
            if !data.are_finite() {
                return Err(Refusal::NotFinite { block: *number });
            }
        }
        Ok(())
    }
}
