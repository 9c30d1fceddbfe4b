//! Starts, watches and ends worker processes, and leaves none behind.
//!
//! A [`Supervisor`] starts [`Worker`]s, alone or as a [`WorkerSet`]. Each worker leads its own process group and
//! carries a marker in its environment, which all its descendants inherit. When a worker ends or is stopped, every
//! process with its marker, of its group, or descended from one of these is killed. If the supervising process
//! itself is killed, its workers receive SIGKILL from the kernel, and its guard, a process in a session of its own,
//! kills the rest.
//!
//! Limits: a process is not found if its environment is cleared, it has left the process group, and its parent has
//! ended. If the guard is killed together with the supervising process, only the workers themselves end.

mod capture;
mod exit;
mod guard;
mod lines;
mod output;
mod processes;
mod spec;
mod stop;
mod supervisor;
mod worker;
mod worker_set;

pub use capture::{CaptureError, CaptureLimits, capture};
pub use exit::{Ending, Exit};
pub use guard::{GuardProgram, run_guard_if_requested};
pub use processes::MARKER_VARIABLE;
pub use spec::{Input, Output, StartError, WorkerSpec};
pub use supervisor::{StillRunning, Supervisor};
pub use worker::{StackDump, Worker};
pub use worker_set::WorkerSet;
