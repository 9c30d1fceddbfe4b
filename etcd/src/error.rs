//! The errors that keep a server from starting or running.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on {address}")]
    Listen { address: SocketAddr, source: io::Error },

    #[error("data directory {} is in use by another server; stop it or name another directory", path.display())]
    InUse { path: PathBuf },

    #[error(
        "{} is corrupt at byte {offset}: {reason}; restore the data directory from a backup, or \
         move it away to start empty",
        path.display()
    )]
    Corrupt { path: PathBuf, offset: u64, reason: String },

    #[error("cannot {action} {}", path.display())]
    Disk { action: &'static str, path: PathBuf, source: io::Error },

    #[error("the grpc server stopped")]
    Serve(#[from] tonic::transport::Error),

    #[error("the log thread failed")]
    LogThread,
}

impl Error {
    /// Returns a function that adds the file and the action to an I/O error.
    pub(crate) fn disk(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Disk { action, path, source }
    }
}
