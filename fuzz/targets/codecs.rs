//! Compressed gradients: bytes are a whole block of finite values or are refused, and rounding what was
//! read, writing it and reading it again is the same as rounding it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use steadfast_common::compression::Codec;
use steadfast_common::finite::are_finite;
use steadfast_common::pieces::Pieces;
use steadfast_fuzz::{cut, seeds, within};
use steadfast_pserver_core::contribution::Finite;
use steadfast_pserver_core::memory::Memory;

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
    check_pieces(codec, bytes, *how, is_good.then_some(&values), len);
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

/// A pserver takes the same bytes in pieces.
fn check_pieces(codec: Codec, bytes: &[u8], how: u8, values: Option<&Vec<f32>>, len: usize) {
    let mut pieces = Pieces::default();
    cut(bytes, how).into_iter().for_each(|piece| pieces.push(piece));
    let taken = Finite::decode(codec, 0, &pieces, Memory::default().lend(len));
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
