//! What a master has while it acts.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::records::JobOutcome;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_common::status::{JobState, JobStatus, MasterStatus};
use steadfast_coord::now;
use steadfast_master_core::rate::Rate;

use crate::board::Facts;
use crate::checkpoints::Checkpoints;
use crate::office::Office;

/// What a master has while it acts. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Acting {
    pub office: Office,
    pub checkpoints: Checkpoints,
    pub task_deadline: Duration,
    pub max_staleness: Option<u32>,
    pub view: Arc<View>,
}

/// What a status is made of, beside the loop's facts.
#[derive(Debug)]
pub struct View {
    pub spec: JobSpec,
    pub address: String,
    /// Records of one pass.
    pub records: u64,
    /// Guards only itself.
    pub rate: Mutex<Rate>,
}

impl Acting {
    /// The job as it is now.
    pub fn status(&self) -> JobStatus {
        let facts = self.office.facts.borrow().clone();
        let view = &self.view;
        let per_second = {
            let mut rate = view.rate.lock().expect("no holder panics");
            rate.note(now(), facts.examples);
            rate.per_second()
        };
        let (happenings, points) = {
            let chronicle = self.office.chronicle.lock().expect("no holder panics");
            (chronicle.happenings(), chronicle.points())
        };
        let total = view.spec.passes.map(|passes| u64::from(passes) * view.records);
        let state = state(&facts);
        let left = total.map(|total| total.saturating_sub(facts.examples) as f64 / per_second);
        JobStatus {
            job: view.spec.name.clone(),
            mode: view.spec.mode,
            state,
            waiting: waiting(&facts, view.spec.mode),
            generation: facts.generation,
            pass: facts.pass,
            passes: view.spec.passes,
            steps: view.spec.steps,
            version: facts.position.version,
            queues: facts.queues,
            examples: facts.examples,
            examples_total: total,
            examples_per_second: per_second,
            loss: facts.loss,
            evaluation: facts.evaluation.clone(),
            master: MasterStatus { address: view.address.clone(), epoch: facts.epoch },
            slots: facts.slots.clone(),
            ps_desired: facts.ps_desired.unwrap_or(0),
            trainers: facts.trainers.clone(),
            checkpoint: facts.checkpoint.clone(),
            checkpoint_trouble: self.checkpoints.health().trouble,
            recoveries: facts.recoveries.clone(),
            discarded: facts.discarded.clone(),
            spent: facts.spent,
            seconds_left: left.filter(|seconds| seconds.is_finite()),
            happenings,
            points,
            result: facts.result.clone(),
        }
    }
}

fn state(facts: &Facts) -> JobState {
    match &facts.result {
        Some(result) => match result.state {
            JobOutcome::Finished => JobState::Finished,
            JobOutcome::Failed => JobState::Failed,
        },
        None if facts.slots.iter().any(|slot| slot.address.is_none()) => JobState::Waiting,
        None if facts.slots.is_empty() || facts.trainers.is_empty() => JobState::Waiting,
        None if !facts.initialised => JobState::Starting,
        None if facts.all_passes_over => JobState::Saving,
        None => JobState::Training,
    }
}

/// Who waits for whom, and why.
fn waiting(facts: &Facts, mode: Mode) -> Vec<String> {
    let mut reasons = Vec::new();
    if facts.result.is_some() {
        return reasons;
    }
    match facts.ps_desired {
        None => reasons.push("pservers wait for the key `ps_desired`".to_owned()),
        Some(0) => {
            reasons.push("`ps_desired` is 0: there is nowhere to keep parameters".to_owned())
        }
        Some(_) => {}
    }
    for slot in facts.slots.iter().filter(|slot| slot.address.is_none()) {
        reasons.push(format!("everybody waits for a pserver to take slot {}", slot.slot));
    }
    if facts.trainers.is_empty() {
        reasons.push("the job waits for trainers: there is none".to_owned());
    }
    if reasons.is_empty() && !facts.initialised {
        reasons.push("trainers wait for one of them to initialise the parameters".to_owned());
    }
    for (task, reason) in &facts.troubled {
        reasons.push(format!("the pass may wait for task {task}, which failed: {reason}"));
    }
    if mode == Mode::Async && facts.queues.todo == 0 && 0 < facts.queues.pending {
        let pending = facts.queues.pending;
        reasons.push(format!("the end of the pass waits for {pending} pending tasks"));
    }
    reasons
}
