//! How long to wait before a process that died is started again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// A life of this length shows that the process can run.
const LONG_LIFE: Duration = Duration::from_secs(10);

/// Doubles the pause from death to death, until a life was long.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
}

impl Backoff {
    /// Begins with the shortest pause.
    pub fn new() -> Self {
        Self { next: FIRST }
    }

    /// The pause after a life of `lived`.
    pub fn after(&mut self, lived: Duration) -> Duration {
        if LONG_LIFE <= lived {
            self.next = FIRST;
        }
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound_and_begin_anew_after_a_long_life() {
        let mut backoff = Backoff::new();
        let short = Duration::from_millis(20);
        let pauses: Vec<u128> = (0..8).map(|_| backoff.after(short).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(backoff.after(LONG_LIFE), FIRST);
        assert_eq!(backoff.after(short), FIRST * 2);
    }
}
