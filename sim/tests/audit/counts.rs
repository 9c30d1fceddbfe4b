//! Asynchronous jobs: the audit finds records that were applied twice or in place of others, and tasks that count as done
//! and were lost.

use std::collections::BTreeSet;

use steadfast_audit::{Cause, Evidence, RecordSet, Sum, What, audit};
use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::job::schedule::{stream_order, task_order};
use steadfast_common::job::spec::LostPserver;
use steadfast_common::records::QueueSnapshot;
use steadfast_common::records::applied_records::{AppliedPass, AppliedRecords};

use crate::evidence::{
    add, applied, assert_finds, assert_mismatch, changed, checkpoint, checkpoint_mut, is_named,
};
use crate::recorded::{ASYNC, evidence, manifest_of};

/// Returns the queues of the checkpoint.
fn queue(evidence: &Evidence) -> &QueueSnapshot {
    checkpoint(evidence).queue.as_ref().expect("the job is asynchronous")
}

/// Returns the pass that a slot is in.
fn present(counted: &AppliedRecords) -> Option<Pass> {
    counted.passes.last().map(|it| it.pass)
}

/// Returns the tasks that the queues mark as done in their pass.
fn done(evidence: &Evidence) -> BTreeSet<TaskId> {
    let (queue, seed) = (queue(evidence), evidence.spec.seed);
    let Some(manifest) = manifest_of(evidence, queue.pass) else { return BTreeSet::new() };
    let order = match evidence.stream {
        Some(_) => stream_order(manifest.task_count(), seed, queue.pass),
        None => task_order(manifest, seed, queue.pass),
    };
    let dispatched = order.into_iter().take(queue.cursor as usize);
    let is_open = |it: &TaskId| queue.open.contains_key(it) || queue.discarded.contains_key(it);
    dispatched.filter(|task| !is_open(task)).collect()
}

/// Returns whether a slot in the pass of the queues lacks a task that they mark as done.
fn lacks_something(evidence: &Evidence, counted: &AppliedRecords) -> bool {
    present(counted) == Some(queue(evidence).pass)
        && done(evidence).into_iter().any(|task| !counted.done.contains(task))
}

fn is_lost(what: &What) -> bool {
    matches!(what, What::Lost { .. })
}

/// Returns the evidence of jobs in which no slot may lose what it has acknowledged.
fn rewound() -> impl Iterator<Item = &'static Evidence> {
    evidence(&ASYNC).filter(|it| it.spec.asynchronous.lost_pserver == LostPserver::Rewind)
}

/// Returns each push of a pass whose task was not given up, with its sum.
fn pushes(evidence: &Evidence, pass: Pass) -> Vec<(RecordSet, Sum)> {
    let Some(manifest) = manifest_of(evidence, pass) else { return Vec::new() };
    let rhythm = &evidence.spec.asynchronous;
    let push = rhythm.batch * rhythm.push_every;
    let is_given_up =
        |task: &TaskId| evidence.discarded.get(task).is_some_and(|it| it.passes.contains(pass));
    let mut sums = Vec::new();
    for task in manifest.training_tasks().into_iter().filter(|task| !is_given_up(task)) {
        let records = manifest.records_of(task) as u32;
        for from in (0..records).step_by(push as usize) {
            let to = records.min(from + push);
            let sum = Sum::of(pass, task, from..to);
            sums.push((RecordSet::Range { task, from, to }, sum));
        }
    }
    sums
}

/// Applies `change` to each listed pass of each group, with the sum of one push of that pass, and checks the cause that
/// the audit finds.
fn is_always_found(change: fn(&mut AppliedPass, Sum), is_meant: fn(&Cause, &RecordSet) -> bool) {
    let mut cases = 0;
    for evidence in evidence(&ASYNC) {
        for (group, (slot, counted)) in applied(evidence).enumerate() {
            for (at, applied_pass) in counted.passes.iter().enumerate() {
                let sums = pushes(evidence, applied_pass.pass);
                let Some((set, sum)) = sums.get(cases % sums.len().max(1)) else { continue };
                let wrong = changed(evidence, group, |it| change(&mut it.passes[at], *sum));
                assert_mismatch(&wrong, slot, |what| match what {
                    What::CountMismatch { pass, cause: Some(cause), .. } => {
                        *pass == applied_pass.pass && is_meant(cause, set)
                    }
                    _ => false,
                });
                cases += 1;
            }
        }
    }
    assert!(100 < cases, "{cases} cases");
}

/// I6, F25, F26
#[test]
fn a_range_applied_twice_is_found() {
    is_always_found(add, |cause, set| matches!(cause, Cause::TooOften(it) if is_named(it, set)));
}

/// I6, F48
#[test]
fn exchanged_records_are_found() {
    let exchange = |it: &mut AppliedPass, _| it.checksum = it.checksum.wrapping_add(1);
    is_always_found(exchange, |cause, _| *cause == Cause::Exchanged);
}

/// I4, F2: the report of another attempt was accepted for a task that a slot has not applied.
#[test]
fn a_late_report_counted_for_another_attempt_is_found() {
    let mut cases = 0;
    for evidence in rewound() {
        let at = queue(evidence).pass;
        for late in queue(evidence).open.keys() {
            let lacks = |counted: &AppliedRecords| {
                present(counted) == Some(at) && !counted.done.contains(*late)
            };
            if !applied(evidence).any(|(_, counted)| lacks(counted)) {
                continue;
            }
            let mut wrong = evidence.clone();
            let queue = checkpoint_mut(&mut wrong).queue.as_mut().expect("it was there");
            queue.open.remove(late);
            let is_expected = |what: &What| match what {
                What::Lost { pass, tasks, .. } => *pass == at && *tasks == [*late],
                // A slot that has not begun the pass has no task of it.
                What::CountMismatch { pass, .. } => *pass == at,
                _ => false,
            };
            assert_finds(&wrong, is_expected, is_lost);
            cases += 1;
        }
    }
    assert!(30 < cases, "{cases} cases");
}

/// I6, I10
#[test]
fn a_rolled_back_slot_that_keeps_its_sums_is_found() {
    let mut cases = 0;
    for (before, after) in ASYNC.iter().flat_map(|run| run.pairs()) {
        if applied(before).count() != applied(after).count() {
            continue;
        }
        for (group, ((slot, rolled_back), (_, kept))) in
            applied(before).zip(applied(after)).enumerate()
        {
            // Records of a pass that the slot had left would be sent again.
            if rolled_back.passes.len() == kept.passes.len() && rolled_back.passes != kept.passes {
                let wrong = changed(before, group, |it| it.passes.clone_from(&kept.passes));
                let is_mismatch = |what: &What| matches!(what, What::CountMismatch { .. });
                assert_mismatch(&wrong, slot, is_mismatch);
                cases += 1;
            }
        }
    }
    assert!(100 < cases, "{cases} cases");
}

/// I6, I10
#[test]
fn queues_that_are_not_rolled_back_with_the_slots_are_found() {
    let mut cases = 0;
    for (before, after) in ASYNC.iter().flat_map(|run| run.pairs()) {
        let may_lose = after.spec.asynchronous.lost_pserver == LostPserver::Continue;
        if may_lose || !applied(before).all(|(_, counted)| lacks_something(after, counted)) {
            continue;
        }
        let mut wrong = after.clone();
        checkpoint_mut(&mut wrong).slots.clone_from(&checkpoint(before).slots);
        let is_expected = |what: &What| is_lost(what) || matches!(what, What::Examples { .. });
        assert_finds(&wrong, is_expected, is_lost);
        cases += 1;
    }
    assert!(30 < cases, "{cases} cases");
}

/// I5, F4
#[test]
fn a_slot_that_loses_its_memory_without_a_generation_is_found() {
    let mut cases = 0;
    for (before, after) in ASYNC.iter().flat_map(|run| run.pairs()) {
        let may_lose = after.spec.asynchronous.lost_pserver == LostPserver::Continue;
        let slots = checkpoint(after).slots.len();
        if may_lose || checkpoint(before).slots.len() != slots {
            continue;
        }
        for slot in 0..slots {
            let lost = &checkpoint(before).slots[slot];
            if lost.groups.iter().all(|group| lacks_something(after, &group.counted)) {
                let mut wrong = after.clone();
                checkpoint_mut(&mut wrong).slots[slot] = lost.clone();
                let is_expected = |what: &What| match what {
                    What::Lost { slot, .. } => *slot == lost.slot,
                    _ => matches!(what, What::Examples { .. }),
                };
                assert_finds(&wrong, is_expected, is_lost);
                cases += 1;
            }
        }
    }
    assert!(30 < cases, "{cases} cases");
}

/// I3, I6: whether the list lacks it, or it was given up between the queues and the shards of a checkpoint from which
/// the job was rolled back: then the queues dispatch it again, but no shard applies it.
#[test]
fn an_unlisted_given_up_task_is_found() {
    let mut cases = 0;
    for run in &*ASYNC {
        let bad =
            run.training().map(|job| job.bad_tasks(&run.recording.manifest)).unwrap_or_default();
        for evidence in &run.recording.evidence {
            let reached = applied(evidence).filter_map(|(_, counted)| present(counted)).min();
            let reached = reached.unwrap_or_default().max(queue(evidence).pass);
            for task in &bad {
                let listed = evidence.discarded.get(task);
                let is_over = |pass| listed.is_some_and(|it| it.passes.contains(Pass(pass)));
                if !(0..reached.0).any(is_over) {
                    continue;
                }
                let mut wrong = evidence.clone();
                let hidden = wrong.discarded.remove(task).expect("it is listed");
                if let Some(result) = &mut wrong.result {
                    result.discarded.tasks -= 1;
                    result.discarded.times -= hidden.times;
                    result.discarded.listed.retain(|it| it.task != *task);
                }
                let is_found =
                    |what: &What| is_lost(what) || matches!(what, What::CountMismatch { .. });
                let is_expected =
                    |what: &What| is_found(what) || matches!(what, What::Unlisted { .. });
                match evidence.spec.asynchronous.lost_pserver {
                    LostPserver::Rewind => assert_finds(&wrong, is_expected, is_found),
                    // The task may count as one that a slot was allowed to lose.
                    LostPserver::Continue => assert!(!audit(&wrong).findings.is_empty()),
                }
                cases += 1;
            }
        }
    }
    assert!(10 < cases, "{cases} cases");
}
