//! Shutdown by signals: the first drains the process, the second ends it at once.

use std::sync::Arc;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tracing::{info, warn};

use crate::Failure;

/// A request to drain, shared by all clones.
#[derive(Clone, Debug)]
pub struct Shutdown {
    token: CancellationToken,
    _signals: Option<Arc<Signals>>,
}

#[derive(Debug)]
struct Signals(JoinHandle<()>);

impl Drop for Signals {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Shutdown {
    /// Installs handlers for SIGTERM and SIGINT: the first signal drains, the second exits at once with
    /// 143 or 130.
    ///
    /// # Errors
    /// If the handlers cannot be installed.
    pub fn install() -> Result<Self, Failure> {
        let take =
            |kind| signal(kind).map_err(|error| Failure::io("cannot handle signals", &error));
        let terminate = take(SignalKind::terminate())?;
        let interrupt = take(SignalKind::interrupt())?;
        let token = CancellationToken::new();
        let task = tokio::spawn(listen(terminate, interrupt, token.clone()));
        Ok(Self { token, _signals: Some(Arc::new(Signals(task))) })
    }

    /// Creates one that only [`Shutdown::trigger`] triggers.
    pub fn manual() -> Self {
        Self { token: CancellationToken::new(), _signals: None }
    }

    /// Completes when the drain is requested.
    pub fn drain(&self) -> WaitForCancellationFutureOwned {
        self.token.clone().cancelled_owned()
    }

    /// Whether the drain is requested.
    pub fn is_draining(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Requests a drain, as a signal does.
    pub fn trigger(&self) {
        self.token.cancel();
    }

    /// Returns the underlying token.
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }
}

async fn listen(mut terminate: Signal, mut interrupt: Signal, token: CancellationToken) {
    let first = next(&mut terminate, &mut interrupt).await;
    info!(signal = first.name, "draining; a second signal ends the process at once");
    token.cancel();
    let second = next(&mut terminate, &mut interrupt).await;
    warn!(signal = second.name, "exiting at once");
    std::process::exit(second.exit_code);
}

struct Received {
    name: &'static str,
    exit_code: i32,
}

async fn next(terminate: &mut Signal, interrupt: &mut Signal) -> Received {
    tokio::select! {
        biased;
        _ = terminate.recv() => Received { name: "SIGTERM", exit_code: 143 },
        _ = interrupt.recv() => Received { name: "SIGINT", exit_code: 130 },
    }
}
