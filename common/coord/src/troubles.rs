//! What went wrong with etcd since the process started, for its metrics.

use std::sync::atomic::{AtomicU64, Ordering};

static LEASES_LOST: AtomicU64 = AtomicU64::new(0);
static CALLS_FAILED: AtomicU64 = AtomicU64::new(0);

/// What went wrong with etcd since the process started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Troubles {
    /// Leases that ended although their holder wanted to keep them.
    pub leases_lost: u64,
    /// Calls that etcd refused or did not answer in time, each attempt counted.
    pub calls_failed: u64,
}

/// What went wrong with etcd since the process started.
pub fn troubles() -> Troubles {
    Troubles {
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
