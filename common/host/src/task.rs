//! Tasks that run beside each other.

use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};

use futures::stream::{FuturesUnordered, StreamExt};
use futures::{FutureExt, ready};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use crate::simulated::{Abort, Host, present};

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
    match present() {
        None => Task(Running::Tokio(tokio::spawn(task))),
        Some(host) => simulated(&*host, task),
    }
}

/// Runs `task` on threads of its own, which leave the processors to all others that want them: work
/// that nobody is in a hurry for. Ends it when this is dropped.
///
/// # Errors
/// If it panics.
pub async fn yielding<T: Send + 'static>(
    task: impl Future<Output = T> + Send + 'static,
) -> Result<T, Broken> {
    let mut alone = TaskSet::default();
    alone.tasks.push(match present() {
        Some(host) => simulated(&*host, task),
        None => match &*YIELDING {
            Some(runtime) => Task(Running::Tokio(runtime.spawn(task))),
            // Without threads of its own it is as urgent as everything else.
            None => spawn(task),
        },
    });
    alone.join_next().await.expect("it is the one that was put there")
}

/// How much less urgent yielding threads are than the others of the process, in steps of `nice`: beside
/// one other busy thread they get about a tenth of a processor, and never nothing.
#[cfg(target_os = "linux")]
const YIELDING_NICE: i32 = 10;

/// Threads cannot become more urgent again without privilege, so these stay as they are.
static YIELDING: LazyLock<Option<Runtime>> = LazyLock::new(|| {
    // On Linux, priorities are the threads' own; a thread begins with that of the one that starts it.
    #[cfg(target_os = "linux")]
    let yields = {
        let urgency = rustix::process::getpriority_process(None).unwrap_or_default();
        move || {
            // A system that refuses leaves them as urgent as the others.
            let _ = rustix::process::setpriority_process(None, urgency + YIELDING_NICE);
        }
    };
    #[cfg(not(target_os = "linux"))]
    let yields = || {};
    let threads = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("yielding")
        .on_thread_start(yields)
        .enable_all()
        .build();
    threads.ok()
});

fn simulated<T: Send + 'static>(
    host: &dyn Host,
    task: impl Future<Output = T> + Send + 'static,
) -> Task<T> {
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
