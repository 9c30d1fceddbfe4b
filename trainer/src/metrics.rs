//! Metrics of a trainer.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// Metrics of one trainer.
#[derive(Clone, Debug)]
pub struct Metrics {
    examples: Counter,
    gradients: Histogram,
    pushes: Histogram,
    pulls: Histogram,
    failures: Counter,
}

impl Metrics {
    /// Registers the metrics in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let times = || Histogram::new(exponential_buckets(0.0005, 2.0, 16));
        let metrics = Self {
            examples: Counter::default(),
            gradients: times(),
            pushes: times(),
            pulls: times(),
            failures: Counter::default(),
        };
        let mut time = |name: &str, help: &str, it: &Histogram| {
            registry.register_with_unit(name, help, Unit::Seconds, it.clone());
        };
        time("steadfast_trainer_gradient", "Time to compute a gradient", &metrics.gradients);
        time("steadfast_trainer_push", "Time to push a gradient", &metrics.pushes);
        time("steadfast_trainer_pull", "Time to wait for and pull parameters", &metrics.pulls);
        registry.register(
            "steadfast_trainer_examples",
            "Records whose gradient was computed",
            metrics.examples.clone(),
        );
        registry.register(
            "steadfast_trainer_task_failures",
            "Tasks that could not be computed",
            metrics.failures.clone(),
        );
        metrics
    }

    /// Counts a gradient.
    pub fn computed(&self, examples: usize, took: Duration) {
        self.examples.inc_by(examples as u64);
        self.gradients.observe(took.as_secs_f64());
    }

    /// Counts a push.
    pub fn pushed(&self, took: Duration) {
        self.pushes.observe(took.as_secs_f64());
    }

    /// Counts a pull.
    pub fn pulled(&self, took: Duration) {
        self.pulls.observe(took.as_secs_f64());
    }

    /// Counts a task that could not be computed.
    pub fn failed(&self) {
        self.failures.inc();
    }
}
