//! Contributions with arbitrary version, lanes, records, length and values: rejected ones and duplicates
//! change nothing.

#![no_main]

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use steadfast_common::ids::{Lane, Pass, Slot, TaskId, Version};
use steadfast_common::job::spec::{Mode, OptimizerKind, OptimizerSpec, TableSpec};
use steadfast_common::records::applied_records::RecordRange;
use steadfast_common::records::contribution::{LaneEnd, LaneShare};
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::{Layout, ParamSpec};
use steadfast_common::tensor::placement::{Placement, PlacementRecord};
use steadfast_common::tensor::table::{Initial, Rows};
use steadfast_fuzz::{seeds, within};
use steadfast_pserver_core::block_store::{BlockStore, ShardSnapshot};
use steadfast_pserver_core::contribution::{Contributed, Contribution, Refusal, ValidatedBlock};
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::shard::Shard;
use steadfast_pserver_core::sync_shard::SyncShard;
use steadfast_pserver_core::tables::RowKind;

const LANES: u32 = 5;
/// Two pushes of all lanes, and the state beside them.
const BYTES_MAX: usize = 1 << 20;

fuzz_target!(init: seeds("contributions", beginnings()), |data: &[u8]| {
    within(BYTES_MAX, || play(&mut Unstructured::new(data)).unwrap_or_default());
});

fn play(input: &mut Unstructured<'_>) -> Result<()> {
    let mode = *input.choose(&[Mode::Sync, Mode::Async])?;
    let mut shard = begin(mode, *input.choose(&[Codec::Plain, Codec::Int8, Codec::F16])?);
    for _ in 0..32 {
        if input.is_empty() {
            break;
        }
        let before = state(&mut shard);
        let version = shard.blocks().position().version;
        let Ok(contribution) = contribution(shard.blocks(), input)? else { continue };
        let contributed = match &mut shard {
            Shard::Sync(shard) => contribute(shard, contribution, input)?,
            Shard::Async(shard) => shard.apply(&range(input)?, contribution),
        };
        match contributed {
            Err(_) | Ok(Contributed::Duplicate | Contributed::Waiting) => {
                assert_eq!(state(&mut shard), before);
            }
            Ok(Contributed::Complete) => {
                if let Shard::Sync(shard) = &mut shard {
                    assert!(shard.blocks().list().len() <= shard.squares().len());
                    shard.finish_step(input.arbitrary()?).expect("there is memory");
                }
                assert_eq!(shard.blocks().position().version, Version(version.0 + 1));
            }
        }
    }
    Ok(())
}

fn begin(mode: Mode, codec: Codec) -> Shard {
    let kind = OptimizerKind::Adam;
    let optimizer = OptimizerSpec { kind, clip_norm: Some(1.0), ..OptimizerSpec::default() };
    let table = TableSpec { admit_after: 2, expire_after: Some(1), ..TableSpec::default() };
    let (seed, tables) = (7, BTreeMap::from([("rows".to_owned(), table)]));
    let rules = Rules { mode, lanes: LANES, optimizer, codec, seed, tables, ..Rules::default() };
    let params = vec![
        ParamSpec::new("w", &[2, 2]),
        ParamSpec::new("b", &[3]),
        ParamSpec::table("rows", 2, Initial::Uniform(0.5)),
    ];
    let layout = Arc::new(Layout::new(params));
    let values = layout.blocks().iter().map(|block| vec![0.5; block.len]).collect();
    let placement = Placement::of(&layout, &PlacementRecord::LargestFirst { slots: 1 });
    let first = ShardSnapshot::initial(&layout, &placement, Slot(0), values, &rules);
    let (snapshot, tables) = first.expect("there is memory");
    Shard::restore(layout, snapshot, tables, rules)
}

/// The state that a checkpoint would contain, as text, in which NaN equals itself.
fn state(shard: &mut Shard) -> String {
    let (snapshot, tables) = shard.snapshot().expect("memory can be read");
    let kinds = [RowKind::Rows, RowKind::Candidates];
    let of_range =
        |range| kinds.map(|kind| tables.read(range, kind, 0, None, usize::MAX).map(|it| it.rows));
    let rows: Vec<_> = tables.ranges().iter().map(of_range).collect();
    format!("{snapshot:?} {rows:?}")
}

fn contribution(
    store: &BlockStore,
    input: &mut Unstructured<'_>,
) -> Result<std::result::Result<Contribution, Refusal>> {
    let mut blocks = Vec::new();
    for (number, block) in &**store.list() {
        let usual = store.codec().encode(&vec![0.25; block.len]);
        let bytes = match input.arbitrary::<u8>()? {
            0 => break,
            1..128 => usual,
            _ => input.bytes(usual.len().min(input.len()))?.to_vec(),
        };
        let memory = store.buffers().lend(block.len);
        match ValidatedBlock::decode(store.codec(), *number, &Bytes::from(bytes).into(), memory) {
            Ok(values) => blocks.push(values),
            Err(refusal) => return Ok(Err(refusal)),
        }
    }
    let (records, loss_sum, checksum) =
        (small_or_any(input)?, input.arbitrary()?, input.arbitrary()?);
    let held = store.tables().held();
    let len = input.arbitrary::<u8>()? as usize;
    let bytes = input.bytes(len.min(input.len()))?;
    let rows = match Rows::decode(2, &held.ranges, bytes) {
        Ok(rows) => vec![rows],
        Err(_) if input.ratio(1, 8)? => Vec::new(),
        Err(_) => vec![Rows::zeros(2, vec![1, 5, 9])],
    };
    Ok(Ok(Contribution { records, loss_sum, checksum, blocks, rows, weight: None }))
}

fn contribute(
    shard: &mut SyncShard,
    mut contribution: Contribution,
    input: &mut Unstructured<'_>,
) -> Result<std::result::Result<Contributed, Refusal>> {
    let version = Version(small_or_any(input)?);
    let first = Lane(small_or_any(input)? as u32);
    let mut shares = Vec::new();
    for _ in 0..input.int_in_range(0..=LANES + 1)? {
        let end = *input.choose(&[LaneEnd::MoreToCome, LaneEnd::LastOfPass])?;
        let (records, checksum) = (small_or_any(input)? as u32, small_or_any(input)?);
        shares.push(LaneShare { records, checksum, end, weight: None });
    }
    if input.ratio(7, 8)? {
        contribution.records = shares.iter().map(|it| u64::from(it.records)).sum();
        contribution.checksum = shares.iter().map(|it| it.checksum).fold(0, u64::wrapping_add);
    }
    if input.ratio(1, 4)? {
        let rest = contribution.blocks.split_off(contribution.blocks.len() / 2);
        let part = std::mem::replace(&mut contribution.blocks, rest);
        if let Err(refusal) = shard.add_blocks(version, first, &shares, part) {
            return Ok(Err(refusal));
        }
    }
    Ok(shard.contribute(version, first, &shares, contribution))
}

fn range(input: &mut Unstructured<'_>) -> Result<RecordRange> {
    Ok(RecordRange {
        pass: Pass(small_or_any(input)? as u32),
        task: TaskId(small_or_any(input)? as u32),
        from: small_or_any(input)? as u32,
        to: small_or_any(input)? as u32,
        last: input.arbitrary()?,
    })
}

/// Usually a small number, which is often valid; otherwise any 32-bit number, as on the wire.
fn small_or_any(input: &mut Unstructured<'_>) -> Result<u64> {
    match input.arbitrary::<u8>()? {
        small @ 0..250 => Ok(u64::from(small % 8)),
        _ => input.arbitrary::<u32>().map(u64::from),
    }
}

fn beginnings() -> Vec<Vec<u8>> {
    (1..5).map(|step| (0..200_u8).map(|it| it.wrapping_mul(step) % 7).collect()).collect()
}
