//! Jobs whose gradients come from closures: each number of a push counts once on every slot.
//!
//! Slots are not recorded at the same moment, so in a checkpoint that was taken while closures pushed, one may have a
//! push that another one lacks. In the final checkpoint all have the same ones.

use std::collections::BTreeSet;

use steadfast_common::ids::{Pass, Slot, TaskId};
use steadfast_common::records::JobOutcome;
use steadfast_common::records::applied_records::{AppliedRecords, TaskRanges};

use crate::words::plural;
use crate::{CheckpointEvidence, Evidence, Report, Severity, Sum, What};

/// The pass in which all pushes are recorded.
const PASS: Pass = Pass(0);

/// The number of pushes that one finding lists.
const LISTED_MAX: usize = 20;

pub(crate) fn check(evidence: &Evidence, checkpoint: &CheckpointEvidence, report: &mut Report) {
    for (slot, group) in checkpoint.groups() {
        check_sum(slot, &group.counted, report);
    }
    let is_final = evidence.result.as_ref().is_some_and(|it| {
        it.state == JobOutcome::Finished && it.checkpoint.as_ref() == Some(&checkpoint.id)
    });
    let mut all = TaskRanges::default();
    let mut common: Option<TaskRanges> = None;
    for (_, group) in checkpoint.groups() {
        let done = &group.counted.done;
        done.iter().for_each(|number| all.insert(number));
        common = Some(common.map_or_else(|| done.clone(), |it| it.intersection(done)));
    }
    let common = common.unwrap_or_default();
    let before = report.findings.len();
    for (slot, group) in checkpoint.groups() {
        let lacks = all.iter().filter(|number| !group.counted.done.contains(*number));
        let lacks: Vec<TaskId> = lacks.take(LISTED_MAX).collect();
        if !lacks.is_empty() {
            let severity = if is_final { Severity::Violation } else { Severity::Note };
            report.find(severity, What::LacksPushes { slot, pushes: lacks });
        }
    }
    let results = evidence.closures.values().filter(|it| !it.runs);
    let named: BTreeSet<u32> = results.filter_map(|it| it.push).collect();
    for (name, record) in &evidence.closures {
        let Some(push) = record.push.filter(|_| !record.runs) else { continue };
        if is_final && !common.contains(TaskId(push)) {
            let (name, push) = (name.clone(), TaskId(push));
            report.violation(What::NotCounted { name, push });
        }
    }
    if report.findings[before..].iter().any(|it| it.severity == Severity::Violation) {
        return;
    }
    let so_far = if is_final { "" } else { ", so far" };
    let closures = plural(common.iter().count() as u64, "closure");
    report.proved.push(format!("the push of each of {closures} counts once on every slot{so_far}"));
    if is_final && !named.is_empty() {
        let names = plural(named.len() as u64, "closure");
        let proved = format!("those of {names} with a name and a result are among them");
        report.proved.push(proved);
    }
}

/// Checks that the records of a slot are those of whole pushes.
fn check_sum(slot: Slot, counted: &AppliedRecords, report: &mut Report) {
    if counted.passes.iter().any(|it| it.pass != PASS) {
        let pass = counted.passes.last().map_or(PASS, |it| it.pass);
        return report.violation(What::PassOutOfOrder { pass, slot });
    }
    if let Some((&task, _)) = counted.open.iter().next() {
        return report.violation(What::NotOfThePass { pass: PASS, slot, task });
    }
    let of_push = |number| Sum::of(PASS, number, 0..1);
    let expected = counted.done.iter().map(of_push).fold(Sum::default(), Sum::and);
    let found = counted.passes.last().map_or_else(Sum::default, Sum::from);
    if found != expected {
        report.violation(What::CountMismatch { pass: PASS, slot, expected, found, cause: None });
    }
}
