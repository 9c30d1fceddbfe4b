//! Decodes a shard incrementally, directly into the memory of its blocks.

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use steadfast_common::byte_segments::ByteSegments;

use crate::encode::{HEADER_BYTES_MAX, WORD};
use crate::names::{BlockNames, Content};
use crate::shard_file::{META, ReadBlock, ShardFile, ShardMeta};

/// Decodes a shard that arrives in segments. Does not trust sizes that a file claims: memory for a
/// tensor is allocated only when all its bytes have arrived.
pub struct ShardDecoder<'a> {
    names: &'a BlockNames,
    wanted: &'a (dyn Fn(u32) -> bool + Sync),
    /// Size of the whole file in bytes.
    file_len: u64,
    header_max: u64,
    /// The received part of the header.
    head: Vec<u8>,
    /// The part after the header, once that is complete.
    body: Option<Body>,
}

/// The part of a file after its header.
#[derive(Default)]
struct Body {
    file: ShardFile,
    /// The tensors that are not complete, in file order.
    expected: VecDeque<Expected>,
    /// The received bytes of the first of them.
    segments: ByteSegments,
}

struct Expected {
    number: u32,
    /// The name of an optimizer state; absent for the block's values.
    state: Option<String>,
    len: usize,
    is_wanted: bool,
}

impl<'a> ShardDecoder<'a> {
    /// Creates a decoder for a file of `file_len` bytes with a header of at most `header_max` bytes and
    /// with blocks from `names`. It keeps the values of the `wanted` blocks.
    pub fn new(
        names: &'a BlockNames,
        file_len: u64,
        header_max: u64,
        wanted: &'a (dyn Fn(u32) -> bool + Sync),
    ) -> Self {
        let header_max = header_max.min(HEADER_BYTES_MAX as u64);
        Self { names, wanted, file_len, header_max, head: Vec::new(), body: None }
    }

    /// Decodes the next bytes.
    ///
    /// # Errors
    /// If the shard is malformed, contains a tensor that is unknown to the layout or has another type
    /// or length, has state without values, or has values without applied records. The decoder cannot
    /// be used after an error.
    pub fn push(&mut self, segment: Bytes) -> Result<(), String> {
        if let Some(body) = &mut self.body {
            return body.push(segment);
        }
        self.head.extend_from_slice(&segment);
        let Some(end) = self.header_end()? else { return Ok(()) };
        let head = Bytes::from(std::mem::take(&mut self.head));
        let mut body = self.read_header(&head[WORD..end])?;
        body.push(head.slice(end..))?;
        self.body = Some(body);
        Ok(())
    }

    /// Returns the shard after its last byte.
    ///
    /// # Errors
    /// If bytes are missing.
    pub fn finish(self) -> Result<ShardFile, String> {
        let body = self.body.filter(|body| body.expected.is_empty());
        body.map(|body| body.file).ok_or_else(|| "it is truncated".to_owned())
    }

    /// Where the header ends, if all of it has arrived.
    fn header_end(&self) -> Result<Option<usize>, String> {
        let Some((word, _)) = self.head.split_first_chunk::<WORD>() else { return Ok(None) };
        let header_len = u64::from_le_bytes(*word);
        let end = header_len.saturating_add(WORD as u64);
        if self.header_max < header_len || self.file_len < end {
            return Err(format!("its header claims a length of {header_len} bytes"));
        }
        let end = usize::try_from(end).expect("headers are bounded");
        Ok((end <= self.head.len()).then_some(end))
    }

    fn read_header(&self, json: &[u8]) -> Result<Body, String> {
        let header: Metadata = serde_json::from_slice(json)
            .map_err(|error| format!("its header cannot be parsed: {error}"))?;
        let mut body = Body::default();
        body.file.meta = read_meta(&header)?;
        let mut with_state = BTreeSet::new();
        let (mut at, data_len) = (0, self.file_len - (WORD + json.len()) as u64);
        for name in header.offset_keys() {
            let content = self.names.content(&name);
            let content = content
                .ok_or_else(|| format!("its tensor `{name}` is not a block of the model"))?;
            let (Content::Values { number } | Content::State { number, .. }) = content;
            let len = self.names.layout().blocks()[number as usize].len;
            let info = header.info(&name).expect("the name is from the header");
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
            return Err(format!("its tensors have {at} bytes, but {data_len} follow the header"));
        }
        self.check_blocks(&body.file, &with_state)?;
        Ok(body)
    }

    fn check_blocks(&self, file: &ShardFile, with_state: &BTreeSet<u32>) -> Result<(), String> {
        let name = |number: u32| self.names.block(number).1;
        let uncounted = file.numbers().find(|number| file.meta.counted(*number).is_none());
        if let Some(number) = uncounted {
            return Err(format!("its tensor `{}` has no applied records", name(number)));
        }
        match with_state.difference(&file.numbers).next() {
            Some(number) => Err(format!("`{}` has optimizer state but no values", name(*number))),
            None => Ok(()),
        }
    }
}

impl Body {
    fn push(&mut self, mut segment: Bytes) -> Result<(), String> {
        loop {
            let Some(next) = self.expected.front() else {
                return match segment.is_empty() {
                    true => Ok(()),
                    false => Err("it has bytes after its last tensor".to_owned()),
                };
            };
            let missing = next.len * size_of::<f32>() - self.segments.len();
            self.segments.push(segment.split_to(missing.min(segment.len())));
            if self.segments.len() < next.len * size_of::<f32>() {
                return Ok(());
            }
            self.complete();
        }
    }

    /// Stores the first expected tensor, all of whose bytes have arrived.
    fn complete(&mut self) {
        let segments = std::mem::take(&mut self.segments);
        let Some(Expected { number, state, len, is_wanted }) = self.expected.pop_front() else {
            return;
        };
        if !is_wanted {
            return;
        }
        let mut values = vec![0.0; len];
        segments.copy_to(&mut values);
        let block: &mut ReadBlock = self.file.blocks.entry(number).or_default();
        match state {
            None => block.values = values,
            Some(state) => drop(block.states.insert(state, values)),
        }
    }
}

fn read_meta(header: &Metadata) -> Result<ShardMeta, String> {
    let text = header.metadata().as_ref().and_then(|it| it.get(META));
    let text = text.ok_or_else(|| format!("it has no metadata entry `{META}`"))?;
    serde_json::from_str(text).map_err(|error| format!("its metadata cannot be parsed: {error}"))
}

/// Checks that a tensor has `len` values and begins at `at`, since the format has no gaps; returns its
/// end.
fn check_place(name: &str, info: &TensorInfo, len: usize, at: usize) -> Result<usize, String> {
    if info.dtype != Dtype::F32 || info.shape != [len] {
        let (dtype, shape) = (info.dtype, &info.shape);
        return Err(format!("its tensor `{name}` is {dtype} {shape:?}, not F32 [{len}]"));
    }
    let end = at + len * size_of::<f32>();
    if info.data_offsets != (at, end) {
        return Err(format!("its tensor `{name}` does not follow the previous one"));
    }
    Ok(end)
}
