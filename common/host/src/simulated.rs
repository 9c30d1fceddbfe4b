//! The place where a simulation takes over.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::net::{Knock, SimulatedWire};

/// Ends a task without its doing.
pub type Abort = Box<dyn Fn() + Send + Sync>;

/// A simulated machine, as one process on it sees it.
pub trait Host: Send + Sync {
    /// Time since the machine started, by the machine's own clock.
    fn boot_time(&self) -> Duration;

    /// Time since 1970, as the machine believes.
    fn unix_time(&self) -> Duration;

    /// Completes when [`Host::boot_time`] has come to `at`.
    fn sleep_until(&self, at: Duration) -> BoxFuture<'static, ()>;

    /// Runs a task until it ends, is aborted, or the process ends.
    fn spawn(&self, task: BoxFuture<'static, ()>) -> Abort;

    /// 64 bits of chance.
    fn random(&self) -> u64;

    /// Opens a port at which nothing answers yet.
    fn listen(&self) -> SocketAddr;

    /// Answers calls at `port` until `stop`.
    fn serve(
        &self,
        port: SocketAddr,
        routes: Routes,
        stop: CancellationToken,
    ) -> BoxFuture<'static, ()>;

    /// Closes a port.
    fn close(&self, port: SocketAddr);

    /// A connection to `host:port`, made when it is first used.
    fn dial(&self, address: &str) -> SimulatedWire;

    /// Tries to open a connection to `host:port`.
    fn knock(&self, address: &str) -> BoxFuture<'static, Knock>;
}

thread_local! {
    static PRESENT: RefCell<Option<Arc<dyn Host>>> = const { RefCell::new(None) };
}

/// The simulated host that this thread is on, if it is on one.
pub(crate) fn present() -> Option<Arc<dyn Host>> {
    PRESENT.with_borrow(Clone::clone)
}

/// Runs `work` on a simulated host.
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
