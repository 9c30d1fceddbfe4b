//! Probes of ports: whether a process listens there, and when it ends.

use std::io;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use crate::CONNECT_MAX;
use crate::simulated::present;

/// Outcome of [`probe`].
pub enum Probe {
    /// The connection is open; the future completes when the peer closes it. Bytes that it sends are
    /// discarded.
    Open(BoxFuture<'static, ()>),
    /// No process listens on the port, or the host is unreachable.
    Refused,
    /// Unknown: no answer, or another error.
    Silent,
}

/// Tries to open a connection to `host:port`.
pub async fn probe(address: &str) -> Probe {
    if let Some(host) = present() {
        return host.probe(address).await;
    }
    match tokio::time::timeout(CONNECT_MAX, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => Probe::Open(closed(stream).boxed()),
        Ok(Err(error)) => match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::HostUnreachable => Probe::Refused,
            _ => Probe::Silent,
        },
        Err(_) => Probe::Silent,
    }
}

async fn closed(mut stream: TcpStream) {
    let mut bytes = [0; 64];
    while let Ok(1..) = stream.read(&mut bytes).await {}
}
