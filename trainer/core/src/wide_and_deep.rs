//! Wide & deep learning (Cheng et al. 2016): the sum of a linear model of categories and a perceptron over their
//! embeddings and the numbers. Each part has a table of its own, so that each can have an optimizer of its own.

use ndarray::Array2;
use steadfast_common::job::spec::ModelSpec;
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_common::tensor::table::Initial;

use crate::batch::{Batch, MicroBatch};
use crate::categories::{self, Categories};
use crate::deep::{Deep, Embedding};
use crate::error::ModelError;
use crate::factorization_machine::{DEVIATION, factors};
use crate::loss::Loss;
use crate::model::{Evaluation, Metric, Model};
use crate::parameters::Parameters;
use crate::registry::Inputs;

/// Indices of the tables, which are the first parameters.
const WIDE: usize = 0;
const DEEP: usize = 1;
const TABLES: usize = 2;

/// A weight for each category, and a perceptron; its last bias is that of the sum.
#[derive(Clone, Debug)]
pub(crate) struct WideAndDeep {
    factors: usize,
    deep: Deep,
    loss: Loss,
}

impl WideAndDeep {
    /// Creates the model with the logistic loss for two classes, otherwise with the squared loss.
    pub(crate) fn new(spec: &ModelSpec, inputs: Inputs) -> Self {
        let (loss, factors) = (Loss::of_one_output(spec), factors(spec));
        let embedding = Embedding { table: DEEP, values: 0..factors };
        let deep = Deep::new(spec, inputs, embedding, loss.clone(), TABLES);
        Self { factors, deep, loss }
    }

    /// Returns the sum of the weights of each record's categories.
    fn wide(parameters: &Parameters, batch: &Batch, categories: &Categories) -> Array2<f32> {
        let table = parameters.table(WIDE);
        let term = |index: usize| categories.weights[index] * table.at(index)[0];
        let sum = |record| categories.of_record(record).map(term).sum();
        Array2::from_shape_fn((batch.len(), 1), |(record, _)| sum(record))
    }
}

impl Model for WideAndDeep {
    fn parameters(&self) -> Vec<ParamSpec> {
        let mut specs = vec![
            ParamSpec::table("wide", 1, Initial::Zeros),
            ParamSpec::table("deep", self.factors, Initial::Normal(DEVIATION)),
        ];
        specs.extend(self.deep.parameters());
        specs
    }

    fn ids(&self, batch: &Batch, _: Option<&MicroBatch>) -> Result<Vec<Vec<u64>>, ModelError> {
        let ids = Categories::of(batch)?.ids;
        Ok(vec![ids.clone(), ids])
    }

    fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
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
        let mut outputs = Self::wide(parameters, batch, &categories);
        let forward =
            self.deep.add_outputs(parameters, batch, &categories, Some(key), &mut outputs);
        let evaluation = self.loss.sum(outputs.view_mut(), batch)?;
        let slopes = outputs;
        for (record, slope) in slopes.iter().enumerate() {
            for index in categories.of_record(record) {
                gradient.table_mut(WIDE).at_mut(index)[0] += categories.weights[index] * slope;
            }
        }
        self.deep.add_gradient(parameters, &categories, &forward, slopes, gradient)?;
        Ok(evaluation.into_loss_of(gradient))
    }

    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError> {
        self.deep.check(batch)?;
        if batch.is_empty() {
            return Ok(Evaluation::default());
        }
        let categories = Categories::of(batch)?;
        let mut outputs = Self::wide(parameters, batch, &categories);
        self.deep.add_outputs(parameters, batch, &categories, None, &mut outputs);
        self.loss.evaluate(outputs.view_mut(), batch)
    }

    fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        self.deep.check(batch)?;
        batch.columns.iter().try_for_each(categories::check)?;
        self.loss.check(batch.labels)
    }

    fn metric(&self) -> Metric {
        self.loss.metric()
    }

    fn further_metrics(&self) -> Vec<Metric> {
        self.loss.further_metrics()
    }
}
