//! A coordinator in a user's program: it runs functions on workers, and remembers the results of those with a name.
//!
//! ```text
//!   program ──▶ Coordinator ──▶ Table ──▶ term of the machine ──▶ Run (gRPC) ──▶ worker
//!      ▲                          ▲                │                                │
//!      └────── outcome ───────────┴── settled ◀────┴───────── Finished ◀────────────┘
//! ```
//!
//! The table holds the state that outlives a term of the lock: the closures that are not settled, and the workers. Each
//! term begins with it, and repeats the decisions that an earlier term did not release.

mod admin;
mod announce;
mod args;
mod coordinator;
mod driver;
mod link;
mod parameters;
mod table;
mod worker;
mod workers;

pub use announce::Announcement;
pub use args::{CoordinatorArgs, WorkerArgs};
pub use coordinator::{Coordinator, CoordinatorSettings, Lock, ScheduleError, WorkerValue};
pub use steadfast_coordinator_core::{
    ClosureId, Failure as ClosureFailure, OnError, Outcome, RESULT_BYTES_MAX, Settings, WorkerIndex,
};
pub use steadfast_training_client::{ClientError as ParameterError, ParameterClient};
pub use table::{ClosureError, Scheduled, Table, WorkerState};
pub use worker::{Call, WorkerServer};
