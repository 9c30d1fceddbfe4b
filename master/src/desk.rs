//! The loop of the acting master: it alone decides, commits and evolves.
//!
//! Requests that came in while a commit was under way are decided together, on a copy, and
//! committed in one transaction; then the copy becomes the state and everybody is answered. So
//! memory is never ahead of etcd, and a commit's cost is shared.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::ids::{Generation, Pass, Slot, TaskId, TrainerId};
use steadfast_common::keys::Keys;
use steadfast_common::records::{EvaluationRecord, GenerationRecord, InitRecord, ResultRecord};
use steadfast_common::schedule::{LaneSchedule, task_order};
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_coord::{Commit, Condition, CoordError, Etcd, Mirror, OPS_MAX, Range, Reign, now};
use steadfast_host::time::{interval, unix_ms};
use steadfast_master_core::deadlines::Deadlines;
use steadfast_master_core::lanes::Lanes;
use steadfast_master_core::ledger::{Fact, Ledger, Limits};
use steadfast_master_core::sync_tasks::SyncTasks;
use tokio::sync::{mpsc, watch};
use tracing::warn;

use crate::board::{Board, Facts};
use crate::chronicle::Chronicle;
use crate::job::Job;
use crate::office::{ClockRoom, End, Event, Office, OfficeError, Position, Reply, Setback};
use crate::recoveries::Recoveries;
use crate::spendings::Spendings;
use crate::store::{self, Changes};
use crate::vigils::Vigils;

/// Requests that may wait for the loop; callers wait beyond that.
const EVENTS_MAX: usize = 1024;

/// Changes that one event may need at most, unless more is known of it.
pub(crate) const CHANGES_OF_ONE: usize = 40;

/// Changes that a request for a task needs at most, beside those of tasks whose answer was lost: the
/// task that is reported (two), the next one or the answer, the head, and the end of the job.
const CHANGES_OF_TASK: usize = 5;

/// How often deadlines are looked at and the status is renewed without an event.
const TICK: Duration = Duration::from_millis(100);

/// Durable state, folded from what etcd holds.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub ledger: Ledger,
    pub sync_tasks: SyncTasks,
    pub generation: Option<GenerationRecord>,
    pub init: Option<InitRecord>,
    pub evaluation: Option<EvaluationRecord>,
    pub checkpoint: Option<String>,
    pub result: Option<ResultRecord>,
}

/// The loop's own.
pub struct Desk {
    pub(crate) etcd: Etcd,
    pub(crate) keys: Keys,
    pub(crate) job: Job,
    pub(crate) limits: Limits,
    pub(crate) reign: Reign,
    pub(crate) state: State,
    pub(crate) lanes: Lanes,
    /// The pass and the trainers that the lanes were balanced for.
    pub(crate) dealt: Option<(Pass, BTreeSet<TrainerId>)>,
    pub(crate) deadlines: Deadlines,
    pub(crate) position: Position,
    pub(crate) finished: Finished,
    pub(crate) saver: Option<TrainerId>,
    /// The lanes of the present pass, for the status.
    pub(crate) schedule: Option<(Pass, LaneSchedule)>,
    pub(crate) clocks: Arc<ClockRoom>,
    pub(crate) recoveries: Recoveries,
    pub(crate) spendings: Spendings,
    /// What an event asked for that the next turn of the loop does.
    pub(crate) setback: Option<Setback>,
    pub(crate) vigils: Vigils,
    /// Live trainers, and slots without their memory, when they were looked at last.
    pub(crate) seen_trainers: BTreeSet<TrainerId>,
    pub(crate) slots_seen_lost: Vec<Slot>,
    pub(crate) slots: Mirror,
    pub(crate) desired: Mirror,
    pub(crate) trainers: Mirror,
    inbox: mpsc::Receiver<Event>,
    /// An event for which the last transaction had no room.
    left_over: Option<Event>,
    board: watch::Sender<Arc<Board>>,
    facts: watch::Sender<Arc<Facts>>,
    /// Guards a look at the facts.
    chronicle: Arc<Mutex<Chronicle>>,
}

/// Sums over tasks that were finished in this reign, for those who watch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Finished {
    pub records: u64,
    pub loss: Option<f64>,
}

/// An answer that is given once the commit is through.
type Later = Box<dyn FnOnce() + Send>;

/// Decisions of one commit.
pub(crate) struct Batch {
    pub state: State,
    pub changes: Changes,
    pub conditions: Vec<Condition>,
    answers: Vec<Later>,
}

impl Desk {
    /// Recovers everything from etcd and prepares the loop.
    ///
    /// # Errors
    /// If etcd does not answer, or holds a value that is not ours.
    pub async fn open(
        etcd: &Etcd,
        keys: &Keys,
        job: Job,
        reign: Reign,
        own_address: &str,
    ) -> Result<(Self, Office), CoordError> {
        let ledger = store::recover_ledger(etcd, keys, &order_of(&job)).await?;
        let sync_tasks = match job.record.spec.mode {
            Mode::Sync => store::recover_sync_tasks(etcd, keys).await?,
            Mode::Async => SyncTasks::default(),
        };
        let state = State {
            ledger,
            sync_tasks,
            generation: etcd.get_json(&keys.generation()).await?,
            init: etcd.get_json(&keys.init()).await?,
            evaluation: etcd.get_json(&keys.evaluation()).await?,
            checkpoint: store::read_pointer(etcd, keys).await?,
            result: etcd.get_json(&keys.result()).await?,
        };
        let spec = &job.record.spec;
        let (events, inbox) = mpsc::channel(EVENTS_MAX);
        let (board, board_rx) = watch::channel(Arc::default());
        let (facts, facts_rx) = watch::channel(Arc::default());
        let clocks = Arc::<ClockRoom>::default();
        let chronicle = Arc::<Mutex<Chronicle>>::default();
        clocks.follow(&holders(&state));
        // No former master's reign began later, and none makes 2²⁰ assignments a revision.
        let first_number = (reign.epoch() as u64) << 20;
        let mut recoveries = Recoveries::default();
        if state.generation.is_some() {
            recoveries.notice("the master before this one ended", now(), None);
        }
        let desk = Self {
            lanes: Lanes::new(spec.sync.lanes, first_number),
            dealt: None,
            limits: limits(spec),
            state,
            reign,
            deadlines: Deadlines::default(),
            position: Position::default(),
            finished: Finished::default(),
            saver: None,
            schedule: None,
            clocks: clocks.clone(),
            recoveries,
            spendings: Spendings::default(),
            setback: None,
            vigils: Vigils::new(etcd, own_address),
            seen_trainers: BTreeSet::new(),
            slots_seen_lost: Vec::new(),
            slots: Mirror::start(etcd, Range::Prefix(keys.ps_prefix())).await?,
            desired: Mirror::start(etcd, Range::Key(keys.ps_desired())).await?,
            trainers: Mirror::start(etcd, Range::Prefix(keys.trainers_prefix())).await?,
            inbox,
            left_over: None,
            board,
            facts,
            chronicle: chronicle.clone(),
            etcd: etcd.clone(),
            keys: keys.clone(),
            job,
        };
        Ok((desk, Office { events, board: board_rx, facts: facts_rx, clocks, chronicle }))
    }

    /// Acts until the job is over or `leave` completes.
    ///
    /// # Errors
    /// When the reign is lost, or etcd cannot be spoken to for too long. What was decided and not
    /// committed is forgotten with this desk.
    pub async fn run(mut self, leave: impl Future<Output = ()>) -> Result<End, CoordError> {
        let mut leave = std::pin::pin!(leave);
        let (mut slots, mut desired, mut trainers) =
            (self.slots.subscribe(), self.desired.subscribe(), self.trainers.subscribe());
        let mut tick = interval(TICK);
        loop {
            if let Some(result) = &self.state.result {
                return Ok(End::Over(result.clone()));
            }
            self.look_after_members().await?;
            self.publish_board();
            let mut first = self.left_over.take();
            tokio::select! {
                biased;
                // Requests come last: however many there are, they keep nothing else from its turn.
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
            self.work_off_setback().await?;
        }
    }

    /// Lets those who look see how things stand.
    fn show(&self) {
        let facts = Facts::of(self);
        self.chronicle.lock().expect("no holder panics").note(&facts, unix_ms());
        self.facts.send_replace(Arc::new(facts));
    }

    /// Decides everything that waits, as far as one transaction holds, commits, answers.
    async fn work_off(&mut self, first: Option<Event>) -> Result<(), CoordError> {
        let mut batch = Batch::on(&self.state);
        self.expire(&mut batch);
        let mut next = first;
        while let Some(event) = next.take() {
            self.decide(event, &mut batch);
            if !batch.conditions.is_empty() {
                break;
            }
            let Ok(event) = self.inbox.try_recv() else { break };
            if batch.changes.len() + changes_of(&event, &batch.state) <= OPS_MAX {
                next = Some(event);
            } else {
                self.left_over = Some(event);
            }
        }
        self.commit(batch).await
    }

    pub(crate) async fn commit(&mut self, batch: Batch) -> Result<(), CoordError> {
        if !batch.changes.is_empty() {
            let ops = batch.changes.into_ops();
            match self.reign.commit(&self.etcd, &ops, &batch.conditions).await? {
                Commit::Done { .. } => {}
                // The answers are dropped unsent: their callers learn that nothing happened.
                Commit::ConditionFailed => return Ok(()),
            }
        }
        self.state = batch.state;
        self.clocks.follow(&holders(&self.state));
        batch.answers.into_iter().for_each(|answer| answer());
        Ok(())
    }

    pub(crate) fn live(&self) -> BTreeSet<TrainerId> {
        let view = self.trainers.view();
        view.entries.keys().filter_map(|key| self.keys.trainer_of(key)).collect()
    }

    /// Takes back overdue attempts, as many as one transaction holds.
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

    /// Deals the lanes of the pass that training is in, once a pass.
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

    fn publish_board(&self) {
        let live = self.live();
        let board = Board {
            generation: self.state.generation.as_ref().map_or(Generation(0), |it| it.generation),
            number: self.lanes.number(),
            lanes: live.iter().map(|trainer| (*trainer, self.lanes.of(*trainer))).collect(),
            given_up: self
                .state
                .sync_tasks
                .passes()
                .into_iter()
                .map(|pass| (pass, self.state.sync_tasks.given_up(pass)))
                .filter(|(_, tasks)| !tasks.is_empty())
                .collect(),
        };
        self.board.send_if_modified(|shown| {
            let changed = **shown != board;
            if changed {
                *shown = Arc::new(board);
            }
            changed
        });
    }
}

/// How many changes an event may need.
fn changes_of(event: &Event, state: &State) -> usize {
    match event {
        // A task that goes back is changed, and may be given up.
        Event::NextTask { request, .. } => {
            CHANGES_OF_TASK + 2 * state.ledger.held_by(request.trainer).count()
        }
        _ => CHANGES_OF_ONE,
    }
}

/// Who holds a task.
fn holders(state: &State) -> BTreeSet<TrainerId> {
    state.ledger.pending().map(|(_, _, trainer)| trainer).collect()
}

impl Batch {
    /// Nothing decided yet.
    pub(crate) fn on(state: &State) -> Self {
        Self {
            state: state.clone(),
            changes: Changes::default(),
            conditions: Vec::new(),
            answers: Vec::new(),
        }
    }

    /// Answers once the commit is through.
    pub(crate) fn later<T: Send + 'static>(
        &mut self,
        reply: Reply<T>,
        answer: Result<T, OfficeError>,
    ) {
        self.answers.push(Box::new(move || {
            let _ = reply.send(answer);
        }));
    }
}

/// The order of a pass, as the ledger asks for it.
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
