//! The task queues of an asynchronous job.
//!
//! ```text
//!            claim                    finish
//!   todo ─────────────▶ pending ─────────────────▶ done
//!    ▲                     │  fail, timeout, lost trainer
//!    ├─────────────────────┤  failures ≤ failures_max, or all by one of several trainers
//!    │                     └─▶ discarded              failures > failures_max
//!    └──── pass over: all of done and discarded, failures reset
//! ```
//!
//! A decision ([`Ledger::next_task`], [`Ledger::expire`], …) is pure and returns facts; the caller
//! commits them to etcd and only then folds them in with [`Ledger::evolve`], which cannot fail.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::{Attempt, Pass, RequestId, TaskId, TrainerId};
use steadfast_common::records::{
    DiscardedTask, DispatchRecord, QueueRecord, QueueSnapshot, ReplyRecord, TaskRecord,
};
use steadfast_common::status::Queues;

pub use crate::draft::Blame;
use crate::draft::Draft;
use crate::holdings::Holdings;

/// A durable change to the queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// The head moved: a task was dispatched for the first time, an attempt was numbered, or a
    /// pass began.
    Head(QueueRecord),
    /// A task is no longer simply waiting or done.
    Task { task: TaskId, record: TaskRecord },
    /// A task was trained on.
    Done { task: TaskId },
    /// A task was given up in a pass; kept beyond the pass, for the user's eyes.
    GivenUp { pass: Pass, task: TaskId, reason: String },
    /// The pass is done again from a checkpoint in which the task was not given up.
    TakenBack { pass: Pass, task: TaskId },
    /// What a trainer was answered that got no task.
    Replied { trainer: TrainerId, reply: ReplyRecord },
    /// A trainer is gone; its retries will not come.
    Forgotten { trainer: TrainerId },
}

/// How a trainer's last task went.
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
    /// The trainer leaves; no fault of the task.
    Returned {
        task: TaskId,
        attempt: Attempt,
    },
}

impl Report {
    /// The task that it is about.
    pub fn task(&self) -> TaskId {
        match self {
            Self::Finished { task, .. }
            | Self::Failed { task, .. }
            | Self::Returned { task, .. } => *task,
        }
    }

    /// The attempt at it.
    pub fn attempt(&self) -> Attempt {
        match self {
            Self::Finished { attempt, .. }
            | Self::Failed { attempt, .. }
            | Self::Returned { attempt, .. } => *attempt,
        }
    }
}

/// What a trainer asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub id: RequestId,
    pub trainer: TrainerId,
    pub report: Option<Report>,
    pub wants: Wants,
    /// Attempts in the trainer's care beside the reported one, if it says so.
    pub held: Option<BTreeSet<Attempt>>,
}

/// Whether the trainer goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wants {
    Task,
    Nothing,
}

/// What a trainer is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether the report changed the queues; a late one of an attempt that is over does not.
    pub counted: bool,
    pub next: Next,
}

/// What a trainer does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    Task(DispatchRecord),
    /// Nothing waits, but tasks are pending: they may come back, or the pass may end.
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
    /// One failure more than this discards a task.
    pub failures_max: u32,
    /// Live trainers. Where there are two, two have to fail before a task is discarded.
    pub trainers: u32,
    /// How long a trainer may hold a task.
    pub deadline_ms: u64,
}

/// The fold of all facts of a job.
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
    /// Every task that was given up, in this pass or before.
    pub(crate) given_up: BTreeMap<(Pass, TaskId), String>,
    /// The last answers that gave no task.
    pub(crate) replies: BTreeMap<TrainerId, ReplyRecord>,
}

/// How often a task failed in this pass, and with whom: at most two of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blamed {
    pub failures: u32,
    pub failed_by: Vec<TrainerId>,
}

impl Blamed {
    /// One failure more.
    pub fn and(mut self, trainer: TrainerId) -> Self {
        self.failures += 1;
        if self.failed_by.len() < 2 && !self.failed_by.contains(&trainer) {
            self.failed_by.push(trainer);
        }
        self
    }

    /// Whether the task is to blame. One trainer may fail for reasons of its own, so where there are
    /// two both have to; but nobody waits for ever for a second one that does not ask.
    pub fn is_enough(&self, limits: &Limits) -> bool {
        let by_two = 2 <= self.failed_by.len() || limits.trainers < 2;
        let patience = limits.failures_max.saturating_mul(2).saturating_add(1);
        limits.failures_max < self.failures && (by_two || patience < self.failures)
    }
}

impl Blamed {
    /// The record of a task that waits again.
    pub fn todo(self, reason: String) -> TaskRecord {
        let Self { failures, failed_by } = self;
        TaskRecord::Todo { failures, reason, report: None, failed_by }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Retry {
    pub blamed: Blamed,
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pending {
    pub blamed: Blamed,
    pub attempt: Attempt,
    pub trainer: TrainerId,
    /// The request that it answered, and whether that one's report counted.
    pub request: RequestId,
    pub counted: bool,
}

/// The order of tasks in the present pass; shared between copies of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Orders {
    pub pass: Pass,
    pub tasks: Arc<[TaskId]>,
}

/// Gives the order of a pass.
pub type OrderOf<'a> = &'a (dyn Fn(Pass) -> Vec<TaskId> + Sync);

impl Ledger {
    /// All tasks wait in the first pass.
    pub fn new(order_of: OrderOf<'_>) -> Self {
        let orders = Orders { pass: Pass(0), tasks: order_of(Pass(0)).into() };
        Self {
            orders,
            head: QueueRecord::default(),
            retry: BTreeMap::new(),
            pending: Holdings::default(),
            discarded: BTreeMap::new(),
            given_up: BTreeMap::new(),
            replies: BTreeMap::new(),
        }
    }

    /// Builds the ledger from what etcd holds.
    pub fn recover(
        head: QueueRecord,
        tasks: impl IntoIterator<Item = (TaskId, TaskRecord)>,
        given_up: impl IntoIterator<Item = ((Pass, TaskId), String)>,
        replies: impl IntoIterator<Item = (TrainerId, ReplyRecord)>,
        order_of: OrderOf<'_>,
    ) -> Self {
        let mut ledger = Self::new(order_of);
        ledger.evolve(&Fact::Head(head), order_of);
        for (task, record) in tasks {
            ledger.evolve(&Fact::Task { task, record }, order_of);
        }
        ledger.given_up.extend(given_up);
        for (trainer, reply) in replies {
            ledger.evolve(&Fact::Replied { trainer, reply }, order_of);
        }
        ledger
    }

    /// The head as it is stored.
    pub fn head(&self) -> QueueRecord {
        self.head
    }

    /// Takes a report and gives out a task, as one change.
    ///
    /// A repeated request gets the answer that it got before, without a change, as long as the trainer
    /// has what that gave it.
    pub fn next_task(&self, request: &Request, limits: &Limits) -> (Vec<Fact>, Answer) {
        if let Some(answer) = self.given_before(request, limits) {
            return (Vec::new(), answer);
        }
        let mut draft = Draft::new(self);
        let counted = match &request.report {
            Some(report) => draft.report(request.trainer, report, limits),
            None => false,
        };
        for (task, attempt) in self.forgotten(request) {
            draft.take_back(task, attempt, "its trainer never got it", Blame::Nobody, limits);
        }
        draft.close_pass_if_drained(limits);
        let next = match request.wants {
            Wants::Task => draft.dispatch(request, counted, limits),
            Wants::Nothing => Next::NotYet,
        };
        // A task's record tells for which request it was given out; and an answer without effect need
        // not be remembered: the same question may be asked again.
        if !matches!(next, Next::Task(_)) && !draft.facts.is_empty() {
            let reply = ReplyRecord { request: request.id, counted };
            draft.facts.push(Fact::Replied { trainer: request.trainer, reply });
        }
        (draft.facts, Answer { counted, next })
    }

    /// The answer that the same request got before.
    fn given_before(&self, request: &Request, limits: &Limits) -> Option<Answer> {
        let mut given = self.pending.of(request.trainer);
        if let Some((task, held)) = given.find(|(_, held)| held.request == request.id) {
            let (attempt, pass) = (held.attempt, self.head.pass);
            let next = Next::Task(DispatchRecord { task, attempt, pass });
            return Some(Answer { counted: held.counted, next });
        }
        let reply = self.replies.get(&request.trainer);
        let reply = reply.filter(|reply| reply.request == request.id)?;
        Some(Answer { counted: reply.counted, next: self.outlook(limits) })
    }

    fn outlook(&self, limits: &Limits) -> Next {
        if self.orders.tasks.len() == self.discarded.len() {
            return Next::AllFailed { pass: self.head.pass };
        }
        if limits.passes <= self.head.pass.0 { Next::AllDone } else { Next::NotYet }
    }

    /// Takes back one attempt whose time is up, if it is still the pending one.
    pub fn expire(&self, task: TaskId, attempt: Attempt, limits: &Limits) -> Vec<Fact> {
        let mut draft = Draft::new(self);
        if draft.take_back(task, attempt, "its deadline passed", Blame::Task, limits) {
            draft.close_pass_if_drained(limits);
        }
        draft.facts
    }

    /// Takes back everything that a lost trainer held. Its death counts against its tasks, since one
    /// of them may have caused it; unless many went at once, or nobody knows when.
    pub fn lose_trainer(&self, trainer: TrainerId, blame: Blame, limits: &Limits) -> Vec<Fact> {
        let mut draft = Draft::new(self);
        for (task, attempt) in self.held_by(trainer) {
            draft.take_back(task, attempt, "its trainer was lost", blame, limits);
        }
        draft.close_pass_if_drained(limits);
        if self.replies.contains_key(&trainer) {
            draft.facts.push(Fact::Forgotten { trainer });
        }
        draft.facts
    }

    /// Takes back everything that is pending, held against nobody: every trainer begins anew.
    pub fn recall(&self, limits: &Limits) -> Vec<Fact> {
        let mut draft = Draft::new(self);
        for (task, held) in self.pending.iter() {
            let reason = "the job began another generation";
            draft.take_back(task, held.attempt, reason, Blame::Nobody, limits);
        }
        let known = self.replies.keys().map(|trainer| Fact::Forgotten { trainer: *trainer });
        draft.facts.extend(known);
        draft.facts
    }

    /// What a trainer was given in an answer that it never got: a request that arrived a second time,
    /// long after it was answered, is answered to nobody.
    fn forgotten(&self, request: &Request) -> Vec<(TaskId, Attempt)> {
        let Some(held) = &request.held else { return Vec::new() };
        let reported = request.report.as_ref().map(Report::attempt);
        let given = self.held_by(request.trainer);
        given.filter(|(_, it)| !held.contains(it) && reported != Some(*it)).collect()
    }

    /// Attempts that a trainer holds.
    pub fn held_by(&self, trainer: TrainerId) -> impl Iterator<Item = (TaskId, Attempt)> + '_ {
        self.pending.of(trainer).map(|(task, pending)| (task, pending.attempt))
    }

    /// All pending attempts.
    pub fn pending(&self) -> impl Iterator<Item = (TaskId, Attempt, TrainerId)> + '_ {
        self.pending.iter().map(|(task, held)| (task, held.attempt, held.trainer))
    }

    /// Everyone who holds a task or has a remembered reply.
    pub fn known_trainers(&self) -> BTreeSet<TrainerId> {
        let holders = self.pending.holders();
        holders.chain(self.replies.keys().copied()).collect()
    }

    /// Sizes of the queues.
    pub fn queues(&self) -> Queues {
        let todo = self.orders.tasks.len() as u32 - self.head.cursor + self.retry.len() as u32;
        let pending = self.pending.len() as u32;
        let discarded = self.discarded.len() as u32;
        let done = self.orders.tasks.len() as u32 - todo - pending - discarded;
        Queues { todo, pending, done, discarded }
    }

    /// Every task that was given up, in this pass or before.
    pub fn discarded(&self) -> Vec<DiscardedTask> {
        let listed = self.given_up.iter().map(|((pass, task), reason)| DiscardedTask {
            pass: *pass,
            task: *task,
            reason: reason.clone(),
            records: Vec::new(),
        });
        listed.collect()
    }

    /// The queues as a checkpoint keeps them: whatever is not done counts as waiting.
    pub fn snapshot(&self) -> QueueSnapshot {
        let retry = self.retry.iter().map(|(task, retry)| (*task, retry.blamed.failures));
        let pending = self.pending.iter().map(|(task, held)| (task, held.blamed.failures));
        let discarded = self.discarded.iter().map(|(task, (_, reason))| (*task, reason.clone()));
        QueueSnapshot {
            pass: self.head.pass,
            cursor: self.head.cursor,
            open: retry.chain(pending).collect(),
            discarded: discarded.collect(),
        }
    }

    /// Whether a task was given up since a snapshot was taken.
    pub fn gave_up_since(&self, snapshot: &QueueSnapshot) -> bool {
        let since = self.given_up.range((snapshot.pass, TaskId(0))..);
        let is_known = |pass: Pass, task: &TaskId| {
            pass == snapshot.pass && snapshot.discarded.contains_key(task)
        };
        since.into_iter().any(|((pass, task), _)| !is_known(*pass, task))
    }

    /// Goes back to a checkpoint's queues, in a round of its own. Attempts go on counting, so
    /// that none of the abandoned future can be mistaken for one of the new.
    pub fn rewind(&self, to: &QueueSnapshot) -> Vec<Fact> {
        let head = QueueRecord {
            round: self.head.round + 1,
            pass: to.pass,
            cursor: to.cursor,
            next_attempt: self.head.next_attempt,
        };
        let mut facts = vec![Fact::Head(head)];
        facts.extend(to.open.iter().map(|(task, failures)| {
            let reason = "the job went back to a checkpoint".to_owned();
            let blamed = Blamed { failures: *failures, failed_by: Vec::new() };
            Fact::Task { task: *task, record: blamed.todo(reason) }
        }));
        facts.extend(to.discarded.iter().map(|(task, reason)| {
            let record = TaskRecord::Discarded { failures: 0, reason: reason.clone() };
            Fact::Task { task: *task, record }
        }));
        let stays = |pass: Pass, task: &TaskId| {
            pass < to.pass || (pass == to.pass && to.discarded.contains_key(task))
        };
        let undone = self.given_up.keys().filter(|(pass, task)| !stays(*pass, task));
        facts.extend(undone.map(|(pass, task)| Fact::TakenBack { pass: *pass, task: *task }));
        facts.extend(self.replies.keys().map(|trainer| Fact::Forgotten { trainer: *trainer }));
        facts
    }

    /// Folds one committed fact into the state.
    pub fn evolve(&mut self, fact: &Fact, order_of: OrderOf<'_>) {
        match fact {
            Fact::Head(head) => self.move_head(*head, order_of),
            Fact::Task { task, record } => {
                self.unlist(*task);
                match record.clone() {
                    TaskRecord::Todo { failures, reason, report: _, failed_by } => {
                        let blamed = Blamed { failures, failed_by };
                        self.retry.insert(*task, Retry { blamed, reason });
                    }
                    TaskRecord::Pending {
                        failures,
                        attempt,
                        trainer,
                        request,
                        counted,
                        failed_by,
                    } => {
                        let blamed = Blamed { failures, failed_by };
                        let held = Pending { blamed, attempt, trainer, request, counted };
                        self.pending.insert(*task, held);
                    }
                    TaskRecord::Discarded { failures, reason } => {
                        self.discarded.insert(*task, (failures, reason));
                    }
                }
            }
            Fact::Done { task } => self.unlist(*task),
            Fact::GivenUp { pass, task, reason } => {
                self.given_up.insert((*pass, *task), reason.clone());
            }
            Fact::TakenBack { pass, task } => {
                self.given_up.remove(&(*pass, *task));
            }
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
