//! Waiting for conditions, with a timeout.

use std::thread::sleep;
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(20);

/// Default timeout, for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Polls until `probe` returns a value; panics after the timeout.
pub fn eventually<T>(what: &str, probe: impl FnMut() -> Option<T>) -> T {
    within(TIMEOUT, what, probe)
}

/// Polls until `probe` returns a value; panics after `bound`.
pub fn within<T>(bound: Duration, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(start.elapsed() < bound, "timed out after {bound:?}: {what}");
        sleep(PAUSE);
    }
}
