//! Pending tasks, indexed by task and by trainer: a job has many of both, and each request concerns one.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{TaskId, TrainerId};

use crate::ledger::Pending;

/// The pending tasks. `of_trainer` contains exactly the tasks of `of_task`, each under its holder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    of_task: BTreeMap<TaskId, Pending>,
    of_trainer: BTreeMap<TrainerId, BTreeSet<TaskId>>,
}

impl Holdings {
    pub(crate) fn insert(&mut self, task: TaskId, pending: Pending) {
        self.remove(task);
        self.of_trainer.entry(pending.trainer).or_default().insert(task);
        self.of_task.insert(task, pending);
    }

    pub(crate) fn remove(&mut self, task: TaskId) {
        let Some(Pending { trainer, .. }) = self.of_task.remove(&task) else { return };
        let Some(held) = self.of_trainer.get_mut(&trainer) else { return };
        held.remove(&task);
        if held.is_empty() {
            self.of_trainer.remove(&trainer);
        }
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn get(&self, task: TaskId) -> Option<&Pending> {
        self.of_task.get(&task)
    }

    pub(crate) fn len(&self) -> usize {
        self.of_task.len()
    }

    /// Returns all pending tasks, by task.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TaskId, &Pending)> {
        self.of_task.iter().map(|(task, pending)| (*task, pending))
    }

    /// Returns the pending tasks of one trainer, by task.
    pub(crate) fn of(&self, trainer: TrainerId) -> impl Iterator<Item = (TaskId, &Pending)> {
        let held = self.of_trainer.get(&trainer).into_iter().flatten();
        held.filter_map(|task| Some((*task, self.get(*task)?)))
    }

    pub(crate) fn holders(&self) -> impl Iterator<Item = TrainerId> {
        self.of_trainer.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use steadfast_common::ids::{Attempt, RequestId};
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_task_is_found_under_its_present_holder_alone() {
        let trainer = |id| TrainerId(Uuid::from_u128(id));
        let pending = |id, attempt| Pending {
            failures: Default::default(),
            attempt: Attempt(attempt),
            trainer: trainer(id),
            request: RequestId(Uuid::from_u128(u128::from(attempt))),
            accepted: false,
            backs_up: None,
        };
        let of = |holdings: &Holdings, id| {
            holdings.of(trainer(id)).map(|(task, _)| task.0).collect::<Vec<_>>()
        };
        let mut holdings = Holdings::default();
        for (task, id) in [(3, 1), (1, 1), (2, 2)] {
            holdings.insert(TaskId(task), pending(id, 0));
        }
        assert_eq!((of(&holdings, 1), of(&holdings, 2)), (vec![1, 3], vec![2]));
        holdings.insert(TaskId(3), pending(2, 1));
        assert_eq!((of(&holdings, 1), of(&holdings, 2)), (vec![1], vec![2, 3]));
        holdings.remove(TaskId(1));
        holdings.remove(TaskId(7));
        assert_eq!(holdings.holders().collect::<Vec<_>>(), [trainer(2)]);
        assert_eq!((holdings.len(), holdings.iter().count()), (2, 2));
        holdings.clear();
        assert_eq!(holdings, Holdings::default());
    }
}
