//! The event loop of the acting master: only it decides, commits and evolves.
//!
//! Requests that arrive during a commit are decided together, on a draft of the durable state, and
//! committed in one transaction. Then the draft becomes the state, the volatile state changes, and all of
//! them are answered. So memory is never ahead of etcd, and the requests share the cost of a commit.

mod batch;
pub(crate) mod committer;
mod decisions;
mod derived;
mod generations;
pub(crate) mod handle;
mod live_state;
mod members;
mod recoveries;
mod stored_state;
mod time_breakdowns;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::ids::{Attempt, Generation, Incarnation, Slot, TaskId, TrainerId};
use steadfast_common::keys::Keys;
use steadfast_common::position::Position;
use steadfast_common::records::CheckpointRecord;
use steadfast_common::schedule::LaneSchedule;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_coord::{CoordError, Etcd, Leadership, Mirror, OPS_MAX, Range, now};
use steadfast_host::time::{interval, unix_ms};
use steadfast_master_core::job_state::{Fact, JobState};
use steadfast_master_core::lanes::Lanes;
use steadfast_master_core::ledger::Limits;
use tokio::sync::{mpsc, watch};
use tracing::warn;

use self::batch::Batch;
use self::committer::Committer;
use self::derived::Derived;
use self::handle::{End, Event, EventLoopHandle, StalenessGate};
use self::live_state::LiveState;
use self::recoveries::Recoveries;
use crate::failure_detector::FailureDetector;
use crate::job::Job;
use crate::status::status_snapshot::{Assignments, StatusSnapshot};
use crate::status::timeline::Timeline;

/// Capacity of the event queue; callers wait while it is full.
const EVENTS_MAX: usize = 1024;

/// Maximum changes that one event needs, unless [`changes_of`] knows a tighter bound.
pub(crate) const CHANGES_OF_ONE: usize = 40;

/// Maximum changes that a request for a task needs, beside those of tasks whose answer was lost: the
/// reported task (two), the next task or the answer, the head, and the end of the job.
const CHANGES_OF_TASK: usize = 5;

/// How often deadlines are checked and the status is updated without an event.
const TICK: Duration = Duration::from_millis(100);

/// The event loop and the state that it owns.
pub struct EventLoop {
    pub(crate) job: Job,
    pub(crate) limits: Limits,
    pub(crate) committer: Committer,
    /// Durable state: what is committed.
    pub(crate) state: JobState,
    /// Volatile state.
    pub(crate) live: LiveState,
    pub(crate) members: Members,
    inbox: mpsc::Receiver<Event>,
    /// An event for which the last transaction had no room.
    left_over: Option<Event>,
    pub(crate) staleness_gate: Arc<StalenessGate>,
    assignments: watch::Sender<Arc<Assignments>>,
    /// The trainers in the published assignments.
    assigned_trainers: Arc<BTreeSet<TrainerId>>,
    snapshot: watch::Sender<Arc<StatusSnapshot>>,
    /// The mutex guards short reads and writes of the timeline.
    timeline: Arc<Mutex<Timeline>>,
}

/// The members of the job, as etcd shows them.
pub(crate) struct Members {
    pub slots: Mirror,
    pub desired: Mirror,
    pub trainers: Mirror,
    pub code: Mirror,
    /// The trainers in the view of `trainers`.
    pub live_trainers: Derived<BTreeSet<TrainerId>>,
    /// The pservers in the view of `slots` whose keys can be parsed.
    pub holders: Derived<BTreeMap<Slot, Incarnation>>,
    pub failure_detector: FailureDetector,
}

impl EventLoop {
    /// Recovers everything from etcd and prepares the loop.
    ///
    /// # Errors
    /// If etcd does not answer, or holds a value that cannot be parsed.
    pub async fn open(
        etcd: &Etcd,
        keys: &Keys,
        job: Job,
        leadership: Leadership,
        own_address: &str,
    ) -> Result<(Self, EventLoopHandle), CoordError> {
        let state = stored_state::read(etcd, keys, &job).await?;
        let position = last_known(etcd, keys, &state).await?;
        let spec = &job.record.spec;
        let (events, inbox) = mpsc::channel(EVENTS_MAX);
        let (assignments, assignments_rx) = watch::channel(Arc::default());
        let (snapshot, snapshot_rx) = watch::channel(Arc::default());
        let staleness_gate = Arc::<StalenessGate>::default();
        let timeline = Arc::<Mutex<Timeline>>::default();
        staleness_gate.set_active(&holders(&state));
        // Every earlier term has a smaller epoch, and no term makes 2²⁰ assignments per revision of etcd.
        let first_number = (leadership.epoch() as u64) << 20;
        let mut recoveries = Recoveries::default();
        if state.generation.is_some() {
            recoveries.notice("the previous master ended", now(), None);
        }
        let lanes = Lanes::new(spec.sync.lanes, first_number);
        let event_loop = Self {
            limits: limits(spec, &state),
            committer: Committer::new(etcd.clone(), keys.clone(), leadership),
            state,
            live: LiveState::new(lanes, position, recoveries),
            members: Members {
                slots: Mirror::start(etcd, Range::Prefix(keys.ps_prefix())).await?,
                desired: Mirror::start(etcd, Range::Key(keys.ps_desired())).await?,
                trainers: Mirror::start(etcd, Range::Prefix(keys.trainers_prefix())).await?,
                code: Mirror::start(etcd, Range::Key(keys.code())).await?,
                live_trainers: Derived::default(),
                holders: Derived::default(),
                failure_detector: FailureDetector::new(etcd, own_address),
            },
            inbox,
            left_over: None,
            staleness_gate: staleness_gate.clone(),
            assignments,
            assigned_trainers: Arc::default(),
            snapshot,
            timeline: timeline.clone(),
            job,
        };
        let handle = EventLoopHandle {
            events,
            assignments: assignments_rx,
            snapshot: snapshot_rx,
            staleness_gate,
            timeline,
        };
        Ok((event_loop, handle))
    }

    /// Acts until the job is over or `leave` completes.
    ///
    /// # Errors
    /// When the term is lost, or etcd is unreachable for too long. Decisions that were not committed are
    /// dropped with this event loop.
    pub async fn run(mut self, leave: impl Future<Output = ()>) -> Result<End, CoordError> {
        let mut leave = std::pin::pin!(leave);
        let mut slots = self.members.slots.subscribe();
        let mut desired = self.members.desired.subscribe();
        let mut trainers = self.members.trainers.subscribe();
        let mut tick = interval(TICK);
        loop {
            if let Some(result) = &self.state.result {
                return Ok(End::Over(Box::new(result.clone())));
            }
            self.follow_members().await?;
            self.delete_finished().await?;
            self.publish_assignments();
            let mut first = self.left_over.take();
            tokio::select! {
                biased;
                // Requests come last: any number of them must not starve the other branches.
                () = &mut leave => return Ok(End::Left),
                _ = slots.changed() => {}
                _ = desired.changed() => {}
                _ = trainers.changed() => {}
                _ = tick.tick() => {
                    self.follow_schedule();
                    self.show();
                }
                event = self.inbox.recv(), if first.is_none() => first = event,
                () = std::future::ready(()), if first.is_some() => {}
            }
            self.process(first).await?;
            self.run_rollback().await?;
        }
    }

    /// Publishes a new status snapshot.
    fn show(&self) {
        let snapshot = StatusSnapshot::of(self);
        self.timeline.lock().expect("no holder panics").note(&snapshot.status, unix_ms());
        self.snapshot.send_replace(Arc::new(snapshot));
    }

    /// Decides waiting events, as many as fit into one transaction, commits them and sends the answers.
    async fn process(&mut self, first: Option<Event>) -> Result<(), CoordError> {
        self.live.deadlines.follow(&self.state.ledger, now(), &self.limits);
        let overdue = self.live.deadlines.overdue(now());
        if first.is_none() && overdue.is_empty() {
            return Ok(());
        }
        let mut batch = self.expire(overdue);
        let mut next = first;
        while let Some(event) = next.take() {
            self.decide(event, &mut batch);
            let Ok(event) = self.inbox.try_recv() else { break };
            if batch.proposal.len() + changes_of(&event, batch.state()) <= OPS_MAX {
                next = Some(event);
            } else {
                self.left_over = Some(event);
            }
        }
        self.commit(batch).await
    }

    /// Deletes the keys of passes and rounds that are over. Otherwise etcd would grow with the number of
    /// passes.
    async fn delete_finished(&mut self) -> Result<(), CoordError> {
        let pass = self.live.position.pass;
        self.state.sync_tasks.follow(pass);
        let failures = self.state.sync_tasks.forget_before(pass).into_iter().map(Fact::Failure);
        let rounds = self.state.stale_rounds.iter();
        let rounds = rounds.map(|round| Fact::RoundDeleted { round: *round });
        let facts: Vec<Fact> = failures.chain(rounds).take(OPS_MAX).collect();
        if facts.is_empty() {
            return Ok(());
        }
        let mut batch = self.batch();
        facts.into_iter().for_each(|fact| batch.add(fact));
        self.commit(batch).await
    }

    pub(crate) fn batch(&self) -> Batch {
        Batch::of(&self.committer.keys, &self.state)
    }

    /// Commits the proposal of a batch; then its state becomes the state, and its effects are run.
    pub(crate) async fn commit(&mut self, batch: Batch) -> Result<(), CoordError> {
        let (proposal, state, effects) = batch.into_parts();
        self.committer.commit(proposal).await?;
        self.state = state;
        self.limits.passes = last_pass(&self.job.record.spec, &self.state);
        self.staleness_gate.set_active(&holders(&self.state));
        effects.into_iter().for_each(|effect| effect(&mut self.live));
        Ok(())
    }

    pub(crate) fn live_trainers(&self) -> Arc<BTreeSet<TrainerId>> {
        let Members { trainers, live_trainers, .. } = &self.members;
        let trainer_of = |key: &String| self.committer.keys.trainer_of(key);
        live_trainers
            .of(trainers.view(), |view| view.entries.keys().filter_map(trainer_of).collect())
    }

    /// Returns a batch that expires overdue attempts, as many as fit into one transaction.
    fn expire(&self, overdue: Vec<(TaskId, Attempt)>) -> Batch {
        let mut batch = self.batch();
        for (task, attempt) in overdue.into_iter().take(OPS_MAX / 4) {
            warn!(%task, attempt = attempt.0, "task deadline passed");
            batch.decide(|draft| draft.expire(task, attempt, &self.limits));
        }
        batch
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

    fn publish_assignments(&mut self) {
        let live = self.live_trainers();
        let generation = self.state.generation.as_ref().map_or(Generation(0), |it| it.generation);
        let (number, given_up) =
            (self.live.lanes.number(), self.state.sync_tasks.given_up_recently());
        let has_same_trainers = Arc::ptr_eq(&self.assigned_trainers, &live);
        // The number changes whenever lanes move.
        let is_published = |shown: &Assignments| {
            (shown.generation, shown.number) == (generation, number) && shown.given_up == *given_up
        };
        if has_same_trainers && is_published(&self.assignments.borrow()) {
            return;
        }
        let lanes = live.iter().map(|trainer| (*trainer, self.live.lanes.of(*trainer))).collect();
        let assignments = Assignments { generation, number, lanes, given_up: given_up.clone() };
        self.assigned_trainers = live;
        self.assignments.send_if_modified(|shown| {
            let changed = **shown != assignments;
            if changed {
                *shown = Arc::new(assignments);
            }
            changed
        });
    }
}

/// Returns a lower bound of the training position until a trainer reports it: that of the latest
/// checkpoint, or the start.
async fn last_known(etcd: &Etcd, keys: &Keys, state: &JobState) -> Result<Position, CoordError> {
    let Some(id) = &state.checkpoint else { return Ok(Position::default()) };
    // The beginning of the next generation handles a manifest that cannot be read.
    match etcd.get_json::<CheckpointRecord>(&keys.checkpoint(id)).await {
        Ok(record) => Ok(record.map_or_else(Position::default, |it| it.position)),
        Err(CoordError::BadValue { .. }) => Ok(Position::default()),
        Err(error) => Err(error),
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
        | Event::CommitCheckpoint { .. }
        | Event::Damaged { .. }
        | Event::Diverged { .. }
        | Event::Inconsistent { .. }
        | Event::AddPass { .. }
        | Event::EndStream { .. }
        | Event::ForgetPasses { .. }
        | Event::RollBack { .. } => CHANGES_OF_ONE,
    }
}

fn holders(state: &JobState) -> BTreeSet<TrainerId> {
    state.ledger.pending().map(|(_, _, trainer)| trainer).collect()
}

/// Returns the number of passes after which training ends; `u32::MAX` as long as it is not known.
fn last_pass(spec: &JobSpec, state: &JobState) -> u32 {
    spec.passes.or(state.stream.record.end.map(|end| end.0)).unwrap_or(u32::MAX)
}

fn limits(spec: &JobSpec, state: &JobState) -> Limits {
    Limits {
        passes: last_pass(spec, state),
        failures_max: spec.tasks.failures_max,
        trainers: 0,
        deadline_ms: spec.tasks.deadline.as_millis() as u64,
    }
}
