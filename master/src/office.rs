//! The loop of the acting master: it alone decides, commits and evolves.
//!
//! Requests that came in while a commit was under way are decided together, on a copy, and
//! committed in one transaction; then the copy becomes the state and everybody is answered. So
//! memory is never ahead of etcd, and a commit's cost is shared.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Incarnation, Pass, Slot, TaskId, TrainerId, Version};
use steadfast_common::keys::Keys;
use steadfast_common::records::{
    CheckpointRecord, EvaluationRecord, GenerationRecord, InitRecord, JobOutcome, PositionRecord,
    QueueSnapshot, ResultRecord,
};
use steadfast_common::schedule::task_order;
use steadfast_common::spec::Mode;
use steadfast_coord::{
    COMPARES_MAX, Commit, Condition, CoordError, Etcd, Mirror, OPS_MAX, Op, Range, Reign,
};
use steadfast_master_core::clocks::Clocks;
use steadfast_master_core::election::{self, Verdict};
use steadfast_master_core::lanes::Lanes;
use steadfast_master_core::ledger::{Answer, Deadlines, Ledger, Limits, Next, Request};
use steadfast_master_core::sync_tasks::{Failure, SyncTasks};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tracing::{error, info, warn};

use crate::board::{Board, Facts};
use crate::job::Job;
use crate::store::{self, Changes};

/// Requests that may wait for the loop; callers wait beyond that.
const EVENTS_MAX: usize = 1024;

/// Changes that one request may need at most; a batch leaves room for them.
const CHANGES_OF_ONE: usize = 40;

/// How often deadlines are looked at and the status is renewed without an event.
const TICK: Duration = Duration::from_millis(200);

/// Where an answer goes. Nobody may be waiting any more.
pub type Reply<T> = oneshot::Sender<Result<T, OfficeError>>;

/// What the loop is told.
#[derive(Debug)]
pub enum Event {
    NextTask {
        generation: Generation,
        request: Request,
        done: Option<TaskDone>,
        reply: Reply<Answer>,
    },
    FailTask {
        generation: Generation,
        trainer: TrainerId,
        failure: Failure,
        reply: Reply<GivenUp>,
    },
    BeginInit {
        generation: Generation,
        trainer: TrainerId,
        reply: Reply<Verdict>,
    },
    FinishInit {
        generation: Generation,
        trainer: TrainerId,
        attempt: u64,
        reply: Reply<()>,
    },
    Position {
        generation: Generation,
        trainer: TrainerId,
        position: Position,
    },
    Evaluated {
        evaluation: EvaluationRecord,
        reply: Reply<()>,
    },
    BeginSave {
        generation: Generation,
        trainer: TrainerId,
        reply: Reply<Saver>,
    },
    FinishSave {
        generation: Generation,
        result: Box<ResultRecord>,
        reply: Reply<()>,
    },
    /// The queues as they are, for a checkpoint.
    Queues {
        reply: Reply<Option<QueueSnapshot>>,
    },
    /// A checkpoint whose shards are all saved.
    Checkpoint {
        id: String,
        record: Box<CheckpointRecord>,
        reply: Reply<()>,
    },
    /// Checkpoints whose objects are about to be deleted.
    ForgetCheckpoints {
        ids: Vec<String>,
        reply: Reply<()>,
    },
}

/// Figures of a finished task, for those who watch.
#[derive(Clone, Copy, Debug)]
pub struct TaskDone {
    pub records: u64,
    pub loss_sum: f64,
    pub version: Version,
}

/// Whether a task is given up for the rest of its pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenUp {
    Yes,
    No,
}

/// Whether a trainer shall save the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saver {
    You,
    Another,
}

/// Where synchronous training stands.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Position {
    pub version: Version,
    pub pass: Pass,
    pub pass_start: Version,
    pub examples: u64,
    pub loss: Option<f64>,
}

/// Why the loop refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OfficeError {
    #[error("generation {found} was meant; the job is in generation {present}")]
    OtherGeneration { found: Generation, present: Generation },
    #[error("the trainer {0} is not registered")]
    UnknownTrainer(TrainerId),
    #[error("every task of pass {pass} was given up")]
    AllFailed { pass: Pass },
    #[error("there is no such task to fail")]
    NoSuchTask,
    #[error("another trainer was elected")]
    NotElected,
    #[error("this master does not act")]
    NotActing,
}

impl OfficeError {
    /// What the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OtherGeneration { .. } | Self::NotElected => ErrorKind::Stale,
            Self::UnknownTrainer(_) => ErrorKind::NotYet,
            Self::AllFailed { .. } | Self::NoSuchTask => ErrorKind::Invalid,
            Self::NotActing => ErrorKind::Unavailable,
        }
    }
}

/// How a reign ends.
#[derive(Debug)]
pub enum End {
    /// The job is over.
    Over(ResultRecord),
    /// We are told to leave.
    Left,
}

/// A handle to the loop.
#[derive(Clone, Debug)]
pub struct Office {
    events: mpsc::Sender<Event>,
    pub board: watch::Receiver<Arc<Board>>,
    pub facts: watch::Receiver<Arc<Facts>>,
    pub clocks: Arc<ClockRoom>,
}

/// The staleness gate, shared with those who wait at it.
#[derive(Debug, Default)]
pub struct ClockRoom {
    /// Guards a few lines of arithmetic at a time.
    pub clocks: Mutex<Clocks>,
    pub moved: Notify,
}

impl Office {
    /// Sends an event and waits for its answer.
    ///
    /// # Errors
    /// The loop's refusal.
    pub async fn ask<T>(&self, event: impl FnOnce(Reply<T>) -> Event) -> Result<T, OfficeError> {
        let (reply, answer) = oneshot::channel();
        self.events.send(event(reply)).await.map_err(|_| OfficeError::NotActing)?;
        answer.await.map_err(|_| OfficeError::NotActing)?
    }

    /// Sends an event that wants no answer; drops it if the loop is busy.
    pub fn mention(&self, event: Event) {
        let _ = self.events.try_send(event);
    }
}

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
    pub(crate) deadlines: Deadlines,
    pub(crate) position: Position,
    pub(crate) finished: Finished,
    pub(crate) saver: Option<TrainerId>,
    pub(crate) clocks: Arc<ClockRoom>,
    pub(crate) slots: Mirror,
    pub(crate) desired: Mirror,
    pub(crate) trainers: Mirror,
    inbox: mpsc::Receiver<Event>,
    board: watch::Sender<Arc<Board>>,
    facts: watch::Sender<Arc<Facts>>,
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
struct Batch {
    state: State,
    changes: Changes,
    conditions: Vec<Condition>,
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
    ) -> Result<(Self, Office), CoordError> {
        let order_of = order_of(&job);
        let ledger = store::recover_ledger(etcd, keys, &order_of).await?;
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
            checkpoint: etcd.get_json(&keys.checkpoint_latest()).await?,
            result: etcd.get_json(&keys.result()).await?,
        };
        let spec = &job.record.spec;
        let limits = Limits {
            passes: spec.passes.unwrap_or(u32::MAX),
            failures_max: spec.tasks.failures_max,
            deadline_ms: spec.tasks.deadline.as_millis() as u64,
        };
        let (events, inbox) = mpsc::channel(EVENTS_MAX);
        let (board, board_rx) = watch::channel(Arc::default());
        let (facts, facts_rx) = watch::channel(Arc::default());
        let clocks = Arc::<ClockRoom>::default();
        // No former master's reign began later, and none makes 2²⁰ assignments a revision.
        let first_number = (reign.epoch() as u64) << 20;
        drop(order_of);
        let desk = Self {
            lanes: Lanes::new(spec.sync.lanes, first_number),
            limits,
            state,
            reign,
            deadlines: Deadlines::default(),
            position: Position::default(),
            finished: Finished::default(),
            saver: None,
            clocks: clocks.clone(),
            slots: Mirror::start(etcd, Range::Prefix(keys.ps_prefix())).await?,
            desired: Mirror::start(etcd, Range::Key(keys.ps_desired())).await?,
            trainers: Mirror::start(etcd, Range::Prefix(keys.trainers_prefix())).await?,
            inbox,
            board,
            facts,
            etcd: etcd.clone(),
            keys: keys.clone(),
            job,
        };
        Ok((desk, Office { events, board: board_rx, facts: facts_rx, clocks }))
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
        let mut tick = tokio::time::interval(TICK);
        loop {
            if let Some(result) = &self.state.result {
                return Ok(End::Over(result.clone()));
            }
            self.look_after_members().await?;
            self.publish_board();
            let mut first = None;
            tokio::select! {
                event = self.inbox.recv() => first = event,
                _ = slots.changed() => {}
                _ = desired.changed() => {}
                _ = trainers.changed() => {}
                _ = tick.tick() => {
                    self.facts.send_replace(Arc::new(Facts::of(&self)));
                }
                () = &mut leave => return Ok(End::Left),
            }
            self.work_off(first).await?;
        }
    }

    /// Decides everything that waits, as far as one transaction holds, commits, answers.
    async fn work_off(&mut self, first: Option<Event>) -> Result<(), CoordError> {
        let mut batch = Batch {
            state: self.state.clone(),
            changes: Changes::default(),
            conditions: Vec::new(),
            answers: Vec::new(),
        };
        self.expire(&mut batch);
        let mut next = first;
        while let Some(event) = next.take() {
            self.decide(event, &mut batch);
            if batch.changes.len() + CHANGES_OF_ONE <= OPS_MAX && batch.conditions.is_empty() {
                next = self.inbox.try_recv().ok();
            }
        }
        self.commit(batch).await
    }

    async fn commit(&mut self, batch: Batch) -> Result<(), CoordError> {
        if !batch.changes.is_empty() {
            let ops = batch.changes.into_ops();
            match self.reign.commit(&self.etcd, &ops, &batch.conditions).await? {
                Commit::Done { .. } => {}
                // The answers are dropped unsent: their callers learn that nothing happened.
                Commit::ConditionFailed => return Ok(()),
            }
        }
        self.state = batch.state;
        batch.answers.into_iter().for_each(|answer| answer());
        Ok(())
    }

    fn live(&self) -> BTreeSet<TrainerId> {
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

    fn adopt(&self, batch: &mut Batch, facts: &[steadfast_master_core::ledger::Fact]) {
        batch.changes.add_facts(&self.keys, batch.state.ledger.head().round, facts);
        let order_of = order_of(&self.job);
        facts.iter().for_each(|fact| batch.state.ledger.evolve(fact, &order_of));
    }

    fn decide(&mut self, event: Event, batch: &mut Batch) {
        match event {
            Event::NextTask { generation, request, done, reply } => {
                let answer = self.next_task(batch, generation, &request, done);
                batch.later(reply, answer);
            }
            Event::FailTask { generation, trainer, failure, reply } => {
                let answer = self.fail_task(batch, generation, trainer, &failure);
                batch.later(reply, answer);
            }
            Event::BeginInit { generation, trainer, reply } => {
                let answer = self.begin_init(batch, generation, trainer);
                batch.later(reply, answer);
            }
            Event::FinishInit { generation, trainer, attempt, reply } => {
                let answer = self.finish_init(batch, generation, trainer, attempt);
                batch.later(reply, answer);
            }
            Event::Position { generation, trainer, position } => {
                self.note_position(generation, trainer, position);
            }
            Event::Evaluated { evaluation, reply } => {
                batch.changes.add(Op::put(&self.keys.evaluation(), &evaluation));
                batch.state.evaluation = Some(evaluation);
                batch.later(reply, Ok(()));
            }
            Event::BeginSave { generation, trainer, reply } => {
                let answer = self.begin_save(generation, trainer);
                batch.later(reply, answer);
            }
            Event::FinishSave { generation, result, reply } => {
                let answer = self.finish_save(batch, generation, *result);
                batch.later(reply, answer);
            }
            Event::Queues { reply } => {
                let queues = match self.job.record.spec.mode {
                    Mode::Sync => None,
                    Mode::Async => Some(batch.state.ledger.snapshot()),
                };
                batch.later(reply, Ok(queues));
            }
            Event::Checkpoint { id, record, reply } => {
                let answer = self.keep_checkpoint(batch, &id, &record);
                batch.later(reply, answer);
            }
            Event::ForgetCheckpoints { ids, reply } => {
                for id in &ids {
                    batch.changes.add(Op::delete(&self.keys.checkpoint(id)));
                }
                batch.later(reply, Ok(()));
            }
        }
    }

    fn check_generation(&self, found: Generation) -> Result<(), OfficeError> {
        let present =
            self.state.generation.as_ref().map_or(Generation(0), |record| record.generation);
        if found == present { Ok(()) } else { Err(OfficeError::OtherGeneration { found, present }) }
    }

    fn check_live(&self, trainer: TrainerId) -> Result<(), OfficeError> {
        let is_live = self.trainers.view().entries.contains_key(&self.keys.trainer(trainer));
        if is_live { Ok(()) } else { Err(OfficeError::UnknownTrainer(trainer)) }
    }

    fn next_task(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        request: &Request,
        done: Option<TaskDone>,
    ) -> Result<Answer, OfficeError> {
        self.check_generation(generation)?;
        self.check_live(request.trainer)?;
        let pass = batch.state.ledger.head().pass;
        let (facts, answer) = batch.state.ledger.next_task(request, &self.limits);
        let is_repeat = facts.is_empty();
        self.adopt(batch, &facts);
        if let Some(done) = done.filter(|_| answer.counted && !is_repeat) {
            self.finished.records += done.records;
            self.position.version = self.position.version.max(done.version);
            self.finished.loss = Some(done.loss_sum / done.records.max(1) as f64);
        }
        if batch.state.ledger.head().pass != pass {
            info!(pass = pass.0, "pass over");
        }
        let mut clocks = self.clocks.clocks.lock().expect("no holder panics");
        match answer.next {
            Next::Task(_) => clocks.begin(request.trainer),
            Next::NotYet | Next::AllDone | Next::AllFailed { .. } => {
                let holds = batch.state.ledger.pending().any(|(_, _, by)| by == request.trainer);
                if !holds {
                    clocks.remove(request.trainer);
                    self.clocks.moved.notify_waiters();
                }
            }
        }
        drop(clocks);
        if let Next::AllFailed { pass } = answer.next {
            self.fail_job(batch, format!("every task of pass {pass} was given up"));
            return Err(OfficeError::AllFailed { pass });
        }
        Ok(answer)
    }

    fn fail_task(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        trainer: TrainerId,
        failure: &Failure,
    ) -> Result<GivenUp, OfficeError> {
        self.check_generation(generation)?;
        self.check_live(trainer)?;
        let (pass, task, reason) = (failure.pass, failure.task, &failure.reason);
        if self.job.manifest.chunks_of(task).is_empty() {
            return Err(OfficeError::NoSuchTask);
        }
        if let Some(fact) = batch.state.sync_tasks.fail(failure, self.limits.failures_max) {
            batch.changes.add_sync_fact(&self.keys, &fact);
            batch.state.sync_tasks.evolve(&fact);
        }
        let given_up = batch.state.sync_tasks.given_up(pass);
        if given_up.len() == self.job.manifest.training_tasks().len() {
            self.fail_job(batch, format!("every task of pass {pass} was given up: {reason}"));
            return Err(OfficeError::AllFailed { pass });
        }
        if given_up.contains(&task) {
            warn!(%task, %pass, reason, "task given up for this pass");
            return Ok(GivenUp::Yes);
        }
        Ok(GivenUp::No)
    }

    fn fail_job(&self, batch: &mut Batch, reason: String) {
        error!(reason, "the job failed");
        let result = ResultRecord {
            state: JobOutcome::Failed,
            reason: Some(reason),
            passes: self.position.pass.0.max(batch.state.ledger.head().pass.0),
            steps: self.position.version.0,
            examples: self.position.examples,
            loss: None,
            metric: None,
            metric_name: None,
            parameters_sha256: None,
            model: None,
            discarded: discarded(&batch.state),
        };
        batch.changes.add(Op::put(&self.keys.result(), &result));
        batch.state.result = Some(result);
    }

    fn begin_init(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        trainer: TrainerId,
    ) -> Result<Verdict, OfficeError> {
        self.check_generation(generation)?;
        self.check_live(trainer)?;
        let from_checkpoint =
            self.state.generation.as_ref().is_some_and(|record| record.checkpoint.is_some());
        if from_checkpoint {
            return Ok(Verdict::Done);
        }
        let stored = batch.state.init.as_ref();
        let verdict = election::elect(stored, generation, trainer, &self.live());
        if let Verdict::Elected { record } = &verdict {
            if stored != Some(record) {
                info!(%trainer, attempt = record.attempt, "initialiser elected");
                batch.changes.add(Op::put(&self.keys.init(), record));
                batch.state.init = Some(record.clone());
            }
        }
        Ok(verdict)
    }

    fn finish_init(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        trainer: TrainerId,
        attempt: u64,
    ) -> Result<(), OfficeError> {
        self.check_generation(generation)?;
        let record = election::finish(batch.state.init.as_ref(), generation, trainer, attempt)
            .ok_or(OfficeError::NotElected)?;
        info!(%trainer, attempt, "parameters initialised");
        batch.changes.add(Op::put(&self.keys.init(), &record));
        batch.state.init = Some(record);
        Ok(())
    }

    fn note_position(&mut self, generation: Generation, trainer: TrainerId, position: Position) {
        let is_news = self.check_generation(generation).is_ok()
            && self.check_live(trainer).is_ok()
            && self.position.version <= position.version;
        if is_news {
            self.position = position;
        }
    }

    fn begin_save(
        &mut self,
        generation: Generation,
        trainer: TrainerId,
    ) -> Result<Saver, OfficeError> {
        self.check_generation(generation)?;
        self.check_live(trainer)?;
        let live = self.live();
        let saver = *self.saver.get_or_insert(trainer);
        if saver == trainer {
            return Ok(Saver::You);
        }
        if live.contains(&saver) {
            return Ok(Saver::Another);
        }
        self.saver = Some(trainer);
        Ok(Saver::You)
    }

    fn finish_save(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        mut result: ResultRecord,
    ) -> Result<(), OfficeError> {
        self.check_generation(generation)?;
        result.discarded = discarded(&batch.state);
        if let Some(passes) = self.job.record.spec.passes {
            result.passes = passes;
        }
        info!(sha256 = result.parameters_sha256, "the job is finished");
        batch.changes.add(Op::put(&self.keys.result(), &result));
        batch.state.result = Some(result);
        Ok(())
    }

    /// Commits a manifest, if every shard is still in the memory that it was cut from.
    fn keep_checkpoint(
        &mut self,
        batch: &mut Batch,
        id: &str,
        record: &CheckpointRecord,
    ) -> Result<(), OfficeError> {
        self.check_generation(record.generation)?;
        batch.conditions.extend(record.shards.iter().take(COMPARES_MAX).map(|shard| {
            Condition::CreateRevision {
                key: self.keys.ps(shard.slot),
                revision: shard.incarnation.0,
            }
        }));
        batch.changes.add(Op::put(&self.keys.checkpoint(id), record));
        batch.changes.add(Op::put(&self.keys.checkpoint_latest(), &id));
        batch.state.checkpoint = Some(id.to_owned());
        Ok(())
    }

    /// Reacts to members that came or went: lost trainers' tasks, lanes, and a new generation once
    /// every slot has a holder and one of them is new.
    async fn look_after_members(&mut self) -> Result<(), CoordError> {
        let live = self.live();
        let lost: Vec<TrainerId> =
            self.state.ledger.known_trainers().difference(&live).copied().collect();
        for trainer in lost {
            info!(%trainer, "trainer lost; its tasks go to others");
            let facts = self.state.ledger.lose_trainer(trainer, &self.limits);
            let mut clocks = self.clocks.clocks.lock().expect("no holder panics");
            clocks.remove(trainer);
            drop(clocks);
            self.clocks.moved.notify_waiters();
            let mut batch = Batch {
                state: self.state.clone(),
                changes: Changes::default(),
                conditions: Vec::new(),
                answers: Vec::new(),
            };
            self.adopt(&mut batch, &facts);
            self.commit(batch).await?;
        }
        self.lanes.rebalance(&live);
        match self.crew()? {
            Some(slots) if !self.is_present(&slots) => self.begin_generation(slots).await,
            Some(_) | None => Ok(()),
        }
    }

    /// The holders of all slots, if every slot is held.
    fn crew(&self) -> Result<Option<Vec<Incarnation>>, CoordError> {
        let Some(desired) = self.desired.view().single::<u32>()? else { return Ok(None) };
        let view = self.slots.view();
        let holder = |slot: u32| {
            let entry = view.entries.get(&self.keys.ps(Slot(slot)))?;
            Some(Incarnation(entry.create_revision))
        };
        let crew: Option<Vec<Incarnation>> = (0..desired).map(holder).collect();
        Ok(crew.filter(|crew| !crew.is_empty()))
    }

    fn is_present(&self, slots: &[Incarnation]) -> bool {
        self.state.generation.as_ref().is_some_and(|record| record.slots == slots)
    }

    /// Sends everybody back to the latest checkpoint, or to the start if there is none.
    async fn begin_generation(&mut self, slots: Vec<Incarnation>) -> Result<(), CoordError> {
        let before = self.state.generation.as_ref().map_or(0, |record| record.generation.0);
        let checkpoint = self.state.checkpoint.clone();
        let record = GenerationRecord { generation: Generation(before + 1), slots, checkpoint };
        info!(generation = record.generation.0, checkpoint = ?record.checkpoint, "generation begins");
        let mut batch = Batch {
            state: self.state.clone(),
            changes: Changes::default(),
            conditions: Vec::new(),
            answers: Vec::new(),
        };
        let manifest = self.checkpoint_of(&record).await?;
        if self.job.record.spec.mode == Mode::Async && 0 < before {
            let to = manifest.as_ref().and_then(|it| it.queue.clone()).unwrap_or_default();
            self.rewind(&mut batch, &to).await?;
        }
        batch.conditions = (0..record.slots.len().min(COMPARES_MAX))
            .map(|slot| Condition::CreateRevision {
                key: self.keys.ps(Slot(slot as u32)),
                revision: record.slots[slot].0,
            })
            .collect();
        batch.changes.add(Op::put(&self.keys.generation(), &record));
        batch.state.generation = Some(record);
        let begun = batch.state.generation.clone();
        self.commit(batch).await?;
        if self.state.generation != begun {
            return Ok(());
        }
        let position = manifest.map(|it| it.position).unwrap_or_default();
        self.position = start_of(&position);
        self.saver = None;
        Ok(())
    }

    async fn checkpoint_of(
        &self,
        record: &GenerationRecord,
    ) -> Result<Option<CheckpointRecord>, CoordError> {
        match &record.checkpoint {
            Some(id) => self.etcd.get_json(&self.keys.checkpoint(id)).await,
            None => Ok(None),
        }
    }

    /// Puts the queues back. Task keys of the new round count for nothing until the head names the
    /// round, so what does not fit into the last transaction goes ahead of it.
    async fn rewind(&mut self, batch: &mut Batch, to: &QueueSnapshot) -> Result<(), CoordError> {
        let facts = batch.state.ledger.rewind(to);
        let round = batch.state.ledger.head().round + 1;
        self.adopt(batch, &facts);
        if batch.changes.len() + CHANGES_OF_ONE <= OPS_MAX {
            return Ok(());
        }
        let (head, rest): (Vec<Op>, Vec<Op>) = std::mem::take(&mut batch.changes)
            .into_ops()
            .into_iter()
            .partition(|op| op.key() == self.keys.queue());
        for ops in rest.chunks(OPS_MAX) {
            self.reign.commit(&self.etcd, ops, &[]).await?;
        }
        info!(round, keys = rest.len(), "queues put back");
        head.into_iter().for_each(|op| batch.changes.add(op));
        Ok(())
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

impl Batch {
    fn later<T: Send + 'static>(&mut self, reply: Reply<T>, answer: Result<T, OfficeError>) {
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

fn discarded(state: &State) -> Vec<steadfast_common::records::DiscardedTask> {
    let mut all = state.sync_tasks.discarded();
    all.extend(state.ledger.discarded());
    all
}

fn start_of(position: &PositionRecord) -> Position {
    Position {
        version: position.version,
        pass: position.pass,
        pass_start: position.pass_start,
        examples: position.examples,
        loss: None,
    }
}
