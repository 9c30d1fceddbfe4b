//! Factorization machines (Rendle 2010): a linear model, and the inner product of the factors of each pair of
//! features that a record has.
//!
//! With `x` = 1 for each category of a record, or its weight, and its value for each number:
//! `ŷ = b + Σ w x + ½ Σ_f [(Σ v_f x)² − Σ (v_f x)²]`. Row `i` of the table has `w` and then all `v_f` of category
//! `i`.

use ndarray::Array2;
use steadfast_common::job::spec::ModelSpec;
use steadfast_common::random::Random;
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_common::tensor::table::Initial;

use crate::batch::{Batch, MicroBatch};
use crate::categories::{self, Categories};
use crate::deep::Embedding;
use crate::error::ModelError;
use crate::loss::Loss;
use crate::model::{Evaluation, Metric, Model};
use crate::parameters::Parameters;

/// Standard deviation of initial weights and factors.
pub(crate) const DEVIATION: f32 = 0.01;

/// Index of the table.
const TABLE: usize = 0;

/// Indices of other parameters; the table is the first parameter.
const BIAS: usize = 1;
const NUMBERS: usize = 2;

/// A factorization machine.
#[derive(Clone, Debug)]
pub(crate) struct FactorizationMachine {
    /// Number of features that are numbers.
    numbers: usize,
    factors: usize,
    loss: Loss,
}

/// The parameters of one feature: its weight and factors.
struct Feature<'a> {
    row: &'a [f32],
    value: f32,
}

impl FactorizationMachine {
    /// Creates a factorization machine with the logistic loss for two classes, otherwise with the squared loss.
    pub(crate) fn new(spec: &ModelSpec, numbers: usize) -> Self {
        Self { numbers, factors: factors(spec), loss: Loss::of_one_output(spec) }
    }

    /// Returns where the factors of a category are in its row.
    pub(crate) fn embedding(&self) -> Embedding {
        Embedding { table: TABLE, values: 1..self.width() }
    }

    fn width(&self) -> usize {
        1 + self.factors
    }

    /// Passes the features of a record to `show`.
    fn features<'a>(
        &self,
        parameters: &'a Parameters,
        batch: &Batch,
        categories: &Categories,
        record: usize,
        mut show: impl FnMut(Feature<'a>),
    ) {
        for index in categories.of_record(record) {
            let value = categories.weights[index];
            show(Feature { row: parameters.table(TABLE).at(index), value });
        }
        if self.numbers == 0 {
            return;
        }
        let all = &parameters.values()[parameters.layout().range_of(NUMBERS)];
        let rows = all.chunks_exact(self.width());
        for (row, value) in rows.zip(batch.features.row(record)) {
            show(Feature { row, value: *value });
        }
    }

    /// Returns the prediction for a record; leaves the sums of each factor over all features in `sums`.
    fn predict(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        categories: &Categories,
        record: usize,
        sums: &mut [f32],
    ) -> f32 {
        sums.fill(0.0);
        let mut linear = parameters.vector(BIAS)[0];
        let mut squares = 0.0;
        self.features(parameters, batch, categories, record, |Feature { row, value }| {
            linear += row[0] * value;
            for (sum, factor) in sums.iter_mut().zip(&row[1..]) {
                let part = factor * value;
                *sum += part;
                squares += part * part;
            }
        });
        let of_sums: f32 = sums.iter().map(|sum| sum * sum).sum();
        linear + 0.5 * (of_sums - squares)
    }

    /// Returns the prediction for each record, and the sums of each factor over its features.
    pub(crate) fn outputs(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        categories: &Categories,
    ) -> (Array2<f32>, Array2<f32>) {
        let mut outputs = Array2::zeros((batch.len(), 1));
        let mut sums = Array2::zeros((batch.len(), self.factors));
        for (record, mut sums) in sums.rows_mut().into_iter().enumerate() {
            let sums = sums.as_slice_mut().expect("rows are contiguous");
            outputs[[record, 0]] = self.predict(parameters, batch, categories, record, sums);
        }
        (outputs, sums)
    }

    /// Adds the gradient, given the derivative of the loss with respect to each prediction, and the sums of
    /// [`FactorizationMachine::outputs`].
    pub(crate) fn add_gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        categories: &Categories,
        (slopes, sums): (&Array2<f32>, &Array2<f32>),
        gradient: &mut Parameters,
    ) {
        for record in 0..batch.len() {
            let (slope, sums) = (slopes[[record, 0]], sums.row(record));
            let sums = sums.as_slice().expect("rows are contiguous");
            gradient.vector_mut(BIAS)[0] += slope;
            for index in categories.of_record(record) {
                let value = categories.weights[index];
                let feature = Feature { row: parameters.table(TABLE).at(index), value };
                add_gradient(gradient.table_mut(TABLE).at_mut(index), &feature, slope, sums);
            }
            if self.numbers != 0 {
                let rows = parameters.matrix(NUMBERS);
                let mut of_numbers = gradient.matrix_mut(NUMBERS);
                let features = batch.features.row(record);
                for (index, value) in features.iter().enumerate() {
                    let (row, mut target) = (rows.row(index), of_numbers.row_mut(index));
                    let row = row.to_slice().expect("parameters are contiguous");
                    let target = target.as_slice_mut().expect("parameters are contiguous");
                    add_gradient(target, &Feature { row, value: *value }, slope, sums);
                }
            }
        }
    }
}

/// Returns the number of factors of each category.
pub(crate) fn factors(spec: &ModelSpec) -> usize {
    spec.factors.unwrap_or(8)
}

/// Adds the gradient of one feature, given that of the prediction and the sums of the factors.
fn add_gradient(row: &mut [f32], feature: &Feature<'_>, slope: f32, sums: &[f32]) {
    let Feature { row: parameters, value } = feature;
    row[0] += slope * value;
    let factors = row[1..].iter_mut().zip(&parameters[1..]).zip(sums);
    for ((gradient, factor), sum) in factors {
        *gradient += slope * value * (sum - factor * value);
    }
}

impl Model for FactorizationMachine {
    fn parameters(&self) -> Vec<ParamSpec> {
        let table = ParamSpec::table("categories", self.width(), Initial::Normal(DEVIATION));
        let mut specs = vec![table, ParamSpec::new("bias", &[1])];
        if self.numbers != 0 {
            specs.push(ParamSpec::new("numbers", &[self.numbers, self.width()]));
        }
        specs
    }

    fn ids(&self, batch: &Batch, _: Option<&MicroBatch>) -> Result<Vec<Vec<u64>>, ModelError> {
        Ok(vec![Categories::of(batch)?.ids])
    }

    fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        parameters.clear();
        if self.numbers != 0 {
            let mut random = Random::of_parameter(seed, NUMBERS);
            let mut numbers = parameters.vector_mut(NUMBERS);
            numbers.iter_mut().for_each(|value| *value = DEVIATION * random.normal());
        }
        Ok(())
    }

    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        _key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        batch.check(self.numbers)?;
        let categories = Categories::of(batch)?;
        let (mut slopes, sums) = self.outputs(parameters, batch, &categories);
        let evaluation = self.loss.sum(slopes.view_mut(), batch)?;
        self.add_gradient(parameters, batch, &categories, (&slopes, &sums), gradient);
        Ok(evaluation.into_loss_of(gradient))
    }

    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError> {
        batch.check(self.numbers)?;
        let categories = Categories::of(batch)?;
        let (mut outputs, _) = self.outputs(parameters, batch, &categories);
        self.loss.evaluate(outputs.view_mut(), batch)
    }

    fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        batch.check(self.numbers)?;
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
