//! The interface that a simulation implements.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::Arc;

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::service::Routes;
use tower::BoxError;
use tower::util::BoxCloneSyncService;

use crate::probe::Probe;

/// A channel of a simulated network.
pub type SimulatedChannel =
    BoxCloneSyncService<http::Request<Body>, http::Response<Body>, BoxError>;

/// A simulated network from the point of view of one process.
pub trait Network: Send + Sync {
    /// Opens a port that is not served yet.
    fn listen(&self) -> SocketAddr;

    /// Serves calls on `port` until `stop`.
    fn serve(
        &self,
        port: SocketAddr,
        routes: Routes,
        stop: CancellationToken,
    ) -> BoxFuture<'static, ()>;

    fn close(&self, port: SocketAddr);

    /// Returns a channel to `host:port` that connects on first use.
    fn dial(&self, address: &str) -> SimulatedChannel;

    /// Tries to open a connection to `host:port`.
    fn probe(&self, address: &str) -> BoxFuture<'static, Probe>;
}

thread_local! {
    static PRESENT: RefCell<Option<Arc<dyn Network>>> = const { RefCell::new(None) };
}

/// Returns the simulated network of this thread, if there is one.
pub(crate) fn present() -> Option<Arc<dyn Network>> {
    PRESENT.with_borrow(Clone::clone)
}

/// Runs `work` with `network` as the simulated network of this thread.
pub fn enter<T>(network: Arc<dyn Network>, work: impl FnOnce() -> T) -> T {
    struct Back(Option<Arc<dyn Network>>);
    impl Drop for Back {
        fn drop(&mut self) {
            PRESENT.set(self.0.take());
        }
    }
    let _back = Back(PRESENT.replace(Some(network)));
    work()
}

/// Returns a simulated channel for a client with its own HTTP/2 implementation, or `None` outside a
/// simulation.
pub fn simulated(address: &str) -> Option<SimulatedChannel> {
    present().map(|network| network.dial(address))
}
