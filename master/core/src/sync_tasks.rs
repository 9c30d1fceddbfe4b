//! Tasks of a synchronous job that failed or were given up.
//!
//! Everything else about its queues follows from the schedule and the position of the parameters,
//! so only these are stored.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::records::{DiscardedTask, TaskRecord};

/// A durable change: the task's record in the round of its pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    pub pass: Pass,
    pub task: TaskId,
    pub record: TaskRecord,
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

    /// Counts a failure of `task`; one more than `failures_max` gives it up. A task that is given
    /// up already stays so.
    pub fn fail(
        &self,
        pass: Pass,
        task: TaskId,
        reason: &str,
        failures_max: u32,
    ) -> Option<Fact> {
        let failures = match self.tasks.get(&(pass, task)) {
            None | Some(TaskRecord::Pending { .. }) => 1,
            Some(TaskRecord::Todo { failures, .. }) => failures + 1,
            Some(TaskRecord::Discarded { .. }) => return None,
        };
        let reason = reason.to_owned();
        let record = if failures_max < failures {
            TaskRecord::Discarded { failures, reason }
        } else {
            TaskRecord::Todo { failures, reason }
        };
        Some(Fact { pass, task, record })
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
                Some(DiscardedTask { pass: *pass, task: *task, reason: reason.clone() })
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
    use super::*;

    /// S004-10: with a threshold of 3, the fourth failure discards. S004-12: the next pass starts
    /// over.
    #[test]
    fn one_failure_more_than_the_threshold_gives_a_task_up_for_that_pass() {
        let mut state = SyncTasks::default();
        for failure in 1..=4 {
            let fact = state.fail(Pass(1), TaskId(7), "bad record", 3).unwrap();
            state.evolve(&fact);
            assert_eq!(state.is_given_up(Pass(1), TaskId(7)), failure == 4);
        }
        assert_eq!(state.fail(Pass(1), TaskId(7), "late", 3), None);
        assert!(state.given_up(Pass(2)).is_empty());
        assert_eq!(state.discarded().len(), 1);
    }
}
