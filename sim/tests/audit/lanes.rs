//! Synchronous jobs: the audit finds records that were applied twice, not at all, or in place of others.

use steadfast_audit::{Cause, Evidence, RecordSet, SlotCounts, Sum, What};
use steadfast_common::ids::{Lane, Pass};
use steadfast_common::job::schedule::LaneSchedule;
use steadfast_common::records::applied_records::AppliedPass;

use crate::evidence::{
    add, applied, assert_finds, assert_mismatch, changed, checkpoint, checkpoint_mut, is_named,
    subtract,
};
use crate::recorded::{SYNC, evidence, manifest_of};

/// Applies `change` to each listed pass of each group, with the sum of one micro-batch of that pass, and checks the
/// cause that the audit finds.
fn is_always_found(change: fn(&mut AppliedPass, Sum), is_meant: fn(&Cause, &RecordSet) -> bool) {
    let mut cases = 0;
    for evidence in evidence(&SYNC) {
        for (group, (slot, counted)) in applied(evidence).enumerate() {
            for (at, applied_pass) in counted.passes.iter().enumerate() {
                let sums = micro_batches(evidence, applied_pass.pass);
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

/// Returns each micro-batch of a pass that was applied, with its sum.
fn micro_batches(evidence: &Evidence, pass: Pass) -> Vec<(RecordSet, Sum)> {
    let Some(manifest) = manifest_of(evidence, pass) else { return Vec::new() };
    let schedule = LaneSchedule::of(&evidence.spec, manifest, pass);
    let given_up = evidence.discarded.iter().filter(|(_, it)| it.passes.contains(pass));
    let given_up = given_up.map(|(task, _)| *task).collect();
    let position = checkpoint(evidence).position;
    let steps = match pass == position.pass {
        true => position.version.0 - position.pass_start.0,
        false => schedule.steps(&given_up),
    };
    let lanes = |step| (0..schedule.lanes()).map(move |lane| (Lane(lane), step));
    let sums = (0..steps).flat_map(lanes).map(|(lane, step)| {
        let ranges = schedule.micro_batch(lane, step, &given_up).into_iter();
        let sums = ranges.map(|it| Sum::of(pass, it.task, it.positions));
        (RecordSet::MicroBatch { lane, step }, sums.fold(Sum::default(), Sum::and))
    });
    sums.filter(|(_, sum)| 0 < sum.records).collect()
}

/// I6, I7, F25
#[test]
fn a_lane_applied_twice_is_found() {
    is_always_found(add, |cause, set| matches!(cause, Cause::TooOften(it) if is_named(it, set)));
}

/// I7
#[test]
fn a_lane_missing_from_a_step_is_found() {
    is_always_found(
        subtract,
        |cause, set| matches!(cause, Cause::Missing(it) if is_named(it, set)),
    );
}

/// I7
#[test]
fn exchanged_records_of_a_lane_are_found() {
    let exchange = |it: &mut AppliedPass, _| it.checksum = it.checksum.wrapping_add(1);
    is_always_found(exchange, |cause, _| *cause == Cause::Exchanged);
}

/// I5, I7, I10, F4: a slot that has the counts of an earlier checkpoint lost its memory without a generation; one that
/// has those of a later checkpoint kept them through a rollback.
#[test]
fn a_synchronous_slot_with_the_counts_of_another_checkpoint_is_found() {
    let mut cases = 0;
    for (one, other) in SYNC.iter().flat_map(|run| run.pairs()) {
        for (here, there) in [(one, other), (other, one)] {
            let (found, wanted) = (&checkpoint(there).slots, &checkpoint(here).slots);
            if found.len() != wanted.len() {
                continue;
            }
            // The counts of a slot without blocks mean nothing.
            let has_blocks = |it: &SlotCounts| it.groups.iter().any(|group| 0 < group.blocks);
            let differs =
                |slot: &usize| found[*slot] != wanted[*slot] && has_blocks(&wanted[*slot]);
            let differing: Vec<usize> = (0..wanted.len()).filter(differs).collect();
            let Some(&slot) = differing.get(cases % differing.len().max(1)) else { continue };
            let mut wrong = here.clone();
            checkpoint_mut(&mut wrong).slots[slot] = found[slot].clone();
            let of = found[slot].slot;
            let is_expected = |what: &What| match what {
                What::CountMismatch { slot, .. } | What::PassOutOfOrder { slot, .. } => *slot == of,
                _ => matches!(what, What::Examples { .. }),
            };
            assert_finds(&wrong, is_expected, |_| true);
            cases += 1;
        }
    }
    assert!(100 < cases, "{cases} cases");
}

/// I3, I7
#[test]
fn an_unlisted_given_up_task_of_a_synchronous_job_is_found() {
    let mut cases = 0;
    for evidence in evidence(&SYNC) {
        // A task of a completed pass: the present pass may not have reached it.
        let passes = checkpoint(evidence).position.pass.0;
        let is_over = |pass| evidence.discarded.iter().find(|it| it.1.passes.contains(Pass(pass)));
        let Some((task, _)) = (0..passes).find_map(is_over) else { continue };
        let mut wrong = evidence.clone();
        wrong.discarded.remove(task);
        let is_expected = |what: &What| {
            // Lanes and steps of a pass depend on the tasks that were given up in it.
            let is_of_schedule = matches!(what, What::Position { .. });
            is_of_schedule
                || matches!(what, What::CountMismatch { .. } | What::ResultDiffers { .. })
        };
        assert_finds(&wrong, is_expected, |what| matches!(what, What::CountMismatch { .. }));
        cases += 1;
    }
    assert!(10 < cases, "{cases} cases");
}
