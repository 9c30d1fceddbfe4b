//! A port that closes with this process, so that a failure detector on any host notices its death at once.

use std::collections::VecDeque;
use std::future::pending;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use steadfast_host::task::{Task, spawn};
use steadfast_host::time::sleep;
use steadfast_net::Port;
use tokio::net::TcpListener;

use crate::host_of;

/// Connections that are held open, one for each master that watches this process. Another one replaces the oldest.
const WATCHERS_MAX: usize = 16;

/// Pause after a connection could not be accepted: the process has too many open files.
const RETRY: Duration = Duration::from_millis(200);

/// An open port. It accepts connections, and reads nothing from them.
#[derive(Debug)]
pub struct LivenessPort {
    /// `host:port`, for [`crate::until_dead`].
    pub address: String,
    accepting: Task<()>,
}

impl LivenessPort {
    /// Opens a free port that others reach at `host`, which is an IP address or a name.
    ///
    /// # Errors
    /// If no port is free.
    pub async fn open(host: &str) -> std::io::Result<Self> {
        let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let bound = match ip {
            Ok(ip) => Port::bind((ip, 0).into()).await,
            Err(_) => Port::bind((Ipv4Addr::UNSPECIFIED, 0).into()).await,
        };
        // Behind network address translation, `host` is no address of this machine.
        let bound = match bound {
            Ok(bound) => bound,
            Err(_) => Port::bind((Ipv4Addr::UNSPECIFIED, 0).into()).await?,
        };
        let address = format!("{host}:{}", bound.local_addr()?.port());
        let accepting = match bound.into_tcp() {
            Ok(listener) => spawn(accept(listener)),
            // A simulated port only has to be open for probes.
            Err(port) => spawn(async move {
                let _port = port;
                pending().await
            }),
        };
        Ok(Self { address, accepting })
    }

    /// Opens a free port at the host of `address` (`host:port`).
    ///
    /// # Errors
    /// If no port is free.
    pub async fn beside(address: &str) -> std::io::Result<Self> {
        Self::open(host_of(address)).await
    }
}

impl Drop for LivenessPort {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(bound: TcpListener) {
    let mut held = VecDeque::new();
    loop {
        match bound.accept().await {
            Ok((stream, _)) => {
                if held.len() == WATCHERS_MAX {
                    held.pop_front();
                }
                held.push_back(stream);
            }
            Err(_) => sleep(RETRY).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;
    use crate::until_dead;

    #[tokio::test]
    async fn the_port_counts_as_alive_until_it_is_dropped() {
        let port = LivenessPort::open("127.0.0.1").await.unwrap();
        let address = port.address.clone();
        let watching = tokio::spawn(async move { until_dead(&address).await });
        for _ in 0..2 * WATCHERS_MAX {
            TcpStream::connect(&port.address).await.unwrap();
        }
        assert!(!watching.is_finished());
        drop(port);
        timeout(Duration::from_secs(5), watching).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_host_that_is_no_address_of_this_machine_is_advertised_as_it_is() {
        let port = LivenessPort::open("192.0.2.1").await.unwrap();
        assert!(port.address.starts_with("192.0.2.1:"));
    }
}
