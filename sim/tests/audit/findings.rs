//! Findings about single changes of the evidence, their severities and their texts.

use steadfast_audit::{Cause, Evidence, RecordSet, Severity, Sum, What, audit};
use steadfast_common::ids::{Generation, Incarnation, Pass, Slot, TaskId, TrainerId, Version};
use steadfast_common::job::spec::LostPserver;
use steadfast_common::records::applied_records::{AppliedPass, TaskRanges};
use steadfast_common::records::code::CodeChange;
use steadfast_common::records::given_up::GivenUpRecord;
use steadfast_common::records::{Course, GenerationRecord, JobOutcome, QueueSnapshot};

use crate::evidence::{
    add, applied, applied_mut, assert_finds, changed, checkpoint, checkpoint_mut, subtract,
};
use crate::recorded::{ASYNC, Run, SYNC, evidence, later_runs};

/// Returns the first evidence of one of these jobs that a test can use: of a dataset that does not grow, without
/// findings.
fn some(runs: &'static [Run], is_meant: impl Fn(&Evidence) -> bool) -> Evidence {
    let is_usable = |it: &Evidence| {
        it.stream.is_none()
            && it.discarded.is_empty()
            && is_meant(it)
            && audit(it).findings.is_empty()
    };
    let found = evidence(runs).find(|it| is_usable(it)).cloned();
    let later = || {
        let of_run = |run: Run| run.recording.evidence.into_iter().find(&is_usable);
        later_runs(runs).find_map(of_run)
    };
    found.or_else(later).expect("a recorded run has such a checkpoint")
}

/// Returns evidence of a synchronous job after its first pass.
fn after_a_pass() -> Evidence {
    some(&SYNC, |it| Pass(0) < checkpoint(it).position.pass && it.result.is_none())
}

/// Returns evidence of an asynchronous job with two slots in the second pass or later, none of which may lose anything.
fn of_two_slots() -> Evidence {
    some(&ASYNC, |it| {
        // The slots have begun the pass of the queues.
        let present = checkpoint(it).queue.as_ref().map(|queue| queue.pass);
        let is_later = |passes: &[AppliedPass]| {
            passes.last().is_some_and(|it| Pass(0) < it.pass && Some(it.pass) == present)
        };
        it.spec.asynchronous.lost_pserver == LostPserver::Rewind
            && it.result.is_none()
            && checkpoint(it).slots.len() == 2
            && applied(it).all(|(_, counted)| is_later(&counted.passes))
            && applied(it).all(|(_, counted)| counted.open.is_empty() && !counted.done.is_empty())
            && done(it).is_some()
    })
}

/// Returns a task of the pass of an asynchronous job that its first slot reflects, and that is done.
fn done(evidence: &Evidence) -> Option<TaskId> {
    let open = &checkpoint(evidence).queue.as_ref()?.open;
    let (_, counted) = applied(evidence).next()?;
    counted.done.iter().find(|task| !open.contains_key(task))
}

/// Returns the sum of the first records of a task, or of the others.
fn sum_of(evidence: &Evidence, pass: Pass, task: TaskId, positions: [Option<u32>; 2]) -> Sum {
    let records = evidence.manifest.records_of(task) as u32;
    let [from, to] = positions;
    Sum::of(pass, task, from.unwrap_or(0)..to.unwrap_or(records))
}

/// Returns the first task of the dataset that is trained on.
fn task(evidence: &Evidence) -> TaskId {
    evidence.manifest.training_tasks()[0]
}

fn cause(evidence: &Evidence) -> Option<Cause> {
    audit(evidence).findings.into_iter().find_map(|it| match it.what {
        What::CountMismatch { cause, .. } => cause,
        _ => None,
    })
}

#[test]
fn without_a_checkpoint_the_audit_is_inconclusive() {
    let report = audit(&Evidence { checkpoint: None, ..after_a_pass() });
    assert!(report.is_clean() && report.proved.is_empty());
    assert!(report.to_string().contains("nothing can be proved"), "{report}");
}

/// I7
#[test]
fn whole_tasks_that_are_applied_too_often_or_for_others_are_named() {
    let evidence = after_a_pass();
    let tasks = evidence.manifest.training_tasks();
    let sums = [0, 1].map(|at| sum_of(&evidence, Pass(0), tasks[at], [None, None]));
    let twice = changed(&evidence, 0, |it| add(&mut it.passes[0], sums[0]));
    assert_eq!(cause(&twice), Some(Cause::TooOften(RecordSet::Task(tasks[0]))));
    let instead = changed(&evidence, 0, |it| {
        add(&mut it.passes[0], sums[0]);
        subtract(&mut it.passes[0], sums[1]);
    });
    let (missing, counted) = (RecordSet::Task(tasks[1]), RecordSet::Task(tasks[0]));
    assert_eq!(cause(&instead), Some(Cause::Instead { missing, counted }));
}

/// I7: a task may only be given up if it never contributed.
#[test]
fn a_task_that_contributed_before_it_was_given_up_is_named() {
    let mut evidence = after_a_pass();
    let task = task(&evidence);
    let tail = sum_of(&evidence, Pass(0), task, [Some(2), None]);
    applied_mut(&mut evidence).for_each(|(_, counted)| subtract(&mut counted.passes[0], tail));
    evidence.discarded.insert(task, GivenUpRecord::default().and(Pass(0), "bad"));
    let first = RecordSet::Range { task, from: 0, to: 2 };
    assert_eq!(cause(&evidence), Some(Cause::TooOften(first)));
}

#[test]
fn a_position_that_contradicts_the_counts_is_reported() {
    let mut evidence = after_a_pass();
    let position = &mut checkpoint_mut(&mut evidence).position;
    position.version = Version(position.version.0 + 3);
    position.pass_start = Version(position.pass_start.0 + 3);
    position.examples += 2;
    let is_position = |what: &What| matches!(what, What::Position { .. });
    let is_examples = |what: &What| matches!(what, What::Examples { .. });
    assert_finds(&evidence, |what| is_position(what) || is_examples(what), is_position);
    assert_finds(&evidence, |_| true, is_examples);
}

/// A forged position does not cause long computations.
#[test]
fn a_position_beyond_the_end_of_the_job_is_reported() {
    let evidence = after_a_pass();
    let end = evidence.spec.passes.expect("the job has passes");
    for (pass, version) in [(u32::MAX, 6), (end, 0), (end + 1, 40)] {
        let mut evidence = evidence.clone();
        let position = &mut checkpoint_mut(&mut evidence).position;
        (position.pass, position.version, position.pass_start) =
            (Pass(pass), Version(version), Version(0));
        assert!(audit(&evidence).to_string().contains("beyond the end of the job"));
    }
}

/// I3: the report lists a given-up task with the records that were applied before, whether its pass is over or not.
#[test]
fn the_applied_part_of_a_given_up_task_is_reported() {
    let evidence = of_two_slots();
    let pass = applied(&evidence).next().expect("there are slots").1.passes[0].pass;
    let task = task(&evidence);
    let tail = sum_of(&evidence, pass, task, [Some(1), None]);
    let mut left = evidence.clone();
    for (_, counted) in applied_mut(&mut left) {
        subtract(&mut counted.passes[0], tail);
        counted.passes[0].partial.insert(task, 1);
    }
    let mut present = evidence.clone();
    let queue = checkpoint_mut(&mut present).queue.as_mut().expect("the job is asynchronous");
    let now = queue.pass;
    let done: Vec<TaskId> =
        applied(&evidence).next().expect("there are slots").1.done.iter().collect();
    let begun = *done.first().expect("a task is done");
    queue.open.remove(&begun);
    queue.discarded.insert(begun, "bad".to_owned());
    for (_, counted) in applied_mut(&mut present) {
        let at = counted.passes.len() - 1;
        subtract(&mut counted.passes[at], sum_of(&evidence, now, begun, [Some(1), None]));
        counted.done = without(&counted.done, begun);
        counted.open.insert(begun, 1);
    }
    for (mut evidence, pass, task) in [(left, pass, task), (present, now, begun)] {
        checkpoint_mut(&mut evidence).position.examples = 0;
        assert!(!audit(&evidence).is_clean(), "it is not listed");
        evidence.discarded.insert(task, GivenUpRecord::default().and(pass, "bad"));
        let report = audit(&evidence);
        assert!(report.is_clean(), "{report}");
        let records = evidence.manifest.records_of(task);
        let text = format!("the first 1 of {records} records of task {task} were applied before");
        let notes = report.of(Severity::Note).filter(|it| it.text.contains(&text));
        assert_eq!(notes.count(), applied(&evidence).count(), "{report}");
    }
}

/// Returns the set without one of its tasks.
fn without(tasks: &TaskRanges, task: TaskId) -> TaskRanges {
    let mut rest = TaskRanges::default();
    tasks.iter().filter(|it| *it != task).for_each(|it| rest.insert(it));
    rest
}

/// A slot lacks a task that is done, after a loss that the job's policy allows or forbids.
#[test]
fn lost_records_are_a_violation_unless_a_generation_explains_them_as_the_job_allows() {
    let mut evidence = of_two_slots();
    let pass = checkpoint(&evidence).queue.as_ref().expect("the job is asynchronous").pass;
    let task = done(&evidence).expect("one is done");
    let whole = sum_of(&evidence, pass, task, [None, None]);
    evidence = changed(&evidence, 0, |it| {
        let at = it.passes.len() - 1;
        subtract(&mut it.passes[at], whole);
        it.done = without(&it.done, task);
    });
    let lost = |evidence: &Evidence| {
        let report = audit(evidence);
        let found = report.findings.into_iter().find(|it| matches!(it.what, What::Lost { .. }));
        found.expect("something is lost")
    };
    assert_eq!(lost(&evidence).severity, Severity::Violation);
    let last = evidence.generations.last().expect("there is one").generation;
    let next = Generation(last.0 + 1);
    evidence.generations.push(GenerationRecord {
        generation: next,
        slots: vec![Incarnation(2), Incarnation(1)],
        kept: vec![Slot(1)],
        checkpoint: Some("before".to_owned()),
        ..GenerationRecord::default()
    });
    checkpoint_mut(&mut evidence).generation = next;
    // Without the policy, both the loss and the generation are violations.
    assert_eq!(lost(&evidence).severity, Severity::Violation);
    evidence.spec.asynchronous.lost_pserver = LostPserver::Continue;
    let report = audit(&evidence);
    assert!(report.is_clean(), "{report}");
    let found = lost(&evidence);
    assert_eq!(found.severity, Severity::AllowedLoss);
    let expected = format!(
        "pass {}, slot 0: {} acknowledged records missing (tasks {task}); generation {next} restarted this slot \
         from before",
        pass.0 + 1,
        whole.records
    );
    assert_eq!(found.text, expected);
    // A loss after the checkpoint does not explain missing records.
    checkpoint_mut(&mut evidence).generation = last;
    assert_eq!(lost(&evidence).severity, Severity::Violation);
}

/// A damaged or malicious file causes a finding, neither a panic nor hours of work.
#[test]
fn counts_of_unknown_tasks_are_reported() {
    let mut evidence = of_two_slots();
    let [one, other] = [0, 1].map(|at| evidence.manifest.training_tasks()[at]);
    checkpoint_mut(&mut evidence).queue =
        Some(QueueSnapshot { cursor: u32::MAX, ..QueueSnapshot::default() });
    checkpoint_mut(&mut evidence).slots.truncate(1);
    let evidence = changed(&evidence, 0, |it| {
        it.passes.truncate(1);
        it.done = TaskRanges::from(vec![(one.0, one.0), (50, u32::MAX)]);
        it.open = [(TaskId(77), u32::MAX), (other, u32::MAX)].into();
        it.passes[0].records = u64::MAX;
        it.passes.insert(0, AppliedPass { pass: Pass(u32::MAX), ..AppliedPass::default() });
    });
    let report = audit(&evidence);
    let unexpected =
        report.findings.iter().filter(|it| matches!(it.what, What::NotOfThePass { .. }));
    assert_eq!(unexpected.count(), 4, "{report}");
}

#[test]
fn a_result_with_other_tasks_or_numbers_is_reported() {
    for runs in [&*SYNC, &*ASYNC] {
        let is_finished = |it: &Evidence| {
            let course = it.evaluation.as_ref().and_then(|it| it.course.as_ref());
            let ended_early = course.is_some_and(Course::has_ended);
            let result = it.result.as_ref().filter(|_| !ended_early);
            result.is_some_and(|it| it.state == JobOutcome::Finished)
        };
        let mut evidence = some(runs, is_finished);
        let result = evidence.result.as_mut().expect("the job has ended");
        result.examples += 1;
        result.discarded.tasks += 1;
        checkpoint_mut(&mut evidence).parameters_sha256 = Some("6".to_owned());
        for is_meant in [
            |it: &What| matches!(it, What::Examples { .. }),
            |it: &What| matches!(it, What::ResultDiffers { .. }),
            |it: &What| matches!(it, What::OtherParameters { .. }),
        ] {
            assert_finds(&evidence, |_| true, is_meant);
        }
        evidence.spec.passes = evidence.spec.passes.map(|passes| passes + 1);
        let report = audit(&evidence).to_string();
        assert!(report.contains("final checkpoint is before the end"), "{report}");
        checkpoint_mut(&mut evidence).parameters_sha256 = None;
        assert!(audit(&evidence).to_string().contains("that the final parameters are those of"));
    }
}

/// Each finding has its severity, rule and text in JSON.
#[test]
fn a_report_is_available_as_json() {
    let report = audit(&changed(&after_a_pass(), 0, |it| it.passes[0].checksum ^= 1));
    let json = serde_json::to_value(&report).expect("a report is plain data");
    assert_eq!(json["findings"][0]["severity"], "violation");
    assert_eq!(json["findings"][0]["rule"], "count_mismatch");
    assert_eq!(json["findings"][0]["cause"], "exchanged");
    assert_eq!(json["passes"][0]["slots"][0]["verdict"], "wrong");
}

#[test]
fn a_change_of_the_models_code_is_noted_and_keeps_the_audit_clean() {
    let change = CodeChange {
        modules: vec!["digits".to_owned()],
        trainer: TrainerId(uuid::Uuid::nil()),
        at_unix_ms: 0,
    };
    let report = audit(&Evidence { code_changes: vec![change], ..after_a_pass() });
    assert!(report.is_clean());
    let note = report.of(Severity::Note).find(|it| matches!(it.what, What::CodeChanged { .. }));
    let text = note.map(|it| it.text.clone()).unwrap_or_default();
    assert!(text.contains("1970-01-01T00:00:00Z") && text.contains("`digits`"), "{text}");
    assert!(report.unproved.iter().any(|it| it.contains("one version of the model's code")));
}
