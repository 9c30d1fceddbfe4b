//! Tasks that run beside each other.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::stream::{FuturesUnordered, StreamExt};
use futures::{FutureExt, ready};
use tokio::sync::oneshot;

use crate::simulated::{Abort, present};

/// A task did not come to its end: it panicked or was aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Broken(String);

/// A task that runs by itself. Goes on when this is dropped; awaiting it gives its outcome.
pub struct Task<T>(Running<T>);

enum Running<T> {
    Tokio(tokio::task::JoinHandle<T>),
    Simulated { outcome: oneshot::Receiver<T>, abort: Abort },
}

impl<T> std::fmt::Debug for Task<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Task")
    }
}

/// Runs `task` beside everything else.
pub fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> Task<T> {
    let Some(host) = present() else { return Task(Running::Tokio(tokio::spawn(task))) };
    let (tx, outcome) = oneshot::channel();
    let work = task.map(|done| {
        // Nobody may wait for it.
        let _ = tx.send(done);
    });
    Task(Running::Simulated { outcome, abort: host.spawn(work.boxed()) })
}

impl<T> Task<T> {
    /// Ends the task at its next wait.
    pub fn abort(&self) {
        match &self.0 {
            Running::Tokio(handle) => handle.abort(),
            Running::Simulated { abort, .. } => abort(),
        }
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T, Broken>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match &mut self.0 {
            Running::Tokio(handle) => {
                ready!(Pin::new(handle).poll(context)).map_err(|error| Broken(error.to_string()))
            }
            Running::Simulated { outcome, .. } => {
                ready!(Pin::new(outcome).poll(context)).map_err(|_| Broken("it was aborted".into()))
            }
        })
    }
}

/// Tasks that end when this is dropped.
#[derive(Debug)]
pub struct TaskSet<T> {
    tasks: FuturesUnordered<Task<T>>,
}

impl<T> Default for TaskSet<T> {
    fn default() -> Self {
        Self { tasks: FuturesUnordered::new() }
    }
}

impl<T: Send + 'static> TaskSet<T> {
    /// Runs one more.
    pub fn spawn(&mut self, task: impl Future<Output = T> + Send + 'static) {
        self.tasks.push(spawn(task));
    }

    /// Waits for whichever ends next; nothing if there is none.
    pub async fn join_next(&mut self) -> Option<Result<T, Broken>> {
        self.tasks.next().await
    }

    /// The outcome of one that has ended.
    pub fn try_join_next(&mut self) -> Option<Result<T, Broken>> {
        self.tasks.next().now_or_never().flatten()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }
}

impl<T> Drop for TaskSet<T> {
    fn drop(&mut self) {
        self.tasks.iter().for_each(Task::abort);
    }
}

/// Computes for a while, on this task; the others of its thread move on to another one.
pub fn in_place<T>(work: impl FnOnce() -> T) -> T {
    match present() {
        None => tokio::task::block_in_place(work),
        Some(_) => work(),
    }
}

/// Computes for a while on a thread of its own.
///
/// # Errors
/// If `work` panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Broken> {
    match present() {
        None => tokio::task::spawn_blocking(work).await.map_err(|error| Broken(error.to_string())),
        Some(_) => Ok(work()),
    }
}
