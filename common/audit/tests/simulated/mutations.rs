//! The audit detects each missing guard: the audit of a job simulated without it is never clean.

use steadfast_audit::history::{self, Job, Rule};
use steadfast_audit::{What, audit};
use steadfast_common::given_up::GivenUpRecord;
use steadfast_common::ids::Pass;
use steadfast_common::spec::LostPserver;

use crate::async_world::{AsyncWorld, Mutation};
use crate::sync_world;

/// Runs in which the missing guard must have an effect.
const RUNS: usize = 200;

/// Audits jobs without a guard until [`RUNS`] of them were affected; none of these may be clean.
fn is_always_found(mutation: Mutation) {
    let (mut fired, mut seed) = (0, 0);
    while fired < RUNS {
        seed += 1;
        assert!(seed < 100_000, "{mutation:?} has an effect too rarely");
        let mut world = AsyncWorld::new(seed, LostPserver::Rewind);
        world.mutation = Some(mutation);
        world.run();
        let report = world.audit();
        assert!(!world.fired || !report.is_clean(), "{mutation:?}, seed {seed}: {report}");
        fired += usize::from(world.fired);
    }
}

/// I6, F25, F26
#[test]
fn a_range_applied_twice_is_found() {
    is_always_found(Mutation::NoDeduplication);
}

/// I4, F2
#[test]
fn a_late_report_counted_for_another_attempt_is_found() {
    is_always_found(Mutation::NoAttemptCheck);
}

/// I6, I10
#[test]
fn a_rolled_back_slot_that_keeps_its_sums_is_found() {
    is_always_found(Mutation::AppliedRecordsNotRestored);
}

/// I6, I10
#[test]
fn queues_that_are_not_rolled_back_with_the_slots_are_found() {
    is_always_found(Mutation::QueueNotRestored);
}

/// I5, F4
#[test]
fn a_slot_that_loses_its_memory_without_a_generation_is_found() {
    is_always_found(Mutation::SilentLoss);
}

/// I6, F48
#[test]
fn exchanged_records_are_found() {
    is_always_found(Mutation::Exchanged);
}

/// I6: the queues of the checkpoint dispatch the task again, but a shard that has left the pass does
/// not apply it.
#[test]
fn a_lost_task_given_up_between_queues_and_shards_of_a_checkpoint_is_found() {
    let detected = (1..3000).filter(|seed| {
        let mut world = AsyncWorld::new(*seed, LostPserver::Rewind);
        world.mutation = Some(Mutation::GivenUpDuringCheckpoint);
        world.run();
        !world.audit().is_clean()
    });
    assert!(5 < detected.count());
}

/// I3
#[test]
fn an_unlisted_given_up_task_is_found() {
    let (mut seen, mut seed) = (0, 0);
    while seen < RUNS {
        seed += 1;
        let mut world = AsyncWorld::new(seed, LostPserver::Rewind);
        world.run();
        let mut evidence = world.evidence(world.saved.last());
        let of_bad = evidence.discarded.keys().find(|task| world.bad.contains(task)).copied();
        let Some(hidden) = of_bad.and_then(|task| evidence.discarded.remove(&task)) else {
            continue;
        };
        if let Some(result) = &mut evidence.result {
            result.discarded.tasks -= 1;
            result.discarded.times -= hidden.times;
        }
        let report = audit(&evidence);
        assert!(!report.is_clean(), "seed {seed}: {report}");
        seen += 1;
    }
}

/// S004-20, I1, F2: a former master whose writes are not fenced is found, whether its lock was acquired
/// by another master or only expired.
#[test]
fn a_commit_of_a_former_master_is_found() {
    for seed in 1..=RUNS as u64 {
        let mut world = AsyncWorld::new(seed, LostPserver::Rewind);
        for _ in 0..20 + world.rng.below(300) {
            if !world.over {
                world.step();
            }
        }
        let former = world.state.ledger.clone();
        let expired = seed.is_multiple_of(2);
        if expired {
            world.etcd.expire_lock();
        } else {
            world.etcd.acquire(1_000);
        }
        // A decision based on its outdated view of the queues.
        let head = former.head();
        let late = vec![crate::etcd::put(&world.etcd.keys.queue(), &head)];
        let with_lock = world.rng.once_in(2);
        match with_lock {
            true => world.etcd.commit(999, late),
            false => world.etcd.txn(late),
        }
        let keys = &world.etcd.keys;
        let job = Job { keys, spec: &world.spec, manifest: &world.manifest };
        let report = history::check(&job, &[], &world.etcd.revisions);
        assert!(report.broken.iter().any(|it| it.rule == Rule::Fence), "seed {seed}: {report}");
    }
}

fn is_always_found_in_steps(mutation: sync_world::Mutation) {
    let (mut fired, mut seed) = (0, 0);
    while fired < RUNS {
        seed += 1;
        assert!(seed < 100_000, "{mutation:?} has an effect too rarely");
        let mut world = sync_world::SyncWorld::new(seed);
        world.mutation = Some(mutation);
        world.run();
        let report = world.audit();
        assert!(!world.fired || !report.is_clean(), "{mutation:?}, seed {seed}: {report}");
        fired += usize::from(world.fired);
    }
}

/// I6, I7, F25
#[test]
fn a_lane_applied_twice_is_found() {
    is_always_found_in_steps(sync_world::Mutation::NoDeduplication);
}

/// I7
#[test]
fn a_lane_missing_from_a_step_is_found() {
    is_always_found_in_steps(sync_world::Mutation::LaneSkipped);
}

/// I7, I10
#[test]
fn a_rolled_back_synchronous_slot_that_keeps_its_counts_is_found() {
    is_always_found_in_steps(sync_world::Mutation::CountsNotRestored);
}

/// I5, F4
#[test]
fn a_synchronous_slot_that_loses_its_memory_without_a_generation_is_found() {
    is_always_found_in_steps(sync_world::Mutation::SilentLoss);
}

/// I7
#[test]
fn exchanged_records_of_a_lane_are_found() {
    is_always_found_in_steps(sync_world::Mutation::Exchanged);
}

/// I3, I7
#[test]
fn an_unlisted_given_up_task_of_a_synchronous_job_is_found() {
    let (mut seen, mut seed) = (0, 0);
    while seen < RUNS {
        seed += 1;
        let mut world = sync_world::SyncWorld::new(seed);
        world.run();
        let mut evidence = world.evidence();
        // A task of a completed pass: the present pass may not have reached it.
        let passes = evidence.checkpoint.as_ref().map_or(Pass(0), |it| it.position.pass);
        let is_over =
            |record: &GivenUpRecord| (0..passes.0).any(|it| record.passes.contains(Pass(it)));
        let hidden = evidence.discarded.iter().find(|(_, record)| is_over(record));
        let Some(hidden) = hidden.map(|(task, _)| *task) else { continue };
        evidence.discarded.remove(&hidden);
        let report = audit(&evidence);
        let is_missed =
            report.findings.iter().any(|it| matches!(it.what, What::CountMismatch { .. }));
        assert!(!report.is_clean() && is_missed, "seed {seed}: {report}");
        seen += 1;
    }
}
