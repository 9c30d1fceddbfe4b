//! The inputs of the machine of a node's workers.

use std::collections::BTreeSet;
use std::time::Duration;

use steadfast_common::error::ErrorKind;

use super::group::Group;

/// A view is what the agent sees of its workers at the time of an input. Workers are named by local rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The time since the workers of the round were started.
    pub now: Duration,
    /// The workers that have left the round and wait for the next one.
    pub left: BTreeSet<u32>,
    /// The workers that use the service of the agent: they can go on in the next round in the same process.
    pub connected: BTreeSet<u32>,
    /// When a worker last printed or reported something, if that is known.
    pub last_output: Option<Duration>,
    /// The longest time between two reports of progress, of workers that have reported it twice in the round.
    pub pause_max: Option<Duration>,
}

/// The machine decides one input after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// The node is a member of another round.
    Joined(Group),
    /// A worker has ended.
    Exited { local_rank: u32, exit: WorkerExit },
    /// The master has answered [`super::Next::Ask`], or could not.
    Answered(Answer),
    /// [`super::Next::AskForStacks`] is done, and all workers still run.
    StacksAsked,
    /// [`super::Next::ReportHang`] is done.
    HangReported,
    /// The round is over for a reason that the workers of this node do not have.
    Over(Over),
    /// This node has to leave.
    Drain,
    /// Time has passed, or the view has changed.
    Look,
}

/// A worker ended in this way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerExit {
    Succeeded,
    /// It failed: `how` is for users, as are its last lines of output, if they were not printed.
    Failed {
        how: String,
        last_lines: Vec<String>,
    },
}

/// A master answers this about other nodes when a worker has failed. The texts are for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// No node came or went.
    Unchanged,
    /// Nodes wait to be added.
    Added(String),
    /// Nodes were lost.
    Removed(String),
    /// No master says anything, or the job goes on without this node.
    Unknown(String),
}

/// A round is over for this reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Over {
    /// Nodes wait to be added, or were lost, or a worker of another node has failed. The workers know of it.
    Changed,
    /// The registration of this node was lost.
    Unregistered,
    JobEnded,
    /// The job rejects this node.
    Refused {
        kind: ErrorKind,
        message: String,
    },
}
