//! Contributions to a shard, and the reasons to refuse them.

use std::sync::Arc;

use bytes::Bytes;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Lane, TaskId, Version};
use steadfast_common::records::contribution::LaneShare;
use steadfast_common::tensor::byte_segments::{ByteSegments, shared_bytes};
use steadfast_common::tensor::compression::{Codec, Malformed};
use steadfast_common::tensor::finite::are_finite;
use steadfast_common::tensor::layout::Block;
use steadfast_common::tensor::table::Rows;
use steadfast_pserver_storage::StorageError;

use crate::buffer_pool::PooledBuffer;
use crate::update::STRIP;

/// The sum of the gradients of some records, for all blocks of a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Contribution {
    /// Number of records in the sum.
    pub records: u64,
    /// Sum of the losses of the records.
    pub loss_sum: f64,
    /// Asynchronous mode: what the mean is divided by, if that is not the number of records. In synchronous mode the
    /// shares of the lanes say it.
    pub weight: Option<f64>,
    /// Sum of the checksums of the records (see [`steadfast_common::records::applied_records`]).
    pub checksum: u64,
    /// Values of the shard's blocks; empty if the contribution has no records.
    pub blocks: Vec<ValidatedBlock>,
    /// Gradients of the rows of each table in the shard's ranges, all of them finite. They count once the
    /// contribution is complete.
    pub rows: Vec<Rows>,
}

/// Record count, loss sum, checksum and rows of a contribution.
#[derive(Clone, Debug, PartialEq)]
pub struct Total {
    pub records: u64,
    pub loss_sum: f64,
    pub checksum: u64,
    pub rows: Vec<Rows>,
}

/// What sums over records are divided by: averaged tensors by the number of records, gradients and losses by the
/// weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divisor {
    pub records: u64,
    pub weight: f64,
}

impl Divisor {
    /// Creates the divisor of sums over records that have a weight, or count once each.
    pub fn new(records: u64, weight: Option<f64>) -> Self {
        Self { records, weight: weight.unwrap_or(records as f64) }
    }

    /// Returns the mean of a loss; `None` if nothing counts.
    pub(crate) fn mean_of(self, loss_sum: f64) -> Option<f64> {
        (self.weight != 0.0).then(|| loss_sum / self.weight)
    }
}

/// Values of one block, all of them finite. Cheap to clone.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidatedBlock {
    block: u32,
    values: Arc<PooledBuffer>,
}

impl ValidatedBlock {
    /// Copies received values into `memory`.
    ///
    /// # Errors
    /// If the length differs from that of `memory`, or a value is not finite.
    pub fn new(
        block: u32,
        values: &ByteSegments,
        mut memory: PooledBuffer,
    ) -> Result<Self, Refusal> {
        let (found, wanted) = (values.len(), size_of_val(&memory[..]));
        if found != wanted {
            return Err(Refusal::WrongLength { block, found, wanted });
        }
        let mut are_all_finite = true;
        values.for_each_run(|from, run| {
            let place = &mut memory[from..from + run.len()];
            // Checked strip by strip, while the values are in the fastest cache.
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
        Ok(Self { block, values: Arc::new(memory) })
    }

    /// Returns the number of the block.
    pub fn block(&self) -> u32 {
        self.block
    }

    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Encodes the values, without a copy if `codec` does not change them.
    pub fn encode(&self, codec: Codec) -> Bytes {
        match codec {
            Codec::Plain => shared_bytes(self.values.clone()),
            codec => codec.encode(&self.values).into(),
        }
    }

    /// Decodes values that were encoded with the job's `codec`.
    ///
    /// # Errors
    /// As [`ValidatedBlock::new`], and if the encoding is not that of `codec`.
    pub fn decode(
        codec: Codec,
        block: u32,
        bytes: &ByteSegments,
        mut memory: PooledBuffer,
    ) -> Result<Self, Refusal> {
        if codec == Codec::Plain {
            return Self::new(block, bytes, memory);
        }
        let malformed = |source| Refusal::Malformed { block, source };
        codec.decode(&bytes.joined(), &mut memory).map_err(malformed)?;
        if !are_finite(&memory) {
            return Err(Refusal::NotFinite { block });
        }
        Ok(Self { block, values: Arc::new(memory) })
    }

    /// Adds other values of the same block in the arithmetic of `codec`.
    pub(crate) fn add(&mut self, other: &Self, codec: Codec) {
        // A sum that is not complete has no other owner.
        let sum: &mut PooledBuffer = Arc::make_mut(&mut self.values);
        codec.add(sum, &other.values);
    }
}

/// The outcome of a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contributed {
    /// A contribution of the same name was received before; nothing changed.
    Duplicate,
    /// The step still waits for other lanes.
    Waiting,
    /// The contribution was the last one of its step, or was applied at once.
    Complete,
}

/// The reason why a contribution was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("block {block} has {found} bytes, expected {wanted}")]
    WrongLength { block: u32, found: usize, wanted: usize },
    #[error("cannot decode the gradient of block {block}: {source}")]
    Malformed { block: u32, source: Malformed },
    #[error("{found} blocks were sent, expected {wanted}")]
    WrongBlocks { found: usize, wanted: usize },
    #[error("block {block} does not belong to this shard or was sent twice")]
    UnexpectedBlock { block: u32 },
    #[error(
        "the gradient of block {block} is not finite; a lower learning rate or clipping may help"
    )]
    NotFinite { block: u32 },
    #[error("lane {lane} is exhausted but sent records")]
    LaneExhausted { lane: Lane },
    #[error("lane {lane} was pushed before with other records")]
    ConflictingShare { lane: Lane },
    #[error(
        "a contribution to the step names {found} reductions of its learning rate, and another one {known}"
    )]
    ConflictingRate { found: u32, known: u32 },
    #[error("the contribution is for version {found}; the shard is at {present}")]
    Ahead { found: Version, present: Version },
    #[error(
        "the push begins at record {from} of task {task}; {counted} records are applied so far"
    )]
    Gap { task: TaskId, from: u32, counted: u32 },
    #[error(
        "the weight {weight} of some records is neither 0 nor between {WEIGHT_MIN:e} and {WEIGHT_MAX:e}"
    )]
    BadWeight { weight: f64 },
    #[error("the push holds {records} records but names {named}")]
    RecordsMismatch { records: u64, named: u64 },
    #[error(
        "{count} lanes starting at lane {first} do not form a node of the tree of {lanes} lanes"
    )]
    NoSuchNode { first: Lane, count: usize, lanes: u32 },
    #[error("a {0} job does not accept this kind of contribution")]
    WrongMode(&'static str),
    #[error("rows of {found} tables were sent, expected {wanted} with the widths of the model")]
    WrongTables { found: usize, wanted: usize },
    #[error(
        "the state of the optimizer in `start.optimizer` has the vectors {found:?}, and the optimizer of the job \
         {wanted:?}; set `optimizer` as in the job that the state is from"
    )]
    OtherStates { found: Vec<String>, wanted: Vec<String> },
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl Refusal {
    /// Returns the kind of the error: what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Ahead { .. } => ErrorKind::Stale,
            // The slot discards its shard, and a new generation begins.
            Self::ConflictingShare { .. } | Self::ConflictingRate { .. } | Self::Storage(_) => {
                ErrorKind::Unavailable
            }
            Self::WrongLength { .. }
            | Self::Malformed { .. }
            | Self::WrongBlocks { .. }
            | Self::UnexpectedBlock { .. }
            | Self::NotFinite { .. }
            | Self::NoSuchNode { .. }
            | Self::LaneExhausted { .. }
            | Self::Gap { .. }
            | Self::BadWeight { .. }
            | Self::RecordsMismatch { .. }
            | Self::WrongMode(_)
            | Self::WrongTables { .. }
            | Self::OtherStates { .. } => ErrorKind::Invalid,
        }
    }

    /// Returns whether the shard must be discarded, because its step can never be completed or a part of it was
    /// applied.
    pub fn is_fatal(&self) -> bool {
        matches!(
            self,
            Self::ConflictingShare { .. } | Self::ConflictingRate { .. } | Self::Storage(_)
        )
    }
}

impl Total {
    /// Adds the total of other records.
    pub(crate) fn add(&mut self, other: Self) {
        self.records += other.records;
        self.loss_sum += other.loss_sum;
        self.checksum = self.checksum.wrapping_add(other.checksum);
        self.rows.iter_mut().zip(&other.rows).for_each(|(sum, rows)| sum.add(rows));
    }
}

impl Contribution {
    /// Returns the blocks and the total, which is `None` if the contribution has no records.
    pub(crate) fn into_parts(self) -> (Vec<ValidatedBlock>, Option<Total>) {
        let Self { records, loss_sum, weight: _, checksum, blocks, rows } = self;
        (blocks, (0 < records).then_some(Total { records, loss_sum, checksum, rows }))
    }

    /// Checks that there are rows for each table, of its width.
    pub(crate) fn check_tables(&self, widths: &[usize]) -> Result<(), Refusal> {
        let (found, wanted) = (self.rows.len(), widths.len());
        match self.rows.iter().map(Rows::width).eq(widths.iter().copied()) {
            true => Ok(()),
            false => Err(Refusal::WrongTables { found, wanted }),
        }
    }
}

/// Checks that the record count and checksum of a contribution are the sums of those of its lanes, and their weights
/// valid.
///
/// # Errors
/// [`Refusal::RecordsMismatch`], [`Refusal::BadWeight`].
pub fn check_records(shares: &[LaneShare], records: u64, checksum: u64) -> Result<(), Refusal> {
    shares.iter().filter_map(|it| it.weight).try_for_each(check_weight)?;
    let named = shares.iter().map(|it| u64::from(it.records)).sum();
    let sum = shares.iter().map(|it| it.checksum).fold(0, u64::wrapping_add);
    if (named, sum) == (records, checksum) {
        Ok(())
    } else {
        Err(Refusal::RecordsMismatch { records, named })
    }
}

/// What the records of a lane may count, unless they count nothing: means are computed in `f32`, which the sum over all
/// lanes must not exceed.
const WEIGHT_MIN: f64 = 1e-30;
const WEIGHT_MAX: f64 = 1e30;

/// Checks what some records count.
pub(crate) fn check_weight(weight: f64) -> Result<(), Refusal> {
    let is_valid = weight == 0.0 || (WEIGHT_MIN..=WEIGHT_MAX).contains(&weight);
    if is_valid { Ok(()) } else { Err(Refusal::BadWeight { weight }) }
}

/// Maps the blocks of a contribution to their indices within the shard, in ascending order.
///
/// # Errors
/// If a block does not belong to the shard, has another length, or appears twice.
pub(crate) fn locate(
    received: Vec<ValidatedBlock>,
    blocks: &[(u32, Block)],
) -> Result<Vec<(usize, ValidatedBlock)>, Refusal> {
    let mut placed = Vec::with_capacity(received.len());
    for data in received {
        let block = data.block;
        let place = blocks.binary_search_by_key(&block, |(number, _)| *number);
        let place = place.map_err(|_| Refusal::UnexpectedBlock { block })?;
        let (found, wanted) = (size_of_val(data.values()), blocks[place].1.len * size_of::<f32>());
        if found != wanted {
            return Err(Refusal::WrongLength { block, found, wanted });
        }
        placed.push((place, data));
    }
    placed.sort_unstable_by_key(|(place, _)| *place);
    match placed.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(Refusal::UnexpectedBlock { block: pair[0].1.block }),
        None => Ok(placed),
    }
}
