//! What the loop shows to those who ask.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{Generation, Lane, Pass, Slot, TaskId, TrainerId};
use steadfast_common::records::{
    DiscardedTask, EvaluationRecord, PserverRecord, ResultRecord, TrainerRecord,
};
use steadfast_common::spec::Mode;
use steadfast_common::status::{Queues, Recovery, SlotStatus, Spent, TrainerStatus};

use crate::desk::Desk;
use crate::office::Position;

/// Who computes which lane, and which tasks were given up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Board {
    pub generation: Generation,
    /// The number of the lanes' assignment.
    pub number: u64,
    pub lanes: BTreeMap<TrainerId, Vec<Lane>>,
    pub given_up: BTreeMap<Pass, BTreeSet<TaskId>>,
}

/// The rest of a job's state, for the status.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub generation: Generation,
    pub epoch: i64,
    pub ps_desired: Option<u32>,
    pub slots: Vec<SlotStatus>,
    pub trainers: Vec<TrainerStatus>,
    pub initialised: bool,
    pub position: Position,
    pub queues: Queues,
    pub pass: Pass,
    pub all_passes_over: bool,
    pub examples: u64,
    pub loss: Option<f64>,
    pub evaluation: Option<EvaluationRecord>,
    pub checkpoint: Option<String>,
    pub recoveries: Vec<Recovery>,
    /// Those that are not remembered any more included.
    pub recoveries_count: u64,
    pub spent: Spent,
    pub discarded: Vec<DiscardedTask>,
    /// Tasks that failed and are tried again, with the last reason.
    pub troubled: Vec<(TaskId, String)>,
    pub result: Option<ResultRecord>,
}

impl Facts {
    /// Looks over the desk.
    pub fn of(desk: &Desk) -> Self {
        let state = &desk.state;
        let spec = &desk.job.record.spec;
        let generation = state.generation.as_ref();
        let from_checkpoint = generation.is_some_and(|record| record.checkpoint.is_some());
        let initialised = state.init.as_ref().is_some_and(|init| {
            init.done && generation.is_some_and(|record| record.generation == init.generation)
        });
        let ps_desired = desk.desired.view().single::<u32>().ok().flatten();
        let mut facts = Self {
            generation: generation.map_or(Generation(0), |record| record.generation),
            epoch: desk.reign.epoch(),
            ps_desired,
            slots: (0..ps_desired.unwrap_or(0)).map(|slot| slot_status(desk, Slot(slot))).collect(),
            trainers: trainers(desk),
            initialised: initialised || from_checkpoint,
            position: desk.position,
            evaluation: state.evaluation.clone(),
            checkpoint: state.checkpoint.clone(),
            discarded: desk.discarded(state),
            recoveries: desk.recoveries.past(),
            recoveries_count: desk.recoveries.count(),
            spent: desk.spendings.total(),
            result: state.result.clone(),
            ..Self::default()
        };
        match spec.mode {
            Mode::Sync => facts.add_sync(desk),
            Mode::Async => facts.add_async(desk),
        }
        facts
    }

    fn add_sync(&mut self, desk: &Desk) {
        let spec = &desk.job.record.spec;
        let position = desk.position;
        self.pass = position.pass;
        self.troubled = desk.state.sync_tasks.troubled(position.pass);
        self.examples = position.examples;
        self.loss = position.loss;
        self.all_passes_over = spec.passes.is_some_and(|passes| passes <= position.pass.0)
            || spec.steps.is_some_and(|steps| steps <= position.version.0);
        let total = desk.job.tasks;
        let schedule = match &desk.schedule {
            Some((pass, schedule)) if *pass == position.pass && !self.all_passes_over => schedule,
            Some(_) | None => {
                self.queues = Queues { done: total, ..Queues::default() };
                return;
            }
        };
        let given_up = desk.state.sync_tasks.given_up(position.pass);
        let steps = position.version.0.saturating_sub(position.pass_start.0);
        let (done, pending) = schedule.progress(steps, &given_up);
        let discarded = given_up.len() as u32;
        let todo = total.saturating_sub(done + pending + discarded);
        self.queues = Queues { todo, pending, done, discarded };
    }

    fn add_async(&mut self, desk: &Desk) {
        let ledger = &desk.state.ledger;
        self.pass = ledger.head().pass;
        self.loss = desk.finished.loss;
        self.queues = ledger.queues();
        self.all_passes_over = desk.limits.passes <= self.pass.0;
        let total = desk.job.tasks;
        if self.all_passes_over {
            self.queues = Queues { done: total, ..Queues::default() };
        }
        // Tasks are of nearly one size, so the count of finished ones tells the records.
        let records = desk.job.records;
        let done = u64::from(self.queues.done) * records / u64::from(total.max(1));
        let passes = u64::from(self.pass.0);
        self.examples =
            if self.all_passes_over { passes * records } else { passes * records + done };
    }
}

fn slot_status(desk: &Desk, slot: Slot) -> SlotStatus {
    let view = desk.slots.view();
    let entry = view.entries.get(&desk.keys.ps(slot));
    let record = entry.and_then(|entry| entry.json::<PserverRecord>().ok());
    SlotStatus {
        slot,
        address: record.map(|record| record.address),
        incarnation: desk.holder(slot).map(|holder| holder.incarnation),
    }
}

fn trainers(desk: &Desk) -> Vec<TrainerStatus> {
    let mut tasks = BTreeMap::<TrainerId, u32>::new();
    for (_, _, holder) in desk.state.ledger.pending() {
        *tasks.entry(holder).or_default() += 1;
    }
    let view = desk.trainers.view();
    let bound = desk.job.record.spec.asynchronous.max_staleness;
    let listed = view.entries.iter().filter_map(|(key, entry)| {
        let id = desk.keys.trainer_of(key)?;
        let record: Option<TrainerRecord> = entry.json().ok();
        Some(TrainerStatus {
            id,
            admin: record.map(|record| record.admin).unwrap_or_default(),
            lanes: match desk.job.record.spec.mode {
                Mode::Sync => desk.lanes.of(id),
                Mode::Async => Vec::new(),
            },
            spent: desk.spendings.of(id),
            lead: bound.map(|_| desk.clocks.lead(id)),
            tasks: tasks.get(&id).copied().unwrap_or(0),
        })
    });
    listed.collect()
}
