//! Tasks of a synchronous job that failed or were given up.
//!
//! Everything else about its queues follows from the schedule and the position of the parameters,
//! so only these are stored.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{Lane, Pass, RequestId, TaskId, TrainerId};
use steadfast_common::records::{DiscardedTask, TaskRecord};

use crate::ledger::{Blamed, Limits};

/// A durable change: the task's record in the round of its pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    pub pass: Pass,
    pub task: TaskId,
    pub record: TaskRecord,
}

/// What keeps a task from being computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The data: nobody can compute the task.
    Data,
    /// The way to the data: it may work later, or elsewhere.
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

/// The fold of all facts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncTasks {
    tasks: BTreeMap<(Pass, TaskId), TaskRecord>,
}

impl SyncTasks {
    /// Builds the state from what etcd holds.
    pub fn recover(facts: impl IntoIterator<Item = Fact>) -> Self {
        let mut state = Self::default();
        facts.into_iter().for_each(|fact| state.evolve(&fact));
        state
    }

    /// Takes a report that `task` failed. Only failures of the data count: everybody meets those
    /// alike, so a task that is given up cannot have contributed anywhere. Enough of them give the
    /// task up: more than `failures_max`, and by two trainers where there are two. A repeated
    /// report, and one of a task that is given up already, changes nothing.
    pub fn fail(&self, failure: &Failure, limits: &Limits) -> Option<Fact> {
        let before = match self.tasks.get(&(failure.pass, failure.task)) {
            None | Some(TaskRecord::Pending { .. }) => Blamed::default(),
            Some(TaskRecord::Todo { report, .. }) if *report == Some(failure.id) => return None,
            Some(TaskRecord::Todo { failures, failed_by, .. }) => {
                Blamed { failures: *failures, failed_by: failed_by.clone() }
            }
            Some(TaskRecord::Discarded { .. }) => return None,
        };
        let (blamed, is_enough) = match failure.cause {
            Cause::Data => {
                let blamed = before.and(failure.trainer);
                let is_enough = blamed.is_enough(limits);
                (blamed, is_enough)
            }
            Cause::Transient => (before, false),
        };
        let (reason, Blamed { failures, failed_by }) = (failure.reason.clone(), blamed);
        let record = match is_enough {
            true => TaskRecord::Discarded { failures, reason },
            false => TaskRecord::Todo { failures, reason, report: Some(failure.id), failed_by },
        };
        Some(Fact { pass: failure.pass, task: failure.task, record })
    }

    /// Tasks of `pass` that failed and are not given up, with the last reason.
    pub fn troubled(&self, pass: Pass) -> Vec<(TaskId, String)> {
        let of_pass = self.tasks.range((pass, TaskId(0))..=(pass, TaskId(u32::MAX)));
        let troubled = of_pass.filter_map(|((_, task), record)| match record {
            TaskRecord::Todo { reason, .. } => Some((*task, reason.clone())),
            TaskRecord::Pending { .. } | TaskRecord::Discarded { .. } => None,
        });
        troubled.collect()
    }

    /// Whether `task` is given up in `pass`.
    pub fn is_given_up(&self, pass: Pass, task: TaskId) -> bool {
        matches!(self.tasks.get(&(pass, task)), Some(TaskRecord::Discarded { .. }))
    }

    /// Tasks given up in `pass`.
    pub fn given_up(&self, pass: Pass) -> BTreeSet<TaskId> {
        let of_pass = self.tasks.range((pass, TaskId(0))..=(pass, TaskId(u32::MAX)));
        let given_up = of_pass.filter(|(_, record)| matches!(record, TaskRecord::Discarded { .. }));
        given_up.map(|((_, task), _)| *task).collect()
    }

    /// All passes in which a task was given up.
    pub fn passes(&self) -> BTreeSet<Pass> {
        self.tasks.keys().map(|(pass, _)| *pass).collect()
    }

    /// All tasks given up, for the user's eyes.
    pub fn discarded(&self) -> Vec<DiscardedTask> {
        let listed = self.tasks.iter().filter_map(|((pass, task), record)| match record {
            TaskRecord::Discarded { reason, .. } => {
                let (reason, records) = (reason.clone(), Vec::new());
                Some(DiscardedTask { pass: *pass, task: *task, reason, records })
            }
            TaskRecord::Todo { .. } | TaskRecord::Pending { .. } => None,
        });
        listed.collect()
    }

    /// Folds one committed fact into the state.
    pub fn evolve(&mut self, fact: &Fact) {
        self.tasks.insert((fact.pass, fact.task), fact.record.clone());
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    /// Three failures are forgiven.
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
            assert_eq!(state.is_given_up(Pass(1), TaskId(7)), number == 4);
        }
        assert_eq!(state.fail(&failure(5, Cause::Data), &limits(1)), None);
        assert!(state.given_up(Pass(2)).is_empty());
        assert_eq!(state.discarded().len(), 1);
    }

    /// S004-10, F9: one trainer may fail for reasons of its own.
    #[test]
    fn where_there_are_two_trainers_one_alone_does_not_give_a_task_up() {
        let mut state = SyncTasks::default();
        for number in 1..=5 {
            let fact = state.fail(&failure(number, Cause::Data), &limits(2)).unwrap();
            state.evolve(&fact);
            assert!(!state.is_given_up(Pass(1), TaskId(7)));
        }
        let by_another =
            Failure { trainer: TrainerId(Uuid::from_u128(2)), ..failure(6, Cause::Data) };
        state.evolve(&state.fail(&by_another, &limits(2)).unwrap());
        assert!(state.is_given_up(Pass(1), TaskId(7)));
    }

    /// S004-27: a report that is repeated after a lost reply counts once.
    #[test]
    fn a_repeated_report_counts_once() {
        let mut state = SyncTasks::default();
        let fact = state.fail(&failure(1, Cause::Data), &limits(1)).unwrap();
        state.evolve(&fact);
        assert_eq!(state.fail(&failure(1, Cause::Data), &limits(1)), None);
    }

    /// I7: a task that one trainer cannot reach may be computed by another, so it is never given
    /// up for that; or a lane would contribute two different things under one name.
    #[test]
    fn trouble_on_the_way_to_the_data_never_gives_a_task_up() {
        let mut state = SyncTasks::default();
        for number in 0..100 {
            if let Some(fact) = state.fail(&failure(number, Cause::Transient), &limits(1)) {
                state.evolve(&fact);
            }
        }
        assert!(!state.is_given_up(Pass(1), TaskId(7)));
        assert_eq!(state.troubled(Pass(1)).len(), 1);
    }
}
