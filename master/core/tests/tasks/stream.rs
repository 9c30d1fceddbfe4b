//! Streams: files become passes once, and their tasks pass through the queues.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use steadfast_common::ids::{Pass, RequestId, TaskId, TrainerId};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::stream::{LeftOut, StreamFile, StreamPassRecord};
use steadfast_master_core::draft::Draft;
use steadfast_master_core::given_up::GivenUp;
use steadfast_master_core::job_state::{Fact, JobState};
use steadfast_master_core::ledger::{Limits, Next, Report, Request, TaskOrder, TaskReply, Wants};
use steadfast_master_core::stream::{COMPLETE_AFTER_MS, Refusal, Watched, files_of_next};
use uuid::Uuid;

fn file(name: u8, size_bytes: u64, modified_unix_ms: u64) -> StreamFile {
    StreamFile { modified_unix_ms, url: format!("file-{name}"), size_bytes }
}

fn pass(files: Vec<StreamFile>, tasks: u32, state: &JobState) -> StreamPassRecord {
    let records_before = state.stream.record.records;
    StreamPassRecord {
        manifest: String::new(),
        files,
        tasks,
        records: 10 * u64::from(tasks),
        records_before,
    }
}

fn start(mode: Mode) -> JobState {
    JobState::new(mode, TaskOrder::of_stream(7), GivenUp::default(), GivenUp::default())
}

fn add(state: &mut JobState, files: Vec<StreamFile>, tasks: u32) {
    let facts = state.stream.add(state.stream.record.next, pass(files, tasks, state)).unwrap();
    facts.iter().for_each(|fact| state.evolve(fact));
}

/// What happens to a folder, and to the master that follows it.
#[derive(Clone, Debug)]
enum Event {
    Write(u8),
    Delete(u8),
    Wait(u64),
    Look,
    NewMaster,
    Forget,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..6_u8).prop_map(Event::Write),
        1 => (0..6_u8).prop_map(Event::Delete),
        4 => (0..3_000_u64).prop_map(Event::Wait),
        6 => Just(Event::Look),
        1 => Just(Event::NewMaster),
        1 => Just(Event::Forget),
    ]
}

/// Names of all files of passes, known or forgotten.
fn names(state: &JobState, forgotten: &BTreeSet<String>) -> BTreeSet<String> {
    let files = state.stream.passes().values().flat_map(|it| &it.files);
    files.map(|file| file.url.clone()).chain(forgotten.clone()).collect()
}

proptest! {
    /// S004-2, I6: a file becomes part of one pass, whatever masters come and go, and only once it has not changed
    /// for a while.
    #[test]
    fn a_file_that_is_complete_belongs_to_one_pass(
        events in prop::collection::vec(event(), 0..80),
        is_sync in any::<bool>(),
    ) {
        let mode = if is_sync { Mode::Sync } else { Mode::Async };
        let mut state = start(mode);
        let mut watched = Watched::default();
        let mut folder: BTreeMap<u8, StreamFile> = BTreeMap::new();
        let (mut now, mut forgotten, mut taken) = (0, BTreeSet::new(), BTreeSet::new());
        let mut look = |state: &mut JobState, watched: &mut Watched, folder: &BTreeMap<u8, StreamFile>, now| {
            watched.note(folder.values().cloned().collect(), now);
            loop {
                let mut files = watched.complete(now);
                // Training is at the newest pass.
                let present = state.stream.record.next;
                files.truncate(files_of_next(mode, files.len(), present, present));
                if files.is_empty() {
                    return;
                }
                for file in &files {
                    assert!(file.modified_unix_ms + COMPLETE_AFTER_MS <= now, "{file:?} at {now}");
                    assert!(taken.insert(file.url.clone()), "{file:?} is taken twice");
                }
                assert!(!is_sync || files.len() == 1);
                assert!(files.is_sorted());
                watched.take(&files);
                add(state, files, 1);
            }
        };
        for event in events {
            match event {
                Event::Write(name) => {
                    let size = folder.get(&name).map_or(0, |it| it.size_bytes) + 1;
                    folder.insert(name, file(name, size, now));
                }
                Event::Delete(name) => drop(folder.remove(&name)),
                Event::Wait(time) => now += time,
                Event::Look => look(&mut state, &mut watched, &folder, now),
                Event::NewMaster => watched = Watched::new(names(&state, &forgotten)),
                Event::Forget => {
                    forgotten = names(&state, &forgotten);
                    let to = state.stream.record.next;
                    let facts = state.stream.forget(to, "names".to_owned());
                    facts.iter().for_each(|fact| state.evolve(fact));
                    prop_assert!(state.stream.passes().is_empty());
                }
            }
        }
        look(&mut state, &mut watched, &folder, now);
        look(&mut state, &mut watched, &folder, now + COMPLETE_AFTER_MS);
        prop_assert!(folder.values().all(|file| taken.contains(&file.url)));
        prop_assert_eq!(state.stream.record.files, taken.len() as u64);
    }
}

/// A trainer that finishes each task that it gets.
struct Trainer {
    state: JobState,
    requests: u128,
    limits: Limits,
}

impl Trainer {
    fn new(state: JobState) -> Self {
        let limits = Limits { passes: u32::MAX, failures_max: 0, trainers: 1, deadline_ms: 10 };
        Self { state, requests: 0, limits }
    }

    fn ask(&mut self, report: Option<Report>) -> Next {
        self.requests += 1;
        let id = RequestId(Uuid::from_u128(self.requests));
        let trainer = TrainerId(Uuid::from_u128(1));
        let request = Request { id, trainer, report, wants: Wants::Task, held: None };
        let mut draft = Draft::of(&mut self.state);
        let TaskReply { next, .. } = draft.next_task(&request, &[], &self.limits);
        next
    }

    /// Trains until no task waits; returns the passes and tasks, in order.
    fn work(&mut self) -> (Vec<(Pass, TaskId)>, Next) {
        let (mut done, mut next) = (Vec::new(), self.ask(None));
        loop {
            while let Next::Task(it) = next {
                done.push((it.pass, it.task));
                next = self.ask(Some(Report::Finished { task: it.task, attempt: it.attempt }));
            }
            // The first task of the next pass is dispatched to the next request.
            next = self.ask(None);
            if !matches!(next, Next::Task(_)) {
                return (done, next);
            }
        }
    }
}

/// S004-2: trainers wait for the next pass, which begins as soon as it has files, and the job is over when the
/// stream has ended and all its passes are done.
#[test]
fn the_queues_wait_for_a_pass_that_has_no_files_yet() {
    let mut trainer = Trainer::new(start(Mode::Async));
    assert_eq!(trainer.work(), (vec![], Next::NotYet));
    add(&mut trainer.state, vec![file(1, 1, 1)], 2);
    add(&mut trainer.state, vec![file(2, 1, 2)], 1);
    let (done, next) = trainer.work();
    assert_eq!(done.iter().map(|(pass, _)| pass.0).collect::<Vec<_>>(), [0, 0, 1]);
    assert_eq!((next, trainer.state.ledger.head().pass), (Next::NotYet, Pass(2)));
    let end = trainer.state.stream.end(LeftOut::default()).unwrap();
    trainer.state.evolve(&end);
    assert_eq!(trainer.state.stream.end(LeftOut::default()), None);
    trainer.limits.passes = 2;
    assert_eq!(trainer.work(), (vec![], Next::AllDone));
    let late = pass(vec![file(3, 1, 3)], 1, &trainer.state);
    assert_eq!(trainer.state.stream.add(Pass(2), late.clone()), Err(Refusal::Ended));
    assert_eq!(trainer.state.stream.add(Pass(1), late), Err(Refusal::OtherPass));
}

/// S004-12: one bad file may be a whole pass of a stream; the job goes on.
#[test]
fn a_pass_of_a_stream_whose_tasks_are_all_given_up_is_over() {
    let mut trainer = Trainer::new(start(Mode::Async));
    add(&mut trainer.state, vec![file(1, 1, 1)], 1);
    add(&mut trainer.state, vec![file(2, 1, 2)], 1);
    let Next::Task(it) = trainer.ask(None) else { panic!("a task waits") };
    let failed = Report::Failed { task: it.task, attempt: it.attempt, reason: "bad".to_owned() };
    assert_eq!(trainer.ask(Some(failed)), Next::NotYet);
    let Next::Task(next) = trainer.ask(None) else { panic!("the next pass begins") };
    assert_eq!((it.pass, next.pass), (Pass(0), Pass(1)));
    assert_eq!(trainer.state.ledger.given_up().times(), 1);
}

/// F1, I1: a new master reads the same queues, also in the middle of a pass.
#[test]
fn a_stream_is_recovered_from_its_facts() {
    let mut trainer = Trainer::new(start(Mode::Async));
    add(&mut trainer.state, vec![file(1, 1, 1)], 3);
    assert!(matches!(trainer.ask(None), Next::Task(_)));
    let mut recovered = start(Mode::Async);
    for (pass, record) in trainer.state.stream.passes() {
        recovered.evolve(&Fact::StreamPass { pass: *pass, record: Some(record.clone()) });
    }
    recovered.evolve(&Fact::Stream(trainer.state.stream.record.clone()));
    let head = trainer.state.ledger.head();
    recovered.evolve(&Fact::Queue(steadfast_master_core::ledger::QueueFact::Head(head)));
    assert_eq!(recovered.ledger.head(), head);
    assert_eq!(recovered.ledger.queues().todo, 2);
    assert_eq!(recovered.stream, trainer.state.stream);
}
