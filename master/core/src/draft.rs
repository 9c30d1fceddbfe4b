//! Decisions that apply their facts to the state, and keep them to be committed.

use steadfast_common::ids::{Attempt, TaskId, TrainerId};
use steadfast_common::records::ReplyRecord;

use crate::job_state::{Fact, JobState};
use crate::ledger::{Attribution, Limits, Next, QueueFact, Request, TaskReply, Wants};

/// A state with the facts that were applied to it and are not committed.
#[derive(Debug)]
pub struct Draft<'a> {
    state: &'a mut JobState,
    facts: Vec<Fact>,
}

impl<'a> Draft<'a> {
    /// Returns a draft without facts.
    pub fn of(state: &'a mut JobState) -> Self {
        Self { state, facts: Vec::new() }
    }

    /// Returns the state after the facts.
    pub fn state(&self) -> &JobState {
        self.state
    }

    /// Returns the facts since the last call.
    pub fn take_facts(&mut self) -> Vec<Fact> {
        std::mem::take(&mut self.facts)
    }

    pub fn add(&mut self, fact: Fact) {
        self.state.evolve(&fact);
        self.facts.push(fact);
    }

    pub fn add_queue_facts(&mut self, facts: impl IntoIterator<Item = QueueFact>) {
        facts.into_iter().for_each(|fact| self.add(Fact::Queue(fact)));
    }

    /// Processes a report and dispatches a task, or one of the `late` attempts to a trainer that is idle.
    ///
    /// A repeated request gets its first reply again, without a change, as long as the trainer holds the
    /// task of that reply.
    pub fn next_task(
        &mut self,
        request: &Request,
        late: &[(TaskId, Attempt)],
        limits: &Limits,
    ) -> TaskReply {
        if let Some(reply) = self.state.ledger.given_before(request, limits) {
            return reply;
        }
        let facts_before = self.facts.len();
        let report = request.report.as_ref();
        let facts = report.map(|it| self.state.ledger.report(request.trainer, it, limits));
        let facts = facts.unwrap_or_default();
        let accepted = !facts.is_empty();
        self.add_queue_facts(facts);
        for (task, attempt) in self.state.ledger.forgotten(request) {
            let reason = "its trainer never received it";
            self.requeue(task, attempt, reason, Attribution::None, limits);
        }
        let next = match (self.close_pass_if_drained(limits), request.wants) {
            // The first task of the next pass is dispatched to the next request.
            (PassState::Open, Wants::Task) => {
                let (facts, next) = self.state.ledger.dispatch(request, accepted, late, limits);
                self.add_queue_facts(facts);
                next
            }
            (PassState::Closed, Wants::Task) | (_, Wants::Nothing) => Next::NotYet,
        };
        // The record of a dispatched task names its request. A reply without facts need not be stored:
        // the same request can be decided again.
        if !matches!(next, Next::Task(_)) && facts_before < self.facts.len() {
            let reply = ReplyRecord { request: request.id, accepted };
            self.add_queue_facts([QueueFact::Replied { trainer: request.trainer, reply }]);
        }
        TaskReply { accepted, next }
    }

    /// Takes back an attempt whose deadline has passed, if it is still the pending one.
    pub fn expire(&mut self, task: TaskId, attempt: Attempt, limits: &Limits) {
        self.requeue(task, attempt, "its deadline passed", Attribution::Task, limits);
        self.close_pass_if_drained(limits);
    }

    /// Takes back all tasks of a lost trainer. The loss counts against its tasks, since one of them may
    /// have caused it, unless many trainers were lost at once or the time of the loss is unknown.
    pub fn lose_trainer(&mut self, trainer: TrainerId, attribution: Attribution, limits: &Limits) {
        let held: Vec<(TaskId, Attempt)> = self.state.ledger.held_by(trainer).collect();
        for (task, attempt) in held {
            self.requeue(task, attempt, "its trainer was lost", attribution, limits);
        }
        self.close_pass_if_drained(limits);
        if self.state.ledger.has_replied(trainer) {
            self.add_queue_facts([QueueFact::Forgotten { trainer }]);
        }
    }

    fn requeue(
        &mut self,
        task: TaskId,
        attempt: Attempt,
        reason: &str,
        attribution: Attribution,
        limits: &Limits,
    ) {
        let facts = self.state.ledger.requeue(task, attempt, reason, attribution, limits);
        self.add_queue_facts(facts);
    }

    fn close_pass_if_drained(&mut self, limits: &Limits) -> PassState {
        match self.state.ledger.close_pass_if_drained(limits) {
            Some(fact) => {
                self.add_queue_facts([fact]);
                PassState::Closed
            }
            None => PassState::Open,
        }
    }
}

/// Whether a decision closed the pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PassState {
    Open,
    Closed,
}
