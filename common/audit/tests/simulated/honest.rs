//! The audit of a correct job is clean under all simulated faults.

use proptest::prelude::*;
use steadfast_audit::history::{self, Job};
use steadfast_audit::{PassState, Severity, audit};
use steadfast_common::spec::LostPserver;

use crate::async_world::AsyncWorld;
use crate::sync_world;

/// `PROPTEST_CASES` raises the number of cases.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases * 4, failure_persistence: None, ..default }
}

fn check_history(world: &AsyncWorld) {
    let keys = &world.etcd.keys;
    let job = Job { keys, spec: &world.spec, manifest: &world.manifest };
    let report = history::check(&job, &[], &world.etcd.revisions);
    assert!(report.is_clean(), "{report}");
    assert!(0 < report.commits && 0 < report.attempts, "{report}");
}

proptest! {
    #![proptest_config(config())]

    /// I1, I2, I4, I6, I9, F7, F25, F26, F37: trainers die, report late and send duplicates; pservers
    /// lose their memory, and the number of slots changes.
    #[test]
    fn an_honest_asynchronous_job_audits_clean(seed in any::<u64>()) {
        let mut world = AsyncWorld::new(seed, LostPserver::Rewind);
        world.run();
        let report = world.audit();
        prop_assert!(report.is_clean(), "{report}");
        prop_assert_eq!(report.of(Severity::AllowedLoss).count(), 0);
        if world.has_failed() {
            return Ok(());
        }
        prop_assert_eq!(report.passes.len(), 3);
        prop_assert!(report.passes.iter().all(|it| it.state == PassState::Finished));
        check_history(&world);
    }

    /// I6: the same at each checkpoint while the job runs.
    #[test]
    fn an_honest_asynchronous_job_audits_clean_at_each_checkpoint(seed in any::<u64>()) {
        let mut world = AsyncWorld::new(seed, LostPserver::Rewind);
        let mut seen = 0;
        for _ in 0..700 {
            if world.over {
                break;
            }
            world.step();
            if seen < world.saved.len() {
                seen = world.saved.len();
                let report = world.audit();
                prop_assert!(report.is_clean(), "{report}");
            }
        }
        prop_assert!(audit(&world.evidence(None)).is_clean());
    }

    /// I6: if the job lets the other slots continue, missing records are reported as an allowed loss,
    /// and there are no other findings.
    #[test]
    fn a_single_lost_slot_loses_no_more_than_the_job_allows(seed in any::<u64>()) {
        let mut world = AsyncWorld::new(seed, LostPserver::Continue);
        world.run();
        let report = world.audit();
        prop_assert!(report.is_clean(), "{report}");
        check_history(&world);
    }
}

proptest! {
    #![proptest_config(config())]

    /// I7, F4, F7, F25, F37: lanes arrive in any order and as duplicates, tasks are given up anywhere,
    /// and the job is restored with more or fewer slots.
    #[test]
    fn an_honest_synchronous_job_audits_clean(seed in any::<u64>()) {
        let mut world = sync_world::SyncWorld::new(seed);
        world.run();
        let report = world.audit();
        prop_assert!(report.is_clean(), "{report}");
        prop_assert!(report.findings.is_empty(), "{report}");
    }
}
