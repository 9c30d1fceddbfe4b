//! State shared by the program and the machine: closures with their arguments and outcomes, and the workers.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use steadfast_common::ids::Generation;
use steadfast_common::records::closures::ClosureName;
use steadfast_coordinator_core::{
    Call, ClosureId, Failure, Input, Outcome, Push, PushNumber, Reply, WorkerIndex,
};
use steadfast_net::Channel;
use steadfast_process::Failure as ProcessFailure;

use crate::coordinator::WorkerValue;
use crate::parameters::Coverage;

/// Limits the errors that are kept until they are raised in the program. Further errors are only counted.
const ERRORS_MAX: usize = 1000;

/// A call to be scheduled.
#[derive(Clone, Debug)]
pub struct Scheduled {
    /// The function, as `module:function`.
    pub function: String,
    /// An encoded `steadfast.v1.Arguments`.
    pub arguments: Bytes,
    /// The closures whose results are arguments.
    pub inputs: Vec<ClosureId>,
    pub name: Option<ClosureName>,
    /// The only worker that may run it.
    pub worker: Option<WorkerIndex>,
    /// Replaces the encoded arguments in the digest of a named call.
    pub identity: Option<Bytes>,
    /// The values of workers that its arguments refer to.
    pub values: Vec<Arc<WorkerValue>>,
}

/// A closure that has failed.
#[derive(Clone, Debug)]
pub struct ClosureError {
    pub id: ClosureId,
    pub function: String,
    pub name: Option<ClosureName>,
    pub failure: Failure,
    /// Address of the worker that ran it last, if one did.
    pub worker: Option<String>,
}

/// A worker, as the program sees it.
#[derive(Clone, Debug)]
pub struct WorkerState {
    pub address: String,
    /// Set when the worker was removed; it takes no closures until it is added again.
    pub is_stopped: bool,
    /// Set when the stopped worker runs no closure whose outcome counts.
    pub is_at_rest: bool,
    /// Limits the closures that it runs at once; `None` while there is no connection.
    pub threads: Option<u32>,
    /// Set when its process ends after the closures that it runs.
    pub leaves: bool,
    /// The reason for which there is no connection.
    pub reason: String,
    /// Counts the closures that it runs.
    pub running: u32,
    /// Counts the closures that it has finished.
    pub finished: u64,
    pub(crate) channel: Channel,
}

/// An attempt to run a closure, which outlives the term that has begun it.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    worker: WorkerIndex,
    attempt: u64,
    /// Holds the worker's reply until the closure settles.
    reply: Option<Reply>,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub call: Call,
    pub arguments: Bytes,
    pub outcome: Option<Outcome>,
    /// Set when it was assigned to a worker or is over, so it does not count as waiting.
    pub has_begun: bool,
    pub is_cancelled: bool,
    /// The attempt whose outcome counts, if a worker was asked to run it.
    pub attempt: Option<Running>,
    /// Holds the values until no attempt needs them.
    pub values: Vec<Arc<WorkerValue>>,
    /// Counts the references of the program, and of closures that have it as an input.
    pub holders: u32,
    pub worker: Option<WorkerIndex>,
    /// The number under which it pushes, once it has run.
    pub push: Option<PushNumber>,
    /// Its push, once it is over, until a checkpoint covers that. It may have to run again until then, so its arguments
    /// are kept.
    pub pushed: Option<Push>,
    /// The place of that push among all.
    pub pushed_as: u64,
    /// Set while it runs again although it is over.
    pub repeats: bool,
}

/// Counts what became of closures since the coordinator has started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub returned: u64,
    pub failed: u64,
    pub cancelled: u64,
    /// Counts the requests to workers to run one.
    pub runs: u64,
}

/// The state of a coordinator.
#[derive(Debug, Default)]
pub struct Table {
    pub(crate) closures: BTreeMap<ClosureId, Entry>,
    pub(crate) workers: BTreeMap<WorkerIndex, WorkerState>,
    last_id: u64,
    /// Counts the closures that are not over.
    pending: usize,
    /// Counts the closures that wait for a worker.
    waiting: usize,
    errors: Vec<ClosureError>,
    errors_more: usize,
    /// The largest number of an attempt.
    pub(crate) attempts: u64,
    pub(crate) totals: Totals,
    /// Values of closures that are over. They are dropped without the lock.
    dropped: Vec<Arc<WorkerValue>>,
    pub(crate) coverage: Coverage,
    /// The generation in which the push of each closure counts that is over, and does not run again. Absent while a term
    /// finds that out.
    pub(crate) counted: Option<Generation>,
    /// Counts the closures that are over, and run again.
    repeating: usize,
    /// Set once the first term has begun.
    pub(crate) has_begun: bool,
    /// Set while all stored results are to be deleted.
    pub(crate) forgets_results: bool,
    /// The reason for which the coordinator has stopped.
    ended: Option<ProcessFailure>,
}

impl Table {
    /// Returns the outcome of a closure; `None` if it is not over, or all references to it were dropped.
    pub fn outcome(&self, id: ClosureId) -> Option<&Outcome> {
        self.closures.get(&id)?.outcome.as_ref()
    }

    /// Returns why a closure has failed, if it has.
    pub fn error_of(&self, id: ClosureId) -> Option<ClosureError> {
        let entry = self.closures.get(&id)?;
        let Some(Outcome::Failed(failure)) = &entry.outcome else { return None };
        Some(ClosureError {
            id,
            function: entry.call.function.clone(),
            name: entry.call.name.clone(),
            failure: failure.clone(),
            worker: entry.worker.and_then(|it| self.address(it)).map(str::to_owned),
        })
    }

    /// Returns how many closures are not over.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Returns the generation in which the push of each closure that is over counts, if there is one.
    pub(crate) fn settled_in(&self) -> Option<Generation> {
        self.counted.filter(|_| self.repeating == 0)
    }

    /// Returns how many closures wait for a worker.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns all workers that were added, by index.
    pub fn workers(&self) -> &BTreeMap<WorkerIndex, WorkerState> {
        &self.workers
    }

    /// Returns why the coordinator cannot go on.
    pub fn ended(&self) -> Option<&ProcessFailure> {
        self.ended.as_ref()
    }

    /// Returns the address of a worker.
    pub fn address(&self, index: WorkerIndex) -> Option<&str> {
        self.workers.get(&index).map(|it| it.address.as_str())
    }

    /// Returns whether closures have failed whose errors were not raised in the program yet.
    pub fn has_errors(&self) -> bool {
        !self.errors.is_empty()
    }

    /// Takes the errors that were not raised in the program yet, and the number of those beyond the limit.
    pub fn take_errors(&mut self) -> (Vec<ClosureError>, usize) {
        (std::mem::take(&mut self.errors), std::mem::take(&mut self.errors_more))
    }

    /// Returns the digests of closures, which become part of the digest of a call that has them as inputs.
    pub(crate) fn digests_of(&self, ids: &[ClosureId]) -> Vec<&str> {
        let found = ids.iter().map(|id| self.closures.get(id).map(|it| it.call.digest.as_str()));
        found.map(Option::unwrap_or_default).collect()
    }

    pub(crate) fn schedule(&mut self, scheduled: Scheduled, digest: String) -> (ClosureId, Call) {
        self.last_id += 1;
        let id = ClosureId(self.last_id);
        let Scheduled { function, arguments, inputs, name, worker, values, .. } = scheduled;
        for input in &inputs {
            if let Some(entry) = self.closures.get_mut(input) {
                entry.holders += 1;
            }
        }
        let call = Call { function, digest, name, inputs, worker };
        let entry = Entry {
            call: call.clone(),
            arguments,
            outcome: None,
            has_begun: false,
            is_cancelled: false,
            attempt: None,
            values,
            holders: 1,
            worker: None,
            push: None,
            pushed: None,
            pushed_as: 0,
            repeats: false,
        };
        self.closures.insert(id, entry);
        self.pending += 1;
        self.waiting += 1;
        (id, call)
    }

    pub(crate) fn begun(
        &mut self,
        id: ClosureId,
        worker: WorkerIndex,
        attempt: u64,
        push: Option<PushNumber>,
    ) {
        self.attempts = self.attempts.max(attempt);
        self.totals.runs += 1;
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.running += 1;
        }
        let Some(entry) = self.closures.get_mut(&id) else { return };
        entry.worker = Some(worker);
        entry.push = push;
        entry.attempt = Some(Running { worker, attempt, reply: None });
        if !std::mem::replace(&mut entry.has_begun, true) {
            self.waiting -= 1;
        }
    }

    /// Notes the outcome of a closure. Returns the closures to which no reference is left.
    pub(crate) fn settle(
        &mut self,
        id: ClosureId,
        outcome: Outcome,
        push: Option<Push>,
    ) -> Vec<ClosureId> {
        let Some(entry) = self.closures.get_mut(&id) else { return Vec::new() };
        let repeats = std::mem::take(&mut entry.repeats);
        if entry.outcome.is_some() && !repeats {
            // A term that was lost had decided it.
            return Vec::new();
        }
        self.pending -= 1;
        if !std::mem::replace(&mut entry.has_begun, true) {
            self.waiting -= 1;
        }
        match &outcome {
            _ if repeats => self.repeating -= 1,
            Outcome::Returned(_) | Outcome::EndOfData => self.totals.returned += 1,
            Outcome::Failed(_) => self.totals.failed += 1,
            Outcome::Cancelled(_) => self.totals.cancelled += 1,
        }
        (entry.attempt, entry.push, entry.pushed) = (None, None, push);
        let counted = match outcome {
            Outcome::Returned(_) | Outcome::EndOfData | Outcome::Failed(_) => entry.worker,
            Outcome::Cancelled(_) => None,
        };
        if let Some(worker) = counted.and_then(|it| self.workers.get_mut(&it)) {
            worker.finished += 1;
        }
        let has_failed = matches!(outcome, Outcome::Failed(_));
        // The first result stays, also if its push cannot be repeated.
        if !repeats || has_failed {
            entry.outcome = Some(outcome);
        }
        if has_failed {
            match self.errors.len() < ERRORS_MAX {
                true => self.errors.extend(self.error_of(id)),
                false => self.errors_more += 1,
            }
        }
        if push.is_none() {
            return self.drop_call(id);
        }
        let place = self.coverage.add(id);
        if let Some(entry) = self.closures.get_mut(&id) {
            entry.pushed_as = place;
        }
        Vec::new()
    }

    /// Drops what only a further run of a closure needs. Returns the closures to which no reference is left.
    fn drop_call(&mut self, id: ClosureId) -> Vec<ClosureId> {
        let Some(entry) = self.closures.get_mut(&id) else { return Vec::new() };
        (entry.arguments, entry.pushed) = (Bytes::new(), None);
        let values = std::mem::take(&mut entry.values);
        self.dropped.extend(values);
        let inputs = std::mem::take(&mut entry.call.inputs);
        let is_held = 0 < entry.holders;
        let mut forgotten: Vec<ClosureId> =
            inputs.into_iter().filter(|it| self.release(*it)).collect();
        if !is_held {
            self.closures.remove(&id);
            forgotten.push(id);
        }
        forgotten
    }

    /// Notes that a closure that is over runs again.
    pub(crate) fn repeats(&mut self, id: ClosureId) {
        if let Some(entry) = self.closures.get_mut(&id)
            && !std::mem::replace(&mut entry.repeats, true)
        {
            self.pending += 1;
            self.repeating += 1;
        }
    }

    /// Notes which checkpoint is the newest in a generation, after `pushed` pushes; returns what the machine is told.
    pub(crate) fn covered(
        &mut self,
        generation: Generation,
        newest: Option<String>,
        pushed: u64,
    ) -> Vec<Input> {
        let mut inputs = Vec::new();
        if self.counted != Some(generation) {
            // A rollback may have undone pushes, and the machine has not compared them.
            return inputs;
        }
        for (place, id) in self.coverage.note(newest, pushed) {
            // One that was repeated, or is, has another place.
            let is_last = |it: &Entry| it.pushed.is_some() && it.pushed_as == place && !it.repeats;
            if self.closures.get(&id).is_some_and(is_last) {
                inputs.push(Input::Covered(id));
                inputs.extend(self.drop_call(id).into_iter().map(Input::Forgotten));
            }
        }
        inputs
    }

    /// Drops one reference to a closure; returns whether it was removed: it is over, and no reference is left.
    pub(crate) fn release(&mut self, id: ClosureId) -> bool {
        let Some(entry) = self.closures.get_mut(&id) else { return false };
        entry.holders = entry.holders.saturating_sub(1);
        if entry.holders != 0 || entry.outcome.is_none() {
            return false;
        }
        if entry.repeats || entry.pushed.is_some() {
            // It may run again, but its result is not needed.
            entry.outcome = Some(Outcome::EndOfData);
            return false;
        }
        self.closures.remove(&id);
        true
    }

    /// Returns the encoded results that a closure takes as arguments, in their order. One without a value is empty.
    pub(crate) fn results_for(&self, id: ClosureId) -> Vec<Bytes> {
        let inputs = self.closures.get(&id).map(|it| it.call.inputs.as_slice()).unwrap_or_default();
        let results = inputs.iter().map(|input| match self.outcome(*input) {
            Some(Outcome::Returned(value)) => value.clone(),
            Some(Outcome::EndOfData | Outcome::Failed(_) | Outcome::Cancelled(_)) | None => {
                Bytes::new()
            }
        });
        results.collect()
    }

    /// Returns whether the results of all names are still to be forgotten.
    pub fn forgets_results(&self) -> bool {
        self.forgets_results
    }

    /// Keeps the reply to an attempt until the closure settles: the term to which it goes may end before.
    pub(crate) fn replied(
        &mut self,
        worker: WorkerIndex,
        attempt: u64,
        id: ClosureId,
        reply: &Reply,
    ) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.running = worker.running.saturating_sub(1);
        }
        let running = self.closures.get_mut(&id).and_then(|entry| entry.attempt.as_mut());
        if let Some(running) = running.filter(|it| it.attempt == attempt) {
            running.reply = Some(reply.clone());
        }
    }

    /// Cancels all closures that are not over: the coordinator is closed.
    pub(crate) fn cancel_all(&mut self) {
        for entry in self.closures.values_mut().filter(|it| it.outcome.is_none()) {
            let reason = "the coordinator was closed".to_owned();
            entry.outcome = Some(Outcome::Cancelled(reason));
        }
        (self.pending, self.waiting, self.repeating) = (0, 0, 0);
    }

    /// Drops the error of a closure, which was raised in the program.
    pub fn told_of(&mut self, id: ClosureId) {
        self.errors.retain(|error| error.id != id);
    }

    pub(crate) fn end(&mut self, failure: ProcessFailure) {
        self.ended.get_or_insert(failure);
    }

    /// Returns the inputs with which a machine gets to the state of this table.
    pub(crate) fn inputs(&mut self) -> Vec<Input> {
        let mut inputs = Vec::new();
        for entry in self.closures.values_mut().filter(|it| it.repeats) {
            // The machine finds out whether it has to.
            entry.repeats = false;
            self.pending -= 1;
        }
        (self.repeating, self.counted) = (0, None);
        for (&worker, state) in &self.workers {
            inputs.push(Input::Started(worker));
            if state.is_stopped {
                inputs.push(Input::Stopped(worker));
            }
            if let Some(threads) = state.threads {
                inputs.push(Input::Connected { worker, threads: threads as usize });
            }
            if state.leaves {
                inputs.push(Input::Leaves(worker));
            }
        }
        if self.forgets_results {
            inputs.push(Input::ForgetResults);
        }
        for (&id, entry) in &self.closures {
            let call = entry.call.clone();
            match &entry.outcome {
                None => {
                    inputs.push(Input::Scheduled { id, call, push: entry.push });
                    if let Some(Running { worker, attempt, reply }) = entry.attempt.clone() {
                        inputs.push(Input::Running { worker, attempt, id });
                        let finished = |reply| Input::Finished { worker, attempt, reply };
                        inputs.extend(reply.map(finished));
                    }
                    if entry.is_cancelled {
                        inputs.push(Input::Cancelled(id));
                    }
                }
                Some(outcome) => {
                    let (has_result, push) = (has_result(outcome), entry.pushed);
                    inputs.push(Input::Known { id, call, has_result, push });
                }
            }
        }
        inputs
    }
}

pub(crate) fn has_result(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Returned(_) | Outcome::EndOfData => true,
        Outcome::Failed(_) | Outcome::Cancelled(_) => false,
    }
}

/// A table, and a condition variable that signals its changes.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    table: Mutex<Table>,
    changed: Condvar,
}

impl Shared {
    /// Returns the table. No holder panics or waits.
    pub fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table, and wakes those who wait for it.
    pub fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let (changed, dropped) = {
            let mut table = self.lock();
            (change(&mut table), std::mem::take(&mut table.dropped))
        };
        self.changed.notify_all();
        // The workers are told.
        drop(dropped);
        changed
    }

    /// Waits until `look` finds something, but no longer than `limit`. Blocks the thread.
    pub fn wait_for<T>(
        &self,
        limit: Duration,
        mut look: impl FnMut(&mut Table) -> Option<T>,
    ) -> Option<T> {
        let begun = Instant::now();
        let mut table = self.lock();
        loop {
            if let Some(found) = look(&mut table) {
                return Some(found);
            }
            let left = limit.checked_sub(begun.elapsed())?;
            let waited = self.changed.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S000-20: checkpoints of a generation that the machine has not compared cover nothing, since the generation may lack
    /// pushes from before it.
    #[test]
    fn checkpoints_cover_a_push_only_in_a_generation_that_was_compared() {
        let mut table = Table::default();
        let scheduled = Scheduled {
            function: "steps:count".to_owned(),
            arguments: Bytes::from_static(b"1"),
            inputs: Vec::new(),
            name: None,
            worker: None,
            identity: None,
            values: Vec::new(),
        };
        let (id, _) = table.schedule(scheduled, String::new());
        let (worker, number) = (WorkerIndex(0), PushNumber(7));
        let push_in = |table: &mut Table, generation| {
            table.begun(id, worker, 1, Some(number));
            let push = Push { number, generation: Generation(generation) };
            table.settle(id, Outcome::Returned(Bytes::new()), Some(push));
        };
        let mut checkpoints = (0..).map(|it: u32| Some(it.to_string()));
        let mut covered = |table: &mut Table, generation| {
            let newest = checkpoints.next().flatten();
            let pushed = table.coverage.pushed;
            !table.covered(Generation(generation), newest, pushed).is_empty()
        };
        push_in(&mut table, 1);
        table.counted = Some(Generation(1));
        assert_eq!(table.settled_in(), Some(Generation(1)));
        assert!((0..4).all(|_| !covered(&mut table, 2)));
        table.repeats(id);
        table.counted = Some(Generation(2));
        assert_eq!(table.settled_in(), None, "its push does not count");
        assert!((0..4).all(|_| !covered(&mut table, 2)));
        push_in(&mut table, 2);
        assert_eq!(table.settled_in(), Some(Generation(2)));
        assert_eq!([(); 3].map(|()| covered(&mut table, 2)), [false, false, true]);
    }
}
