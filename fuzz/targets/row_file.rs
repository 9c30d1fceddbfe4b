//! Row files of a checkpoint: memory is allocated only for received bytes, whatever the split into segments and the
//! sizes that the file claims, and sound rows can be encoded and decoded again.

#![no_main]

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use steadfast_checkpoint::row_file::{RangeTensors, RowFileMeta, encode_rows};
use steadfast_checkpoint::{BlockNames, RowFileDecoder};
use steadfast_common::tensor::layout::{Layout, ParamSpec};
use steadfast_common::tensor::table::Initial;
use steadfast_fuzz::{seeds, split, within};

/// The header is JSON, in which a tensor takes at least 50 bytes.
const TIMES_MAX: usize = 64;

static NAMES: LazyLock<BlockNames> = LazyLock::new(|| {
    let params = vec![ParamSpec::new("bias", &[3]), ParamSpec::table("t", 2, Initial::Zeros)];
    BlockNames::new(Arc::new(Layout::new(params)))
});

fuzz_target!(init: seeds("row_file", well_formed()), |data: &[u8]| {
    let [how, claim, bytes @ ..] = data else { return };
    let claimed = (bytes.len() as u64) << (claim % 64);
    let whole = read(bytes, 0, claimed);
    let again = read(bytes, *how, claimed);
    let (Ok(whole), Ok(again)) = (&whole, &again) else {
        // The library checks tensors in random order and reports the first error.
        assert_eq!(whole.is_ok(), again.is_ok(), "{whole:?} in one segment, {again:?} in several");
        return;
    };
    if whole.values().all(|range| range.check(NAMES.layout()).is_ok()) {
        assert_eq!(whole, again);
        let ranges = whole.values().cloned().collect();
        let written = encode_rows(NAMES.layout(), &RowFileMeta::default(), ranges);
        let written = written.expect("values are finite").concat();
        let read = read(&written, 0, written.len() as u64).expect("it was just written");
        assert!(whole.values().zip(read.values()).all(|(one, other)| one.ids == other.ids));
    }
});

fn read(bytes: &[u8], how: u8, claimed: u64) -> Result<BTreeMap<u32, RangeTensors>, String> {
    let segments = split(bytes, how);
    let names = &*NAMES;
    within(TIMES_MAX * bytes.len() + (64 << 10), || {
        let mut decoder = RowFileDecoder::new(names, claimed, u64::MAX, &|_| true);
        for segment in segments {
            decoder.push(segment)?;
        }
        Ok(decoder.finish()?.into_ranges())
    })
}

fn well_formed() -> Vec<Vec<u8>> {
    let range = |range| RangeTensors {
        number: NAMES.layout().number_of_range(0, range),
        ids: vec![0],
        counts: vec![[1, 2]],
        values: vec![0.5, 1.5],
        states: BTreeMap::from([("m".to_owned(), vec![2.5; 2])]),
        candidate_ids: vec![3, 9],
        candidate_counts: vec![[1, 2], [3, 4]],
    };
    let segments = encode_rows(NAMES.layout(), &RowFileMeta::default(), vec![range(0), range(7)]);
    let file = segments.expect("the values are finite").concat();
    vec![[&[2, 0], &file[..]].concat()]
}
