//! Starts the workers of a run, each with its marker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::time::timeout;
use uuid::Uuid;

use crate::guard::{Guard, KILL_TIMEOUT};
use crate::processes::MARKER_VARIABLE;
use crate::stop::sweep;
use crate::{GuardProgram, Signaller, StartError, Worker, WorkerSpec};

/// Processes that SIGKILL does not end, such as those that wait for a driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("processes {processes:?} did not end after SIGKILL")]
pub struct StillRunning {
    pub processes: Vec<i32>,
}

/// Starts workers. If this process is killed, their process trees are killed by the guard.
#[derive(Debug)]
pub struct Supervisor {
    guard: Arc<Guard>,
    /// Marks all processes of the run.
    token: String,
    workers_started: AtomicU64,
}

impl Supervisor {
    /// Starts the guard. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// If the guard cannot be started.
    pub fn new(program: GuardProgram) -> Result<Self, StartError> {
        let token = Uuid::new_v4().to_string();
        let guard = Guard::start(program, &token).map_err(|source| StartError::Guard { source })?;
        Ok(Self { guard: Arc::new(guard), token, workers_started: AtomicU64::new(0) })
    }

    /// Starts a worker.
    ///
    /// The kernel kills a worker when the *thread* that started it ends, so this must run on a thread that lives
    /// as long as the runtime: not within `spawn_blocking`, and not if the runtime uses `block_in_place`.
    ///
    /// # Errors
    /// If the worker's program cannot be started, or its log files cannot be opened.
    pub fn start(&self, spec: &WorkerSpec) -> Result<Worker, StartError> {
        let number = self.workers_started.fetch_add(1, Ordering::Relaxed);
        let token = format!("{}.{number}", self.token);
        let own = format!("{},{token}", self.token);
        // In a worker of another run, its marker stays: that run kills the processes of this one, too.
        let marker = match std::env::var(MARKER_VARIABLE) {
            Ok(outer) => format!("{outer},{own}"),
            Err(_) => own,
        };
        Worker::start(spec, token, &marker, Arc::clone(&self.guard))
    }

    /// Returns a handle that sends signals to the workers that run.
    pub fn signaller(&self) -> Signaller {
        Signaller { guard: Arc::clone(&self.guard) }
    }

    /// Ends the run: kills what is left of it, and waits for the end of the guard.
    ///
    /// # Errors
    /// If processes do not end after SIGKILL: their ids.
    pub async fn close(self) -> Result<(), StillRunning> {
        let left = sweep(self.guard.scope()).await.left;
        if let Some(mut guard) = self.guard.close() {
            // Its own search has a bound; it ends with or without this process.
            let _ = timeout(2 * KILL_TIMEOUT, guard.wait()).await;
        }
        if left.is_empty() { Ok(()) } else { Err(StillRunning { processes: left }) }
    }
}
