//! Coordinators and their workers under faults: a named closure has one result.

use steadfast_sim::closures::{run, run_with_parameters};

/// Seeds of one run of the tests.
const SEEDS: u64 = 150;

const PUSHING_SEEDS: u64 = 25;

/// S000-12, S000-20: workers, programs and etcd are killed, stopped and cut off from each other. Each closure settles, and
/// all programs of the job receive the same value for a name, however often it was computed.
#[test]
fn a_name_has_one_result_for_all_programs() {
    let (mut repeated, mut terms) = (0, 0);
    for seed in 0..SEEDS {
        let ledger = run(seed);
        assert!(ledger.broken.is_empty(), "seed {seed}: {:?}", ledger.broken);
        repeated += ledger.runs.values().filter(|runs| 1 < **runs).count();
        terms += ledger.terms;
    }
    // Otherwise the faults would test nothing.
    assert!(SEEDS < terms, "{terms} terms");
    assert!(100 < repeated, "{repeated} closures ran more than once");
}

/// S000-20: pservers and masters are killed as well, so the parameters are rolled back again and again. What a closure
/// pushes counts once on every slot, however often it ran.
#[test]
fn a_push_of_a_named_closure_counts_once_on_every_slot() {
    let (mut repeated, mut generations) = (0, 0);
    for seed in 0..PUSHING_SEEDS {
        let ledger = run_with_parameters(seed);
        assert!(ledger.broken.is_empty(), "seed {seed}: {:?}", ledger.broken);
        repeated += ledger.runs.values().filter(|runs| 1 < **runs).count() as u64;
        generations += ledger.generations;
    }
    assert!(3 * PUSHING_SEEDS < generations, "{generations} generations");
    assert!(5 * PUSHING_SEEDS < repeated, "{repeated} closures ran more than once");
}

#[test]
fn a_seed_gives_the_same_run() {
    assert_eq!(run(7), run(7));
}
