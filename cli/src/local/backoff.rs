//! Exponential backoff between the restarts of a process.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// A process that ran this long resets the backoff.
const LONG_RUN: Duration = Duration::from_secs(10);

/// Consecutive failures, each after a short run, after which the process is not restarted.
const EXITS_MAX: u32 = 12;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It exited with an error.
    Failed,
    /// It was killed by a signal or exited with 0, which does not predict the outcome of a restart.
    Other,
}

/// Doubles the pause from restart to restart; a long run resets it.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
    /// Consecutive failures, each after a short run.
    failures: u32,
}

impl Backoff {
    /// Starts with the shortest pause.
    pub fn new() -> Self {
        Self { next: FIRST, failures: 0 }
    }

    /// Returns the pause after a run of `lived`, or `None` if the process fails repeatedly after short runs.
    pub fn after(&mut self, lived: Duration, ending: Ending) -> Option<Duration> {
        if LONG_RUN <= lived {
            *self = Self::new();
        }
        match ending {
            Ending::Failed => self.failures += 1,
            Ending::Other => self.failures = 0,
        }
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        (self.failures < EXITS_MAX).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit_and_reset_after_a_long_run() {
        let mut backoff = Backoff::new();
        let short = Duration::from_millis(20);
        let pauses: Vec<u128> = (0..8)
            .filter_map(|_| backoff.after(short, Ending::Failed))
            .map(|pause| pause.as_millis())
            .collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(backoff.after(LONG_RUN, Ending::Failed), Some(FIRST));
        assert_eq!(backoff.after(short, Ending::Failed), Some(FIRST * 2));
    }

    /// I12: a process that cannot run is not restarted indefinitely.
    #[test]
    fn a_process_that_fails_repeatedly_at_start_is_given_up() {
        let mut backoff = Backoff::new();
        let short = Duration::from_millis(20);
        let starts = (0..).take_while(|_| backoff.after(short, Ending::Failed).is_some()).count();
        assert_eq!(starts, 11);
        let mut killed = Backoff::new();
        assert!((0..100).all(|_| killed.after(short, Ending::Other).is_some()));
    }
}
