//! The configuration of a server.

use crate::core::Retention;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Listen address, data directory, and limits.
#[derive(Debug, Clone)]
pub struct Config {
    /// With port 0 the system chooses a port; see [`crate::Server::local_addr`].
    pub listen: SocketAddr,
    /// Created if missing. One server at a time can lock it.
    pub data_dir: PathBuf,
    /// Older history is compacted automatically.
    pub retention: Retention,
    /// A snapshot replaces the log once the log is larger than this and than the last snapshot.
    pub log_bytes_max: u64,
    /// Interval of progress notifications to idle watchers that requested them.
    pub watch_progress_interval: Duration,
}

impl Config {
    /// Returns the default configuration for a listen address and a data directory.
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
