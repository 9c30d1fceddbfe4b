//! The machine of a node's workers decides these steps.

use std::collections::BTreeSet;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Round;

/// A step follows an input: the actions in their order, and then what the caller waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub actions: Vec<Action>,
    pub next: Next,
}

/// What is done at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Forgets what a worker told, because it has ended.
    Forget(u32),
    /// Notes a failure of a round, or between rounds, for the reports to the master and the status.
    NoteFailure { round: Option<Round>, what: String },
    /// Tells the workers that their round is over for a reason of this node.
    TellWorkers,
    /// Logs that a failure does not count.
    Excuse { reason: String, change: String },
    /// Counts a failure after which a restart is left.
    Retry { restarts: u32, failure: Failure },
    /// Counts a failure after which no restart is left.
    GiveUp { restarts: u32, failure: Failure },
    /// Logs that a worker left the round.
    NoteLeft(Round),
    /// Tells the workers that this node leaves, and begins their grace.
    Leave,
    /// Logs that the workers came to no commit or check in the first half of the grace.
    NoteNoCommit,
    /// Kills a worker that did not leave the round in time.
    Kill { local_rank: u32, rank: u32 },
}

/// A failure, as users see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub reason: String,
    /// The last lines of the worker's output.
    pub last_lines: Vec<String>,
}

/// What the caller waits for, before the next input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// It waits for any input, and for the [`super::RoundMachine::deadline`].
    Wait,
    /// It starts these workers; the others go on in the round.
    Start(BTreeSet<u32>),
    /// It reports the failure to a master, and asks whether the round changed. Only a drain interrupts this.
    Ask,
    /// It asks the workers for their stacks, and waits for these. Only the end of a worker interrupts this.
    AskForStacks,
    /// It reports that the workers hang. Nothing interrupts this.
    ReportHang,
    /// The round is over for the workers of this node.
    End(End),
}

/// How a round ended for the workers of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All workers have succeeded.
    Succeeded,
    /// The workers stay for the next round: all that run have left this one.
    Stay,
    /// The workers are stopped, and started again in the next round.
    Restart,
    /// A worker failed, and no restart is left.
    Exhausted,
    JobEnded,
    Refused {
        kind: ErrorKind,
        message: String,
    },
    Interrupted,
}
