//! Embedding tables: the rows that readers see, and what becomes of contributions to them.

use std::sync::Arc;

use steadfast_common::ids::{Lane, Pass, Slot, TaskId, Version};
use steadfast_common::job::spec::{Mode, OptimizerKind, OptimizerSpec, TableSpec};
use steadfast_common::records::applied_records::RecordRange;
use steadfast_common::records::contribution::{LaneEnd, LaneShare};
use steadfast_common::tensor::layout::{Layout, ParamSpec};
use steadfast_common::tensor::placement::{Placement, PlacementRecord};
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::{Initial, RANGES, Rows, range_of};
use steadfast_pserver_core::async_shard::AsyncShard;
use steadfast_pserver_core::block_store::ShardSnapshot;
use steadfast_pserver_core::contribution::{Contributed, Contribution, Refusal};
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::sync_shard::SyncShard;
use steadfast_pserver_core::tables::{
    HeldRange, Obsolete, RowKind, StoredRows, TableRows, TablesSnapshot,
};

use crate::shard::rules;

const INITIAL: Initial = Initial::Uniform(0.5);

fn layout() -> Arc<Layout> {
    Arc::new(Layout::new(vec![ParamSpec::table("rows", 1, INITIAL)]))
}

/// Plain gradient descent with rate 1 in one lane, and these settings of the table.
fn rules_with(mode: Mode, table: TableSpec) -> Rules {
    let mut rules = Rules { lanes: 1, ..rules(mode) };
    rules.optimizer = OptimizerSpec::default();
    rules.learning_rate.base = 1.0;
    rules.tables.insert("rows".to_owned(), table);
    rules
}

/// A shard before the first update.
fn first(rules: &Rules, slots: u32, slot: u32) -> SyncShard {
    let (snapshot, tables) = initial(rules, slots, slot);
    SyncShard::restore(layout(), snapshot, tables, rules.clone())
}

fn initial(rules: &Rules, slots: u32, slot: u32) -> (ShardSnapshot, TableRows) {
    let placement = Placement::of(&layout(), &PlacementRecord::LargestFirst { slots });
    ShardSnapshot::initial(&layout(), &placement, Slot(slot), Vec::new(), rules).unwrap()
}

/// The tables of a snapshot of the only slot, restored.
pub(crate) fn restored(layout: &Layout, tables: &TablesSnapshot, rules: &Rules) -> TableRows {
    let mut restored = TableRows::new(layout, 0..RANGES, rules).unwrap();
    for held in tables.ranges() {
        let RangeRows { rows, candidates, .. } = read(tables, held, None);
        restored.set_applied(*held);
        restored.add(held.table as usize, held.range, &rows, &candidates).unwrap();
    }
    restored
}

/// The rows of one range.
#[derive(Debug, PartialEq)]
struct RangeRows {
    rows: StoredRows,
    candidates: StoredRows,
    obsolete: Obsolete,
}

/// Reads the rows of a range that changed since a snapshot, row by row.
fn read(tables: &TablesSnapshot, held: &HeldRange, since: Option<u32>) -> RangeRows {
    let mut obsolete = Obsolete::default();
    let mut all = |kind| {
        let (mut rows, mut next) = (StoredRows::default(), Some(0));
        while let Some(from) = next {
            let piece = tables.read(held, kind, from, since, 1).unwrap();
            assert!(piece.rows.ids.len() <= 1, "a piece is small");
            rows.ids.extend(piece.rows.ids);
            rows.counts.extend(piece.rows.counts);
            rows.values.extend(piece.rows.values);
            obsolete.append(piece.obsolete);
            next = piece.next;
        }
        rows
    };
    let (rows, candidates) = (all(RowKind::Rows), all(RowKind::Candidates));
    RangeRows { rows, candidates, obsolete }
}

/// The rows of all ranges of a snapshot.
fn all_rows(tables: &TablesSnapshot) -> Vec<RangeRows> {
    tables.ranges().iter().map(|held| read(tables, held, None)).collect()
}

fn shard(table: TableSpec) -> SyncShard {
    first(&rules_with(Mode::Sync, table), 1, 0)
}

fn contribution(rows: &[(u64, f32)]) -> Contribution {
    let (ids, values) = rows.iter().copied().unzip();
    let rows = vec![Rows::of(1, ids, values)];
    Contribution { records: 1, loss_sum: 0.5, checksum: 1, blocks: Vec::new(), rows, weight: None }
}

/// One step of one record.
fn step(shard: &mut SyncShard, rows: &[(u64, f32)], end: LaneEnd) {
    let share = [LaneShare { records: 1, checksum: 1, end, weight: None }];
    let version = shard.blocks().position().version;
    let taken = shard.contribute(version, Lane(0), &share, contribution(rows));
    assert_eq!(taken, Ok(Contributed::Complete));
    shard.finish_step(None).unwrap();
}

fn rows_at(shard: &mut SyncShard, version: u64, ids: &[u64]) -> Option<Vec<f32>> {
    let rows = shard.rows_at(Version(version), vec![RowIds::new(ids.to_vec())]).unwrap()?;
    Some(rows[0].values().to_vec())
}

fn now(shard: &mut SyncShard, ids: &[u64]) -> Vec<f32> {
    let version = shard.blocks().position().version.0;
    rows_at(shard, version, ids).unwrap()
}

/// The initial value of a row.
fn begin(id: u64) -> f32 {
    let mut row = [0.0];
    INITIAL.fill(7, 0, id, &mut row);
    row[0]
}

/// A row is its initial value until an update, whether it was read before or not; other rows stay as they are.
#[test]
fn readers_create_no_row() {
    let mut shard = shard(TableSpec::default());
    assert_eq!(now(&mut shard, &[1, 2, u64::MAX]), [begin(1), begin(2), begin(u64::MAX)]);
    step(&mut shard, &[(2, 0.25)], LaneEnd::MoreToCome);
    assert_eq!(now(&mut shard, &[1, 2]), [begin(1), begin(2) - 0.25]);
    assert_eq!(shard.blocks().tables().row_counts(), [1]);
}

/// I7: a trainer that takes lanes over needs the rows of the version of the step, which other slots may not have
/// completed yet.
#[test]
fn the_rows_of_the_previous_version_can_be_read_as_well() {
    let mut shard = shard(TableSpec::default());
    step(&mut shard, &[(2, 0.25)], LaneEnd::MoreToCome);
    step(&mut shard, &[(2, 0.5), (3, 1.0)], LaneEnd::MoreToCome);
    assert_eq!(rows_at(&mut shard, 2, &[2, 3]).unwrap(), [begin(2) - 0.75, begin(3) - 1.0]);
    assert_eq!(rows_at(&mut shard, 1, &[2, 3, 4]).unwrap(), [begin(2) - 0.25, begin(3), begin(4)]);
    assert_eq!(rows_at(&mut shard, 0, &[2]), None);
    assert_eq!(rows_at(&mut shard, 3, &[2]), None);
}

/// I6: a push that repeats a lane of the previous step changes nothing.
#[test]
fn a_repeated_contribution_to_a_row_counts_once() {
    let mut shard = shard(TableSpec::default());
    step(&mut shard, &[(2, 0.25)], LaneEnd::MoreToCome);
    let share = [LaneShare { records: 1, checksum: 1, end: LaneEnd::MoreToCome, weight: None }];
    let again = shard.contribute(Version(0), Lane(0), &share, contribution(&[(2, 0.25)]));
    assert_eq!(again, Ok(Contributed::Duplicate));
    assert_eq!(now(&mut shard, &[2]), [begin(2) - 0.25]);
}

/// Updates before the admission of a row are counted, but change nothing.
#[test]
fn a_row_is_admitted_by_the_update_that_its_table_demands() {
    let mut shard = shard(TableSpec { admit_after: 3, ..TableSpec::default() });
    for (seen, expected) in
        [(1, begin(2)), (2, begin(2)), (3, begin(2) - 0.25), (4, begin(2) - 0.5)]
    {
        step(&mut shard, &[(2, 0.25)], LaneEnd::MoreToCome);
        assert_eq!(now(&mut shard, &[2]), [expected], "after {seen} updates");
        assert_eq!(shard.blocks().tables().row_counts(), [u64::from(3 <= seen)]);
    }
}

/// A row without an update for more passes than its table allows begins again, with its admission; that it is
/// read meanwhile makes no difference. The row is not there after a restart either.
#[test]
fn an_expired_row_begins_again() {
    let table = TableSpec { admit_after: 2, expire_after: Some(1), ..TableSpec::default() };
    let mut shard = shard(table.clone());
    step(&mut shard, &[(2, 0.25)], LaneEnd::MoreToCome);
    step(&mut shard, &[(2, 0.25), (3, 0.25)], LaneEnd::LastOfPass);
    // Pass 1, in which it is not seen.
    step(&mut shard, &[], LaneEnd::MoreToCome);
    assert_eq!(now(&mut shard, &[2]), [begin(2) - 0.25]);
    step(&mut shard, &[], LaneEnd::LastOfPass);
    assert_eq!(now(&mut shard, &[2]), [begin(2)], "it has expired in pass 2");
    // At the previous version it had not.
    assert_eq!(rows_at(&mut shard, 3, &[2]).unwrap(), [begin(2) - 0.25]);

    let (snapshot, tables) = shard.snapshot().unwrap();
    for range in all_rows(&tables) {
        assert_eq!(range.rows.ids, [0; 0]);
        shard.blocks_mut().forget(range.obsolete).unwrap();
    }
    // Another slot may still be there: the snapshot must not take it away.
    assert_eq!(rows_at(&mut shard, 3, &[2]).unwrap(), [begin(2) - 0.25]);
    let rules = rules_with(Mode::Sync, table);
    let tables = restored(&layout(), &tables, &rules);
    let mut restored = SyncShard::restore(layout(), snapshot, tables, rules);
    for shard in [&mut shard, &mut restored] {
        // The one update of row 3 is forgotten as well.
        step(shard, &[(2, 0.25), (3, 0.25)], LaneEnd::MoreToCome);
        assert_eq!(now(shard, &[2, 3]), [begin(2), begin(3)]);
        step(shard, &[(2, 0.25), (3, 0.25)], LaneEnd::MoreToCome);
        assert_eq!(now(shard, &[2, 3]), [begin(2) - 0.25, begin(3) - 0.25]);
    }
    let ((blocks, tables), (of_other, other)) =
        (shard.snapshot().unwrap(), restored.snapshot().unwrap());
    assert_eq!((blocks, all_rows(&tables)), (of_other, all_rows(&other)));
}

/// A checkpoint needs only the rows that changed since the one before, and a restore of both gives the same shard:
/// with rows that were admitted, expired or created anew between them.
#[test]
fn rows_that_changed_since_a_snapshot_restore_it_to_the_next() {
    let table = TableSpec { admit_after: 2, expire_after: Some(1), ..TableSpec::default() };
    let rules = rules_with(Mode::Sync, table.clone());
    let mut shard = shard(table);
    // In pass 0: row 1 is admitted, 2 and 3 are counted once.
    step(&mut shard, &[(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)], LaneEnd::MoreToCome);
    step(&mut shard, &[(1, 1.0), (4, 1.0)], LaneEnd::LastOfPass);
    let (_, base) = shard.snapshot().unwrap();
    assert_eq!(all_rows(&base).iter().map(|it| it.rows.ids.len()).sum::<usize>(), 2);
    // In pass 1: row 2 is admitted, and row 1 changes.
    step(&mut shard, &[(1, 1.0), (2, 1.0)], LaneEnd::LastOfPass);
    // In passes 2 and 3: row 5 is counted; 4 and the candidate 3 expire.
    step(&mut shard, &[(1, 1.0), (2, 1.0), (5, 1.0)], LaneEnd::LastOfPass);
    step(&mut shard, &[(1, 1.0), (4, 1.0)], LaneEnd::MoreToCome);
    let (blocks, next) = shard.snapshot().unwrap();
    let mut changed = Vec::new();
    let mut both = restored(&layout(), &base, &rules);
    for held in next.ranges() {
        let RangeRows { rows, candidates, .. } = read(&next, held, Some(base.number()));
        changed.extend(rows.ids.clone());
        both.add(0, held.range, &rows, &candidates).unwrap();
    }
    changed.sort_unstable();
    assert_eq!(changed, [1, 2]);
    let found = all_rows(&both.snapshot(blocks.position.pass).unwrap());
    for (found, expected) in found.into_iter().zip(all_rows(&next)) {
        assert_eq!((found.rows, found.candidates), (expected.rows, expected.candidates));
    }
    // Both go on to the same rows.
    let mut other = SyncShard::restore(layout(), blocks, both, rules);
    for given in [&[(3, 1.0), (4, 1.0), (5, 1.0)][..], &[(2, 1.0), (3, 1.0), (4, 1.0)]] {
        step(&mut shard, given, LaneEnd::LastOfPass);
        step(&mut other, given, LaneEnd::LastOfPass);
        let ids = [1, 2, 3, 4, 5];
        assert_eq!(now(&mut shard, &ids), now(&mut other, &ids));
    }
}

/// Rows that a snapshot found obsolete are removed, unless an update has created them anew since.
#[test]
fn obsolete_rows_are_removed_unless_they_were_created_anew() {
    let mut shard = shard(TableSpec { expire_after: Some(1), ..TableSpec::default() });
    step(&mut shard, &[(2, 0.25), (3, 0.25)], LaneEnd::LastOfPass);
    (0..2).for_each(|_| step(&mut shard, &[], LaneEnd::LastOfPass));
    let (_, tables) = shard.snapshot().unwrap();
    step(&mut shard, &[(2, 0.5)], LaneEnd::MoreToCome);
    assert_eq!(shard.blocks().tables().row_counts(), [2]);
    for part in all_rows(&tables).into_iter().flat_map(|range| range.obsolete.in_parts()) {
        shard.blocks_mut().forget(part).unwrap();
    }
    assert_eq!(shard.blocks().tables().row_counts(), [1]);
    assert_eq!(now(&mut shard, &[2, 3]), [begin(2) - 0.5, begin(3)]);
}

/// A table has its own update rule and learning rate.
#[test]
fn a_table_has_its_own_rule() {
    let optimizer = OptimizerSpec {
        kind: OptimizerKind::Adagrad,
        initial_accumulator: Some(9.0),
        ..OptimizerSpec::default()
    };
    let learning_rate =
        Some(steadfast_common::job::spec::LearningRateSpec { base: 0.5, ..Default::default() });
    let table = TableSpec { optimizer: Some(optimizer), learning_rate, ..TableSpec::default() };
    let mut shard = shard(table);
    step(&mut shard, &[(2, 4.0)], LaneEnd::MoreToCome);
    // 0.5 × 4 / √(9 + 16)
    assert!((now(&mut shard, &[2])[0] - (begin(2) - 0.4)).abs() < 1e-6);
}

/// S004-47: a table restored into any number of slots goes on with the same bits.
#[test]
fn the_rows_do_not_depend_on_the_number_of_slots() {
    let rules = rules_with(Mode::Sync, TableSpec::default());
    let gradients: Vec<(u64, f32)> = (0..200).map(|id| (id, id as f32 * 0.01)).collect();
    let values = |slots: u32| {
        let mut all = Vec::new();
        for slot in 0..slots {
            let mut shard = first(&rules, slots, slot);
            let held = shard.blocks().tables().held().ranges.clone();
            let own: Vec<(u64, f32)> =
                gradients.iter().copied().filter(|(id, _)| held.contains(&range_of(*id))).collect();
            step(&mut shard, &own, LaneEnd::MoreToCome);
            let (_, tables) = shard.snapshot().unwrap();
            for range in held {
                all.push(tables.rows_of(0, range).unwrap().unwrap().digest());
            }
            let other = if slots == 1 { RANGES } else { (slot + 1) % slots * RANGES / slots };
            assert_eq!(tables.rows_of(0, other), Ok(None));
        }
        all
    };
    assert_eq!(values(1).len(), RANGES as usize);
    assert_eq!(values(3), values(1));
}

/// S004-47: a slot beyond the number of ranges has none, and takes part in steps.
#[test]
fn a_slot_without_ranges_completes_steps() {
    let rules = rules_with(Mode::Sync, TableSpec::default());
    let mut shard = first(&rules, RANGES + 1, RANGES);
    step(&mut shard, &[], LaneEnd::MoreToCome);
    assert_eq!(
        shard.rows_at(Version(1), vec![RowIds::default()]).unwrap(),
        Some(vec![Rows::new(1)])
    );
    assert_eq!(shard.snapshot().unwrap().1.ranges(), []);
}

/// F37: after ranges from snapshots of different moments were combined, a push is applied only to those that do
/// not reflect it yet.
#[test]
fn a_push_is_applied_only_to_the_ranges_that_lack_it() {
    let rules = rules_with(Mode::Async, TableSpec::default());
    let (snapshot, tables) = initial(&rules, 1, 0);
    let mut ahead = AsyncShard::restore(layout(), snapshot, tables, rules.clone());
    let (behind, behind_tables) = ahead.snapshot().unwrap();
    let range = RecordRange { pass: Pass(0), task: TaskId(7), from: 0, to: 1, last: false };
    let ids: Vec<u64> = (0..20).collect();
    let gradients: Vec<(u64, f32)> = ids.iter().map(|id| (*id, 0.25)).collect();
    ahead.apply(&range, contribution(&gradients)).unwrap();
    let (mut mixed, tables) = ahead.snapshot().unwrap();
    mixed.applied.extend(behind.applied);
    let mut both = TableRows::new(&layout(), 0..RANGES, &rules).unwrap();
    for held in tables.ranges() {
        let is_behind = held.range % 2 == 0;
        let of = if is_behind { &behind_tables } else { &tables };
        let RangeRows { rows, candidates, .. } = read(of, held, None);
        both.set_applied(HeldRange { applied: usize::from(is_behind), ..*held });
        both.add(0, held.range, &rows, &candidates).unwrap();
    }
    let mut shard = AsyncShard::restore(layout(), mixed, both, rules);
    assert_eq!(shard.apply(&range, contribution(&gradients)), Ok(Contributed::Complete));
    let found = shard.rows(vec![RowIds::new(ids.clone())]).unwrap()[0].values().to_vec();
    assert_eq!(found, ids.iter().map(|id| begin(*id) - 0.25).collect::<Vec<_>>());
    assert_eq!(shard.apply(&range, contribution(&gradients)), Ok(Contributed::Duplicate));
}

/// A contribution without the rows of every table would be applied in part.
#[test]
fn a_contribution_without_a_table_is_refused() {
    let mut shard = shard(TableSpec::default());
    let share = [LaneShare { records: 1, checksum: 1, end: LaneEnd::MoreToCome, weight: None }];
    let given = Contribution { rows: Vec::new(), ..contribution(&[]) };
    let refused = shard.contribute(Version(0), Lane(0), &share, given);
    assert_eq!(refused, Err(Refusal::WrongTables { found: 0, wanted: 1 }));
}

/// The norm of a gradient includes that of its rows, by range.
#[test]
fn the_norm_of_a_gradient_includes_its_rows() {
    let mut rules = rules_with(Mode::Sync, TableSpec::default());
    rules.optimizer.clip_norm = Some(1.0);
    let mut shard = first(&rules, 1, 0);
    let share = [LaneShare { records: 1, checksum: 1, end: LaneEnd::MoreToCome, weight: None }];
    let given = contribution(&[(2, 3.0), (5, 4.0)]);
    shard.contribute(Version(0), Lane(0), &share, given).unwrap();
    let squares = shard.squares();
    assert_eq!(squares.iter().map(|(_, square)| square).sum::<f64>(), 25.0);
    shard.finish_step(Some(5.0)).unwrap();
    let moved = now(&mut shard, &[2, 5]);
    assert!((moved[0] - (begin(2) - 0.6)).abs() < 1e-6);
    assert!((moved[1] - (begin(5) - 0.8)).abs() < 1e-6);
}
