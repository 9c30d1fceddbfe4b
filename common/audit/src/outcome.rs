//! Consistency of the list of given-up tasks, the slots, and the result.

use std::collections::BTreeSet;

use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::job::dataset::DataFile;
use steadfast_common::job::spec::Mode;
use steadfast_common::records::given_up::{Discarded, DiscardedTask, GivenUpRecord};
use steadfast_common::records::{JobOutcome, ResultRecord};

use crate::{CheckpointEvidence, Evidence, Report, Severity, StreamEvidence, What};

/// Checks the list of given-up tasks.
pub(crate) fn check_listed(evidence: &Evidence, report: &mut Report) {
    let trained: BTreeSet<TaskId> = evidence.manifest.training_tasks().into_iter().collect();
    for (task, record) in &evidence.discarded {
        // A held-out task is given up for all evaluations, not in a pass.
        let is_held_out = evidence.manifest.held_out.binary_search(task).is_ok();
        let is_of_a_pass = 0 < record.times;
        if let Some(stream) = &evidence.stream {
            let exists = |pass: Pass| {
                let known = stream.passes.get(&pass);
                pass < stream.record.first || known.is_some_and(|(it, _)| task.0 < it.tasks)
            };
            let mut ranges = record.passes.ranges().iter();
            if !is_of_a_pass || !ranges.all(|(first, last)| exists(*first) && exists(*last)) {
                report.violation(What::NotATrainingTask { task: *task });
            }
            continue;
        }
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

/// Checks that the given-up tasks of the result, and the records that were left out, are those in etcd.
fn check_result(evidence: &Evidence, reported: &Discarded, report: &mut Report) {
    let left_out = evidence.generations.last().map_or(&[][..], |it| &it.discarded_records);
    let is_left_out = |it: &DiscardedTask| {
        left_out.iter().any(|record| (record.task, &record.reason) == (it.task, &it.reason))
    };
    let times_left_out: u64 =
        reported.listed.iter().filter(|it| is_left_out(it)).map(|it| it.times).sum();
    let found = Discarded {
        tasks: (evidence.discarded.len() + left_out.len()) as u64,
        times: evidence.discarded.values().map(|it| it.times).sum::<u64>() + times_left_out,
        ..Discarded::default()
    };
    let is_other = |it: &&DiscardedTask| {
        let given_up = evidence.discarded.get(&it.task);
        !is_left_out(it) && given_up.is_none_or(|record| record.times != it.times)
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

/// Checks the passes of a stream: each file belongs to one, and none is missing.
pub(crate) fn check_stream(evidence: &Evidence, report: &mut Report) {
    let Some(StreamEvidence { record, passes }) = &evidence.stream else { return };
    let mut files = BTreeSet::new();
    let mut before = None;
    for (pass, (it, manifest)) in passes {
        let twice = it.files.iter().find(|file| !files.insert(&file.url));
        let planned = manifest.training_records();
        let urls = |file: &DataFile| it.files.iter().any(|listed| listed.url == file.url);
        let reason = if let Some(file) = twice {
            format!("it has {}, which another pass also has", file.url)
        } else if it.records != planned || !manifest.files.iter().all(urls) {
            format!("its manifest has other files, or {planned} and not {} records", it.records)
        } else if before.is_some_and(|before| before != it.records_before) {
            format!("{} records are said to be before it", it.records_before)
        } else {
            before = Some(it.records_before + it.records);
            continue;
        };
        report.violation(What::StreamPass { pass: *pass, reason });
    }
    for pass in (record.first.0..record.next.0).map(Pass).filter(|it| !passes.contains_key(it)) {
        report.violation(What::StreamPass { pass, reason: "it is missing".to_owned() });
    }
    if before.is_some_and(|before| before != record.records) {
        let reason = format!("all passes are said to have {} records", record.records);
        report.violation(What::StreamPass { pass: record.next, reason });
    }
    report.proved.push(format!(
        "each of the {} files of the passes that are known belongs to one pass",
        files.len()
    ));
}

/// Says which passes are too old to be checked.
pub(crate) fn note_first(
    evidence: &Evidence,
    checkpoint: &CheckpointEvidence,
    report: &mut Report,
) {
    let first = evidence.first_pass(checkpoint);
    if Pass(0) < first {
        report.unproved.push(format!(
            "which records the passes before pass {} applied: they are too long ago",
            first.0 + 1
        ));
    }
}

/// Notes that no single program computed the parameters, if their model's code was changed.
pub(crate) fn note_code(evidence: &Evidence, report: &mut Report) {
    for change in &evidence.code_changes {
        report.find(Severity::Note, What::CodeChanged { change: change.clone() });
    }
    if !evidence.code_changes.is_empty() {
        let what = "that one version of the model's code computed the parameters";
        report.unproved.push(what.to_owned());
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
    // The parameters of an earlier evaluation are in no checkpoint; etcd has their digest.
    let best = evidence.course().map(|course| &course.best);
    let earlier = best.filter(|best| best.version != checkpoint.position.version);
    let kept = earlier.and_then(|best| best.model.as_ref());
    let found = kept.map(|it| &it.parameters_sha256).or(checkpoint.parameters_sha256.as_ref());
    match (&result.parameters_sha256, found) {
        (Some(reported), Some(found)) if reported == found && kept.is_some() => {
            report.proved.push("the final parameters are those of the best evaluation".to_owned());
        }
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
    let lacks_passes = evidence.passes().is_some_and(|passes| reached.0 < passes);
    let lacks_steps = evidence.steps().is_some_and(|steps| checkpoint.position.version.0 < steps);
    if lacks_passes || lacks_steps {
        let reason = "the job is finished, but its final checkpoint is before the end".to_owned();
        report.violation(What::Position { reason });
    }
}
