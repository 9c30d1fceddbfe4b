//! Tests of saving and loading shards, on files in a directory.

use std::collections::BTreeSet;

use futures::FutureExt;
use steadfast_checkpoint::row_file::RowFileRecord;
use steadfast_common::ids::{Lane, Pass, Version};
use steadfast_common::job::dataset::Manifest;
use steadfast_common::job::spec::{OptimizerKind, OptimizerSpec};
use steadfast_common::records::QueueSnapshot;
use steadfast_common::records::position::Position;
use steadfast_common::tensor::layout::{BLOCK_LEN_MAX, ParamSpec};
use steadfast_common::tensor::table::{Initial, RANGES, range_of};
use steadfast_proto::answer_as_it_comes;
use steadfast_pserver_core::tables::{RowKind, StoredRows};
use steadfast_pserver_storage::RowCounts;
use tempfile::TempDir;

use super::*;
use crate::state::{self, Part, receive_part, send_part};

/// By block number: the bits of its values and state, and its applied records.
type Blocks = BTreeMap<u32, (Vec<u32>, Vec<Vec<u32>>, AppliedRecords)>;

fn job(kind: OptimizerKind) -> JobRecord {
    let text = include_str!("../../../examples/digits.toml");
    let mut spec = steadfast_common::job::job_file::parse(text).unwrap();
    spec.optimizer = OptimizerSpec { kind, ..OptimizerSpec::default() };
    JobRecord::new(spec, String::new(), "abc".to_owned())
}

/// The state of a slot.
struct State {
    blocks: ShardSnapshot,
    tables: TableRows,
    saved: Arc<SavedRows>,
}

struct Scene {
    directory: TempDir,
    shards: ShardStore,
    layout: Arc<Layout>,
}

impl Scene {
    fn new() -> Self {
        let params = vec![
            ParamSpec::new("embedding", &[BLOCK_LEN_MAX / 64 + 1, 64]),
            ParamSpec::new("layers.0.weight", &[16, 8]),
            ParamSpec::new("layers.0.bias", &[16]),
            ParamSpec::new("layers.1.weight", &[4, 16]),
            ParamSpec::new("layers.1.bias", &[4]),
            ParamSpec::new("scale", &[]),
            ParamSpec::table("rows", 3, Initial::Uniform(0.1)),
        ];
        let directory = tempfile::tempdir().unwrap();
        let store = steadfast_store::open(directory.path().to_str().unwrap()).unwrap();
        let job = job(OptimizerKind::Adam);
        let rules = Rules::new(&job.spec);
        let mut shards = ShardStore::new(store, job, rules);
        // Rows of a range are in several files, and rows of several ranges in one.
        shards.row_file_bytes = 2_000;
        let scene = Self { directory, shards, layout: Arc::new(Layout::new(params)) };
        std::fs::write(scene.manifest(), "{}").unwrap();
        scene
    }

    /// Returns the path of the dataset manifest, by which a store is recognized.
    fn manifest(&self) -> std::path::PathBuf {
        self.directory.path().join(Manifest::object_name("abc"))
    }

    /// Returns the blocks of `slot`, which is one of `slots` slots.
    fn blocks_of(&self, slot: u32, slots: u32) -> Vec<u32> {
        Placement::of(&self.layout, &placement(slots)).blocks_of(Slot(slot)).to_vec()
    }

    /// Returns a possible state of a slot after some training; blocks and ranges of odd numbers reflect more records.
    fn snapshot(&self, slot: u32, slots: u32) -> State {
        let numbers = self.blocks_of(slot, slots);
        let made = |number: u32, salt: u32| -> Vec<f32> {
            let len = self.layout.blocks()[number as usize].len as u32;
            let mixed = |it: u32| it.wrapping_mul(2_654_435).wrapping_add(number * 97 + salt);
            (0..len).map(|it| (mixed(it) as f32).sin()).collect()
        };
        let blocks = numbers.into_iter().map(|number| SnapshotBlock {
            number,
            applied: number as usize % 2,
            values: Arc::new(made(number, 1)),
            state: Arc::new(
                (2..).zip(&*self.shards.states).map(|(salt, _)| made(number, salt)).collect(),
            ),
        });
        let width = 3 * (1 + self.shards.states.len());
        let rows = |range: u32, ids: Vec<u64>, width: usize| {
            let counts = ids.iter().map(|id| RowCounts { updates: *id as u32, pass: 1 }).collect();
            let values = (0..ids.len() * width).map(|it| (it as u32 + range) as f32 * 0.5);
            StoredRows { counts, values: values.collect(), ids }
        };
        let of_range = |range: u32, ids: std::ops::Range<u64>| -> Vec<u64> {
            ids.filter(|id| range_of(*id) == range).collect()
        };
        let ranges = Placement::of(&self.layout, &placement(slots)).ranges_of(Slot(slot));
        let mut tables = TableRows::new(&self.layout, ranges.clone(), &self.shards.rules).unwrap();
        for range in ranges {
            tables.set_applied(HeldRange { table: 0, range, applied: range as usize % 2 });
            let candidates = rows(range, of_range(range, 1_000..1_100), 0);
            let rows = rows(range, of_range(range, 0..300), width);
            tables.add(0, range, &rows, &candidates).unwrap();
        }
        let position = Position {
            version: Version(7),
            pass: Pass(1),
            pass_start: Version(4),
            examples: 300,
            loss: Some(0.25),
        };
        let blocks = ShardSnapshot {
            position,
            updates: 6,
            exhausted: BTreeSet::from([Lane(3)]),
            applied: [300, 310].map(counted).to_vec(),
            blocks: blocks.collect(),
        };
        State { blocks, tables, saved: Arc::default() }
    }

    /// Returns what a slot hands over.
    fn handed(&self, State { blocks, tables, saved }: &mut State) -> SlotSnapshot {
        let (layout, shard, saved) = (self.layout.clone(), blocks.clone(), saved.clone());
        let tables = tables.snapshot(shard.position.pass).unwrap().into();
        SlotSnapshot { layout, shard, tables, saved }
    }

    async fn save(&self, mut states: Vec<State>) -> CheckpointRecord {
        self.save_after(&mut states, "").await
    }

    /// Saves slots; `newest` is the object of the only one in the newest checkpoint.
    async fn save_after(&self, states: &mut [State], newest: &str) -> CheckpointRecord {
        let mut record = CheckpointRecord {
            params: self.layout.params().to_vec(),
            placement: placement(states.len() as u32),
            queue: Some(QueueSnapshot::default()),
            ..CheckpointRecord::default()
        };
        for (slot, State { blocks: snapshot, tables, saved }) in states.iter_mut().enumerate() {
            let tables = tables.snapshot(snapshot.position.pass).unwrap().into();
            let holder = (Slot(slot as u32), Incarnation(9));
            record.position = snapshot.position;
            record.exhausted = snapshot.exhausted.iter().copied().collect();
            let (layout, saved) = (self.layout.clone(), saved.clone());
            let snapshot = SlotSnapshot { layout, shard: snapshot.clone(), tables, saved };
            let saved = self.shards.save(holder, snapshot, newest).await;
            record.shards.push(saved.unwrap().record);
        }
        record
    }

    async fn load(&self, record: &CheckpointRecord, slots: u32) -> Vec<State> {
        let mut snapshots = Vec::new();
        for slot in 0..slots {
            let loaded = self.shards.load(record, Slot(slot), &placement(slots)).await.unwrap();
            assert_eq!(loaded.layout, self.layout);
            let LoadedShard { snapshot: blocks, tables, saved, .. } = loaded;
            snapshots.push(State { blocks, tables, saved: saved.into() });
        }
        snapshots
    }

    fn path(&self, record: &CheckpointRecord, shard: usize) -> std::path::PathBuf {
        self.directory.path().join(&record.shards[shard].object)
    }
}

fn placement(slots: u32) -> PlacementRecord {
    PlacementRecord::LargestFirst { slots }
}

fn counted(records: u64) -> AppliedRecords {
    let mut counted = AppliedRecords::default();
    counted.count(Pass(0), records, records * 31);
    counted
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the rows of all ranges of some slots, with their applied records; panics if a range is in two of them.
fn rows(snapshots: &mut [State]) -> BTreeMap<u32, ([StoredRows; 2], AppliedRecords)> {
    let mut all = BTreeMap::new();
    for State { blocks, tables, .. } in snapshots {
        let tables = tables.snapshot(blocks.position.pass).unwrap();
        for held in tables.ranges() {
            let read = |kind| tables.read(held, kind, 0, None, usize::MAX).unwrap().rows;
            let read = [RowKind::Rows, RowKind::Candidates].map(read);
            let content = (read, blocks.applied[held.applied].clone());
            assert_eq!(all.insert(held.range, content), None);
        }
    }
    all
}

/// Returns all blocks of some slots; panics if a block is in two of them.
fn blocks(snapshots: &[State]) -> Blocks {
    let mut blocks = Blocks::new();
    for State { blocks: snapshot, .. } in snapshots {
        for block in &snapshot.blocks {
            let state = block.state.iter().map(|state| bits(state)).collect();
            let content = (bits(&block.values), state, snapshot.applied[block.applied].clone());
            assert!(blocks.insert(block.number, content).is_none());
        }
    }
    blocks
}

/// F37, I10: a checkpoint restores the same bits into any number of slots.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_two_slots_is_restored_bit_by_bit_into_any_number_of_slots() {
    let scene = Scene::new();
    let mut snapshots = vec![scene.snapshot(0, 2), scene.snapshot(1, 2)];
    let (expected, expected_rows) = (blocks(&snapshots), rows(&mut snapshots));
    assert_eq!(expected.len(), scene.layout.blocks().len());
    assert_eq!(expected_rows.len(), RANGES as usize);
    let position = snapshots[0].blocks.position;
    let record = scene.save(snapshots).await;
    for slots in [1, 2, 3, 5] {
        let mut restored = scene.load(&record, slots).await;
        assert_eq!(blocks(&restored), expected, "{slots} slots");
        assert_eq!(rows(&mut restored), expected_rows, "{slots} slots");
        for (slot, State { blocks: snapshot, .. }) in restored.iter().enumerate() {
            assert_eq!(snapshot.position, position);
            assert_eq!(snapshot.updates, 6);
            assert_eq!(snapshot.exhausted, BTreeSet::from([Lane(3)]));
            let numbers: Vec<u32> = snapshot.blocks.iter().map(|block| block.number).collect();
            assert_eq!(numbers, scene.blocks_of(slot as u32, slots));
        }
        let again = scene.save(restored).await;
        let mut again = scene.load(&again, 2).await;
        assert_eq!(blocks(&again), expected, "from {slots} slots");
        assert_eq!(rows(&mut again), expected_rows, "from {slots} slots");
    }
}

/// F37, I7: the same without a store, from one slot to another: each gets its blocks and rows, and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn states_that_slots_hand_over_are_restored_bit_by_bit_into_any_number_of_slots() {
    let scene = Scene::new();
    let mut states = vec![scene.snapshot(0, 2), scene.snapshot(1, 2)];
    let (expected, expected_rows) = (blocks(&states), rows(&mut states));
    let handed: Vec<SlotSnapshot> = states.iter_mut().map(|state| scene.handed(state)).collect();
    let first = &handed[0].shard;
    let handover = CheckpointRecord {
        params: scene.layout.params().to_vec(),
        position: first.position,
        exhausted: first.exhausted.iter().copied().collect(),
        ..CheckpointRecord::default()
    };
    let names = BlockNames::new(scene.layout.clone());
    for slots in [1, 2, 3, 5] {
        let mut restored = Vec::new();
        for slot in (0..slots).map(Slot) {
            let placement = placement(slots);
            let mut shard = scene.shards.begin(&names, &handover, slot, &placement).unwrap();
            for state in &handed {
                let sent = std::future::ready(()).boxed();
                let part = Part { slot, placement: &placement, sent };
                let whole = (PlacementRecord::default(), Arc::new(()));
                let of = handover.generation;
                let stream = send_part(&scene.shards, of, state.clone(), whole, Some(part));
                let mut body = answer_as_it_comes(stream.unwrap()).into_body();
                receive_part(&handover, &mut shard, &mut body).await.unwrap();
            }
            let LoadedShard { snapshot, tables, saved, .. } = state::end(shard).unwrap();
            assert_eq!((snapshot.position, snapshot.updates), (first.position, 6));
            assert_eq!(snapshot.exhausted, first.exhausted);
            restored.push(State { blocks: snapshot, tables, saved: saved.into() });
        }
        assert_eq!(blocks(&restored), expected, "{slots} slots");
        assert_eq!(rows(&mut restored), expected_rows, "{slots} slots");
    }
}

/// F37, I7: a slot takes the blocks of its own process as they are.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_takes_its_own_blocks_by_reference() {
    let scene = Scene::new();
    let state = scene.snapshot(0, 1);
    let (names, placement) = (BlockNames::new(scene.layout.clone()), placement(1));
    let handover = CheckpointRecord::default();
    let mut shard = scene.shards.begin(&names, &handover, Slot(0), &placement).unwrap();
    shard.take(&state.blocks).unwrap();
    let number = state.blocks.blocks[0].number;
    assert_eq!(shard.take(&state.blocks), Err(number));
    let found = &shard.found[&number];
    assert!(Arc::ptr_eq(&found.values, &state.blocks.blocks[0].values));
    assert_eq!(shard.snapshot.updates, 6);
    assert_eq!(shard.found.len(), scene.layout.blocks().len());
}

/// F34, I9: damage to a shard file is always detected, as a permanent error.
#[tokio::test(flavor = "multi_thread")]
async fn damage_to_a_shard_is_a_permanent_error() {
    let scene = Scene::new();
    let record = scene.save(vec![scene.snapshot(0, 2), scene.snapshot(1, 2)]).await;
    let path = scene.path(&record, 1);
    let whole = std::fs::read(&path).unwrap();
    let damages: [fn(&mut Vec<u8>); 5] = [
        |bytes| *bytes.last_mut().unwrap() ^= 1,
        |bytes| bytes[20] ^= 0x80,
        |bytes| bytes.truncate(bytes.len() / 2),
        |bytes| bytes.clear(),
        |bytes| bytes.push(0),
    ];
    for damage in damages {
        let mut bytes = whole.clone();
        damage(&mut bytes);
        std::fs::write(&path, &bytes).unwrap();
        // The slot that had the shard, and one that combines several shards.
        for (slot, slots) in [(1, 2), (0, 1)] {
            let error =
                scene.shards.load(&record, Slot(slot), &placement(slots)).await.unwrap_err();
            let expected = format!("{} is damaged: its ", record.shards[1].object);
            let of_size = expected.replace("its ", "it has ");
            let text = error.to_string();
            assert!(text.starts_with(&expected) || text.starts_with(&of_size), "{text}");
            assert!(error.is_permanent(), "{text}");
        }
    }
    std::fs::remove_file(&path).unwrap();
    let error = scene.shards.load(&record, Slot(0), &placement(1)).await.unwrap_err();
    assert_eq!(error.to_string(), format!("{} is missing", record.shards[1].object));
    assert!(error.is_permanent());
}

/// Otherwise the cost of restoring would grow with the square of the number of pservers.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_reads_only_the_shards_that_it_needs() {
    let scene = Scene::new();
    let record = scene.save(vec![scene.snapshot(0, 2), scene.snapshot(1, 2)]).await;
    let path = scene.path(&record, 1);
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    scene.shards.load(&record, Slot(0), &placement(2)).await.unwrap();
    scene.shards.load(&record, Slot(1), &placement(2)).await.unwrap_err();
}

/// In asynchronous mode each slot counts its own updates, and so do the rules that depend on that number.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_has_as_many_updates_as_the_shards_that_it_came_from() {
    let scene = Scene::new();
    let mut other = scene.snapshot(1, 2);
    other.blocks.updates = 9;
    let record = scene.save(vec![scene.snapshot(0, 2), other]).await;
    let updates = |snapshots: Vec<State>| {
        snapshots.iter().map(|snapshot| snapshot.blocks.updates).collect::<Vec<_>>()
    };
    assert_eq!(updates(scene.load(&record, 2).await), [6, 9]);
    assert_eq!(updates(scene.load(&record, 1).await), [9]);
}

/// The build that wrote the checkpoint may have placed blocks differently.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_found_in_a_shard_where_it_was_not_expected() {
    let scene = Scene::new();
    let snapshots = vec![scene.snapshot(1, 2), scene.snapshot(0, 2)];
    let expected = blocks(&snapshots);
    let record = scene.save(snapshots).await;
    assert_eq!(blocks(&scene.load(&record, 2).await), expected);
}

/// F33: an unmounted directory does not prove that a checkpoint is damaged.
#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_store_does_not_damage_a_checkpoint() {
    let scene = Scene::new();
    let record = scene.save(vec![scene.snapshot(0, 1)]).await;
    let (store, away) = (scene.directory.path(), tempfile::tempdir().unwrap());
    std::fs::rename(store.join("shards"), away.path().join("shards")).unwrap();
    std::fs::rename(scene.manifest(), away.path().join("manifest")).unwrap();
    let error = scene.shards.load(&record, Slot(0), &placement(1)).await.unwrap_err();
    assert!(matches!(error, ShardError::StoreUnavailable) && !error.is_permanent(), "{error}");
    std::fs::rename(away.path().join("manifest"), scene.manifest()).unwrap();
    let error = scene.shards.load(&record, Slot(0), &placement(1)).await.unwrap_err();
    assert!(error.is_permanent(), "{error}");
}

/// F34: valid shards of another job, or an incomplete or ambiguous set of them, are refused.
#[tokio::test(flavor = "multi_thread")]
async fn valid_shards_of_another_job_are_not_loaded() {
    let scene = Scene::new();
    let record = scene.save(vec![scene.snapshot(0, 2), scene.snapshot(1, 2)]).await;
    let job = job(OptimizerKind::Adagrad);
    let rules = Rules::new(&job.spec);
    let other = ShardStore::new(scene.shards.store.clone(), job, rules);
    let error = other.load(&record, Slot(0), &placement(1)).await.unwrap_err();
    assert!(error.to_string().contains("lacks the optimizer state"), "{error}");
    assert!(error.is_permanent());

    let lone = scene.save(vec![scene.snapshot(0, 2)]).await;
    let error = scene.shards.load(&lone, Slot(0), &placement(1)).await.unwrap_err();
    assert!(error.to_string().starts_with("no shard holds "), "{error}");
    assert!(error.is_permanent());

    let mut twice = scene.save(vec![scene.snapshot(0, 2), scene.snapshot(0, 1)]).await;
    let error = scene.shards.load(&twice, Slot(0), &placement(1)).await.unwrap_err();
    assert!(error.to_string().ends_with("is in another shard as well"), "{error}");
    twice.shards.clear();
    let error = scene.shards.load(&twice, Slot(0), &placement(1)).await.unwrap_err();
    assert_eq!(error.to_string(), "the manifest is invalid: it has no shards");
    assert!(error.is_permanent());
}

/// Changes some rows of the only slot.
fn change(state: &mut State, ids: std::ops::Range<u64>, value: f32) {
    for id in ids {
        let counts = vec![RowCounts { updates: 9, pass: 1 }];
        let rows = StoredRows { ids: vec![id], counts, values: vec![value; 9] };
        state.tables.add(0, range_of(id), &rows, &StoredRows::default()).unwrap();
    }
}

/// Returns the number of row files of each layer of the only slot.
fn layers(record: &CheckpointRecord) -> Vec<u32> {
    record.shards[0].rows.iter().map(|layer| layer.files).collect()
}

/// S004-35: a checkpoint of tables costs as much as what changed.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_has_only_the_rows_that_changed_since_the_newest_one() {
    let scene = Scene::new();
    let mut states = [scene.snapshot(0, 1)];
    let first = scene.save_after(&mut states, "").await;
    assert!(layers(&first).len() == 1 && 5 < layers(&first)[0], "{:?}", layers(&first));
    let newest = &first.shards[0].object;
    // That which is not committed does not count.
    change(&mut states[0], 0..2, 0.5);
    scene.save_after(&mut states, newest).await;
    change(&mut states[0], 5..6, 1.5);
    let second = scene.save_after(&mut states, newest).await;
    assert_eq!(layers(&second), [layers(&first)[0], 1]);
    let mut restored = scene.load(&second, 1).await;
    assert_eq!(rows(&mut restored), rows(&mut states));
    // A pserver that restored it goes on, and the one that wrote it.
    change(&mut restored[0], 7..8, 2.5);
    change(&mut states[0], 7..8, 2.5);
    let newest = &second.shards[0].object;
    for state in [&mut restored, &mut states[..]] {
        let third = scene.save_after(state, newest).await;
        assert_eq!(layers(&third), [layers(&first)[0], 1, 1]);
        assert_eq!(rows(&mut scene.load(&third, 3).await), rows(state));
    }
    let unchanged = scene.save_after(&mut states, newest).await;
    assert_eq!(layers(&unchanged), [layers(&first)[0], 1, 1]);
    // One that restored another number of slots, or a checkpoint that is not the newest, has all rows.
    let mut of_one =
        scene.load(&scene.save(vec![scene.snapshot(0, 2), scene.snapshot(1, 2)]).await, 1).await;
    for newest in [newest.as_str(), &first.shards[0].object, "", "shards/other"] {
        assert_eq!(layers(&scene.save_after(&mut of_one, newest).await).len(), 1, "{newest}");
    }
}

/// I7: the digests by which a slot and its follower are compared show a difference in one row; if there are more rows
/// than are read each time, they do so in the course of time.
#[tokio::test(flavor = "multi_thread")]
async fn states_that_differ_in_one_row_have_different_digests() {
    const VERSIONS: u64 = 500;
    let mut scene = Scene::new();
    let digest = |scene: &Scene, state: &mut State, version: u64| {
        let SlotSnapshot { layout, mut shard, tables, .. } = scene.handed(state);
        shard.position.version = Version(version);
        scene.shards.state_digest(&layout, shard, &tables).unwrap()
    };
    let (mut ours, mut theirs) = (scene.snapshot(0, 1), scene.snapshot(0, 1));
    let differ = |scene: &Scene, ours: &mut State, theirs: &mut State| {
        (0..VERSIONS).filter(|it| digest(scene, ours, *it) != digest(scene, theirs, *it)).count()
    };
    for bytes in [2_000, ROW_FILE_BYTES] {
        scene.shards.row_file_bytes = bytes;
        assert_eq!(differ(&scene, &mut ours, &mut theirs), 0);
    }
    change(&mut theirs, 7..8, 2.5);
    assert_eq!(differ(&scene, &mut ours, &mut theirs), VERSIONS as usize);
    scene.shards.row_file_bytes = 2_000;
    assert!((1..VERSIONS as usize / 2).contains(&differ(&scene, &mut ours, &mut theirs)));
}

/// Otherwise a restore would read ever more files.
#[tokio::test(flavor = "multi_thread")]
async fn all_rows_are_written_again_after_eight_layers_or_as_many_bytes() {
    let scene = Scene::new();
    let mut states = [scene.snapshot(0, 1)];
    let mut newest = String::new();
    let mut lengths = Vec::new();
    for step in 0..11 {
        let record = scene.save_after(&mut states, &newest).await;
        lengths.push(layers(&record).len());
        newest.clone_from(&record.shards[0].object);
        change(&mut states[0], step..step + 1, 0.5);
    }
    assert_eq!(lengths, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]);
    let mut lengths = Vec::new();
    for _ in 0..5 {
        change(&mut states[0], 0..180, 0.5);
        let record = scene.save_after(&mut states, &newest).await;
        lengths.push(layers(&record).len());
        newest.clone_from(&record.shards[0].object);
    }
    assert_eq!(lengths, [3, 4, 1, 2, 3]);
}

/// F34, I9: damage to a row file is always detected, as a permanent error that names the file.
#[tokio::test(flavor = "multi_thread")]
async fn damage_to_a_row_file_is_a_permanent_error() {
    let scene = Scene::new();
    let mut states = [scene.snapshot(0, 1)];
    let first = scene.save_after(&mut states, "").await;
    change(&mut states[0], 0..2, 0.5);
    let record = scene.save_after(&mut states, &first.shards[0].object).await;
    let refused = async || {
        let error = scene.shards.load(&record, Slot(0), &placement(1)).await.unwrap_err();
        assert!(error.is_permanent(), "{error}");
        error.to_string()
    };
    for layer in &record.shards[0].rows {
        let object = layer.objects().next().unwrap();
        let path = scene.directory.path().join(&object);
        let whole = std::fs::read(&path).unwrap();
        let mut other = whole.clone();
        *other.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &other).unwrap();
        let error = refused().await;
        assert!(error.starts_with(&format!("{object} is damaged: its SHA-256 is ")), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(refused().await, format!("{object} is missing"));
        std::fs::write(&path, &whole).unwrap();
    }
    assert!(scene.shards.load(&record, Slot(0), &placement(1)).await.is_ok());
}

/// F30: attempts to write a checkpoint to a store that refuses it leave nothing behind.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_fails_leaves_no_row_files() {
    let mut scene = Scene::new();
    let mut states = [scene.snapshot(0, 1)];
    let not_finite = StoredRows {
        ids: vec![(0..).find(|id| range_of(*id) == RANGES - 1).unwrap()],
        counts: vec![RowCounts { updates: 1, pass: 1 }],
        values: vec![f32::NAN; 9],
    };
    states[0].tables.add(0, RANGES - 1, &not_finite, &StoredRows::default()).unwrap();
    scene.shards.row_file_bytes = 500;
    let State { blocks, tables, saved } = &mut states[0];
    let (layout, saved) = (scene.layout.clone(), saved.clone());
    let tables = tables.snapshot(Pass(1)).unwrap().into();
    let snapshot = SlotSnapshot { layout, shard: blocks.clone(), tables, saved };
    let refused = scene.shards.save((Slot(0), Incarnation(9)), snapshot, "").await;
    assert!(matches!(refused, Err(ShardError::Encode(EncodeError::NotFinite { .. }))));
    let files = || std::fs::read_dir(scene.directory.path().join("shards/digits")).unwrap().count();
    assert_eq!(files(), 0);
    scene.save(vec![scene.snapshot(0, 1)]).await;
    assert!(10 < files(), "{}", files());
}

/// F33: after the loss of the store, or of one object, the parameters are still in the memory of pservers; the next
/// checkpoint does not rely on files that are gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_has_all_rows_if_a_file_of_the_newest_is_gone() {
    let scene = Scene::new();
    let mut states = [scene.snapshot(0, 1)];
    let first = scene.save_after(&mut states, "").await;
    let file = first.shards[0].rows[0].objects().nth(3).unwrap();
    std::fs::remove_file(scene.directory.path().join(file)).unwrap();
    let second = scene.save_after(&mut states, &first.shards[0].object).await;
    assert_eq!(layers(&second), layers(&first));
    std::fs::remove_dir_all(scene.directory.path().join("shards")).unwrap();
    change(&mut states[0], 0..2, 0.5);
    let third = scene.save_after(&mut states, &second.shards[0].object).await;
    assert_eq!(layers(&third).len(), 1);
    assert_eq!(rows(&mut scene.load(&third, 1).await), rows(&mut states));
}

/// F30: the task of a save is aborted if the master does not wait for it any more.
#[tokio::test(flavor = "multi_thread")]
async fn the_files_of_an_aborted_attempt_are_deleted_by_the_next() {
    let scene = Scene::new();
    let mut states = [scene.snapshot(0, 1)];
    let object =
        |index| scene.directory.path().join(RowFilesRecord::object("shards/digits/x", index));
    std::fs::create_dir_all(scene.directory.path().join("shards/digits")).unwrap();
    let record = || RowFileRecord { sha256: String::new(), size_bytes: 1, ranges: [0, 0] };
    let (aborted, running) = (states[0].saved.begin("shards/digits/x"), states[0].saved.begin("y"));
    // The upload of the third one was not complete.
    for index in 0..3 {
        std::fs::write(object(index), "x").unwrap();
    }
    (0..2).for_each(|_| aborted.add(record()));
    scene.save_after(&mut states, "").await;
    assert!(object(0).exists(), "it may be in progress");
    drop(aborted);
    scene.save_after(&mut states, "").await;
    assert!((0..3).all(|index| !object(index).exists()));
    drop(running);
}
