//! Every store behaves as a map from ids to rows.

use std::collections::BTreeMap;

use proptest::prelude::*;
use steadfast_pserver_storage::{MemoryStores, RowCounts, RowStore, RowStores};

/// Values of a row.
const STRIDE: usize = 3;

/// What is done to a store.
#[derive(Clone, Debug)]
enum Action {
    /// Adds to a row, which is created if it does not exist.
    Add(u64, f32),
    Remove(u64),
    Get(u64),
    Scan,
}

fn action() -> impl Strategy<Value = Action> {
    // Few ids, so that the same ones come again.
    let id = prop_oneof![0..200_u64, Just(u64::MAX)];
    prop_oneof![
        6 => (id.clone(), -8..8_i32).prop_map(|(id, value)| Action::Add(id, value as f32)),
        2 => id.clone().prop_map(Action::Remove),
        2 => id.prop_map(Action::Get),
        1 => Just(Action::Scan),
    ]
}

type Model = BTreeMap<u64, (RowCounts, Vec<f32>)>;

fn rows_of(store: &mut dyn RowStore) -> Vec<(u64, (RowCounts, Vec<f32>))> {
    let mut rows = Vec::new();
    store.scan(&mut |id, counts, values| rows.push((id, (counts, values.to_vec())))).unwrap();
    rows
}

fn check(stores: &dyn RowStores, actions: &[Action]) {
    let mut store = stores.open(STRIDE).unwrap();
    let mut model = Model::new();
    for action in actions {
        match action {
            Action::Add(id, value) => {
                let row = store.entry(*id).unwrap();
                assert_eq!(row.is_new, !model.contains_key(id));
                assert!(!row.is_new || row.values.iter().all(|it| *it == 0.0), "{:?}", row.values);
                row.values.iter_mut().for_each(|it| *it += value);
                row.counts.count(7);
                let (counts, values) =
                    model.entry(*id).or_insert_with(|| (RowCounts::default(), vec![0.0; STRIDE]));
                values.iter_mut().for_each(|it| *it += value);
                counts.count(7);
            }
            Action::Remove(id) => {
                store.remove(*id).unwrap();
                model.remove(id);
            }
            Action::Get(id) => {
                let found = store.get(*id).unwrap().map(|(counts, it)| (counts, it.to_vec()));
                assert_eq!(found, model.get(id).cloned());
            }
            Action::Scan => {
                assert_eq!(rows_of(store.as_mut()), Vec::from_iter(model.clone()));
            }
        }
        assert_eq!(store.len(), model.len());
    }
    assert_eq!(rows_of(store.as_mut()), Vec::from_iter(model));
}

proptest! {
    #[test]
    fn memory_is_a_map_of_rows(actions in prop::collection::vec(action(), 0..600)) {
        check(&MemoryStores, &actions);
    }
}

#[test]
fn rows_without_values_have_counts() {
    let mut store = MemoryStores.open(0).unwrap();
    for pass in [3, 5, 4] {
        store.entry(9).unwrap().counts.count(pass);
    }
    let counts = RowCounts { updates: 3, pass: 5 };
    assert_eq!(store.get(9).unwrap(), Some((counts, &[][..])));
}
