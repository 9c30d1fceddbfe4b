//! Shards of a checkpoint: memory is allocated only for received bytes, whatever the split into segments and
//! the sizes that the file claims, and decoded shards can be encoded and decoded again.

#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use steadfast_checkpoint::{
    BlockNames, BlockTensors, ShardDecoder, ShardFile, ShardMeta, encode_shard,
};
use steadfast_common::records::applied_records::AppliedRecords;
use steadfast_common::tensor::layout::{Layout, ParamSpec};
use steadfast_common::tensor::table::Initial;
use steadfast_fuzz::{seeds, split, within};

/// The header is JSON, in which a tensor takes at least 50 bytes.
const TIMES_MAX: usize = 64;

static NAMES: LazyLock<BlockNames> = LazyLock::new(|| {
    let params = [("bias", &[3][..]), ("a/w", &[2, 2]), ("w", &[1 << 30]), ("m/w", &[1])];
    let mut params = params.map(|(name, shape)| ParamSpec::new(name, shape)).to_vec();
    params.push(ParamSpec::table("t", 2, Initial::Zeros));
    BlockNames::new(Arc::new(Layout::new(params)))
});

fuzz_target!(init: seeds("shard", well_formed()), |data: &[u8]| {
    let [how, claim, bytes @ ..] = data else { return };
    let claimed = (bytes.len() as u64) << (claim % 64);
    let whole = read(bytes, 0, claimed);
    let again = read(bytes, *how, claimed);
    match (whole, again) {
        (Ok(whole), Ok(again)) => {
            assert_eq!(whole.meta(), again.meta());
            assert!(whole.numbers().eq(again.numbers()));
            assert_eq!(bits(&whole), bits(&again));
            rewrite(&whole);
        }
        // The library checks tensors in random order and reports the first error.
        (Err(_), Err(_)) => {}
        (whole, again) => panic!("{whole:?} in one segment, {again:?} in several"),
    }
});

fn read(bytes: &[u8], how: u8, claimed: u64) -> Result<ShardFile, String> {
    let segments = split(bytes, how);
    let names = &*NAMES;
    within(TIMES_MAX * bytes.len() + (64 << 10), || {
        let mut decoder = ShardDecoder::new(names, claimed, u64::MAX, &|_| true);
        for segment in segments {
            decoder.push(segment)?;
        }
        decoder.finish()
    })
}

/// A block: its number, its values, and the optimizer's, by name.
type Block<'a> = (u32, Vec<u32>, Vec<(&'a str, Vec<u32>)>);

/// The bits of all values and states.
fn bits(file: &ShardFile) -> Vec<Block<'_>> {
    let of = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let mut all = Vec::new();
    for (number, block) in file.blocks() {
        let states = block.states.iter().map(|(name, values)| (&**name, of(values)));
        all.push((*number, of(&block.values), states.collect()));
    }
    all
}

/// Encodes a decoded shard again, if a pserver could have written it: with the same states for all blocks
/// and only finite values.
fn rewrite(file: &ShardFile) {
    let names: Vec<Vec<&str>> =
        file.blocks().values().map(|it| it.states.keys().map(String::as_str).collect()).collect();
    let state_names = names.first().cloned().unwrap_or_default();
    if names.iter().any(|it| *it != state_names) {
        return;
    }
    let blocks = file.blocks().iter().map(|(number, block)| BlockTensors {
        number: *number,
        values: Arc::new(block.values.clone()),
        states: Arc::new(block.states.values().cloned().collect()),
    });
    let written = encode_shard(NAMES.layout(), &state_names, file.meta(), blocks);
    let Ok(written) = written.map(|segments| segments.concat()) else { return };
    let again = read(&written, 0, written.len() as u64).expect("it was just written");
    assert_eq!(again.meta(), file.meta());
    assert_eq!(bits(&again), bits(file));
}

fn well_formed() -> Vec<Vec<u8>> {
    let meta = ShardMeta { counts: vec![AppliedRecords::default()], ..ShardMeta::default() };
    let block = |number, len| BlockTensors {
        number,
        values: Arc::new(vec![1.5; len]),
        states: Arc::new(vec![vec![0.5; len], vec![-0.0; len]]),
    };
    let blocks = [block(0, 3), block(1, 4)];
    let encode = |names: &[&str]| {
        let blocks = blocks.iter().cloned();
        let segments = encode_shard(NAMES.layout(), names, &meta, blocks);
        segments.expect("the values are finite").concat()
    };
    [encode(&["m", "v"]), encode(&[])].map(|file| [&[2, 0], &file[..]].concat()).to_vec()
}
