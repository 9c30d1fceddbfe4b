//! What an audit says in single cases.

use steadfast_audit::{Cause, Cut, Evidence, Group, Severity, SlotCounts, What, Which, audit};
use steadfast_common::dataset::{Chunk, Manifest};
use steadfast_common::ids::{Generation, Incarnation, Lane, Pass, Slot, TaskId, Version};
use steadfast_common::records::{
    DiscardedTask, GenerationRecord, JobOutcome, PositionRecord, QueueSnapshot, ResultRecord,
};
use steadfast_common::schedule::LaneSchedule;
use steadfast_common::spec::{LostPserver, Mode};
use steadfast_common::tally::{Counted, PassTally, TaskPiece, TaskRanges, checksum};

use crate::world::spec;

/// Six tasks of eight records, two lanes of four records a step: six steps a pass.
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
        checkpoint: None,
        discarded: Vec::new(),
        generations: vec![generation],
        result: None,
    }
}

fn cut(counted: Counted, position: PositionRecord, queue: Option<QueueSnapshot>) -> Cut {
    Cut {
        id: "c".to_owned(),
        generation: Generation(1),
        position,
        slots: vec![SlotCounts { slot: Slot(0), groups: vec![Group { counted, blocks: 1 }] }],
        queue,
        set_aside: None,
        parameters_sha256: None,
    }
}

fn discarded(pass: u32, task: u32) -> DiscardedTask {
    DiscardedTask {
        pass: Pass(pass),
        task: TaskId(task),
        reason: "bad".to_owned(),
        records: Vec::new(),
    }
}

/// A synchronous job after its first pass, in which it counted this beside what it should.
fn after_one_pass(change: impl FnOnce(&mut Counted)) -> Evidence {
    let mut evidence = evidence(Mode::Sync);
    let mut counted = Counted::default();
    let all = (0..6).map(|task| checksum(Pass(0), TaskId(task), 0..8));
    counted.count(Pass(0), 48, all.fold(0, u64::wrapping_add));
    change(&mut counted);
    let position = PositionRecord {
        version: Version(6),
        pass: Pass(1),
        pass_start: Version(6),
        examples: counted.records(),
        dry: Vec::new(),
    };
    evidence.checkpoint = Some(cut(counted, position, None));
    evidence
}

fn cause(evidence: &Evidence) -> Option<Cause> {
    let report = audit(evidence);
    assert!(!report.is_clean(), "{report}");
    report.findings.into_iter().find_map(|it| match it.what {
        What::Miscounted { cause, .. } => cause,
        _ => None,
    })
}

#[test]
fn without_a_checkpoint_nothing_is_proved_and_nothing_is_wrong() {
    let report = audit(&evidence(Mode::Sync));
    assert!(report.is_clean() && report.proved.is_empty());
    assert!(report.to_string().contains("nothing can be proved"), "{report}");
}

/// I7
#[test]
fn a_pass_that_counted_its_records_once_is_proved() {
    let report = audit(&after_one_pass(|_| {}));
    assert!(report.findings.is_empty(), "{report}");
    assert_eq!(report.proved, ["pass 1: 48 records counted exactly once in every block"]);
}

#[test]
fn what_counted_too_often_or_not_at_all_is_named() {
    let lane = |step| {
        let evidence = evidence(Mode::Sync);
        let schedule = LaneSchedule::new(&evidence.manifest, evidence.spec.seed, Pass(0), 2, 4);
        let pieces = schedule.micro_batch(Lane(1), step, &Default::default());
        pieces.into_iter().fold(0_u64, |sum, piece| {
            sum.wrapping_add(checksum(Pass(0), piece.task, piece.positions))
        })
    };
    let twice = after_one_pass(|it| it.count(Pass(0), 4, lane(3)));
    let which = Which::MicroBatch { lane: Lane(1), step: 3 };
    assert_eq!(cause(&twice), Some(Cause::TooOften(which.clone())));
    let never = after_one_pass(|it| {
        it.passes[0].records -= 4;
        it.passes[0].checksum = it.passes[0].checksum.wrapping_sub(lane(3));
    });
    assert_eq!(cause(&never), Some(Cause::Missing(which)));
    let task = checksum(Pass(0), TaskId(2), 0..8);
    let twice = after_one_pass(|it| it.count(Pass(0), 8, task));
    assert_eq!(cause(&twice), Some(Cause::TooOften(Which::Task(TaskId(2)))));
    let instead = after_one_pass(|it| {
        let other = checksum(Pass(0), TaskId(3), 0..8);
        it.passes[0].checksum = it.passes[0].checksum.wrapping_add(task).wrapping_sub(other);
    });
    let (missing, counted) = (Which::Task(TaskId(3)), Which::Task(TaskId(2)));
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
    evidence.discarded.push(discarded(0, 2));
    let first = Which::Piece { task: TaskId(2), from: 0, to: 4 };
    assert_eq!(cause(&evidence), Some(Cause::TooOften(first)));
}

#[test]
fn a_position_that_does_not_fit_the_counts_is_told() {
    let mut evidence = after_one_pass(|_| {});
    let position = &mut evidence.checkpoint.as_mut().unwrap().position;
    (position.version, position.pass_start) = (Version(9), Version(9));
    position.examples = 50;
    let report = audit(&evidence);
    assert!(report.findings.iter().any(|it| matches!(it.what, What::Position { .. })), "{report}");
    assert!(report.findings.iter().any(|it| matches!(it.what, What::Examples { .. })), "{report}");
}

/// A forged position costs no time.
#[test]
fn a_position_beyond_the_end_of_the_job_is_told() {
    for (pass, version) in [(u32::MAX, 6), (2, 1), (3, 40)] {
        let mut evidence = after_one_pass(|_| {});
        let position = &mut evidence.checkpoint.as_mut().unwrap().position;
        (position.pass, position.version, position.pass_start) =
            (Pass(pass), Version(version), Version(1));
        assert!(audit(&evidence).to_string().contains("beyond the end of the job"));
    }
}

/// An asynchronous job that counted `pieces` and whose queues are such.
fn counted(pieces: &[(u32, u32, u32, bool)], queue: QueueSnapshot) -> Evidence {
    let mut evidence = evidence(Mode::Async);
    let mut counted = Counted::default();
    for (pass, task, to, last) in pieces {
        let (pass, task) = (Pass(*pass), TaskId(*task));
        let piece = TaskPiece { pass, task, from: 0, to: *to, last: *last };
        counted.count_piece(&piece, checksum(pass, task, 0..*to));
    }
    let examples = counted.records();
    let position = PositionRecord { examples, ..PositionRecord::default() };
    evidence.checkpoint = Some(cut(counted, position, Some(queue)));
    evidence
}

/// I3: what was given up is listed, with what counted of it before.
#[test]
fn the_counted_part_of_a_task_that_was_given_up_is_told() {
    let all_but_one: Vec<(u32, u32, u32, bool)> =
        (0..6).map(|task| (0, task, if task == 3 { 4 } else { 8 }, task != 3)).collect();
    let queue = QueueSnapshot { pass: Pass(1), ..QueueSnapshot::default() };
    let mut evidence = counted(&all_but_one, queue.clone());
    assert!(!audit(&evidence).is_clean(), "it is not listed");
    evidence.discarded.push(discarded(0, 3));
    let report = audit(&evidence);
    assert!(report.is_clean());
    let text = report.to_string();
    assert!(text.contains("first 4 of 8 records of task 3 were counted before"), "{text}");
    // The same once the slot is in the next pass.
    let mut evidence = counted(&[all_but_one, vec![(1, 0, 8, true)]].concat(), queue);
    evidence.discarded.push(discarded(0, 3));
    let report = audit(&evidence);
    assert!(report.is_clean() && report.of(Severity::Note).count() == 1, "{report}");
    assert!(report.to_string().contains("slot 0 has 8 records of these"), "{report}");
}

/// What the queues call done and a slot has not counted, after a loss that the job allows or not.
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
    let cut = evidence.checkpoint.as_mut().unwrap();
    let mut whole = cut.slots[0].clone();
    whole.slot = Slot(1);
    let piece = TaskPiece { pass: Pass(0), task: order[1], from: 0, to: 8, last: true };
    whole.groups[0].counted.count_piece(&piece, checksum(Pass(0), order[1], 0..8));
    cut.slots.push(whole);
    cut.generation = Generation(2);
    // Without the policy neither the loss nor the generation may be.
    assert_eq!(lost(&evidence).severity, Severity::Violation);
    evidence.spec.asynchronous.lost_pserver = LostPserver::Continue;
    let report = audit(&evidence);
    assert!(report.is_clean(), "{report}");
    let found = lost(&evidence);
    assert_eq!(found.severity, Severity::AllowedLoss);
    let expected = format!(
        "pass 1, slot 0: 8 records acknowledged and missing (tasks {}); generation 2 began this \
         slot anew from before",
        order[1]
    );
    assert_eq!(found.text, expected);
    // A loss after the checkpoint was taken explains nothing.
    evidence.checkpoint.as_mut().unwrap().generation = Generation(1);
    assert_eq!(lost(&evidence).severity, Severity::Violation);
}

/// A damaged or hostile file is a finding, not a panic and not hours of work.
#[test]
fn counts_of_what_does_not_exist_are_told() {
    let queue = QueueSnapshot { cursor: u32::MAX, ..QueueSnapshot::default() };
    let mut evidence = counted(&[(0, 1, 8, true)], queue);
    let counted = &mut evidence.checkpoint.as_mut().unwrap().slots[0].groups[0].counted;
    counted.done = TaskRanges::from(vec![(1, 1), (50, u32::MAX)]);
    counted.open.insert(TaskId(77), u32::MAX);
    counted.open.insert(TaskId(2), u32::MAX);
    counted.passes[0].records = u64::MAX;
    counted.passes.push(PassTally { pass: Pass(u32::MAX), ..PassTally::default() });
    counted.passes.swap(0, 1);
    let report = audit(&evidence);
    let strange = report.findings.iter().filter(|it| matches!(it.what, What::NotOfThePass { .. }));
    assert_eq!(strange.count(), 4, "{report}");
}

#[test]
fn a_result_that_lists_other_tasks_or_other_numbers_is_told() {
    let mut evidence = after_one_pass(|_| {});
    evidence.spec.passes = Some(1);
    evidence.discarded = vec![discarded(1, 4)];
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
        discarded: evidence.discarded.clone(),
    });
    assert!(audit(&evidence).to_string().contains("not proved"));
    evidence.checkpoint.as_mut().unwrap().parameters_sha256 = Some("5".to_owned());
    let report = audit(&evidence);
    assert!(report.is_clean(), "{report}");
    assert!(report.unproved.is_empty(), "{report}");
    evidence.checkpoint.as_mut().unwrap().parameters_sha256 = Some("6".to_owned());
    let result = evidence.result.as_mut().unwrap();
    result.examples = 47;
    result.discarded.clear();
    let report = audit(&evidence);
    let told = |which: fn(&What) -> bool| report.findings.iter().any(|it| which(&it.what));
    assert!(told(|it| matches!(it, What::Examples { .. })), "{report}");
    assert!(told(|it| matches!(it, What::ResultDiffers { .. })), "{report}");
    assert!(told(|it| matches!(it, What::OtherParameters { .. })), "{report}");
    evidence.spec.passes = Some(2);
    let report = audit(&evidence);
    assert!(report.to_string().contains("final checkpoint is before the end"), "{report}");
}

/// Programs read the same: each finding with its severity, its rule and its text.
#[test]
fn a_report_is_json_for_programs() {
    let report = audit(&after_one_pass(|it| it.passes[0].checksum ^= 1));
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["findings"][0]["severity"], "violation");
    assert_eq!(json["findings"][0]["rule"], "miscounted");
    assert_eq!(json["findings"][0]["cause"], "exchanged");
    assert_eq!(json["passes"][0]["slots"][0]["verdict"], "wrong");
}
