//! Shutdown by signals: the first drains the process, the second ends it at once.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tracing::{info, warn};

use crate::Failure;

/// A request to drain, shared by all clones.
#[derive(Clone, Debug)]
pub struct Shutdown {
    token: CancellationToken,
    /// The exit code for the first signal.
    exit_code: Arc<AtomicU8>,
    _signals: Option<Arc<Signals>>,
}

/// Exit code of a process that ended because of SIGTERM.
const TERMINATED: u8 = 143;

/// The same for SIGINT.
const INTERRUPTED: u8 = 130;

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
        let mut shutdown = Self::manual();
        let first = Self { _signals: None, ..shutdown.clone() };
        let task = tokio::spawn(listen(terminate, interrupt, first));
        shutdown._signals = Some(Arc::new(Signals(task)));
        Ok(shutdown)
    }

    /// Creates one that only [`Shutdown::trigger`] triggers.
    pub fn manual() -> Self {
        let exit_code = Arc::new(AtomicU8::new(TERMINATED));
        Self { token: CancellationToken::new(), exit_code, _signals: None }
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

    /// Returns the exit code of a process whose work the drain has interrupted: 130 after SIGINT, otherwise 143.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.exit_code.load(Ordering::Relaxed))
    }

    /// Returns the underlying token.
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }
}

async fn listen(mut terminate: Signal, mut interrupt: Signal, shutdown: Shutdown) {
    let first = next(&mut terminate, &mut interrupt).await;
    info!(signal = first.name, "draining; a second signal ends the process at once");
    shutdown.exit_code.store(first.exit_code, Ordering::Relaxed);
    shutdown.trigger();
    let second = next(&mut terminate, &mut interrupt).await;
    warn!(signal = second.name, "exiting at once");
    std::process::exit(second.exit_code.into());
}

struct Received {
    name: &'static str,
    exit_code: u8,
}

async fn next(terminate: &mut Signal, interrupt: &mut Signal) -> Received {
    tokio::select! {
        biased;
        _ = terminate.recv() => Received { name: "SIGTERM", exit_code: TERMINATED },
        _ = interrupt.recv() => Received { name: "SIGINT", exit_code: INTERRUPTED },
    }
}
