//! Exploration of the task queues: every interleaving of a small model, random ones of a large model.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use steadfast_common::ids::{Attempt, Millis, Pass, RequestId, TaskId, TrainerId};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::{DispatchRecord, QueueRecord, ReplyRecord, TaskRecord};
use steadfast_master_core::deadlines::Deadlines;
use steadfast_master_core::draft::Draft;
use steadfast_master_core::given_up::GivenUp;
use steadfast_master_core::job_state::{Fact, JobState};
use steadfast_master_core::ledger::{
    Attribution, HELD_MAX, Limits, Next, QueueFact, Report, Request, TaskOrder, TaskReply, Wants,
};
use uuid::Uuid;

const LIMITS: Limits = Limits { passes: 2, failures_max: 1, trainers: 1, deadline_ms: 10 };

fn trainer(number: u128) -> TrainerId {
    TrainerId(Uuid::from_u128(number))
}

/// Returns the tasks in order, rotated by one place each pass.
fn order_of(tasks: u32) -> impl Fn(Pass) -> Vec<TaskId> {
    move |pass| (0..tasks).map(|index| TaskId((index + pass.0) % tasks)).collect()
}

/// The content of etcd: the same facts, written as keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Store {
    head: QueueRecord,
    tasks: BTreeMap<(u64, TaskId), TaskRecord>,
    given_up: GivenUp,
    replies: BTreeMap<TrainerId, ReplyRecord>,
}

impl Store {
    fn commit(&mut self, facts: &[QueueFact]) {
        for fact in facts {
            match fact.clone() {
                QueueFact::Head(head) => self.head = head,
                QueueFact::Task { round, task, record } => {
                    self.tasks.insert((round, task), record);
                }
                QueueFact::Done { round, task } => {
                    self.tasks.remove(&(round, task));
                }
                QueueFact::GivenUp { task, record } => self.given_up.set(task, record),
                QueueFact::Replied { trainer, reply } => {
                    self.replies.insert(trainer, reply);
                }
                QueueFact::Forgotten { trainer } => {
                    self.replies.remove(&trainer);
                }
            }
        }
    }

    fn recover(&self, tasks: u32) -> JobState {
        let round = self.head.round;
        let kept = self.tasks.iter().filter(|((of, _), _)| *of == round);
        let tasks_of_round = kept.map(|((round, task), record)| QueueFact::Task {
            round: *round,
            task: *task,
            record: record.clone(),
        });
        let replies = self
            .replies
            .iter()
            .map(|(trainer, reply)| QueueFact::Replied { trainer: *trainer, reply: reply.clone() });
        let mut state = start(tasks, self.given_up.clone());
        let facts = [QueueFact::Head(self.head)].into_iter().chain(tasks_of_round).chain(replies);
        facts.for_each(|fact| state.evolve(&Fact::Queue(fact)));
        state
    }
}

fn start(tasks: u32, given_up: GivenUp) -> JobState {
    JobState::new(Mode::Async, TaskOrder::new(order_of(tasks)), given_up, GivenUp::default())
}

/// Makes a decision; returns its facts and its answer.
fn decide<T>(state: &JobState, decision: impl FnOnce(&mut Draft) -> T) -> (Vec<QueueFact>, T) {
    let mut after = state.clone();
    let mut draft = Draft::of(&mut after);
    let answer = decision(&mut draft);
    let facts = draft.take_facts().into_iter().map(|fact| match fact {
        Fact::Queue(fact) => fact,
        other => panic!("no fact of the queues: {other:?}"),
    });
    (facts.collect(), answer)
}

/// A job's state, its store, and the task that each trainer believes to hold.
#[derive(Clone, Debug)]
struct LedgerModel {
    tasks: u32,
    limits: Limits,
    /// Attempts that last long.
    late: Vec<(TaskId, Attempt)>,
    state: JobState,
    store: Store,
    holds: BTreeMap<TrainerId, DispatchRecord>,
    requests: u128,
    last: Option<(Request, TaskReply)>,
    finished: BTreeMap<(Pass, TaskId), u32>,
}

impl LedgerModel {
    fn new(tasks: u32) -> Self {
        Self {
            tasks,
            limits: LIMITS,
            late: Vec::new(),
            state: start(tasks, GivenUp::default()),
            store: Store::default(),
            holds: BTreeMap::new(),
            requests: 0,
            last: None,
            finished: BTreeMap::new(),
        }
    }

    fn commit(&mut self, facts: &[QueueFact]) {
        for fact in facts {
            if let QueueFact::Done { task, .. } = fact {
                *self.finished.entry((self.state.ledger.head().pass, *task)).or_default() += 1;
            }
            self.state.evolve(&Fact::Queue(fact.clone()));
        }
        self.store.commit(facts);
        self.check();
    }

    fn decide<T>(&mut self, decision: impl FnOnce(&mut Draft) -> T) -> T {
        let (facts, answer) = decide(&self.state, decision);
        self.commit(&facts);
        answer
    }

    fn ask(&mut self, who: TrainerId, report: Option<Report>, wants: Wants) -> TaskReply {
        self.requests += 1;
        let id = RequestId(Uuid::from_u128(self.requests));
        let request = Request { id, trainer: who, report, wants, held: None };
        let (limits, late) = (self.limits, self.late.clone());
        let answer = self.decide(|draft| draft.next_task(&request, &late, &limits));
        match answer.next {
            Next::Task(dispatch) => self.holds.insert(who, dispatch),
            Next::NotYet | Next::AllDone | Next::AllFailed { .. } => self.holds.remove(&who),
        };
        self.last = Some((request, answer.clone()));
        answer
    }

    /// Checks the invariants; called at every committed revision.
    fn check(&self) {
        let queues = self.state.ledger.queues();
        // I2: conservation.
        let sum = queues.todo + queues.pending + queues.done + queues.discarded;
        assert_eq!(sum, self.tasks, "{:?}", self.state.ledger);
        // S004-21: what is recovered is what was committed.
        assert_eq!(self.store.recover(self.tasks).ledger, self.state.ledger);
        // A drained pass has been closed, unless every task was given up.
        let head = self.state.ledger.head();
        let drained = queues.todo == 0 && queues.pending == 0;
        assert!(!drained || queues.discarded == self.tasks, "stalled: {:?}", self.state.ledger);
        assert!(head.pass.0 <= LIMITS.passes);
        // I4: a task is done at most once a pass.
        assert!(self.finished.values().all(|times| *times == 1), "{:?}", self.finished);
    }

    fn report(&self, who: TrainerId, kind: u8) -> Option<Report> {
        let DispatchRecord { task, attempt, .. } = *self.holds.get(&who)?;
        Some(match kind {
            0 => Report::Finished { task, attempt },
            1 => Report::Failed { task, attempt, reason: "bad record".to_owned() },
            _ => Report::Returned { task, attempt, unreachable: None },
        })
    }
}

/// One step of a model.
#[derive(Clone, Copy, Debug)]
enum Move {
    Ask {
        who: u128,
        wants: Wants,
        report: u8,
    },
    Expire,
    /// All pending attempts last long from now on.
    Late,
    Lose {
        who: u128,
    },
    Retry,
    Rewind,
}

fn apply(world: &mut LedgerModel, step: Move) {
    match step {
        Move::Ask { who, wants, report } => {
            let report = world.report(trainer(who), report);
            world.ask(trainer(who), report, wants);
        }
        Move::Expire => {
            let due: Vec<_> =
                world.state.ledger.pending().map(|(task, at, _)| (task, at)).collect();
            if let Some((task, attempt)) = due.first() {
                world.decide(|draft| draft.expire(*task, *attempt, &LIMITS));
            }
        }
        Move::Late => {
            world.late = world.state.ledger.pending().map(|(task, at, _)| (task, at)).collect();
        }
        Move::Lose { who } => {
            world.decide(|draft| draft.lose_trainer(trainer(who), Attribution::Task, &LIMITS));
        }
        Move::Retry => retry_gets_the_same_answer(world),
        Move::Rewind => {
            let snapshot = world.state.ledger.snapshot();
            let facts = world.state.ledger.rewind(&snapshot);
            // Tasks that were done before the checkpoint stay done and must not be done again.
            world.commit(&facts);
        }
    }
}

fn retry_gets_the_same_answer(world: &mut LedgerModel) {
    let Some((request, answer)) = world.last.clone() else { return };
    let reply = world.store.replies.get(&request.trainer).map(|reply| reply.request);
    let round = world.store.head.round;
    let given = world.store.tasks.iter().filter_map(|((of, _), record)| match record {
        TaskRecord::Pending { request, .. } if *of == round => Some(*request),
        _ => None,
    });
    if !given.chain(reply).any(|known| known == request.id) {
        return;
    }
    let (facts, again) = decide(&world.state, |draft| draft.next_task(&request, &[], &LIMITS));
    assert_eq!(facts, [], "a retry changed something");
    assert_eq!(again.accepted, answer.accepted);
    if let Next::Task(dispatch) = answer.next {
        assert_eq!(again.next, Next::Task(dispatch));
    }
}

fn moves() -> Vec<Move> {
    let mut moves = vec![Move::Expire, Move::Late, Move::Retry];
    for who in [1, 2] {
        moves.push(Move::Lose { who });
        moves.push(Move::Ask { who, wants: Wants::Nothing, report: 2 });
        for report in [0, 1] {
            moves.push(Move::Ask { who, wants: Wants::Task, report });
        }
    }
    moves
}

/// S004-5, S004-6, S004-7, S004-11, I2, I4: every interleaving of two trainers over two tasks and
/// two passes, seven moves deep, keeps each task in one queue, never stalls, and is recovered
/// unchanged.
#[test]
fn every_interleaving_keeps_each_task_in_one_queue_and_never_stalls() {
    let mut frontier = vec![LedgerModel::new(2)];
    let mut seen = BTreeSet::new();
    for _ in 0..7 {
        let mut next = Vec::new();
        for world in &frontier {
            for step in moves() {
                let mut after = world.clone();
                apply(&mut after, step);
                let state = format!("{:?} {:?} {:?}", strip(&after), after.holds, after.late);
                if seen.insert(state) {
                    next.push(after);
                }
            }
        }
        frontier = next;
    }
    assert!(2_000 < seen.len(), "explored only {} states", seen.len());
}

/// Returns the state without counters that only increase (request ids), so equal states are visited once.
fn strip(world: &LedgerModel) -> (QueueRecord, BTreeMap<(u64, TaskId), TaskRecord>) {
    (world.store.head, world.store.tasks.clone())
}

fn any_move() -> impl Strategy<Value = Move> {
    prop_oneof![
        12 => (0..5_u128, 0..10_u8).prop_map(|(who, report)| Move::Ask {
            who, wants: Wants::Task, report: report.saturating_sub(7),
        }),
        1 => (0..5_u128).prop_map(|who| Move::Ask { who, wants: Wants::Nothing, report: 2 }),
        1 => Just(Move::Expire),
        2 => Just(Move::Late),
        1 => (0..5_u128).prop_map(|who| Move::Lose { who }),
        3 => Just(Move::Retry),
        1 => Just(Move::Rewind),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// I2, I4: the same for five trainers over many tasks, with random moves.
    #[test]
    fn long_random_histories_keep_each_task_in_one_queue(
        tasks in 1..40_u32,
        steps in prop::collection::vec(any_move(), 0..400),
    ) {
        let mut world = LedgerModel::new(tasks);
        for step in steps {
            apply(&mut world, step);
        }
    }
}

/// S004-8, S004-10: with a threshold of n, failure n + 1 discards; it is listed with its reason and
/// not dispatched again in this pass. S004-11, D7: the pass closes although its last task was
/// given up. S004-12: the next pass brings it back.
#[test]
fn a_pass_closes_even_if_its_last_task_was_given_up() {
    let mut world = LedgerModel::new(2);
    let Next::Task(first) = world.ask(trainer(1), None, Wants::Task).next else { panic!() };
    world.ask(trainer(1), world.report(trainer(1), 0), Wants::Task);
    assert_eq!(first.task, TaskId(0));
    for _ in 0..LIMITS.failures_max {
        let answer = world.ask(trainer(1), world.report(trainer(1), 1), Wants::Task);
        assert!(matches!(answer.next, Next::Task(it) if it.task == TaskId(1)));
    }
    assert!(world.state.ledger.given_up().records().is_empty());
    world.ask(trainer(1), world.report(trainer(1), 1), Wants::Nothing);
    assert_eq!(world.state.ledger.head().pass, Pass(1));
    assert_eq!(world.state.ledger.queues().todo, 2);
    // I3: a given-up task stays listed after its pass is over.
    assert_eq!(world.state.ledger.given_up().in_pass(Pass(0)), BTreeSet::from([TaskId(1)]));
}

/// S004-13: a pass in which every task was given up is an error, not an endless loop.
#[test]
fn all_tasks_given_up_is_an_error() {
    let mut world = LedgerModel::new(1);
    let mut answer = world.ask(trainer(1), None, Wants::Task);
    for _ in 0..=LIMITS.failures_max {
        answer = world.ask(trainer(1), world.report(trainer(1), 1), Wants::Task);
    }
    assert_eq!(answer.next, Next::AllFailed { pass: Pass(0) });
}

/// S004-16, D6: a late report of an attempt that is over changes nothing.
#[test]
fn a_late_report_of_an_expired_attempt_does_not_count() {
    let mut world = LedgerModel::new(3);
    let Next::Task(held) = world.ask(trainer(1), None, Wants::Task).next else { panic!() };
    world.decide(|draft| draft.expire(held.task, held.attempt, &LIMITS));
    let before = world.state.ledger.queues();
    let report = Report::Finished { task: held.task, attempt: held.attempt };
    let answer = world.ask(trainer(1), Some(report), Wants::Nothing);
    assert!(!answer.accepted);
    assert_eq!(world.state.ledger.queues(), before);
}

/// S004-16, I4: the late success of a dead attempt does not close the attempt that replaced it.
#[test]
fn a_late_report_does_not_close_the_attempt_that_replaced_it() {
    let mut world = LedgerModel::new(1);
    let Next::Task(dead) = world.ask(trainer(1), None, Wants::Task).next else { panic!() };
    world.decide(|draft| draft.expire(dead.task, dead.attempt, &LIMITS));
    let Next::Task(live) = world.ask(trainer(2), None, Wants::Task).next else { panic!() };
    assert_eq!(live.task, dead.task);
    for (who, attempt) in [(trainer(1), dead.attempt), (trainer(1), live.attempt)] {
        let report = Report::Finished { task: dead.task, attempt };
        assert!(!world.ask(who, Some(report), Wants::Nothing).accepted);
        assert_eq!(world.state.ledger.queues().pending, 1);
    }
    let report = Report::Finished { task: live.task, attempt: live.attempt };
    assert!(world.ask(trainer(2), Some(report), Wants::Nothing).accepted);
}

/// S004-71: near the end of a pass an idle trainer computes the task of a slow one as well. The first to finish counts,
/// whichever it is, and there is one backup.
#[test]
fn a_late_attempt_is_backed_up_once_and_the_first_to_finish_counts() {
    for is_first in [true, false] {
        let mut world = LedgerModel::new(2);
        let Next::Task(slow) = world.ask(trainer(1), None, Wants::Task).next else { panic!() };
        let Next::Task(other) = world.ask(trainer(2), None, Wants::Task).next else { panic!() };
        world.late = vec![(slow.task, slow.attempt), (other.task, other.attempt)];
        let finished = world.report(trainer(2), 0);
        let Next::Task(backup) = world.ask(trainer(2), finished, Wants::Task).next else {
            panic!()
        };
        assert_eq!(backup.task, slow.task);
        world.late.push((backup.task, backup.attempt));
        assert_eq!(world.ask(trainer(3), None, Wants::Task).next, Next::NotYet);
        let report = |attempt| Some(Report::Finished { task: slow.task, attempt });
        let (first, second) = match is_first {
            true => ((1, slow.attempt), (2, backup.attempt)),
            false => ((2, backup.attempt), (1, slow.attempt)),
        };
        assert!(world.ask(trainer(first.0), report(first.1), Wants::Nothing).accepted);
        assert_eq!(world.state.ledger.head().pass, Pass(1));
        assert!(!world.ask(trainer(second.0), report(second.1), Wants::Nothing).accepted);
        assert_eq!(world.state.ledger.queues().todo, 2);
    }
}

#[test]
fn a_backup_is_for_trainers_without_a_task_and_for_tasks_that_do_not_wait() {
    let mut world = LedgerModel::new(3);
    let Next::Task(slow) = world.ask(trainer(1), None, Wants::Task).next else { panic!() };
    world.late = vec![(slow.task, slow.attempt)];
    for number in 2..=3 {
        let next = world.ask(trainer(2), None, Wants::Task).next;
        assert!(matches!(next, Next::Task(it) if it.task != slow.task), "{number}: {next:?}");
    }
    assert_eq!(world.ask(trainer(2), None, Wants::Task).next, Next::NotYet, "it has two tasks");
    assert_eq!(world.ask(trainer(1), None, Wants::Task).next, Next::NotYet, "it is its own");
}

/// S004-71: an attempt is late by the durations of others, and not before a second.
#[test]
fn an_attempt_is_late_after_twice_the_usual_duration() {
    let mut world = LedgerModel::new(6);
    let mut deadlines = Deadlines::default();
    let Next::Task(slow) = world.ask(trainer(1), None, Wants::Task).next else { panic!() };
    let mut now = Millis(0);
    deadlines.follow(&world.state.ledger, now, &LIMITS);
    for _ in 0..4 {
        assert_eq!(deadlines.late(Millis(u64::MAX)), [], "no usual duration is known");
        world.ask(trainer(2), None, Wants::Task);
        deadlines.follow(&world.state.ledger, now, &LIMITS);
        now = Millis(now.0 + 700);
        world.ask(trainer(2), world.report(trainer(2), 0), Wants::Nothing);
        deadlines.follow(&world.state.ledger, now, &LIMITS);
    }
    assert_eq!(deadlines.late(Millis(1400)), []);
    assert_eq!(deadlines.late(Millis(1401)), [(slow.task, slow.attempt)]);
}

/// S004-9: an attempt expires at its deadline, not before; one that ended has no deadline.
#[test]
fn a_deadline_is_counted_per_attempt() {
    let mut world = LedgerModel::new(2);
    let mut deadlines = Deadlines::default();
    let Next::Task(held) = world.ask(trainer(1), None, Wants::Task).next else { panic!() };
    deadlines.follow(&world.state.ledger, Millis(100), &LIMITS);
    assert_eq!(deadlines.overdue(Millis(109)), []);
    assert_eq!(deadlines.overdue(Millis(110)), [(held.task, held.attempt)]);
    world.ask(trainer(1), world.report(trainer(1), 0), Wants::Nothing);
    deadlines.follow(&world.state.ledger, Millis(111), &LIMITS);
    assert_eq!(deadlines.overdue(Millis(500)), []);
}

/// S004-16: when a trainer's lease is lost, its tasks are requeued at once.
#[test]
fn a_lost_trainer_gives_its_tasks_back_at_once() {
    let mut world = LedgerModel::new(4);
    world.ask(trainer(1), None, Wants::Task);
    world.ask(trainer(2), None, Wants::Task);
    world.decide(|draft| draft.lose_trainer(trainer(1), Attribution::Task, &LIMITS));
    assert_eq!(world.state.ledger.queues().pending, 1);
    assert_eq!(world.state.ledger.queues().todo, 3);
}

/// S004-16: a trainer that asks without reporting cannot hold more tasks than one transaction takes
/// back.
#[test]
fn a_trainer_holds_a_bounded_number_of_tasks() {
    let mut world = LedgerModel::new(HELD_MAX as u32 + 1);
    for _ in 0..HELD_MAX {
        assert!(matches!(world.ask(trainer(1), None, Wants::Task).next, Next::Task(_)));
    }
    assert_eq!(world.ask(trainer(1), None, Wants::Task).next, Next::NotYet);
    assert!(matches!(world.ask(trainer(2), None, Wants::Task).next, Next::Task(_)));
    world.decide(|draft| draft.lose_trainer(trainer(1), Attribution::None, &LIMITS));
    assert_eq!(world.state.ledger.queues().pending, 1);
}

/// F9: with two trainers, both must fail before a task is given up; a failed task goes to the other
/// trainer.
#[test]
fn one_of_two_trainers_alone_does_not_get_a_task_given_up() {
    let mut world = LedgerModel::new(1);
    world.limits.trainers = 2;
    world.ask(trainer(1), None, Wants::Task);
    for _ in 0..=LIMITS.failures_max {
        let answer = world.ask(trainer(1), world.report(trainer(1), 1), Wants::Task);
        assert!(matches!(answer.next, Next::Task(_)), "given up after one trainer's failures");
    }
    world.ask(trainer(1), world.report(trainer(1), 1), Wants::Nothing);
    assert!(matches!(world.ask(trainer(2), None, Wants::Task).next, Next::Task(_)));
    let answer = world.ask(trainer(2), world.report(trainer(2), 1), Wants::Task);
    assert_eq!(answer.next, Next::AllFailed { pass: Pass(0) });
}

/// F9: a trainer prefers tasks that others failed to those that it failed itself.
#[test]
fn a_task_goes_to_another_trainer_than_the_one_that_failed_it() {
    let mut world = LedgerModel::new(2);
    world.limits.trainers = 2;
    world.ask(trainer(1), None, Wants::Task);
    world.ask(trainer(2), None, Wants::Task);
    world.ask(trainer(1), world.report(trainer(1), 1), Wants::Nothing);
    let answer = world.ask(trainer(2), world.report(trainer(2), 1), Wants::Task);
    assert!(matches!(answer.next, Next::Task(it) if it.task == TaskId(0)));
    let answer = world.ask(trainer(1), None, Wants::Task);
    assert!(matches!(answer.next, Next::Task(it) if it.task == TaskId(1)));
}

/// I12: a task does not wait for ever for a second trainer that does not ask.
#[test]
fn a_task_is_given_up_in_the_end_even_if_only_one_trainer_asks() {
    let mut world = LedgerModel::new(1);
    world.limits.trainers = 2;
    let mut answer = world.ask(trainer(1), None, Wants::Task);
    for _ in 0..2 * LIMITS.failures_max + 2 {
        assert!(matches!(answer.next, Next::Task(_)));
        answer = world.ask(trainer(1), world.report(trainer(1), 1), Wants::Task);
    }
    assert_eq!(answer.next, Next::AllFailed { pass: Pass(0) });
}

/// S004-16: when a generation starts without a rollback, pending tasks wait again, and no failure is
/// counted.
#[test]
fn a_recall_puts_pending_tasks_back_and_blames_nobody() {
    let mut world = LedgerModel::new(4);
    world.ask(trainer(1), None, Wants::Task);
    world.ask(trainer(2), None, Wants::Task);
    for _ in 0..5 {
        let facts = world.state.ledger.recall(&LIMITS);
        world.commit(&facts);
        assert_eq!(world.state.ledger.queues().pending, 0);
        world.ask(trainer(1), None, Wants::Task);
    }
    assert_eq!(world.state.ledger.queues().discarded, 0);
    assert!(world.state.ledger.snapshot().open.values().all(|failures| *failures == 0));
}

/// I2: a checkpoint whose queues were recorded before a task was given up would return the task to a
/// pass that some shards have left.
#[test]
fn a_snapshot_knows_what_was_given_up_after_it() {
    let mut world = LedgerModel::new(2);
    world.ask(trainer(1), None, Wants::Task);
    let before = world.state.ledger.snapshot();
    assert!(!world.state.ledger.gave_up_since(&before));
    for _ in 0..=LIMITS.failures_max {
        let (task, attempt, _) = world.state.ledger.pending().next().unwrap();
        world.decide(|draft| draft.expire(task, attempt, &LIMITS));
        world.ask(trainer(1), None, Wants::Task);
        world.ask(trainer(1), None, Wants::Task);
    }
    assert_eq!(world.state.ledger.given_up().times(), 1);
    assert!(world.state.ledger.gave_up_since(&before));
    assert!(!world.state.ledger.gave_up_since(&world.state.ledger.snapshot()));
}

/// F17: the loss of trainers while no master was acting does not count against their tasks.
#[test]
fn a_trainer_lost_without_blame_discards_no_task() {
    let mut world = LedgerModel::new(1);
    for number in 1..10 {
        world.ask(trainer(number), None, Wants::Task);
        world.decide(|draft| draft.lose_trainer(trainer(number), Attribution::None, &LIMITS));
    }
    assert_eq!(world.state.ledger.queues().todo, 1);
}

/// S004-27: a retry after a lost reply gets the same task under the same attempt.
#[test]
fn a_repeated_request_gets_the_first_answer() {
    let mut world = LedgerModel::new(4);
    world.ask(trainer(1), None, Wants::Task);
    world.ask(trainer(1), world.report(trainer(1), 0), Wants::Task);
    let (request, answer) = world.last.clone().unwrap();
    let recovered = world.store.recover(4);
    let (facts, again) = decide(&recovered, |draft| draft.next_task(&request, &[], &LIMITS));
    assert_eq!((facts, again), (vec![], answer));
}

/// S004-26, I2, D10, F21: with 10⁶ tasks in the queues, only those in flight have a key.
#[test]
fn a_million_tasks_need_keys_only_for_what_is_in_flight() {
    let tasks = 1_000_000;
    let mut state = start(tasks, GivenUp::default());
    let mut store = Store::default();
    let mut report = None;
    for number in 0..20_000_u128 {
        let id = RequestId(Uuid::from_u128(number));
        let request = Request { id, trainer: trainer(1), report, wants: Wants::Task, held: None };
        let (facts, answer) = decide(&state, |draft| draft.next_task(&request, &[], &LIMITS));
        facts.iter().for_each(|fact| state.evolve(&Fact::Queue(fact.clone())));
        store.commit(&facts);
        let Next::Task(held) = answer.next else { panic!() };
        report = Some(Report::Finished { task: held.task, attempt: held.attempt });
    }
    assert_eq!(store.tasks.len(), 1);
    assert_eq!(state.ledger.queues().done, 19_999);
    assert_eq!(state.ledger.head().next_attempt, Attempt(20_000));
}

/// F25, I4, I12: a delayed duplicate, which arrives after later requests of its trainer, dispatches a task
/// that no trainer receives. The next request lists what the trainer holds, and the task is returned
/// without counting a failure.
#[test]
fn a_task_that_its_trainer_never_got_goes_back_with_its_next_request() {
    let mut world = LedgerModel::new(3);
    let Next::Task(known) = world.ask(trainer(1), None, Wants::Task).next else { panic!() };
    let Next::Task(lost) = world.ask(trainer(1), None, Wants::Task).next else { panic!() };
    let ask = |world: &mut LedgerModel, held: &[Attempt]| {
        world.requests += 1;
        let id = RequestId(Uuid::from_u128(world.requests));
        let held = Some(held.iter().copied().collect());
        let request =
            Request { id, trainer: trainer(1), report: None, wants: Wants::Nothing, held };
        world.decide(|draft| draft.next_task(&request, &[], &LIMITS));
    };
    ask(&mut world, &[known.attempt]);
    let pending: Vec<Attempt> =
        world.state.ledger.pending().map(|(_, attempt, _)| attempt).collect();
    assert_eq!(pending, [known.attempt]);
    let snapshot = world.state.ledger.snapshot();
    assert_eq!(snapshot.open.get(&lost.task), Some(&0), "a failure was counted");
    // An old request whose trainer held nothing costs one attempt, nothing else.
    ask(&mut world, &[]);
    assert_eq!(world.state.ledger.pending().count(), 0);
}
