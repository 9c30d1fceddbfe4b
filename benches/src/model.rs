//! A gradient of a built-in model, compared with its matrix products alone.

use std::hint::black_box;
use std::sync::Arc;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, s};
use steadfast_common::ids::{Lane, Pass};
use steadfast_common::job::spec::ModelSpec;
use steadfast_common::tensor::lane_tree::LaneTree;
use steadfast_common::tensor::layout::Layout;
use steadfast_trainer_core::{Batch, Inputs, LaneBatches, MicroBatch, Model, Parameters, Registry};

use crate::sample::Sample;
use crate::watch::Watch;

/// A perceptron, and the records of one gradient.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Inputs, hidden layers and classes.
    widths: [usize; 4],
    records: usize,
    /// Gradients per sample.
    times: usize,
}

/// 0.5 million parameters.
pub const SMALL: Shape = Shape { widths: [784, 512, 256, 10], records: 256, times: 150 };

/// 24 million parameters and few records: bound by the memory of the weights.
pub const THIN: Shape = Shape { widths: [784, 4096, 4096, 1000], records: 16, times: 10 };

/// A model, its parameters, and the records of one gradient.
struct Task {
    model: Box<dyn Model>,
    parameters: Parameters,
    features: Array2<f32>,
    labels: Vec<f32>,
}

impl Task {
    fn new(shape: Shape) -> Self {
        let [features, hidden @ .., classes] = shape.widths;
        let spec = ModelSpec {
            factors: None,
            kind: "mlp".to_owned(),
            classes: Some(classes),
            hidden: hidden.to_vec(),
            activation: Default::default(),
            dropout: 0.0,
            options: Default::default(),
            entry: None,
            script: None,
            device: None,
            min_records: None,
            class_weights: Vec::new(),
        };
        let inputs = Inputs { features, columns: 0 };
        let model = Registry::built_in().build(&spec, inputs).expect("the model is valid");
        let layout = Arc::new(Layout::new(model.parameters()));
        let mut parameters = Parameters::zeros(layout);
        model.initialize(1, &mut parameters).expect("the model is valid");
        let features = matrix(shape.records, features);
        let labels = (0..shape.records).map(|record| (record % classes) as f32).collect();
        Self { model, parameters, features, labels }
    }

    /// Returns the records of one of `lanes` lanes.
    fn lane(&self, lane: usize, lanes: usize) -> Batch<'_> {
        let each = self.labels.len() / lanes;
        let rows = lane * each..(lane + 1) * each;
        let features = self.features.slice(s![rows.clone(), ..]);
        Batch { features, labels: &self.labels[rows], columns: &[], weights: &[] }
    }
}

/// Returns the key of a lane's random numbers.
fn key(lane: usize) -> MicroBatch {
    MicroBatch { seed: 1, pass: Pass(0), step: 0, lane: Lane(lane as u32) }
}

/// Measures the gradient of a perceptron, in memory that is used again, as trainers compute it.
pub fn gradient(shape: Shape) -> Sample {
    let task = Task::new(shape);
    let mut gradient = Parameters::zeros(task.parameters.layout().clone());
    repeat(shape, || {
        let batch = black_box(task.lane(0, 1));
        let loss = task.model.fresh_gradient(&task.parameters, &batch, &key(0), &mut gradient);
        black_box(loss.expect("records and model fit"));
    })
}

/// As [`gradient`], with the records divided between `lanes` lanes that one trainer computes.
pub fn gradient_of_lanes(shape: Shape, lanes: usize) -> Sample {
    let task = Task::new(shape);
    let mut gradient = Parameters::zeros(task.parameters.layout().clone());
    repeat(shape, || {
        let parts = (0..lanes).map(|lane| (key(lane), task.lane(lane, lanes))).collect();
        let batches = black_box(LaneBatches::new(LaneTree::new(lanes as u32), parts));
        let loss = task.model.gradient_of_lanes(&task.parameters, &batches, &mut gradient);
        black_box(loss.expect("records and model fit").expect("it computes lanes together"));
    })
}

/// Measures `compute` as often as a sample does, after it has run once.
fn repeat(shape: Shape, mut compute: impl FnMut()) -> Sample {
    compute();
    let watch = Watch::start(Vec::new());
    (0..shape.times).for_each(|_| compute());
    watch.stop(shape.times as f64)
}

/// Measures only the matrix products of the forward and backward pass.
pub fn products(shape: Shape) -> Sample {
    let widths = shape.widths.windows(2);
    let mut layers: Vec<Layer> =
        widths.map(|widths| Layer::new(shape.records, widths[0], widths[1])).collect();
    repeat(shape, || {
        for layer in &mut layers {
            product(layer.input.view(), layer.weight.t(), &mut layer.output);
        }
        for (index, layer) in layers.iter_mut().enumerate().rev() {
            product(layer.derivative.t(), layer.input.view(), &mut layer.gradient);
            if 0 < index {
                product(layer.derivative.view(), layer.weight.view(), &mut layer.passed_on);
            }
        }
    })
}

struct Layer {
    input: Array2<f32>,
    weight: Array2<f32>,
    output: Array2<f32>,
    derivative: Array2<f32>,
    gradient: Array2<f32>,
    /// The derivative with respect to the input.
    passed_on: Array2<f32>,
}

impl Layer {
    fn new(records: usize, inputs: usize, outputs: usize) -> Self {
        Self {
            input: matrix(records, inputs),
            weight: matrix(outputs, inputs),
            output: matrix(records, outputs),
            derivative: matrix(records, outputs),
            gradient: matrix(outputs, inputs),
            passed_on: matrix(records, inputs),
        }
    }
}

fn matrix(rows: usize, columns: usize) -> Array2<f32> {
    Array2::from_shape_fn((rows, columns), |(row, column)| ((row + column) % 7) as f32 * 0.1)
}

fn product(left: ArrayView2<'_, f32>, right: ArrayView2<'_, f32>, result: &mut Array2<f32>) {
    general_mat_mul(1.0, &left, &right, 0.0, result);
    black_box(result);
}
