//! What a server is started with.

use crate::core::Retention;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Where to listen, where to keep the data, and how much of it.
#[derive(Debug, Clone)]
pub struct Config {
    /// Port 0 lets the system choose one; see [`crate::Server::local_addr`].
    pub listen: SocketAddr,
    /// Created if missing. One server at a time holds it.
    pub data_dir: PathBuf,
    /// History beyond this is compacted without being asked.
    pub retention: Retention,
    /// The log gives way to a snapshot once it is larger than this and than the last snapshot.
    pub log_bytes_max: u64,
    /// How often an idle watcher that asked for it is told the current revision.
    pub watch_progress_interval: Duration,
}

impl Config {
    /// Returns the defaults for a place to listen and a place to keep the data.
    pub fn new(listen: SocketAddr, data_dir: impl Into<PathBuf>) -> Self {
        Config {
            listen,
            data_dir: data_dir.into(),
            retention: Retention::default(),
            log_bytes_max: 64 << 20,
            watch_progress_interval: Duration::from_secs(600),
        }
    }
}
