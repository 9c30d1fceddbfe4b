//! DeepFM (Guo et al. 2017): the sum of a factorization machine and a perceptron, which share the factors of
//! categories.

use steadfast_common::job::spec::ModelSpec;
use steadfast_common::tensor::layout::ParamSpec;

use crate::batch::{Batch, MicroBatch};
use crate::categories::Categories;
use crate::deep::Deep;
use crate::error::ModelError;
use crate::factorization_machine::FactorizationMachine;
use crate::loss::Loss;
use crate::model::{Evaluation, Metric, Model};
use crate::parameters::Parameters;
use crate::registry::Inputs;

/// A factorization machine with a perceptron over the factors of its categories, and its numbers.
#[derive(Clone, Debug)]
pub(crate) struct DeepFm {
    machine: FactorizationMachine,
    deep: Deep,
    loss: Loss,
}

impl DeepFm {
    /// Creates the model with the loss of the factorization machine.
    pub(crate) fn new(spec: &ModelSpec, inputs: Inputs) -> Self {
        let machine = FactorizationMachine::new(spec, inputs.features);
        let loss = Loss::of_one_output(spec);
        let first = machine.parameters().len();
        let deep = Deep::new(spec, inputs, machine.embedding(), loss.clone(), first);
        Self { machine, deep, loss }
    }
}

impl Model for DeepFm {
    fn parameters(&self) -> Vec<ParamSpec> {
        let mut specs = self.machine.parameters();
        specs.extend(self.deep.parameters());
        specs
    }

    fn ids(&self, batch: &Batch, key: Option<&MicroBatch>) -> Result<Vec<Vec<u64>>, ModelError> {
        self.machine.ids(batch, key)
    }

    fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        self.machine.initialize(seed, parameters)?;
        self.deep.initialize(seed, parameters)
    }

    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        self.deep.check(batch)?;
        if batch.is_empty() {
            return Ok(0.0);
        }
        let categories = Categories::of(batch)?;
        let (mut outputs, sums) = self.machine.outputs(parameters, batch, &categories);
        let forward =
            self.deep.add_outputs(parameters, batch, &categories, Some(key), &mut outputs);
        let evaluation = self.loss.sum(outputs.view_mut(), batch)?;
        let slopes = outputs;
        self.machine.add_gradient(parameters, batch, &categories, (&slopes, &sums), gradient);
        self.deep.add_gradient(parameters, &categories, &forward, slopes, gradient)?;
        Ok(evaluation.into_loss_of(gradient))
    }

    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError> {
        self.deep.check(batch)?;
        if batch.is_empty() {
            return Ok(Evaluation::default());
        }
        let categories = Categories::of(batch)?;
        let (mut outputs, _) = self.machine.outputs(parameters, batch, &categories);
        self.deep.add_outputs(parameters, batch, &categories, None, &mut outputs);
        self.loss.evaluate(outputs.view_mut(), batch)
    }

    fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        self.deep.check(batch)?;
        self.machine.check(batch)
    }

    fn metric(&self) -> Metric {
        self.loss.metric()
    }

    fn further_metrics(&self) -> Vec<Metric> {
        self.loss.further_metrics()
    }
}
