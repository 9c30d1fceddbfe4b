//! Reads a shard as its bytes come, straight into the memory of its blocks.

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use steadfast_common::pieces::Pieces;

use crate::encode::{HEADER_BYTES_MAX, WORD};
use crate::names::{BlockNames, Content};
use crate::shard_file::{META, ReadBlock, ShardFile, ShardMeta};

/// A shard of which some bytes have come. Sets no memory aside for what a file only claims to hold:
/// that of a tensor is taken once all of its bytes are here.
pub struct ShardDecoder<'a> {
    names: &'a BlockNames,
    wanted: &'a (dyn Fn(u32) -> bool + Sync),
    /// Bytes that the whole file has.
    file_len: u64,
    header_max: u64,
    /// What has come of the header.
    head: Vec<u8>,
    /// What follows the header, once that is known.
    body: Option<Body>,
}

/// The part of a file behind its header.
#[derive(Default)]
struct Body {
    file: ShardFile,
    /// The tensors that have not come as a whole, in their order.
    expected: VecDeque<Expected>,
    /// What has come of the first of them.
    pieces: Pieces,
}

struct Expected {
    number: u32,
    /// The name of a state; the block's values otherwise.
    state: Option<String>,
    len: usize,
    is_wanted: bool,
}

impl<'a> ShardDecoder<'a> {
    /// A shard of `file_len` bytes, of which `header_max` at most are its header, and of which `names` are
    /// the possible blocks. Keeps the values of the `wanted` ones.
    pub fn new(
        names: &'a BlockNames,
        file_len: u64,
        header_max: u64,
        wanted: &'a (dyn Fn(u32) -> bool + Sync),
    ) -> Self {
        let header_max = header_max.min(HEADER_BYTES_MAX as u64);
        Self { names, wanted, file_len, header_max, head: Vec::new(), body: None }
    }

    /// Takes what came next.
    ///
    /// # Errors
    /// What is wrong with the shard: its form, a tensor that the layout does not know or that has
    /// another type or length, state without values, values of which it is not known what they
    /// reflect. Nothing can be pushed after that.
    pub fn push(&mut self, piece: Bytes) -> Result<(), String> {
        if let Some(body) = &mut self.body {
            return body.push(piece);
        }
        self.head.extend_from_slice(&piece);
        let Some(end) = self.header_end()? else { return Ok(()) };
        let head = Bytes::from(std::mem::take(&mut self.head));
        let mut body = self.read_header(&head[WORD..end])?;
        body.push(head.slice(end..))?;
        self.body = Some(body);
        Ok(())
    }

    /// The shard, all of whose bytes have come.
    ///
    /// # Errors
    /// If some are missing.
    pub fn finish(self) -> Result<ShardFile, String> {
        let body = self.body.filter(|body| body.expected.is_empty());
        body.map(|body| body.file).ok_or_else(|| "it has been cut short".to_owned())
    }

    /// Where the header ends, once all of it has come.
    fn header_end(&self) -> Result<Option<usize>, String> {
        let Some((word, _)) = self.head.split_first_chunk::<WORD>() else { return Ok(None) };
        let header_len = u64::from_le_bytes(*word);
        let end = header_len.saturating_add(WORD as u64);
        if self.header_max < header_len || self.file_len < end {
            return Err(format!("its header claims to have {header_len} bytes"));
        }
        let end = usize::try_from(end).expect("headers are bounded");
        Ok((end <= self.head.len()).then_some(end))
    }

    fn read_header(&self, json: &[u8]) -> Result<Body, String> {
        let header: Metadata = serde_json::from_slice(json)
            .map_err(|error| format!("its header cannot be read: {error}"))?;
        let mut body = Body::default();
        body.file.meta = read_meta(&header)?;
        let mut with_state = BTreeSet::new();
        let (mut at, data_len) = (0, self.file_len - (WORD + json.len()) as u64);
        for name in header.offset_keys() {
            let content = self.names.content(&name);
            let content =
                content.ok_or_else(|| format!("its `{name}` is no block of the model"))?;
            let (Content::Values { number } | Content::State { number, .. }) = content;
            let len = self.names.layout().blocks()[number as usize].len;
            let info = header.info(&name).expect("it is one of the header's");
            at = check_place(&name, info, len, at)?;
            let state = match content {
                Content::Values { number } => {
                    body.file.numbers.insert(number);
                    None
                }
                Content::State { number, state } => {
                    with_state.insert(number);
                    Some(state.to_owned())
                }
            };
            let is_wanted = (self.wanted)(number);
            body.expected.push_back(Expected { number, state, len, is_wanted });
        }
        if at as u64 != data_len {
            return Err(format!("its tensors have {at} bytes, and {data_len} follow the header"));
        }
        self.check_blocks(&body.file, &with_state)?;
        Ok(body)
    }

    fn check_blocks(&self, file: &ShardFile, with_state: &BTreeSet<u32>) -> Result<(), String> {
        let name = |number: u32| self.names.block(number).1;
        let uncounted = file.numbers().find(|number| file.meta.counted(*number).is_none());
        if let Some(number) = uncounted {
            return Err(format!("its `{}` is not counted", name(number)));
        }
        match with_state.difference(&file.numbers).next() {
            Some(number) => Err(format!("`{}` has optimizer state and no values", name(*number))),
            None => Ok(()),
        }
    }
}

impl Body {
    fn push(&mut self, mut piece: Bytes) -> Result<(), String> {
        loop {
            let Some(next) = self.expected.front() else {
                return match piece.is_empty() {
                    true => Ok(()),
                    false => Err("it is longer than it says".to_owned()),
                };
            };
            let missing = next.len * size_of::<f32>() - self.pieces.len();
            self.pieces.push(piece.split_to(missing.min(piece.len())));
            if self.pieces.len() < next.len * size_of::<f32>() {
                return Ok(());
            }
            self.complete();
        }
    }

    /// The first of the expected tensors is here.
    fn complete(&mut self) {
        let pieces = std::mem::take(&mut self.pieces);
        let Some(Expected { number, state, len, is_wanted }) = self.expected.pop_front() else {
            return;
        };
        if !is_wanted {
            return;
        }
        let mut values = vec![0.0; len];
        pieces.copy_to(&mut values);
        let block: &mut ReadBlock = self.file.blocks.entry(number).or_default();
        match state {
            None => block.values = values,
            Some(state) => drop(block.states.insert(state, values)),
        }
    }
}

fn read_meta(header: &Metadata) -> Result<ShardMeta, String> {
    let text = header.metadata().as_ref().and_then(|it| it.get(META));
    let text = text.ok_or_else(|| format!("it has no metadata called `{META}`"))?;
    serde_json::from_str(text).map_err(|error| format!("its metadata cannot be read: {error}"))
}

/// Where a tensor of `len` values that begins at `at` ends. The format leaves no gaps.
fn check_place(name: &str, info: &TensorInfo, len: usize, at: usize) -> Result<usize, String> {
    if info.dtype != Dtype::F32 || info.shape != [len] {
        let (dtype, shape) = (info.dtype, &info.shape);
        return Err(format!("its `{name}` is {dtype} {shape:?}, not F32 [{len}]"));
    }
    let end = at + len * size_of::<f32>();
    if info.data_offsets != (at, end) {
        return Err(format!("its `{name}` does not lie behind the tensor before it"));
    }
    Ok(end)
}
