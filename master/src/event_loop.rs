//! The event loop of the acting master: only it decides, commits and evolves.
//!
//! Requests that arrive during a commit are decided together, on a copy, and committed in one
//! transaction. Then the copy becomes the state, and all of them are answered. So memory is never ahead
//! of etcd, and the requests share the cost of a commit.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::ids::{Generation, Pass, Slot, TaskId, TrainerId};
use steadfast_common::keys::Keys;
use steadfast_common::records::{
    CheckpointRecord, EvaluationRecord, GenerationRecord, InitRecord, ResultRecord,
};
use steadfast_common::schedule::{LaneSchedule, task_order};
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_coord::{CoordError, Etcd, Leadership, Mirror, OPS_MAX, Op, Range, now};
use steadfast_host::time::{interval, unix_ms};
use steadfast_master_core::deadlines::Deadlines;
use steadfast_master_core::given_up::GivenUp;
use steadfast_master_core::held_out::HeldOut;
use steadfast_master_core::lane_losses::LaneLosses;
use steadfast_master_core::lanes::Lanes;
use steadfast_master_core::ledger::{Fact, Ledger, Limits};
use steadfast_master_core::saver::Saver;
use steadfast_master_core::sync_tasks::SyncTasks;
use tokio::sync::{mpsc, watch};
use tracing::warn;

use crate::failure_detector::FailureDetector;
use crate::handle::{
    ControlError, End, Event, EventLoopHandle, Position, Reply, Rollback, StalenessGate,
};
use crate::job::Job;
use crate::recoveries::Recoveries;
use crate::status_snapshot::{Assignments, StatusSnapshot};
use crate::store::{self, Changes};
use crate::time_breakdowns::TimeBreakdowns;
use crate::timeline::Timeline;

/// Capacity of the event queue; callers wait while it is full.
const EVENTS_MAX: usize = 1024;

/// Maximum changes that one event needs, unless [`changes_of`] knows a tighter bound.
pub(crate) const CHANGES_OF_ONE: usize = 40;

/// Maximum changes that a request for a task needs, beside those of tasks whose answer was lost: the
/// reported task (two), the next task or the answer, the head, and the end of the job.
const CHANGES_OF_TASK: usize = 5;

/// How often deadlines are checked and the status is updated without an event.
const TICK: Duration = Duration::from_millis(100);

/// Durable state, folded from the contents of etcd.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub ledger: Ledger,
    pub sync_tasks: SyncTasks,
    /// Held-out tasks that were given up.
    pub held_out: GivenUp,
    pub generation: Option<GenerationRecord>,
    pub init: Option<InitRecord>,
    pub evaluation: Option<EvaluationRecord>,
    pub checkpoint: Option<String>,
    pub result: Option<ResultRecord>,
}

impl State {
    async fn recover(etcd: &Etcd, keys: &Keys, job: &Job) -> Result<Self, CoordError> {
        let (given_up, held_out) =
            store::recover_given_up(etcd, keys, &job.manifest.held_out).await?;
        let (ledger, sync_tasks) = match job.record.spec.mode {
            Mode::Sync => (
                Ledger::new(&order_of(job)),
                store::recover_sync_tasks(etcd, keys, given_up).await?,
            ),
            Mode::Async => (
                store::recover_ledger(etcd, keys, given_up, &order_of(job)).await?,
                SyncTasks::default(),
            ),
        };
        Ok(Self {
            ledger,
            sync_tasks,
            held_out,
            generation: etcd.get_json(&keys.generation()).await?,
            init: etcd.get_json(&keys.init()).await?,
            evaluation: etcd.get_json(&keys.evaluation()).await?,
            checkpoint: store::read_pointer(etcd, keys).await?,
            result: etcd.get_json(&keys.result()).await?,
        })
    }
}

/// The event loop and the state that it owns.
pub struct EventLoop {
    pub(crate) etcd: Etcd,
    pub(crate) keys: Keys,
    pub(crate) job: Job,
    pub(crate) limits: Limits,
    pub(crate) leadership: Leadership,
    pub(crate) state: State,
    pub(crate) lanes: Lanes,
    /// The pass and the trainers that the lanes were balanced for.
    pub(crate) dealt: Option<(Pass, BTreeSet<TrainerId>)>,
    pub(crate) deadlines: Deadlines,
    pub(crate) position: Position,
    pub(crate) finished: Finished,
    pub(crate) saver: Saver,
    /// Failures of held-out tasks.
    pub(crate) held_out: HeldOut,
    pub(crate) lane_losses: LaneLosses,
    /// Rounds of the task queues that are over and may still have keys.
    stale_rounds: BTreeSet<u64>,
    /// The lanes of the present pass, for the status.
    pub(crate) schedule: Option<(Pass, LaneSchedule)>,
    pub(crate) staleness_gate: Arc<StalenessGate>,
    pub(crate) recoveries: Recoveries,
    pub(crate) time_breakdowns: TimeBreakdowns,
    /// A rollback that an event requested; the loop runs it after the commit.
    pub(crate) rollback: Option<Rollback>,
    pub(crate) failure_detector: FailureDetector,
    /// Live trainers, and slots that had lost their memory, at the last check.
    pub(crate) seen_trainers: BTreeSet<TrainerId>,
    pub(crate) slots_seen_lost: Vec<Slot>,
    pub(crate) slots: Mirror,
    pub(crate) desired: Mirror,
    pub(crate) trainers: Mirror,
    inbox: mpsc::Receiver<Event>,
    /// An event for which the last transaction had no room.
    left_over: Option<Event>,
    assignments: watch::Sender<Arc<Assignments>>,
    snapshot: watch::Sender<Arc<StatusSnapshot>>,
    /// The mutex guards short reads and writes of the timeline.
    timeline: Arc<Mutex<Timeline>>,
}

/// Sums over tasks that were finished in this term, for the status.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Finished {
    pub records: u64,
    pub loss: Option<f64>,
}

/// An answer that is sent after the commit.
type Later = Box<dyn FnOnce() + Send>;

/// A change of state that the loop holds only in memory, made after the commit that it belongs to.
type Effect = Box<dyn FnOnce(&mut EventLoop) + Send>;

/// The decisions of one commit, made on copies.
pub(crate) struct Batch {
    pub state: State,
    /// Failures of held-out tasks.
    pub held_out: HeldOut,
    pub changes: Changes,
    effects: Vec<Effect>,
    answers: Vec<Later>,
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
        let state = State::recover(etcd, keys, &job).await?;
        let position = last_known(etcd, keys, &state).await?;
        let spec = &job.record.spec;
        let (events, inbox) = mpsc::channel(EVENTS_MAX);
        let (assignments, assignments_rx) = watch::channel(Arc::default());
        let (snapshot, snapshot_rx) = watch::channel(Arc::default());
        let round = state.ledger.head().round;
        let staleness_gate = Arc::<StalenessGate>::default();
        let timeline = Arc::<Mutex<Timeline>>::default();
        staleness_gate.follow(&holders(&state));
        // Every earlier term has a smaller epoch, and no term makes 2²⁰ assignments per revision of etcd.
        let first_number = (leadership.epoch() as u64) << 20;
        let mut recoveries = Recoveries::default();
        if state.generation.is_some() {
            recoveries.notice("the master before this one ended", now(), None);
        }
        let event_loop = Self {
            lanes: Lanes::new(spec.sync.lanes, first_number),
            dealt: None,
            limits: limits(spec),
            state,
            leadership,
            deadlines: Deadlines::default(),
            position,
            finished: Finished::default(),
            saver: Saver::default(),
            held_out: HeldOut::default(),
            lane_losses: LaneLosses::default(),
            stale_rounds: match job.record.spec.mode {
                Mode::Sync => BTreeSet::new(),
                Mode::Async => store::stale_rounds(etcd, keys, round).await?,
            },
            schedule: None,
            staleness_gate: staleness_gate.clone(),
            recoveries,
            time_breakdowns: TimeBreakdowns::default(),
            rollback: None,
            failure_detector: FailureDetector::new(etcd, own_address),
            seen_trainers: BTreeSet::new(),
            slots_seen_lost: Vec::new(),
            slots: Mirror::start(etcd, Range::Prefix(keys.ps_prefix())).await?,
            desired: Mirror::start(etcd, Range::Key(keys.ps_desired())).await?,
            trainers: Mirror::start(etcd, Range::Prefix(keys.trainers_prefix())).await?,
            inbox,
            left_over: None,
            assignments,
            snapshot,
            timeline: timeline.clone(),
            etcd: etcd.clone(),
            keys: keys.clone(),
            job,
        };
        Ok((
            event_loop,
            EventLoopHandle {
                events,
                assignments: assignments_rx,
                snapshot: snapshot_rx,
                staleness_gate,
                timeline,
            },
        ))
    }

    /// Acts until the job is over or `leave` completes.
    ///
    /// # Errors
    /// When the term is lost, or etcd is unreachable for too long. Decisions that were not committed are
    /// dropped with this event loop.
    pub async fn run(mut self, leave: impl Future<Output = ()>) -> Result<End, CoordError> {
        let mut leave = std::pin::pin!(leave);
        let (mut slots, mut desired, mut trainers) =
            (self.slots.subscribe(), self.desired.subscribe(), self.trainers.subscribe());
        let mut tick = interval(TICK);
        loop {
            if let Some(result) = &self.state.result {
                return Ok(End::Over(Box::new(result.clone())));
            }
            self.look_after_members().await?;
            self.forget_what_is_over().await?;
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
            self.work_off(first).await?;
            self.run_rollback().await?;
        }
    }

    /// Publishes a new status snapshot.
    fn show(&self) {
        let snapshot = StatusSnapshot::of(self);
        self.timeline.lock().expect("no holder panics").note(&snapshot, unix_ms());
        self.snapshot.send_replace(Arc::new(snapshot));
    }

    /// Decides waiting events, as many as fit into one transaction, commits them and sends the answers.
    async fn work_off(&mut self, first: Option<Event>) -> Result<(), CoordError> {
        let mut batch = Batch::on(self);
        self.expire(&mut batch);
        let mut next = first;
        while let Some(event) = next.take() {
            self.decide(event, &mut batch);
            let Ok(event) = self.inbox.try_recv() else { break };
            if batch.changes.len() + changes_of(&event, &batch.state) <= OPS_MAX {
                next = Some(event);
            } else {
                self.left_over = Some(event);
            }
        }
        self.commit(batch).await
    }

    /// Deletes the keys of passes and rounds that are over. Otherwise etcd would grow with the number of
    /// passes.
    async fn forget_what_is_over(&mut self) -> Result<(), CoordError> {
        self.state.sync_tasks.keep_near(self.position.pass);
        let mut failures = self.state.sync_tasks.forget_before(self.position.pass);
        failures.truncate(OPS_MAX);
        if !failures.is_empty() {
            let mut batch = Batch::on(self);
            for fact in &failures {
                batch.changes.add_sync_fact(&self.keys, fact);
                batch.state.sync_tasks.evolve(fact);
            }
            self.commit(batch).await?;
        }
        let over: Vec<u64> = self.stale_rounds.iter().copied().take(OPS_MAX).collect();
        if !over.is_empty() {
            let mut batch = Batch::on(self);
            for round in &over {
                batch.changes.add(Op::delete_prefix(&self.keys.round_prefix(*round)));
            }
            self.commit(batch).await?;
            self.stale_rounds.retain(|round| !over.contains(round));
        }
        Ok(())
    }

    pub(crate) async fn commit(&mut self, batch: Batch) -> Result<(), CoordError> {
        if !batch.changes.is_empty() {
            let ops = batch.changes.into_ops();
            self.leadership.commit(&self.etcd, &ops).await?;
        }
        let round = self.state.ledger.head().round;
        if round < batch.state.ledger.head().round {
            self.stale_rounds.insert(round);
        }
        self.state = batch.state;
        self.held_out = batch.held_out;
        batch.effects.into_iter().for_each(|effect| effect(self));
        self.staleness_gate.follow(&holders(&self.state));
        batch.answers.into_iter().for_each(|answer| answer());
        Ok(())
    }

    pub(crate) fn live(&self) -> BTreeSet<TrainerId> {
        let view = self.trainers.view();
        view.entries.keys().filter_map(|key| self.keys.trainer_of(key)).collect()
    }

    /// Expires overdue attempts, as many as fit into one transaction.
    fn expire(&mut self, batch: &mut Batch) {
        let now = steadfast_coord::now();
        self.deadlines.follow(&batch.state.ledger, now, &self.limits);
        for (task, attempt) in self.deadlines.overdue(now).into_iter().take(OPS_MAX / 4) {
            let facts = batch.state.ledger.expire(task, attempt, &self.limits);
            warn!(%task, attempt = attempt.0, "task deadline passed");
            self.adopt(batch, &facts);
        }
    }

    pub(crate) fn adopt(&self, batch: &mut Batch, facts: &[Fact]) {
        batch.changes.add_facts(&self.keys, batch.state.ledger.head().round, facts);
        let order_of = order_of(&self.job);
        facts.iter().for_each(|fact| batch.state.ledger.evolve(fact, &order_of));
    }

    /// Computes the lane schedule of the present pass, once per pass.
    fn follow_schedule(&mut self) {
        let (spec, pass) = (&self.job.record.spec, self.position.pass);
        let is_known = self.schedule.as_ref().is_some_and(|(known, _)| *known == pass);
        if spec.mode == Mode::Async || is_known {
            return;
        }
        let (lanes, micro_batch) = (spec.sync.lanes, spec.sync.micro_batch);
        let schedule = LaneSchedule::new(&self.job.manifest, spec.seed, pass, lanes, micro_batch);
        self.schedule = Some((pass, schedule));
    }

    fn publish_assignments(&self) {
        let live = self.live();
        let assignments = Assignments {
            generation: self.state.generation.as_ref().map_or(Generation(0), |it| it.generation),
            number: self.lanes.number(),
            lanes: live.iter().map(|trainer| (*trainer, self.lanes.of(*trainer))).collect(),
            given_up: self.state.sync_tasks.given_up_near(self.position.pass),
        };
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
async fn last_known(etcd: &Etcd, keys: &Keys, state: &State) -> Result<Position, CoordError> {
    let Some(id) = &state.checkpoint else { return Ok(Position::default()) };
    // The beginning of the next generation handles a manifest that cannot be read.
    match etcd.get_json::<CheckpointRecord>(&keys.checkpoint(id)).await {
        Ok(record) => Ok(record.map_or_else(Position::default, |it| Position::of(&it.position))),
        Err(CoordError::BadValue { .. }) => Ok(Position::default()),
        Err(error) => Err(error),
    }
}

/// Returns how many changes an event may need.
fn changes_of(event: &Event, state: &State) -> usize {
    match event {
        // A task that is taken back changes, and may be given up.
        Event::NextTask { request, .. } => {
            CHANGES_OF_TASK + 2 * state.ledger.held_by(request.trainer).count()
        }
        _ => CHANGES_OF_ONE,
    }
}

/// Returns the trainers that hold a task.
fn holders(state: &State) -> BTreeSet<TrainerId> {
    state.ledger.pending().map(|(_, _, trainer)| trainer).collect()
}

impl Batch {
    /// Returns an empty batch on a copy of the state.
    pub(crate) fn on(event_loop: &EventLoop) -> Self {
        Self {
            state: event_loop.state.clone(),
            held_out: event_loop.held_out.clone(),
            changes: Changes::default(),
            effects: Vec::new(),
            answers: Vec::new(),
        }
    }

    /// Runs `effect` on the event loop after the commit.
    pub(crate) fn after(&mut self, effect: impl FnOnce(&mut EventLoop) + Send + 'static) {
        self.effects.push(Box::new(effect));
    }

    /// Sends `answer` after the commit.
    pub(crate) fn later<T: Send + 'static>(
        &mut self,
        reply: Reply<T>,
        answer: Result<T, ControlError>,
    ) {
        self.answers.push(Box::new(move || {
            let _ = reply.send(answer);
        }));
    }
}

/// Returns the function from a pass to the order of its tasks, for the ledger.
fn order_of(job: &Job) -> impl Fn(Pass) -> Vec<TaskId> + use<> {
    let (manifest, seed) = (job.manifest.clone(), job.record.spec.seed);
    move |pass| task_order(&manifest, seed, pass)
}

fn limits(spec: &JobSpec) -> Limits {
    Limits {
        passes: spec.passes.unwrap_or(u32::MAX),
        failures_max: spec.tasks.failures_max,
        trainers: 0,
        deadline_ms: spec.tasks.deadline.as_millis() as u64,
    }
}
