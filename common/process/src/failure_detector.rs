//! Failure detector: detects that another process is dead, long before its lease expires.
//!
//! When a process dies, its kernel closes its connections at once. The detector holds a connection open;
//! when that closes and new ones are refused repeatedly, the process counts as dead. This is a hint and
//! can be wrong; only the lease is authoritative, so callers must stay safe after a wrong detection.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use steadfast_host::time::sleep;
use steadfast_net::{Probe, probe};

/// Consecutive refusals after which a process counts as dead.
const REFUSALS: u32 = 3;

/// Delay between the attempts that [`REFUSALS`] counts.
const PROBE: Duration = Duration::from_millis(20);

/// Delay after a connection could not be opened, or was closed by a live process.
const PAUSE: Duration = Duration::from_millis(250);

/// Completes when the process that listened at `address` (`host:port`) is dead.
///
/// A remote process must have accepted a connection once before it can count as dead, because a refusal
/// may come from the network between. On the same host a refusal suffices.
pub async fn until_dead(address: &str) {
    let mut was_met = is_on_this_host(address);
    loop {
        match probe(address).await {
            Probe::Open(closed) => {
                was_met = true;
                closed.await;
            }
            Probe::Refused => {}
            Probe::Silent => {
                sleep(PAUSE).await;
                continue;
            }
        }
        if was_met && is_refused_again(address).await {
            return;
        }
        sleep(PAUSE).await;
    }
}

async fn is_refused_again(address: &str) -> bool {
    for _ in 0..REFUSALS {
        sleep(PROBE).await;
        match probe(address).await {
            Probe::Refused => {}
            Probe::Open(_) | Probe::Silent => return false,
        }
    }
    true
}

/// Returns whether an address is reachable only from its own host: whether its IP address is a loopback address. A name
/// such as `localhost` does not count.
pub fn is_on_this_host(address: &str) -> bool {
    address.parse::<SocketAddr>().is_ok_and(|address| match address.ip() {
        IpAddr::V4(ip) => ip.is_loopback(),
        IpAddr::V6(ip) => ip.is_loopback(),
    })
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    async fn listener() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        (listener, address)
    }

    #[tokio::test]
    async fn a_process_that_closes_its_port_is_dead() {
        let (listener, address) = listener().await;
        let watching = tokio::spawn(async move { until_dead(&address).await });
        let (stream, _) = listener.accept().await.unwrap();
        assert!(!watching.is_finished());
        drop((listener, stream));
        tokio::time::timeout(SOON, watching).await.unwrap().unwrap();
    }

    /// A closed connection alone is not a failure, because servers close idle connections.
    #[tokio::test]
    async fn a_process_that_accepts_a_new_connection_is_alive() {
        let (listener, address) = listener().await;
        let watching = tokio::spawn(async move { until_dead(&address).await });
        for _ in 0..3 {
            let (stream, _) = listener.accept().await.unwrap();
            drop(stream);
        }
        assert!(!watching.is_finished());
        watching.abort();
    }

    #[test]
    fn only_loopback_is_known_to_be_this_host() {
        assert!(is_on_this_host("127.0.0.1:80") && is_on_this_host("[::1]:80"));
        assert!(!is_on_this_host("10.0.0.1:80") && !is_on_this_host("master:80"));
    }
}
