//! Rules of the machine, in single cases and in worlds with every order of events.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use proptest::prelude::*;
use steadfast_common::ids::{Generation, TaskId};
use steadfast_common::machine::{Decision, Machine, Moment};
use steadfast_common::records::closures::{ClosureName, ClosureRecord};

use crate::*;

const SETTINGS: Settings = Settings { on_error: OnError::Continue, losses_max: 3 };

type Remembered = BTreeMap<ClosureName, ClosureRecord>;

/// A machine, and the effects that it has decided so far.
#[derive(Clone, Debug)]
struct World {
    machine: CoordinatorMachine,
    /// Holds the attempts that workers were asked to run and have not replied to.
    asked: BTreeMap<(WorkerIndex, u64), ClosureId>,
    settled: BTreeMap<ClosureId, Outcome>,
    facts: Vec<Fact>,
    at_rest: BTreeSet<WorkerIndex>,
    /// Closures that are over and run again.
    repeats: BTreeSet<ClosureId>,
    /// The number under which each closure pushes.
    numbers: BTreeMap<ClosureId, PushNumber>,
}

impl World {
    fn new(settings: Settings) -> Self {
        Self::remembering(settings, BTreeMap::new())
    }

    fn remembering(settings: Settings, remembered: Remembered) -> Self {
        Self::pushing(settings, remembered, None)
    }

    fn pushing(settings: Settings, remembered: Remembered, pushes: Option<Pushes>) -> Self {
        Self {
            machine: CoordinatorMachine::new(settings, remembered, 0, pushes),
            asked: BTreeMap::new(),
            settled: BTreeMap::new(),
            facts: Vec::new(),
            at_rest: BTreeSet::new(),
            repeats: BTreeSet::new(),
            numbers: BTreeMap::new(),
        }
    }

    fn with_workers(count: u32) -> Self {
        let mut world = Self::new(SETTINGS);
        for worker in (0..count).map(WorkerIndex) {
            world.feed(Input::Started(worker));
            world.feed(Input::Connected { worker, threads: 1 });
        }
        world
    }

    fn feed(&mut self, input: Input) {
        if let Input::Finished { worker, attempt, .. } = &input {
            self.asked.remove(&(*worker, *attempt));
        }
        let mut decision = Decision::default();
        self.machine.handle(Moment::default(), input, &mut decision);
        self.machine.due(Moment::default(), &mut decision);
        self.facts.extend(decision.ahead.into_iter().flatten());
        self.facts.extend(decision.facts);
        for effect in decision.effects {
            match effect {
                Effect::Run { worker, attempt, id, push } => {
                    let repeats = self.repeats.contains(&id);
                    assert!(repeats || !self.settled.contains_key(&id), "{id} runs and is over");
                    self.asked.insert((worker, attempt), id);
                    if let Some(push) = push {
                        let before = self.numbers.insert(id, push);
                        assert!(before.is_none_or(|it| it == push), "{id} has two numbers");
                    }
                }
                Effect::Repeats(id) => {
                    assert!(self.settled.contains_key(&id) && self.repeats.insert(id), "{id}");
                }
                Effect::Settled { id, outcome, .. } => {
                    if self.repeats.remove(&id) {
                        // The program is told.
                        if let Outcome::Failed(_) = outcome {
                            self.settled.insert(id, outcome);
                        }
                    } else {
                        let before = self.settled.insert(id, outcome);
                        assert_eq!(before, None, "{id} settles twice");
                    }
                }
                Effect::AtRest(worker) => {
                    self.at_rest.insert(worker);
                }
                Effect::Cancel { worker, attempt } => {
                    assert!(self.machine.workers.attempts_of(worker).contains(&attempt));
                }
                Effect::Counted(_) | Effect::ResultsForgotten => {}
            }
        }
        self.check();
    }

    /// Checks the invariants that hold after each input.
    fn check(&self) {
        let running = self.machine.workers.running();
        let ids: BTreeSet<ClosureId> = running.iter().map(|(_, _, id)| *id).collect();
        assert_eq!(ids.len(), running.len(), "a closure runs twice: {running:?}");
        for (worker, attempt, id) in running {
            assert_eq!(self.asked.get(&(worker, attempt)), Some(&id));
        }
        assert!(!self.machine.workers.threads_exceeded());
        let able = self.machine.workers.can_take();
        assert!(
            able.is_empty() || self.machine.closures.ready.is_empty(),
            "{able:?} wait for work"
        );
    }

    fn schedule(&mut self, id: u64, change: impl FnOnce(&mut Call)) {
        let mut call = call(id);
        change(&mut call);
        self.feed(Input::Scheduled { id: ClosureId(id), call, push: None });
    }

    fn reply(&mut self, id: u64, reply: Reply) {
        let (worker, attempt) = self.run_of(id).expect("it runs");
        self.feed(Input::Finished { worker, attempt, reply });
    }

    fn run_of(&self, id: u64) -> Option<(WorkerIndex, u64)> {
        let found = self.asked.iter().rev().find(|(_, it)| **it == ClosureId(id));
        found.map(|(run, _)| *run)
    }

    fn outcome(&self, id: u64) -> Option<&Outcome> {
        self.settled.get(&ClosureId(id))
    }

    fn is_cancelled(&self, id: u64) -> bool {
        matches!(self.outcome(id), Some(Outcome::Cancelled(_)))
    }
}

fn call(id: u64) -> Call {
    Call {
        function: "loop:step".into(),
        digest: id.to_string(),
        name: None,
        inputs: Vec::new(),
        worker: None,
    }
}

fn value(text: &'static str) -> Reply {
    Reply::Returned { value: Bytes::from_static(text.as_bytes()), pushed: None }
}

fn raised() -> Reply {
    let (exception, message, traceback) = ("ValueError".into(), "bad".into(), String::new());
    Reply::Raised { exception, message, traceback }
}

/// S000-12: a closure of a worker that is lost runs elsewhere, and a late reply of that worker changes nothing.
#[test]
fn the_closure_of_a_lost_worker_runs_elsewhere_once() {
    let mut world = World::with_workers(2);
    world.schedule(1, |_| {});
    let (first, attempt) = world.run_of(1).unwrap();
    world.feed(Input::Lost(first));
    world.reply(1, Reply::Lost);
    let (second, _) = world.run_of(1).unwrap();
    assert_ne!(first, second);
    world.feed(Input::Finished { worker: first, attempt, reply: value("late") });
    assert_eq!(world.outcome(1), None);
    world.reply(1, value("one"));
    assert_eq!(world.outcome(1), Some(&Outcome::Returned("one".into())));
}

/// S000-2, S000-3, S000-4: a worker that is stopped ends what it runs and takes nothing more, until it is started again
/// under the index that it had.
#[test]
fn a_stopped_worker_ends_what_it_runs_and_takes_nothing_more() {
    let mut world = World::with_workers(1);
    let worker = WorkerIndex(0);
    world.schedule(1, |_| {});
    world.schedule(2, |_| {});
    world.feed(Input::Stopped(worker));
    assert!(world.at_rest.is_empty(), "it still runs a closure");
    world.reply(1, value("one"));
    assert!(world.at_rest.contains(&worker));
    assert_eq!(world.run_of(2), None);
    world.feed(Input::Started(worker));
    assert_eq!(world.run_of(2), Some((worker, 2)));
}

/// S000-12: what a worker gives back is run elsewhere; the reply that it sends later does not count.
#[test]
fn a_worker_that_gives_back_loses_no_closure() {
    let mut world = World::with_workers(2);
    world.schedule(1, |_| {});
    let (worker, attempt) = world.run_of(1).unwrap();
    world.feed(Input::Stopped(worker));
    world.feed(Input::GivesBack(worker));
    assert!(world.at_rest.contains(&worker));
    world.feed(Input::Finished { worker, attempt, reply: value("late") });
    assert_eq!(world.outcome(1), None);
    world.reply(1, value("one"));
    assert_eq!(world.outcome(1), Some(&Outcome::Returned("one".into())));
}

/// S000-20: one failure cancels what does not run yet; what runs goes on.
#[test]
fn a_failure_cancels_the_closures_that_wait() {
    let mut world = World::with_workers(2);
    world.machine = CoordinatorMachine::new(
        Settings { on_error: OnError::Stop, ..SETTINGS },
        BTreeMap::new(),
        0,
        None,
    );
    for worker in [WorkerIndex(0), WorkerIndex(1)] {
        world.feed(Input::Started(worker));
        world.feed(Input::Connected { worker, threads: 1 });
    }
    (1..=4).for_each(|id| world.schedule(id, |_| {}));
    world.schedule(5, |call| call.inputs = vec![ClosureId(2)]);
    world.reply(1, raised());
    assert!(matches!(world.outcome(1), Some(Outcome::Failed(Failure::Raised { .. }))));
    assert!(world.is_cancelled(3) && world.is_cancelled(4) && world.is_cancelled(5));
    world.reply(2, value("two"));
    assert_eq!(world.outcome(2), Some(&Outcome::Returned("two".into())));
    world.schedule(6, |_| {});
    world.reply(6, value("six"));
}

#[test]
fn the_other_closures_go_on_after_a_failure_if_told_so() {
    let mut world = World::with_workers(1);
    world.schedule(1, |_| {});
    world.schedule(2, |_| {});
    world.reply(1, raised());
    world.reply(2, value("two"));
    assert_eq!(world.settled.len(), 2);
}

#[test]
fn a_closure_on_which_workers_die_fails_after_some_of_them() {
    let mut world = World::with_workers(1);
    world.schedule(1, |_| {});
    for _ in 0..3 {
        world.reply(1, Reply::Lost);
    }
    let failure = Failure::WorkersLost { times: 3, worker: WorkerIndex(0) };
    assert_eq!(world.outcome(1), Some(&Outcome::Failed(failure)));
}

/// A coordinator that has acquired its lock again goes on with what workers run meanwhile.
#[test]
fn what_runs_when_a_term_begins_goes_on() {
    let mut world = World::new(SETTINGS);
    let worker = WorkerIndex(0);
    world.machine = CoordinatorMachine::new(SETTINGS, BTreeMap::new(), 7, None);
    let inputs = [
        Input::Started(worker),
        Input::Scheduled { id: ClosureId(1), call: call(1), push: None },
        Input::Running { worker, attempt: 7, id: ClosureId(1) },
        Input::Connected { worker, threads: 1 },
    ];
    world.asked.insert((worker, 7), ClosureId(1));
    inputs.into_iter().for_each(|input| world.feed(input));
    world.schedule(2, |_| {});
    assert_eq!(world.run_of(2), None);
    world.reply(1, value("one"));
    assert_eq!(world.outcome(1), Some(&Outcome::Returned("one".into())));
    assert_eq!(world.run_of(2), Some((worker, 8)));
}

#[test]
fn a_worker_that_declines_is_no_lost_one() {
    let mut world = World::with_workers(1);
    world.schedule(1, |_| {});
    for _ in 0..10 {
        world.reply(1, Reply::Declined);
    }
    world.feed(Input::Leaves(WorkerIndex(0)));
    world.reply(1, Reply::Declined);
    assert_eq!((world.run_of(1), world.outcome(1)), (None, None));
}

#[test]
fn a_closure_waits_for_the_closures_whose_results_it_takes() {
    let mut world = World::with_workers(3);
    world.schedule(1, |_| {});
    world.schedule(2, |_| {});
    world.schedule(3, |call| call.inputs = vec![ClosureId(1), ClosureId(2), ClosureId(1)]);
    world.reply(1, value("one"));
    assert_eq!(world.run_of(3), None);
    world.reply(2, Reply::EndOfData);
    world.reply(3, value("three"));
    world.schedule(4, |_| {});
    world.schedule(5, |call| call.inputs = vec![ClosureId(4)]);
    world.schedule(6, |call| call.inputs = vec![ClosureId(5)]);
    world.reply(4, raised());
    assert!(world.is_cancelled(5) && world.is_cancelled(6));
    world.schedule(7, |call| call.inputs = vec![ClosureId(4)]);
    assert!(world.is_cancelled(7));
}

/// The result of a name is a fact; a coordinator that begins with it does not run the closure again.
#[test]
fn a_closure_with_a_name_runs_once_for_all_coordinators_of_the_job() {
    let name = || Some("evaluate-3".parse().unwrap());
    let mut world = World::with_workers(1);
    world.schedule(1, |call| call.name = name());
    world.schedule(2, |call| (call.name, call.digest) = (name(), "1".into()));
    world.reply(1, value("0.9"));
    assert_eq!(world.outcome(2), Some(&Outcome::Returned("0.9".into())));
    let [Fact::Remembered { name: known, record }] = &world.facts[..] else { panic!("{world:?}") };
    let remembered = BTreeMap::from([(known.clone(), record.clone())]);
    let mut world = World::remembering(SETTINGS, remembered);
    world.schedule(1, |call| call.name = name());
    assert_eq!(world.outcome(1), Some(&Outcome::Returned("0.9".into())));
    world.schedule(2, |call| call.name = name());
    assert!(matches!(world.outcome(2), Some(Outcome::Failed(Failure::NameTaken { .. }))));
    world.feed(Input::ForgetResults);
    assert_eq!(world.facts, [Fact::Forgotten]);
    assert!(1000 < world.machine.size_max(&Input::ForgetResults).changes, "it is committed alone");
    world.schedule(3, |call| call.name = name());
    assert_eq!(world.outcome(3), None);
}

#[test]
fn a_failed_closure_with_a_name_can_be_scheduled_again() {
    let mut world = World::with_workers(1);
    world.schedule(1, |call| call.name = Some("a".parse().unwrap()));
    world.reply(1, raised());
    world.schedule(2, |call| call.name = Some("a".parse().unwrap()));
    world.reply(2, value("two"));
    assert_eq!(world.facts.len(), 1);
}

#[test]
fn a_result_with_a_name_has_a_limit() {
    let mut world = World::with_workers(1);
    world.schedule(1, |call| call.name = Some("a".parse().unwrap()));
    world.reply(1, Reply::Returned { value: vec![0; RESULT_BYTES_MAX + 1].into(), pushed: None });
    assert!(matches!(world.outcome(1), Some(Outcome::Failed(Failure::ResultTooLarge { .. }))));
    world.schedule(2, |_| {});
    world.reply(2, Reply::Returned { value: vec![0; RESULT_BYTES_MAX + 1].into(), pushed: None });
    assert!(matches!(world.outcome(2), Some(Outcome::Returned(_))));
}

/// S000-7: closures of one worker run there, and on no other one.
#[test]
fn a_closure_of_one_worker_runs_on_no_other() {
    let mut world = World::with_workers(3);
    let worker = WorkerIndex(1);
    for id in 1..=3 {
        world.schedule(id, |call| call.worker = Some(worker));
    }
    assert_eq!(world.asked.len(), 1);
    world.reply(1, value("one"));
    assert_eq!(world.run_of(2).map(|(worker, _)| worker), Some(worker));
    world.feed(Input::Stopped(worker));
    assert!(world.is_cancelled(3));
    world.schedule(4, |call| call.worker = Some(worker));
    assert!(world.is_cancelled(4));
    world.reply(2, value("two"));
    assert!(world.at_rest.contains(&worker));
}

#[test]
fn a_cancelled_closure_has_no_result_even_if_it_ran() {
    let mut world = World::with_workers(1);
    world.schedule(1, |_| {});
    world.schedule(2, |_| {});
    let (worker, attempt) = world.run_of(1).unwrap();
    world.feed(Input::Cancelled(ClosureId(1)));
    assert!(world.is_cancelled(1));
    assert_eq!(world.run_of(2), None, "the worker still computes the first");
    world.feed(Input::Finished { worker, attempt, reply: value("one") });
    world.reply(2, value("two"));
    world.feed(Input::Forgotten(ClosureId(1)));
    world.feed(Input::Forgotten(ClosureId(2)));
    assert!(world.machine.closures.by_id.is_empty());
}

/// Every order of some events in a world with two workers: each closure settles once, and no worker waits for a closure
/// that waits for a worker.
#[test]
fn no_order_of_events_loses_a_closure_or_settles_it_twice() {
    let mut world = World::with_workers(2);
    world.schedule(1, |call| call.name = Some("a".parse().unwrap()));
    world.schedule(2, |call| call.inputs = vec![ClosureId(1)]);
    let mut seen = 0;
    explore(&world, 5, &mut seen);
    assert!(20_000 < seen, "{seen}");
}

fn explore(world: &World, depth: usize, seen: &mut usize) {
    *seen += 1;
    let mut ended = world.clone();
    ended.finish();
    if depth == 0 {
        return;
    }
    for input in events(world) {
        let mut next = world.clone();
        next.feed(input);
        explore(&next, depth - 1, seen);
    }
}

/// Returns the inputs that are possible in a state.
fn events(world: &World) -> Vec<Input> {
    let mut events = Vec::new();
    for worker in [WorkerIndex(0), WorkerIndex(1)] {
        events.extend([
            Input::Started(worker),
            Input::Stopped(worker),
            Input::GivesBack(worker),
            Input::Lost(worker),
            Input::Leaves(worker),
        ]);
        if world.machine.workers.attempts_of(worker).is_empty() {
            events.push(Input::Connected { worker, threads: 1 });
        }
        for attempt in world.machine.workers.attempts_of(worker) {
            for reply in [value("x"), raised(), Reply::Lost, Reply::Declined] {
                events.push(Input::Finished { worker, attempt, reply });
            }
        }
    }
    events.push(Input::Cancelled(ClosureId(1)));
    let third = Call { inputs: vec![ClosureId(2)], worker: Some(WorkerIndex(1)), ..call(3) };
    events.push(Input::Scheduled { id: ClosureId(3), call: third, push: None });
    let fourth = Call { name: Some("a".parse().unwrap()), ..call(1) };
    events.push(Input::Scheduled { id: ClosureId(4), call: fourth, push: None });
    events
}

impl World {
    /// Lets all workers work until nothing is left, and checks that everything has settled.
    fn finish(&mut self) {
        for worker in (0..3).map(WorkerIndex) {
            self.feed(Input::Started(worker));
            self.feed(Input::Connected { worker, threads: 2 });
        }
        while let Some((&(worker, attempt), _)) = self.asked.iter().next() {
            self.feed(Input::Finished { worker, attempt, reply: value("end") });
        }
        for id in self.machine.closures.by_id.keys() {
            assert!(self.settled.contains_key(id), "{id} never ends: {self:?}");
        }
    }
}

proptest! {
    /// Long random orders, with more of everything.
    #[test]
    fn no_long_order_of_events_loses_a_closure(
        steps in prop::collection::vec((0u8..12, 0u32..3, 0u64..12), 1..120),
        stops in any::<bool>(),
    ) {
        let on_error = if stops { OnError::Stop } else { OnError::Continue };
        let mut world = World::new(Settings { on_error, ..SETTINGS });
        let mut next = 1;
        for (kind, worker, number) in steps {
            let worker = WorkerIndex(worker);
            let attempt = world.machine.workers.attempts_of(worker).first().copied();
            match kind {
                0 => world.feed(Input::Started(worker)),
                1 => world.feed(Input::Stopped(worker)),
                2 => world.feed(Input::GivesBack(worker)),
                3 => world.feed(Input::Lost(worker)),
                4 if attempt.is_none() => world.feed(Input::Connected { worker, threads: 2 }),
                5 => world.feed(Input::Cancelled(ClosureId(number))),
                6..=8 => {
                    let named = kind == 7 && number < 4;
                    world.schedule(next, |call| {
                        call.name = named.then(|| format!("n{number}").parse().unwrap());
                        call.digest = number.to_string();
                        call.worker = (kind == 8).then_some(worker);
                        call.inputs = (number < next).then_some(ClosureId(number)).into_iter().collect();
                    });
                    next += 1;
                }
                9 => world.feed(Input::Leaves(worker)),
                _ => if let Some(attempt) = attempt {
                    let reply = match number % 4 {
                        0 => raised(),
                        1 => Reply::Lost,
                        2 => Reply::EndOfData,
                        _ => value("x"),
                    };
                    world.feed(Input::Finished { worker, attempt, reply });
                },
            }
        }
        world.finish();
    }
}

/// The parameter servers as a coordinator sees them: the name or id of the closure that pushed under each number.
#[derive(Debug, Default)]
struct Slots {
    generation: u64,
    applied: BTreeMap<PushNumber, String>,
    checkpoint: BTreeMap<PushNumber, String>,
}

fn identity(world: &World, id: ClosureId) -> String {
    let call = &world.machine.closures.by_id[&id].call;
    call.name.as_ref().map_or(id.to_string(), ToString::to_string)
}

impl Slots {
    /// Applies the push of an attempt, unless its number is known.
    fn push(&mut self, world: &World, id: ClosureId) -> Generation {
        let number = world.numbers[&id];
        let own = identity(world, id);
        let before = self.applied.entry(number).or_insert_with(|| own.clone());
        assert_eq!(*before, own, "two closures push under number {number:?}");
        Generation(self.generation)
    }

    fn counted(&self) -> Counted {
        let mut numbers = steadfast_common::records::applied_records::TaskRanges::default();
        self.applied.keys().for_each(|number| numbers.insert(TaskId(number.0)));
        Counted { generation: Generation(self.generation), numbers }
    }

    fn roll_back(&mut self) -> Counted {
        self.generation += 1;
        self.applied = self.checkpoint.clone();
        self.counted()
    }
}

fn pushed(generation: Generation) -> Reply {
    Reply::Returned { value: Bytes::from_static(b"x"), pushed: Some(generation) }
}

fn pushing_world(remembered: Remembered, reserved: u32, counted: Counted) -> World {
    let mut world = World::pushing(SETTINGS, remembered, Some(Pushes::new(reserved, counted)));
    for worker in [WorkerIndex(0), WorkerIndex(1)] {
        world.feed(Input::Started(worker));
        world.feed(Input::Connected { worker, threads: 1 });
    }
    world
}

/// S000-20: a rollback undoes a push, so its closure runs again under the same number; its result stays. Once a
/// checkpoint covers it, it is not followed any more.
#[test]
fn a_rollback_runs_again_what_it_undoes() {
    let mut slots = Slots::default();
    let mut world = pushing_world(BTreeMap::new(), 0, slots.counted());
    for id in 1..=3 {
        world.schedule(id, |_| {});
        let generation = slots.push(&world, ClosureId(id));
        world.reply(id, pushed(generation));
        if id == 2 {
            slots.checkpoint = slots.applied.clone();
            world.feed(Input::Covered(ClosureId(1)));
        }
    }
    let number = world.numbers[&ClosureId(3)];
    world.feed(Input::Counted(slots.roll_back()));
    assert_eq!(world.repeats, BTreeSet::from([ClosureId(3)]));
    assert_eq!(world.numbers[&ClosureId(3)], number);
    // It is over for all others, and cannot be cancelled.
    world.schedule(4, |call| call.inputs = vec![ClosureId(3)]);
    world.feed(Input::Cancelled(ClosureId(3)));
    assert!(world.run_of(4).is_some() && world.run_of(3).is_some());
    slots.push(&world, ClosureId(3));
    world.reply(3, Reply::Returned { value: "other".into(), pushed: Some(Generation(1)) });
    assert_eq!(world.outcome(3), Some(&Outcome::Returned("x".into())));
    assert!(world.repeats.is_empty());
}

/// S000-20: a reply that was on its way during the rollback says that it was undone.
#[test]
fn a_push_that_was_undone_before_its_reply_runs_again() {
    let mut slots = Slots::default();
    let mut world = pushing_world(BTreeMap::new(), 0, slots.counted());
    world.schedule(1, |_| {});
    let generation = slots.push(&world, ClosureId(1));
    world.feed(Input::Counted(slots.roll_back()));
    world.reply(1, pushed(generation));
    assert_eq!(world.outcome(1), None);
    let generation = slots.push(&world, ClosureId(1));
    world.reply(1, pushed(generation));
    assert_eq!(world.outcome(1), Some(&Outcome::Returned("x".into())));
}

/// The number of a closure with a name is committed before it runs, so another coordinator lets it push under the same
/// one. Results whose push is missing on a slot stand, and the closure runs again.
#[test]
fn a_name_keeps_its_number_in_the_next_coordinator() {
    let name = |text: &str| Some(text.parse().unwrap());
    let mut slots = Slots::default();
    let mut world = pushing_world(BTreeMap::new(), 0, slots.counted());
    world.schedule(1, |call| call.name = name("a"));
    world.schedule(2, |call| call.name = name("b"));
    let generation = slots.push(&world, ClosureId(1));
    world.reply(1, pushed(generation));
    // Both run: what the second has done is not known.
    let (mut remembered, mut reserved) = (BTreeMap::new(), 0);
    for fact in &world.facts {
        match fact {
            Fact::Remembered { name, record } => {
                remembered.insert(name.clone(), record.clone());
            }
            Fact::Reserved(next) => reserved = *next,
            Fact::Forgotten | Fact::Unremembered(_) => panic!("{fact:?}"),
        }
    }
    let numbers = world.numbers.clone();
    // The slots lose both pushes while there is no coordinator.
    let mut world = pushing_world(remembered, reserved, slots.roll_back());
    world.schedule(1, |call| call.name = name("a"));
    world.schedule(2, |call| call.name = name("b"));
    world.schedule(3, |_| {});
    assert_eq!(world.outcome(1), Some(&Outcome::Returned("x".into())));
    assert_eq!(world.repeats, BTreeSet::from([ClosureId(1)]));
    for id in [1, 2] {
        assert_eq!(world.numbers[&ClosureId(id)], numbers[&ClosureId(id)]);
        let generation = slots.push(&world, ClosureId(id));
        world.reply(id, pushed(generation));
    }
    assert!(reserved <= world.numbers[&ClosureId(3)].0);
    // In the same program, too.
    world.schedule(4, |call| (call.name, call.digest) = (name("a"), "1".into()));
    assert!(world.repeats.is_empty());
}

/// A closure that pushes nothing leaves its number to another one, unless an attempt of it may have pushed.
#[test]
fn a_number_without_a_push_is_used_again() {
    let mut world = pushing_world(BTreeMap::new(), 0, Counted::default());
    let name = || Some("a".parse().unwrap());
    world.schedule(1, |call| call.name = name());
    world.reply(1, raised());
    assert!(matches!(&world.facts[..], [.., Fact::Unremembered(_)]), "{:?}", world.facts);
    world.schedule(2, |call| call.name = name());
    world.reply(2, Reply::Lost);
    world.reply(2, raised());
    world.schedule(3, |_| {});
    assert_eq!(world.numbers[&ClosureId(1)], world.numbers[&ClosureId(2)]);
    assert_ne!(world.numbers[&ClosureId(2)], world.numbers[&ClosureId(3)]);
}

proptest! {
    /// S000-20: whatever is lost or rolled back, each closure that has a result counts once on the slots, and no other
    /// closure has pushed under its number.
    #[test]
    fn each_closure_with_a_result_counts_once_on_the_slots(
        steps in prop::collection::vec((0u8..14, 0u32..2, 0u64..12), 1..120),
    ) {
        let mut slots = Slots::default();
        let mut world = pushing_world(BTreeMap::new(), 0, slots.counted());
        let mut next = 1;
        // A rollback of which the coordinator does not know yet.
        let mut unread: Option<Counted> = None;
        for (kind, worker, number) in steps {
            let worker = WorkerIndex(worker);
            let attempt = world.machine.workers.attempts_of(worker).first().copied();
            let id = attempt.and_then(|it| world.asked.get(&(worker, it)).copied());
            match kind {
                0 => world.feed(Input::Started(worker)),
                1 => world.feed(Input::Stopped(worker)),
                2 => world.feed(Input::GivesBack(worker)),
                3 => world.feed(Input::Lost(worker)),
                4 if attempt.is_none() => world.feed(Input::Connected { worker, threads: 1 }),
                5 => world.feed(Input::Cancelled(ClosureId(number))),
                6 | 7 => {
                    world.schedule(next, |call| {
                        call.name = (kind == 7 && number < 3).then(|| format!("n{number}").parse().unwrap());
                        call.digest = number.to_string();
                    });
                    next += 1;
                }
                8 => unread = Some(slots.roll_back()),
                9 => if let Some(counted) = unread.take() {
                    world.feed(Input::Counted(counted));
                },
                10 if unread.is_none() => {
                    slots.checkpoint = slots.applied.clone();
                    let all: Vec<ClosureId> = world.settled.keys().copied().collect();
                    let is_covered = |id: &ClosureId| {
                        world.numbers.get(id).is_some_and(|it| slots.applied.contains_key(it))
                    };
                    for id in all.into_iter().filter(is_covered).collect::<Vec<_>>() {
                        if !world.repeats.contains(&id) {
                            world.feed(Input::Covered(id));
                        }
                    }
                }
                _ => if let (Some(attempt), Some(id)) = (attempt, id) {
                    let reply = match number % 6 {
                        0 => raised(),
                        1 => Reply::Lost,
                        2 => { slots.push(&world, id); Reply::Lost }
                        3 => Reply::Declined,
                        _ => pushed(slots.push(&world, id)),
                    };
                    world.feed(Input::Finished { worker, attempt, reply });
                },
            }
        }
        if let Some(counted) = unread {
            world.feed(Input::Counted(counted));
        }
        for worker in (0..2).map(WorkerIndex) {
            world.feed(Input::Started(worker));
            world.feed(Input::Connected { worker, threads: 1 });
        }
        while let Some((&(worker, attempt), &id)) = world.asked.iter().next() {
            let reply = pushed(slots.push(&world, id));
            world.feed(Input::Finished { worker, attempt, reply });
        }
        prop_assert!(world.repeats.is_empty());
        for (id, outcome) in &world.settled {
            if let (Outcome::Returned(_), Some(number)) = (outcome, world.numbers.get(id)) {
                prop_assert_eq!(slots.applied.get(number), Some(&identity(&world, *id)), "{:?}", world);
            }
        }
    }
}
