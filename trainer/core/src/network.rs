//! The built-in models. Linear regression and softmax regression are networks without a hidden
//! layer; all three share one forward and one backward pass.
//!
//! Layer `i` has a weight of outputs × inputs, as in PyTorch, and a bias of outputs. With `X` the layer's
//! input (records × inputs): `Z = X Wᵀ + b`, `H = f(Z)`, and with `D` the derivative with respect to `Z`:
//! `∂W = Dᵀ X`, `∂b = Σ rows of D`, `∂X = D W`.
//!
//! A network may also be a part of another model, which then computes the loss.

use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, s};
use steadfast_common::job::spec::{Activation, ModelSpec};
use steadfast_common::random::Random;
use steadfast_common::tensor::layout::ParamSpec;

use crate::batch::{Batch, MicroBatch};
use crate::error::ModelError;
use crate::lanes::{LaneBatches, LaneRows, add_rows};
use crate::loss::Loss;
use crate::model::{Evaluation, Metric, Model};
use crate::parameters::Parameters;

/// A chain of fully connected layers.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    /// Number of features, widths of the hidden layers, number of outputs: one entry more than layers.
    widths: Vec<usize>,
    activation: Activation,
    dropout: f32,
    loss: Loss,
    /// Index of its first parameter: those before belong to other parts of the model.
    first: usize,
}

/// State of a hidden layer for the backward pass; both records × width.
pub(crate) struct Hidden {
    output: Array2<f32>,
    /// Derivative of the output with respect to the layer's `Z`.
    slope: Array2<f32>,
}

/// What becomes of the values that a gradient's memory holds.
#[derive(Clone, Copy)]
enum Before {
    Added,
    Replaced,
}

impl Network {
    /// Creates a network whose settings were checked: linear regression (one output, squared loss), softmax regression
    /// or a multi-layer perceptron (with `classes` one output per class and cross-entropy, otherwise as linear
    /// regression).
    pub(crate) fn new(spec: &ModelSpec, features: usize) -> Self {
        Self::part(spec, features, Loss::of_classes(spec), 0)
    }

    /// Creates a multi-layer perceptron whose parameters begin at index `first` of those of a model.
    pub(crate) fn part(spec: &ModelSpec, inputs: usize, loss: Loss, first: usize) -> Self {
        let mut widths = vec![inputs];
        widths.extend_from_slice(&spec.hidden);
        widths.push(loss.outputs());
        Self { widths, activation: spec.activation, dropout: spec.dropout, loss, first }
    }

    fn layers(&self) -> usize {
        self.widths.len() - 1
    }

    /// Returns the index of a layer's weight; the layer's bias is the next parameter.
    fn weight(&self, layer: usize) -> usize {
        self.first + 2 * layer
    }

    /// Runs records (records × features) through all layers; the second value is the output of the last one.
    /// Units of the rows of each key are dropped at random.
    pub(crate) fn forward(
        &self,
        parameters: &Parameters,
        features: ArrayView2<'_, f32>,
        keys: &[(&MicroBatch, Range<usize>)],
    ) -> (Vec<Hidden>, Array2<f32>) {
        let mut hidden: Vec<Hidden> = Vec::with_capacity(self.layers() - 1);
        for layer in 0..self.layers() - 1 {
            let input = input_of(layer, features, &hidden);
            let mut output = affine(parameters, self.weight(layer), input);
            let mut slope = Array2::zeros(output.raw_dim());
            activate(self.activation, &mut output, &mut slope);
            if self.dropout > 0.0 {
                for (key, rows) in keys {
                    let mut random = key.random(layer as u64);
                    let (output, slope) = (rows_of(&mut output, rows), rows_of(&mut slope, rows));
                    drop_units(self.dropout, &mut random, output, slope);
                }
            }
            hidden.push(Hidden { output, slope });
        }
        let last = self.layers() - 1;
        let outputs = affine(parameters, self.weight(last), input_of(last, features, &hidden));
        (hidden, outputs)
    }

    /// Computes the gradient; returns the sum of the losses.
    fn compute(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        before: Before,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        batch.check(self.widths[0])?;
        if batch.is_empty() {
            match before {
                Before::Added => {}
                Before::Replaced => gradient.clear(),
            }
            return Ok(0.0);
        }
        let features = batch.features;
        let (hidden, mut outputs) = self.forward(parameters, features, &[(key, 0..batch.len())]);
        let sums = self.loss.sum(outputs.view_mut(), batch)?;
        self.backward(parameters, features, &hidden, outputs, |layer, input, derivative| {
            write_product(self.weight(layer), input, derivative, before, gradient);
            Ok(())
        })?;
        Ok(sums.into_loss_of(gradient))
    }

    /// Adds the gradient, given the derivative of the loss with respect to the outputs of [`Network::forward`];
    /// returns the derivative with respect to its input.
    pub(crate) fn add_gradient(
        &self,
        parameters: &Parameters,
        input: ArrayView2<'_, f32>,
        hidden: &[Hidden],
        derivative: Array2<f32>,
        gradient: &mut Parameters,
    ) -> Result<Array2<f32>, ModelError> {
        let write = |layer: usize, input: ArrayView2<'_, f32>, derivative: &Array2<f32>| {
            write_product(self.weight(layer), input, derivative, Before::Added, gradient);
            Ok(())
        };
        let of_first = self.backward(parameters, input, hidden, derivative, write)?;
        Ok(of_first.dot(&parameters.matrix(self.weight(0))))
    }

    /// Passes input and derivative of each layer to `write`, from the last to the first, given the derivative
    /// of the loss with respect to the outputs; returns the derivative of the first layer.
    fn backward(
        &self,
        parameters: &Parameters,
        features: ArrayView2<'_, f32>,
        hidden: &[Hidden],
        mut derivative: Array2<f32>,
        mut write: impl FnMut(usize, ArrayView2<'_, f32>, &Array2<f32>) -> Result<(), ModelError>,
    ) -> Result<Array2<f32>, ModelError> {
        for layer in (0..self.layers()).rev() {
            write(layer, input_of(layer, features, hidden), &derivative)?;
            if layer > 0 {
                derivative = derivative.dot(&parameters.matrix(self.weight(layer)));
                derivative *= &hidden[layer - 1].slope;
            }
        }
        Ok(derivative)
    }

    /// Computes the loss of each lane, summed along the tree, and replaces outputs by their derivatives.
    fn loss_of_lanes(
        &self,
        batches: &LaneBatches<'_>,
        rows: &LaneRows,
        outputs: &mut Array2<f32>,
    ) -> Result<f64, ModelError> {
        let of_lane = |index: usize, rows: Range<usize>| {
            let batch = &batches.lanes()[index].1;
            Ok(self.loss.sum(rows_of(outputs, &rows), batch)?.loss_sum)
        };
        Ok(rows.sum(of_lane, |left, right| *left += right)?.unwrap_or(0.0))
    }
}

impl Model for Network {
    fn parameters(&self) -> Vec<ParamSpec> {
        let mut specs = Vec::with_capacity(2 * self.layers());
        for (layer, widths) in self.widths.windows(2).enumerate() {
            // In PyTorch a regression is one `Linear`, a perceptron a list of them.
            let prefix =
                if self.layers() == 1 { String::new() } else { format!("layers.{layer}.") };
            specs.push(ParamSpec::new(format!("{prefix}weight"), &[widths[1], widths[0]]));
            specs.push(ParamSpec::new(format!("{prefix}bias"), &[widths[1]]));
        }
        specs
    }

    /// Sets biases to zero, and weights to uniform values within ± √(6 / n), where n is the number of inputs before a
    /// ReLU (He et al. 2015), otherwise of inputs and outputs (Glorot and Bengio 2010).
    fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        for (layer, widths) in self.widths.windows(2).enumerate() {
            let is_output = layer + 1 == self.layers();
            let fan = match self.activation {
                Activation::Relu if !is_output => widths[0],
                Activation::Relu | Activation::Tanh | Activation::Sigmoid => widths[0] + widths[1],
            };
            let bound = libm::sqrt(6.0 / fan.max(1) as f64) as f32;
            let index = self.weight(layer);
            let mut random = Random::of_parameter(seed, index);
            let mut weight = parameters.vector_mut(index);
            weight.iter_mut().for_each(|value| *value = bound * (2.0 * random.uniform() - 1.0));
            parameters.vector_mut(index + 1).fill(0.0);
        }
        Ok(())
    }

    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        self.compute(parameters, batch, key, Before::Added, gradient)
    }

    fn fresh_gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        self.compute(parameters, batch, key, Before::Replaced, gradient)
    }

    fn gradient_of_lanes(
        &self,
        parameters: &Parameters,
        batches: &LaneBatches<'_>,
        gradient: &mut Parameters,
    ) -> Result<Option<f64>, ModelError> {
        for (_, batch) in batches.lanes() {
            batch.check(self.widths[0])?;
        }
        if batches.records() == 0 {
            gradient.clear();
            return Ok(Some(0.0));
        }
        // Each lane has a weight of its own.
        if batches.lanes().iter().any(|(_, batch)| self.loss.weights(batch)) {
            return Ok(None);
        }
        let (features, rows) = batches.joined();
        let keys: Vec<(&MicroBatch, Range<usize>)> =
            batches.lanes().iter().map(|(key, _)| key).zip(rows.ranges().iter().cloned()).collect();
        let (hidden, mut outputs) = self.forward(parameters, features.view(), &keys);
        let loss_sum = self.loss_of_lanes(batches, &rows, &mut outputs)?;
        let write = |layer: usize, input: ArrayView2<'_, f32>, derivative: &Array2<f32>| {
            let weight = self.weight(layer);
            rows.sum_products(input, derivative.view(), gradient.matrix_mut(weight))?;
            rows.sum_rows(derivative.view(), gradient.vector_mut(weight + 1))
        };
        self.backward(parameters, features.view(), &hidden, outputs, write)?;
        Ok(Some(loss_sum))
    }

    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError> {
        batch.check(self.widths[0])?;
        if batch.is_empty() {
            return Ok(Evaluation::default());
        }
        let (_, mut outputs) = self.forward(parameters, batch.features, &[]);
        self.loss.evaluate(outputs.view_mut(), batch)
    }

    fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        batch.check(self.widths[0])?;
        self.loss.check(batch.labels)
    }

    fn metric(&self) -> Metric {
        self.loss.metric()
    }

    fn further_metrics(&self) -> Vec<Metric> {
        self.loss.further_metrics()
    }
}

fn input_of<'a>(
    layer: usize,
    features: ArrayView2<'a, f32>,
    hidden: &'a [Hidden],
) -> ArrayView2<'a, f32> {
    match layer {
        0 => features,
        _ => hidden[layer - 1].output.view(),
    }
}

fn rows_of<'a>(matrix: &'a mut Array2<f32>, rows: &Range<usize>) -> ArrayViewMut2<'a, f32> {
    matrix.slice_mut(s![rows.clone(), ..])
}

/// Writes the gradient of a layer, `∂W` and `∂b`; its weight is parameter `weight`.
fn write_product(
    weight: usize,
    input: ArrayView2<'_, f32>,
    derivative: &Array2<f32>,
    before: Before,
    gradient: &mut Parameters,
) {
    let beta = match before {
        Before::Added => 1.0,
        Before::Replaced => 0.0,
    };
    // As ∂Wᵀ = Xᵀ D, and with β = 0 instead of zeros in memory: of few records, the product writes the
    // weights once, in order, at half the time.
    let mut product = gradient.matrix_mut(weight).reversed_axes();
    general_mat_mul(1.0, &input.t(), derivative, beta, &mut product);
    let mut bias = gradient.vector_mut(weight + 1);
    match before {
        Before::Added => {}
        Before::Replaced => bias.fill(0.0),
    }
    add_rows(derivative.view(), bias);
}

/// Returns `X Wᵀ + b`, where `W` is parameter `weight` and `b` is the next one.
fn affine(parameters: &Parameters, weight: usize, input: ArrayView2<'_, f32>) -> Array2<f32> {
    let (weight, bias) = (parameters.matrix(weight), parameters.vector(weight + 1));
    let mut output = Array2::zeros((input.nrows(), bias.len()));
    output.assign(&bias);
    general_mat_mul(1.0, &input, &weight.t(), 1.0, &mut output);
    output
}

fn activate(activation: Activation, output: &mut Array2<f32>, slope: &mut Array2<f32>) {
    // NaN must propagate: a unit that hides it would turn divergence into a wrong model.
    let relu = |z: f32| if z < 0.0 { (0.0, 0.0) } else { (z, if z > 0.0 { 1.0 } else { 0.0 }) };
    let tanh = |z: f32| {
        let h = libm::tanhf(z);
        (h, 1.0 - h * h)
    };
    let sigmoid = |z: f32| {
        let h = 1.0 / (1.0 + libm::expf(-z));
        (h, h * (1.0 - h))
    };
    match activation {
        Activation::Relu => map(output, slope, relu),
        Activation::Tanh => map(output, slope, tanh),
        Activation::Sigmoid => map(output, slope, sigmoid),
    }
}

/// Replaces each value of `output` by the first result of `function`, and sets `slope` to the second one. Being generic
/// gives each activation its own loop.
fn map(output: &mut Array2<f32>, slope: &mut Array2<f32>, function: impl Fn(f32) -> (f32, f32)) {
    for (output, slope) in output.iter_mut().zip(slope) {
        (*output, *slope) = function(*output);
    }
}

/// Drops each unit with probability `dropout` and scales up the others. Their expected sum stays the
/// same, and evaluation needs no scaling.
fn drop_units(
    dropout: f32,
    random: &mut Random,
    mut output: ArrayViewMut2<'_, f32>,
    mut slope: ArrayViewMut2<'_, f32>,
) {
    let scale = 1.0 / (1.0 - dropout);
    for (output, slope) in output.iter_mut().zip(slope.iter_mut()) {
        let factor = if random.uniform() < dropout { 0.0 } else { scale };
        *output *= factor;
        *slope *= factor;
    }
}
