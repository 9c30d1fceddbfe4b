//! Decisions about the queues before they are committed: a ledger with uncommitted facts on top.

use std::collections::BTreeMap;

use steadfast_common::ids::{Attempt, Pass, TaskId, TrainerId};
use steadfast_common::records::{DispatchRecord, QueueRecord, TaskRecord};

use crate::ledger::{Fact, Ledger, Limits, Next, Pending, Report, Request, TaskFailures};

/// Whether a failure counts against the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribution {
    Task,
    None,
}

/// A ledger with uncommitted facts on top.
///
/// Holds only what the facts of one request can change, so the cost of a decision does not depend on the
/// size of the queues.
pub(crate) struct Draft<'a> {
    base: &'a Ledger,
    head: QueueRecord,
    /// Changed tasks; `None` means done.
    changed: BTreeMap<TaskId, Option<TaskRecord>>,
    /// Whether a new round began; of `base`, only the order is valid then.
    rolled: bool,
    pub facts: Vec<Fact>,
}

impl<'a> Draft<'a> {
    pub fn new(base: &'a Ledger) -> Self {
        Self { base, head: base.head, changed: BTreeMap::new(), rolled: false, facts: Vec::new() }
    }

    fn pending(&self, task: TaskId) -> Option<Pending> {
        match self.changed.get(&task) {
            // A request cannot report a task that it has just been given.
            Some(_) => None,
            None => self.base.pending.get(task).cloned(),
        }
    }

    fn set(&mut self, task: TaskId, record: TaskRecord) {
        self.changed.insert(task, Some(record.clone()));
        self.facts.push(Fact::Task { task, record });
    }

    pub fn report(&mut self, trainer: TrainerId, report: &Report, limits: &Limits) -> bool {
        let (task, attempt) = (report.task(), report.attempt());
        let held = self.pending(task);
        let is_current = held.is_some_and(|it| it.attempt == attempt && it.trainer == trainer);
        if !is_current {
            return false;
        }
        match report {
            Report::Finished { .. } => {
                self.changed.insert(task, None);
                self.facts.push(Fact::Done { task });
                true
            }
            Report::Failed { reason, .. } => {
                self.take_back(task, attempt, reason, Attribution::Task, limits)
            }
            Report::Returned { .. } => {
                self.take_back(task, attempt, "its trainer left", Attribution::None, limits)
            }
        }
    }

    pub fn take_back(
        &mut self,
        task: TaskId,
        attempt: Attempt,
        reason: &str,
        attribution: Attribution,
        limits: &Limits,
    ) -> bool {
        let Some(held) = self.pending(task).filter(|held| held.attempt == attempt) else {
            return false;
        };
        let failures = match attribution {
            Attribution::Task => held.failures.and(held.trainer),
            Attribution::None => held.failures,
        };
        let reason = reason.to_owned();
        let record = if attribution == Attribution::Task && failures.is_enough(limits) {
            let pass = self.head.pass;
            let record = Some(self.base.given_up.with(task, pass, &reason));
            self.facts.push(Fact::GivenUp { task, record });
            TaskRecord::Discarded { failures: failures.failures, reason }
        } else {
            failures.todo(reason)
        };
        self.set(task, record);
        true
    }

    fn count(
        &self,
        in_base: usize,
        is: impl Fn(&TaskRecord) -> bool,
        was: impl Fn(TaskId) -> bool,
    ) -> usize {
        let gone = self.changed.keys().filter(|task| was(**task)).count();
        let come = self.changed.values().flatten().filter(|record| is(record)).count();
        in_base - gone + come
    }

    fn is_drained(&self) -> bool {
        let waiting = self.count(
            self.base.retry.len(),
            |record| matches!(record, TaskRecord::Todo { .. }),
            |task| self.base.retry.contains_key(&task),
        );
        let pending = self.count(
            self.base.pending.len(),
            |record| matches!(record, TaskRecord::Pending { .. }),
            |task| self.base.pending.get(task).is_some(),
        );
        waiting + pending == 0 && self.head.cursor as usize == self.base.orders.tasks.len()
    }

    fn all_discarded(&self) -> bool {
        let discarded = self.count(
            self.base.discarded.len(),
            |record| matches!(record, TaskRecord::Discarded { .. }),
            |task| self.base.discarded.contains_key(&task),
        );
        !self.rolled && discarded == self.base.orders.tasks.len()
    }

    /// Begins the next pass once no task is waiting or pending, however the last task ended. A pass in
    /// which every task was given up stays as it is: the job has failed.
    pub fn close_pass_if_drained(&mut self, limits: &Limits) {
        let over = limits.passes <= self.head.pass.0;
        if over || self.rolled || !self.is_drained() || self.all_discarded() {
            return;
        }
        self.head = QueueRecord {
            round: self.head.round + 1,
            pass: Pass(self.head.pass.0 + 1),
            cursor: 0,
            next_attempt: self.head.next_attempt,
        };
        self.rolled = true;
        self.facts.push(Fact::Head(self.head));
    }

    pub fn dispatch(&mut self, request: &Request, counted: bool, limits: &Limits) -> Next {
        let Request { id, trainer, .. } = *request;
        if self.all_discarded() {
            return Next::AllFailed { pass: self.head.pass };
        }
        if limits.passes <= self.head.pass.0 {
            return Next::AllDone;
        }
        // The order of the next pass is known only once its head is committed.
        if self.rolled {
            return Next::NotYet;
        }
        let Some((task, failures)) = self.take_waiting(trainer) else { return Next::NotYet };
        let attempt = self.head.next_attempt;
        self.head.next_attempt = Attempt(attempt.0 + 1);
        self.facts.push(Fact::Head(self.head));
        let TaskFailures { failures, failed_by } = failures;
        let record =
            TaskRecord::Pending { failures, attempt, trainer, request: id, counted, failed_by };
        self.set(task, record);
        Next::Task(DispatchRecord { task, attempt, pass: self.head.pass })
    }

    /// Takes fresh tasks first. A task that failed before waits until all others were tried, and
    /// preferably goes to a trainer that has not failed it.
    fn take_waiting(&mut self, trainer: TrainerId) -> Option<(TaskId, TaskFailures)> {
        if let Some(task) = self.base.orders.tasks.get(self.head.cursor as usize) {
            self.head.cursor += 1;
            return Some((*task, TaskFailures::default()));
        }
        let kept = self.base.retry.iter().filter(|(task, _)| !self.changed.contains_key(task));
        let kept = kept.map(|(task, retry)| (*task, retry.failures.clone()));
        let changed = self.changed.iter().filter_map(|(task, record)| match record {
            Some(TaskRecord::Todo { failures, failed_by, .. }) => {
                Some((*task, TaskFailures { failures: *failures, failed_by: failed_by.clone() }))
            }
            Some(TaskRecord::Pending { .. } | TaskRecord::Discarded { .. }) | None => None,
        });
        let mut second = None;
        for (task, failures) in kept.chain(changed) {
            if !failures.failed_by.contains(&trainer) {
                return Some((task, failures));
            }
            second = second.or(Some((task, failures)));
        }
        second
    }
}
