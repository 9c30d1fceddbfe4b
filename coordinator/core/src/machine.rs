//! The state machine of a coordinator.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use steadfast_common::ids::Generation;
use steadfast_common::machine::{Decision, Machine, Moment, Size};
use steadfast_common::records::closures::{ClosureName, ClosureRecord};

use crate::call::{Call, ClosureId, Failure, Outcome, Reply, WorkerIndex};
use crate::closures::{Closures, State};
use crate::pushes::{Counted, Push, PushNumber, Pushes};
use crate::workers::Workers;

/// The maximum size of a named closure's result in bytes. In base64 it is a third longer, and still fits into one
/// request of etcd.
pub const RESULT_BYTES_MAX: usize = 1 << 20;

/// Exceeds the number of changes that fit into any transaction.
const NOT_WITH_OTHERS: usize = 1 << 20;

/// Exceeds the size of a record without its result.
const RECORD_BYTES: usize = 2048;

/// Selects what happens to the other closures when one fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    /// Closures that do not run yet are cancelled.
    Stop,
    /// The other closures continue.
    Continue,
}

/// The maximum number of facts that are decided together when closures begin.
const FACTS_MAX: usize = 32;

/// The settings of a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    pub on_error: OnError,
    /// A closure fails when so many workers were lost that ran it.
    pub losses_max: u32,
}

/// An event or a request; the machine handles one at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A new closure. Its inputs have smaller numbers and are not forgotten.
    Scheduled {
        id: ClosureId,
        call: Call,
        /// The number with which an earlier term has let it run.
        push: Option<PushNumber>,
    },
    Cancelled(ClosureId),
    /// A closure that an earlier term has settled, which later ones may have as an input.
    Known {
        id: ClosureId,
        call: Call,
        has_result: bool,
        /// Its push, if a rollback may undo that.
        push: Option<Push>,
    },
    /// A worker runs a closure that an earlier term has given to it.
    Running {
        worker: WorkerIndex,
        attempt: u64,
        id: ClosureId,
    },
    /// The program has dropped the closure, and no later one has it as an input.
    Forgotten(ClosureId),
    /// A worker was added, or takes closures again.
    Started(WorkerIndex),
    /// A worker takes no more closures.
    Stopped(WorkerIndex),
    /// The closures that the worker runs are assigned to other workers.
    GivesBack(WorkerIndex),
    Connected {
        worker: WorkerIndex,
        threads: usize,
    },
    /// The process of a worker ends after what it runs.
    Leaves(WorkerIndex),
    /// There is no connection to a worker. Each call that it runs ends by itself, with its outcome or as lost.
    Lost(WorkerIndex),
    Finished {
        worker: WorkerIndex,
        attempt: u64,
        reply: Reply,
    },
    /// The results of all closures with a name are not needed any more.
    ForgetResults,
    /// The slots of a generation have these pushes.
    Counted(Counted),
    /// A checkpoint has the push of the closure, so no rollback undoes it.
    Covered(ClosureId),
}

/// A change of the durable state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// A closure with a name has a result.
    Remembered { name: ClosureName, record: ClosureRecord },
    /// There are no results any more.
    Forgotten,
    /// A closure with a name ended without a result, and has pushed nothing.
    Unremembered(ClosureName),
    /// All numbers of pushes below this one may be in use.
    Reserved(u32),
}

/// An action that the driver performs once the facts are committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The worker is asked to run the closure, and to name what it pushes by this number.
    Run { worker: WorkerIndex, attempt: u64, id: ClosureId, push: Option<PushNumber> },
    /// The worker is told that the outcome of an attempt does not count.
    Cancel { worker: WorkerIndex, attempt: u64 },
    /// The closure is over. With a push it may have to run again, until a checkpoint covers that.
    Settled { id: ClosureId, outcome: Outcome, push: Option<Push> },
    /// The closure, which was over, runs again: a rollback has undone its push.
    Repeats(ClosureId),
    /// The push of each closure that is over, and does not run again, counts in this generation.
    Counted(Generation),
    /// A worker that was stopped runs nothing that counts.
    AtRest(WorkerIndex),
    /// All results are forgotten.
    ResultsForgotten,
}

/// A coordinator.
#[derive(Clone, Debug)]
pub struct CoordinatorMachine {
    settings: Settings,
    pub(crate) closures: Closures,
    pub(crate) workers: Workers,
    pub(crate) remembered: BTreeMap<ClosureName, ClosureRecord>,
    /// Absent if the job has no parameters.
    pub(crate) pushes: Option<Pushes>,
}

impl CoordinatorMachine {
    /// Creates the machine of a coordinator that remembers these results. No attempt gets a number up to `attempts`.
    /// Closures of a job with parameters may push.
    pub fn new(
        settings: Settings,
        remembered: BTreeMap<ClosureName, ClosureRecord>,
        attempts: u64,
        pushes: Option<Pushes>,
    ) -> Self {
        let (closures, workers) = (Closures::default(), Workers::new(attempts));
        Self { settings, closures, workers, remembered, pushes }
    }

    fn scheduled(
        &mut self,
        id: ClosureId,
        call: Call,
        push: Option<PushNumber>,
        decision: &mut Decision<Self>,
    ) {
        if self.closures.by_id.contains_key(&id) {
            return;
        }
        let record = call.name.as_ref().and_then(|it| self.remembered.get(it));
        let record = record.filter(|it| it.digest == call.digest);
        let remembered = record.and_then(|it| it.push).map(PushNumber);
        let push = push.or(remembered);
        let outcome = self.known_outcome(&call);
        let leader = call.name.as_ref().and_then(|it| self.closures.by_name.get(it).copied());
        match (outcome, leader) {
            (Some(outcome), _) => {
                self.closures.add(id, call, State::Ready, None);
                let generation = self.pushes.as_ref().map(Pushes::generation);
                let pushed = remembered.zip(generation);
                if let Some(closure) = self.closures.by_id.get_mut(&id) {
                    closure.pushed = pushed.map(|(number, generation)| Push { number, generation });
                }
                self.settle(id, outcome, decision);
                self.repeat_if_undone(id, decision);
            }
            (None, Some(leader)) => {
                self.closures.add(id, call, State::Follows, None);
                if let Some(leader) = self.closures.by_id.get_mut(&leader) {
                    leader.followers.push(id);
                }
            }
            (None, None) => {
                if let Some(name) = &call.name {
                    self.closures.by_name.insert(name.clone(), id);
                }
                self.enter(id, call, push, decision);
            }
        }
    }

    /// Returns the outcome of a call that need not run: that of an earlier one with its name.
    fn known_outcome(&self, call: &Call) -> Option<Outcome> {
        let name = call.name.as_ref()?;
        let taken = |function: &str| {
            let (name, function) = (name.clone(), function.to_owned());
            Some(Outcome::Failed(Failure::NameTaken { name, function }))
        };
        if let Some(record) = self.remembered.get(name) {
            match record.digest == call.digest {
                true if !record.runs => return Some(outcome_of(record)),
                true => {}
                false => return taken(&record.function),
            }
        }
        let leader = self.closures.by_id.get(self.closures.by_name.get(name)?)?;
        match leader.call.digest == call.digest {
            true => None,
            false => taken(&leader.call.function),
        }
    }

    /// Lets a closure wait for its inputs and a worker.
    fn enter(
        &mut self,
        id: ClosureId,
        call: Call,
        push: Option<PushNumber>,
        decision: &mut Decision<Self>,
    ) {
        let mut on = BTreeSet::new();
        let mut failed = None;
        for input in &call.inputs {
            match self.closures.by_id.get_mut(input) {
                // It has a result.
                Some(closure) if closure.repeats => {}
                Some(closure) => match closure.state {
                    State::Settled { has_result: true } => {}
                    State::Settled { has_result: false } => failed = Some(*input),
                    State::Waiting { .. }
                    | State::Follows
                    | State::Ready
                    | State::Running { .. } => {
                        if on.insert(*input) {
                            closure.dependents.push(id);
                        }
                    }
                },
                None => failed = Some(*input),
            }
        }
        let waits = !on.is_empty();
        self.closures.add(id, call, State::Waiting { on }, push);
        match failed {
            Some(input) => self.settle(id, without_argument(input), decision),
            None if waits => {}
            None => self.make_ready(id, decision),
        }
    }

    fn make_ready(&mut self, id: ClosureId, decision: &mut Decision<Self>) {
        let Some(closure) = self.closures.by_id.get_mut(&id) else { return };
        closure.state = State::Ready;
        match closure.call.worker {
            None => {
                self.closures.ready.insert(id);
            }
            Some(worker) if self.workers.pin(worker, id) => {}
            Some(worker) => self.settle(id, without_worker(worker), decision),
        }
    }

    /// Lets a closure that is over run again if a slot lacks its push: its result stays, and it pushes again.
    fn repeat_if_undone(&mut self, id: ClosureId, decision: &mut Decision<Self>) {
        let (Some(closure), Some(pushes)) = (self.closures.by_id.get_mut(&id), &self.pushes) else {
            return;
        };
        let Some(pushed) = closure.pushed.take_if(|it| !pushes.counts(it.number)) else { return };
        closure.push = Some(pushed.number);
        (closure.repeats, closure.may_have_pushed) = (true, true);
        decision.effects.push(Effect::Repeats(id));
        self.make_ready(id, decision);
    }

    /// Ends a closure, and those that follow from it.
    fn settle(&mut self, id: ClosureId, outcome: Outcome, decision: &mut Decision<Self>) {
        let mut todo = VecDeque::from([(id, outcome)]);
        while let Some((id, outcome)) = todo.pop_front() {
            let Some(closure) = self.closures.by_id.get_mut(&id) else { continue };
            match closure.state {
                State::Settled { .. } => continue,
                State::Running { worker, attempt } => {
                    if self.workers.disown(worker, attempt) {
                        closure.may_have_pushed = true;
                        decision.effects.push(Effect::Cancel { worker, attempt });
                    }
                }
                State::Ready => {
                    self.closures.ready.remove(&id);
                    if let Some(worker) = closure.call.worker {
                        self.workers.unpin(worker, id);
                    }
                }
                State::Waiting { .. } | State::Follows => {}
            }
            let outcome = match (outcome, std::mem::take(&mut closure.repeats)) {
                (Outcome::Cancelled(reason), true) => {
                    Outcome::Failed(Failure::NotRepeated { reason })
                }
                (outcome, _) => outcome,
            };
            let has_result = match outcome {
                Outcome::Returned(_) | Outcome::EndOfData => true,
                Outcome::Failed(_) | Outcome::Cancelled(_) => false,
            };
            closure.state = State::Settled { has_result };
            let push = closure.pushed;
            // Of an attempt that was lost, or is not waited for, it is not known what it has pushed.
            let has_pushed_nothing =
                push.is_none() && !closure.may_have_pushed && self.pushes.is_some();
            let unused = closure.push.take().filter(|_| has_pushed_nothing);
            let followers = std::mem::take(&mut closure.followers);
            todo.extend(followers.into_iter().map(|it| (it, outcome.clone())));
            let dependents = std::mem::take(&mut closure.dependents);
            if let Some(name) = &closure.call.name
                && self.closures.by_name.get(name) == Some(&id)
            {
                let (name, call) = (name.clone(), &closure.call);
                match record_of(call, &outcome, push) {
                    Some(record) => {
                        self.remembered.insert(name.clone(), record.clone());
                        decision.facts.push(Fact::Remembered { name: name.clone(), record });
                    }
                    None if unused.is_some() => {
                        self.remembered.remove(&name);
                        // There may be many, and no other fact depends on them.
                        match decision.ahead.last_mut() {
                            Some(list) => list.push(Fact::Unremembered(name.clone())),
                            None => decision.ahead.push(vec![Fact::Unremembered(name.clone())]),
                        }
                    }
                    None => {}
                }
                self.closures.by_name.remove(&name);
            }
            if let (Some(number), Some(pushes)) = (unused, &mut self.pushes) {
                pushes.give_back(number);
            }
            for dependent in dependents {
                match has_result {
                    false => todo.push_back((dependent, without_argument(id))),
                    true => self.has_input(dependent, id, decision),
                }
            }
            if let Outcome::Failed(_) = outcome
                && self.settings.on_error == OnError::Stop
            {
                let reason = Outcome::Cancelled(format!("closure {id} failed"));
                let others = self.closures.not_begun();
                todo.extend(others.into_iter().map(|it| (it, reason.clone())));
            }
            decision.effects.push(Effect::Settled { id, outcome, push });
        }
    }

    fn running(&mut self, worker: WorkerIndex, attempt: u64, id: ClosureId) {
        let Some(closure) = self.closures.by_id.get_mut(&id) else { return };
        // Otherwise another coordinator has its result.
        if closure.state == State::Ready && self.workers.resume(worker, attempt, id) {
            closure.state = State::Running { worker, attempt };
            self.closures.ready.remove(&id);
            self.workers.unpin(worker, id);
        }
    }

    fn has_input(&mut self, id: ClosureId, input: ClosureId, decision: &mut Decision<Self>) {
        let Some(closure) = self.closures.by_id.get_mut(&id) else { return };
        let State::Waiting { on } = &mut closure.state else { return };
        on.remove(&input);
        if on.is_empty() {
            self.make_ready(id, decision);
        }
    }

    fn finished(
        &mut self,
        worker: WorkerIndex,
        attempt: u64,
        reply: Reply,
        decision: &mut Decision<Self>,
    ) {
        let Some(id) = self.workers.finished(worker, attempt) else { return };
        let Some(closure) = self.closures.by_id.get_mut(&id) else { return };
        let is_named = closure.call.name.is_some();
        let outcome = match reply {
            Reply::Lost => return self.lost(worker, id, decision),
            Reply::Declined => return self.make_ready(id, decision),
            Reply::Returned { value, .. } if is_named && RESULT_BYTES_MAX < value.len() => {
                let (bytes, limit) = (value.len(), RESULT_BYTES_MAX);
                closure.may_have_pushed = true;
                Outcome::Failed(Failure::ResultTooLarge { bytes, limit })
            }
            Reply::Returned { value, pushed } => {
                if let (Some(pushes), Some(number), Some(generation)) =
                    (&mut self.pushes, closure.push, pushed)
                {
                    let push = Push { number, generation };
                    if !pushes.pushed(push) {
                        // It was undone before its reply arrived.
                        return self.make_ready(id, decision);
                    }
                    closure.pushed = Some(push);
                }
                Outcome::Returned(value)
            }
            Reply::EndOfData => Outcome::EndOfData,
            Reply::Raised { exception, message, traceback } => {
                Outcome::Failed(Failure::Raised { exception, message, traceback, worker })
            }
            Reply::Refused(message) => Outcome::Failed(Failure::Refused { message, worker }),
        };
        self.settle(id, outcome, decision);
    }

    /// Runs a closure again whose worker was lost.
    fn lost(&mut self, worker: WorkerIndex, id: ClosureId, decision: &mut Decision<Self>) {
        let Some(closure) = self.closures.by_id.get_mut(&id) else { return };
        closure.losses += 1;
        closure.may_have_pushed = true;
        let times = closure.losses;
        match times < self.settings.losses_max {
            true => self.make_ready(id, decision),
            false => {
                let failure = Failure::WorkersLost { times, worker };
                self.settle(id, Outcome::Failed(failure), decision);
            }
        }
    }

    fn stopped(&mut self, worker: WorkerIndex, decision: &mut Decision<Self>) {
        for id in self.workers.stop(worker) {
            self.settle(id, without_worker(worker), decision);
        }
        self.note_rest(worker, decision);
    }

    fn note_rest(&self, worker: WorkerIndex, decision: &mut Decision<Self>) {
        if self.workers.is_at_rest(worker) {
            decision.effects.push(Effect::AtRest(worker));
        }
    }
}

impl Machine for CoordinatorMachine {
    type Input = Input;
    type Fact = Fact;
    type Effect = Effect;

    fn handle(&mut self, _: Moment, input: Input, decision: &mut Decision<Self>) {
        match input {
            Input::Scheduled { id, call, push } => self.scheduled(id, call, push, decision),
            Input::Cancelled(id) if self.closures.by_id.get(&id).is_some_and(|it| it.repeats) => {}
            Input::Cancelled(id) => {
                let state = self.closures.by_id.get(&id).map(|it| it.state.clone());
                self.settle(id, Outcome::Cancelled("it was cancelled".to_owned()), decision);
                if let Some(State::Running { worker, .. }) = state {
                    self.note_rest(worker, decision);
                }
            }
            Input::Known { id, call, has_result, push } => {
                self.closures.add(id, call, State::Settled { has_result }, None);
                if let Some(closure) = self.closures.by_id.get_mut(&id) {
                    closure.pushed = push;
                }
                self.repeat_if_undone(id, decision);
            }
            Input::Running { worker, attempt, id } => self.running(worker, attempt, id),
            Input::Forgotten(id) => {
                let state = self.closures.by_id.get(&id).map(|it| &it.state);
                if let Some(State::Settled { .. }) = state {
                    self.closures.by_id.remove(&id);
                }
            }
            Input::Started(worker) => self.workers.start(worker),
            Input::Stopped(worker) => self.stopped(worker, decision),
            Input::GivesBack(worker) => {
                for (attempt, id) in self.workers.runs(worker) {
                    self.workers.disown(worker, attempt);
                    decision.effects.push(Effect::Cancel { worker, attempt });
                    if let Some(closure) = self.closures.by_id.get_mut(&id) {
                        closure.may_have_pushed = true;
                    }
                    self.make_ready(id, decision);
                }
                self.note_rest(worker, decision);
            }
            Input::Connected { worker, threads } => self.workers.connected(worker, threads),
            Input::Leaves(worker) => self.workers.leaves(worker),
            Input::Lost(worker) => self.workers.lost(worker),
            Input::Finished { worker, attempt, reply } => {
                self.finished(worker, attempt, reply, decision);
                self.note_rest(worker, decision);
            }
            Input::ForgetResults => {
                self.remembered.clear();
                // Alone: etcd refuses a transaction that deletes a prefix and puts a key below it.
                decision.ahead.push(vec![Fact::Forgotten]);
                decision.effects.push(Effect::ResultsForgotten);
            }
            Input::Counted(counted) => {
                if self.pushes.as_mut().is_some_and(|it| it.read(counted)) {
                    let pushed = self.closures.by_id.iter().filter(|(_, it)| it.pushed.is_some());
                    for id in pushed.map(|(&id, _)| id).collect::<Vec<_>>() {
                        self.repeat_if_undone(id, decision);
                    }
                }
                let generation = self.pushes.as_ref().map(Pushes::generation);
                decision.effects.extend(generation.map(Effect::Counted));
            }
            Input::Covered(id) => {
                if let Some(closure) = self.closures.by_id.get_mut(&id) {
                    closure.pushed = None;
                }
            }
        }
    }

    fn committed(&mut self, _: Moment, _: &mut Vec<Effect>) {}

    fn due(&mut self, _: Moment, decision: &mut Decision<Self>) {
        while decision.facts.len() < FACTS_MAX
            && let Some((worker, attempt, id)) = self.workers.assign(&mut self.closures.ready)
        {
            let Some(closure) = self.closures.by_id.get_mut(&id) else { continue };
            closure.state = State::Running { worker, attempt };
            if let (Some(pushes), None) = (&mut self.pushes, closure.push) {
                let (number, reserved) = pushes.take();
                closure.push = Some(number);
                decision.facts.extend(reserved.map(Fact::Reserved));
                // Before it runs: each later attempt names its push alike.
                if let Some(name) = closure.call.name.clone() {
                    let record = record_of_run(&closure.call, number);
                    self.remembered.insert(name.clone(), record.clone());
                    decision.facts.push(Fact::Remembered { name, record });
                }
            }
            let push = closure.push;
            decision.effects.push(Effect::Run { worker, attempt, id, push });
        }
    }

    fn size_max(&self, input: &Input) -> Size {
        match input {
            Input::Finished { reply: Reply::Returned { value, .. }, .. } => {
                Size { changes: 1, bytes: value.len() / 3 * 4 + RECORD_BYTES }
            }
            Input::Finished { .. } => Size { changes: 1, bytes: RECORD_BYTES },
            // What was decided before it is committed before it.
            Input::ForgetResults => Size { changes: NOT_WITH_OTHERS, bytes: RECORD_BYTES },
            Input::Scheduled { .. }
            | Input::Cancelled(_)
            | Input::Known { .. }
            | Input::Running { .. }
            | Input::Forgotten(_)
            | Input::Started(_)
            | Input::Stopped(_)
            | Input::GivesBack(_)
            | Input::Connected { .. }
            | Input::Leaves(_)
            | Input::Lost(_)
            | Input::Counted(_)
            | Input::Covered(_) => Size { changes: 0, bytes: 0 },
        }
    }

    fn is_over(&self) -> bool {
        false
    }
}

fn without_argument(input: ClosureId) -> Outcome {
    Outcome::Cancelled(format!("closure {input}, whose result is an argument, has none"))
}

fn without_worker(worker: WorkerIndex) -> Outcome {
    Outcome::Cancelled(format!("worker {worker}, the only one that may run it, is not in use"))
}

fn record_of(call: &Call, outcome: &Outcome, push: Option<Push>) -> Option<ClosureRecord> {
    let result = match outcome {
        Outcome::Returned(value) => Some(value.to_vec()),
        Outcome::EndOfData => None,
        Outcome::Failed(_) | Outcome::Cancelled(_) => return None,
    };
    let (function, digest) = (call.function.clone(), call.digest.clone());
    let push = push.map(|it| it.number.0);
    Some(ClosureRecord { function, digest, result, push, runs: false })
}

/// Returns the record of a closure that is about to run.
fn record_of_run(call: &Call, PushNumber(number): PushNumber) -> ClosureRecord {
    let (function, digest) = (call.function.clone(), call.digest.clone());
    ClosureRecord { function, digest, result: None, push: Some(number), runs: true }
}

fn outcome_of(record: &ClosureRecord) -> Outcome {
    match &record.result {
        Some(value) => Outcome::Returned(value.clone().into()),
        None => Outcome::EndOfData,
    }
}
