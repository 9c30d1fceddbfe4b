//! A gradient of a built-in model, compared with its matrix products alone.

use std::hint::black_box;
use std::sync::Arc;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2};
use steadfast_common::ids::{Lane, Pass};
use steadfast_common::layout::Layout;
use steadfast_common::spec::ModelSpec;
use steadfast_trainer_core::{Batch, MicroBatch, Parameters, Registry};

use crate::sample::Sample;
use crate::watch::Watch;

/// Inputs, hidden layers and classes.
const WIDTHS: [usize; 4] = [784, 512, 256, 10];

/// Records per gradient.
const RECORDS: usize = 256;

/// Gradients per sample.
const TIMES: usize = 150;

/// Measures the gradient of a perceptron.
pub fn gradient() -> Sample {
    let [features, hidden @ .., classes] = WIDTHS;
    let spec = ModelSpec {
        kind: "mlp".to_owned(),
        classes: Some(classes),
        hidden: hidden.to_vec(),
        activation: Default::default(),
        dropout: 0.0,
        options: Default::default(),
        entry: None,
        script: None,
        device: None,
    };
    let model = Registry::built_in().build(&spec, features).expect("the model is valid");
    let layout = Arc::new(Layout::new(model.parameters()));
    let (mut parameters, mut gradient) =
        (Parameters::zeros(layout.clone()), Parameters::zeros(layout));
    model.initialize(1, &mut parameters).expect("the model is valid");
    let records = matrix(RECORDS, features);
    let labels: Vec<f32> = (0..RECORDS).map(|record| (record % classes) as f32).collect();
    let batch = Batch { features: records.view(), labels: &labels, columns: &[] };
    let key = MicroBatch { seed: 1, pass: Pass(0), step: 0, lane: Lane(0) };
    let watch = Watch::start(Vec::new());
    for _ in 0..TIMES {
        gradient.clear();
        let loss = model.gradient(&parameters, black_box(&batch), &key, &mut gradient);
        black_box(loss.expect("records and model fit"));
    }
    watch.stop(TIMES as f64)
}

/// Measures only the matrix products of the forward and backward pass.
pub fn products() -> Sample {
    let layers: Vec<Layer> =
        WIDTHS.windows(2).map(|widths| Layer::new(widths[0], widths[1])).collect();
    let watch = Watch::start(Vec::new());
    for _ in 0..TIMES {
        for layer in &layers {
            black_box(product(layer.input.view(), layer.weight.t()));
        }
        for (index, layer) in layers.iter().enumerate().rev() {
            black_box(product(layer.derivative.t(), layer.input.view()));
            if 0 < index {
                black_box(product(layer.derivative.view(), layer.weight.view()));
            }
        }
    }
    watch.stop(TIMES as f64)
}

struct Layer {
    input: Array2<f32>,
    weight: Array2<f32>,
    derivative: Array2<f32>,
}

impl Layer {
    fn new(inputs: usize, outputs: usize) -> Self {
        Self {
            input: matrix(RECORDS, inputs),
            weight: matrix(outputs, inputs),
            derivative: matrix(RECORDS, outputs),
        }
    }
}

fn matrix(rows: usize, columns: usize) -> Array2<f32> {
    Array2::from_shape_fn((rows, columns), |(row, column)| ((row + column) % 7) as f32 * 0.1)
}

fn product(left: ArrayView2<'_, f32>, right: ArrayView2<'_, f32>) -> Array2<f32> {
    let mut result = Array2::zeros((left.nrows(), right.ncols()));
    general_mat_mul(1.0, &left, &right, 1.0, &mut result);
    result
}
