//! Findings of audits in single cases.

use std::collections::BTreeMap;

use steadfast_audit::{
    Cause, CheckpointEvidence, Evidence, Group, RecordSet, Severity, SlotCounts, What, audit,
};
use steadfast_common::applied_records::{
    AppliedPass, AppliedRecords, RecordRange, TaskRanges, checksum,
};
use steadfast_common::code::CodeChange;
use steadfast_common::dataset::{Chunk, Manifest};
use steadfast_common::given_up::{Discarded, GivenUpRecord};
use steadfast_common::ids::{
    Generation, Incarnation, Lane, Pass, Slot, TaskId, TrainerId, Version,
};
use steadfast_common::position::Position;
use steadfast_common::records::{GenerationRecord, JobOutcome, QueueSnapshot, ResultRecord};
use steadfast_common::schedule::LaneSchedule;
use steadfast_common::spec::{LostPserver, Mode};
use steadfast_common::stream::LeftOut;

use crate::world::spec;

/// Six tasks of eight records, two lanes of four records per step: six steps per pass.
fn evidence(mode: Mode) -> Evidence {
    let mut spec = spec(mode, 2);
    (spec.sync.lanes, spec.sync.micro_batch) = (2, 4);
    (spec.asynchronous.batch, spec.asynchronous.push_every) = (2, 2);
    let chunk = Chunk { file: 0, start: 0, end: 0, first_record: 0, records: 8 };
    let manifest =
        Manifest { chunks: vec![chunk; 6], task_ends: (1..=6).collect(), ..Manifest::default() };
    let generation = GenerationRecord {
        generation: Generation(1),
        slots: vec![Incarnation(1)],
        ..GenerationRecord::default()
    };
    Evidence {
        spec,
        manifest,
        stream: None,
        checkpoint: None,
        discarded: BTreeMap::new(),
        generations: vec![generation],
        result: None,
        code_changes: Vec::new(),
    }
}

fn snapshot(
    counted: AppliedRecords,
    position: Position,
    queue: Option<QueueSnapshot>,
) -> CheckpointEvidence {
    CheckpointEvidence {
        id: "c".to_owned(),
        generation: Generation(1),
        position,
        exhausted: Vec::new(),
        slots: vec![SlotCounts { slot: Slot(0), groups: vec![Group { counted, blocks: 1 }] }],
        queue,
        invalidated: None,
        parameters_sha256: None,
    }
}

fn discarded(pass: u32, task: u32) -> BTreeMap<TaskId, GivenUpRecord> {
    BTreeMap::from([(TaskId(task), GivenUpRecord::default().and(Pass(pass), "bad"))])
}

/// A synchronous job after its first pass, with its applied records modified by `change`.
fn after_one_pass(change: impl FnOnce(&mut AppliedRecords)) -> Evidence {
    let mut evidence = evidence(Mode::Sync);
    let mut counted = AppliedRecords::default();
    let all = (0..6).map(|task| checksum(Pass(0), TaskId(task), 0..8));
    counted.count(Pass(0), 48, all.fold(0, u64::wrapping_add));
    change(&mut counted);
    let position = Position {
        version: Version(6),
        pass: Pass(1),
        pass_start: Version(6),
        examples: counted.records(),
        loss: None,
    };
    evidence.checkpoint = Some(snapshot(counted, position, None));
    evidence
}

fn cause(evidence: &Evidence) -> Option<Cause> {
    let report = audit(evidence);
    assert!(!report.is_clean(), "{report}");
    report.findings.into_iter().find_map(|it| match it.what {
        What::CountMismatch { cause, .. } => cause,
        _ => None,
    })
}

#[test]
fn without_a_checkpoint_the_audit_is_inconclusive() {
    let report = audit(&evidence(Mode::Sync));
    assert!(report.is_clean() && report.proved.is_empty());
    assert!(report.to_string().contains("nothing can be proved"), "{report}");
}

/// I7
#[test]
fn a_pass_that_applied_each_record_once_is_proved() {
    let report = audit(&after_one_pass(|_| {}));
    assert!(report.findings.is_empty(), "{report}");
    assert_eq!(report.proved, ["pass 1: 48 records applied exactly once to every block"]);
}

#[test]
fn records_applied_too_often_or_not_at_all_are_named() {
    let lane = |step| {
        let evidence = evidence(Mode::Sync);
        let schedule = LaneSchedule::new(&evidence.manifest, evidence.spec.seed, Pass(0), 2, 4);
        let ranges = schedule.micro_batch(Lane(1), step, &Default::default());
        ranges.into_iter().fold(0_u64, |sum, range| {
            sum.wrapping_add(checksum(Pass(0), range.task, range.positions))
        })
    };
    let twice = after_one_pass(|it| it.count(Pass(0), 4, lane(3)));
    let which = RecordSet::MicroBatch { lane: Lane(1), step: 3 };
    assert_eq!(cause(&twice), Some(Cause::TooOften(which.clone())));
    let never = after_one_pass(|it| {
        it.passes[0].records -= 4;
        it.passes[0].checksum = it.passes[0].checksum.wrapping_sub(lane(3));
    });
    assert_eq!(cause(&never), Some(Cause::Missing(which)));
    let task = checksum(Pass(0), TaskId(2), 0..8);
    let twice = after_one_pass(|it| it.count(Pass(0), 8, task));
    assert_eq!(cause(&twice), Some(Cause::TooOften(RecordSet::Task(TaskId(2)))));
    let instead = after_one_pass(|it| {
        let other = checksum(Pass(0), TaskId(3), 0..8);
        it.passes[0].checksum = it.passes[0].checksum.wrapping_add(task).wrapping_sub(other);
    });
    let (missing, counted) = (RecordSet::Task(TaskId(3)), RecordSet::Task(TaskId(2)));
    assert_eq!(cause(&instead), Some(Cause::Instead { missing, counted }));
    let others = after_one_pass(|it| it.passes[0].checksum ^= 1);
    assert_eq!(cause(&others), Some(Cause::Exchanged));
}

/// I7: a task may only be given up if it never contributed.
#[test]
fn a_task_that_contributed_before_it_was_given_up_is_named() {
    let mut evidence = after_one_pass(|it| {
        it.passes[0].records -= 4;
        let tail = checksum(Pass(0), TaskId(2), 4..8);
        it.passes[0].checksum = it.passes[0].checksum.wrapping_sub(tail);
    });
    evidence.discarded = discarded(0, 2);
    let first = RecordSet::Range { task: TaskId(2), from: 0, to: 4 };
    assert_eq!(cause(&evidence), Some(Cause::TooOften(first)));
}

#[test]
fn a_position_that_contradicts_the_counts_is_reported() {
    let mut evidence = after_one_pass(|_| {});
    let position = &mut evidence.checkpoint.as_mut().unwrap().position;
    (position.version, position.pass_start) = (Version(9), Version(9));
    position.examples = 50;
    let report = audit(&evidence);
    assert!(report.findings.iter().any(|it| matches!(it.what, What::Position { .. })), "{report}");
    assert!(report.findings.iter().any(|it| matches!(it.what, What::Examples { .. })), "{report}");
}

/// A forged position does not cause long computations.
#[test]
fn a_position_beyond_the_end_of_the_job_is_reported() {
    for (pass, version) in [(u32::MAX, 6), (2, 1), (3, 40)] {
        let mut evidence = after_one_pass(|_| {});
        let position = &mut evidence.checkpoint.as_mut().unwrap().position;
        (position.pass, position.version, position.pass_start) =
            (Pass(pass), Version(version), Version(1));
        assert!(audit(&evidence).to_string().contains("beyond the end of the job"));
    }
}

/// An asynchronous job with these applied record ranges and queues.
fn counted(ranges: &[(u32, u32, u32, bool)], queue: QueueSnapshot) -> Evidence {
    let mut evidence = evidence(Mode::Async);
    let mut counted = AppliedRecords::default();
    for (pass, task, to, last) in ranges {
        let (pass, task) = (Pass(*pass), TaskId(*task));
        let range = RecordRange { pass, task, from: 0, to: *to, last: *last };
        counted.apply_range(&range, checksum(pass, task, 0..*to));
    }
    let examples = counted.records();
    let position = Position { examples, ..Position::default() };
    evidence.checkpoint = Some(snapshot(counted, position, Some(queue)));
    evidence
}

/// I3: the report lists a given-up task with the records that were applied before.
#[test]
fn the_applied_part_of_a_given_up_task_is_reported() {
    let all_but_one: Vec<(u32, u32, u32, bool)> =
        (0..6).map(|task| (0, task, if task == 3 { 4 } else { 8 }, task != 3)).collect();
    let queue = QueueSnapshot { pass: Pass(1), ..QueueSnapshot::default() };
    let mut evidence = counted(&all_but_one, queue.clone());
    assert!(!audit(&evidence).is_clean(), "it is not listed");
    evidence.discarded = discarded(0, 3);
    let report = audit(&evidence);
    assert!(report.is_clean());
    let text = report.to_string();
    assert!(text.contains("first 4 of 8 records of task 3 were applied before"), "{text}");
    // The same once the slot is in the next pass.
    let mut evidence = counted(&[all_but_one, vec![(1, 0, 8, true)]].concat(), queue);
    evidence.discarded = discarded(0, 3);
    let report = audit(&evidence);
    assert!(report.is_clean() && report.of(Severity::Note).count() == 1, "{report}");
    assert!(
        report.to_string().contains("slot 0 has already applied 8 records of these"),
        "{report}"
    );
}

/// A slot lacks a task that is done, after a loss that the job's policy allows or forbids.
#[test]
fn lost_records_are_a_violation_unless_a_generation_explains_them_as_the_job_allows() {
    let order = steadfast_common::schedule::task_order(&evidence(Mode::Async).manifest, 5, Pass(0));
    let queue = QueueSnapshot { cursor: 2, ..QueueSnapshot::default() };
    let mut evidence = counted(&[(0, order[0].0, 8, true)], queue);
    let lost = |evidence: &Evidence| {
        let report = audit(evidence);
        let found = report.findings.into_iter().find(|it| matches!(it.what, What::Lost { .. }));
        found.expect("something is lost")
    };
    assert_eq!(lost(&evidence).severity, Severity::Violation);
    evidence.generations.push(GenerationRecord {
        generation: Generation(2),
        slots: vec![Incarnation(2), Incarnation(1)],
        kept: vec![Slot(1)],
        checkpoint: Some("before".to_owned()),
        ..GenerationRecord::default()
    });
    evidence.generations[0].slots = vec![Incarnation(1); 2];
    let snapshot = evidence.checkpoint.as_mut().unwrap();
    let mut whole = snapshot.slots[0].clone();
    whole.slot = Slot(1);
    let range = RecordRange { pass: Pass(0), task: order[1], from: 0, to: 8, last: true };
    whole.groups[0].counted.apply_range(&range, checksum(Pass(0), order[1], 0..8));
    snapshot.slots.push(whole);
    snapshot.generation = Generation(2);
    // Without the policy, both the loss and the generation are violations.
    assert_eq!(lost(&evidence).severity, Severity::Violation);
    evidence.spec.asynchronous.lost_pserver = LostPserver::Continue;
    let report = audit(&evidence);
    assert!(report.is_clean(), "{report}");
    let found = lost(&evidence);
    assert_eq!(found.severity, Severity::AllowedLoss);
    let expected = format!(
        "pass 1, slot 0: 8 acknowledged records missing (tasks {}); generation 2 restarted this \
         slot from before",
        order[1]
    );
    assert_eq!(found.text, expected);
    // A loss after the checkpoint does not explain missing records.
    evidence.checkpoint.as_mut().unwrap().generation = Generation(1);
    assert_eq!(lost(&evidence).severity, Severity::Violation);
}

/// A damaged or malicious file causes a finding, neither a panic nor hours of work.
#[test]
fn counts_of_unknown_tasks_are_reported() {
    let queue = QueueSnapshot { cursor: u32::MAX, ..QueueSnapshot::default() };
    let mut evidence = counted(&[(0, 1, 8, true)], queue);
    let counted = &mut evidence.checkpoint.as_mut().unwrap().slots[0].groups[0].counted;
    counted.done = TaskRanges::from(vec![(1, 1), (50, u32::MAX)]);
    counted.open.insert(TaskId(77), u32::MAX);
    counted.open.insert(TaskId(2), u32::MAX);
    counted.passes[0].records = u64::MAX;
    counted.passes.push(AppliedPass { pass: Pass(u32::MAX), ..AppliedPass::default() });
    counted.passes.swap(0, 1);
    let report = audit(&evidence);
    let unexpected =
        report.findings.iter().filter(|it| matches!(it.what, What::NotOfThePass { .. }));
    assert_eq!(unexpected.count(), 4, "{report}");
}

#[test]
fn a_result_with_other_tasks_or_numbers_is_reported() {
    let mut evidence = after_one_pass(|_| {});
    evidence.spec.passes = Some(1);
    evidence.discarded = discarded(1, 4);
    evidence.result = Some(ResultRecord {
        state: JobOutcome::Finished,
        reason: None,
        passes: 1,
        steps: 6,
        examples: 48,
        loss: None,
        metric: None,
        metric_name: None,
        parameters_sha256: Some("5".to_owned()),
        model: None,
        checkpoint: Some("c".to_owned()),
        discarded: Discarded { tasks: 1, times: 1, ..Discarded::default() },
        left_out: LeftOut::default(),
        ended_unix_ms: None,
    });
    assert!(audit(&evidence).to_string().contains("not proved"));
    evidence.checkpoint.as_mut().unwrap().parameters_sha256 = Some("5".to_owned());
    let report = audit(&evidence);
    assert!(report.is_clean(), "{report}");
    assert!(report.unproved.is_empty(), "{report}");
    evidence.checkpoint.as_mut().unwrap().parameters_sha256 = Some("6".to_owned());
    let result = evidence.result.as_mut().unwrap();
    result.examples = 47;
    result.discarded = Discarded::default();
    let report = audit(&evidence);
    let has = |which: fn(&What) -> bool| report.findings.iter().any(|it| which(&it.what));
    assert!(has(|it| matches!(it, What::Examples { .. })), "{report}");
    assert!(has(|it| matches!(it, What::ResultDiffers { .. })), "{report}");
    assert!(has(|it| matches!(it, What::OtherParameters { .. })), "{report}");
    evidence.spec.passes = Some(2);
    let report = audit(&evidence);
    assert!(report.to_string().contains("final checkpoint is before the end"), "{report}");
}

/// Each finding has its severity, rule and text in JSON.
#[test]
fn a_report_is_available_as_json() {
    let report = audit(&after_one_pass(|it| it.passes[0].checksum ^= 1));
    let json = serde_json::to_value(&report).unwrap();
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
    let report = audit(&Evidence { code_changes: vec![change], ..evidence(Mode::Sync) });
    assert!(report.is_clean());
    let note = report.of(Severity::Note).find(|it| matches!(it.what, What::CodeChanged { .. }));
    let text = note.map(|it| it.text.clone()).unwrap_or_default();
    assert!(text.contains("1970-01-01T00:00:00Z") && text.contains("`digits`"), "{text}");
    assert!(report.unproved.iter().any(|it| it.contains("one version of the model's code")));
}
