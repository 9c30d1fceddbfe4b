//! The connection between a launcher and an agent: the agent's standard input.
//!
//! The launcher writes a byte from time to time. When the input ends, or has been silent for too long, the agent
//! stops its workers and leaves the job. So agents end with their launcher, also on another machine and if the
//! launcher is killed, and a launcher stops an agent without a signal, which ssh does not forward. Two other bytes stand
//! for SIGUSR1 and SIGUSR2.

use std::time::Duration;

use steadfast_host::time::timeout;
use steadfast_process::Shutdown;
use steadfast_supervise::Signal;
use tokio::io::{AsyncRead, AsyncReadExt, stdin};
use tracing::info;

/// Time between two bytes.
pub const BEAT: Duration = Duration::from_secs(5);

/// The byte that says no more than that the launcher lives.
pub const ALIVE: u8 = b'\n';

/// How long an agent runs without a byte.
pub const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Requests a drain when the launcher does not want this agent any more, or is lost.
pub(crate) async fn follow(shutdown: Shutdown) {
    let reason = until_end(stdin(), SILENCE_MAX, |signal| shutdown.notify(signal)).await;
    info!(reason, "stopping");
    shutdown.trigger();
}

/// Returns the byte that tells an agent of a signal.
pub fn byte_of(signal: Signal) -> u8 {
    match signal {
        Signal::SIGUSR1 => b'1',
        Signal::SIGUSR2 => b'2',
        _ => ALIVE,
    }
}

/// Returns why the agent has to stop.
async fn until_end(
    mut input: impl AsyncRead + Unpin,
    silence_max: Duration,
    notify: impl Fn(Signal),
) -> &'static str {
    let mut buffer = [0; 64];
    loop {
        match timeout(silence_max, input.read(&mut buffer)).await {
            Ok(Ok(count @ 1..)) => {
                for signal in [Signal::SIGUSR1, Signal::SIGUSR2] {
                    if buffer[..count].contains(&byte_of(signal)) {
                        notify(signal);
                    }
                }
            }
            Ok(Ok(0) | Err(_)) => return "the launcher has closed the connection",
            Err(_) => return "the launcher is silent",
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn an_agent_runs_while_its_launcher_writes() {
        let (mut launcher, agent) = duplex(8);
        let (tx, mut notices) = tokio::sync::mpsc::channel(8);
        let notify = move |signal| tx.try_send(signal).unwrap();
        let agent = tokio::spawn(until_end(agent, Duration::from_secs(1), notify));
        launcher.write_all(b"\n\n\n2\n\n\n\n").await.unwrap();
        // There is room only after the agent has read.
        launcher.write_all(b"\n").await.unwrap();
        assert!(!agent.is_finished());
        assert_eq!(agent.await.unwrap(), "the launcher is silent");
        assert_eq!(notices.recv().await, Some(Signal::SIGUSR2));
        assert_eq!(notices.recv().await, None);
    }

    #[tokio::test]
    async fn an_agent_ends_with_its_input() {
        let (launcher, agent) = duplex(8);
        drop(launcher);
        let end = until_end(agent, SILENCE_MAX, |_| {}).await;
        assert_eq!(end, "the launcher has closed the connection");
    }
}
