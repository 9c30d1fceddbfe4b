//! The handle to the event loop of the acting master: its events and answers.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use steadfast_common::error::ErrorKind;
use steadfast_common::given_up::DiscardedTask;
use steadfast_common::ids::{Generation, Pass, TrainerId, Version};
use steadfast_common::records::{
    CheckpointRecord, EvaluationRecord, PositionRecord, QueueSnapshot, ResultRecord,
};
use steadfast_common::status::TimeBreakdown;
use steadfast_host::time::{Instant, timeout};
use steadfast_master_core::clocks::{Clocks, Moved};
use steadfast_master_core::election;
use steadfast_master_core::ledger::{Request, TaskReply};
use steadfast_master_core::saver::{SaveReply, Stage};
use steadfast_master_core::sync_tasks::Failure;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::status_snapshot::{Assignments, StatusSnapshot};
use crate::timeline::Timeline;

/// The sender of an answer. The caller may no longer wait for it.
pub type Reply<T> = oneshot::Sender<Result<T, ControlError>>;

/// An event for the loop.
#[derive(Debug)]
pub enum Event {
    NextTask {
        generation: Generation,
        request: Request,
        done: Option<TaskDone>,
        time_breakdown: Option<TimeBreakdown>,
        reply: Reply<TaskReply>,
    },
    FailTask {
        generation: Generation,
        failure: Failure,
        reply: Reply<GivenUp>,
    },
    BeginInit {
        generation: Generation,
        trainer: TrainerId,
        reply: Reply<election::InitReply>,
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
        time_breakdown: Option<TimeBreakdown>,
    },
    Evaluated {
        evaluation: EvaluationRecord,
        reply: Reply<()>,
    },
    BeginSave {
        generation: Generation,
        trainer: TrainerId,
        report: SaveReport,
        reply: Reply<SaveReply>,
    },
    /// Requests all given-up tasks, not shortened.
    GivenUp {
        reply: Reply<Vec<DiscardedTask>>,
    },
    FinishSave {
        generation: Generation,
        result: Box<ResultRecord>,
        reply: Reply<()>,
    },
    /// Requests a snapshot of the queues, for a checkpoint.
    Queues {
        reply: Reply<Option<QueueSnapshot>>,
    },
    /// Commits a checkpoint whose shards are all saved.
    Checkpoint {
        id: String,
        record: Box<CheckpointRecord>,
        reply: Reply<()>,
    },
    /// Deletes the manifests of checkpoints whose objects are about to be deleted.
    ForgetCheckpoints {
        ids: Vec<String>,
        /// The ids whose manifests were deleted.
        reply: Reply<Vec<String>>,
    },
    /// The checkpoint that the generation begins from can never be loaded.
    Damaged {
        generation: Generation,
        checkpoint: String,
        reason: String,
        reply: Reply<()>,
    },
    /// Parameters or gradients are not finite, so no later version can be.
    Diverged {
        generation: Generation,
        reason: String,
        reply: Reply<()>,
    },
    /// The slots do not reflect the same records.
    Inconsistent {
        generation: Generation,
        reason: String,
        reply: Reply<()>,
    },
    /// A user requests a rollback to a checkpoint.
    RollBack {
        checkpoint: String,
        force: bool,
        reply: Reply<Generation>,
    },
}

/// The reason and the target of a rollback.
#[derive(Debug)]
pub enum Rollback {
    Damaged {
        checkpoint: String,
        reason: String,
    },
    /// To the latest checkpoint, because the slots do not reflect the same records.
    Inconsistent {
        reason: String,
    },
    Wanted {
        checkpoint: String,
        force: bool,
        reply: Reply<Generation>,
    },
}

/// Statistics of a finished task, for the status.
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
    /// Another trainer now has the lane, or should also try the held-out task.
    Elsewhere,
    No,
}

/// The report of a trainer that has finished training, on saving the final model.
#[derive(Clone, Debug)]
pub struct SaveReport {
    pub stage: Stage,
    /// Why the trainer's last attempt failed.
    pub error: Option<String>,
    /// Where training ended.
    pub position: Option<Position>,
}

/// The position of synchronous training.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Position {
    pub version: Version,
    pub pass: Pass,
    pub pass_start: Version,
    pub examples: u64,
    pub loss: Option<f64>,
}

impl Position {
    /// Returns the position of a checkpoint.
    pub fn of(record: &PositionRecord) -> Self {
        Self {
            version: record.version,
            pass: record.pass,
            pass_start: record.pass_start,
            examples: record.examples,
            loss: None,
        }
    }
}

/// Why the loop rejected an event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
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
    #[error("there is no checkpoint {0}; `steadfast checkpoint list` shows them")]
    NoSuchCheckpoint(String),
    #[error("checkpoint {id} cannot be restored: {reason}")]
    NotRestorable { id: String, reason: String },
    #[error("going back to {id} throws away {steps} steps; add --force if that is meant")]
    NeedsForce { id: String, steps: u64 },
    #[error("a task was given up while the checkpoint was taken")]
    QueuesMoved,
    #[error("not every slot is held by a pserver now; try again when all are")]
    NotAllSlots,
    #[error("the job is over; `steadfast checkpoint export` still works")]
    Over,
    #[error("this master does not act")]
    NotActing,
}

impl ControlError {
    /// Returns the kind, which determines what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OtherGeneration { .. } | Self::NotElected => ErrorKind::Stale,
            Self::UnknownTrainer(_) => ErrorKind::NotYet,
            Self::AllFailed { .. } | Self::NoSuchTask | Self::NotRestorable { .. } => {
                ErrorKind::Invalid
            }
            Self::NoSuchCheckpoint(_) => ErrorKind::NotFound,
            Self::NeedsForce { .. } | Self::Over => ErrorKind::Conflict,
            Self::NotAllSlots | Self::QueuesMoved | Self::NotActing => ErrorKind::Unavailable,
        }
    }
}

/// How a term ended.
#[derive(Debug)]
pub enum End {
    /// The job is over.
    Over(Box<ResultRecord>),
    /// The process was told to leave.
    Left,
}

/// A handle to the loop.
#[derive(Clone, Debug)]
pub struct EventLoopHandle {
    pub(crate) events: mpsc::Sender<Event>,
    pub assignments: watch::Receiver<Arc<Assignments>>,
    pub snapshot: watch::Receiver<Arc<StatusSnapshot>>,
    pub staleness_gate: Arc<StalenessGate>,
    pub(crate) timeline: Arc<Mutex<Timeline>>,
}

/// The staleness gate, shared with the pushes that it delays.
#[derive(Debug, Default)]
pub struct StalenessGate {
    /// The mutex guards a few lines of arithmetic at a time.
    staleness_gate: Mutex<Clocks>,
    moved: Notify,
}

impl StalenessGate {
    /// Sets the active trainers. If one is no longer active, wakes the waiting pushes.
    pub fn follow(&self, at_work: &BTreeSet<TrainerId>) {
        let moved = self.staleness_gate.lock().expect("no holder panics").follow(at_work);
        if moved == Moved::Yes {
            self.moved.notify_waiters();
        }
    }

    /// Waits until a trainer that has pushed `count` times may continue under `bound`, at most until
    /// `deadline`. Returns whether it may, and its lead.
    pub async fn pass(
        &self,
        trainer: TrainerId,
        count: u64,
        bound: u32,
        deadline: Instant,
    ) -> (bool, u64) {
        loop {
            let moved = self.moved.notified();
            let (go, lead, news) = {
                let mut staleness_gate = self.staleness_gate.lock().expect("no holder panics");
                let news = staleness_gate.advance(trainer, count);
                (staleness_gate.may_go(trainer, bound), staleness_gate.lead(trainer), news)
            };
            if news == Moved::Yes {
                self.moved.notify_waiters();
            }
            if go || deadline <= Instant::now() {
                return (go, lead);
            }
            let _ = timeout(deadline.remaining(), moved).await;
        }
    }

    /// Returns by how many pushes a trainer is ahead of the slowest active one.
    pub fn lead(&self, trainer: TrainerId) -> u64 {
        self.staleness_gate.lock().expect("no holder panics").lead(trainer)
    }

    /// Returns the largest lead that the gate has admitted.
    pub fn largest_lead(&self) -> u64 {
        self.staleness_gate.lock().expect("no holder panics").largest_lead()
    }
}

impl EventLoopHandle {
    /// Sends an event and waits for its answer.
    ///
    /// # Errors
    /// If the loop rejects the event, or has ended.
    pub async fn ask<T>(&self, event: impl FnOnce(Reply<T>) -> Event) -> Result<T, ControlError> {
        let (reply, answer) = oneshot::channel();
        self.events.send(event(reply)).await.map_err(|_| ControlError::NotActing)?;
        answer.await.map_err(|_| ControlError::NotActing)?
    }

    /// Sends an event without an answer. Drops the event if the queue is full.
    pub fn mention(&self, event: Event) {
        let _ = self.events.try_send(event);
    }
}
