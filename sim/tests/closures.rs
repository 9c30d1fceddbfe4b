//! Coordinators and their workers under faults: a named closure has one result.

use steadfast_sim::closures::run;

/// Seeds of one run of the tests.
const SEEDS: u64 = 150;

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

#[test]
fn a_seed_gives_the_same_run() {
    assert_eq!(run(7), run(7));
}
