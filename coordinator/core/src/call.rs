//! Closures as the machine sees them: the call and its outcome.

use std::fmt;

use bytes::Bytes;
use steadfast_common::ids::Generation;
use steadfast_common::records::closures::ClosureName;

/// Number of a closure; never reused by a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClosureId(pub u64);

impl fmt::Display for ClosureId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// Index of a worker; never reused by a coordinator. A worker keeps its index while it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerIndex(pub u32);

impl fmt::Display for WorkerIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A function with its arguments, and how to run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The function, as `module:function`.
    pub function: String,
    /// SHA-256 of the function and its arguments.
    pub digest: String,
    pub name: Option<ClosureName>,
    /// The closures whose results are arguments. The call waits for them.
    pub inputs: Vec<ClosureId>,
    /// The only worker that may run it.
    pub worker: Option<WorkerIndex>,
}

/// A worker's reply to an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The function has returned this encoded value.
    Returned {
        value: Bytes,
        /// The generation in which all slots have acknowledged what it has pushed.
        pushed: Option<Generation>,
    },
    /// The function has no more data.
    EndOfData,
    Raised {
        exception: String,
        message: String,
        traceback: String,
    },
    /// No worker can run the closure, for this reason.
    Refused(String),
    /// The worker leaves, and has not begun the closure.
    Declined,
    /// The worker was lost. It may have run the closure, in part or whole.
    Lost,
}

/// The final state of a closure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Returned(Bytes),
    EndOfData,
    Failed(Failure),
    /// It did not run, or its result was dropped; the text gives the reason.
    Cancelled(String),
}

/// The reason for which a closure failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("{exception}: {message}")]
    Raised { exception: String, message: String, traceback: String, worker: WorkerIndex },
    #[error("{message}")]
    Refused { message: String, worker: WorkerIndex },
    #[error(
        "{times} workers were lost while they ran it, the last one with index {worker}; it may end its process"
    )]
    WorkersLost { times: u32, worker: WorkerIndex },
    #[error("the name `{name}` belongs to another call, of `{function}`")]
    NameTaken { name: ClosureName, function: String },
    #[error("a rollback has undone its gradient, and it cannot run again: {reason}")]
    NotRepeated { reason: String },
    #[error("its result has {bytes} bytes; that of a closure with a name has at most {limit}")]
    ResultTooLarge { bytes: usize, limit: usize },
}
