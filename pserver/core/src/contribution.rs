//! A gradient on its way into a shard, and why one is refused.

use steadfast_common::compression::{Codec, Malformed};
use steadfast_common::error::ErrorKind;
use steadfast_common::finite::are_finite;
use steadfast_common::ids::{Lane, TaskId, Version};
use steadfast_common::layout::Block;
use steadfast_common::pieces::Pieces;

use crate::memory::Lent;
use crate::update::STRIP;

/// The sum of some records' gradients, for all blocks of a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Contribution {
    /// Records that were summed up.
    pub records: u64,
    /// Sum of their losses.
    pub loss_sum: f64,
    /// Sum of their checksums (see [`steadfast_common::tally`]).
    pub checksum: u64,
    /// Values of the shard's blocks, in the shard's order; empty when no record was summed up.
    pub blocks: Vec<Finite>,
}

/// Values of one block, none of which is infinite or NaN.
#[derive(Clone, Debug, PartialEq)]
pub struct Finite(Lent);

impl Finite {
    /// Takes values as they came into `memory`.
    ///
    /// # Errors
    /// If they do not fill it, or one of them is not finite.
    pub fn new(block: u32, values: &Pieces, mut memory: Lent) -> Result<Self, Refusal> {
        let (found, wanted) = (values.len(), size_of_val(&memory[..]));
        if found != wanted {
            return Err(Refusal::WrongLength { block, found, wanted });
        }
        let mut are_all_finite = true;
        values.for_each_run(|from, run| {
            let place = &mut memory[from..from + run.len()];
            // Looked at while they are in the fastest cache.
            for (place, run) in place.chunks_mut(STRIP).zip(run.chunks(STRIP)) {
                for (value, bytes) in place.iter_mut().zip(run) {
                    *value = f32::from_le_bytes(*bytes);
                }
                are_all_finite &= are_finite(place);
            }
        });
        if are_all_finite { Ok(Self(memory)) } else { Err(Refusal::NotFinite { block }) }
    }

    /// The values.
    pub fn values(&self) -> &[f32] {
        &self.0
    }

    /// Takes values as a job's `codec` encoded them.
    ///
    /// # Errors
    /// As [`Finite::new`], and if they are encoded in another way.
    pub fn decode(
        codec: Codec,
        block: u32,
        bytes: &Pieces,
        mut memory: Lent,
    ) -> Result<Self, Refusal> {
        if codec == Codec::Plain {
            return Self::new(block, bytes, memory);
        }
        let malformed = |source| Refusal::Malformed { block, source };
        codec.decode(&bytes.joined(), &mut memory).map_err(malformed)?;
        if are_finite(&memory) { Ok(Self(memory)) } else { Err(Refusal::NotFinite { block }) }
    }

    /// Adds other values of the same block, in the arithmetic of `codec`.
    fn add(&mut self, other: &Self, codec: Codec) {
        codec.add(&mut self.0, &other.0);
    }
}

/// What one lane gives to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneShare {
    pub records: u64,
    pub end: LaneEnd,
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
    #[error("the gradient of block {block} is not encoded as the job says: {source}")]
    Malformed { block: u32, source: Malformed },
    #[error("{found} blocks were sent; the shard has {wanted}")]
    WrongBlocks { found: usize, wanted: usize },
    #[error(
        "the gradient of block {block} is not finite; a lower learning rate or clipping may help"
    )]
    NotFinite { block: u32 },
    #[error("lane {lane} ended before, yet sends records")]
    LaneEnded { lane: Lane },
    #[error("lane {lane} sends no record and goes on")]
    EmptyLane { lane: Lane },
    #[error("the contribution is for version {found}; the shard is at {present}")]
    Ahead { found: Version, present: Version },
    #[error("the push begins at record {from} of task {task}; {counted} are counted so far")]
    Gap { task: TaskId, from: u32, counted: u32 },
    #[error("the push holds {records} records and names {named}")]
    OtherRecords { records: u64, named: u64 },
    #[error("{count} lanes from lane {first} on are no node of the tree of {lanes} lanes")]
    NoSuchNode { first: Lane, count: usize, lanes: u32 },
    #[error("the shard of a {0} job takes no such contribution")]
    WrongMode(&'static str),
}

impl Refusal {
    /// What the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Ahead { .. } => ErrorKind::Stale,
            Self::WrongLength { .. }
            | Self::Malformed { .. }
            | Self::WrongBlocks { .. }
            | Self::NotFinite { .. }
            | Self::NoSuchNode { .. }
            | Self::LaneEnded { .. }
            | Self::EmptyLane { .. }
            | Self::Gap { .. }
            | Self::OtherRecords { .. }
            | Self::WrongMode(_) => ErrorKind::Invalid,
        }
    }
}

impl Contribution {
    /// Adds another one over the same blocks, in the arithmetic of `codec`; both hold records.
    pub(crate) fn add(&mut self, other: Self, codec: Codec) {
        self.records += other.records;
        self.loss_sum += other.loss_sum;
        self.checksum = self.checksum.wrapping_add(other.checksum);
        self.blocks.iter_mut().zip(&other.blocks).for_each(|(sum, block)| sum.add(block, codec));
    }

    /// Checks everything before anything is applied.
    ///
    /// # Errors
    /// If blocks are missing or of the wrong length.
    pub fn check(&self, blocks: &[(u32, Block)]) -> Result<(), Refusal> {
        let wanted = if self.records == 0 { 0 } else { blocks.len() };
        if self.blocks.len() != wanted {
            return Err(Refusal::WrongBlocks { found: self.blocks.len(), wanted });
        }
        for (data, (number, block)) in self.blocks.iter().zip(blocks) {
            let (found, wanted) = (size_of_val(data.values()), block.len * size_of::<f32>());
            if found != wanted {
                return Err(Refusal::WrongLength { block: *number, found, wanted });
            }
        }
        Ok(())
    }
}
