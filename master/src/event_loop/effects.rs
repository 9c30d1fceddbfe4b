//! What follows a commit of a training job: answers, and what others observe.

use std::collections::BTreeSet;
use std::sync::Arc;

use steadfast_common::ids::{Generation, TrainerId};
use steadfast_common::job::spec::CheckpointSpec;
use steadfast_common::records::QueueSnapshot;
use steadfast_common::records::given_up::DiscardedTask;
use steadfast_common::records::scale::ScaleRecord;
use steadfast_common::records::stream::StreamRecord;
use steadfast_master_core::election::InitReply;
use steadfast_master_core::ledger::TaskReply;

use crate::event_loop::handle::{ControlError, GivenUp, Reply, SaveAnswer};
use crate::status::status_snapshot::Assignments;

/// An effect is released after the commit of the facts that were decided with it.
#[derive(Debug)]
pub(crate) enum Effect {
    Answer(Answer),
    /// These trainers hold tasks.
    Active(BTreeSet<TrainerId>),
    /// The lanes of trainers have changed.
    Assign(Arc<Assignments>),
    /// The job takes checkpoints by other rules.
    Checkpoints(Box<CheckpointSpec>),
    /// The slots of a generation are to hand their states over.
    HandOver(Generation),
    /// Publishes a status snapshot.
    Show,
    /// Reads the manifests, and the tasks of a round that an earlier master may have left.
    Read {
        round: Option<u64>,
    },
}

/// An answer, with its caller.
#[derive(Debug)]
pub(crate) enum Answer {
    Done(Reply<()>, Result<(), ControlError>),
    Task(Reply<TaskReply>, Result<TaskReply, ControlError>),
    GivenUp(Reply<GivenUp>, Result<GivenUp, ControlError>),
    Init(Reply<InitReply>, Result<InitReply, ControlError>),
    Save(Reply<SaveAnswer>, Result<SaveAnswer, ControlError>),
    Discarded(Reply<Vec<DiscardedTask>>, Vec<DiscardedTask>),
    Queues(Reply<Option<QueueSnapshot>>, Option<QueueSnapshot>),
    Deleted(Reply<Vec<String>>, Vec<String>),
    Stream(Reply<StreamRecord>, Result<StreamRecord, ControlError>),
    Generation(Reply<Generation>, Result<Generation, ControlError>),
    Scaled(Reply<ScaleRecord>, Result<ScaleRecord, ControlError>),
}

impl Answer {
    /// Sends the answer. The caller may no longer wait for it.
    pub fn send(self) {
        match self {
            Self::Done(reply, answer) => drop(reply.send(answer)),
            Self::Task(reply, answer) => drop(reply.send(answer)),
            Self::GivenUp(reply, answer) => drop(reply.send(answer)),
            Self::Init(reply, answer) => drop(reply.send(answer)),
            Self::Save(reply, answer) => drop(reply.send(answer)),
            Self::Discarded(reply, answer) => drop(reply.send(Ok(answer))),
            Self::Queues(reply, answer) => drop(reply.send(Ok(answer))),
            Self::Deleted(reply, answer) => drop(reply.send(Ok(answer))),
            Self::Stream(reply, answer) => drop(reply.send(answer)),
            Self::Generation(reply, answer) => drop(reply.send(answer)),
            Self::Scaled(reply, answer) => drop(reply.send(answer)),
        }
    }
}
