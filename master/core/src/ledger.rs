//! The task queues of an asynchronous job.
//!
//! ```text
//!            claim                    finish
//!   todo ─────────────▶ pending ─────────────────▶ done
//!                        ▲   │ late, and a trainer is idle
//!                        └───┘
//!    ▲                     │  fail, timeout, lost trainer
//!    ├─────────────────────┤  failures ≤ failures_max, or all by one of several trainers
//!    │                     └─▶ discarded              failures > failures_max
//!    └──── end of the pass: all done and discarded tasks, failures reset
//! ```
//!
//! A decision ([`Ledger::report`], [`Ledger::dispatch`], …) is pure and returns facts, which
//! [`Ledger::evolve`] applies and which cannot fail. [`crate::draft::Draft`] combines decisions.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use steadfast_common::ids::{Attempt, Pass, RequestId, TaskId, TrainerId};
use steadfast_common::job::schedule::stream_order;
use steadfast_common::records::given_up::GivenUpRecord;
use steadfast_common::records::{
    DispatchRecord, QueueRecord, QueueSnapshot, ReplyRecord, TaskRecord,
};
use steadfast_common::status::Queues;

use crate::given_up::GivenUp;
use crate::holdings::Holdings;

/// Tasks that one trainer may hold. All of them must fit into the transaction that takes them back.
pub const HELD_MAX: usize = 16;

/// Whether a failure counts against the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribution {
    Task,
    None,
}

/// A durable change to the queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueFact {
    /// The head moved: a task was dispatched for the first time, an attempt was numbered, or a
    /// pass began.
    Head(QueueRecord),
    /// The record of a task changed: the task is waiting after a failure, pending or discarded.
    Task { round: u64, task: TaskId, record: TaskRecord },
    /// A task was trained on.
    Done { round: u64, task: TaskId },
    /// The passes in which a task was given up changed: one was added, or those after a restored
    /// checkpoint were removed. Without a record, the task was not given up in any pass.
    GivenUp { task: TaskId, record: Option<GivenUpRecord> },
    /// The reply to a request that got no task.
    Replied { trainer: TrainerId, reply: ReplyRecord },
    /// A trainer was lost; it sends no more retries.
    Forgotten { trainer: TrainerId },
}

/// Result of a trainer's last task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    Finished {
        task: TaskId,
        attempt: Attempt,
    },
    Failed {
        task: TaskId,
        attempt: Attempt,
        reason: String,
    },
    /// The trainer leaves, or cannot reach the data. This does not count against the task.
    Returned {
        task: TaskId,
        attempt: Attempt,
        /// Why the data cannot be reached.
        unreachable: Option<String>,
    },
}

impl Report {
    pub fn task(&self) -> TaskId {
        match self {
            Self::Finished { task, .. }
            | Self::Failed { task, .. }
            | Self::Returned { task, .. } => *task,
        }
    }

    pub fn attempt(&self) -> Attempt {
        match self {
            Self::Finished { attempt, .. }
            | Self::Failed { attempt, .. }
            | Self::Returned { attempt, .. } => *attempt,
        }
    }
}

/// A trainer's request for a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub id: RequestId,
    pub trainer: TrainerId,
    pub report: Option<Report>,
    pub wants: Wants,
    /// Attempts that the trainer holds besides the reported one, if the request lists them.
    pub held: Option<BTreeSet<Attempt>>,
}

/// Whether the trainer wants another task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wants {
    Task,
    Nothing,
}

/// Reply to a trainer's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskReply {
    /// Whether the report was accepted; a late report of an attempt that is over is not.
    pub accepted: bool,
    pub next: Next,
}

/// What a trainer does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    Task(DispatchRecord),
    /// No task waits, but some are pending: they may be returned, or the pass may end.
    NotYet,
    /// Every pass is over.
    AllDone,
    /// Every task of a pass was given up.
    AllFailed {
        pass: Pass,
    },
}

/// Bounds of the job.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub passes: u32,
    /// A task is discarded when it has more failures than this.
    pub failures_max: u32,
    /// Live trainers. If there are at least two, two of them must fail before a task is discarded.
    pub trainers: u32,
    /// How long a trainer may hold a task.
    pub deadline_ms: u64,
}

/// The state of the queues: the result of applying all facts of a job.
///
/// Each task of the pass is in exactly one queue: `retry` or the order from `head.cursor` on
/// (todo), `pending`, `discarded`, or none of these (done).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    order: TaskOrder,
    orders: Orders,
    head: QueueRecord,
    retry: BTreeMap<TaskId, Retry>,
    pending: Holdings,
    discarded: BTreeMap<TaskId, (u32, String)>,
    /// All tasks that were given up, in this pass or before.
    given_up: GivenUp,
    /// The last replies without a task.
    replies: BTreeMap<TrainerId, ReplyRecord>,
}

/// How often a task failed in this pass, and on which trainers (at most two are kept).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TaskFailures {
    pub failures: u32,
    pub failed_by: Vec<TrainerId>,
}

impl TaskFailures {
    /// Adds a failure on `trainer`.
    pub fn and(mut self, trainer: TrainerId) -> Self {
        self.failures += 1;
        if self.failed_by.len() < 2 && !self.failed_by.contains(&trainer) {
            self.failed_by.push(trainer);
        }
        self
    }

    /// Returns whether two trainers failed, so that a record may be the reason.
    pub fn is_suspicious(&self) -> bool {
        2 <= self.failed_by.len()
    }

    /// Returns whether the failures are attributed to the task. A single trainer may fail for reasons of
    /// its own, so two must fail if there are two. After twice as many failures of one trainer, the
    /// master stops waiting for a second one.
    pub fn is_enough(&self, limits: &Limits) -> bool {
        let by_two = 2 <= self.failed_by.len() || limits.trainers < 2;
        let alone_max = limits.failures_max.saturating_mul(2).saturating_add(1);
        limits.failures_max < self.failures && (by_two || alone_max < self.failures)
    }
}

impl TaskFailures {
    /// Returns the record of a task that waits again.
    pub fn todo(self, reason: String) -> TaskRecord {
        let Self { failures, failed_by } = self;
        TaskRecord::Todo { failures, reason, report: None, failed_by }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Retry {
    pub failures: TaskFailures,
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pending {
    pub failures: TaskFailures,
    pub attempt: Attempt,
    pub trainer: TrainerId,
    /// The request that was answered with this task, and whether its report was accepted.
    pub request: RequestId,
    pub accepted: bool,
    /// The attempt of another trainer that may finish first.
    pub backs_up: Option<Attempt>,
}

/// The order of tasks in the current pass; shared between copies of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Orders {
    pub pass: Pass,
    /// The tasks in order; `None` for a pass of a stream that has no files yet.
    pub tasks: Option<Arc<[TaskId]>>,
}

/// The order of the tasks of a pass.
#[derive(Clone)]
pub enum TaskOrder {
    /// A function of the pass; the same for all copies of a job's state.
    Fixed(Arc<dyn Fn(Pass) -> Vec<TaskId> + Send + Sync>),
    /// The order in a stream, given by the seed and the number of tasks of each pass so far.
    Stream { seed: u64, tasks: Arc<BTreeMap<Pass, u32>> },
}

impl TaskOrder {
    pub fn new(order_of: impl Fn(Pass) -> Vec<TaskId> + Send + Sync + 'static) -> Self {
        Self::Fixed(Arc::new(order_of))
    }

    /// Returns the order in a stream that has no passes yet.
    pub fn of_stream(seed: u64) -> Self {
        Self::Stream { seed, tasks: Arc::default() }
    }

    fn of(&self, pass: Pass) -> Option<Arc<[TaskId]>> {
        match self {
            Self::Fixed(order_of) => Some(order_of(pass).into()),
            Self::Stream { seed, tasks } => {
                Some(stream_order(*tasks.get(&pass)?, *seed, pass).into())
            }
        }
    }
}

impl fmt::Debug for TaskOrder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("TaskOrder")
    }
}

impl PartialEq for TaskOrder {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Stream { tasks, .. }, Self::Stream { tasks: others, .. }) => tasks == others,
            (Self::Fixed(_), Self::Fixed(_)) => true,
            (Self::Stream { .. }, Self::Fixed(_)) | (Self::Fixed(_), Self::Stream { .. }) => false,
        }
    }
}

impl Eq for TaskOrder {}

impl Ledger {
    /// Creates a ledger in which all tasks wait in the first pass. `given_up` lists the tasks that were given
    /// up before.
    pub fn new(order: TaskOrder, given_up: GivenUp) -> Self {
        let orders = Orders { pass: Pass(0), tasks: order.of(Pass(0)) };
        Self {
            order,
            orders,
            head: QueueRecord::default(),
            retry: BTreeMap::new(),
            pending: Holdings::default(),
            discarded: BTreeMap::new(),
            given_up,
            replies: BTreeMap::new(),
        }
    }

    /// Sets the number of tasks in a pass of a stream, or removes the pass if `tasks` is `None`.
    pub fn set_pass(&mut self, pass: Pass, tasks: Option<u32>) {
        let TaskOrder::Stream { tasks: known, .. } = &mut self.order else { return };
        match tasks {
            Some(tasks) => Arc::make_mut(known).insert(pass, tasks),
            None => Arc::make_mut(known).remove(&pass),
        };
        if pass == self.orders.pass {
            self.orders.tasks = self.order.of(pass);
        }
    }

    /// Returns the tasks of the current pass in order; none if the order is not known yet.
    fn tasks(&self) -> &[TaskId] {
        self.orders.tasks.as_deref().unwrap_or_default()
    }

    /// Returns the head as it is stored.
    pub fn head(&self) -> QueueRecord {
        self.head
    }

    /// Returns the reply that an earlier copy of the request got. A repeated request gets that reply again as long as
    /// the trainer holds the task of it.
    pub(crate) fn given_before(&self, request: &Request, limits: &Limits) -> Option<TaskReply> {
        let mut given = self.pending.of(request.trainer);
        if let Some((task, held)) = given.find(|(_, held)| held.request == request.id) {
            let (attempt, pass) = (held.attempt, self.head.pass);
            let is_suspected = held.failures.is_suspicious();
            let next = Next::Task(DispatchRecord { task, attempt, pass, is_suspected });
            return Some(TaskReply { accepted: held.accepted, next });
        }
        let reply = self.replies.get(&request.trainer);
        let reply = reply.filter(|reply| reply.request == request.id)?;
        Some(TaskReply { accepted: reply.accepted, next: self.answer_without_task(limits) })
    }

    /// Returns the answer to a trainer that gets no task.
    fn answer_without_task(&self, limits: &Limits) -> Next {
        if self.all_discarded() {
            return Next::AllFailed { pass: self.head.pass };
        }
        if limits.passes <= self.head.pass.0 { Next::AllDone } else { Next::NotYet }
    }

    /// Returns the facts of a report, or none if its attempt has ended.
    pub fn report(&self, trainer: TrainerId, report: &Report, limits: &Limits) -> Vec<QueueFact> {
        let (task, attempt) = (report.task(), report.attempt());
        let Some(held) = self.pending.get(task) else { return Vec::new() };
        let is_current = held.attempt == attempt && held.trainer == trainer;
        // All records of the task were applied, by either attempt.
        let is_backed_up =
            matches!(report, Report::Finished { .. }) && held.backs_up == Some(attempt);
        if !is_current && !is_backed_up {
            return Vec::new();
        }
        match report {
            Report::Finished { .. } => vec![QueueFact::Done { round: self.head.round, task }],
            Report::Failed { reason, .. } => {
                self.requeue(task, attempt, reason, Attribution::Task, limits)
            }
            Report::Returned { unreachable, .. } => {
                let reason = unreachable.as_deref().unwrap_or("its trainer returned it");
                self.requeue(task, attempt, reason, Attribution::None, limits)
            }
        }
    }

    /// Requeues a task whose attempt has ended without success, if the attempt is still the pending one. Discards the
    /// task after too many failures.
    pub fn requeue(
        &self,
        task: TaskId,
        attempt: Attempt,
        reason: &str,
        attribution: Attribution,
        limits: &Limits,
    ) -> Vec<QueueFact> {
        let held = self.pending.get(task).filter(|held| held.attempt == attempt).cloned();
        let Some(held) = held else { return Vec::new() };
        let failures = match attribution {
            Attribution::Task => held.failures.and(held.trainer),
            Attribution::None => held.failures,
        };
        let (round, reason) = (self.head.round, reason.to_owned());
        if attribution == Attribution::None || !failures.is_enough(limits) {
            return vec![QueueFact::Task { round, task, record: failures.todo(reason) }];
        }
        let given_up = Some(self.given_up.with(task, self.head.pass, &reason));
        let record = TaskRecord::Discarded { failures: failures.failures, reason };
        vec![QueueFact::GivenUp { task, record: given_up }, QueueFact::Task { round, task, record }]
    }

    /// Returns the fact that begins the next pass once no task is waiting or pending, however the last task ended. A
    /// pass in which every task was given up stays as it is: the job has failed.
    pub fn close_pass_if_drained(&self, limits: &Limits) -> Option<QueueFact> {
        let is_drained = self.retry.is_empty()
            && self.pending.len() == 0
            && self.orders.tasks.is_some()
            && self.head.cursor as usize == self.tasks().len();
        if limits.passes <= self.head.pass.0 || !is_drained || self.all_discarded() {
            return None;
        }
        Some(QueueFact::Head(QueueRecord {
            round: self.head.round + 1,
            pass: Pass(self.head.pass.0 + 1),
            cursor: 0,
            next_attempt: self.head.next_attempt,
        }))
    }

    /// Dispatches the next task to the caller of `request`, if one waits. If none does, a trainer without a task backs
    /// up one of the `late` attempts, once: the pass ends with the first that finishes.
    pub fn dispatch(
        &self,
        request: &Request,
        accepted: bool,
        late: &[(TaskId, Attempt)],
        limits: &Limits,
    ) -> (Vec<QueueFact>, Next) {
        let Request { id, trainer, .. } = *request;
        let answer = self.answer_without_task(limits);
        if answer != Next::NotYet || HELD_MAX <= self.held_by(trainer).count() {
            return (Vec::new(), answer);
        }
        let waiting = self.next_waiting(trainer).map(|(task, failures)| (task, failures, None));
        let next = waiting.or_else(|| self.next_late(trainer, late));
        let Some((task, failures, backs_up)) = next else { return (Vec::new(), Next::NotYet) };
        let is_fresh = (self.head.cursor as usize) < self.tasks().len();
        let attempt = self.head.next_attempt;
        let head = QueueRecord {
            cursor: self.head.cursor + u32::from(is_fresh),
            next_attempt: Attempt(attempt.0 + 1),
            ..self.head
        };
        let is_suspected = failures.is_suspicious();
        let TaskFailures { failures, failed_by } = failures;
        let record = TaskRecord::Pending {
            failures,
            attempt,
            trainer,
            request: id,
            accepted,
            failed_by,
            backs_up,
        };
        let pending = QueueFact::Task { round: head.round, task, record };
        let next = Next::Task(DispatchRecord { task, attempt, pass: head.pass, is_suspected });
        (vec![QueueFact::Head(head), pending], next)
    }

    /// Returns fresh tasks first. A task that failed before waits until all others were tried, and
    /// preferably goes to a trainer that has not failed it.
    fn next_waiting(&self, trainer: TrainerId) -> Option<(TaskId, TaskFailures)> {
        if let Some(task) = self.tasks().get(self.head.cursor as usize) {
            return Some((*task, TaskFailures::default()));
        }
        let failed_elsewhere =
            |(_, retry): &(&TaskId, &Retry)| !retry.failures.failed_by.contains(&trainer);
        let next = self.retry.iter().find(failed_elsewhere).or_else(|| self.retry.iter().next())?;
        Some((*next.0, next.1.failures.clone()))
    }

    /// Returns the first of the `late` attempts that is not a backup, if `trainer` has no task.
    fn next_late(
        &self,
        trainer: TrainerId,
        late: &[(TaskId, Attempt)],
    ) -> Option<(TaskId, TaskFailures, Option<Attempt>)> {
        let is_idle = self.held_by(trainer).next().is_none();
        late.iter().filter(|_| is_idle).find_map(|(task, attempt)| {
            let held = self.pending.get(*task)?;
            let may = held.attempt == *attempt && held.backs_up.is_none();
            may.then(|| (*task, held.failures.clone(), Some(*attempt)))
        })
    }

    /// Returns whether every task of the pass was given up, so that the job has failed. Returns false for a stream,
    /// which goes on: one bad file may be a whole pass.
    fn all_discarded(&self) -> bool {
        match self.order {
            TaskOrder::Fixed(_) => self.discarded.len() == self.tasks().len(),
            TaskOrder::Stream { .. } => false,
        }
    }

    /// Takes back all pending tasks without counting a failure: every trainer starts anew.
    pub fn recall(&self, limits: &Limits) -> Vec<QueueFact> {
        let reason = "the job started another generation";
        let pending = self.pending.iter();
        let mut facts: Vec<QueueFact> = pending
            .flat_map(|(task, held)| {
                self.requeue(task, held.attempt, reason, Attribution::None, limits)
            })
            .collect();
        facts.extend(self.replies.keys().map(|it| QueueFact::Forgotten { trainer: *it }));
        facts
    }

    /// Returns whether a reply to `trainer` is stored.
    pub(crate) fn has_replied(&self, trainer: TrainerId) -> bool {
        self.replies.contains_key(&trainer)
    }

    /// Returns the attempts that were dispatched in replies which the trainer never received: the reply to
    /// a delayed duplicate of a request reaches no caller.
    pub(crate) fn forgotten(&self, request: &Request) -> Vec<(TaskId, Attempt)> {
        let Some(held) = &request.held else { return Vec::new() };
        let reported = request.report.as_ref().map(Report::attempt);
        let given = self.held_by(request.trainer);
        given.filter(|(_, it)| !held.contains(it) && reported != Some(*it)).collect()
    }

    pub fn held_by(&self, trainer: TrainerId) -> impl Iterator<Item = (TaskId, Attempt)> + '_ {
        self.pending.of(trainer).map(|(task, pending)| (task, pending.attempt))
    }

    pub fn pending(&self) -> impl Iterator<Item = (TaskId, Attempt, TrainerId)> + '_ {
        self.pending.iter().map(|(task, held)| (task, held.attempt, held.trainer))
    }

    /// Returns the trainers that hold a task or have a stored reply and are not in `live`.
    pub fn lost_trainers(&self, live: &BTreeSet<TrainerId>) -> BTreeSet<TrainerId> {
        let known = self.pending.holders().chain(self.replies.keys().copied());
        known.filter(|trainer| !live.contains(trainer)).collect()
    }

    /// Returns the sizes of the queues.
    pub fn queues(&self) -> Queues {
        let tasks = self.tasks().len() as u32;
        let todo = tasks - self.head.cursor + self.retry.len() as u32;
        let pending = self.pending.len() as u32;
        let discarded = self.discarded.len() as u32;
        let done = tasks - todo - pending - discarded;
        Queues { todo, pending, done, discarded }
    }

    /// Returns the tasks that wait after a failure, with the reason of the last one.
    pub fn failing(&self) -> impl Iterator<Item = (TaskId, &str)> {
        let failing = self.retry.iter().filter(|(_, retry)| 0 < retry.failures.failures);
        failing.map(|(task, retry)| (*task, retry.reason.as_str()))
    }

    /// Returns all tasks that were given up, in this pass or before.
    pub fn given_up(&self) -> &GivenUp {
        &self.given_up
    }

    /// Returns the queues as a checkpoint stores them: pending tasks count as waiting.
    pub fn snapshot(&self) -> QueueSnapshot {
        let retry = self.retry.iter().map(|(task, retry)| (*task, retry.failures.failures));
        let pending = self.pending.iter().map(|(task, held)| (task, held.failures.failures));
        let discarded = self.discarded.iter().map(|(task, (_, reason))| (*task, reason.clone()));
        QueueSnapshot {
            pass: self.head.pass,
            cursor: self.head.cursor,
            open: retry.chain(pending).collect(),
            discarded: discarded.collect(),
            given_up: self.given_up.passes(),
        }
    }

    /// Returns whether a task was given up since `snapshot` was taken.
    pub fn gave_up_since(&self, snapshot: &QueueSnapshot) -> bool {
        !self.given_up.going_to(&snapshot.given_up).is_empty()
    }

    /// Returns to the queues of a checkpoint, in a new round. Attempt numbers continue, so an attempt of
    /// an abandoned generation is never mistaken for a new one.
    pub fn rewind(&self, to: &QueueSnapshot) -> Vec<QueueFact> {
        let head = QueueRecord {
            round: self.head.round + 1,
            pass: to.pass,
            cursor: to.cursor,
            next_attempt: self.head.next_attempt,
        };
        let mut facts = vec![QueueFact::Head(head)];
        facts.extend(to.open.iter().map(|(task, failures)| {
            let reason = "the job was rolled back to a checkpoint".to_owned();
            let failures = TaskFailures { failures: *failures, failed_by: Vec::new() };
            QueueFact::Task { round: head.round, task: *task, record: failures.todo(reason) }
        }));
        facts.extend(to.discarded.iter().map(|(task, reason)| {
            let record = TaskRecord::Discarded { failures: 0, reason: reason.clone() };
            QueueFact::Task { round: head.round, task: *task, record }
        }));
        let changed = self.given_up.going_to(&to.given_up).into_iter();
        facts.extend(changed.map(|(task, record)| QueueFact::GivenUp { task, record }));
        facts.extend(self.replies.keys().map(|trainer| QueueFact::Forgotten { trainer: *trainer }));
        facts
    }

    /// Applies one committed fact to the state.
    pub fn evolve(&mut self, fact: &QueueFact) {
        match fact {
            QueueFact::Head(head) => self.move_head(*head),
            QueueFact::Task { task, record, .. } => {
                self.unlist(*task);
                match record.clone() {
                    TaskRecord::Todo { failures, reason, report: _, failed_by } => {
                        let failures = TaskFailures { failures, failed_by };
                        self.retry.insert(*task, Retry { failures, reason });
                    }
                    TaskRecord::Pending {
                        failures,
                        attempt,
                        trainer,
                        request,
                        accepted,
                        failed_by,
                        backs_up,
                    } => {
                        let failures = TaskFailures { failures, failed_by };
                        let held =
                            Pending { failures, attempt, trainer, request, accepted, backs_up };
                        self.pending.insert(*task, held);
                    }
                    TaskRecord::Discarded { failures, reason } => {
                        self.discarded.insert(*task, (failures, reason));
                    }
                }
            }
            QueueFact::Done { task, .. } => self.unlist(*task),
            QueueFact::GivenUp { task, record } => self.given_up.set(*task, record.clone()),
            QueueFact::Replied { trainer, reply } => {
                self.replies.insert(*trainer, reply.clone());
            }
            QueueFact::Forgotten { trainer } => {
                self.replies.remove(trainer);
            }
        }
    }

    fn unlist(&mut self, task: TaskId) {
        self.retry.remove(&task);
        self.pending.remove(task);
        self.discarded.remove(&task);
    }

    fn move_head(&mut self, head: QueueRecord) {
        if head.round != self.head.round {
            self.retry.clear();
            self.pending.clear();
            self.discarded.clear();
        }
        if head.pass != self.orders.pass {
            self.orders = Orders { pass: head.pass, tasks: self.order.of(head.pass) };
        }
        let cursor = head.cursor.min(self.tasks().len() as u32);
        self.head = QueueRecord { cursor, ..head };
    }
}
