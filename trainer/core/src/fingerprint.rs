//! The numerics fingerprint, which distinguishes machines whose arithmetic differs.
//!
//! Matrix products select their kernel by processor, and kernels round differently (with or without fused
//! multiply-add). All trainers of a synchronous job must have the same fingerprint.

use std::sync::Arc;

use ndarray::Array2;
use sha2::{Digest, Sha256};
use steadfast_common::ids::{Lane, Pass};
use steadfast_common::job::dataset::{Records, hex};
use steadfast_common::job::spec::{Activation, ModelSpec};
use steadfast_common::tensor::layout::Layout;

use crate::batch::{Batch, MicroBatch};
use crate::model::Model;
use crate::network::Network;
use crate::parameters::Parameters;
use steadfast_common::random::{Purpose, Random};

/// Rows, inner dimension and columns of the products: single rows and columns, dimensions that no
/// kernel's tile divides, and dimensions beyond the panels into which products are split.
const PRODUCTS: [(usize, usize, usize); 6] =
    [(1, 7, 1), (3, 64, 5), (16, 784, 33), (130, 17, 9), (8, 600, 8), (5, 9, 1100)];

/// Hashes the bits of a fixed small computation: SHA-256 in hexadecimal, equal on all machines with the
/// same arithmetic. Takes about a millisecond.
pub fn fingerprint() -> String {
    let mut hash = Sha256::new();
    for (index, (rows, inner, columns)) in PRODUCTS.into_iter().enumerate() {
        let left = drawn(2 * index, (rows, inner));
        let right = drawn(2 * index + 1, (inner, columns));
        absorb(&mut hash, left.dot(&right).iter());
        absorb(&mut hash, right.t().dot(&left.t()).iter());
        absorb(&mut hash, left.dot(&right.column(0)).iter());
    }
    for value in drawn(100, (1, 200)) {
        let value = 10.0 * value;
        let size = value.abs();
        let results = [libm::expf(value), libm::tanhf(value), libm::logf(size), size.sqrt()];
        absorb(&mut hash, results.iter());
    }
    for activation in [Activation::Relu, Activation::Tanh, Activation::Sigmoid] {
        absorb(&mut hash, gradient(activation).values().iter());
    }
    hex(&hash.finalize())
}

fn gradient(activation: Activation) -> Parameters {
    let spec = ModelSpec {
        factors: None,
        kind: "mlp".into(),
        classes: Some(5),
        hidden: vec![20, 11],
        activation,
        dropout: 0.25,
        options: Default::default(),
        entry: None,
        script: None,
        device: None,
        min_records: None,
        class_weights: Vec::new(),
    };
    let model = Network::new(&spec, 13);
    let mut parameters = Parameters::zeros(Arc::new(Layout::new(model.parameters())));
    model.initialize(1, &mut parameters).expect("built-in models start anywhere");
    let records = Records {
        features: drawn(200, (10, 13)).into_iter().collect(),
        width: 13,
        labels: (0..10).map(|record| (record % 5) as f32).collect(),
        ..Records::default()
    };
    let key = MicroBatch { seed: 1, pass: Pass(2), step: 3, lane: Lane(4) };
    let mut gradient = Parameters::zeros(parameters.layout().clone());
    model
        .gradient(&parameters, &Batch::from(&records), &key, &mut gradient)
        .expect("the records are fixed and valid");
    gradient
}

/// Draws fixed pseudo-random numbers from −1 to 1.
fn drawn(index: usize, shape: (usize, usize)) -> Array2<f32> {
    let mut random = Random::keyed(0, Purpose::Fingerprint, index as u64, 0, 0);
    Array2::from_shape_simple_fn(shape, || 2.0 * random.uniform() - 1.0)
}

fn absorb<'a>(hash: &mut Sha256, values: impl Iterator<Item = &'a f32>) {
    for value in values {
        hash.update(value.to_bits().to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_agrees_with_itself() {
        assert_eq!(fingerprint(), fingerprint());
        assert_eq!(fingerprint().len(), 64);
    }
}
