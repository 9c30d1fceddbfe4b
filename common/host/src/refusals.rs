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
static LOG: Mutex<(Option<Instant>, u64)> = Mutex::new((None, 0));

/// Somebody who was turned away.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// Without a certificate of the job's authority, or with one that is over.
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
    let counter = match refusal {
        Refusal::Connection { .. } => &CONNECTIONS,
        Refusal::Call { .. } => &CALLS,
    };
    counter.fetch_add(1, Ordering::Relaxed);
    let Some(unsaid) = its_turn() else { return };
    match refusal {
        Refusal::Connection { address, reason } => {
            warn!(%address, reason, unsaid, "refused a connection");
        }
        Refusal::Call { path, caller } => warn!(path, caller, unsaid, "refused a call"),
    }
}

/// Whether a line may be written now, and how many were not since the last one.
fn its_turn() -> Option<u64> {
    let mut log = LOG.lock().expect("no holder panics");
    let (last, unsaid) = &mut *log;
    if last.is_some_and(|last| last.elapsed() < QUIET) {
        *unsaid += 1;
        return None;
    }
    *last = Some(Instant::now());
    Some(std::mem::take(unsaid))
}
