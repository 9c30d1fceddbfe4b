//! Training speed over the recent past, for status pages.

use std::collections::VecDeque;

use steadfast_common::ids::Millis;

/// Window over which the rate is computed.
const WINDOW_MS: u64 = 5_000;

/// Maximum number of samples kept.
const SAMPLES_MAX: usize = 256;

/// Timestamped samples of a counter.
#[derive(Clone, Debug, Default)]
pub struct Rate {
    samples: VecDeque<(Millis, u64)>,
}

impl Rate {
    /// Records the counter's value. A value below the last one (after a rollback) starts over.
    pub fn note(&mut self, now: Millis, value: u64) {
        if self.samples.back().is_some_and(|(_, last)| value < *last) {
            self.samples.clear();
        }
        if self.samples.back().is_some_and(|(at, _)| now.0 < at.0 + 20) {
            return;
        }
        self.samples.push_back((now, value));
        let too_old = |(at, _): &(Millis, u64)| at.0 + WINDOW_MS < now.0;
        while SAMPLES_MAX < self.samples.len()
            || (2 < self.samples.len() && self.samples.front().is_some_and(too_old))
        {
            self.samples.pop_front();
        }
    }

    /// Returns the units per second over the window.
    pub fn per_second(&self) -> f64 {
        let (Some(first), Some(last)) = (self.samples.front(), self.samples.back()) else {
            return 0.0;
        };
        let elapsed_ms = last.0.0.saturating_sub(first.0.0);
        if elapsed_ms == 0 { 0.0 } else { (last.1 - first.1) as f64 * 1000.0 / elapsed_ms as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_follows_the_recent_past() {
        let mut rate = Rate::default();
        for second in 0..20 {
            let slow_then_fast = if second < 10 { second } else { 10 + (second - 10) * 100 };
            rate.note(Millis(second * 1000), slow_then_fast);
        }
        assert!((rate.per_second() - 100.0).abs() < 1.0);
        rate.note(Millis(21_000), 3);
        assert_eq!(rate.per_second(), 0.0);
    }
}
