//! The state of an acting master that its services share.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::records::JobOutcome;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_common::status::{JobPhase, JobStatus, MasterStatus};
use steadfast_coord::now;
use steadfast_master_core::rate::Rate;
use steadfast_master_core::saver::Stage;
use steadfast_store::Location;

use crate::checkpoint::coordinator::Checkpoints;
use crate::event_loop::handle::EventLoopHandle;
use crate::status::status_snapshot::StatusSnapshot;
use crate::stream::StreamHandle;
use crate::table_watch::Tables;

/// The state of an acting master that its services share. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Acting {
    pub handle: EventLoopHandle,
    pub checkpoints: Checkpoints,
    /// Holds the model and the list of given-up tasks.
    pub store: Location,
    pub task_deadline: Duration,
    pub max_staleness: Option<u32>,
    pub view: Arc<StatusSource>,
    /// The follower of the stream, if the dataset is followed.
    pub stream: Option<StreamHandle>,
    pub tables: Tables,
}

/// Sources of a status, beside the status snapshot of the event loop.
#[derive(Debug)]
pub struct StatusSource {
    pub spec: JobSpec,
    pub address: String,
    /// Records in one pass.
    pub records: u64,
    /// The mutex guards only the rate.
    pub rate: Mutex<Rate>,
}

impl Acting {
    pub fn status(&self) -> JobStatus {
        let snapshot = self.handle.snapshot.borrow().clone();
        let view = &self.view;
        let per_second = {
            let mut rate = view.rate.lock().expect("no holder panics");
            // After a takeover, the first report of a trainer is no progress.
            if snapshot.are_examples_current {
                rate.note(now(), snapshot.examples);
            }
            rate.per_second()
        };
        let (events, points) = {
            let timeline = self.handle.timeline.lock().expect("no holder panics");
            (timeline.events(), timeline.points())
        };
        let total = view.spec.passes.map(|passes| u64::from(passes) * view.records);
        let state = state(&snapshot);
        let health = self.checkpoints.health();
        let left = total.map(|total| total.saturating_sub(snapshot.examples) as f64 / per_second);
        JobStatus {
            job: view.spec.name.clone(),
            mode: view.spec.mode,
            state,
            waiting: {
                let mut reasons = waiting(&snapshot, view.spec.mode);
                reasons.extend(self.stream.as_ref().and_then(|it| it.waiting(&snapshot)));
                reasons
            },
            generation: snapshot.generation,
            pass: snapshot.pass,
            passes: view.spec.passes,
            steps: view.spec.steps,
            version: snapshot.position.version,
            queues: snapshot.queues,
            examples: snapshot.examples,
            examples_total: total,
            examples_per_second: per_second,
            loss: snapshot.loss,
            evaluation: snapshot.evaluation.clone(),
            master: MasterStatus { address: view.address.clone(), epoch: snapshot.epoch },
            slots: snapshot.slots.clone(),
            ps_desired: snapshot.ps_desired.unwrap_or(0),
            trainers: snapshot.trainers.clone(),
            checkpoint: snapshot.checkpoint.clone(),
            checkpoint_error: health.error,
            checkpoint_failures: health.failures_in_a_row,
            saving: snapshot.saving.clone(),
            warnings: snapshot.warnings.clone(),
            recoveries: snapshot.recoveries.clone(),
            discarded: snapshot.discarded.clone(),
            time_breakdown: snapshot.time_breakdown,
            seconds_left: left.filter(|seconds| seconds.is_finite()),
            events,
            points,
            result: snapshot.result.clone(),
            tables: self.tables.latest(),
            stream: self.stream.as_ref().map(|stream| stream.status(&snapshot)),
        }
    }
}

fn state(snapshot: &StatusSnapshot) -> JobPhase {
    match &snapshot.result {
        Some(result) => match result.state {
            JobOutcome::Finished => JobPhase::Finished,
            JobOutcome::Failed => JobPhase::Failed,
        },
        None if snapshot.slots.iter().any(|slot| slot.address.is_none()) => JobPhase::Waiting,
        None if snapshot.slots.is_empty() || snapshot.trainers.is_empty() => JobPhase::Waiting,
        None if !snapshot.initialized => JobPhase::Starting,
        None if snapshot.saving_stage == Some(Stage::Evaluating) => JobPhase::Evaluating,
        None if snapshot.saving_stage.is_some() || snapshot.all_passes_over => JobPhase::Saving,
        None => JobPhase::Training,
    }
}

/// Returns the reasons for which processes wait.
fn waiting(snapshot: &StatusSnapshot, mode: Mode) -> Vec<String> {
    let mut reasons = Vec::new();
    if snapshot.result.is_some() {
        return reasons;
    }
    match snapshot.ps_desired {
        None => reasons.push("pservers wait for the key `ps_desired`".to_owned()),
        Some(0) => reasons.push("`ps_desired` is 0: the job has no slots".to_owned()),
        Some(_) => {}
    }
    for slot in snapshot.slots.iter().filter(|slot| slot.address.is_none()) {
        reasons.push(format!("slot {} has no pserver", slot.slot));
    }
    if snapshot.trainers.is_empty() {
        reasons.push("no trainer is registered".to_owned());
    }
    if reasons.is_empty() && !snapshot.initialized {
        let who = snapshot
            .initializer
            .map_or_else(|| "one of them".to_owned(), |it| format!("trainer {it}"));
        reasons.push(format!("trainers wait for {who} to initialize the parameters"));
    }
    reasons.extend(snapshot.lane_suspects.iter().cloned());
    for (task, reason) in &snapshot.failing {
        reasons.push(format!(
            "the pass may wait for task {task}, which could not be computed: {reason}"
        ));
    }
    let evaluates = snapshot.saving_stage != Some(Stage::Writing);
    for (task, reason) in snapshot.held_out_failing.iter().filter(|_| evaluates) {
        reasons
            .push(format!("evaluation may wait for held-out task {task}, which failed: {reason}"));
    }
    if let Some(error) = &snapshot.saving.error {
        let failures = snapshot.saving.failures;
        reasons.push(format!(
            "the model is not saved after {failures} failed attempts; last error: {error}"
        ));
    }
    if mode == Mode::Async && snapshot.queues.todo == 0 && 0 < snapshot.queues.pending {
        let pending = snapshot.queues.pending;
        reasons.push(format!("the end of the pass waits for {pending} pending tasks"));
    }
    reasons
}
