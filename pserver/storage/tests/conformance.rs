//! Every store behaves as a map from ids to rows.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use proptest::prelude::*;
use steadfast_pserver_storage::{
    LosableDisks, MemoryStores, RowCounts, RowStore, RowStores, RowsSnapshot, SnapshotRow,
    StorageError, TieredStores,
};

/// Values of a row of each space.
const STRIDES: [usize; 3] = [3, 0, 3];

/// What is done to a store.
#[derive(Clone, Debug)]
enum Action {
    /// Adds to a row, which is created if it does not exist.
    Add(usize, u64, f32),
    Remove(usize, u64),
    Get(usize, u64),
    Fetch(Vec<(usize, u64)>),
    Snapshot,
}

fn action() -> impl Strategy<Value = Action> {
    // Few ids, so that the same ones come again.
    let id = prop_oneof![0..200_u64, Just(u64::MAX)];
    let space = 0..STRIDES.len();
    prop_oneof![
        12 => (space.clone(), id.clone(), -8..8_i32)
            .prop_map(|(space, id, value)| Action::Add(space, id, value as f32)),
        3 => (space.clone(), id.clone()).prop_map(|(space, id)| Action::Remove(space, id)),
        4 => (space.clone(), id.clone()).prop_map(|(space, id)| Action::Get(space, id)),
        1 => prop::collection::vec((space, id), 0..20).prop_map(Action::Fetch),
        1 => Just(Action::Snapshot),
    ]
}

/// Counts, values, and number of snapshots before the last change.
type Row = (RowCounts, Vec<f32>, u32);
/// By space and id.
type Model = BTreeMap<(usize, u64), Row>;

fn rows_of(snapshot: &dyn RowsSnapshot) -> Vec<((usize, u64), Row)> {
    let mut rows = Vec::new();
    for space in 0..STRIDES.len() {
        // In pieces, as rows are written to files.
        let (mut from, mut piece) = (Some(0), 1);
        while let Some(first) = from.take() {
            let mut left = piece;
            let mut each = |row: SnapshotRow<'_>| {
                if left == 0 {
                    from = Some(row.id);
                    return ControlFlow::Break(());
                }
                left -= 1;
                rows.push(((space, row.id), (row.counts, row.values.to_vec(), row.changed)));
                ControlFlow::Continue(())
            };
            snapshot.scan(space, first, &mut each).unwrap();
            piece += 3;
        }
    }
    rows
}

fn check(stores: &dyn RowStores, actions: &[Action]) {
    let mut store = stores.open(&STRIDES).unwrap();
    let mut model = Model::new();
    let mut snapshots = Vec::new();
    for action in actions {
        match action {
            Action::Add(space, id, value) => {
                let row = store.entry(*space, *id).unwrap();
                assert_eq!(row.is_new, !model.contains_key(&(*space, *id)));
                assert!(!row.is_new || row.values.iter().all(|it| *it == 0.0), "{:?}", row.values);
                row.values.iter_mut().for_each(|it| *it += value);
                row.counts.count(7);
                let zeros = || (RowCounts::default(), vec![0.0; STRIDES[*space]], 0);
                let (counts, values, changed) = model.entry((*space, *id)).or_insert_with(zeros);
                values.iter_mut().for_each(|it| *it += value);
                counts.count(7);
                *changed = snapshots.len() as u32;
            }
            Action::Remove(space, id) => {
                store.remove(*space, *id).unwrap();
                model.remove(&(*space, *id));
            }
            Action::Get(space, id) => {
                store.retain(*space, *id, &|counts| 0 < counts.updates).unwrap();
                let found = store.get(*space, *id).unwrap();
                let expected = model.get(&(*space, *id));
                assert_eq!(found, expected.map(|(counts, values, _)| (*counts, &values[..])));
            }
            Action::Fetch(rows) => store.fetch(&mut rows.iter().copied()).unwrap(),
            Action::Snapshot => snapshots.push((store.snapshot().unwrap(), model.clone())),
        }
        let len = |space| model.keys().filter(|(it, _)| *it == space).count();
        (0..STRIDES.len()).for_each(|space| assert_eq!(store.len(space), len(space)));
    }
    snapshots.push((store.snapshot().unwrap(), model));
    for (number, (snapshot, model)) in (0..).zip(snapshots) {
        assert_eq!(snapshot.number(), number);
        assert_eq!(rows_of(&*snapshot), Vec::from_iter(model));
    }
}

/// Memory for a few dozen rows, or for a few.
fn tiered(memory_bytes: usize) -> TieredStores {
    TieredStores::new(memory_bytes, Arc::new(LosableDisks::default()))
}

proptest! {
    #[test]
    fn memory_is_a_map_of_rows(actions in prop::collection::vec(action(), 0..900)) {
        check(&MemoryStores, &actions);
    }

    #[test]
    fn memory_above_a_disk_is_a_map_of_rows(actions in prop::collection::vec(action(), 0..900)) {
        for memory_bytes in [4_000, 1_500, 250, 0] {
            check(&tiered(memory_bytes), &actions);
        }
    }
}

/// A store that is larger than its memory, with all ids added once.
fn filled(stores: &dyn RowStores, rows: u64) -> Result<Box<dyn RowStore>, StorageError> {
    let mut store = stores.open(&[8])?;
    for id in 0..rows {
        store.entry(0, id)?.values.fill(id as f32);
    }
    Ok(store)
}

#[test]
fn rows_beyond_the_memory_are_on_the_disk() {
    let memory = 100_000;
    let stores = TieredStores::new(memory, Arc::new(LosableDisks::default()));
    let mut store = filled(&stores, 20_000).unwrap();
    let usage = store.usage();
    assert!((memory / 2..=memory).contains(&usage.memory_bytes), "{usage:?}");
    assert!(usage.rows_in_memory < 2_000 && usage.disk_bytes != 0, "{usage:?}");
    // Rows that are used all the time stay in memory.
    for id in (0..20_000).step_by(7) {
        for hot in 0..100 {
            assert_eq!(store.get(0, hot).unwrap().unwrap().1, [hot as f32; 8]);
        }
        assert_eq!(store.get(0, id).unwrap().unwrap().1, [id as f32; 8]);
    }
    let (hits, misses) = (store.usage().hits, store.usage().misses);
    assert!(misses < 3_500 && 280_000 < hits, "{hits} {misses}");
}

/// F30
#[test]
fn a_disk_that_is_full_is_an_error_that_names_it() {
    let stores = TieredStores::new(10_000, Arc::new(LosableDisks { fails_after: Some(3) }));
    let error = filled(&stores, 10_000).unwrap_err().to_string();
    assert_eq!(error, "rows of tables cannot be kept in memory: No space left on device");
}

#[cfg(feature = "rocksdb")]
mod rocks {
    use steadfast_pserver_storage::local_disks;

    use super::*;

    fn rocks(directory: &std::path::Path) -> TieredStores {
        TieredStores::new(4_000, local_disks(directory.to_owned(), 0).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn memory_above_rocksdb_is_a_map_of_rows(
            actions in prop::collection::vec(action(), 0..900),
        ) {
            let directory = tempfile::tempdir().unwrap();
            check(&rocks(directory.path()), &actions);
            let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
            assert!(left.is_empty(), "the directory of a closed store is removed: {left:?}");
        }
    }

    /// Of a process that was killed.
    #[test]
    fn abandoned_directories_are_removed_and_others_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let of = |name: &str| directory.path().join(name);
        for name in ["steadfast-rows-dead", "other"] {
            std::fs::create_dir(of(name)).unwrap();
            std::fs::write(of(name).join("file"), "").unwrap();
            std::fs::write(of(&format!("{name}.lock")), "").unwrap();
        }
        let one = rocks(directory.path()).open(&[3]).unwrap();
        let other = rocks(directory.path()).open(&[3]).unwrap();
        assert!(!of("steadfast-rows-dead").exists() && of("other").exists());
        assert!(!of("steadfast-rows-dead.lock").exists() && of("other.lock").exists());
        // A directory and a lock file of each store.
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 6);
        drop((one, other));
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_an_error_that_names_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = rocks(file.path()).open(&[3]).unwrap_err().to_string();
        let begin = format!("rows of tables cannot be kept in {}: ", file.path().display());
        assert!(error.starts_with(&begin), "{error}");
    }
}
