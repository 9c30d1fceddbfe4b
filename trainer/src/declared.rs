//! A model that a program declares, and whose gradients come from elsewhere.

use steadfast_trainer_core::{
    Batch, Evaluation, Metric, MicroBatch, Model, ModelError, ParamSpec, Parameters,
};

/// Parameters with their initial values. A trainer with this model sets the values of a job, and saves its model; the
/// gradients come from the closures of a coordinator.
#[derive(Clone, Debug)]
pub struct Declared {
    pub params: Vec<ParamSpec>,
    /// The initial values of all parameters, flat.
    pub values: Vec<f32>,
}

impl Model for Declared {
    fn parameters(&self) -> Vec<ParamSpec> {
        self.params.clone()
    }

    fn initialize(&self, _: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        parameters.values_mut().copy_from_slice(&self.values);
        Ok(())
    }

    fn gradient(
        &self,
        _: &Parameters,
        _: &Batch,
        _: &MicroBatch,
        _: &mut Parameters,
    ) -> Result<f64, ModelError> {
        Err(no_records())
    }

    fn evaluate(&self, _: &Parameters, _: &Batch) -> Result<Evaluation, ModelError> {
        Err(no_records())
    }

    fn check(&self, _: &Batch) -> Result<(), ModelError> {
        Err(no_records())
    }

    fn metric(&self) -> Metric {
        Metric::mean("loss")
    }

    /// Returns the same text on all machines: this trainer computes nothing.
    fn numerics(&self) -> String {
        "closures".to_owned()
    }
}

fn no_records() -> ModelError {
    let message =
        "the gradients of this model come from closures, and it has no records".to_owned();
    ModelError::Failed { message }
}
