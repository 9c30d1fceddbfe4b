//! The settings of a job that determine its updates.

use steadfast_common::compression::Codec;
use steadfast_common::spec::{JobSpec, LearningRateSpec, Mode, OptimizerSpec};

/// The settings of a job that determine its updates.
#[derive(Clone, Debug)]
pub struct Rules {
    pub mode: Mode,
    pub lanes: u32,
    pub optimizer: OptimizerSpec,
    pub learning_rate: LearningRateSpec,
    /// Encoding of gradients, and the arithmetic that adds them.
    pub codec: Codec,
}

impl Rules {
    /// Returns the rules of a job.
    pub fn new(spec: &JobSpec) -> Self {
        Self {
            mode: spec.mode,
            lanes: spec.sync.lanes,
            optimizer: spec.optimizer.clone(),
            learning_rate: spec.learning_rate.clone(),
            codec: spec.gradients.codec(),
        }
    }
}
