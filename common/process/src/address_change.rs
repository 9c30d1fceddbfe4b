//! Detects that this machine no longer has the address that the process advertises, as after a container
//! was disconnected from its network and reconnected.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use steadfast_host::task::blocking;
use steadfast_host::time::interval;

use crate::args::address_towards;
use crate::{CommonArgs, Failure};

/// Time between checks.
const INTERVAL: Duration = Duration::from_secs(2);

/// Consecutive checks that must agree, because an interface can be down or without an address for a
/// moment.
const CHECKS: u32 = 5;

/// Completes when the machine no longer has the address `advertised` (`host:port`) and has another one on the
/// route to etcd. The advertised address is then wrong, and the process must be restarted.
///
/// An explicit address (`--listen`, `--advertise`) is not checked, because it may be a host name or
/// subject to address translation.
pub async fn address_changed(args: &CommonArgs, advertised: &str) -> Failure {
    watch(args, advertised, INTERVAL).await
}

async fn watch(args: &CommonArgs, advertised: &str, period: Duration) -> Failure {
    let chosen = args.advertise.is_some() || !args.listen.ip().is_unspecified();
    let (Ok(advertised), false) = (advertised.parse::<SocketAddr>(), chosen) else {
        return std::future::pending().await;
    };
    let mut ticks = interval(period);
    let mut agree = 0;
    loop {
        ticks.tick().await;
        let endpoints = args.etcd.urls();
        // Resolves host names, which may block.
        let toward = blocking(move || endpoints.iter().find_map(|it| address_towards(it))).await;
        let elsewhere = toward
            .ok()
            .flatten()
            .filter(|now| !now.is_loopback() && *now != advertised.ip() && !is_ours(advertised));
        agree = if elsewhere.is_some() { agree + 1 } else { 0 };
        if let Some(now) = elsewhere.filter(|_| agree == CHECKS) {
            return Failure::unavailable(format!(
                "the advertised address {} is no longer an address of this machine, which has {now}; \
                 restart the process",
                advertised.ip()
            ));
        }
    }
}

/// Returns whether this machine still has the address.
fn is_ours(address: SocketAddr) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tokio::time::timeout;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        common: CommonArgs,
    }

    /// Simulates the change with a documentation address (RFC 5737), which no machine has.
    #[tokio::test]
    async fn only_a_lost_address_that_the_user_did_not_choose_is_reported() {
        let Some(toward) = address_towards("http://192.0.2.1:2379") else { return };
        let args = |more: &[&str]| {
            let words = ["it", "--job", "j", "--etcd-endpoints", "http://192.0.2.1:2379"];
            Only::parse_from(words.iter().chain(more)).common
        };
        let anywhere = ["--listen", "0.0.0.0:0", "--insecure-allow-plaintext"];
        let soon = Duration::from_millis(500);
        let open = args(&anywhere);
        let moved = |args, advertised| async move {
            watch(args, advertised, Duration::from_millis(10)).await
        };
        let failure = timeout(soon, moved(&open, "192.0.2.7:7000")).await.unwrap();
        assert!(failure.message.contains("address 192.0.2.7 is no longer"), "{}", failure.message);
        let here = format!("{toward}:7000");
        assert!(timeout(soon, moved(&open, &here)).await.is_err());
        let chosen = args(&[&anywhere[..], &["--advertise", "192.0.2.7"]].concat());
        assert!(timeout(soon, moved(&chosen, "192.0.2.7:7000")).await.is_err());
    }
}
