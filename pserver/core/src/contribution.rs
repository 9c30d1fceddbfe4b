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
    /// Values of the shard's blocks; empty when no record was summed up.
    pub blocks: Vec<Finite>,
}

/// What is counted of a contribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Total {
    pub records: u64,
    pub loss_sum: f64,
    pub checksum: u64,
}

/// Values of one block, none of which is infinite or NaN.
#[derive(Clone, Debug, PartialEq)]
pub struct Finite {
    block: u32,
    values: Lent,
}

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
        if !are_all_finite {
            return Err(Refusal::NotFinite { block });
        }
        Ok(Self { block, values: memory })
    }

    /// The number of the block.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// The values.
    pub fn values(&self) -> &[f32] {
        &self.values
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
        if !are_finite(&memory) {
            return Err(Refusal::NotFinite { block });
        }
        Ok(Self { block, values: memory })
    }

    /// Adds other values of the same block, in the arithmetic of `codec`.
    pub(crate) fn add(&mut self, other: &Self, codec: Codec) {
        codec.add(&mut self.values, &other.values);
    }
}

/// What one lane gives to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneShare {
    pub records: u64,
    /// Sum of their checksums.
    pub checksum: u64,
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
    #[error("block {block} is not the shard's, or comes twice")]
    OtherBlock { block: u32 },
    #[error(
        "the gradient of block {block} is not finite; a lower learning rate or clipping may help"
    )]
    NotFinite { block: u32 },
    #[error("lane {lane} ended before, yet sends records")]
    LaneEnded { lane: Lane },
    #[error("lane {lane} sends no record and goes on")]
    EmptyLane { lane: Lane },
    #[error("lane {lane} is said to have other records than before")]
    OtherShare { lane: Lane },
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
            // The slot ends, and a generation begins.
            Self::OtherShare { .. } => ErrorKind::Unavailable,
            Self::WrongLength { .. }
            | Self::Malformed { .. }
            | Self::WrongBlocks { .. }
            | Self::OtherBlock { .. }
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

impl Total {
    /// Adds that of other records.
    pub(crate) fn add(&mut self, other: Self) {
        self.records += other.records;
        self.loss_sum += other.loss_sum;
        self.checksum = self.checksum.wrapping_add(other.checksum);
    }
}

impl Contribution {
    /// What is counted; nothing if there is no record.
    pub(crate) fn total(&self) -> Option<Total> {
        let Self { records, loss_sum, checksum, .. } = *self;
        (0 < records).then_some(Total { records, loss_sum, checksum })
    }
}

/// Checks that a contribution of `records` with that `checksum` holds just what its lanes say.
///
/// # Errors
/// [`Refusal::OtherRecords`].
pub fn check_records(shares: &[LaneShare], records: u64, checksum: u64) -> Result<(), Refusal> {
    let named = shares.iter().map(|it| it.records).fold(0, u64::saturating_add);
    let sum = shares.iter().map(|it| it.checksum).fold(0, u64::wrapping_add);
    if (named, sum) == (records, checksum) {
        Ok(())
    } else {
        Err(Refusal::OtherRecords { records, named })
    }
}

/// The places of a contribution's blocks among a shard's, ascending.
///
/// # Errors
/// If one is not the shard's, is of another length, or comes twice.
pub(crate) fn places(
    given: Vec<Finite>,
    blocks: &[(u32, Block)],
) -> Result<Vec<(usize, Finite)>, Refusal> {
    let mut placed = Vec::with_capacity(given.len());
    for data in given {
        let block = data.block;
        let place = blocks.binary_search_by_key(&block, |(number, _)| *number);
        let place = place.map_err(|_| Refusal::OtherBlock { block })?;
        let (found, wanted) = (size_of_val(data.values()), blocks[place].1.len * size_of::<f32>());
        if found != wanted {
            return Err(Refusal::WrongLength { block, found, wanted });
        }
        placed.push((place, data));
    }
    placed.sort_unstable_by_key(|(place, _)| *place);
    match placed.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(Refusal::OtherBlock { block: pair[0].1.block }),
        None => Ok(placed),
    }
}
