//! The deep part of models of categories: a perceptron over embeddings and numbers.
//!
//! Its input has a block for each column of categories, the sum of the embeddings of the record's categories in that
//! column (zeros without any), each times its weight, and then the record's numbers.

use std::ops::Range;

use ndarray::{Array2, s};
use steadfast_common::job::spec::ModelSpec;
use steadfast_common::tensor::layout::ParamSpec;

use crate::batch::{Batch, MicroBatch};
use crate::categories::Categories;
use crate::error::ModelError;
use crate::loss::Loss;
use crate::model::Model;
use crate::network::{Hidden, Network};
use crate::parameters::Parameters;
use crate::registry::Inputs;

/// Where the embeddings of categories are: a table, and a part of its rows.
#[derive(Clone, Debug)]
pub(crate) struct Embedding {
    /// Index of the table.
    pub table: usize,
    pub values: Range<usize>,
}

/// A perceptron whose output is a term of the model's.
#[derive(Clone, Debug)]
pub(crate) struct Deep {
    inputs: Inputs,
    embedding: Embedding,
    network: Network,
}

/// State of a forward pass for the backward pass.
pub(crate) struct Forward {
    /// Records × widths of all blocks and of the numbers.
    input: Array2<f32>,
    hidden: Vec<Hidden>,
}

impl Deep {
    /// Creates the perceptron of a model with the loss `loss`; its parameters begin at index `first` of the model's.
    pub fn new(
        spec: &ModelSpec,
        inputs: Inputs,
        embedding: Embedding,
        loss: Loss,
        first: usize,
    ) -> Self {
        let width = inputs.columns * embedding.values.len() + inputs.features;
        Self { inputs, embedding, network: Network::part(spec, width, loss, first) }
    }

    pub fn parameters(&self) -> Vec<ParamSpec> {
        self.network.parameters()
    }

    pub fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        self.network.initialize(seed, parameters)
    }

    /// Checks that records have the model's features and columns.
    pub fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        batch.check(self.inputs.features)?;
        let (expected, found) = (self.inputs.columns, batch.columns.len());
        if expected != found && !batch.is_empty() {
            return Err(ModelError::Columns { expected, found });
        }
        Ok(())
    }

    /// Adds the output for each record to its entry in `outputs`. With a key, units are dropped at random.
    pub fn add_outputs(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        categories: &Categories,
        key: Option<&MicroBatch>,
        outputs: &mut Array2<f32>,
    ) -> Forward {
        let input = self.input(parameters, batch, categories);
        let keys: Vec<_> = key.map(|key| (key, 0..batch.len())).into_iter().collect();
        let (hidden, terms) = self.network.forward(parameters, input.view(), &keys);
        *outputs += &terms;
        Forward { input, hidden }
    }

    /// Adds the gradient, given the derivative of the loss with respect to each output.
    pub fn add_gradient(
        &self,
        parameters: &Parameters,
        categories: &Categories,
        Forward { input, hidden }: &Forward,
        derivative: Array2<f32>,
        gradient: &mut Parameters,
    ) -> Result<(), ModelError> {
        let of_input =
            self.network.add_gradient(parameters, input.view(), hidden, derivative, gradient)?;
        let table = gradient.table_mut(self.embedding.table);
        for (record, of_input) in of_input.rows().into_iter().enumerate() {
            for column in 0..self.inputs.columns {
                let block = of_input.slice(s![self.block(column)]);
                for index in categories.of_column(record, column) {
                    let row = &mut table.at_mut(index)[self.embedding.values.clone()];
                    let weight = categories.weights[index];
                    row.iter_mut().zip(block).for_each(|(sum, slope)| *sum += weight * slope);
                }
            }
        }
        Ok(())
    }

    fn input(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        categories: &Categories,
    ) -> Array2<f32> {
        let table = parameters.table(self.embedding.table);
        let of_columns = self.block(self.inputs.columns).start;
        let mut input = Array2::zeros((batch.len(), of_columns + self.inputs.features));
        for (record, mut input) in input.rows_mut().into_iter().enumerate() {
            for column in 0..self.inputs.columns {
                let mut block = input.slice_mut(s![self.block(column)]);
                for index in categories.of_column(record, column) {
                    let row = &table.at(index)[self.embedding.values.clone()];
                    let weight = categories.weights[index];
                    block.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
                }
            }
            if self.inputs.features != 0 {
                input.slice_mut(s![of_columns..]).assign(&batch.features.row(record));
            }
        }
        input
    }

    /// Returns the place of a column's block in the input.
    fn block(&self, column: usize) -> Range<usize> {
        let width = self.embedding.values.len();
        column * width..(column + 1) * width
    }
}
