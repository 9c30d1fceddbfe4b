//! A shard as a safetensors file: parameters, optimizer state, and applied records.
//!
//! The tensors are the blocks and their optimizer state, see [`crate::BlockNames`]; everything else is JSON in the
//! file's metadata. The rows of tables are in files of their own, see [`crate::row_file`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use steadfast_common::ids::Version;
use steadfast_common::records::applied_records::AppliedRecords;
use steadfast_common::tensor::byte_segments::shared_bytes;
use steadfast_common::tensor::layout::Layout;

use crate::encode::{Dtype, EncodeError, Tensor, encode};
use crate::names::{state_name, tensor_name};
use crate::row_file::{RangeTensors, RowsMeta};

/// The key of a file's [`FileMeta`] in its metadata.
pub(crate) const META: &str = "steadfast";

/// The metadata of a shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShardMeta {
    /// Number of updates so far.
    pub updates: u64,
    /// Number of records that the values reflect.
    pub examples: u64,
    pub version: Version,
    /// Mean loss per record in the last update.
    pub loss: Option<f64>,
    /// The distinct applied records of the blocks and ranges.
    pub counts: Vec<AppliedRecords>,
    /// The index in `counts` by number of the block or range; 0 for those that are not listed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub count_of: BTreeMap<u32, usize>,
    /// Where the rows are, if the model has tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<RowsMeta>,
}

/// The metadata of a file, which says what the file may hold.
pub trait FileMeta: DeserializeOwned + Default {
    /// Returns the reason why a block or range must not be in the file, as text that follows its name. Returns `None`
    /// if it may be there.
    fn refusal(&self, number: u32, is_range: bool) -> Option<&'static str>;
}

impl FileMeta for ShardMeta {
    fn refusal(&self, number: u32, is_range: bool) -> Option<&'static str> {
        match self.counted(number) {
            _ if is_range => Some("belongs into a row file"),
            None => Some("has no applied records"),
            Some(_) => None,
        }
    }
}

impl ShardMeta {
    /// Returns the applied records of a block or range, if the shard states them.
    pub fn counted(&self, number: u32) -> Option<&AppliedRecords> {
        self.counts.get(self.count_of.get(&number).copied().unwrap_or(0))
    }
}

/// One block to be written.
#[derive(Clone, Debug)]
pub struct BlockTensors {
    pub number: u32,
    pub values: Arc<Vec<f32>>,
    /// One vector for each optimizer state, in the order of the state names.
    pub states: Arc<Vec<Vec<f32>>>,
}

/// Encodes a shard as the segments of its file. They share the memory of the blocks.
///
/// # Errors
/// If names of tensors clash, or a value is not finite.
///
/// # Panics
/// If the layout has no such block.
pub fn encode_shard(
    layout: &Layout,
    state_names: &[impl AsRef<str>],
    meta: &ShardMeta,
    blocks: impl Iterator<Item = BlockTensors>,
) -> Result<Vec<Bytes>, EncodeError> {
    let mut tensors = Vec::new();
    for block in blocks {
        let name = tensor_name(layout, &layout.blocks()[block.number as usize]);
        for (index, (state, values)) in state_names.iter().zip(&*block.states).enumerate() {
            let (name, shape) = (state_name(state.as_ref(), &name), vec![values.len()]);
            let bytes = Bytes::from_owner(State { all: block.states.clone(), index });
            tensors.push(Tensor { name, dtype: Dtype::F32, shape, bytes });
        }
        let shape = vec![block.values.len()];
        let bytes = shared_bytes(block.values);
        tensors.push(Tensor { name, dtype: Dtype::F32, shape, bytes });
    }
    let meta = serde_json::to_string(meta).expect("metadata is plain data");
    let (header, data) = encode(tensors, &BTreeMap::from([(META, meta)]))?;
    Ok([header.into()].into_iter().chain(data).collect())
}

/// One vector of a block's optimizer state.
struct State {
    all: Arc<Vec<Vec<f32>>>,
    index: usize,
}

impl AsRef<[u8]> for State {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.all[self.index])
    }
}

/// A decoded shard of valid form.
pub type ShardFile = TensorFile<ShardMeta>;

/// A decoded file of valid form.
#[derive(Clone, Debug, Default)]
pub struct TensorFile<M> {
    pub(crate) meta: M,
    pub(crate) numbers: BTreeSet<u32>,
    pub(crate) blocks: BTreeMap<u32, ReadBlock>,
    pub(crate) ranges: BTreeMap<u32, RangeTensors>,
}

/// A decoded block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReadBlock {
    pub values: Vec<f32>,
    /// The optimizer states by name.
    pub states: BTreeMap<String, Vec<f32>>,
}

impl<M> TensorFile<M> {
    pub fn meta(&self) -> &M {
        &self.meta
    }

    /// Returns the numbers of all blocks and ranges in the file, ascending, including those that were not wanted.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.numbers.iter().copied()
    }

    /// Returns the wanted blocks that the file has, by number.
    pub fn blocks(&self) -> &BTreeMap<u32, ReadBlock> {
        &self.blocks
    }

    /// Returns the wanted ranges that the file has, by number.
    pub fn into_ranges(self) -> BTreeMap<u32, RangeTensors> {
        self.ranges
    }

    /// Removes and returns a wanted block, if the file has it.
    pub fn take(&mut self, number: u32) -> Option<ReadBlock> {
        self.blocks.remove(&number)
    }
}
