//! Notices that this machine has another address than others were told, as a container has that was taken
//! off its network and put back.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use steadfast_host::task::blocking;
use steadfast_host::time::interval;

use crate::args::address_towards;
use crate::{CommonArgs, Failure};

/// Time between looks.
const EVERY: Duration = Duration::from_secs(2);

/// Looks that agree: an interface that is down for a moment, or gets its address anew, has not moved.
const LOOKS: u32 = 5;

/// Completes when the machine is not at `told` (`host:port`) any more and somewhere else towards etcd. What
/// it has announced is wrong from then on: it should end, and be started again.
///
/// An address that somebody chose (`--listen`, `--advertise`) is not looked after: it may be a name, or one
/// that somebody else translates.
pub async fn moved(args: &CommonArgs, told: &str) -> Failure {
    look(args, told, EVERY).await
}

async fn look(args: &CommonArgs, told: &str, every: Duration) -> Failure {
    let chosen = args.advertise.is_some() || !args.listen.ip().is_unspecified();
    let (Ok(told), false) = (told.parse::<SocketAddr>(), chosen) else {
        return std::future::pending().await;
    };
    let mut ticks = interval(every);
    let mut agree = 0;
    loop {
        ticks.tick().await;
        let endpoints = args.etcd.etcd_endpoints.clone();
        // Names are looked up, which may take long.
        let towards = blocking(move || endpoints.iter().find_map(|it| address_towards(it))).await;
        let elsewhere = towards
            .ok()
            .flatten()
            .filter(|now| !now.is_loopback() && *now != told.ip() && !is_ours(told));
        agree = if elsewhere.is_some() { agree + 1 } else { 0 };
        if let Some(now) = elsewhere.filter(|_| agree == LOOKS) {
            return Failure::unavailable(format!(
                "others know this process by {}, and its machine is at {now} now; start it again",
                told.ip()
            ));
        }
    }
}

/// Whether this machine still has the address.
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

    /// As far as a test can move: an address of documentation (RFC 5737) is no machine's.
    #[tokio::test]
    async fn only_an_address_that_is_gone_and_was_not_chosen_counts() {
        let Some(towards) = address_towards("http://192.0.2.1:2379") else { return };
        let args = |more: &[&str]| {
            let words = ["it", "--job", "j", "--etcd-endpoints", "http://192.0.2.1:2379"];
            Only::parse_from(words.iter().chain(more)).common
        };
        let anywhere = ["--listen", "0.0.0.0:0", "--insecure-allow-plaintext"];
        let soon = Duration::from_millis(500);
        let open = args(&anywhere);
        let moved = |args, told| async move { look(args, told, Duration::from_millis(10)).await };
        let failure = timeout(soon, moved(&open, "192.0.2.7:7000")).await.unwrap();
        assert!(
            failure.message.contains("192.0.2.7, and its machine is at"),
            "{}",
            failure.message
        );
        let here = format!("{towards}:7000");
        assert!(timeout(soon, moved(&open, &here)).await.is_err());
        let chosen = args(&[&anywhere[..], &["--advertise", "192.0.2.7"]].concat());
        assert!(timeout(soon, moved(&chosen, "192.0.2.7:7000")).await.is_err());
    }
}
