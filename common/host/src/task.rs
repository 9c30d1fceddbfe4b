//! Concurrent tasks.

use std::any::Any;
use std::cell::RefCell;
use std::pin::Pin;
use std::sync::{LazyLock, mpsc};
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use futures::{FutureExt, ready};
use tokio::runtime::{Builder, Handle, Runtime, RuntimeFlavor};
use tokio::sync::oneshot;

use crate::simulated::{Abort, Host, present};

/// A task did not complete: it panicked or was aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Broken(String);

/// A spawned task. Dropping this does not abort it; awaiting it returns its outcome.
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

/// Starts `task`, which continues even if the returned [`Task`] is dropped.
pub fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> Task<T> {
    // Boxed, so that the runtime's code is compiled once for each `T`, not for each future.
    let task = task.boxed();
    match present() {
        None => Task(Running::Tokio(tokio::spawn(task))),
        Some(host) => simulated(&*host, task),
    }
}

/// Runs `task` on separate threads of low scheduling priority, for work that is not urgent. Dropping the
/// future aborts the task.
///
/// # Errors
/// If it panics.
pub async fn low_priority<T: Send + 'static>(
    task: impl Future<Output = T> + Send + 'static,
) -> Result<T, Broken> {
    let mut set = TaskSet::default();
    set.tasks.push(match present() {
        Some(host) => simulated(&*host, task.boxed()),
        None => match &*LOW_PRIORITY {
            Some(runtime) => Task(Running::Tokio(runtime.spawn(task))),
            // Without those threads the task runs at normal priority.
            None => spawn(task),
        },
    });
    set.join_next().await.expect("the set has one task")
}

/// Increment of the `nice` value of low-priority threads: beside one other busy thread they get about a
/// tenth of a processor, and never starve.
#[cfg(target_os = "linux")]
const LOW_PRIORITY_NICE: i32 = 10;

/// A separate runtime, because threads cannot raise their priority again without privilege.
static LOW_PRIORITY: LazyLock<Option<Runtime>> = LazyLock::new(|| {
    // On Linux, each thread has its own priority and inherits that of its creator.
    #[cfg(target_os = "linux")]
    let yields = {
        let nice = rustix::process::getpriority_process(None).unwrap_or_default();
        move || {
            // If the system refuses, the threads keep normal priority.
            let _ = rustix::process::setpriority_process(None, nice + LOW_PRIORITY_NICE);
        }
    };
    #[cfg(not(target_os = "linux"))]
    let yields = || {};
    let threads = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("low_priority")
        .on_thread_start(yields)
        .enable_all()
        .build();
    threads.ok()
});

fn simulated<T: Send + 'static>(host: &dyn Host, task: BoxFuture<'static, T>) -> Task<T> {
    let (tx, outcome) = oneshot::channel();
    let work = task.map(|done| {
        // The receiver may have been dropped.
        let _ = tx.send(done);
    });
    Task(Running::Simulated { outcome, abort: host.spawn(work.boxed()) })
}

impl<T> Task<T> {
    /// Aborts the task at its next await.
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
            Running::Simulated { outcome, .. } => ready!(Pin::new(outcome).poll(context))
                .map_err(|_| Broken("the task was aborted".into())),
        })
    }
}

/// A set of tasks that are aborted when it is dropped.
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
    pub fn spawn(&mut self, task: impl Future<Output = T> + Send + 'static) {
        self.tasks.push(spawn(task));
    }

    /// Waits for the next task to end, and returns its outcome; `None` if the set is empty.
    pub async fn join_next(&mut self) -> Option<Result<T, Broken>> {
        self.tasks.next().await
    }

    /// Returns the outcome of a task that has ended, if there is one.
    pub fn try_join_next(&mut self) -> Option<Result<T, Broken>> {
        self.tasks.next().now_or_never().flatten()
    }

    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }
}

impl<T> Drop for TaskSet<T> {
    fn drop(&mut self) {
        self.tasks.iter().for_each(Task::abort);
    }
}

/// Runs a long computation on this thread. On a multi-threaded runtime its other tasks move to another
/// thread; on a current-thread runtime they wait.
pub fn in_place<T>(work: impl FnOnce() -> T) -> T {
    let has_threads = |it: Handle| matches!(it.runtime_flavor(), RuntimeFlavor::MultiThread);
    match present() {
        None if Handle::try_current().is_ok_and(has_threads) => tokio::task::block_in_place(work),
        None | Some(_) => work(),
    }
}

/// Runs a long computation on a thread for blocking work. It may wait for futures with [`wait`].
///
/// # Errors
/// If `work` panics; the error has the text of the panic.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Broken> {
    match present() {
        None => tokio::task::spawn_blocking(work).await.map_err(|failed| {
            let cancelled = failed.to_string();
            failed.try_into_panic().map_or(Broken(cancelled), |panic| Broken(text_of(&*panic)))
        }),
        Some(_) => in_lockstep(work).await,
    }
}

/// Blocks this thread until a future is complete. Only work of [`blocking`] may call it.
///
/// # Errors
/// In simulation, if the task that waits for the work was aborted.
///
/// # Panics
/// If called elsewhere.
pub fn wait<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> Result<T, Broken> {
    let Some(requests) = REQUESTS.with_borrow(Clone::clone) else {
        return Ok(Handle::current().block_on(future));
    };
    let aborted = || Broken("the task was aborted".to_owned());
    let (tx, rx) = mpsc::channel();
    // The receiver waits below.
    let answer = future.map(move |done| drop(tx.send(done)));
    requests.send(answer.boxed()).map_err(|_| aborted())?;
    rx.recv().map_err(|_| aborted())
}

thread_local! {
    /// In simulation: where work on this thread sends the futures that it waits for.
    static REQUESTS: RefCell<Option<mpsc::Sender<BoxFuture<'static, ()>>>> = const { RefCell::new(None) };
}

/// Runs work of a simulated process on a thread of its own. The simulation stands still while the thread runs, and the
/// thread while the simulation completes a future for it, so the order of events does not depend on the machine.
async fn in_lockstep<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Broken> {
    let (tx, requests) = mpsc::channel();
    let thread = std::thread::Builder::new().spawn(move || {
        REQUESTS.set(Some(tx));
        let done = work();
        REQUESTS.take();
        done
    });
    let thread = thread.map_err(|error| Broken(error.to_string()))?;
    while let Ok(future) = requests.recv() {
        future.await;
    }
    thread.join().map_err(|panic| Broken(text_of(&*panic)))
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no reason given").to_owned()
}
