//! Starts, watches and ends worker processes, and leaves none behind.
//!
//! A [`Supervisor`] starts [`Worker`]s, alone or as a [`WorkerSet`]. Each worker starts with default signals, leads
//! its own process group, and carries a marker in its environment, which all its descendants inherit. A worker that is
//! stopped is first asked to end itself. When it has ended, or does not end in time, every process with its marker, of
//! its group, or descended from one of these is killed. If the supervising process
//! itself is killed, its workers receive SIGKILL from the kernel, and its guard, a process in a session of its own,
//! kills the rest.
//!
//! Limits: a process is not found if its environment is cleared, it has left the process group, and its parent has
//! ended. If the guard is killed together with the supervising process, only the workers themselves end.

mod capture;
mod connection;
mod exit;
mod guard;
mod lines;
mod output;
mod polite;
mod processes;
mod signaller;
mod spawn;
mod spec;
mod stop;
mod supervisor;
mod worker;
mod worker_set;

pub use nix::sys::signal::Signal;

pub use capture::{CaptureError, CaptureLimits, capture};
pub use connection::Connection;
pub use exit::{Ending, Exit};
pub use guard::{GuardProgram, run_guard_if_requested};
pub use processes::MARKER_VARIABLE;
pub use signaller::{Notified, Signaller};
pub use spec::{Input, Output, StartError, Target, WorkerSpec};
pub use supervisor::{StillRunning, Supervisor};
pub use worker::Worker;
pub use worker_set::WorkerSet;
