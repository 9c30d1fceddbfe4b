//! Compressed gradients: bytes decode to a complete block of finite values or are rejected, and encoding
//! rounded values loses nothing.

#![no_main]

use libfuzzer_sys::fuzz_target;
use steadfast_common::tensor::byte_segments::ByteSegments;
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::finite::are_finite;
use steadfast_fuzz::{seeds, split, within};
use steadfast_pserver_core::buffer_pool::BufferPool;
use steadfast_pserver_core::contribution::ValidatedBlock;

const CODECS: [Codec; 5] =
    [Codec::Plain, Codec::Bf16, Codec::F16, Codec::Int8, Codec::Sparse { keep: 0.1 }];

fuzz_target!(init: seeds("codecs", well_formed()), |data: &[u8]| {
    let [codec, low, high, how, bytes @ ..] = data else { return };
    let codec = CODECS[usize::from(*codec) % CODECS.len()];
    let len = usize::from(u16::from_le_bytes([*low, *high])) % 4096;
    let mut values = vec![f32::NAN; len];
    let decoded = within(1 << 10, || codec.decode(bytes, &mut values));
    let is_good = decoded.is_ok() && are_finite(&values);
    if is_good {
        check_rounding(codec, &values);
    }
    check_segments(codec, bytes, *how, is_good.then_some(&values), len);
});

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn check_rounding(codec: Codec, values: &[f32]) {
    let mut rounded = values.to_vec();
    codec.round(&mut rounded);
    let mut again = vec![f32::NAN; values.len()];
    codec.decode(&codec.encode(&rounded), &mut again).expect("it was just encoded");
    assert_eq!(bits(&again), bits(&rounded));
    let mut sum = values.to_vec();
    codec.add(&mut sum, &rounded);
    assert!(are_finite(&sum));
}

/// A pserver decodes the same values from segments.
fn check_segments(codec: Codec, bytes: &[u8], how: u8, values: Option<&Vec<f32>>, len: usize) {
    let mut segments = ByteSegments::default();
    split(bytes, how).into_iter().for_each(|segment| segments.push(segment));
    let taken = ValidatedBlock::decode(codec, 0, &segments, BufferPool::default().lend(len));
    assert_eq!(taken.ok().map(|it| bits(it.values())), values.map(|it| bits(it)));
}

fn well_formed() -> Vec<Vec<u8>> {
    let mut inputs = Vec::new();
    for (number, codec) in (0..).zip(CODECS) {
        for len in [5_u16, 1030] {
            let mut values: Vec<f32> = (0..len).map(|it| f32::from(it) * 0.1 - 20.0).collect();
            codec.round(&mut values);
            let [low, high] = len.to_le_bytes();
            inputs.push([&[number, low, high, 2], &codec.encode(&values)[..]].concat());
        }
    }
    inputs
}
