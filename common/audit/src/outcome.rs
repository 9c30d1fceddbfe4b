//! Lists of given-up tasks, slots, and the result: whether they agree with each other.

use std::collections::BTreeSet;

use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::records::{DiscardedTask, JobOutcome, ResultRecord};
use steadfast_common::spec::Mode;

use crate::{Cut, Evidence, Report, Severity, What};

/// Checks the list of given-up tasks.
pub(crate) fn check_listed(evidence: &Evidence, report: &mut Report) {
    let trained: BTreeSet<TaskId> = evidence.manifest.training_tasks().into_iter().collect();
    let mut seen = BTreeSet::new();
    for DiscardedTask { pass, task, .. } in &evidence.discarded {
        if !trained.contains(task) || !seen.insert((*pass, *task)) {
            report.violation(What::ListedWrongly { pass: *pass, task: *task });
        }
    }
    if let Some(result) = &evidence.result {
        let told = names(&result.discarded);
        if told != seen {
            report.violation(What::ResultDiffers {
                only_in_result: told.difference(&seen).copied().collect(),
                only_in_etcd: seen.difference(&told).copied().collect(),
            });
        }
    }
    let Some(cut) = &evidence.checkpoint else { return };
    for (pass, task) in
        cut.queue.iter().flat_map(|queue| queue.discarded.keys().map(|task| (queue.pass, *task)))
    {
        if !seen.contains(&(pass, task)) {
            report.violation(What::Unlisted { pass, task });
        }
    }
}

fn names(tasks: &[DiscardedTask]) -> BTreeSet<(Pass, TaskId)> {
    tasks.iter().map(|it| (it.pass, it.task)).collect()
}

/// Checks that each slot is there once, and that blocks are counted at all.
pub(crate) fn check_slots(cut: &Cut, report: &mut Report) {
    if cut.groups().next().is_none() {
        report.violation(What::Uncounted { slot: None });
    }
    let mut seen = BTreeSet::new();
    for slot in &cut.slots {
        if !seen.insert(slot.slot) {
            let reason = format!("slot {} is in the checkpoint twice", slot.slot);
            report.violation(What::Position { reason });
        }
    }
    let absent = (0..seen.len() as u32).find(|slot| !seen.iter().any(|it| it.0 == *slot));
    if let Some(slot) = absent {
        report.violation(What::Uncounted { slot: Some(steadfast_common::ids::Slot(slot)) });
    }
    if let Some(reason) = cut.set_aside.clone() {
        report.find(Severity::Note, What::SetAside { reason });
    }
}

/// Checks the result against the final checkpoint, if it names one and that is what was read.
pub(crate) fn check(evidence: &Evidence, report: &mut Report) {
    let Some(result) = evidence.result.as_ref().filter(|it| it.state == JobOutcome::Finished)
    else {
        return;
    };
    match &evidence.checkpoint {
        Some(cut) if result.checkpoint.as_ref() == Some(&cut.id) => {
            check_final(evidence, result, cut, report);
        }
        Some(_) | None => report.unproved.push(match &result.checkpoint {
            Some(id) => format!("what the final parameters reflect: they are in checkpoint {id}"),
            None => "what the final parameters reflect: the result names no checkpoint".to_owned(),
        }),
    }
}

fn check_final(evidence: &Evidence, result: &ResultRecord, cut: &Cut, report: &mut Report) {
    let counted = || cut.groups().map(|(_, group)| group.counted.records());
    if let Some((least, most)) = counted().min().zip(counted().max())
        && !(least..=most).contains(&result.examples)
    {
        // An asynchronous slot that went back tells of as many as the checkpoint until it goes on.
        let severity = match evidence.spec.mode == Mode::Async && result.examples < least {
            true => Severity::Note,
            false => Severity::Violation,
        };
        let told_by = "the result".to_owned();
        let what = What::Examples { told_by, told: result.examples, counted: least };
        report.find(severity, what);
    }
    match (&result.parameters_sha256, &cut.parameters_sha256) {
        (Some(told), Some(found)) if told == found => {
            report.proved.push(format!("the final parameters are those of checkpoint {}", cut.id));
        }
        (Some(told), Some(found)) => {
            let (told, found) = (told.clone(), found.clone());
            report.violation(What::OtherParameters { told, found });
        }
        (Some(_), None) | (None, _) => {
            let claim = format!("that the final parameters are those of checkpoint {}", cut.id);
            report.unproved.push(claim);
        }
    }
    let spec = &evidence.spec;
    let reached = match (spec.mode, &cut.queue) {
        (Mode::Async, Some(queue)) => queue.pass,
        (Mode::Async, None) | (Mode::Sync, _) => cut.position.pass,
    };
    let lacks_passes = spec.passes.is_some_and(|passes| reached.0 < passes);
    let lacks_steps = spec.steps.is_some_and(|steps| cut.position.version.0 < steps);
    if lacks_passes || spec.passes.is_none() && lacks_steps {
        let reason = "the job is finished, and its final checkpoint is before the end".to_owned();
        report.violation(What::Position { reason });
    }
}
