//! Ids and numbers, each with a separate type so that they cannot be confused.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// Index of a task in the dataset manifest.
    TaskId(u32)
}
number! {
    /// Number of one dispatch of a task; never reused in a job.
    Attempt(u64)
}
number! {
    /// One sweep over the training tasks, counted from 0.
    Pass(u32)
}
number! {
    /// One of the fixed streams of micro-batches of a synchronous job.
    Lane(u32)
}
number! {
    /// One optimizer update, counted from 0 over the whole job.
    Step(u64)
}
number! {
    /// The number of steps that a parameter block reflects.
    Version(u64)
}
number! {
    /// Number that is incremented at each rollback of the job to a checkpoint (or to its start).
    Generation(u64)
}
number! {
    /// Index of a pserver slot in `/ps/<index>`.
    Slot(u32)
}
number! {
    /// The create-revision of a member's key: identifies one run of a process in one role.
    Incarnation(i64)
}
number! {
    /// A group of nodes that the master formed, counted from 1 for ever upwards; 0 stands for none.
    Round(u64)
}
number! {
    /// How often the members of a round passed a tag before; counted from 0 in each round.
    Phase(u64)
}
number! {
    /// Milliseconds on a monotonic clock of the process, with an arbitrary start.
    Millis(u64)
}

/// Id of one run of a trainer process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TrainerId(pub Uuid);

impl fmt::Display for TrainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Id of a node: of the one agent on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub Uuid);

impl NodeId {
    /// Returns the id of a node that is known by its address only.
    pub fn of_address(address: &str) -> Self {
        let digest = Sha256::digest(address);
        let bytes = std::array::from_fn(|index| digest[index]);
        Self(uuid::Builder::from_custom_bytes(bytes).into_uuid())
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Id of one request of one caller, so that a retry gets the first reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub Uuid);
