//! The event loop's state at one moment, for status requests and followers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::code::CodeRecord;
use steadfast_common::given_up::Discarded;
use steadfast_common::ids::{Generation, Lane, Pass, Slot, TaskId, TrainerId};
use steadfast_common::position::Position;
use steadfast_common::records::{EvaluationRecord, PserverRecord, ResultRecord, TrainerRecord};
use steadfast_common::spec::Mode;
use steadfast_common::status::{
    Queues, Recovery, Saving, SlotStatus, TimeBreakdown, TrainerStatus,
};
use steadfast_common::stream::StreamRecord;
use steadfast_master_core::saver::Stage;
use steadfast_master_core::stream::Stream;

use crate::event_loop::EventLoop;
use crate::plan_warnings;

/// The most tasks that are listed as failing.
const FAILING_MAX: usize = 16;

/// The trainers' lanes, and the tasks that were given up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignments {
    pub generation: Generation,
    /// Number of the lane assignment.
    pub number: u64,
    pub lanes: BTreeMap<TrainerId, Vec<Lane>>,
    /// Tasks given up in the current and the next pass.
    pub given_up: BTreeMap<Pass, Arc<BTreeSet<TaskId>>>,
}

/// The job's state at one moment, from which the status is rendered.
#[derive(Clone, Debug, Default)]
pub struct StatusSnapshot {
    pub generation: Generation,
    pub epoch: i64,
    pub ps_desired: Option<u32>,
    pub slots: Vec<SlotStatus>,
    pub trainers: Vec<TrainerStatus>,
    pub initialized: bool,
    /// The trainer that was elected to initialize the parameters and has not finished.
    pub initializer: Option<TrainerId>,
    pub position: Position,
    pub queues: Queues,
    pub pass: Pass,
    pub all_passes_over: bool,
    pub examples: u64,
    /// Whether this is the number of this moment, and not that of the latest checkpoint.
    pub are_examples_current: bool,
    pub loss: Option<f64>,
    pub evaluation: Option<EvaluationRecord>,
    pub checkpoint: Option<String>,
    pub recoveries: Vec<Recovery>,
    /// Number of all recoveries of this term, including those no longer listed.
    pub recoveries_count: u64,
    pub time_breakdown: TimeBreakdown,
    pub discarded: Discarded,
    /// Tasks that failed and are retried, with the last reason.
    pub failing: Vec<(TaskId, String)>,
    /// Held-out tasks that failed and are retried, with the last reason.
    pub held_out_failing: Vec<(TaskId, String)>,
    pub saving: Saving,
    /// Progress of the saver, if one is chosen.
    pub saving_stage: Option<Stage>,
    /// Descriptions of the lanes whose trainers were lost one after another.
    pub lane_suspects: Vec<String>,
    /// The passes of the stream, if the dataset is followed.
    pub stream: Option<StreamSnapshot>,
    /// The planner's warnings about the dataset.
    pub warnings: Vec<String>,
    pub result: Option<ResultRecord>,
}

/// The passes of a stream.
#[derive(Clone, Debug, Default)]
pub struct StreamSnapshot {
    pub record: StreamRecord,
    /// Records of the passes before the present one.
    pub records_before: u64,
    /// When the oldest file of the passes that are not over was written.
    pub oldest_unix_ms: Option<u64>,
    /// Tasks of passes after the present one.
    tasks_after: u32,
    /// Tasks of the present pass.
    tasks: u32,
}

impl StreamSnapshot {
    fn of(stream: &Stream, present: Pass) -> Self {
        let mut not_over = stream.passes().range(present..).map(|(pass, record)| (*pass, record));
        let files = not_over.clone().flat_map(|(_, record)| &record.files);
        let tasks = stream.pass(present).map_or(0, |it| it.tasks);
        Self {
            record: stream.record.clone(),
            records_before: stream.records_before(present),
            oldest_unix_ms: files.map(|file| file.modified_unix_ms).min(),
            tasks,
            tasks_after: not_over
                .try_fold(0_u32, |sum, (_, it)| sum.checked_add(it.tasks))
                .unwrap_or(u32::MAX)
                - tasks,
        }
    }
}

impl StatusSnapshot {
    /// Takes a snapshot of the event loop's state.
    pub fn of(event_loop: &EventLoop) -> Self {
        let state = &event_loop.state;
        let spec = &event_loop.job.record.spec;
        let generation = state.generation.as_ref();
        let from_checkpoint = generation.is_some_and(|record| record.checkpoint.is_some());
        let is_present = |number| generation.is_some_and(|record| record.generation == number);
        let init = state.init.as_ref().filter(|init| is_present(init.generation));
        let initialized = init.is_some_and(|init| init.done);
        let ps_desired = event_loop.members.desired.view().single::<u32>().ok().flatten();
        let mut snapshot = Self {
            generation: generation.map_or(Generation(0), |record| record.generation),
            epoch: event_loop.committer.epoch(),
            ps_desired,
            slots: (0..ps_desired.unwrap_or(0))
                .map(|slot| slot_status(event_loop, Slot(slot)))
                .collect(),
            trainers: trainers(event_loop),
            initialized: initialized || from_checkpoint,
            initializer: init.filter(|init| !init.done).map(|init| init.trainer),
            position: event_loop.live.position,
            evaluation: state.evaluation.clone(),
            checkpoint: state.checkpoint.clone(),
            discarded: event_loop.discarded(state),
            held_out_failing: event_loop
                .live
                .held_out
                .failing()
                .map(|(task, reason)| (task, reason.to_owned()))
                .collect(),
            saving: saving(event_loop),
            saving_stage: event_loop.live.saver.holder().map(|(_, stage)| stage),
            recoveries: event_loop.live.recoveries.past(),
            recoveries_count: event_loop.live.recoveries.count(),
            time_breakdown: event_loop.live.time_breakdowns.total(),
            warnings: warnings(event_loop),
            result: state.result.clone(),
            ..Self::default()
        };
        match spec.mode {
            Mode::Sync => snapshot.add_sync(event_loop),
            Mode::Async => snapshot.add_async(event_loop),
        }
        if spec.dataset.follow {
            let stream = StreamSnapshot::of(&state.stream, snapshot.pass);
            snapshot.queues.todo += stream.tasks_after;
            if spec.mode == Mode::Sync {
                snapshot.queues =
                    Queues { todo: stream.tasks + stream.tasks_after, ..snapshot.queues };
            }
            snapshot.stream = Some(stream);
        }
        snapshot
    }

    fn add_sync(&mut self, event_loop: &EventLoop) {
        let spec = &event_loop.job.record.spec;
        let position = event_loop.live.position;
        self.pass = position.pass;
        self.lane_suspects = event_loop.lane_suspects();
        self.failing = event_loop.state.sync_tasks.failing(position.pass);
        self.examples = position.examples;
        self.are_examples_current = event_loop.live.is_position_reported;
        self.loss = position.loss;
        self.all_passes_over = event_loop.limits.passes <= position.pass.0
            || spec.steps.is_some_and(|steps| steps <= position.version.0);
        let total = event_loop.job.tasks;
        let schedule = match &event_loop.live.schedule {
            Some((pass, schedule)) if *pass == position.pass && !self.all_passes_over => schedule,
            Some(_) | None => {
                self.queues = Queues { done: total, ..Queues::default() };
                return;
            }
        };
        let given_up = event_loop.state.sync_tasks.given_up_in(position.pass);
        let steps = position.version.0.saturating_sub(position.pass_start.0);
        let (done, pending) = schedule.progress(steps, &given_up);
        let discarded = given_up.len() as u32;
        let todo = total.saturating_sub(done + pending + discarded);
        self.queues = Queues { todo, pending, done, discarded };
    }

    fn add_async(&mut self, event_loop: &EventLoop) {
        let ledger = &event_loop.state.ledger;
        self.pass = ledger.head().pass;
        self.loss = event_loop.live.finished.loss;
        self.queues = ledger.queues();
        let failing = ledger.failing().chain(event_loop.live.unreachable(self.pass));
        let failing: BTreeMap<TaskId, &str> = failing.take(FAILING_MAX).collect();
        self.failing =
            failing.into_iter().map(|(task, reason)| (task, reason.to_owned())).collect();
        self.all_passes_over = event_loop.limits.passes <= self.pass.0;
        let total = event_loop.job.tasks;
        if self.all_passes_over {
            self.queues = Queues { done: total, ..Queues::default() };
        }
        self.examples = event_loop.examples(&event_loop.state);
        self.are_examples_current = true;
    }
}

/// Returns the warnings about the plan, about the trainers that share its tasks, and about the code of the model.
fn warnings(event_loop: &EventLoop) -> Vec<String> {
    let of_trainers = plan_warnings::of_trainers(&event_loop.job, event_loop.live.trainers_most);
    // A value that cannot be read is an error for the trainers, which write it.
    let code: Option<CodeRecord> = event_loop.members.code.view().single().ok().flatten();
    let changes = code.unwrap_or_default().changes;
    let of_code = changes.iter().map(ToString::to_string);
    event_loop.job.warnings.iter().cloned().chain(of_trainers).chain(of_code).collect()
}

fn saving(event_loop: &EventLoop) -> Saving {
    let error = event_loop.live.saver.error();
    Saving {
        trainer: event_loop.live.saver.holder().map(|(trainer, _)| trainer),
        failures: error.map_or(0, |(.., failures)| failures),
        error: error.map(|(trainer, why, _)| format!("trainer {trainer}: {why}")),
    }
}

fn slot_status(event_loop: &EventLoop, slot: Slot) -> SlotStatus {
    let view = event_loop.members.slots.view();
    let entry = view.entries.get(&event_loop.committer.keys.ps(slot));
    let record = entry.and_then(|entry| entry.json::<PserverRecord>().ok());
    SlotStatus {
        slot,
        address: record.map(|record| record.address),
        incarnation: event_loop.holders().get(&slot).copied(),
    }
}

fn trainers(event_loop: &EventLoop) -> Vec<TrainerStatus> {
    let mut tasks = BTreeMap::<TrainerId, u32>::new();
    for (_, _, holder) in event_loop.state.ledger.pending() {
        *tasks.entry(holder).or_default() += 1;
    }
    let view = event_loop.members.trainers.view();
    let bound = event_loop.job.record.spec.asynchronous.max_staleness;
    let listed = view.entries.iter().filter_map(|(key, entry)| {
        let id = event_loop.committer.keys.trainer_of(key)?;
        let record: Option<TrainerRecord> = entry.json().ok();
        Some(TrainerStatus {
            id,
            admin: record.map(|record| record.admin).unwrap_or_default(),
            lanes: match event_loop.job.record.spec.mode {
                Mode::Sync => event_loop.live.lanes.of(id),
                Mode::Async => Vec::new(),
            },
            time_breakdown: event_loop.live.time_breakdowns.of(id),
            lead: bound.map(|_| event_loop.staleness_gate.lead(id)),
            tasks: tasks.get(&id).copied().unwrap_or(0),
        })
    });
    listed.collect()
}
