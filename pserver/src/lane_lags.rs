//! Lane lags: how much later than the first lane of its step each lane arrived.

use std::time::Duration;

use steadfast_common::ids::Lane;
use steadfast_host::time::Instant;

/// Total time that steps waited for each lane, measured from the first lane of the step.
#[derive(Clone, Debug, Default)]
pub struct LaneLags {
    /// Arrival of the first lane of the current step.
    first: Option<Instant>,
    /// Totals by lane, over all steps of this slot.
    total: Vec<Duration>,
}

impl LaneLags {
    /// Records that lanes of the current step arrived at `now`.
    pub fn arrived(&mut self, lanes: impl IntoIterator<Item = Lane>, now: Instant) {
        for lane in lanes {
            let first = *self.first.get_or_insert(now);
            let place = lane.0 as usize;
            if self.total.len() <= place {
                self.total.resize(place + 1, Duration::ZERO);
            }
            self.total[place] += now.since(first);
        }
    }

    /// Ends the step: the next lane to arrive is the first of another one.
    pub fn end_step(&mut self) {
        self.first = None;
    }

    /// Returns the seconds by lane, including the current step's wait for `missing` lanes up to `now`.
    pub fn seconds(&self, missing: &[Lane], now: Instant) -> Vec<f64> {
        let mut until_now = self.clone();
        if self.first.is_some() {
            until_now.arrived(missing.iter().copied(), now);
        }
        until_now.total.iter().map(Duration::as_secs_f64).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// F12: lags count from the first lane of a step.
    #[test]
    fn lags_count_from_the_first_lane_of_a_step() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lags = LaneLags::default();
        assert!(lags.seconds(&[Lane(0), Lane(1)], at(5)).is_empty());
        lags.arrived([Lane(1)], at(10));
        assert_eq!(lags.seconds(&[Lane(0)], at(13)), [3.0, 0.0]);
        lags.arrived([Lane(0)], at(14));
        lags.end_step();
        assert_eq!(lags.seconds(&[Lane(0), Lane(1)], at(20)), [4.0, 0.0]);
        lags.arrived([Lane(0)], at(30));
        lags.arrived([Lane(1)], at(31));
        assert_eq!(lags.seconds(&[], at(40)), [4.0, 1.0]);
    }
}
