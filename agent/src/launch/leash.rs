//! The connection between a launcher and an agent: the agent's standard input.
//!
//! The launcher writes a byte from time to time. When the input ends, or has been silent for too long, the agent
//! stops its workers and leaves the job. So agents end with their launcher, also on another machine and if the
//! launcher is killed, and a launcher stops an agent without a signal, which ssh does not forward.

use std::time::Duration;

use steadfast_process::Shutdown;
use tokio::io::{AsyncRead, AsyncReadExt, stdin};
use tokio::time::timeout;
use tracing::info;

/// Time between two bytes.
pub(crate) const BEAT: Duration = Duration::from_secs(5);

/// How long an agent runs without a byte.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Requests a drain when the launcher does not want this agent any more, or is lost.
pub(crate) async fn follow(shutdown: Shutdown) {
    let reason = until_end(stdin(), SILENCE_MAX).await;
    info!("stopping: {reason}");
    shutdown.trigger();
}

/// Returns why the agent has to stop.
async fn until_end(mut input: impl AsyncRead + Unpin, silence_max: Duration) -> &'static str {
    let mut buffer = [0; 64];
    loop {
        match timeout(silence_max, input.read(&mut buffer)).await {
            Ok(Ok(1..)) => {}
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
        let agent = tokio::spawn(until_end(agent, Duration::from_secs(1)));
        launcher.write_all(b"\n\n\n\n\n\n\n\n").await.unwrap();
        // There is room only after the agent has read.
        launcher.write_all(b"\n").await.unwrap();
        assert!(!agent.is_finished());
        assert_eq!(agent.await.unwrap(), "the launcher is silent");
    }

    #[tokio::test]
    async fn an_agent_ends_with_its_input() {
        let (launcher, agent) = duplex(8);
        drop(launcher);
        let end = until_end(agent, SILENCE_MAX).await;
        assert_eq!(end, "the launcher has closed the connection");
    }
}
