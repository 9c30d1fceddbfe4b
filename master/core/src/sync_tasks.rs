//! Tasks of a synchronous job that failed or were given up.
//!
//! The rest of its queues follows from the schedule and the position of the parameters, so only these
//! are stored: failures under the round of their pass, until the pass ends or the task is given up, and
//! given-up tasks with one record per task.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::{Lane, Pass, RequestId, TaskId, TrainerId};
use steadfast_common::records::TaskRecord;
use steadfast_common::records::given_up::GivenUpRecord;

use crate::given_up::GivenUp;
use crate::ledger::{Limits, TaskFailures};

/// A durable change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureFact {
    /// A task failed and is tried again.
    Failed { pass: Pass, task: TaskId, record: TaskRecord },
    /// A task was given up in a pass; its failure record is removed.
    GivenUp { pass: Pass, task: TaskId, record: GivenUpRecord },
    /// The pass in which a task failed is over.
    Forgotten { pass: Pass, task: TaskId },
}

/// Why a task cannot be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The data are bad: no trainer can compute the task.
    Data,
    /// The data cannot be reached: a later attempt, or another trainer, may succeed.
    Transient,
}

/// A trainer's report that it cannot compute a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub id: RequestId,
    pub trainer: TrainerId,
    pub pass: Pass,
    pub task: TaskId,
    /// The lane that the task belongs to.
    pub lane: Lane,
    pub cause: Cause,
    pub reason: String,
}

/// The result of applying all facts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncTasks {
    /// Failures of tasks that are not given up.
    failed: BTreeMap<(Pass, TaskId), TaskRecord>,
    given_up: GivenUp,
    /// Given-up tasks by pass from `recent_from` on, cached from `given_up`.
    recent: BTreeMap<Pass, Arc<BTreeSet<TaskId>>>,
    /// Absent until the position is known.
    recent_from: Option<Pass>,
}

impl SyncTasks {
    /// Returns the state without failures of tasks that are not given up.
    pub fn new(given_up: GivenUp) -> Self {
        Self { given_up, ..Self::default() }
    }

    /// Processes a report that a task failed. Only data failures count: they are the same on every
    /// trainer, so a task that is given up cannot have contributed anywhere. A task is given up after
    /// more than `failures_max` of them, by two trainers if there are two. A repeated report, and a
    /// report about a task that is already given up, changes nothing.
    pub fn fail(&self, failure: &Failure, limits: &Limits) -> Option<FailureFact> {
        let (pass, task) = (failure.pass, failure.task);
        if self.given_up.contains(pass, task) {
            return None;
        }
        let before = match self.failed.get(&(pass, task)) {
            Some(TaskRecord::Todo { report, .. }) if *report == Some(failure.id) => return None,
            Some(TaskRecord::Todo { failures, failed_by, .. }) => {
                TaskFailures { failures: *failures, failed_by: failed_by.clone() }
            }
            None | Some(TaskRecord::Pending { .. } | TaskRecord::Discarded { .. }) => {
                TaskFailures::default()
            }
        };
        let (failures, is_enough) = match failure.cause {
            Cause::Data => {
                let failures = before.and(failure.trainer);
                let is_enough = failures.is_enough(limits);
                (failures, is_enough)
            }
            Cause::Transient => (before, false),
        };
        if is_enough {
            let record = self.given_up.with(task, pass, &failure.reason);
            return Some(FailureFact::GivenUp { pass, task, record });
        }
        let (reason, TaskFailures { failures, failed_by }) = (failure.reason.clone(), failures);
        let record = TaskRecord::Todo { failures, reason, report: Some(failure.id), failed_by };
        Some(FailureFact::Failed { pass, task, record })
    }

    /// Removes the failures of passes before `pass`, the current pass.
    pub fn forget_before(&self, pass: Pass) -> Vec<FailureFact> {
        let over = self.failed.range(..(pass, TaskId(0)));
        over.map(|((pass, task), _)| FailureFact::Forgotten { pass: *pass, task: *task }).collect()
    }

    /// Returns the tasks of `pass` that failed and are not given up, with the last reason.
    pub fn failing(&self, pass: Pass) -> Vec<(TaskId, String)> {
        let of_pass = self.failed.range((pass, TaskId(0))..=(pass, TaskId(u32::MAX)));
        let failing = of_pass.filter_map(|((_, task), record)| match record {
            TaskRecord::Todo { reason, .. } => Some((*task, reason.clone())),
            TaskRecord::Pending { .. } | TaskRecord::Discarded { .. } => None,
        });
        failing.collect()
    }

    pub fn given_up_in(&self, pass: Pass) -> Arc<BTreeSet<TaskId>> {
        match self.recent_from {
            Some(from) if from <= pass => self.recent.get(&pass).cloned().unwrap_or_default(),
            Some(_) | None => Arc::new(self.given_up.in_pass(pass)),
        }
    }

    /// Returns the given-up tasks that trainers need, see [`SyncTasks::follow`]. Passes without any are
    /// left out.
    pub fn given_up_recently(&self) -> &BTreeMap<Pass, Arc<BTreeSet<TaskId>>> {
        &self.recent
    }

    pub fn given_up(&self) -> &GivenUp {
        &self.given_up
    }

    /// Caches the given-up tasks from the pass before `pass` on. `pass` is a lower bound of the position:
    /// trainers may be passes ahead of it, and one of them a step, so also a pass, behind.
    pub fn follow(&mut self, pass: Pass) {
        let from = Pass(pass.0.saturating_sub(1));
        match self.recent_from {
            Some(known) if known == from => {}
            Some(known) if known < from => self.recent = self.recent.split_off(&from),
            Some(_) | None => self.recent = self.given_up.from_pass(from),
        }
        self.recent_from = Some(from);
    }

    /// Applies one committed fact to the state.
    pub fn evolve(&mut self, fact: &FailureFact) {
        match fact {
            FailureFact::Failed { pass, task, record } => {
                self.failed.insert((*pass, *task), record.clone());
            }
            FailureFact::GivenUp { pass, task, record } => {
                self.failed.remove(&(*pass, *task));
                self.given_up.set(*task, Some(record.clone()));
                if self.recent_from.is_some_and(|from| from <= *pass) {
                    Arc::make_mut(self.recent.entry(*pass).or_default()).insert(*task);
                }
            }
            FailureFact::Forgotten { pass, task } => {
                self.failed.remove(&(*pass, *task));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    /// Returns limits under which a task may fail three times.
    fn limits(trainers: u32) -> Limits {
        Limits { passes: 2, failures_max: 3, trainers, deadline_ms: 1 }
    }

    fn failure(id: u128, cause: Cause) -> Failure {
        Failure {
            id: RequestId(Uuid::from_u128(id)),
            trainer: TrainerId(Uuid::from_u128(1)),
            lane: Lane(0),
            pass: Pass(1),
            task: TaskId(7),
            cause,
            reason: "why".to_owned(),
        }
    }

    /// S004-10: with a threshold of 3, the fourth failure discards. S004-12: the next pass starts
    /// over.
    #[test]
    fn one_failure_more_than_the_threshold_gives_a_task_up_for_that_pass() {
        let mut state = SyncTasks::default();
        for number in 1..=4 {
            let fact = state.fail(&failure(number, Cause::Data), &limits(1)).unwrap();
            state.evolve(&fact);
            assert_eq!(state.given_up().contains(Pass(1), TaskId(7)), number == 4);
        }
        assert_eq!(state.fail(&failure(5, Cause::Data), &limits(1)), None);
        assert!(state.given_up_in(Pass(2)).is_empty());
        assert_eq!(state.given_up().times(), 1);
    }

    /// S004-10, F9: one trainer may fail for reasons of its own.
    #[test]
    fn where_there_are_two_trainers_one_alone_does_not_give_a_task_up() {
        let mut state = SyncTasks::default();
        for number in 1..=5 {
            let fact = state.fail(&failure(number, Cause::Data), &limits(2)).unwrap();
            state.evolve(&fact);
            assert!(!state.given_up().contains(Pass(1), TaskId(7)));
        }
        let by_another =
            Failure { trainer: TrainerId(Uuid::from_u128(2)), ..failure(6, Cause::Data) };
        state.evolve(&state.fail(&by_another, &limits(2)).unwrap());
        assert!(state.given_up().contains(Pass(1), TaskId(7)));
    }

    /// S004-27: a report that is repeated after a lost reply counts once.
    #[test]
    fn a_repeated_report_counts_once() {
        let mut state = SyncTasks::default();
        let fact = state.fail(&failure(1, Cause::Data), &limits(1)).unwrap();
        state.evolve(&fact);
        assert_eq!(state.fail(&failure(1, Cause::Data), &limits(1)), None);
    }

    /// I7: a task that one trainer cannot reach may be computed by another, so it is never given up for
    /// that. Otherwise a lane could contribute two different sums under one name.
    #[test]
    fn trouble_on_the_way_to_the_data_never_gives_a_task_up() {
        let mut state = SyncTasks::default();
        for number in 0..100 {
            if let Some(fact) = state.fail(&failure(number, Cause::Transient), &limits(1)) {
                state.evolve(&fact);
            }
        }
        assert!(!state.given_up().contains(Pass(1), TaskId(7)));
        assert_eq!(state.failing(Pass(1)).len(), 1);
    }

    /// I12: the state kept for finished passes does not grow with the number of passes.
    #[test]
    fn a_thousand_passes_that_give_the_same_task_up_leave_one_record() {
        let mut state = SyncTasks::default();
        for pass in (0..1000).map(Pass) {
            state.follow(pass);
            for number in 0..4 {
                let id = RequestId(Uuid::from_u128(u128::from(pass.0) * 10 + number));
                let failure = Failure { id, pass, ..failure(0, Cause::Data) };
                state.evolve(&state.fail(&failure, &limits(1)).unwrap());
            }
            assert_eq!(*state.given_up_in(pass), BTreeSet::from([TaskId(7)]));
            assert!(state.failed.is_empty() && state.recent.len() <= 3);
        }
        assert_eq!(state.given_up().times(), 1000);
        assert_eq!(state.given_up().records()[&TaskId(7)].passes.ranges().len(), 1);
        // After a rollback the same task is given up again, without another failure.
        state.follow(Pass(3));
        assert_eq!(*state.given_up_in(Pass(3)), BTreeSet::from([TaskId(7)]));
    }

    /// I7: a trainer that takes a lane over skips the same tasks as the one before, although a new master
    /// knows only the position of the latest checkpoint, and a trainer may be a step behind.
    #[test]
    fn tasks_given_up_passes_ahead_of_the_known_position_and_one_behind_are_published() {
        let record = |pass| GivenUpRecord::default().and(Pass(pass), "why");
        let given_up = [(TaskId(1), record(2)), (TaskId(2), record(3)), (TaskId(3), record(9))];
        let mut state = SyncTasks::new(given_up.into_iter().collect());
        let published = |state: &SyncTasks| -> Vec<u32> {
            state.given_up_recently().keys().map(|pass| pass.0).collect()
        };
        state.follow(Pass(0));
        assert_eq!(published(&state), [2, 3, 9]);
        state.follow(Pass(4));
        assert_eq!(published(&state), [3, 9]);
        state.follow(Pass(1));
        assert_eq!(published(&state), [2, 3, 9], "a rollback");
        for number in 1..=4 {
            let failure = Failure { pass: Pass(5), ..failure(number, Cause::Data) };
            state.evolve(&state.fail(&failure, &limits(1)).unwrap());
        }
        assert_eq!(published(&state), [2, 3, 5, 9]);
    }

    #[test]
    fn failures_are_forgotten_once_their_pass_is_over() {
        let mut state = SyncTasks::default();
        state.evolve(&state.fail(&failure(1, Cause::Transient), &limits(1)).unwrap());
        assert_eq!(state.forget_before(Pass(1)), []);
        let over = state.forget_before(Pass(2));
        assert_eq!(over, [FailureFact::Forgotten { pass: Pass(1), task: TaskId(7) }]);
        over.iter().for_each(|fact| state.evolve(fact));
        assert!(state.failed.is_empty());
    }
}
