//! The task queues of an asynchronous job.
//!
//! ```text
//!            claim                    finish
//!   todo ─────────────▶ pending ─────────────────▶ done
//!    ▲                     │  fail, timeout, lost trainer
//!    ├─────────────────────┤  failures ≤ failures_max, or all by one of several trainers
//!    │                     └─▶ discarded              failures > failures_max
//!    └──── end of the pass: all done and discarded tasks, failures reset
//! ```
//!
//! A decision ([`Ledger::next_task`], [`Ledger::expire`], …) is pure and returns facts. The caller
//! commits them to etcd and only then applies them with [`Ledger::evolve`], which cannot fail.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::given_up::GivenUpRecord;
use steadfast_common::ids::{Attempt, Pass, RequestId, TaskId, TrainerId};
use steadfast_common::records::{
    DispatchRecord, QueueRecord, QueueSnapshot, ReplyRecord, TaskRecord,
};
use steadfast_common::status::Queues;

pub use crate::draft::Attribution;
use crate::draft::Draft;
use crate::given_up::GivenUp;
use crate::holdings::Holdings;

/// A durable change to the queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// The head moved: a task was dispatched for the first time, an attempt was numbered, or a
    /// pass began.
    Head(QueueRecord),
    /// The record of a task changed: the task is waiting after a failure, pending or discarded.
    Task { task: TaskId, record: TaskRecord },
    /// A task was trained on.
    Done { task: TaskId },
    /// The passes in which a task was given up changed: one was added, or those after a restored
    /// checkpoint were removed. Without a record, the task was not given up in any pass.
    GivenUp { task: TaskId, record: Option<GivenUpRecord> },
    /// The reply to a request that got no task.
    Replied { trainer: TrainerId, reply: ReplyRecord },
    /// A trainer is gone; it sends no more retries.
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
    /// The trainer leaves; this does not count against the task.
    Returned {
        task: TaskId,
        attempt: Attempt,
    },
}

impl Report {
    /// Returns the reported task.
    pub fn task(&self) -> TaskId {
        match self {
            Self::Finished { task, .. }
            | Self::Failed { task, .. }
            | Self::Returned { task, .. } => *task,
        }
    }

    /// Returns the reported attempt.
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
    /// Whether the report changed the queues; a late report of an attempt that is over does not.
    pub counted: bool,
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
    pub(crate) orders: Orders,
    pub(crate) head: QueueRecord,
    pub(crate) retry: BTreeMap<TaskId, Retry>,
    pub(crate) pending: Holdings,
    pub(crate) discarded: BTreeMap<TaskId, (u32, String)>,
    /// All tasks that were given up, in this pass or before.
    pub(crate) given_up: GivenUp,
    /// The last replies without a task.
    pub(crate) replies: BTreeMap<TrainerId, ReplyRecord>,
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
    /// The request that was answered with this task, and whether its report counted.
    pub request: RequestId,
    pub counted: bool,
}

/// The order of tasks in the current pass; shared between copies of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Orders {
    pub pass: Pass,
    pub tasks: Arc<[TaskId]>,
}

/// Returns the order of a pass.
pub type OrderOf<'a> = &'a (dyn Fn(Pass) -> Vec<TaskId> + Sync);

impl Ledger {
    /// Creates a ledger in which all tasks wait in the first pass.
    pub fn new(order_of: OrderOf<'_>) -> Self {
        let orders = Orders { pass: Pass(0), tasks: order_of(Pass(0)).into() };
        Self {
            orders,
            head: QueueRecord::default(),
            retry: BTreeMap::new(),
            pending: Holdings::default(),
            discarded: BTreeMap::new(),
            given_up: GivenUp::default(),
            replies: BTreeMap::new(),
        }
    }

    /// Builds the ledger from the records in etcd.
    pub fn recover(
        head: QueueRecord,
        tasks: impl IntoIterator<Item = (TaskId, TaskRecord)>,
        given_up: GivenUp,
        replies: impl IntoIterator<Item = (TrainerId, ReplyRecord)>,
        order_of: OrderOf<'_>,
    ) -> Self {
        let mut ledger = Self::new(order_of);
        ledger.evolve(&Fact::Head(head), order_of);
        for (task, record) in tasks {
            ledger.evolve(&Fact::Task { task, record }, order_of);
        }
        ledger.given_up = given_up;
        for (trainer, reply) in replies {
            ledger.evolve(&Fact::Replied { trainer, reply }, order_of);
        }
        ledger
    }

    /// Returns the head as it is stored.
    pub fn head(&self) -> QueueRecord {
        self.head
    }

    /// Processes a report and dispatches a task, as one change.
    ///
    /// A repeated request gets its first reply again, without a change, as long as the trainer holds the
    /// task of that reply.
    pub fn next_task(&self, request: &Request, limits: &Limits) -> (Vec<Fact>, TaskReply) {
        if let Some(answer) = self.given_before(request, limits) {
            return (Vec::new(), answer);
        }
        let mut draft = Draft::new(self);
        let counted = match &request.report {
            Some(report) => draft.report(request.trainer, report, limits),
            None => false,
        };
        for (task, attempt) in self.forgotten(request) {
            draft.take_back(task, attempt, "its trainer never got it", Attribution::None, limits);
        }
        draft.close_pass_if_drained(limits);
        let next = match request.wants {
            Wants::Task => draft.dispatch(request, counted, limits),
            Wants::Nothing => Next::NotYet,
        };
        // The record of a dispatched task names its request. A reply without facts need not be stored:
        // the same request can be decided again.
        if !matches!(next, Next::Task(_)) && !draft.facts.is_empty() {
            let reply = ReplyRecord { request: request.id, counted };
            draft.facts.push(Fact::Replied { trainer: request.trainer, reply });
        }
        (draft.facts, TaskReply { counted, next })
    }

    /// Returns the reply that the same request got before.
    fn given_before(&self, request: &Request, limits: &Limits) -> Option<TaskReply> {
        let mut given = self.pending.of(request.trainer);
        if let Some((task, held)) = given.find(|(_, held)| held.request == request.id) {
            let (attempt, pass) = (held.attempt, self.head.pass);
            let next = Next::Task(DispatchRecord { task, attempt, pass });
            return Some(TaskReply { counted: held.counted, next });
        }
        let reply = self.replies.get(&request.trainer);
        let reply = reply.filter(|reply| reply.request == request.id)?;
        Some(TaskReply { counted: reply.counted, next: self.outlook(limits) })
    }

    fn outlook(&self, limits: &Limits) -> Next {
        if self.orders.tasks.len() == self.discarded.len() {
            return Next::AllFailed { pass: self.head.pass };
        }
        if limits.passes <= self.head.pass.0 { Next::AllDone } else { Next::NotYet }
    }

    /// Takes back an attempt whose deadline has passed, if it is still the pending one.
    pub fn expire(&self, task: TaskId, attempt: Attempt, limits: &Limits) -> Vec<Fact> {
        let mut draft = Draft::new(self);
        if draft.take_back(task, attempt, "its deadline passed", Attribution::Task, limits) {
            draft.close_pass_if_drained(limits);
        }
        draft.facts
    }

    /// Takes back all tasks of a lost trainer. The loss counts against its tasks, since one of them may
    /// have caused it, unless many trainers were lost at once or the time of the loss is unknown.
    pub fn lose_trainer(
        &self,
        trainer: TrainerId,
        attribution: Attribution,
        limits: &Limits,
    ) -> Vec<Fact> {
        let mut draft = Draft::new(self);
        for (task, attempt) in self.held_by(trainer) {
            draft.take_back(task, attempt, "its trainer was lost", attribution, limits);
        }
        draft.close_pass_if_drained(limits);
        if self.replies.contains_key(&trainer) {
            draft.facts.push(Fact::Forgotten { trainer });
        }
        draft.facts
    }

    /// Takes back all pending tasks without counting a failure: every trainer starts anew.
    pub fn recall(&self, limits: &Limits) -> Vec<Fact> {
        let mut draft = Draft::new(self);
        for (task, held) in self.pending.iter() {
            let reason = "the job started another generation";
            draft.take_back(task, held.attempt, reason, Attribution::None, limits);
        }
        let known = self.replies.keys().map(|trainer| Fact::Forgotten { trainer: *trainer });
        draft.facts.extend(known);
        draft.facts
    }

    /// Returns the attempts that were dispatched in replies which the trainer never received: the reply to
    /// a delayed duplicate of a request reaches no caller.
    fn forgotten(&self, request: &Request) -> Vec<(TaskId, Attempt)> {
        let Some(held) = &request.held else { return Vec::new() };
        let reported = request.report.as_ref().map(Report::attempt);
        let given = self.held_by(request.trainer);
        given.filter(|(_, it)| !held.contains(it) && reported != Some(*it)).collect()
    }

    /// Returns the attempts that a trainer holds.
    pub fn held_by(&self, trainer: TrainerId) -> impl Iterator<Item = (TaskId, Attempt)> + '_ {
        self.pending.of(trainer).map(|(task, pending)| (task, pending.attempt))
    }

    /// Returns all pending attempts.
    pub fn pending(&self) -> impl Iterator<Item = (TaskId, Attempt, TrainerId)> + '_ {
        self.pending.iter().map(|(task, held)| (task, held.attempt, held.trainer))
    }

    /// Returns all trainers that hold a task or have a stored reply.
    pub fn known_trainers(&self) -> BTreeSet<TrainerId> {
        let holders = self.pending.holders();
        holders.chain(self.replies.keys().copied()).collect()
    }

    /// Returns the sizes of the queues.
    pub fn queues(&self) -> Queues {
        let todo = self.orders.tasks.len() as u32 - self.head.cursor + self.retry.len() as u32;
        let pending = self.pending.len() as u32;
        let discarded = self.discarded.len() as u32;
        let done = self.orders.tasks.len() as u32 - todo - pending - discarded;
        Queues { todo, pending, done, discarded }
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
    pub fn rewind(&self, to: &QueueSnapshot) -> Vec<Fact> {
        let head = QueueRecord {
            round: self.head.round + 1,
            pass: to.pass,
            cursor: to.cursor,
            next_attempt: self.head.next_attempt,
        };
        let mut facts = vec![Fact::Head(head)];
        facts.extend(to.open.iter().map(|(task, failures)| {
            let reason = "the job was rolled back to a checkpoint".to_owned();
            let failures = TaskFailures { failures: *failures, failed_by: Vec::new() };
            Fact::Task { task: *task, record: failures.todo(reason) }
        }));
        facts.extend(to.discarded.iter().map(|(task, reason)| {
            let record = TaskRecord::Discarded { failures: 0, reason: reason.clone() };
            Fact::Task { task: *task, record }
        }));
        let changed = self.given_up.going_to(&to.given_up).into_iter();
        facts.extend(changed.map(|(task, record)| Fact::GivenUp { task, record }));
        facts.extend(self.replies.keys().map(|trainer| Fact::Forgotten { trainer: *trainer }));
        facts
    }

    /// Applies one committed fact to the state.
    pub fn evolve(&mut self, fact: &Fact, order_of: OrderOf<'_>) {
        match fact {
            Fact::Head(head) => self.move_head(*head, order_of),
            Fact::Task { task, record } => {
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
                        counted,
                        failed_by,
                    } => {
                        let failures = TaskFailures { failures, failed_by };
                        let held = Pending { failures, attempt, trainer, request, counted };
                        self.pending.insert(*task, held);
                    }
                    TaskRecord::Discarded { failures, reason } => {
                        self.discarded.insert(*task, (failures, reason));
                    }
                }
            }
            Fact::Done { task } => self.unlist(*task),
            Fact::GivenUp { task, record } => self.given_up.set(*task, record.clone()),
            Fact::Replied { trainer, reply } => {
                self.replies.insert(*trainer, reply.clone());
            }
            Fact::Forgotten { trainer } => {
                self.replies.remove(trainer);
            }
        }
    }

    fn unlist(&mut self, task: TaskId) {
        self.retry.remove(&task);
        self.pending.remove(task);
        self.discarded.remove(&task);
    }

    fn move_head(&mut self, head: QueueRecord, order_of: OrderOf<'_>) {
        if head.round != self.head.round {
            self.retry.clear();
            self.pending.clear();
            self.discarded.clear();
        }
        if head.pass != self.orders.pass {
            self.orders = Orders { pass: head.pass, tasks: order_of(head.pass).into() };
        }
        let cursor = head.cursor.min(self.orders.tasks.len() as u32);
        self.head = QueueRecord { cursor, ..head };
    }
}
