//! The status of a job, as far as its event loop determines it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::{Generation, Lane, Pass, Slot, TaskId, TrainerId};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::stream::StreamRecord;
use steadfast_common::records::{GenerationRecord, JobOutcome, PserverRecord, TrainerRecord};
use steadfast_common::status::{
    JobPhase, JobStatus, MasterStatus, Queues, Saving, SlotStatus, TrainerStatus, Wait,
};
use steadfast_master_core::saver::Stage;
use steadfast_master_core::stream::Stream;

use crate::event_loop::machine::TrainingJob;
use crate::plan_warnings;
use crate::scaling::speeds_status;

/// The most tasks that are listed as failing.
const FAILING_MAX: usize = 16;

/// The trainers' lanes, and the tasks that were given up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignments {
    pub generation: Generation,
    /// Number of the lane assignment.
    pub number: u64,
    pub lanes: BTreeMap<TrainerId, Vec<Lane>>,
    /// Lanes that lost trainers one after another at the present step.
    pub suspected: BTreeSet<Lane>,
    /// Whether trainers that evaluate were lost one after another.
    pub evaluation_is_suspected: bool,
    /// Tasks given up in the current and the next pass.
    pub given_up: BTreeMap<Pass, Arc<BTreeSet<TaskId>>>,
}

/// The job's state at one moment.
#[derive(Clone, Debug, Default)]
pub struct StatusSnapshot {
    /// The status, as far as the event loop determines it.
    pub status: JobStatus,
    /// Whether the number of examples is that of this moment, and not that of the latest checkpoint.
    pub are_examples_current: bool,
    /// The passes of the stream, if the dataset is followed.
    pub stream: Option<StreamSnapshot>,
}

/// What the phase and the waits of a job depend on, beside its status.
#[derive(Clone, Debug, Default)]
struct Details {
    ps_desired: Option<u32>,
    initialized: bool,
    /// The trainer that was elected to initialize the parameters and has not finished.
    initializer: Option<TrainerId>,
    all_passes_over: bool,
    /// Tasks that failed and are retried, with the last reason.
    failing: Vec<(TaskId, String)>,
    /// Progress of the saver, if one is chosen.
    saving_stage: Option<Stage>,
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
    pub fn of(event_loop: &TrainingJob) -> Self {
        let state = &event_loop.state;
        let spec = &event_loop.job.record.spec;
        let generation = state.generation.as_ref();
        let has_values = generation.is_some_and(GenerationRecord::has_values);
        let is_present = |number| generation.is_some_and(|record| record.generation == number);
        let init = state.init.as_ref().filter(|init| is_present(init.generation));
        let initialized = init.is_some_and(|init| init.done);
        let ps_desired = event_loop.members.views.desired;
        let mut snapshot = Self {
            status: JobStatus {
                job: spec.name.clone(),
                mode: spec.mode,
                passes: Some(event_loop.limits.passes).filter(|it| *it != u32::MAX).or(spec.passes),
                steps: spec.steps,
                generation: generation.map_or(Generation(0), |record| record.generation),
                version: event_loop.live.position.version,
                master: MasterStatus { address: String::new(), epoch: event_loop.epoch },
                ps_desired: ps_desired.unwrap_or(0),
                warm_spares: spec.warm_spares,
                slots: (0..ps_desired.unwrap_or(0))
                    .map(|slot| slot_status(event_loop, Slot(slot)))
                    .collect(),
                trainers: trainers(event_loop),
                scale: event_loop.live.scaling.status(state.scale.as_ref()),
                speeds: speeds_status(&event_loop.live.speeds),
                evaluation: state.evaluation.clone(),
                checkpoint: state.checkpoint.clone(),
                discarded: event_loop.discarded(state),
                saving: saving(event_loop),
                recoveries: event_loop.live.recoveries.past(),
                recoveries_count: event_loop.live.recoveries.count(),
                lead_max: event_loop.staleness_gate.largest_lead(),
                lead_bound: spec.asynchronous.max_staleness,
                time_breakdown: event_loop.live.time_breakdowns.total(),
                warnings: warnings(event_loop),
                result: state.result.clone(),
                ..JobStatus::default()
            },
            are_examples_current: false,
            stream: None,
        };
        let mut details = Details {
            ps_desired,
            initialized: initialized || has_values,
            initializer: init.filter(|init| !init.done).map(|init| init.trainer),
            saving_stage: event_loop.live.saver.holder().map(|(_, stage)| stage),
            ..Details::default()
        };
        match spec.mode {
            Mode::Sync => snapshot.add_sync(event_loop, &mut details),
            Mode::Async => snapshot.add_async(event_loop, &mut details),
        }
        if spec.dataset.follow {
            let stream = StreamSnapshot::of(&state.stream, snapshot.status.pass);
            let queues = &mut snapshot.status.queues;
            queues.todo += stream.tasks_after;
            if spec.mode == Mode::Sync {
                queues.todo = stream.tasks + stream.tasks_after;
            }
            snapshot.stream = Some(stream);
        }
        snapshot.status.state = phase(&snapshot.status, &details);
        snapshot.status.waits = waits(event_loop, &snapshot.status, &details);
        snapshot
    }

    fn add_sync(&mut self, event_loop: &TrainingJob, details: &mut Details) {
        let spec = &event_loop.job.record.spec;
        let position = event_loop.live.position;
        let status = &mut self.status;
        status.pass = position.pass;
        status.examples = position.examples;
        status.loss = position.loss;
        self.are_examples_current = event_loop.live.is_position_reported;
        details.failing = event_loop.state.sync_tasks.failing(position.pass);
        let course = event_loop.state.course();
        details.all_passes_over = event_loop.limits.passes <= position.pass.0
            || spec.steps.is_some_and(|steps| steps <= position.version.0)
            || course.is_some_and(|course| course.is_over(&position));
        let total = event_loop.job.tasks;
        let schedule = match &event_loop.live.schedule {
            Some((pass, schedule)) if *pass == position.pass && !details.all_passes_over => {
                schedule
            }
            Some(_) | None => {
                status.queues = Queues { done: total, ..Queues::default() };
                return;
            }
        };
        let given_up = event_loop.state.sync_tasks.given_up_in(position.pass);
        let steps = position.version.0.saturating_sub(position.pass_start.0);
        let (done, pending) = schedule.progress(steps, &given_up);
        let discarded = given_up.len() as u32;
        let todo = total.saturating_sub(done + pending + discarded);
        status.queues = Queues { todo, pending, done, discarded };
    }

    fn add_async(&mut self, event_loop: &TrainingJob, details: &mut Details) {
        let ledger = &event_loop.state.ledger;
        let status = &mut self.status;
        status.pass = ledger.head().pass;
        status.loss = event_loop.live.finished.loss;
        status.queues = ledger.queues();
        status.examples = event_loop.examples(&event_loop.state);
        self.are_examples_current = true;
        let failing = ledger.failing().chain(event_loop.live.unreachable(status.pass));
        let failing: BTreeMap<TaskId, &str> = failing.take(FAILING_MAX).collect();
        details.failing =
            failing.into_iter().map(|(task, reason)| (task, reason.to_owned())).collect();
        details.all_passes_over = event_loop.limits.passes <= status.pass.0;
        if details.all_passes_over {
            status.queues = Queues { done: event_loop.job.tasks, ..Queues::default() };
        }
    }
}

fn phase(status: &JobStatus, details: &Details) -> JobPhase {
    match &status.result {
        Some(result) => match result.state {
            JobOutcome::Finished => JobPhase::Finished,
            JobOutcome::Failed => JobPhase::Failed,
        },
        None if status.slots.iter().any(|slot| slot.address.is_none()) => JobPhase::Waiting,
        None if status.slots.is_empty() || status.trainers.is_empty() => JobPhase::Waiting,
        None if !details.initialized => JobPhase::Starting,
        None if details.saving_stage == Some(Stage::Evaluating) => JobPhase::Evaluating,
        None if details.saving_stage.is_some() || details.all_passes_over => JobPhase::Saving,
        None => JobPhase::Training,
    }
}

/// Returns which processes wait for which, and why.
fn waits(event_loop: &TrainingJob, status: &JobStatus, details: &Details) -> Vec<Wait> {
    let mut waits = Vec::new();
    if status.result.is_some() {
        return waits;
    }
    match details.ps_desired {
        None => waits.push(Wait::of_job("", "pservers wait for the key `ps_desired`")),
        Some(0) => waits.push(Wait::of_job("", "`ps_desired` is 0: the job has no slots")),
        Some(_) => {}
    }
    for slot in status.slots.iter().filter(|slot| slot.address.is_none()) {
        let name = format!("slot {}", slot.slot);
        waits.push(Wait::of_job(&name, format!("{name} has no pserver")));
    }
    let left_out = event_loop.members.left_out().into_iter();
    waits.extend(left_out.map(|why| Wait::of_job("", why)));
    if status.trainers.is_empty() {
        let why = match event_loop.job.record.spec.model.has_closures() {
            true => "no program with a coordinator runs",
            false => "no trainer is registered",
        };
        waits.push(Wait::of_job("", why));
    }
    if waits.is_empty() && !details.initialized {
        let who = details.initializer.map(|it| format!("trainer {it}"));
        let why = format!(
            "trainers wait for {} to initialize the parameters",
            who.as_deref().unwrap_or("one of them")
        );
        waits.push(Wait::of_job(who.unwrap_or_default(), why));
    }
    if status.mode == Mode::Sync {
        waits.extend(event_loop.lane_suspects().into_iter().map(|why| Wait::of_job("", why)));
    }
    waits.extend(details.failing.iter().map(|(task, reason)| {
        let why =
            format!("the pass may wait for task {task}, which could not be computed: {reason}");
        Wait::of_job("", why)
    }));
    let evaluates = details.saving_stage != Some(Stage::Writing);
    let failing = event_loop.live.held_out.failing().filter(|_| evaluates);
    waits.extend(failing.map(|(task, reason)| {
        let why = format!("evaluation may wait for held-out task {task}, which failed: {reason}");
        Wait::of_job("", why)
    }));
    if let Some(error) = &status.saving.error {
        let failures = status.saving.failures;
        let why =
            format!("the model is not saved after {failures} failed attempts; last error: {error}");
        waits.push(Wait::of_job("", why));
    }
    if status.mode == Mode::Async && status.queues.todo == 0 && 0 < status.queues.pending {
        let pending = status.queues.pending;
        let why = format!("the end of the pass waits for {pending} pending tasks");
        waits.push(Wait::of_job("", why));
    }
    waits
}

/// Returns the warnings about the plan, about the trainers that share its tasks, and about the code of the model.
fn warnings(event_loop: &TrainingJob) -> Vec<String> {
    let of_trainers = plan_warnings::of_trainers(&event_loop.job, event_loop.live.trainers_most);
    let code = event_loop.members.views.code.iter();
    let of_code = code.flat_map(|code| &code.changes).map(ToString::to_string);
    event_loop.job.warnings.iter().cloned().chain(of_trainers).chain(of_code).collect()
}

fn saving(event_loop: &TrainingJob) -> Saving {
    let error = event_loop.live.saver.error();
    Saving {
        trainer: event_loop.live.saver.holder().map(|(trainer, _)| trainer),
        failures: error.map_or(0, |(.., failures)| failures),
        error: error.map(|(trainer, why, _)| format!("trainer {trainer}: {why}")),
    }
}

fn slot_status(event_loop: &TrainingJob, slot: Slot) -> SlotStatus {
    let view = &event_loop.members.views.slots;
    let entry = view.entries.get(&event_loop.keys.ps(slot));
    let record = entry.and_then(|entry| entry.json::<PserverRecord>().ok());
    SlotStatus {
        slot,
        address: record.map(|record| record.address),
        incarnation: event_loop.members.holders.get(&slot).copied(),
        follower: event_loop.members.followers.get(&slot).map(|record| record.address.clone()),
    }
}

fn trainers(event_loop: &TrainingJob) -> Vec<TrainerStatus> {
    let mut tasks = BTreeMap::<TrainerId, u32>::new();
    for (_, _, holder) in event_loop.state.ledger.pending() {
        *tasks.entry(holder).or_default() += 1;
    }
    let view = &event_loop.members.views.trainers;
    let bound = event_loop.job.record.spec.asynchronous.max_staleness;
    let listed = view.entries.iter().filter_map(|(key, entry)| {
        let id = event_loop.keys.trainer_of(key)?;
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
            is_surplus: !event_loop.members.working.contains(&id),
        })
    });
    listed.collect()
}
