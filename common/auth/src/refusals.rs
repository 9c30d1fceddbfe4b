//! Refused connections and calls: all are counted, at most one a second is logged, so that a client
//! cannot fill the disk with log lines.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tracing::warn;

/// Minimum time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);
/// Time of the last log line, and the number suppressed since.
static CONNECTIONS_LOG: Log = Mutex::new((None, 0));
static CALLS_LOG: Log = Mutex::new((None, 0));

type Log = Mutex<(Option<Instant>, u64)>;

/// Characters of a path that are logged.
const PATH_CHARS: usize = 200;

/// A refused connection or call.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// The peer has no valid certificate of the job's authority, or too many connections.
    Connection { address: SocketAddr, reason: String },
    /// The caller's certificate does not permit it, or it has no token.
    Call { path: String, caller: String },
}

/// Number of refusals since the process started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusals {
    pub connections: u64,
    pub calls: u64,
}

/// Returns the number of refusals since the process started.
pub fn refusals() -> Refusals {
    Refusals {
        connections: CONNECTIONS.load(Ordering::Relaxed),
        calls: CALLS.load(Ordering::Relaxed),
    }
}

/// Counts and logs a refusal.
pub fn refused(refusal: &Refusal) {
    // Separate rate limits: refused connections must not suppress the log of refused calls.
    let (counter, log) = match refusal {
        Refusal::Connection { .. } => (&CONNECTIONS, &CONNECTIONS_LOG),
        Refusal::Call { .. } => (&CALLS, &CALLS_LOG),
    };
    counter.fetch_add(1, Ordering::Relaxed);
    let Some(suppressed) = may_log(log) else { return };
    match refusal {
        Refusal::Connection { address, reason } => {
            warn!(%address, reason, suppressed, "refused a connection");
        }
        Refusal::Call { path, caller } => {
            let path: String = path.chars().take(PATH_CHARS).collect();
            warn!(path, caller, suppressed, "refused a call");
        }
    }
}

/// Returns the number of suppressed lines if a line may be written now.
fn may_log(log: &Log) -> Option<u64> {
    let mut log = log.lock().expect("no holder panics");
    let (last, suppressed) = &mut *log;
    if last.is_some_and(|last| last.elapsed() < LOG_INTERVAL) {
        *suppressed += 1;
        return None;
    }
    *last = Some(Instant::now());
    Some(std::mem::take(suppressed))
}
