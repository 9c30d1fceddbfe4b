//! Whom we turned away: counted always, logged once a second, so that nobody fills a disk by knocking.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tracing::warn;

/// Time between two lines.
const QUIET: Duration = Duration::from_secs(1);

static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);
/// When the last line was written, and how many were not since.
static CONNECTIONS_LOG: Log = Mutex::new((None, 0));
static CALLS_LOG: Log = Mutex::new((None, 0));

type Log = Mutex<(Option<Instant>, u64)>;

/// Longest part of a path that is logged.
const PATH_CHARS: usize = 200;

/// Somebody who was turned away.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// Without a certificate of the job's authority, with one that is over, or with too many others.
    Connection { address: SocketAddr, reason: String },
    /// With a certificate that does not allow it, or without a token.
    Call { path: String, caller: String },
}

/// How many were turned away since the process started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusals {
    pub connections: u64,
    pub calls: u64,
}

/// How many were turned away since the process started.
pub fn refusals() -> Refusals {
    Refusals {
        connections: CONNECTIONS.load(Ordering::Relaxed),
        calls: CALLS.load(Ordering::Relaxed),
    }
}

/// Counts and logs a refusal.
pub fn refused(refusal: &Refusal) {
    // Strangers who knock must not hide what insiders try.
    let (counter, log) = match refusal {
        Refusal::Connection { .. } => (&CONNECTIONS, &CONNECTIONS_LOG),
        Refusal::Call { .. } => (&CALLS, &CALLS_LOG),
    };
    counter.fetch_add(1, Ordering::Relaxed);
    let Some(unsaid) = its_turn(log) else { return };
    match refusal {
        Refusal::Connection { address, reason } => {
            warn!(%address, reason, unsaid, "refused a connection");
        }
        Refusal::Call { path, caller } => {
            let path: String = path.chars().take(PATH_CHARS).collect();
            warn!(path, caller, unsaid, "refused a call");
        }
    }
}

/// Whether a line may be written now, and how many were not since the last one.
fn its_turn(log: &Log) -> Option<u64> {
    let mut log = log.lock().expect("no holder panics");
    let (last, unsaid) = &mut *log;
    if last.is_some_and(|last| last.elapsed() < QUIET) {
        *unsaid += 1;
        return None;
    }
    *last = Some(Instant::now());
    Some(std::mem::take(unsaid))
}
