//! A connection between this process and a worker that inherits the other end.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// This process's end of a connection to a worker.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
}

impl Connection {
    /// Creates a connection with some bytes for the worker, at most a few KiB, and returns the end for
    /// [`crate::WorkerSpec::inherited`], too. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// If the system has no more descriptors or memory.
    pub fn new(first: &[u8]) -> io::Result<(Self, OwnedFd)> {
        let (mut ours, theirs) = net::UnixStream::pair()?;
        ours.write_all(first)?;
        ours.set_nonblocking(true)?;
        Ok((Self { stream: UnixStream::from_std(ours)? }, theirs.into()))
    }

    /// Sends bytes, and then the end of the input.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn send_last(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.shutdown().await
    }

    /// Waits for a byte of the worker. Can be cancelled and repeated.
    ///
    /// # Errors
    /// If the worker has ended, or has closed the connection.
    pub async fn receive(&mut self) -> io::Result<u8> {
        self.stream.read_u8().await
    }
}
