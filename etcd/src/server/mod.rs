//! The gRPC server: binds, serves, stops.

mod kv;
mod lease;
mod limit;
mod maintenance;
mod status;
mod watch;
mod watch_session;

use crate::committer::Committer;
use crate::config::Config;
use crate::disk::Disk;
use crate::error::Error;
use crate::node::{Node, Stage};
use etcd_client::proto::{
    PbClusterServer, PbKvServer, PbLeaseServer, PbMaintenanceServer, PbWatchServer,
};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use steadfast_host::time::{interval, sleep};
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tracing::{debug, info};

/// How late an expired lease may be revoked.
const EXPIRY_INTERVAL: Duration = Duration::from_millis(100);
/// A client that does not respond for this long is disconnected, and its watches end.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// How long a shutdown waits for clients to disconnect.
const DRAIN_MAX: Duration = Duration::from_secs(3);

/// An embedded etcd that is bound and has locked its data directory, but does not serve yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    node: Arc<Node>,
    committer: Committer,
    watch_progress_interval: Duration,
}

impl Server {
    /// Listens, locks the data directory and reads it. Clients can connect, and get replies once
    /// [`Server::serve`] runs.
    pub async fn bind(config: Config) -> Result<Self, Error> {
        let address = config.listen;
        let listen_error = |source| Error::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(listen_error)?;
        let address = listener.local_addr().map_err(listen_error)?;
        let (data_dir, log_bytes_max) = (config.data_dir, config.log_bytes_max);
        let (disk, core) = blocking(move || Disk::open(&data_dir, log_bytes_max)).await?;
        let node = Arc::new(Node::new(core, config.retention, disk.bytes()));
        let committer = Committer::spawn(node.clone(), disk)?;
        let watch_progress_interval = config.watch_progress_interval;
        Ok(Server { listener, address, node, committer, watch_progress_interval })
    }

    /// Returns the listen address, with the port that the system chose for port 0.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown` resolves or the log cannot be written. All changes reported in replies
    /// are on disk, whether this returns, is dropped, or dies with the process.
    pub async fn serve(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), Error> {
        info!(address = %self.address, "embedded etcd serving");
        let routes = routes(&self.node, self.address, self.watch_progress_interval);
        let Server { listener, node, mut committer, .. } = self;
        let stop = async {
            tokio::select! {
                biased;
                () = shutdown => {}
                () = stopping(&node) => {}
            }
            node.drain();
        };
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .add_routes(routes)
            .serve_with_incoming_shutdown(
                TcpIncoming::from(listener).with_nodelay(Some(true)),
                stop,
            );
        let served = tokio::select! {
                biased;
            served = serving => served.map_err(Error::from),
            () = drain_timeout(&node) => Ok(()),
            never = expire_leases(&node) => match never {},
        };
        let written = blocking(move || committer.finish()).await;
        // An error of the log is the cause of an error of the gRPC server, so it takes precedence.
        written.and(served)
    }
}

/// Returns all services of a store.
pub fn routes(node: &Arc<Node>, address: SocketAddr, watch_progress_interval: Duration) -> Routes {
    let kv = PbKvServer::new(kv::KvService::new(node.clone()))
        .max_decoding_message_size(limit::DECODED_BYTES_MAX);
    let lease = PbLeaseServer::new(lease::LeaseService::new(node.clone()));
    let watch = watch::WatchService::new(node.clone(), watch_progress_interval);
    let maintenance = maintenance::MaintenanceService::new(node.clone(), address);
    Routes::new(kv)
        .add_service(lease)
        .add_service(PbWatchServer::new(watch))
        .add_service(PbMaintenanceServer::new(maintenance.clone()))
        .add_service(PbClusterServer::new(maintenance))
}

/// Runs blocking work on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    spawn_blocking(work).await.unwrap_or(Err(Error::LogThread))
}

/// Resolves once the node is no longer serving.
async fn stopping(node: &Node) {
    let mut progress = node.progress();
    // An error means that the node was dropped, which ends serving as well.
    let _ = progress.wait_for(|progress| progress.stage != Stage::Serving).await;
}

/// Resolves when the time for clients to disconnect is over.
async fn drain_timeout(node: &Node) {
    stopping(node).await;
    sleep(DRAIN_MAX).await;
}

pub async fn expire_leases(node: &Node) -> std::convert::Infallible {
    let mut ticks = interval(EXPIRY_INTERVAL);
    loop {
        ticks.tick().await;
        for id in node.expire_leases() {
            debug!(lease = id, "lease expired");
        }
    }
}
