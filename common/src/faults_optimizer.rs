//! Faults of the optimizer's and the learning rate's settings.

use crate::spec::{LearningRateSpec, OptimizerSpec};

/// Faults of the optimizer.
pub fn optimizer(_spec: &OptimizerSpec) -> Vec<String> {
    Vec::new()
}

/// Faults of the schedule.
pub fn learning_rate(_spec: &LearningRateSpec) -> Vec<String> {
    Vec::new()
}
