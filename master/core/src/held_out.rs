//! Held-out tasks that cannot be read. Like training tasks, they are given up after enough data
//! failures; evaluation continues without them.

use std::collections::BTreeMap;

use steadfast_common::ids::{RequestId, TaskId};
use steadfast_common::records::given_up::GivenUpRecord;

use crate::ledger::{Limits, TaskFailures};
use crate::sync_tasks::{Cause, Failure};

/// Failures of held-out tasks that are not given up. In memory only: a new master starts at zero.
#[derive(Clone, Debug, Default)]
pub struct HeldOut {
    failing: BTreeMap<TaskId, Failing>,
}

#[derive(Clone, Debug)]
struct Failing {
    failures: TaskFailures,
    reason: String,
    /// The last counted report; a retry of it is not counted again.
    last: RequestId,
}

impl HeldOut {
    /// Returns the record of the task if the report gives it up. A failure to reach the data is recorded but
    /// never causes a task to be given up.
    pub fn fail(&self, failure: &Failure, limits: &Limits) -> Option<GivenUpRecord> {
        let is_enough =
            failure.cause == Cause::Data && self.failures_with(failure).is_enough(limits);
        is_enough.then(|| GivenUpRecord::held_out(&failure.reason))
    }

    pub fn evolve(&mut self, failure: &Failure) {
        let failures = self.failures_with(failure);
        let failing = Failing { failures, reason: failure.reason.clone(), last: failure.id };
        self.failing.insert(failure.task, failing);
    }

    /// Forgets the failures of a task that was given up.
    pub fn forget(&mut self, task: TaskId) {
        self.failing.remove(&task);
    }

    fn failures_with(&self, failure: &Failure) -> TaskFailures {
        let known = self.failing.get(&failure.task);
        let failures = known.map(|it| it.failures.clone()).unwrap_or_default();
        let is_repeat = known.is_some_and(|known| known.last == failure.id);
        match failure.cause {
            Cause::Data if !is_repeat => failures.and(failure.trainer),
            Cause::Data | Cause::Transient => failures,
        }
    }

    /// Returns the tasks that failed and are not given up, with the last reason.
    pub fn failing(&self) -> impl Iterator<Item = (TaskId, &str)> {
        self.failing.iter().map(|(task, failing)| (*task, failing.reason.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use steadfast_common::ids::{Lane, Pass, TrainerId};
    use uuid::Uuid;

    use super::*;

    fn failure(id: u128, trainer: u128, cause: Cause) -> Failure {
        Failure {
            id: RequestId(Uuid::from_u128(id)),
            trainer: TrainerId(Uuid::from_u128(trainer)),
            pass: Pass(0),
            task: TaskId(7),
            lane: Lane(0),
            cause,
            reason: "record 3 is bad".to_owned(),
        }
    }

    fn limits(trainers: u32) -> Limits {
        Limits { passes: 1, failures_max: 1, trainers, deadline_ms: 1 }
    }

    fn fail(held_out: &mut HeldOut, failure: &Failure, limits: &Limits) -> Option<GivenUpRecord> {
        let record = held_out.fail(failure, limits);
        held_out.evolve(failure);
        if record.is_some() {
            held_out.forget(failure.task);
        }
        record
    }

    /// S004-10, I12
    #[test]
    fn bad_data_of_a_held_out_task_give_it_up_after_enough_failures() {
        let mut alone = HeldOut::default();
        assert_eq!(fail(&mut alone, &failure(1, 1, Cause::Data), &limits(1)), None);
        assert_eq!(alone.failing().collect::<Vec<_>>(), [(TaskId(7), "record 3 is bad")]);
        let record = fail(&mut alone, &failure(2, 1, Cause::Data), &limits(1));
        assert_eq!(record, Some(GivenUpRecord::held_out("record 3 is bad")));
        assert_eq!(alone.failing().count(), 0);
    }

    #[test]
    fn of_two_trainers_both_have_to_fail_or_one_of_them_often() {
        let mut both = HeldOut::default();
        let by = |trainer, id| failure(id, trainer, Cause::Data);
        assert_eq!(fail(&mut both, &by(1, 1), &limits(2)), None);
        assert_eq!(fail(&mut both, &by(1, 2), &limits(2)), None);
        assert!(fail(&mut both, &by(2, 3), &limits(2)).is_some());
        let mut one = HeldOut::default();
        let given_up = (0..9).position(|id| fail(&mut one, &by(1, id), &limits(2)).is_some());
        assert_eq!(given_up, Some(3));
    }

    /// Both reports of a batch are decided before either is recorded.
    #[test]
    fn two_failures_of_one_batch_both_count() {
        let mut held_out = HeldOut::default();
        let by = |trainer, id| failure(id, trainer, Cause::Data);
        let limits = Limits { failures_max: 0, ..limits(2) };
        for failure in [by(1, 1), by(2, 2)] {
            assert_eq!(HeldOut::default().fail(&failure, &limits), None);
            held_out.evolve(&failure);
        }
        assert!(held_out.fail(&by(1, 3), &limits).is_some());
    }

    #[test]
    fn trouble_on_the_way_and_repeated_reports_do_not_count() {
        let mut held_out = HeldOut::default();
        for id in 0..9 {
            assert_eq!(fail(&mut held_out, &failure(id, 1, Cause::Transient), &limits(1)), None);
        }
        for _ in 0..9 {
            assert_eq!(fail(&mut held_out, &failure(10, 1, Cause::Data), &limits(1)), None);
        }
        assert!(fail(&mut held_out, &failure(11, 1, Cause::Data), &limits(1)).is_some());
    }
}
