//! How missing guards come to matter.

use steadfast_common::ids::TaskId;
use steadfast_common::records::DispatchRecord;
use steadfast_common::schedule::task_order;
use steadfast_master_core::ledger::Fact;
use steadfast_pserver_core::shard::Shard;

use super::{Mutation, World};
use crate::world::{load_shard, tamper};

impl World {
    /// Whether a slot has not counted a task that the queues of the present pass call done.
    pub(super) fn lacks_something(&self, slot: usize) -> bool {
        let cut = self.shards[slot].cut();
        let pass = self.ledger.head().pass;
        let done = self.done();
        cut.counts.iter().any(|counted| {
            let is_there = counted.passes.last().is_some_and(|tally| tally.pass == pass);
            is_there && done.iter().any(|task| !counted.done.contains(*task))
        })
    }

    fn done(&self) -> Vec<TaskId> {
        let queue = self.ledger.snapshot();
        let order = task_order(&self.manifest, self.spec.seed, queue.pass);
        let handed_out = order.into_iter().take(queue.cursor as usize);
        handed_out
            .filter(|it| !queue.open.contains_key(it) && !queue.discarded.contains_key(it))
            .collect()
    }

    /// Tries to let the missing guard matter.
    pub(super) fn mutate(&mut self) {
        match self.mutation {
            Some(Mutation::SilentLoss) if !self.fired => self.forget_silently(),
            Some(Mutation::NoAttemptCheck) if !self.fired => self.take_a_late_report(),
            Some(_) | None => {}
        }
    }

    fn forget_silently(&mut self) {
        let slot = self.dice.roll(self.shards.len());
        let before = self.shards[slot].cut();
        let Some(saved) = self.saved.last() else { return };
        let slots = self.shards.len() as u32;
        let forgetful = load_shard(&self.spec, &saved.position, &saved.cuts, slot as u32, slots);
        self.shards[slot] = forgetful;
        self.fired = self.lacks_something(slot);
        if !self.fired {
            tamper(&self.spec, &mut self.shards[slot], |cut| *cut = before);
            return;
        }
        // Nothing of what it forgot is on its way again.
        let pending: Vec<_> = self.ledger.pending().map(|(_, attempt, _)| attempt).collect();
        self.sent.clear();
        for held in self.trainers.values_mut() {
            held.take_if(|it| !pending.contains(&it.dispatch.attempt));
        }
    }

    /// A task that is pending again is called done by the trainer that had it in another generation.
    fn take_a_late_report(&mut self) {
        let pass = self.ledger.head().pass;
        let late: Vec<DispatchRecord> = self.late.clone();
        let Some(late) = self.dice.pick(&late).filter(|it| it.pass == pass) else { return };
        let task = late.task;
        let lacks = |shard: &Shard| {
            shard.cut().counts.iter().any(|counted| {
                counted.passes.last().is_none_or(|tally| tally.pass <= pass)
                    && !counted.done.contains(task)
            })
        };
        let is_pending = self.ledger.pending().any(|(it, ..)| it == task);
        if !is_pending || !self.shards.iter().any(lacks) {
            return;
        }
        self.commit(&[Fact::Done { task }]);
        self.fired = true;
        // Nobody goes on with it, and nothing of it is on its way any more.
        self.sent.retain(|piece| piece.task != task || piece.pass != pass);
        for held in self.trainers.values_mut() {
            if held.as_ref().is_some_and(|it| it.dispatch.task == task && it.dispatch.pass == pass)
            {
                *held = None;
            }
        }
    }
}
