//! The interface that a simulation implements.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

/// Aborts a task.
pub type Abort = Box<dyn Fn() + Send + Sync>;

/// A simulated machine from the point of view of one of its processes.
pub trait Host: Send + Sync {
    /// Returns the time since the machine started, by its own clock.
    fn boot_time(&self) -> Duration;

    /// Returns the time since 1970 by the machine's clock, which may be wrong.
    fn unix_time(&self) -> Duration;

    /// Completes when [`Host::boot_time`] reaches `at`.
    fn sleep_until(&self, at: Duration) -> BoxFuture<'static, ()>;

    /// Runs a task until it ends, is aborted, or the process ends.
    fn spawn(&self, task: BoxFuture<'static, ()>) -> Abort;

    fn random(&self) -> u64;
}

thread_local! {
    static PRESENT: RefCell<Option<Arc<dyn Host>>> = const { RefCell::new(None) };
}

/// Returns the simulated host of this thread, if there is one.
pub(crate) fn present() -> Option<Arc<dyn Host>> {
    PRESENT.with_borrow(Clone::clone)
}

/// Runs `work` with `host` as the simulated host of this thread.
pub fn enter<T>(host: Arc<dyn Host>, work: impl FnOnce() -> T) -> T {
    struct Back(Option<Arc<dyn Host>>);
    impl Drop for Back {
        fn drop(&mut self) {
            PRESENT.set(self.0.take());
        }
    }
    let _back = Back(PRESENT.replace(Some(host)));
    work()
}
