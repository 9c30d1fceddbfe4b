//! Consistency of the list of given-up tasks, the slots, and the result.

use std::collections::BTreeSet;

use steadfast_common::given_up::{Discarded, DiscardedTask, GivenUpRecord};
use steadfast_common::ids::TaskId;
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_common::spec::Mode;

use crate::{CheckpointEvidence, Evidence, Report, Severity, What};

/// Checks the list of given-up tasks.
pub(crate) fn check_listed(evidence: &Evidence, report: &mut Report) {
    let trained: BTreeSet<TaskId> = evidence.manifest.training_tasks().into_iter().collect();
    for (task, record) in &evidence.discarded {
        // A held-out task is given up for all evaluations, not in a pass.
        let is_held_out = evidence.manifest.held_out.binary_search(task).is_ok();
        let is_of_a_pass = 0 < record.times;
        if is_held_out == is_of_a_pass || trained.contains(task) != is_of_a_pass {
            report.violation(What::NotATrainingTask { task: *task });
        }
    }
    if let Some(result) = &evidence.result {
        check_result(evidence, &result.discarded, report);
    }
    let Some(checkpoint) = &evidence.checkpoint else { return };
    for (pass, task) in checkpoint
        .queue
        .iter()
        .flat_map(|queue| queue.discarded.keys().map(|task| (queue.pass, *task)))
    {
        let is_listed = |record: &GivenUpRecord| record.passes.contains(pass);
        if !evidence.discarded.get(&task).is_some_and(is_listed) {
            report.violation(What::Unlisted { pass, task });
        }
    }
}

/// Checks the given-up tasks of the result.
fn check_result(evidence: &Evidence, reported: &Discarded, report: &mut Report) {
    let found = Discarded {
        tasks: evidence.discarded.len() as u64,
        times: evidence.discarded.values().map(|it| it.times).sum(),
        ..Discarded::default()
    };
    let is_other = |it: &&DiscardedTask| {
        evidence.discarded.get(&it.task).is_none_or(|record| record.times != it.times)
    };
    let others: Vec<TaskId> = reported.listed.iter().filter(is_other).map(|it| it.task).collect();
    if (reported.tasks, reported.times) != (found.tasks, found.times) || !others.is_empty() {
        report.violation(What::ResultDiffers {
            reported: (reported.tasks, reported.times),
            found: (found.tasks, found.times),
            tasks: others,
        });
    }
}

/// Checks that each slot occurs once, and that any block has applied records.
pub(crate) fn check_slots(checkpoint: &CheckpointEvidence, report: &mut Report) {
    if checkpoint.groups().next().is_none() {
        report.violation(What::NoAppliedRecords { slot: None });
    }
    let mut seen = BTreeSet::new();
    for slot in &checkpoint.slots {
        if !seen.insert(slot.slot) {
            let reason = format!("slot {} occurs twice in the checkpoint", slot.slot);
            report.violation(What::Position { reason });
        }
    }
    let absent = (0..seen.len() as u32).find(|slot| !seen.iter().any(|it| it.0 == *slot));
    if let Some(slot) = absent {
        report.violation(What::NoAppliedRecords { slot: Some(steadfast_common::ids::Slot(slot)) });
    }
    if let Some(reason) = checkpoint.invalidated.clone() {
        report.find(Severity::Note, What::Invalidated { reason });
    }
}

/// Checks the result against its final checkpoint, if that is the one audited.
pub(crate) fn check(evidence: &Evidence, report: &mut Report) {
    let Some(result) = evidence.result.as_ref().filter(|it| it.state == JobOutcome::Finished)
    else {
        return;
    };
    match &evidence.checkpoint {
        Some(checkpoint) if result.checkpoint.as_ref() == Some(&checkpoint.id) => {
            check_final(evidence, result, checkpoint, report);
        }
        Some(_) | None => report.unproved.push(match &result.checkpoint {
            Some(id) => {
                format!("which records the final parameters reflect: they are in checkpoint {id}")
            }
            None => "which records the final parameters reflect: the result names no checkpoint"
                .to_owned(),
        }),
    }
}

fn check_final(
    evidence: &Evidence,
    result: &ResultRecord,
    checkpoint: &CheckpointEvidence,
    report: &mut Report,
) {
    let counted = || checkpoint.groups().map(|(_, group)| group.counted.records());
    if let Some((least, most)) = counted().min().zip(counted().max())
        && !(least..=most).contains(&result.examples)
    {
        // A restored asynchronous slot reports the checkpoint's number until its next update.
        let severity = match evidence.spec.mode == Mode::Async && result.examples < least {
            true => Severity::Note,
            false => Severity::Violation,
        };
        let source = "the result".to_owned();
        let what = What::Examples { source, reported: result.examples, counted: least };
        report.find(severity, what);
    }
    match (&result.parameters_sha256, &checkpoint.parameters_sha256) {
        (Some(reported), Some(found)) if reported == found => {
            report
                .proved
                .push(format!("the final parameters are those of checkpoint {}", checkpoint.id));
        }
        (Some(reported), Some(found)) => {
            let (reported, found) = (reported.clone(), found.clone());
            report.violation(What::OtherParameters { reported, found });
        }
        (Some(_), None) | (None, _) => {
            let claim =
                format!("that the final parameters are those of checkpoint {}", checkpoint.id);
            report.unproved.push(claim);
        }
    }
    let spec = &evidence.spec;
    let reached = match (spec.mode, &checkpoint.queue) {
        (Mode::Async, Some(queue)) => queue.pass,
        (Mode::Async, None) | (Mode::Sync, _) => checkpoint.position.pass,
    };
    let lacks_passes = spec.passes.is_some_and(|passes| reached.0 < passes);
    let lacks_steps = spec.steps.is_some_and(|steps| checkpoint.position.version.0 < steps);
    if lacks_passes || spec.passes.is_none() && lacks_steps {
        let reason = "the job is finished, but its final checkpoint is before the end".to_owned();
        report.violation(What::Position { reason });
    }
}
