//! Notices that another process is gone, long before its lease ends.
//!
//! When a process dies its kernel closes its connections at once. So we hold one open; when it
//! closes and new ones are refused again and again, nobody is there any more. Whoever acts on this
//! must be safe if it is wrong: it is a hint, the lease is the truth.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use steadfast_host::net::{Knock, knock};
use steadfast_host::time::sleep;

/// Refusals in a row after which nobody is there.
const REFUSALS: u32 = 3;

/// Time between these attempts.
const PROBE: Duration = Duration::from_millis(20);

/// Pause after a connection that could not be opened, or was closed by a process that lives.
const PAUSE: Duration = Duration::from_millis(250);

/// Completes when the process that listened at `address` (`host:port`) is gone.
///
/// It has to be reached once before it can be gone: a network that never let us through says nothing
/// about who is behind it. On our own host a refusal is word enough.
pub async fn gone(address: &str) {
    let mut was_met = is_on_this_host(address);
    loop {
        match knock(address).await {
            Knock::Open(closed) => {
                was_met = true;
                closed.await;
            }
            Knock::Refused => {}
            Knock::Silent => {
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
        match knock(address).await {
            Knock::Refused => {}
            Knock::Open(_) | Knock::Silent => return false,
        }
    }
    true
}

/// Whether an address can only be meant by processes of one host.
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
    async fn whoever_closes_its_port_is_gone() {
        let (listener, address) = listener().await;
        let watching = tokio::spawn(async move { gone(&address).await });
        let (stream, _) = listener.accept().await.unwrap();
        assert!(!watching.is_finished());
        drop((listener, stream));
        tokio::time::timeout(SOON, watching).await.unwrap().unwrap();
    }

    /// A connection that ends is no death: idle ones are closed all the time.
    #[tokio::test]
    async fn whoever_closes_a_connection_and_takes_another_is_not_gone() {
        let (listener, address) = listener().await;
        let watching = tokio::spawn(async move { gone(&address).await });
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
