//! TFRecord files of `tf.train.Example` messages: each has its length before it, and both have a checksum.
//!
//! Format: <https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details>; messages:
//! `tensorflow/core/example/{example,feature}.proto`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Read;

use crc_fast::{CrcAlgorithm, checksum};
use prost::Message;
use steadfast_common::job::columns::{Column, Shape, Values};

use super::{Refusal, Row, Visit};
use crate::text::RECORD_BYTES_MAX;
use crate::values::Value;

/// Bytes of the length and its checksum.
pub(crate) const HEADER_BYTES: usize = 12;
/// Bytes of the checksum after a message.
const FOOTER_BYTES: usize = 4;

#[derive(Clone, PartialEq, Message)]
struct Example {
    #[prost(message, optional, tag = "1")]
    features: Option<Features>,
}

#[derive(Clone, PartialEq, Message)]
struct Features {
    #[prost(btree_map = "string, message", tag = "1")]
    feature: BTreeMap<String, Feature>,
}

#[derive(Clone, PartialEq, Message)]
struct Feature {
    #[prost(oneof = "Kind", tags = "1, 2, 3")]
    kind: Option<Kind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Kind {
    #[prost(message, tag = "1")]
    Bytes(BytesList),
    #[prost(message, tag = "2")]
    Floats(FloatList),
    #[prost(message, tag = "3")]
    Ints(Int64List),
}

#[derive(Clone, PartialEq, Message)]
struct BytesList {
    #[prost(bytes = "vec", repeated, tag = "1")]
    value: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct FloatList {
    #[prost(float, repeated, tag = "1")]
    value: Vec<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct Int64List {
    #[prost(int64, repeated, tag = "1")]
    value: Vec<i64>,
}

/// Returns whether bytes begin like a file of this format: with a length and its checksum.
pub(crate) fn is_header(head: &[u8]) -> bool {
    head.first_chunk().is_some_and(|header: &[u8; HEADER_BYTES]| length(header).is_some())
}

/// Returns the length of a message; `None` if its checksum is wrong.
fn length(header: &[u8; HEADER_BYTES]) -> Option<u64> {
    let (length, expected) = header.split_at(8);
    (masked(length).to_le_bytes() == expected)
        .then(|| u64::from_le_bytes(length.try_into().expect("eight bytes")))
}

/// Computes the checksum that the format stores: CRC-32C, rotated and with a constant added.
fn masked(bytes: &[u8]) -> u32 {
    let sum = checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    sum.rotate_right(15).wrapping_add(0xa282_ead8)
}

pub(super) fn visit(mut file: impl Read, visit: &mut Visit) -> Result<(), Refusal> {
    let (mut message, mut start, mut record) = (Vec::new(), 0, 0);
    loop {
        let refused = |reason: &str| Refusal::Record(record, reason.to_owned());
        let damaged = || refused("its checksum is wrong: the file is damaged");
        let truncated = || refused("the file ends within it");
        message.clear();
        file.by_ref().take(HEADER_BYTES as u64).read_to_end(&mut message)?;
        if message.is_empty() {
            return Ok(());
        }
        let header = message.first_chunk().ok_or_else(truncated)?;
        let bytes = length(header).ok_or_else(damaged)?;
        if bytes > RECORD_BYTES_MAX {
            return Err(Refusal::Record(
                record,
                format!("it has {bytes} bytes, more than {RECORD_BYTES_MAX}"),
            ));
        }
        message.clear();
        file.by_ref().take(bytes + FOOTER_BYTES as u64).read_to_end(&mut message)?;
        let (content, footer) = message.split_last_chunk::<FOOTER_BYTES>().ok_or_else(truncated)?;
        if content.len() as u64 != bytes {
            return Err(truncated());
        }
        if masked(content).to_le_bytes() != *footer {
            return Err(damaged());
        }
        let example = Example::decode(content).map_err(|error| {
            Refusal::Record(record, format!("it is not a tf.train.Example ({error})"))
        })?;
        let fields = example.features.unwrap_or_default().feature.into_iter();
        let fields = fields.map(|(name, feature)| (Cow::Owned(name), value(feature))).collect();
        let end = start + (HEADER_BYTES + message.len()) as u64;
        if visit(Row { bytes: start..end, fields }).is_break() {
            return Ok(());
        }
        start = end;
        record += 1;
    }
}

/// Converts a feature to a value. A list of one element becomes that element, because the format has only lists.
fn value(feature: Feature) -> Value<'static> {
    fn list<T>(values: Vec<T>, of: impl Fn(T) -> Value<'static>) -> Value<'static> {
        let mut values: Vec<Value> = values.into_iter().map(of).collect();
        match values.len() {
            1 => values.remove(0),
            _ => Value::List(values),
        }
    }
    match feature.kind {
        None => Value::Missing,
        Some(Kind::Bytes(list_of)) => list(list_of.value, |it| Value::Bytes(Cow::Owned(it))),
        Some(Kind::Floats(list_of)) => list(list_of.value, Value::Float32),
        Some(Kind::Ints(list_of)) => list(list_of.value, Value::Int),
    }
}

/// Appends a record as an example, with its length and the checksums.
///
/// # Panics
/// If a column has a type that the format cannot hold.
pub(crate) fn encode(columns: &[Column], record: usize, bytes: &mut Vec<u8>) {
    let feature = |column: &Column| (column.name.clone(), feature(column, record));
    let features = Features { feature: columns.iter().map(feature).collect() };
    let message = Example { features: Some(features) }.encode_to_vec();
    let length = (message.len() as u64).to_le_bytes();
    bytes.extend_from_slice(&length);
    bytes.extend_from_slice(&masked(&length).to_le_bytes());
    bytes.extend_from_slice(&message);
    bytes.extend_from_slice(&masked(&message).to_le_bytes());
}

fn feature(column: &Column, record: usize) -> Feature {
    let of = column.elements_of(record);
    let ints = |value| Kind::Ints(Int64List { value });
    let bytes = |value: &[u8]| Kind::Bytes(BytesList { value: vec![value.to_vec()] });
    let kind = match &column.values {
        Values::Bool(values) => ints(values[of].iter().map(|value| i64::from(*value)).collect()),
        // A list of small numbers is raw bytes, such as an image.
        Values::Uint8(values) if column.shape != Shape::One => bytes(&values[of]),
        Values::Uint8(values) => ints(values[of].iter().map(|value| i64::from(*value)).collect()),
        Values::Int64(values) => ints(values[of].to_vec()),
        Values::Float32(values) => Kind::Floats(FloatList { value: values[of].to_vec() }),
        Values::Text(values) | Values::Bytes(values) => bytes(&values[of]),
        Values::Uint64(_) | Values::Float64(_) => panic!("the type was refused"),
    };
    Feature { kind: Some(kind) }
}
