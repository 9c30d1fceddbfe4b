//! A shard as a safetensors file: parameters, optimizer state, and applied records.
//!
//! The tensors are the blocks, the rows of tables, and their optimizer state, see [`crate::BlockNames`];
//! everything else is JSON in the file's metadata.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use steadfast_common::applied_records::AppliedRecords;
use steadfast_common::byte_segments::shared_bytes;
use steadfast_common::finite::are_finite;
use steadfast_common::ids::Version;
use steadfast_common::layout::Layout;
use steadfast_common::table::{RANGES, check_ids, encode_ids};

use crate::encode::{Dtype, EncodeError, Tensor, encode};
use crate::names::{CANDIDATES, COUNTS, IDS, range_name, state_name, tensor_name};

/// The key of [`ShardMeta`] in a file's metadata.
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
}

impl ShardMeta {
    /// The applied records of a block, if the shard states them.
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

/// One range of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RangeTensors {
    /// [`Layout::number_of_range`].
    pub number: u32,
    /// Ids of the rows, ascending.
    pub ids: Vec<u64>,
    /// Number and pass of the updates of each row.
    pub counts: Vec<[u32; 2]>,
    /// Rows × width.
    pub values: Vec<f32>,
    /// The optimizer states by name, each rows × width.
    pub states: BTreeMap<String, Vec<f32>>,
    /// Ids that are counted and not admitted yet, ascending.
    pub candidate_ids: Vec<u64>,
    pub candidate_counts: Vec<[u32; 2]>,
}

impl RangeTensors {
    /// Checks that all parts are of the same rows, which belong to the range, and that values are finite.
    ///
    /// # Errors
    /// What is wrong, to follow the name of the range.
    pub fn check(&self, layout: &Layout) -> Result<(), String> {
        let index = self.number as usize - layout.blocks().len();
        let (table, range) = (&layout.tables()[index / RANGES as usize], index as u32 % RANGES);
        let ranges = range..range + 1;
        for ids in [&self.ids, &self.candidate_ids] {
            check_ids(ids, &ranges).map_err(|error| error.to_string())?;
        }
        let values = self.ids.len().saturating_mul(table.width);
        let are_complete = self.counts.len() == self.ids.len()
            && self.candidate_counts.len() == self.candidate_ids.len()
            && self.values.len() == values
            && self.states.values().all(|state| state.len() == values);
        if !are_complete {
            return Err("does not have each part of every row".to_owned());
        }
        match [&self.values].into_iter().chain(self.states.values()).all(|it| are_finite(it)) {
            true => Ok(()),
            false => Err("has a value that is not finite".to_owned()),
        }
    }

    fn into_tensors(self, layout: &Layout, tensors: &mut Vec<Tensor<Bytes>>) {
        let index = self.number as usize - layout.blocks().len();
        let table = &layout.tables()[index / RANGES as usize];
        let name = range_name(&table.name, index as u32 % RANGES);
        let (rows, candidates) = (self.ids.len(), self.candidate_ids.len());
        let mut add = |name: String, dtype, shape: &[usize], bytes: Bytes| {
            tensors.push(Tensor { name, dtype, shape: shape.to_vec(), bytes });
        };
        let pairs = |pairs: Vec<[u32; 2]>| bytemuck::cast_slice::<_, u8>(&pairs).to_vec().into();
        add(format!("{IDS}/{name}"), Dtype::U64, &[rows], encode_ids(&self.ids).into());
        add(format!("{COUNTS}/{name}"), Dtype::U32, &[rows, 2], pairs(self.counts));
        for (state, values) in self.states {
            let values = shared_bytes(values.into());
            add(state_name(&state, &name), Dtype::F32, &[rows, table.width], values);
        }
        if 0 < candidates {
            let ids = encode_ids(&self.candidate_ids).into();
            add(format!("{IDS}/{name}{CANDIDATES}"), Dtype::U64, &[candidates], ids);
            let counts = pairs(self.candidate_counts);
            add(format!("{COUNTS}/{name}{CANDIDATES}"), Dtype::U32, &[candidates, 2], counts);
        }
        let values = shared_bytes(self.values.into());
        add(name, Dtype::F32, &[rows, table.width], values);
    }
}

/// Encodes a shard as the segments of its file. They share the memory of the blocks.
///
/// # Errors
/// If names of tensors clash, or a value is not finite.
///
/// # Panics
/// If the layout has no such block or range.
pub fn encode_shard(
    layout: &Layout,
    state_names: &[&str],
    meta: &ShardMeta,
    blocks: impl Iterator<Item = BlockTensors>,
    ranges: impl Iterator<Item = RangeTensors>,
) -> Result<Vec<Bytes>, EncodeError> {
    let mut tensors = Vec::new();
    for block in blocks {
        let name = tensor_name(layout, &layout.blocks()[block.number as usize]);
        for (index, (state, values)) in state_names.iter().zip(&*block.states).enumerate() {
            let (name, shape) = (state_name(state, &name), vec![values.len()]);
            let bytes = Bytes::from_owner(State { all: block.states.clone(), index });
            tensors.push(Tensor { name, dtype: Dtype::F32, shape, bytes });
        }
        let shape = vec![block.values.len()];
        let bytes = shared_bytes(block.values);
        tensors.push(Tensor { name, dtype: Dtype::F32, shape, bytes });
    }
    ranges.for_each(|range| range.into_tensors(layout, &mut tensors));
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
#[derive(Clone, Debug, Default)]
pub struct ShardFile {
    pub(crate) meta: ShardMeta,
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

impl ShardFile {
    /// The metadata of the shard.
    pub fn meta(&self) -> &ShardMeta {
        &self.meta
    }

    /// The numbers of all blocks and ranges in the shard, ascending, including those that were not wanted.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.numbers.iter().copied()
    }

    /// The wanted blocks that the shard has, by number.
    pub fn blocks(&self) -> &BTreeMap<u32, ReadBlock> {
        &self.blocks
    }

    /// The wanted ranges that the shard has, by number.
    pub fn ranges(&self) -> &BTreeMap<u32, RangeTensors> {
        &self.ranges
    }

    /// Removes and returns a wanted range, if the shard has it.
    pub fn take_range(&mut self, number: u32) -> Option<RangeTensors> {
        self.ranges.remove(&number)
    }

    /// Removes and returns a wanted block, if the shard has it.
    pub fn take(&mut self, number: u32) -> Option<ReadBlock> {
        self.blocks.remove(&number)
    }
}
