//! The state machine of a training job: its durable state, and what this master knows beside it.

use std::collections::BTreeSet;
use std::sync::Arc;

use steadfast_common::ids::{Generation, Lane, TrainerId};
use steadfast_common::job::schedule::LaneSchedule;
use steadfast_common::job::spec::{JobSpec, Mode};
use steadfast_common::machine::{Decision, Machine, Moment, Size};
use steadfast_common::records::keys::Keys;
use steadfast_coord::OPS_MAX;
use steadfast_master_core::draft::Draft;
use steadfast_master_core::job_state::{Fact, JobState};
use steadfast_master_core::ledger::Limits;
use tracing::warn;

use crate::event_loop::effects::Effect;
use crate::event_loop::generations::{RolledBack, Stored};
use crate::event_loop::handle::{ControlError, Event, StalenessGate};
use crate::event_loop::live_state::LiveState;
use crate::event_loop::members::{Members, Views};
use crate::job::Job;
use crate::status::status_snapshot::Assignments;

/// Maximum changes that one event needs, unless [`changes_of`] knows a tighter bound.
pub(crate) const CHANGES_OF_ONE: usize = 40;

/// Maximum changes that a request for a task needs, beside those of tasks whose answer was lost: the
/// reported task (two), the next task or the answer, the head, and the end of the job.
const CHANGES_OF_TASK: usize = 5;

/// Most bytes of a change, of most of them.
const CHANGE_BYTES: usize = 1024;

/// The machine decides one input after the other.
#[derive(Debug)]
pub(crate) enum Input {
    Request(Event),
    /// The members have changed.
    Members(Views),
    /// What was asked for with [`Effect::Read`].
    Stored(Stored),
    Tick,
}

/// Whether something was decided, or has to be read first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Decided,
    None,
}

/// A training job in one term.
pub(crate) struct TrainingJob {
    pub job: Job,
    pub keys: Keys,
    pub epoch: i64,
    pub limits: Limits,
    /// Durable state: what is committed, or is being committed.
    pub state: JobState,
    /// Volatile state.
    pub live: LiveState,
    pub members: Members,
    /// For the status only.
    pub staleness_gate: Arc<StalenessGate>,
    pub assignments: Arc<Assignments>,
    /// The trainers in the published assignments.
    assigned_trainers: Arc<BTreeSet<TrainerId>>,
    /// What was read for the generation that is about to begin.
    pub stored: Option<Stored>,
    pub rolled_back: Option<RolledBack>,
}

impl TrainingJob {
    /// Returns the machine of a new term.
    pub fn new(
        job: Job,
        keys: Keys,
        epoch: i64,
        state: JobState,
        live: LiveState,
        views: Views,
        staleness_gate: Arc<StalenessGate>,
    ) -> Self {
        let mut members = Members::default();
        members.follow(&keys, views);
        members.limit(state.trainers_max());
        Self {
            limits: limits(&job.record.spec, &state),
            job,
            keys,
            epoch,
            state,
            live,
            members,
            staleness_gate,
            assignments: Arc::default(),
            assigned_trainers: Arc::default(),
            stored: None,
            rolled_back: None,
        }
    }

    /// Applies a fact.
    pub fn add(&mut self, fact: Fact, decision: &mut Decision<Self>) {
        self.state.evolve(&fact);
        if let Fact::Job(record) = &fact {
            self.job.record = record.as_ref().clone();
        }
        self.limits.passes = last_pass(&self.job.record.spec, &self.state);
        decision.facts.push(fact);
    }

    /// Makes a decision that applies its facts.
    pub fn draft<T>(
        &mut self,
        decision: &mut Decision<Self>,
        decide: impl FnOnce(&mut Draft, &Limits) -> T,
    ) -> T {
        let mut draft = Draft::of(&mut self.state);
        let answer = decide(&mut draft, &self.limits);
        decision.facts.extend(draft.take_facts());
        self.limits.passes = last_pass(&self.job.record.spec, &self.state);
        answer
    }

    /// Expires overdue attempts, as many as fit into one transaction.
    fn expire(&mut self, moment: Moment, decision: &mut Decision<Self>) -> Progress {
        self.live.deadlines.follow(&self.state.ledger, moment.now, &self.limits);
        let overdue = self.live.deadlines.overdue(moment.now);
        if overdue.is_empty() {
            return Progress::None;
        }
        for (task, attempt) in overdue.into_iter().take(OPS_MAX / 4) {
            warn!(%task, attempt = attempt.0, "task deadline passed");
            self.draft(decision, |draft, limits| draft.expire(task, attempt, limits));
        }
        Progress::Decided
    }

    /// Deletes the keys of passes and rounds that are over. Otherwise etcd would grow with the number of
    /// passes.
    fn delete_finished(&mut self, decision: &mut Decision<Self>) -> Progress {
        let pass = self.live.position.pass;
        self.state.sync_tasks.follow(pass);
        let failures = self.state.sync_tasks.forget_before(pass).into_iter().map(Fact::Failure);
        let rounds = self.state.stale_rounds.iter();
        let rounds = rounds.map(|round| Fact::RoundDeleted { round: *round });
        let facts: Vec<Fact> = failures.chain(rounds).take(OPS_MAX).collect();
        if facts.is_empty() {
            return Progress::None;
        }
        facts.into_iter().for_each(|fact| self.add(fact, decision));
        Progress::Decided
    }

    /// Computes the lane schedule of the present pass, once per pass.
    fn follow_schedule(&mut self) {
        let (spec, pass) = (&self.job.record.spec, self.live.position.pass);
        let is_known = self.live.schedule.as_ref().is_some_and(|(known, _)| *known == pass);
        if spec.mode == Mode::Async || spec.dataset.follow || is_known {
            return;
        }
        let schedule = LaneSchedule::of(spec, &self.job.manifest, pass);
        self.live.schedule = Some((pass, schedule));
    }

    fn assign(&mut self, decision: &mut Decision<Self>) {
        let live = self.members.live_trainers.clone();
        let generation = self.state.generation.as_ref().map_or(Generation(0), |it| it.generation);
        let (number, given_up) =
            (self.live.lanes.number(), self.state.sync_tasks.given_up_recently());
        let has_same_trainers = Arc::ptr_eq(&self.assigned_trainers, &live);
        // The number changes whenever lanes move.
        let known = &self.assignments;
        let is_same = (known.generation, known.number) == (generation, number);
        let suspects = self.live.lane_losses.suspects(self.live.position.version).into_iter();
        let suspected: BTreeSet<Lane> = suspects.map(|(lane, _)| lane).collect();
        let is_same = is_same && known.suspected == suspected;
        let evaluation_is_suspected = self.live.evaluation_is_suspected();
        let is_same = is_same && known.evaluation_is_suspected == evaluation_is_suspected;
        if has_same_trainers && is_same && known.given_up == *given_up {
            return;
        }
        let lanes = live.iter().map(|trainer| (*trainer, self.live.lanes.of(*trainer))).collect();
        let given_up = given_up.clone();
        let assignments =
            Assignments { generation, number, lanes, suspected, evaluation_is_suspected, given_up };
        self.assigned_trainers = live;
        if *self.assignments != assignments {
            self.assignments = Arc::new(assignments);
            decision.effects.push(Effect::Assign(self.assignments.clone()));
        }
    }
}

impl Machine for TrainingJob {
    type Input = Input;
    type Fact = Fact;
    type Effect = Effect;

    fn handle(&mut self, moment: Moment, input: Input, decision: &mut Decision<Self>) {
        match input {
            Input::Request(event) => self.decide(moment, event, decision),
            Input::Members(views) => self.members.follow(&self.keys, views),
            Input::Stored(stored) => self.stored = Some(stored),
            Input::Tick => {
                self.follow_schedule();
                self.measure(moment);
                decision.effects.push(Effect::Show);
            }
        }
    }

    fn committed(&mut self, _: Moment, effects: &mut Vec<Effect>) {
        effects.push(Effect::Active(holders(&self.state)));
    }

    fn due(&mut self, moment: Moment, decision: &mut Decision<Self>) {
        if self.finish_rollback(decision) == Progress::Decided {
            return;
        }
        if self.is_over() {
            return self.reject_rollback(ControlError::Over, decision);
        }
        // First: no round begins while keys of it are left.
        if self.delete_finished(decision) == Progress::Decided
            || self.expire(moment, decision) == Progress::Decided
            || self.run_rollback(moment, decision) == Progress::Decided
            || self.follow_members(moment, decision) == Progress::Decided
            || self.scale_by_speed(moment, decision) == Progress::Decided
        {
            return;
        }
        self.assign(decision);
    }

    fn size_max(&self, input: &Input) -> Size {
        let changes = match input {
            Input::Request(event) => changes_of(event, &self.state),
            Input::Members(_) | Input::Stored(_) | Input::Tick => CHANGES_OF_ONE,
        };
        Size { changes, bytes: changes * CHANGE_BYTES }
    }

    fn is_over(&self) -> bool {
        self.state.result.is_some()
    }
}

/// Returns how many changes an event may need.
fn changes_of(event: &Event, state: &JobState) -> usize {
    match event {
        // A task that is taken back changes, and may be given up.
        Event::NextTask { request, .. } => {
            CHANGES_OF_TASK + 2 * state.ledger.held_by(request.trainer).count()
        }
        Event::DeleteManifests { ids, .. } => ids.len(),
        Event::FailTask { .. }
        | Event::BeginInit { .. }
        | Event::FinishInit { .. }
        | Event::Position { .. }
        | Event::Evaluated { .. }
        | Event::BeginSave { .. }
        | Event::GivenUp { .. }
        | Event::FinishSave { .. }
        | Event::Queues { .. }
        | Event::HandedOver { .. }
        | Event::CommitCheckpoint { .. }
        | Event::Damaged { .. }
        | Event::Diverged { .. }
        | Event::Inconsistent { .. }
        | Event::DiscardRecord { .. }
        | Event::AddPass { .. }
        | Event::EndStream { .. }
        | Event::ForgetPasses { .. }
        | Event::RollBack { .. }
        | Event::Scale { .. }
        | Event::Amend { .. } => CHANGES_OF_ONE,
    }
}

/// Returns the trainers that hold tasks.
pub(crate) fn holders(state: &JobState) -> BTreeSet<TrainerId> {
    state.ledger.pending().map(|(_, _, trainer)| trainer).collect()
}

/// Returns the number of passes after which training ends; `u32::MAX` as long as it is not known.
fn last_pass(spec: &JobSpec, state: &JobState) -> u32 {
    let ends = [state.stream.record.end, state.course().and_then(|course| course.end)];
    let ends = ends.into_iter().flatten().map(|end| end.0);
    ends.chain(spec.passes).min().unwrap_or(u32::MAX)
}

fn limits(spec: &JobSpec, state: &JobState) -> Limits {
    Limits {
        passes: last_pass(spec, state),
        failures_max: spec.tasks.failures_max,
        trainers: 0,
        deadline_ms: spec.tasks.deadline.as_millis() as u64,
    }
}
