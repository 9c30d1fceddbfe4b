//! Decisions about the queues before they are committed: a ledger with facts on top.

use std::collections::BTreeMap;

use steadfast_common::ids::{Attempt, Pass, TaskId, TrainerId};
use steadfast_common::records::{DispatchRecord, QueueRecord, TaskRecord};

use crate::ledger::{Blamed, Fact, Ledger, Limits, Next, Pending, Report, Request};

/// Whether a failure is held against the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    Task,
    Nobody,
}

/// A ledger with uncommitted facts on top.
///
/// Holds only what facts of one request can touch, so that a decision costs nothing of the size of
/// the queues.
pub(crate) struct Draft<'a> {
    base: &'a Ledger,
    head: QueueRecord,
    /// Changed tasks; `None` is done.
    changed: BTreeMap<TaskId, Option<TaskRecord>>,
    /// Whether a new round began, so that nothing of `base` but the order counts.
    rolled: bool,
    pub facts: Vec<Fact>,
}

impl<'a> Draft<'a> {
    pub fn new(base: &'a Ledger) -> Self {
        Self { base, head: base.head, changed: BTreeMap::new(), rolled: false, facts: Vec::new() }
    }

    fn pending(&self, task: TaskId) -> Option<Pending> {
        match self.changed.get(&task) {
            // What one request gives out is not what it reports.
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
                self.take_back(task, attempt, reason, Blame::Task, limits)
            }
            Report::Returned { .. } => {
                self.take_back(task, attempt, "its trainer left", Blame::Nobody, limits)
            }
        }
    }

    pub fn take_back(
        &mut self,
        task: TaskId,
        attempt: Attempt,
        reason: &str,
        blame: Blame,
        limits: &Limits,
    ) -> bool {
        let Some(held) = self.pending(task).filter(|held| held.attempt == attempt) else {
            return false;
        };
        let blamed = match blame {
            Blame::Task => held.blamed.and(held.trainer),
            Blame::Nobody => held.blamed,
        };
        let reason = reason.to_owned();
        let record = if blame == Blame::Task && blamed.is_enough(limits) {
            let pass = self.head.pass;
            self.facts.push(Fact::GivenUp { pass, task, reason: reason.clone() });
            TaskRecord::Discarded { failures: blamed.failures, reason }
        } else {
            blamed.todo(reason)
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

    /// Begins the next pass once nothing waits and nothing is pending, whichever way the last task
    /// ended. A pass in which every task was given up stays as it is: the job has failed.
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
        // The next pass has another order, which is known once its head is committed.
        if self.rolled {
            return Next::NotYet;
        }
        let Some((task, blamed)) = self.take_waiting(trainer) else { return Next::NotYet };
        let attempt = self.head.next_attempt;
        self.head.next_attempt = Attempt(attempt.0 + 1);
        self.facts.push(Fact::Head(self.head));
        let Blamed { failures, failed_by } = blamed;
        let record =
            TaskRecord::Pending { failures, attempt, trainer, request: id, counted, failed_by };
        self.set(task, record);
        Next::Task(DispatchRecord { task, attempt, pass: self.head.pass })
    }

    /// Fresh tasks first: one that failed before waits until the others were tried, and goes to
    /// somebody else than before if it can.
    fn take_waiting(&mut self, trainer: TrainerId) -> Option<(TaskId, Blamed)> {
        if let Some(task) = self.base.orders.tasks.get(self.head.cursor as usize) {
            self.head.cursor += 1;
            return Some((*task, Blamed::default()));
        }
        let kept = self.base.retry.iter().filter(|(task, _)| !self.changed.contains_key(task));
        let kept = kept.map(|(task, retry)| (*task, retry.blamed.clone()));
        let changed = self.changed.iter().filter_map(|(task, record)| match record {
            Some(TaskRecord::Todo { failures, failed_by, .. }) => {
                Some((*task, Blamed { failures: *failures, failed_by: failed_by.clone() }))
            }
            Some(TaskRecord::Pending { .. } | TaskRecord::Discarded { .. }) | None => None,
        });
        let mut second = None;
        for (task, blamed) in kept.chain(changed) {
            if !blamed.failed_by.contains(&trainer) {
                return Some((task, blamed));
            }
            second = second.or(Some((task, blamed)));
        }
        second
    }
}
