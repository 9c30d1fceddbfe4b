//! Encodes messages with tensors without copying the values.
//!
//! The wire format is standard gRPC: a prefix of five bytes, then a message with `header = 1` and
//! `blocks = 2`. The usual codec copies each message into one buffer; here, the values stay where they
//! are.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

use crate::v1::BlockData;

/// Size of gRPC's message prefix: compressed flag and length.
pub(crate) const PREFIX: usize = 5;

/// Fields of a message with tensors.
pub(crate) const HEADER: u32 = 1;
pub(crate) const BLOCKS: u32 = 2;

/// Fields of a block.
pub(crate) const NUMBER: u32 = 1;
pub(crate) const DATA: u32 = 2;

/// Tensors up to this size are copied into the preceding segment: many small segments cost more.
const SMALL: usize = 4 << 10;

/// Returns the segments of a message for each chunk of blocks, the first of which has the header.
pub fn encode_chunks(header: &impl Message, chunks: &[Vec<BlockData>]) -> Vec<Bytes> {
    let (mut header, mut segments) = (Some(header), Vec::new());
    for blocks in chunks {
        encode(header.take(), blocks, &mut segments);
    }
    segments
}

/// Appends the segments of one message, with gRPC's prefix.
pub fn encode(header: Option<&impl Message>, blocks: &[BlockData], segments: &mut Vec<Bytes>) {
    let of_header = header.map_or(0, |it| field_len(HEADER, it.encoded_len()));
    let of_blocks: usize = blocks.iter().map(|it| field_len(BLOCKS, block_len(it))).sum();
    let mut text = BytesMut::new();
    text.put_u8(0);
    text.put_u32((of_header + of_blocks) as u32);
    if let Some(header) = header {
        encode_key(HEADER, WireType::LengthDelimited, &mut text);
        header.encode_length_delimited(&mut text).expect("the buffer grows");
    }
    for block in blocks {
        encode_key(BLOCKS, WireType::LengthDelimited, &mut text);
        encode_varint(block_len(block) as u64, &mut text);
        encode_key(NUMBER, WireType::Varint, &mut text);
        encode_varint(block.block.into(), &mut text);
        encode_key(DATA, WireType::LengthDelimited, &mut text);
        encode_varint(block.data.len() as u64, &mut text);
        if block.data.len() <= SMALL {
            text.put_slice(&block.data);
        } else {
            segments.push(text.split().freeze());
            segments.push(block.data.clone());
        }
    }
    if !text.is_empty() {
        segments.push(text.freeze());
    }
}

fn block_len(block: &BlockData) -> usize {
    let number = key_len(NUMBER) + encoded_len_varint(block.block.into());
    number + field_len(DATA, block.data.len())
}

fn field_len(field: u32, len: usize) -> usize {
    key_len(field) + encoded_len_varint(len as u64) + len
}

/// Encodes a message without tensors, with gRPC's prefix.
pub fn framed(message: &impl Message) -> Bytes {
    let mut text = BytesMut::with_capacity(PREFIX + message.encoded_len());
    text.put_u8(0);
    text.put_u32(message.encoded_len() as u32);
    message.encode(&mut text).expect("the buffer grows");
    text.freeze()
}
