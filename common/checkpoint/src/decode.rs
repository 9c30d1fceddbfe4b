//! Decodes a shard or a row file incrementally, directly into the memory of its blocks and rows.

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use steadfast_common::tensor::byte_segments::ByteSegments;

use crate::encode::{HEADER_BYTES_MAX, WORD};
use crate::names::{BlockNames, Content, RowsPart};
use crate::row_file::{RangeTensors, RowFileMeta};
use crate::shard_file::{FileMeta, META, ReadBlock, ShardMeta, TensorFile};

/// Decodes a shard.
pub type ShardDecoder<'a> = Decoder<'a, ShardMeta>;

/// Decodes a row file.
pub type RowFileDecoder<'a> = Decoder<'a, RowFileMeta>;

/// Decodes a file that arrives in segments. Does not trust sizes that a file claims: memory for a
/// tensor is allocated only when all its bytes have arrived.
pub struct Decoder<'a, M> {
    names: &'a BlockNames,
    wanted: &'a (dyn Fn(u32) -> bool + Sync),
    /// Size of the whole file in bytes.
    file_len: u64,
    header_max: u64,
    /// The received part of the header.
    head: Vec<u8>,
    /// The part after the header, once that is complete.
    body: Option<Body<M>>,
}

/// The part of a file after its header.
#[derive(Default)]
struct Body<M> {
    file: TensorFile<M>,
    /// The tensors that are not complete, in file order.
    expected: VecDeque<Expected>,
    /// The received bytes of the first expected tensor.
    segments: ByteSegments,
}

struct Expected {
    number: u32,
    what: What,
    bytes: usize,
    is_wanted: bool,
}

/// The part of a block or range that a tensor holds.
enum What {
    Values,
    State(String),
    RowIds,
    RowCounts,
    RowValues,
    RowState(String),
    CandidateIds,
    CandidateCounts,
}

impl<'a, M: FileMeta> Decoder<'a, M> {
    /// Creates a decoder for a file of `file_len` bytes with a header of at most `header_max` bytes and
    /// with blocks and ranges from `names`. It keeps those that are `wanted`.
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
    /// If the file is malformed, contains a tensor that is unknown to the layout, has another type or length, or
    /// must not be in such a file, or has state without values. The decoder cannot be used after an error.
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

    /// Returns the file after its last byte.
    ///
    /// # Errors
    /// If bytes are missing.
    pub fn finish(self) -> Result<TensorFile<M>, String> {
        let body = self.body.filter(|body| body.expected.is_empty());
        body.map(|body| body.file).ok_or_else(|| "it is truncated".to_owned())
    }

    /// Returns the offset at which the header ends, or `None` while a part of the header is missing. Fails if the
    /// header claims to exceed its limit or the file.
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

    fn read_header(&self, json: &[u8]) -> Result<Body<M>, String> {
        let header: Metadata = serde_json::from_slice(json)
            .map_err(|error| format!("its header cannot be parsed: {error}"))?;
        let mut body = Body::<M>::default();
        body.file.meta = read_meta(&header)?;
        let mut with_state = BTreeSet::new();
        let (mut at, data_len) = (0, self.file_len - (WORD + json.len()) as u64);
        for name in header.offset_keys() {
            let content = self.names.content(&name);
            let content = content
                .ok_or_else(|| format!("its tensor `{name}` is not a block of the model"))?;
            let info = header.info(&name).expect("the name is from the header");
            let len = |number: u32| vec![self.names.layout().blocks()[number as usize].len];
            // A file may claim any number of rows: it has as many bytes, or is refused.
            let rows = *info.shape.first().unwrap_or(&0);
            let (number, what, dtype, shape) = match content {
                Content::Values { number } => {
                    body.file.numbers.insert(number);
                    (number, What::Values, Dtype::F32, len(number))
                }
                Content::State { number, state } => {
                    with_state.insert(number);
                    (number, What::State(state.to_owned()), Dtype::F32, len(number))
                }
                Content::Rows { number, width, part } => {
                    let (what, dtype, shape) = rows_part(part, rows, width);
                    match what {
                        What::RowValues => drop(body.file.numbers.insert(number)),
                        _ => drop(with_state.insert(number)),
                    }
                    (number, what, dtype, shape)
                }
            };
            let start = at;
            at = check_place(&name, info, dtype, &shape, at)?;
            let is_wanted = (self.wanted)(number);
            body.expected.push_back(Expected { number, what, bytes: at - start, is_wanted });
        }
        if at as u64 != data_len {
            return Err(format!("its tensors have {at} bytes, but {data_len} follow the header"));
        }
        self.check_blocks(&body.file, &with_state)?;
        Ok(body)
    }

    fn check_blocks(&self, file: &TensorFile<M>, with_state: &BTreeSet<u32>) -> Result<(), String> {
        let name = |number: u32| self.names.name(number);
        let is_range = |number: u32| self.names.layout().blocks().len() <= number as usize;
        for number in file.numbers() {
            if let Some(refusal) = file.meta.refusal(number, is_range(number)) {
                return Err(format!("its tensor `{}` {refusal}", name(number)));
            }
        }
        match with_state.difference(&file.numbers).next() {
            Some(number) => Err(format!("`{}` has optimizer state but no values", name(*number))),
            None => Ok(()),
        }
    }
}

impl<M> Body<M> {
    fn push(&mut self, mut segment: Bytes) -> Result<(), String> {
        loop {
            let Some(next) = self.expected.front() else {
                return match segment.is_empty() {
                    true => Ok(()),
                    false => Err("it has bytes after its last tensor".to_owned()),
                };
            };
            let missing = next.bytes - self.segments.len();
            self.segments.push(segment.split_to(missing.min(segment.len())));
            if self.segments.len() < next.bytes {
                return Ok(());
            }
            self.complete();
        }
    }

    /// Stores the first expected tensor, all of whose bytes have arrived.
    fn complete(&mut self) {
        let segments = std::mem::take(&mut self.segments);
        let Some(Expected { number, what, bytes, is_wanted }) = self.expected.pop_front() else {
            return;
        };
        if !is_wanted {
            return;
        }
        let values = || {
            let mut values = vec![0.0; bytes / size_of::<f32>()];
            segments.copy_to(&mut values);
            values
        };
        match what {
            What::Values => self.block(number).values = values(),
            What::State(state) => drop(self.block(number).states.insert(state, values())),
            What::RowIds => self.range(number).ids = words(&segments),
            What::RowCounts => self.range(number).counts = pairs(&segments),
            What::RowValues => self.range(number).values = values(),
            What::RowState(state) => drop(self.range(number).states.insert(state, values())),
            What::CandidateIds => self.range(number).candidate_ids = words(&segments),
            What::CandidateCounts => self.range(number).candidate_counts = pairs(&segments),
        }
    }

    fn block(&mut self, number: u32) -> &mut ReadBlock {
        self.file.blocks.entry(number).or_default()
    }

    fn range(&mut self, number: u32) -> &mut RangeTensors {
        let empty = RangeTensors { number, ..RangeTensors::default() };
        self.file.ranges.entry(number).or_insert(empty)
    }
}

/// Returns what a part of a range with this number of rows is, and its type and shape.
fn rows_part(part: RowsPart<'_>, rows: usize, width: usize) -> (What, Dtype, Vec<usize>) {
    match part {
        RowsPart::Ids => (What::RowIds, Dtype::U64, vec![rows]),
        RowsPart::Counts => (What::RowCounts, Dtype::U32, vec![rows, 2]),
        RowsPart::Values => (What::RowValues, Dtype::F32, vec![rows, width]),
        RowsPart::State(state) => (What::RowState(state.to_owned()), Dtype::F32, vec![rows, width]),
        RowsPart::CandidateIds => (What::CandidateIds, Dtype::U64, vec![rows]),
        RowsPart::CandidateCounts => (What::CandidateCounts, Dtype::U32, vec![rows, 2]),
    }
}

fn words(segments: &ByteSegments) -> Vec<u64> {
    segments.joined().as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn pairs(segments: &ByteSegments) -> Vec<[u32; 2]> {
    let pair = |word: u64| [word as u32, (word >> u32::BITS) as u32];
    words(segments).into_iter().map(pair).collect()
}

fn read_meta<M: FileMeta>(header: &Metadata) -> Result<M, String> {
    let text = header.metadata().as_ref().and_then(|it| it.get(META));
    let text = text.ok_or_else(|| format!("it has no metadata entry `{META}`"))?;
    serde_json::from_str(text).map_err(|error| format!("its metadata cannot be parsed: {error}"))
}

/// Checks that a tensor has this type and shape and begins at `at`, since the format has no gaps; returns its
/// end.
fn check_place(
    name: &str,
    info: &TensorInfo,
    dtype: Dtype,
    shape: &[usize],
    at: usize,
) -> Result<usize, String> {
    if info.dtype != dtype || info.shape != shape {
        let (found, of) = (info.dtype, &info.shape);
        return Err(format!("its tensor `{name}` is {found} {of:?}, not {dtype} {shape:?}"));
    }
    let value = if dtype == Dtype::U64 { size_of::<u64>() } else { size_of::<u32>() };
    let bytes = shape.iter().fold(value, |bytes, side| bytes.saturating_mul(*side));
    let end = at.saturating_add(bytes);
    if info.data_offsets != (at, end) {
        return Err(format!("its tensor `{name}` does not follow the previous one"));
    }
    Ok(end)
}
