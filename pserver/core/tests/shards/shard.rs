//! A shard with contributions in any order, repeated, and invalid.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use steadfast_common::ids::{Lane, Pass, Slot, TaskId, Version};
use steadfast_common::job::average::AverageSpec;
use steadfast_common::job::spec::{
    CheckpointSpec, EvaluationSpec, LearningRateSpec, Mode, OptimizerKind, OptimizerSpec,
};
use steadfast_common::records::applied_records::{AppliedRecords, RecordRange};
use steadfast_common::records::change::{Change, Settings};
use steadfast_common::records::contribution::{LaneEnd, LaneShare};
use steadfast_common::tensor::byte_segments::ByteSegments;
use steadfast_common::tensor::layout::{BLOCK_LEN_MAX, Block, Layout, ParamSpec, UpdateRule};
use steadfast_common::tensor::placement::{Placement, PlacementRecord};
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::{Initial, Rows, range_of};
use steadfast_pserver_core::async_shard::AsyncShard;
use steadfast_pserver_core::block_store::{
    BlockStore, InitialStates, Parameters, ShardSnapshot, SnapshotBlock,
};
use steadfast_pserver_core::buffer_pool::BufferPool;
use steadfast_pserver_core::contribution::{Contributed, Contribution, Refusal, ValidatedBlock};
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::shard::Shard;
use steadfast_pserver_core::sync_shard::SyncShard;
use steadfast_pserver_core::tables::TableRows;

use crate::tables::restored;

pub(crate) const LANES: u32 = 4;

/// Values of a row.
const WIDTH: usize = 2;

/// Rows that are looked at; contributions are to some of them.
const IDS: Range<u64> = 0..40;

pub(crate) fn rules(mode: Mode) -> Rules {
    let optimizer = OptimizerSpec { kind: OptimizerKind::Adam, ..OptimizerSpec::default() };
    Rules { mode, lanes: LANES, optimizer, seed: 7, ..Rules::default() }
}

fn layout() -> Arc<Layout> {
    Arc::new(Layout::new(vec![
        ParamSpec::new("weight", &[2, BLOCK_LEN_MAX]),
        ParamSpec::new("bias", &[3]),
        ParamSpec::table("rows", WIDTH, Initial::Uniform(0.5)),
    ]))
}

/// Initial values that differ from index to index.
fn first(layout: &Layout) -> Vec<f32> {
    (0..layout.len()).map(|index| (index % 17) as f32 * 0.1 - 0.8).collect()
}

fn initial(layout: &Layout, slot: u32, slots: u32, rules: &Rules) -> (ShardSnapshot, TableRows) {
    let record = match rules.optimizer.needs_whole_parameters() {
        true => PlacementRecord::WholeParameters { slots },
        false => PlacementRecord::LargestFirst { slots },
    };
    let placement = Placement::of(layout, &record);
    let (numbers, all) = (placement.blocks_of(Slot(slot)), first(layout));
    let values = numbers.iter().map(|it| all[layout.blocks()[*it as usize].range()].to_vec());
    ShardSnapshot::initial(layout, &placement, Slot(slot), values.collect(), rules).unwrap()
}

/// The state of the only slot before the first update.
fn initial_values(
    layout: &Layout,
    values: Vec<Vec<f32>>,
    rules: &Rules,
) -> (ShardSnapshot, TableRows) {
    let placement = Placement::of(layout, &PlacementRecord::LargestFirst { slots: 1 });
    ShardSnapshot::initial(layout, &placement, Slot(0), values, rules).unwrap()
}

fn shard_of(layout: &Arc<Layout>, slot: u32, slots: u32, rules: Rules) -> SyncShard {
    let (snapshot, tables) = initial(layout, slot, slots, &rules);
    SyncShard::restore(layout.clone(), snapshot, tables, rules)
}

pub(crate) fn shard() -> SyncShard {
    shard_of(&layout(), 0, 1, rules(Mode::Sync))
}

fn async_shard() -> AsyncShard {
    let (layout, rules) = (layout(), rules(Mode::Async));
    let (snapshot, tables) = initial(&layout, 0, 1, &rules);
    AsyncShard::restore(layout, snapshot, tables, rules)
}

/// A snapshot, and tables without rows.
fn without_rows(shard: &mut AsyncShard) -> (ShardSnapshot, TableRows) {
    let layout = shard.blocks().layout().clone();
    (shard.snapshot().unwrap().0, initial(&layout, 0, 1, &rules(Mode::Async)).1)
}

/// A lane's contribution: irregular values, which make the order of addition visible in the bits.
pub(crate) fn contribution(store: &BlockStore, lane: u32, step: u64) -> Contribution {
    let value = |index: usize| {
        let mixed = (index as u64 * 2_654_435_761 + u64::from(lane) * 97 + step * 131) % 10_007;
        (mixed as f32 - 5_000.0) * 0.000_37
    };
    let values = |(number, block): &(u32, Block)| {
        let values: Vec<f32> = block.range().map(value).collect();
        finite(*number, &values)
    };
    Contribution {
        records: u64::from(lane) + 3,
        loss_sum: f64::from(lane) * 0.7,
        checksum: 1 << lane,
        blocks: store.list().iter().map(values).collect(),
        rows: rows_of(store, lane, step),
        // Such as a lane with padding, and one without.
        weight: (lane % 2 == 1).then(|| 0.1 + f64::from(lane) * 0.3),
    }
}

/// Gradients of some rows of each table in the shard's ranges.
fn rows_of(store: &BlockStore, lane: u32, step: u64) -> Vec<Rows> {
    let held = store.tables().held();
    let of_table = |width: &usize| {
        let lane = u64::from(lane);
        let mut rows = Rows::new(*width);
        for id in IDS.filter(|id| held.ranges.contains(&range_of(*id))) {
            // Some rows are of one lane, others of several, and some of none.
            if (id + lane) % 3 == 0 || id == step {
                let value = |column| (id * 31 + lane * 17 + step * 7 + column) as f32 * 0.013 - 0.4;
                let row: Vec<f32> = (0..*width as u64).map(value).collect();
                rows.push(id, &row);
            }
        }
        rows
    };
    held.widths.iter().map(of_table).collect()
}

/// Contributes the gradient of one lane.
fn offer(
    shard: &mut SyncShard,
    version: Version,
    lane: u32,
    given: Contribution,
    end: LaneEnd,
) -> Result<Contributed, Refusal> {
    let share = [share(&given, end)];
    shard.contribute(version, Lane(lane), &share, given)
}

/// The share that a lane declares with this contribution.
pub(crate) fn share(given: &Contribution, end: LaneEnd) -> LaneShare {
    LaneShare { records: given.records as u32, checksum: given.checksum, end, weight: given.weight }
}

fn contribute(shard: &mut SyncShard, lane: u32, end: LaneEnd) -> Result<Contributed, Refusal> {
    let version = shard.blocks().position().version;
    let given = contribution(shard.blocks(), lane, version.0);
    let outcome = offer(shard, version, lane, given, end)?;
    if outcome == Contributed::Complete {
        shard.finish_step(None).unwrap();
    }
    Ok(outcome)
}

/// The bits of all parameters and rows of a shard.
pub(crate) fn state(shard: &mut SyncShard) -> Vec<u32> {
    let version = shard.blocks().position().version;
    let rows = rows_at(shard, version).unwrap();
    let of_rows = rows.iter().flat_map(|rows| rows.values()).map(|value| value.to_bits());
    let mut all = bits(&shard.parameters());
    all.extend(of_rows);
    all
}

/// The rows of each table at a version.
fn rows_at(shard: &mut SyncShard, version: Version) -> Option<Vec<Rows>> {
    let held = shard.blocks().tables().held().clone();
    let ids = IDS.filter(|id| held.ranges.contains(&range_of(*id))).collect();
    shard.rows_at(version, vec![RowIds::new(ids); held.widths.len()]).unwrap()
}

pub(crate) fn bits(parameters: &Parameters) -> Vec<u32> {
    parameters.values.iter().flat_map(|block| block.iter().map(|value| value.to_bits())).collect()
}

/// The bits after steps in which lanes arrive in the given orders.
pub(crate) fn train(orders: &[Vec<u32>]) -> Vec<u32> {
    let mut shard = shard();
    for order in orders {
        for lane in order {
            contribute(&mut shard, *lane, LaneEnd::MoreToCome).unwrap();
        }
    }
    assert_eq!(shard.blocks().position().version.0, orders.len() as u64);
    state(&mut shard)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// I7, S004-50: the result does not depend on the order in which lanes arrive.
    #[test]
    fn lanes_may_arrive_in_any_order(
        orders in prop::collection::vec(Just((0..LANES).collect::<Vec<u32>>()).prop_shuffle(), 3),
    ) {
        let in_order = vec![(0..LANES).collect::<Vec<u32>>(); 3];
        prop_assert!(train(&orders) == train(&in_order));
    }
}

/// The sum of two contributions, as a trainer computes it.
fn added(one: &Contribution, other: &Contribution) -> Contribution {
    let block = |(one, other): (&ValidatedBlock, &ValidatedBlock)| {
        let sums: Vec<f32> = one.values().iter().zip(other.values()).map(|(a, b)| a + b).collect();
        finite(one.block(), &sums)
    };
    Contribution {
        records: one.records + other.records,
        loss_sum: one.loss_sum + other.loss_sum,
        checksum: one.checksum + other.checksum,
        blocks: one.blocks.iter().zip(&other.blocks).map(block).collect(),
        rows: one.rows.iter().zip(&other.rows).map(sum_of).collect(),
        weight: None,
    }
}

fn sum_of((one, other): (&Rows, &Rows)) -> Rows {
    let mut sum = one.clone();
    sum.add(other);
    sum
}

/// I7, I6: lanes added up by a trainer and lanes pushed one by one give the same bits, also when both
/// arrive.
#[test]
fn the_bits_do_not_depend_on_where_lanes_are_added() {
    let lanes: Vec<Contribution> =
        (0..LANES).map(|it| contribution(shard().blocks(), it, 0)).collect();
    let (left, right) = (added(&lanes[0], &lanes[1]), added(&lanes[2], &lanes[3]));
    let of = |first: u32, count: u32| match (first, count) {
        (lane, 1) => lanes[lane as usize].clone(),
        (0, 2) => left.clone(),
        (2, 2) => right.clone(),
        _ => added(&left, &right),
    };
    let wanted = train(&[vec![0, 1, 2, 3]]);
    for order in [
        &[(0, 4)][..],
        &[(2, 2), (0, 2)],
        &[(0, 1), (2, 2), (1, 1)],
        &[(1, 1), (0, 2), (3, 1), (2, 1)],
        &[(3, 1), (0, 1), (2, 1), (0, 4)],
        &[(0, 2), (1, 1), (0, 1), (3, 1), (2, 2)],
    ] {
        let mut shard = shard();
        for (first, count) in order {
            let shares: Vec<LaneShare> = (*first..first + count)
                .map(|lane| share(&lanes[lane as usize], LaneEnd::MoreToCome))
                .collect();
            shard.contribute(Version(0), Lane(*first), &shares, of(*first, *count)).unwrap();
        }
        assert!(shard.is_step_complete(), "{order:?}");
        shard.finish_step(None).unwrap();
        assert!(state(&mut shard) == wanted, "{order:?}");
        assert_eq!(shard.blocks().position().examples, 3 + 4 + 5 + 6, "{order:?}");
    }
}

/// S004-50, I6: two pushes of one lane never count twice, within the step or after it.
#[test]
fn a_repeated_lane_counts_once() {
    let mut shard = shard();
    assert_eq!(contribute(&mut shard, 1, LaneEnd::MoreToCome), Ok(Contributed::Waiting));
    assert_eq!(contribute(&mut shard, 1, LaneEnd::MoreToCome), Ok(Contributed::Duplicate));
    assert_eq!(shard.missing(), [Lane(0), Lane(2), Lane(3)]);
    for lane in [0, 0, 2, 3] {
        contribute(&mut shard, lane, LaneEnd::MoreToCome).unwrap();
    }
    let late = contribution(shard.blocks(), 2, 0);
    let outcome = offer(&mut shard, Version(0), 2, late, LaneEnd::MoreToCome);
    assert_eq!(outcome, Ok(Contributed::Duplicate));
    assert!(state(&mut shard) == train(&[vec![0, 1, 2, 3]]));
    assert_eq!(shard.blocks().position().examples, 3 + 4 + 5 + 6);
}

/// S004-47: the bits do not depend on how blocks are distributed over slots.
#[test]
fn any_number_of_slots_gives_the_same_bits() {
    // The rows behind them are compared range by range elsewhere.
    let whole = train(&[vec![0, 1, 2, 3], vec![3, 2, 1, 0]]);
    for slots in 1..=5 {
        assert!(trained_on(slots, OptimizerKind::Adam) == whole[..layout().len()], "{slots} slots");
    }
    // The norms of LAMB are those of whole parameters.
    let whole = trained_on(1, OptimizerKind::Lamb);
    for slots in 2..=5 {
        assert!(trained_on(slots, OptimizerKind::Lamb) == whole, "{slots} slots");
    }
}

fn of_kind(kind: OptimizerKind) -> OptimizerSpec {
    OptimizerSpec { kind, ..OptimizerSpec::default() }
}

/// Returns the bits of all parameters after two steps on some number of slots.
fn trained_on(slots: u32, kind: OptimizerKind) -> Vec<u32> {
    let layout = layout();
    let mut joined = vec![0; layout.len()];
    for slot in 0..slots {
        let rules = Rules { optimizer: of_kind(kind), ..rules(Mode::Sync) };
        let mut shard = shard_of(&layout, slot, slots, rules);
        for lane in [0, 1, 2, 3, 3, 2, 1, 0] {
            contribute(&mut shard, lane, LaneEnd::MoreToCome).unwrap();
        }
        for ((_, block), values) in shard.blocks().list().iter().zip(&shard.parameters().values) {
            for (place, value) in joined[block.range()].iter_mut().zip(values.iter()) {
                *place = value.to_bits();
            }
        }
    }
    joined
}

/// A pass ends when its last lane is exhausted; steps do not wait for exhausted lanes.
#[test]
fn a_pass_ends_with_its_longest_lane() {
    let mut shard = shard();
    for lane in [0, 1, 2] {
        contribute(&mut shard, lane, LaneEnd::LastOfPass).unwrap();
    }
    contribute(&mut shard, 3, LaneEnd::MoreToCome).unwrap();
    assert_eq!(
        (shard.blocks().position().version, shard.blocks().position().pass),
        (Version(1), Pass(0))
    );
    assert_eq!(shard.missing(), [Lane(3)]);
    assert_eq!(
        contribute(&mut shard, 0, LaneEnd::LastOfPass),
        Err(Refusal::LaneExhausted { lane: Lane(0) })
    );
    contribute(&mut shard, 3, LaneEnd::LastOfPass).unwrap();
    assert_eq!(
        (shard.blocks().position().version, shard.blocks().position().pass),
        (Version(2), Pass(1))
    );
    assert_eq!(shard.blocks().position().pass_start, Version(2));
    assert_eq!(shard.missing().len(), 4);
}

fn segments(values: &[f32]) -> ByteSegments {
    Bytes::from_iter(values.iter().flat_map(|it| it.to_le_bytes())).into()
}

fn finite(block: u32, values: &[f32]) -> ValidatedBlock {
    ValidatedBlock::new(block, &segments(values), BufferPool::default().lend(values.len())).unwrap()
}

/// F41, F48: one non-finite value at any index is enough to refuse a gradient.
#[test]
fn a_gradient_that_is_not_finite_is_refused() {
    const LEN: usize = 2500;
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for place in [0, 1, 1023, 1024, 2047, 2048, LEN - 1] {
            let mut values = [1.0; LEN];
            values[place] = bad;
            let refusal =
                ValidatedBlock::new(7, &segments(&values), BufferPool::default().lend(LEN));
            assert_eq!(refusal, Err(Refusal::NotFinite { block: 7 }), "{bad} at {place}");
        }
    }
}

/// S004-37: a gradient of another length is refused.
#[test]
fn a_gradient_of_another_length_is_refused() {
    let refusal = ValidatedBlock::new(7, &segments(&[1.0; 3]), BufferPool::default().lend(4));
    assert_eq!(refusal, Err(Refusal::WrongLength { block: 7, found: 12, wanted: 16 }));
}

/// S004-37: an invalid contribution is refused as a whole and changes nothing.
#[test]
fn a_contribution_that_does_not_fit_changes_nothing() {
    let mut shard = shard();
    let before = state(&mut shard);
    let good = contribution(shard.blocks(), 0, 0);
    let mut short = good.clone();
    short.blocks[1] = finite(1, &short.blocks[1].values()[1..]);
    let mut twice = good.clone();
    twice.blocks[1] = twice.blocks[0].clone();
    let mut strange = good.clone();
    strange.blocks[1] = finite(77, good.blocks[1].values());
    let mut fewer = good.clone();
    fewer.blocks.pop();
    let of_nothing = Contribution { records: 0, ..good.clone() };
    assert_eq!(
        offer(&mut shard, Version(0), 0, of_nothing, LaneEnd::LastOfPass),
        Err(Refusal::WrongBlocks { found: good.blocks.len(), wanted: 0 }),
    );
    let few = [LaneShare { records: 1, checksum: 1, end: LaneEnd::MoreToCome, weight: None }];
    let exchanged = [LaneShare { checksum: 2, ..share(&good, LaneEnd::MoreToCome) }];
    for shares in [few, exchanged] {
        assert!(matches!(
            shard.contribute(Version(0), Lane(0), &shares, good.clone()),
            Err(Refusal::RecordsMismatch { .. })
        ));
    }
    for (first, count) in [(0, 0), (1, 2), (0, 3), (2, 4)] {
        assert!(matches!(
            shard.contribute(Version(0), Lane(first), &few.repeat(count), good.clone()),
            Err(Refusal::NoSuchNode { .. })
        ));
    }
    let mut offer = |version, lane, given| {
        offer(&mut shard, Version(version), lane, given, LaneEnd::MoreToCome)
    };
    assert!(matches!(offer(0, 0, short), Err(Refusal::WrongLength { .. })));
    assert!(matches!(offer(0, 0, fewer), Err(Refusal::WrongBlocks { .. })));
    assert!(matches!(offer(0, 0, twice), Err(Refusal::UnexpectedBlock { .. })));
    assert!(matches!(offer(0, 0, strange), Err(Refusal::UnexpectedBlock { .. })));
    assert!(matches!(offer(0, LANES, good.clone()), Err(Refusal::NoSuchNode { .. })));
    assert!(matches!(offer(1, 0, good.clone()), Err(Refusal::Ahead { .. })));
    assert_eq!(shard.missing().len(), LANES as usize);
    assert!(state(&mut shard) == before);
}

fn range(task: u32, from: u32, to: u32) -> RecordRange {
    RecordRange { pass: Pass(0), task: TaskId(task), from, to, last: false }
}

/// I6: a push repeated after a lost reply is acknowledged but not applied again; so is one that another
/// trainer computes after the first one died.
#[test]
fn a_repeated_push_is_applied_once_from_any_trainer() {
    let mut shard = async_shard();
    let given = contribution(shard.blocks(), 0, 0);
    let other = contribution(shard.blocks(), 0, 1);
    assert_eq!(shard.apply(&range(7, 0, 3), given.clone()), Ok(Contributed::Complete));
    let once = bits(&shard.parameters());
    assert_eq!(shard.apply(&range(7, 0, 3), given.clone()), Ok(Contributed::Duplicate));
    assert_eq!(shard.apply(&range(7, 0, 3), other.clone()), Ok(Contributed::Duplicate));
    assert!(bits(&shard.parameters()) == once);
    assert_eq!(shard.apply(&range(8, 0, 3), given.clone()), Ok(Contributed::Complete));
    assert_eq!(shard.apply(&range(7, 3, 6), given.clone()), Ok(Contributed::Complete));
    assert_eq!(
        (shard.blocks().position().version, shard.blocks().position().examples),
        (Version(3), 9)
    );
}

/// I6: a push that skips records, or whose name does not match its content, changes nothing.
#[test]
fn a_push_with_a_gap_or_of_other_records_is_refused() {
    let mut shard = async_shard();
    let before = bits(&shard.parameters());
    let given = contribution(shard.blocks(), 0, 0);
    assert!(matches!(shard.apply(&range(7, 3, 6), given.clone()), Err(Refusal::Gap { .. })));
    for named in [range(7, 0, 2), range(7, 3, 0)] {
        assert!(matches!(shard.apply(&named, given.clone()), Err(Refusal::RecordsMismatch { .. })));
    }
    assert!(bits(&shard.parameters()) == before);
    assert_eq!(shard.snapshot().unwrap().0.applied, [AppliedRecords::default()]);
}

/// F37: after blocks from snapshots of different moments were combined, a push is applied only to the
/// blocks that do not reflect it yet.
#[test]
fn a_push_is_applied_only_to_the_blocks_that_lack_it() {
    let mut ahead = async_shard();
    let (behind, tables) = without_rows(&mut ahead);
    let given = contribution(ahead.blocks(), 0, 0);
    ahead.apply(&range(7, 0, 3), given.clone()).unwrap();
    let (mut mixed, _) = without_rows(&mut ahead);
    mixed.applied.extend(behind.applied);
    mixed.blocks[0] = SnapshotBlock { applied: 1, ..behind.blocks[0].clone() };
    let layout = ahead.blocks().layout().clone();
    let mut shard = AsyncShard::restore(layout, mixed, tables, rules(Mode::Async));
    assert!(bits(&shard.parameters()) != bits(&ahead.parameters()));
    assert_eq!(shard.apply(&range(7, 0, 3), given.clone()), Ok(Contributed::Complete));
    assert!(1 < shard.blocks().list().len());
    assert_eq!(shard.parameters().values[1], ahead.parameters().values[1], "applied twice");
    assert_ne!(shard.parameters().values[0], behind.blocks[0].values, "not applied");
    assert_eq!(shard.apply(&range(7, 0, 3), given.clone()), Ok(Contributed::Duplicate));
    assert_eq!(shard.blocks().position().examples, 3);
}

/// I10, D11: a shard restored from a snapshot continues with the bits of an uninterrupted one; further
/// training does not change the snapshot (S004-65).
#[test]
fn a_snapshot_is_complete_and_does_not_change() {
    let mut shard = shard();
    let step = |shard: &mut SyncShard| {
        for lane in 0..LANES {
            contribute(shard, lane, LaneEnd::MoreToCome).unwrap();
        }
    };
    step(&mut shard);
    step(&mut shard);
    let (snapshot, tables) = shard.snapshot().unwrap();
    let values: Vec<Vec<f32>> = snapshot.blocks.iter().map(|block| block.values.to_vec()).collect();
    step(&mut shard);
    let untouched = snapshot.blocks.iter().zip(&values).all(|(block, kept)| *block.values == *kept);
    assert!(untouched, "training on changed the snapshot");
    let layout = shard.blocks().layout().clone();
    let tables = restored(&layout, &tables, &rules(Mode::Sync));
    let mut restored = SyncShard::restore(layout, snapshot, tables, rules(Mode::Sync));
    step(&mut restored);
    assert!(state(&mut restored) == state(&mut shard));
    assert_eq!(restored.blocks().position(), shard.blocks().position());
}

/// A step without records makes no update but completes.
#[test]
fn a_step_without_a_record_changes_no_value() {
    let mut shard = shard();
    let before = state(&mut shard);
    for lane in 0..LANES {
        let none = Contribution {
            records: 0,
            loss_sum: 0.0,
            checksum: 0,
            blocks: Vec::new(),
            rows: Vec::new(),
            weight: None,
        };
        offer(&mut shard, Version(0), lane, none, LaneEnd::LastOfPass).unwrap();
    }
    shard.finish_step(None).unwrap();
    assert!(state(&mut shard) == before);
    assert_eq!(
        (shard.blocks().position().version, shard.blocks().position().pass),
        (Version(1), Pass(1))
    );
}

/// Clipping by global norm: the squares of all blocks, added in the order of blocks, and a scale factor.
#[test]
fn a_gradient_is_scaled_down_to_the_global_norm() {
    let mut rules = rules(Mode::Sync);
    rules.optimizer = OptimizerSpec { clip_norm: Some(1.0), ..OptimizerSpec::default() };
    rules.learning_rate.base = 1.0;
    let layout = Arc::new(Layout::new(vec![ParamSpec::new("w", &[2])]));
    let rules = Rules { lanes: 1, ..rules };
    let (snapshot, tables) = initial_values(&layout, vec![vec![0.0, 0.0]], &rules);
    let mut shard = SyncShard::restore(layout, snapshot, tables, rules);
    let blocks = vec![finite(0, &[6.0, 8.0])];
    let given = Contribution {
        records: 2,
        loss_sum: 0.0,
        checksum: 0,
        blocks,
        rows: Vec::new(),
        weight: None,
    };
    offer(&mut shard, Version(0), 0, given, LaneEnd::MoreToCome).unwrap();
    assert_eq!(shard.squares(), [(0, 25.0)]);
    shard.finish_step(Some(5.0)).unwrap();
    let moved = &shard.parameters().values[0];
    assert!((moved[0] + 0.6).abs() < 1e-6 && (moved[1] + 0.8).abs() < 1e-6, "{moved:?}");
}

/// The rate of a step is what all of its contributions say.
#[test]
fn a_step_has_the_learning_rate_that_its_contributions_name() {
    let mut rules = rules(Mode::Sync);
    rules.optimizer = OptimizerSpec::default();
    rules.learning_rate.base = 1.0;
    rules.plateau = Some(toml::from_str("factor = 0.5").unwrap());
    let layout = Arc::new(Layout::new(vec![ParamSpec::new("w", &[1])]));
    let rules = Rules { lanes: 2, ..rules };
    let (snapshot, tables) = initial_values(&layout, vec![vec![0.0]], &rules);
    let mut shard = SyncShard::restore(layout, snapshot, tables, rules);
    let part = || Contribution {
        records: 1,
        loss_sum: 0.0,
        checksum: 0,
        weight: None,
        blocks: vec![finite(0, &[-8.0])],
        rows: Vec::new(),
    };
    for (version, reductions, expected) in [(0, 0, 8.0), (1, 2, 10.0), (2, 2, 12.0)] {
        let version = Version(version);
        for lane in [0, 1] {
            shard.set_reductions(version, reductions).unwrap();
            offer(&mut shard, version, lane, part(), LaneEnd::MoreToCome).unwrap();
        }
        // Of a step that is complete, nothing depends on the number any more.
        shard.set_reductions(Version(7), 9).unwrap();
        shard.finish_step(None).unwrap();
        assert_eq!(**shard.parameters().values[0], [expected]);
    }
    shard.set_reductions(Version(3), 2).unwrap();
    let error = shard.set_reductions(Version(3), 3).unwrap_err();
    assert!(error.is_fatal(), "{error}");
}

/// I10: steps before a change of the job's settings have those of their time.
#[test]
fn a_step_has_the_settings_that_held_for_it() {
    let mut rules = rules(Mode::Sync);
    rules.optimizer = OptimizerSpec { clip_value: Some(2.0), ..OptimizerSpec::default() };
    rules.learning_rate.base = 0.5;
    let rate = LearningRateSpec { base: 1.0, ..LearningRateSpec::default() };
    let before = Settings {
        learning_rate: rate,
        clip_value: None,
        clip_norm: None,
        evaluation: EvaluationSpec::default(),
        checkpoint: CheckpointSpec::default(),
    };
    rules.changes =
        vec![Change { version: Version(2), before, at_unix_ms: 0, while_running: false }];
    let layout = Arc::new(Layout::new(vec![ParamSpec::new("w", &[1])]));
    let rules = Rules { lanes: 1, ..rules };
    let (snapshot, tables) = initial_values(&layout, vec![vec![0.0]], &rules);
    let mut shard = SyncShard::restore(layout, snapshot, tables, rules);
    for (version, expected) in [(0, 8.0), (1, 16.0), (2, 17.0), (3, 18.0)] {
        let blocks = vec![finite(0, &[-8.0])];
        let part = Contribution {
            records: 1,
            loss_sum: 0.0,
            checksum: 0,
            weight: None,
            blocks,
            rows: Vec::new(),
        };
        offer(&mut shard, Version(version), 0, part, LaneEnd::MoreToCome).unwrap();
        shard.finish_step(None).unwrap();
        assert_eq!(**shard.parameters().values[0], [expected]);
    }
}

/// An averaged tensor takes the mean over all records, whatever the optimizer, the learning rate and the
/// bounds on the gradient are; it has no part in the gradient's norm.
#[test]
fn the_mean_is_added_to_an_averaged_tensor() {
    let optimizer = OptimizerSpec {
        kind: OptimizerKind::Adam,
        weight_decay: 0.1,
        clip_value: Some(0.5),
        clip_norm: Some(1.0),
        ..OptimizerSpec::default()
    };
    let rules = Rules { lanes: 2, optimizer, ..rules(Mode::Sync) };
    let params = vec![ParamSpec::new("w", &[1]), ParamSpec::averaged("running_mean", &[2])];
    let values = vec![vec![0.0], vec![10.0, 20.0]];
    let layout = Arc::new(Layout::new(params));
    let (snapshot, tables) = initial_values(&layout, values, &rules);
    let mut shard = SyncShard::restore(layout, snapshot, tables, rules);
    for (lane, records, change) in [(0, 1, [4.0, -8.0]), (1, 3, [12.0, 0.0])] {
        let blocks = vec![finite(0, &[1.0]), finite(1, &change)];
        let given = Contribution {
            records,
            loss_sum: 0.0,
            checksum: 0,
            blocks,
            rows: Vec::new(),
            weight: None,
        };
        offer(&mut shard, Version(0), lane, given, LaneEnd::MoreToCome).unwrap();
    }
    assert_eq!(shard.squares(), [(0, 0.25), (1, 0.0)]);
    shard.finish_step(Some(0.5)).unwrap();
    assert_eq!(**shard.parameters().values[1], [14.0, 18.0]);
}

/// The average follows each update; buffers and frozen parameters are their own averages. It is there while no later
/// step has changed it.
#[test]
fn the_average_of_the_parameters_is_a_part_of_the_state() {
    let optimizer: OptimizerSpec =
        toml::from_str("groups = [{ parameters = ['frozen'], frozen = true }]").unwrap();
    let params = vec![
        ParamSpec::new("w", &[2]),
        ParamSpec::new("frozen", &[1]),
        ParamSpec::averaged("running_mean", &[1]),
    ];
    let layout = Arc::new(Layout::new(optimizer.grouped(params).unwrap()));
    let learning_rate = LearningRateSpec { base: 1.0, ..LearningRateSpec::default() };
    let average = Some(AverageSpec { decay: Some(0.5), start_step: 0, every_steps: 1 });
    let rules = Rules { lanes: 1, optimizer, learning_rate, average, ..rules(Mode::Sync) };
    assert_eq!(rules.state_names(), ["average"]);
    let (snapshot, tables) =
        initial_values(&layout, vec![vec![8.0, 16.0], vec![3.0], vec![1.0]], &rules);
    let mut shard = Shard::restore(layout.clone(), snapshot, tables, rules.clone());
    let averages = |shard: &Shard, version| {
        let found = shard.averages_at(Version(version))?;
        Some(found.values.iter().map(|it| it.to_vec()).collect::<Vec<_>>())
    };
    let step = |shard: &mut Shard, version| {
        let sync = shard.as_sync_mut().unwrap();
        let blocks = vec![finite(0, &[4.0, 8.0]), finite(1, &[1.0]), finite(2, &[1.0])];
        let given = Contribution {
            records: 1,
            loss_sum: 0.0,
            checksum: 0,
            blocks,
            rows: Vec::new(),
            weight: None,
        };
        offer(sync, Version(version), 0, given, LaneEnd::MoreToCome).unwrap();
    };
    assert_eq!(averages(&shard, 0).unwrap(), [&[8.0, 16.0][..], &[3.0], &[1.0]]);
    step(&mut shard, 0);
    let sync = shard.as_sync_mut().unwrap();
    assert!(!sync.apply_early().is_empty());
    assert_eq!(averages(&shard, 0), None, "a later step has begun");
    shard.as_sync_mut().unwrap().finish_step(None).unwrap();
    assert_eq!(averages(&shard, 1).unwrap(), [&[4.0, 8.0][..], &[3.0], &[2.0]]);
    // A checkpoint has the average.
    let (snapshot, _) = shard.snapshot().unwrap();
    let tables = initial_values(&layout, vec![vec![0.0; 2], vec![0.0], vec![0.0]], &rules).1;
    let mut shard = Shard::restore(layout, snapshot, tables, rules);
    step(&mut shard, 1);
    shard.as_sync_mut().unwrap().finish_step(None).unwrap();
    assert_eq!(shard.parameters().values[0].to_vec(), [0.0, 0.0]);
    assert_eq!(averages(&shard, 2).unwrap(), [&[2.0, 4.0][..], &[3.0], &[3.0]]);
    assert_eq!(averages(&shard, 1), None);
}

/// The mean gradient and loss divide by the weights of all lanes, an averaged tensor by the number of records.
#[test]
fn records_count_by_their_weight_in_gradient_and_loss() {
    let optimizer = OptimizerSpec::default();
    let rules = Rules { lanes: 3, optimizer, ..rules(Mode::Sync) };
    let params = vec![ParamSpec::new("w", &[1]), ParamSpec::averaged("running_mean", &[1])];
    let layout = Arc::new(Layout::new(params));
    let (snapshot, tables) = initial_values(&layout, vec![vec![0.0], vec![0.0]], &rules);
    let mut shard = SyncShard::restore(layout, snapshot, tables, rules);
    let given = |records, weight| Contribution {
        records,
        loss_sum: 3.0,
        checksum: 0,
        blocks: vec![finite(0, &[3.0]), finite(1, &[6.0])],
        rows: Vec::new(),
        weight,
    };
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        let refused = offer(&mut shard, Version(0), 0, given(2, Some(bad)), LaneEnd::MoreToCome);
        assert!(matches!(refused, Err(Refusal::BadWeight { .. })), "{refused:?}");
    }
    for (lane, weight) in [(2, None), (0, Some(0.5)), (1, Some(0.0))] {
        offer(&mut shard, Version(0), lane, given(2, weight), LaneEnd::MoreToCome).unwrap();
    }
    // 3 · 3 / (0.5 + 0 + 2), squared.
    assert!((shard.squares()[0].1 - 12.96).abs() < 1e-5, "{:?}", shard.squares());
    shard.finish_step(None).unwrap();
    assert_eq!(shard.blocks().position().loss, Some(3.6));
    assert_eq!(shard.blocks().position().examples, 6);
    assert_eq!(**shard.parameters().values[1], [3.0]);
    // A step of which nothing counts has a gradient of zero, and the loss stays that of the step before.
    let before = shard.parameters().values[0].clone();
    for lane in 0..3 {
        let none = given(1, Some(0.0));
        offer(&mut shard, Version(1), lane, none, LaneEnd::LastOfPass).unwrap();
    }
    shard.finish_step(None).unwrap();
    assert_eq!(
        (&shard.parameters().values[0], shard.blocks().position().loss),
        (&before, Some(3.6))
    );
}

/// A group has its own weight decay and factor of the learning rate; frozen parameters keep their bits, and have no part
/// in the gradient's norm.
#[test]
fn groups_of_parameters_have_their_own_settings() {
    let optimizer: OptimizerSpec = toml::from_str(
        "weight_decay = 0.5\nclip_norm = 100\n\
         groups = [{ parameters = ['*.bias'], weight_decay = 0 }, \
                   { parameters = ['head.weight'], learning_rate = 0.25 }, \
                   { parameters = ['body.*'], frozen = true }]",
    )
    .unwrap();
    let names = ["body.weight", "head.weight", "head.bias", "scale"];
    let params = names.map(|name| ParamSpec::new(name, &[2])).to_vec();
    let layout = Arc::new(Layout::new(optimizer.grouped(params).unwrap()));
    let rules = Rules { lanes: 1, optimizer, ..rules(Mode::Sync) };
    let rules =
        Rules { learning_rate: LearningRateSpec { base: 1.0, ..rules.learning_rate }, ..rules };
    let (snapshot, tables) = initial_values(&layout, vec![vec![4.0, 8.0]; 4], &rules);
    let mut shard = SyncShard::restore(layout, snapshot, tables, rules);
    let blocks = (0..4).map(|number| finite(number, &[1.0, 3.0])).collect();
    let given = Contribution {
        records: 1,
        loss_sum: 0.0,
        checksum: 0,
        blocks,
        rows: Vec::new(),
        weight: None,
    };
    offer(&mut shard, Version(0), 0, given, LaneEnd::MoreToCome).unwrap();
    assert_eq!(shard.squares(), [(0, 0.0), (1, 10.0), (2, 10.0), (3, 10.0)]);
    shard.finish_step(Some(5.0)).unwrap();
    let values: Vec<_> = shard.parameters().values.iter().map(|it| it.to_vec()).collect();
    assert_eq!(values, [[4.0, 8.0], [3.25, 6.25], [3.0, 5.0], [1.0, 1.0]]);
}

/// A job that begins with the parameters and the state of the optimizer of another one continues with its numbers: also
/// the bias correction, which counts updates.
#[test]
fn a_job_that_begins_with_the_state_of_an_optimizer_goes_on_as_the_job_that_it_is_from() {
    let layout = Arc::new(Layout::new(vec![ParamSpec::new("a", &[2]), ParamSpec::new("b", &[1])]));
    let rules = Rules { lanes: 1, ..rules(Mode::Sync) };
    let step = |shard: &mut SyncShard, version: u64, slope: f32| {
        let blocks = vec![finite(0, &[slope, -slope]), finite(1, &[0.5])];
        let given = Contribution {
            records: 1,
            loss_sum: 0.0,
            checksum: 0,
            weight: None,
            blocks,
            rows: Vec::new(),
        };
        offer(shard, Version(version), 0, given, LaneEnd::MoreToCome).unwrap();
        shard.finish_step(None).unwrap();
    };
    let (snapshot, tables) = initial_values(&layout, vec![vec![4.0, 8.0], vec![1.0]], &rules);
    let mut whole = SyncShard::restore(layout.clone(), snapshot, tables, rules.clone());
    step(&mut whole, 0, 1.0);
    step(&mut whole, 1, 3.0);
    let (before, _) = whole.snapshot().unwrap();
    let values: Vec<Vec<f32>> = before.blocks.iter().map(|it| it.values.to_vec()).collect();
    let named = |names: [&str; 2], order: [usize; 2]| InitialStates {
        names: names.map(str::to_owned).to_vec(),
        blocks: before
            .blocks
            .iter()
            .map(|it| (it.number, order.iter().flat_map(|at| it.state[*at].clone()).collect()))
            .collect(),
    };
    step(&mut whole, 2, -1.0);

    let rules = Rules { updates_before: 2, ..rules };
    let begun = |states: Option<InitialStates>, rules: &Rules| {
        let (mut snapshot, tables) = initial_values(&layout, values.clone(), rules);
        if let Some(states) = states {
            snapshot.begin_with(states, &rules.optimizer).unwrap();
        }
        let mut shard = SyncShard::restore(layout.clone(), snapshot, tables, rules.clone());
        step(&mut shard, 0, -1.0);
        shard.parameters().values
    };
    let expected = whole.parameters().values;
    assert_eq!(begun(Some(named(["m", "v"], [0, 1])), &rules), expected);
    assert_eq!(begun(Some(named(["v", "m"], [1, 0])), &rules), expected);
    assert_ne!(begun(None, &rules), expected);
    let counts_anew = Rules { updates_before: 0, ..rules.clone() };
    assert_ne!(begun(Some(named(["m", "v"], [0, 1])), &counts_anew), expected);

    let (mut snapshot, _) = initial_values(&layout, values.clone(), &rules);
    let mut refused = |states| snapshot.begin_with(states, &rules.optimizer).unwrap_err();
    let other = refused(named(["m", "velocity"], [0, 1]));
    assert!(matches!(other, Refusal::OtherStates { .. }), "{other}");
    let mut short = named(["m", "v"], [0, 1]);
    short.blocks.insert(1, vec![1.0]);
    let wrong = Refusal::WrongLength { block: 1, found: 4, wanted: 8 };
    assert_eq!(refused(short.clone()).to_string(), wrong.to_string());
    short.blocks.insert(1, vec![1.0, f32::NAN]);
    assert!(matches!(refused(short.clone()), Refusal::NotFinite { block: 1 }));
    short.blocks = [(9, vec![1.0, 2.0])].into();
    assert!(matches!(refused(short), Refusal::UnexpectedBlock { block: 9 }));
}

/// A model may set what a group of the job file sets.
#[test]
fn settings_that_a_model_gives_its_parameters_are_those_of_a_group() {
    let mut params = ["plain", "slow", "bias", "frozen"].map(|name| ParamSpec::new(name, &[2]));
    params[1].learning_rate = Some(0.25);
    params[2].weight_decay = Some(0.0);
    params[3].update = UpdateRule::Frozen;
    let layout = Arc::new(Layout::new(params.to_vec()));
    let optimizer: OptimizerSpec = toml::from_str("weight_decay = 0.5").unwrap();
    let rules = Rules { lanes: 1, optimizer, ..rules(Mode::Sync) };
    let rules =
        Rules { learning_rate: LearningRateSpec { base: 1.0, ..rules.learning_rate }, ..rules };
    let (snapshot, tables) = initial_values(&layout, vec![vec![4.0, 8.0]; 4], &rules);
    let mut shard = SyncShard::restore(layout, snapshot, tables, rules);
    let blocks = (0..4).map(|number| finite(number, &[1.0, 3.0])).collect();
    let given = Contribution {
        records: 1,
        loss_sum: 0.0,
        checksum: 0,
        weight: None,
        blocks,
        rows: Vec::new(),
    };
    offer(&mut shard, Version(0), 0, given, LaneEnd::MoreToCome).unwrap();
    shard.finish_step(None).unwrap();
    let values: Vec<_> = shard.parameters().values.iter().map(|it| it.to_vec()).collect();
    assert_eq!(values, [[1.0, 1.0], [3.25, 6.25], [3.0, 5.0], [4.0, 8.0]]);
}

/// I6, I7: every interleaving of the contributions of three lanes to three steps, including repeated and
/// late ones, to a depth of nine, leads through the same values.
#[test]
fn every_interleaving_of_lanes_gives_the_same_bits() {
    const STEPS: u64 = 3;
    let rules = || Rules { lanes: 3, ..rules(Mode::Sync) };
    let small =
        Arc::new(Layout::new(vec![ParamSpec::new("weight", &[5]), ParamSpec::new("bias", &[2])]));
    // The second lane is exhausted in the first step of the pass, the others in the second.
    let end = |version: u64, lane: u32| match (version, lane) {
        (0, 1) | (1, 0 | 2) => LaneEnd::LastOfPass,
        _ => LaneEnd::MoreToCome,
    };
    let replay = |pushes: &[(u64, u32)]| {
        let mut shard = shard_of(&small, 0, 1, rules());
        for (version, lane) in pushes {
            let given = contribution(shard.blocks(), *lane, *version);
            let taken = offer(&mut shard, Version(*version), *lane, given, end(*version, *lane));
            if taken == Ok(Contributed::Complete) {
                shard.finish_step(None).unwrap();
            }
        }
        shard
    };
    let moves: Vec<(u64, u32)> =
        (0..STEPS).flat_map(|version| (0..3).map(move |lane| (version, lane))).collect();
    let mut at = std::collections::BTreeMap::<Version, (Vec<u32>, u64)>::new();
    let mut seen = std::collections::BTreeSet::new();
    let mut frontier = vec![Vec::new()];
    for _ in 0..9 {
        let mut next = Vec::new();
        for before in &frontier {
            for push in &moves {
                let pushes = [&before[..], &[*push]].concat();
                let mut shard = replay(&pushes);
                let found = (state(&mut shard), shard.blocks().position().examples);
                let known =
                    at.entry(shard.blocks().position().version).or_insert_with(|| found.clone());
                assert_eq!(*known, found, "{pushes:?}");
                if seen.insert(format!("{shard:?}")) {
                    next.push(pushes);
                }
            }
        }
        frontier = next;
    }
    assert_eq!(at.len() as u64, STEPS + 1, "not every step was made");
    assert!(15 < seen.len(), "explored only {} states", seen.len());
}
