//! A shard as a safetensors file: parameters, optimizer state, and what they reflect.
//!
//! The tensors are blocks and their optimizer state, see [`crate::BlockNames`]; what is no tensor
//! stands in the file's metadata as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use steadfast_common::ids::Version;
use steadfast_common::layout::Layout;
use steadfast_common::pieces::shared_bytes;
use steadfast_common::tally::Counted;

use crate::encode::{EncodeError, Tensor, encode};
use crate::names::{state_name, tensor_name};

/// Key of our JSON in a shard's metadata.
pub(crate) const META: &str = "steadfast";

/// What a shard says beside its tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShardMeta {
    /// Updates so far.
    pub updates: u64,
    /// Records that the values reflect.
    pub examples: u64,
    pub version: Version,
    /// Mean loss of a record in the last update.
    pub loss: Option<f64>,
    /// What the blocks reflect.
    pub counts: Vec<Counted>,
    /// Which of `counts` is a block's, by its number, where it is not the first.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub count_of: BTreeMap<u32, usize>,
}

impl ShardMeta {
    /// What a block reflects, if the shard says so.
    pub fn counted(&self, number: u32) -> Option<&Counted> {
        self.counts.get(self.count_of.get(&number).copied().unwrap_or(0))
    }
}

/// One block to be written.
#[derive(Clone, Debug)]
pub struct BlockTensors {
    pub number: u32,
    pub values: Arc<Vec<f32>>,
    /// One vector for each name of a state.
    pub states: Arc<Vec<Vec<f32>>>,
}

/// Writes a shard: the pieces of its file. They are the blocks' own memory, not copies.
///
/// # Errors
/// If names of tensors clash.
///
/// # Panics
/// If the layout has no such block.
pub fn encode_shard(
    layout: &Layout,
    state_names: &[&str],
    meta: &ShardMeta,
    blocks: impl Iterator<Item = BlockTensors>,
) -> Result<Vec<Bytes>, EncodeError> {
    let mut tensors = Vec::new();
    for block in blocks {
        let name = tensor_name(layout, &layout.blocks()[block.number as usize]);
        for (index, (state, values)) in state_names.iter().zip(&*block.states).enumerate() {
            let (name, shape) = (state_name(state, &name), vec![values.len()]);
            let bytes = Bytes::from_owner(State { all: block.states.clone(), index });
            tensors.push(Tensor { name, shape, bytes });
        }
        let shape = vec![block.values.len()];
        tensors.push(Tensor { name, shape, bytes: shared_bytes(block.values) });
    }
    let meta = serde_json::to_string(meta).expect("metadata are plain data");
    let (header, data) = encode(tensors, &BTreeMap::from([(META, meta)]))?;
    Ok([header.into()].into_iter().chain(data).collect())
}

/// One vector of a block's state.
struct State {
    all: Arc<Vec<Vec<f32>>>,
    index: usize,
}

impl AsRef<[u8]> for State {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.all[self.index])
    }
}

/// A shard that was read and whose form was checked.
#[derive(Clone, Debug, Default)]
pub struct ShardFile {
    pub(crate) meta: ShardMeta,
    pub(crate) numbers: BTreeSet<u32>,
    pub(crate) blocks: BTreeMap<u32, ReadBlock>,
}

/// A block that was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReadBlock {
    pub values: Vec<f32>,
    /// Its optimizer state by name.
    pub states: BTreeMap<String, Vec<f32>>,
}

impl ShardFile {
    /// What the shard says beside its tensors.
    pub fn meta(&self) -> &ShardMeta {
        &self.meta
    }

    /// The numbers of all its blocks, ascending, whether their values were asked for or not.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.numbers.iter().copied()
    }

    /// The blocks that were asked for and are here, by number.
    pub fn blocks(&self) -> &BTreeMap<u32, ReadBlock> {
        &self.blocks
    }

    /// Takes a block out, if it was asked for and is here.
    pub fn take(&mut self, number: u32) -> Option<ReadBlock> {
        self.blocks.remove(&number)
    }
}
