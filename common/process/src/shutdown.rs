//! Shutdown by signals: the first drains the process, the second ends it at once.
//!
//! | signal | meaning |
//! |---|---|
//! | SIGTERM, SIGINT, SIGQUIT | drain; end at once if the process drains already |
//! | SIGHUP: the terminal was closed | drain. It often comes twice, or after SIGTERM, and never means more. Under `nohup` it stays ignored |
//! | SIGUSR1, SIGUSR2 | a notice for the programs that this process runs, if it runs any; otherwise nothing |

use std::fs;
use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use nix::sys::signal::Signal;
use tokio::signal::unix::{self, SignalKind};
use tokio::sync::broadcast;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tracing::{debug, info, warn};

use crate::Failure;

/// Attempts to remove a directory of temporary files at an exit at once.
const REMOVALS_MAX: u32 = 20;

/// Notices that wait to be passed on; older ones are dropped.
const NOTICES_MAX: usize = 16;

/// A request to drain, shared by all clones.
#[derive(Clone, Debug)]
pub struct Shutdown {
    token: CancellationToken,
    /// The number of the first signal; 0 before it.
    first: Arc<AtomicI32>,
    notices: broadcast::Sender<Signal>,
    /// Directories that an exit at once removes. Guards the list.
    temporary: Arc<Mutex<Vec<PathBuf>>>,
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
    /// Installs the handlers. The first signal that ends a process drains it; the second exits at once with 128 and
    /// the number of the signal.
    ///
    /// # Errors
    /// If the handlers cannot be installed.
    pub fn install() -> Result<Self, Failure> {
        let mut shutdown = Self::manual();
        let handled =
            [Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];
        let hangup = (!is_ignored(Signal::SIGHUP)).then_some(Signal::SIGHUP);
        let streams = handled.into_iter().chain(hangup).map(Stream::open);
        let streams = streams.collect::<Result<Vec<Stream>, Failure>>()?;
        let own = Self { _signals: None, ..shutdown.clone() };
        let task = tokio::spawn(listen(streams, own));
        shutdown._signals = Some(Arc::new(Signals(task)));
        Ok(shutdown)
    }

    /// Creates a shutdown that only [`Shutdown::trigger`] requests, and no signal.
    pub fn manual() -> Self {
        Self {
            token: CancellationToken::new(),
            first: Arc::default(),
            notices: broadcast::Sender::new(NOTICES_MAX),
            temporary: Arc::default(),
            _signals: None,
        }
    }

    /// Completes when the drain is requested.
    pub fn drain(&self) -> WaitForCancellationFutureOwned {
        self.token.clone().cancelled_owned()
    }

    pub fn is_draining(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Requests a drain, as a signal does.
    pub fn trigger(&self) {
        self.token.cancel();
    }

    /// Returns the signal that has requested the drain, if one has.
    pub fn signal(&self) -> Option<Signal> {
        Signal::try_from(self.first.load(Ordering::Relaxed)).ok()
    }

    /// Returns the exit code of a process whose work the drain has interrupted: 128 and the number of the signal, that
    /// of SIGTERM without one.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(code_of(self.signal().unwrap_or(Signal::SIGTERM)))
    }

    /// Returns the SIGUSR1 and SIGUSR2 that arrive from now on.
    pub fn notices(&self) -> broadcast::Receiver<Signal> {
        self.notices.subscribe()
    }

    /// Passes a notice on, as if it had arrived as a signal.
    pub fn notify(&self, signal: Signal) {
        if self.notices.send(signal).is_err() {
            debug!(%signal, "this process runs no programs to pass the signal on to");
        }
    }

    /// Lets an exit at once remove a directory of temporary files.
    pub fn remove_at_exit(&self, directory: &Path) {
        self.temporary.lock().unwrap_or_else(PoisonError::into_inner).push(directory.to_owned());
    }

    /// Returns a token that is cancelled when the drain is requested.
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }

    fn exit_at_once(&self, signal: Signal) -> ! {
        for directory in self.temporary.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            // What this process still writes there may be in the way for a moment. On failure it stays: the user
            // waits for the end.
            for _ in 0..REMOVALS_MAX {
                if fs::remove_dir_all(directory).is_ok() || !directory.exists() {
                    break;
                }
            }
        }
        std::process::exit(code_of(signal).into());
    }
}

async fn listen(mut streams: Vec<Stream>, shutdown: Shutdown) {
    loop {
        let signal = next(&mut streams).await;
        match signal {
            Signal::SIGUSR1 | Signal::SIGUSR2 => shutdown.notify(signal),
            _ if shutdown.signal().is_none() => {
                info!(%signal, "draining; a second signal ends the process at once");
                shutdown.first.store(signal as i32, Ordering::Relaxed);
                shutdown.trigger();
            }
            Signal::SIGHUP => debug!("draining already"),
            _ => {
                warn!(%signal, "exiting at once");
                shutdown.exit_at_once(signal);
            }
        }
    }
}

struct Stream {
    signal: Signal,
    arrivals: unix::Signal,
}

impl Stream {
    fn open(signal: Signal) -> Result<Self, Failure> {
        let arrivals = unix::signal(SignalKind::from_raw(signal as i32));
        let arrivals =
            arrivals.map_err(|error| Failure::io(format!("cannot handle {signal}"), &error))?;
        Ok(Self { signal, arrivals })
    }
}

async fn next(streams: &mut [Stream]) -> Signal {
    poll_fn(|context| {
        for stream in &mut *streams {
            if stream.arrivals.poll_recv(context).is_ready() {
                return Poll::Ready(stream.signal);
            }
        }
        Poll::Pending
    })
    .await
}

/// Returns the exit code of a process that ended because of a signal, as shells report it.
fn code_of(signal: Signal) -> u8 {
    128 + signal as u8
}

/// Returns whether this process was started with a signal ignored.
fn is_ignored(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (signal as i32 - 1)) != 0
}
