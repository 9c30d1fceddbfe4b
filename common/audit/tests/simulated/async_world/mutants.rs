//! Situations in which a missing guard has an effect.

use steadfast_common::ids::TaskId;
use steadfast_common::records::DispatchRecord;
use steadfast_common::schedule::task_order;
use steadfast_master_core::ledger::QueueFact;
use steadfast_pserver_core::shard::Shard;

use super::{AsyncWorld, Mutation};
use crate::world::{load_shard, snapshot, tamper};

impl AsyncWorld {
    /// Whether a slot has not applied a task that the queues of the present pass mark as done.
    pub(super) fn lacks_something(&self, slot: usize) -> bool {
        let applied = self.shards[slot].blocks().applied();
        let pass = self.state.ledger.head().pass;
        let done = self.done();
        applied.iter().any(|counted| {
            let is_there =
                counted.passes.last().is_some_and(|applied_pass| applied_pass.pass == pass);
            is_there && done.iter().any(|task| !counted.done.contains(*task))
        })
    }

    fn done(&self) -> Vec<TaskId> {
        let queue = self.state.ledger.snapshot();
        let order = task_order(&self.manifest, self.spec.seed, queue.pass);
        let handed_out = order.into_iter().take(queue.cursor as usize);
        handed_out
            .filter(|it| !queue.open.contains_key(it) && !queue.discarded.contains_key(it))
            .collect()
    }

    /// Tries to make the missing guard have an effect.
    pub(super) fn mutate(&mut self) {
        match self.mutation {
            Some(Mutation::SilentLoss) if !self.fired => self.lose_memory(),
            Some(Mutation::NoAttemptCheck) if !self.fired => self.take_a_late_report(),
            Some(_) | None => {}
        }
    }

    fn lose_memory(&mut self) {
        let slot = self.rng.below(self.shards.len());
        let before = snapshot(&mut self.shards[slot]);
        let Some(saved) = self.saved.last() else { return };
        let slots = self.shards.len() as u32;
        let restored = load_shard(&self.spec, saved, slot as u32, slots);
        self.shards[slot] = restored;
        self.fired = self.lacks_something(slot);
        if !self.fired {
            tamper(&self.spec, &mut self.shards[slot], |snapshot| *snapshot = before);
            return;
        }
        // No lost record is in transit again.
        let pending: Vec<_> = self.state.ledger.pending().map(|(_, attempt, _)| attempt).collect();
        self.sent.clear();
        for held in self.trainers.values_mut() {
            held.take_if(|it| !pending.contains(&it.dispatch.attempt));
        }
    }

    /// A trainer of an earlier generation reports a task as done that is pending again.
    fn take_a_late_report(&mut self) {
        let pass = self.state.ledger.head().pass;
        let late: Vec<DispatchRecord> = self.late.clone();
        let Some(late) = self.rng.pick(&late).filter(|it| it.pass == pass) else { return };
        let task = late.task;
        let lacks = |shard: &Shard| {
            shard.blocks().applied().iter().any(|counted| {
                counted.passes.last().is_none_or(|applied_pass| applied_pass.pass <= pass)
                    && !counted.done.contains(task)
            })
        };
        let is_pending = self.state.ledger.pending().any(|(it, ..)| it == task);
        if !is_pending || !self.shards.iter().any(lacks) {
            return;
        }
        let round = self.state.ledger.head().round;
        self.commit(&[QueueFact::Done { round, task }]);
        self.fired = true;
        // No trainer continues with the task, and none of its records are in transit.
        self.sent.retain(|range| range.task != task || range.pass != pass);
        for held in self.trainers.values_mut() {
            if held.as_ref().is_some_and(|it| it.dispatch.task == task && it.dispatch.pass == pass)
            {
                *held = None;
            }
        }
    }
}
