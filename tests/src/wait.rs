//! Waiting for conditions, with a bound.

use std::thread::sleep;
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(20);

/// Most conditions hold within moments; on a busy machine it may take longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Looks again and again until there is something; fails the test if it takes too long.
pub fn eventually<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, look)
}

/// As [`eventually`], with a bound of one's own.
pub fn within<T>(bound: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < bound, "within {bound:?} it did not happen that {what}");
        sleep(PAUSE);
    }
}
