//! Measures a sample: time, CPU time and memory of this process and of others.

use std::time::Instant;

use crate::expense::{cpu_of, own_cpu, peak_of};
use crate::sample::Sample;

/// A measurement in progress.
pub struct Watch {
    others: Vec<i32>,
    cpu: f64,
    started: Instant,
}

impl Watch {
    /// Starts to measure this process and `others`.
    pub fn start(others: Vec<i32>) -> Self {
        let cpu = total_cpu(&others);
        Self { others, cpu, started: Instant::now() }
    }

    /// Ends the measurement of `amount`.
    pub fn stop(self, amount: f64) -> Sample {
        let seconds = self.started.elapsed().as_secs_f64();
        let cpu_seconds = total_cpu(&self.others) - self.cpu;
        let own = std::process::id().cast_signed();
        let peak_bytes = self.others.iter().chain([&own]).map(|pid| peak_of(*pid)).sum();
        Sample { amount, seconds, cpu_seconds, peak_bytes, p99_seconds: None }
    }
}

fn total_cpu(others: &[i32]) -> f64 {
    others.iter().map(|pid| cpu_of(*pid)).sum::<f64>() + own_cpu()
}
