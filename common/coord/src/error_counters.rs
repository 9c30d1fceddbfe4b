//! Counters of etcd errors since the process started, for its metrics.

use std::sync::atomic::{AtomicU64, Ordering};

static LEASES_LOST: AtomicU64 = AtomicU64::new(0);
static CALLS_FAILED: AtomicU64 = AtomicU64::new(0);

/// Errors of etcd since the process started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorCounters {
    /// Leases that ended before their holder closed them.
    pub leases_lost: u64,
    /// Calls that etcd refused or that timed out. Each attempt counts.
    pub calls_failed: u64,
}

/// Returns the errors of etcd since the process started.
pub fn error_counters() -> ErrorCounters {
    ErrorCounters {
        leases_lost: LEASES_LOST.load(Ordering::Relaxed),
        calls_failed: CALLS_FAILED.load(Ordering::Relaxed),
    }
}

pub(crate) fn lease_lost() {
    LEASES_LOST.fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn call_failed() {
    CALLS_FAILED.fetch_add(1, Ordering::Relaxed);
}
