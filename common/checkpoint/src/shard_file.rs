//! A shard as a safetensors file: parameters, optimizer state, and what they reflect.
//!
//! The tensors are blocks and their optimizer state, see [`crate::BlockNames`]; what is no tensor
//! stands in the file's metadata as JSON.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use steadfast_common::ids::Version;
use steadfast_common::layout::Layout;
use steadfast_common::pieces::shared_bytes;
use steadfast_common::tally::Counted;

use crate::encode::{EncodeError, Tensor, encode};
use crate::names::{BlockNames, Content, state_name, tensor_name};

/// Key of our JSON in a shard's metadata.
const META: &str = "steadfast";
/// Bytes of the length before a safetensors header.
const WORD: usize = size_of::<u64>();

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
#[derive(Clone, Debug)]
pub struct ShardFile {
    meta: ShardMeta,
    bytes: Bytes,
    blocks: BTreeMap<u32, Places>,
}

/// Where the tensors of a block are in the file.
#[derive(Clone, Debug)]
struct Places {
    values: Range<usize>,
    states: BTreeMap<String, Range<usize>>,
}

impl ShardFile {
    /// Checks the form of a shard of which `names` are the possible blocks. Sets no memory aside
    /// for what the file only claims to hold.
    ///
    /// # Errors
    /// What is wrong with it: its form, a tensor that the layout does not know or that has another
    /// type or length, state without values, values of which it is not known what they reflect.
    pub fn decode(names: &BlockNames, bytes: Bytes) -> Result<Self, String> {
        let (header_len, header) =
            SafeTensors::read_metadata(&bytes).map_err(|error| error.to_string())?;
        let meta = read_meta(&header)?;
        let (mut values, mut states) = (BTreeMap::new(), BTreeMap::new());
        for (name, info) in header.tensors().into_iter().collect::<BTreeMap<_, _>>() {
            let content = names.content(&name);
            let content =
                content.ok_or_else(|| format!("its `{name}` is no block of the model"))?;
            let (Content::Values { number } | Content::State { number, .. }) = content;
            let len = names.layout().blocks()[number as usize].len;
            let place = place(&name, info, len, WORD + header_len, bytes.len())?;
            match content {
                Content::Values { number } => drop(values.insert(number, place)),
                Content::State { number, state } => {
                    let of_block: &mut BTreeMap<_, _> = states.entry(number).or_default();
                    of_block.insert(state.to_owned(), place);
                }
            }
        }
        let mut blocks = BTreeMap::new();
        for (number, values) in values {
            if meta.counted(number).is_none() {
                return Err(format!("its `{}` is not counted", names.block(number).1));
            }
            let states = states.remove(&number).unwrap_or_default();
            blocks.insert(number, Places { values, states });
        }
        match states.first_key_value() {
            Some((number, _)) => {
                Err(format!("`{}` has optimizer state and no values", names.block(*number).1))
            }
            None => Ok(Self { meta, bytes, blocks }),
        }
    }

    /// What the shard says beside its tensors.
    pub fn meta(&self) -> &ShardMeta {
        &self.meta
    }

    /// The numbers of its blocks, ascending.
    pub fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.blocks.keys().copied()
    }

    /// A block's values, if it is here.
    pub fn values(&self, number: u32) -> Option<impl ExactSizeIterator<Item = f32> + '_> {
        Some(self.floats(&self.blocks.get(&number)?.values))
    }

    /// The names of a block's optimizer state, ascending.
    pub fn state_names(&self, number: u32) -> impl Iterator<Item = &str> {
        let states = self.blocks.get(&number).map(|block| &block.states);
        states.into_iter().flat_map(BTreeMap::keys).map(String::as_str)
    }

    /// One of a block's optimizer state, if it is here.
    pub fn state(
        &self,
        number: u32,
        state: &str,
    ) -> Option<impl ExactSizeIterator<Item = f32> + '_> {
        Some(self.floats(self.blocks.get(&number)?.states.get(state)?))
    }

    fn floats(&self, place: &Range<usize>) -> impl ExactSizeIterator<Item = f32> + '_ {
        let words = self.bytes[place.clone()].as_chunks::<4>().0;
        words.iter().map(|word| f32::from_le_bytes(*word))
    }
}

fn read_meta(header: &Metadata) -> Result<ShardMeta, String> {
    let text = header.metadata().as_ref().and_then(|it| it.get(META));
    let text = text.ok_or_else(|| format!("it has no metadata called `{META}`"))?;
    serde_json::from_str(text).map_err(|error| format!("its metadata cannot be read: {error}"))
}

/// Where a tensor of `len` values is in the file.
fn place(
    name: &str,
    info: &TensorInfo,
    len: usize,
    data_start: usize,
    file_len: usize,
) -> Result<Range<usize>, String> {
    if info.dtype != Dtype::F32 || info.shape != [len] {
        let (dtype, shape) = (info.dtype, &info.shape);
        return Err(format!("its `{name}` is {dtype} {shape:?}, not F32 [{len}]"));
    }
    let (start, end) = info.data_offsets;
    let range = data_start.checked_add(start).zip(data_start.checked_add(end));
    match range {
        Some((start, end)) if start <= end && end <= file_len && end - start == len * 4 => {
            Ok(start..end)
        }
        Some(_) | None => Err(format!("its `{name}` lies outside of the file")),
    }
}
