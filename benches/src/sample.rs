//! Samples of one side, and statistics over several of them.

use std::iter::Sum;

use serde::{Deserialize, Serialize};

/// Amount, time and resources of one measurement.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Sample {
    /// Bytes, steps, or another unit of the benchmark.
    pub amount: f64,
    pub seconds: f64,
    /// CPU time of all processes involved.
    pub cpu_seconds: f64,
    /// Sum of the peak memory of all processes involved.
    pub peak_bytes: u64,
    /// 99th percentile of call durations, if calls were timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_seconds: Option<f64>,
}

impl Sample {
    /// Creates a sample that stands for an upper bound on one operation.
    pub fn bound(seconds: f64) -> Self {
        Self { amount: 1.0, seconds, ..Self::default() }
    }

    /// Adds the 99th percentile of call durations.
    pub fn with_waits(self, mut waits: Vec<f64>) -> Self {
        waits.sort_by(f64::total_cmp);
        let place = (waits.len() * 99).div_ceil(100).saturating_sub(1);
        Self { p99_seconds: waits.get(place).copied(), ..self }
    }

    /// Returns the amount per second.
    pub fn rate(&self) -> f64 {
        self.amount / self.seconds
    }

    /// Returns the CPU seconds per 10⁹ of the amount.
    pub fn cpu_per_giga(&self) -> f64 {
        self.cpu_seconds / self.amount * 1e9
    }
}

/// Combines several parts of one measurement with pauses between them.
impl Sum for Sample {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |all, part| Self {
            amount: all.amount + part.amount,
            seconds: all.seconds + part.seconds,
            cpu_seconds: all.cpu_seconds + part.cpu_seconds,
            peak_bytes: all.peak_bytes.max(part.peak_bytes),
            p99_seconds: None,
        })
    }
}

/// Alternating samples of two sides.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Pairs {
    pub ours: Vec<Sample>,
    pub limit: Vec<Sample>,
}

impl Pairs {
    /// Returns the median over pairs of our rate divided by that of the reference: above 1 is faster.
    pub fn ratio(&self) -> f64 {
        median(self.each(|ours, limit| ours.rate() / limit.rate()))
    }

    /// Returns the same ratio of CPU time per amount: above 1 is more expensive.
    pub fn cpu_ratio(&self) -> f64 {
        median(self.each(|ours, limit| ours.cpu_per_giga() / limit.cpu_per_giga()))
    }

    fn each(&self, of: impl Fn(&Sample, &Sample) -> f64) -> Vec<f64> {
        self.ours.iter().zip(&self.limit).map(|(ours, limit)| of(ours, limit)).collect()
    }
}

/// Returns the median of `values`; NaN if there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => values[len / 2],
        len => values[len / 2 - 1].midpoint(values[len / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_values_lie_below_the_median() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn one_call_of_a_hundred_takes_longer_than_its_bound() {
        let waits = (1..=200).rev().map(f64::from).collect();
        assert_eq!(Sample::default().with_waits(waits).p99_seconds, Some(198.0));
    }

    #[test]
    fn sides_are_compared_pair_by_pair() {
        let sample =
            |amount, cpu_seconds| Sample { amount, seconds: 2.0, cpu_seconds, ..Sample::default() };
        let pairs = Pairs {
            ours: vec![sample(10.0, 1.0), sample(30.0, 1.0), sample(20.0, 1.0)],
            limit: vec![sample(20.0, 1.0), sample(20.0, 1.0), sample(20.0, 4.0)],
        };
        assert_eq!(pairs.ratio(), 1.0);
        assert_eq!(pairs.cpu_ratio(), 2.0 / 3.0);
    }
}
