//! Shards of a checkpoint: however the file is cut and whatever it claims to hold, memory is taken for
//! what has come alone, and what is read can be written and read again.

#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use steadfast_checkpoint::{
    BlockNames, BlockTensors, ShardDecoder, ShardFile, ShardMeta, encode_shard,
};
use steadfast_common::layout::{Layout, ParamSpec};
use steadfast_common::tally::Counted;
use steadfast_fuzz::{cut, seeds, within};

/// The header is JSON, of which a tensor takes half a hundred bytes at least.
const TIMES_MAX: usize = 64;

static NAMES: LazyLock<BlockNames> = LazyLock::new(|| {
    let params = [("bias", &[3][..]), ("a/w", &[2, 2]), ("w", &[1 << 30]), ("m/w", &[1])];
    let params = params.map(|(name, shape)| ParamSpec::new(name, shape)).to_vec();
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
        // The library looks at tensors in an order of chance, and says what is wrong with the first.
        (Err(_), Err(_)) => {}
        (whole, again) => panic!("{whole:?} in one piece, {again:?} in several"),
    }
});

fn read(bytes: &[u8], how: u8, claimed: u64) -> Result<ShardFile, String> {
    let pieces = cut(bytes, how);
    let names = &*NAMES;
    within(TIMES_MAX * bytes.len() + (64 << 10), || {
        let mut decoder = ShardDecoder::new(names, claimed, u64::MAX, &|_| true);
        for piece in pieces {
            decoder.push(piece)?;
        }
        decoder.finish()
    })
}

/// All values and states by their bits.
fn bits(file: &ShardFile) -> Vec<(u32, Vec<u32>, Vec<(&str, Vec<u32>)>)> {
    let of = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let mut all = Vec::new();
    for (number, block) in file.blocks() {
        let states = block.states.iter().map(|(name, values)| (&**name, of(values)));
        all.push((*number, of(&block.values), states.collect()));
    }
    all
}

/// Writes what was read, if a pserver could have written it: with the same state for all blocks, and
/// without values that are not finite.
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
    let Ok(written) = written.map(|pieces| pieces.concat()) else { return };
    let again = read(&written, 0, written.len() as u64).expect("it was just written");
    assert_eq!(again.meta(), file.meta());
    assert_eq!(bits(&again), bits(file));
}

fn well_formed() -> Vec<Vec<u8>> {
    let meta = ShardMeta { counts: vec![Counted::default()], ..ShardMeta::default() };
    let block = |number, len| BlockTensors {
        number,
        values: Arc::new(vec![1.5; len]),
        states: Arc::new(vec![vec![0.5; len], vec![-0.0; len]]),
    };
    let blocks = [block(0, 3), block(1, 4)];
    let encode = |names: &[&str]| {
        let pieces = encode_shard(NAMES.layout(), names, &meta, blocks.iter().cloned());
        pieces.expect("it is finite").concat()
    };
    [encode(&["m", "v"]), encode(&[])].map(|file| [&[2, 0], &file[..]].concat()).to_vec()
}
