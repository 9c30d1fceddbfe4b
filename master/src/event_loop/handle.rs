//! The handle to the event loop of the acting master: its events and answers.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Pass, TrainerId, Version};
use steadfast_common::job::spec::CheckpointSpec;
use steadfast_common::records::amendment::Amendment;
use steadfast_common::records::discarded_records::DiscardedRecord;
use steadfast_common::records::given_up::DiscardedTask;
use steadfast_common::records::position::Position;
use steadfast_common::records::scale::{ScaleRecord, ScaleWish};
use steadfast_common::records::stream::{LeftOut, StreamPassRecord, StreamRecord};
use steadfast_common::records::{CheckpointRecord, EvaluationRecord, QueueSnapshot, ResultRecord};
use steadfast_common::status::TimeBreakdown;
use steadfast_host::time::{Instant, timeout};
use steadfast_master_core::election;
use steadfast_master_core::ledger::{Request, TaskReply};
use steadfast_master_core::saver::{SaveReply, Stage};
use steadfast_master_core::staleness::{Change, Staleness};
use steadfast_master_core::stream::Refusal;
use steadfast_master_core::sync_tasks::Failure;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::event_loop::machine::Input;
use crate::status::status_snapshot::{Assignments, StatusSnapshot};
use crate::status::timeline::Timeline;

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
        generation: Generation,
        trainer: TrainerId,
        evaluation: Box<EvaluationRecord>,
        reply: Reply<()>,
    },
    BeginSave {
        generation: Generation,
        trainer: TrainerId,
        report: SaveReport,
        reply: Reply<SaveAnswer>,
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
    /// The slots of a generation keep their states in memory, at one version; `None` if they cannot.
    HandedOver {
        generation: Generation,
        state: Option<Box<CheckpointRecord>>,
        reply: Reply<()>,
    },
    /// Commits a checkpoint whose shards are all saved.
    CommitCheckpoint {
        id: String,
        record: Box<CheckpointRecord>,
        reply: Reply<()>,
    },
    /// Deletes the manifests of checkpoints whose objects are about to be deleted.
    DeleteManifests {
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
    /// The gradient of a record ends the process that computes it, in the step from `version`.
    DiscardRecord {
        generation: Generation,
        trainer: TrainerId,
        record: DiscardedRecord,
        version: Version,
        reply: Reply<()>,
    },
    /// Adds a pass to a stream.
    AddPass {
        pass: Pass,
        record: Box<StreamPassRecord>,
        reply: Reply<StreamRecord>,
    },
    /// Ends a stream after the passes so far.
    EndStream {
        /// The files that could not be read.
        left_out: LeftOut,
        reply: Reply<StreamRecord>,
    },
    /// Forgets some passes of a stream before `to`.
    ForgetPasses {
        to: Pass,
        /// Digest of the object with the names of all their files.
        forgotten: String,
        reply: Reply<StreamRecord>,
    },
    /// A user requests a rollback to a checkpoint.
    RollBack {
        checkpoint: String,
        force: bool,
        reply: Reply<Generation>,
    },
    /// A user says how many trainers work, or who decides that.
    Scale {
        wish: ScaleWish,
        reply: Reply<ScaleRecord>,
    },
    /// A user extends the job, or changes its settings.
    Amend {
        amendment: Box<Amendment>,
        reply: Reply<Generation>,
    },
}

/// Answers a trainer that asks to be the saver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveAnswer {
    pub reply: SaveReply,
    /// Whether trainers that evaluate were lost one after another.
    pub evaluation_is_suspected: bool,
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
    /// To the latest checkpoint, to go on without a record, unless the checkpoint reflects the step from `version`.
    Discarded {
        record: DiscardedRecord,
        version: Version,
    },
    Wanted {
        checkpoint: String,
        force: bool,
        reply: Reply<Generation>,
    },
    /// To the latest checkpoint, from which the job goes on as a user wants it to.
    Amended {
        amendment: Box<Amendment>,
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

/// Why the loop rejected an event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    #[error("request for generation {found}, but the job is in generation {present}")]
    OtherGeneration { found: Generation, present: Generation },
    #[error("the trainer {0} is not registered")]
    UnknownTrainer(TrainerId),
    #[error("every task of pass {pass} was given up")]
    AllFailed { pass: Pass },
    #[error("the job has no such task")]
    NoSuchTask,
    #[error("a synchronous job has no task queue: its trainers compute lanes")]
    NoQueue,
    #[error("another trainer was elected")]
    NotElected,
    #[error("checkpoint {0} does not exist; `steadfast checkpoint list` lists all")]
    NoSuchCheckpoint(String),
    #[error("checkpoint {id} cannot be restored: {reason}")]
    NotRestorable { id: String, reason: String },
    #[error("rolling back to {id} discards {steps} steps; add --force to confirm")]
    NeedsForce { id: String, steps: u64 },
    #[error("a task was given up while the checkpoint was taken")]
    QueuesMoved,
    #[error("some slots have no pserver; retry when all slots are held")]
    NotAllSlots,
    #[error("the job is over; `steadfast checkpoint export` still works")]
    Over,
    #[error("another rollback or change was requested; retry")]
    Busy,
    #[error(
        "the gradients of the job come from the workers of a coordinator: start and stop these, or call \
         `remove_worker`"
    )]
    NoTrainers,
    #[error("it cannot be changed: {0}")]
    NotAmended(String),
    #[error("the pass is not added: {0}")]
    StreamMoved(#[from] Refusal),
    #[error("this master is not the acting master")]
    NotActing,
}

impl ControlError {
    /// Returns the kind, which determines what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OtherGeneration { .. } | Self::NotElected => ErrorKind::Stale,
            Self::UnknownTrainer(_) => ErrorKind::NotYet,
            Self::AllFailed { .. }
            | Self::NoSuchTask
            | Self::NoQueue
            | Self::NoTrainers
            | Self::NotAmended(_)
            | Self::NotRestorable { .. } => ErrorKind::Invalid,
            Self::NoSuchCheckpoint(_) => ErrorKind::NotFound,
            Self::NeedsForce { .. } | Self::Over => ErrorKind::Conflict,
            Self::NotAllSlots
            | Self::QueuesMoved
            | Self::Busy
            | Self::StreamMoved(_)
            | Self::NotActing => ErrorKind::Unavailable,
        }
    }
}

/// A handle to the loop.
#[derive(Clone, Debug)]
pub struct EventLoopHandle {
    pub(crate) requests: mpsc::Sender<Input>,
    pub assignments: watch::Receiver<Arc<Assignments>>,
    /// By which rules checkpoints are taken.
    pub checkpoints: watch::Receiver<CheckpointSpec>,
    /// The generation whose slots are to hand their states over.
    pub handovers: watch::Receiver<Option<Generation>>,
    pub snapshot: watch::Receiver<Arc<StatusSnapshot>>,
    pub staleness_gate: Arc<StalenessGate>,
    pub(crate) timeline: Arc<Mutex<Timeline>>,
}

/// The staleness gate, shared with the pushes that it delays.
#[derive(Debug, Default)]
pub struct StalenessGate {
    /// The mutex guards a few lines of arithmetic at a time.
    staleness: Mutex<Staleness>,
    changed: Notify,
}

impl StalenessGate {
    /// Sets the active trainers. If one is no longer active, wakes the waiting pushes.
    pub fn set_active(&self, active: &BTreeSet<TrainerId>) {
        let change = self.staleness.lock().expect("no holder panics").set_active(active);
        if change == Change::Yes {
            self.changed.notify_waiters();
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
            let changed = self.changed.notified();
            let (go, lead, change) = {
                let mut staleness = self.staleness.lock().expect("no holder panics");
                let change = staleness.advance(trainer, count);
                (staleness.admit(trainer, bound), staleness.lead(trainer), change)
            };
            if change == Change::Yes {
                self.changed.notify_waiters();
            }
            if go || deadline <= Instant::now() {
                return (go, lead);
            }
            let _ = timeout(deadline.remaining(), changed).await;
        }
    }

    /// Returns by how many pushes a trainer is ahead of the slowest active one.
    pub fn lead(&self, trainer: TrainerId) -> u64 {
        self.staleness.lock().expect("no holder panics").lead(trainer)
    }

    /// Returns the largest lead that the gate has admitted.
    pub fn largest_lead(&self) -> u64 {
        self.staleness.lock().expect("no holder panics").largest_lead()
    }
}

impl EventLoopHandle {
    /// Sends an event and waits for its answer.
    ///
    /// # Errors
    /// If the loop rejects the event, or has ended.
    pub async fn ask<T>(&self, event: impl FnOnce(Reply<T>) -> Event) -> Result<T, ControlError> {
        let (reply, answer) = oneshot::channel();
        let request = Input::Request(event(reply));
        self.requests.send(request).await.map_err(|_| ControlError::NotActing)?;
        answer.await.map_err(|_| ControlError::NotActing)?
    }

    /// Sends an event without an answer. Drops the event if the queue is full.
    pub fn notify(&self, event: Event) {
        let _ = self.requests.try_send(Input::Request(event));
    }
}
