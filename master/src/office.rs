//! How the acting master's loop is spoken to: events in, answers out.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Pass, Slot, TrainerId, Version};
use steadfast_common::records::{CheckpointRecord, EvaluationRecord, QueueSnapshot, ResultRecord};
use steadfast_common::status::Spent;
use steadfast_host::time::{Instant, timeout};
use steadfast_master_core::clocks::{Clocks, Moved};
use steadfast_master_core::election::Verdict;
use steadfast_master_core::ledger::{Answer, Request};
use steadfast_master_core::sync_tasks::Failure;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::board::{Board, Facts};
use crate::chronicle::Chronicle;

/// Where an answer goes. Nobody may be waiting any more.
pub type Reply<T> = oneshot::Sender<Result<T, OfficeError>>;

/// What the loop is told.
#[derive(Debug)]
pub enum Event {
    NextTask {
        generation: Generation,
        request: Request,
        done: Option<TaskDone>,
        spent: Option<Spent>,
        reply: Reply<Answer>,
    },
    FailTask {
        generation: Generation,
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
        spent: Option<Spent>,
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
        /// Those that are forgotten.
        reply: Reply<Vec<String>>,
    },
    /// A checkpoint that the generation should have begun from cannot be loaded, now or ever.
    Damaged {
        generation: Generation,
        checkpoint: String,
        reason: String,
        reply: Reply<()>,
    },
    /// Parameters or gradients are not finite: whatever follows would not be either.
    Diverged {
        generation: Generation,
        reason: String,
        reply: Reply<()>,
    },
    /// A person wants the job to go back to a checkpoint.
    SetBack {
        checkpoint: String,
        force: bool,
        reply: Reply<Generation>,
    },
}

/// Why the job shall go back, and where to.
#[derive(Debug)]
pub enum Setback {
    Damaged { checkpoint: String, reason: String },
    Wanted { checkpoint: String, force: bool, reply: Reply<Generation> },
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
    /// Another trainer has the lane now.
    Elsewhere,
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
    #[error("there is no checkpoint {0}; `steadfast checkpoint list` shows them")]
    NoSuchCheckpoint(String),
    #[error("checkpoint {id} cannot be restored: {reason}")]
    NotRestorable { id: String, reason: String },
    #[error("going back to {id} throws away {steps} steps; add --force if that is meant")]
    NeedsForce { id: String, steps: u64 },
    #[error("the memory of slot {slot} was lost meanwhile")]
    SlotLost { slot: Slot },
    #[error("a task was given up while the checkpoint was taken")]
    QueuesMoved,
    #[error("not every slot is held by a pserver now; try again when all are")]
    NotAllSlots,
    #[error("the job is over; `steadfast checkpoint export` still works")]
    Over,
    #[error("this master does not act")]
    NotActing,
}

impl OfficeError {
    /// What the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OtherGeneration { .. } | Self::NotElected => ErrorKind::Stale,
            Self::UnknownTrainer(_) => ErrorKind::NotYet,
            Self::AllFailed { .. } | Self::NoSuchTask | Self::NotRestorable { .. } => {
                ErrorKind::Invalid
            }
            Self::NoSuchCheckpoint(_) => ErrorKind::NotFound,
            Self::NeedsForce { .. } | Self::Over => ErrorKind::Conflict,
            Self::NotAllSlots | Self::SlotLost { .. } | Self::QueuesMoved | Self::NotActing => {
                ErrorKind::Unavailable
            }
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
    pub(crate) events: mpsc::Sender<Event>,
    pub board: watch::Receiver<Arc<Board>>,
    pub facts: watch::Receiver<Arc<Facts>>,
    pub clocks: Arc<ClockRoom>,
    pub(crate) chronicle: Arc<Mutex<Chronicle>>,
}

/// The staleness gate, shared with those who wait at it.
#[derive(Debug, Default)]
pub struct ClockRoom {
    /// Guards a few lines of arithmetic at a time.
    clocks: Mutex<Clocks>,
    moved: Notify,
}

impl ClockRoom {
    /// Notes who is at work now; if somebody went, those who wait look again.
    pub fn follow(&self, at_work: &BTreeSet<TrainerId>) {
        let moved = self.clocks.lock().expect("no holder panics").follow(at_work);
        if moved == Moved::Yes {
            self.moved.notify_waiters();
        }
    }

    /// Waits until a trainer that has pushed `count` times may go on under `bound`, at most until
    /// `deadline`; returns whether it may, and its lead.
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
                let mut clocks = self.clocks.lock().expect("no holder panics");
                let news = clocks.advance(trainer, count);
                (clocks.may_go(trainer, bound), clocks.lead(trainer), news)
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

    /// How far a trainer is ahead of the slowest.
    pub fn lead(&self, trainer: TrainerId) -> u64 {
        self.clocks.lock().expect("no holder panics").lead(trainer)
    }

    /// The largest lead that was ever let through.
    pub fn largest_lead(&self) -> u64 {
        self.clocks.lock().expect("no holder panics").largest_lead()
    }
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
