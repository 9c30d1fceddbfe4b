//! etcd and a master inside of the agent, for a job on one node.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use clap::Parser;
use steadfast_common::elastic::ElasticSpec;
use steadfast_common::rendezvous::NodeRange;
use steadfast_etcd::{Config, Server};
use steadfast_host::random;
use steadfast_host::task::{Task, spawn};
use steadfast_master::{Args, ElasticRequest, Request};
use steadfast_process::{Failure, LogIdentity, Shutdown};
use tempfile::TempDir;
use tracing::error;

/// Time to live of the master's lease. Nothing but this process can end it.
const LEASE_TTL: &str = "10s";

/// How long the master may take to hear of the end of the job.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// A running etcd and master. They end with this process.
#[derive(Debug)]
pub(crate) struct Standalone {
    pub endpoint: String,
    master: Task<()>,
    etcd: Task<()>,
    _data: TempDir,
}

impl Standalone {
    /// Starts etcd and the master of a job of `nodes`.
    ///
    /// # Errors
    /// If a port or a directory is not to be had.
    pub async fn start(job: &str, nodes: NodeRange) -> Result<Self, Failure> {
        let data = tempfile::tempdir()
            .map_err(|error| Failure::io("cannot create a temporary directory", &error))?;
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let server = Server::bind(Config::new(listen, data.path())).await;
        let server = server.map_err(|error| Failure::internal(format!("etcd: {error}")))?;
        let endpoint = format!("http://{}", server.local_addr());
        let etcd = spawn(async move {
            if let Err(error) = server.serve(std::future::pending()).await {
                error!(%error, "etcd ended");
            }
        });
        let flags =
            ["steadfast-master", "--job", job, "--etcd-endpoints", &endpoint, "--lease-ttl", LEASE_TTL];
        let args = Args::try_parse_from(flags)
            .map_err(|error| Failure::internal(format!("the master's settings: {error}")))?;
        let order = Request::Elastic(ElasticRequest { spec: ElasticSpec::new(job, nodes) });
        let id = random::uuid();
        let identity = LogIdentity::new("master", job, id);
        let master = spawn(async move {
            let lived =
                steadfast_master::live(args, Some(order), id, identity, Shutdown::manual()).await;
            if let Err(failure) = lived {
                error!("master: {failure}");
            }
        });
        Ok(Self { endpoint, master, etcd, _data: data })
    }

    /// Waits until the master has heard of the end of the job, then ends etcd.
    pub async fn end(self) {
        let _ = tokio::time::timeout(END_TIMEOUT, self.master).await;
        self.etcd.abort();
    }
}
