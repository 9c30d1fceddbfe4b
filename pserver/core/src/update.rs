//! One update: a mean gradient, applied block by block.
//!
//! A block is processed in strips: all operations on a value happen while it is in the fastest cache,
//! and memory is read and written once. Values are independent of each other, so the strip size does
//! not affect the result.

use steadfast_common::tensor::finite::bounded;

use crate::optimizer::{Optimizer, State};
use crate::values::Values;

/// Values per strip; a few strips with optimizer state fit into the fastest cache.
pub(crate) const STRIP: usize = 1 << 10;

/// The parameters of one update.
#[derive(Debug)]
pub(crate) struct Update<'a> {
    pub optimizer: &'a Optimizer,
    pub mean: Mean,
    pub rate: f32,
    /// Number of the update, counted from 1.
    pub number: u64,
}

/// Turns a sum of gradients into a clipped mean.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mean {
    scale: f32,
    /// Bound on the absolute value of each element.
    clip: Option<f32>,
    /// Factor that reduces the clipped mean to the bound on its norm.
    shrink: f32,
}

impl Mean {
    /// Creates the mean of a sum over `records`, with each value clipped to `clip`.
    pub(crate) fn new(records: u64, clip: Option<f32>) -> Self {
        let scale = if records == 0 { 0.0 } else { 1.0 / records as f32 };
        Self { scale, clip, shrink: 1.0 }
    }

    /// Returns the mean scaled down to `bound` if its `norm` exceeds it.
    pub(crate) fn shrunk(self, norm: Option<f64>, bound: Option<f32>) -> Self {
        let shrink = match (norm, bound) {
            (Some(norm), Some(bound)) if f64::from(bound) < norm => {
                (f64::from(bound) / norm) as f32
            }
            (Some(_) | None, Some(_) | None) => 1.0,
        };
        Self { shrink, ..self }
    }

    /// Returns the mean without clipping.
    pub(crate) fn unclipped(self) -> Self {
        Self { clip: None, shrink: 1.0, ..self }
    }

    /// Replaces sums by their means.
    pub(crate) fn of(self, sums: &mut [f32]) {
        // Separate loops, which the compiler can vectorize.
        sums.iter_mut().for_each(|it| *it *= self.scale);
        if let Some(bound) = self.clip {
            sums.iter_mut().for_each(|it| *it = bounded(*it, bound));
        }
        if self.shrink != 1.0 {
            sums.iter_mut().for_each(|it| *it *= self.shrink);
        }
    }
}

/// Returns the sum of the squared means, added in order in `f64`.
pub(crate) fn squares(mean: Mean, sums: &[f32]) -> f64 {
    let mut strip = [0.0; STRIP];
    let mut total = 0.0;
    for sums in sums.chunks(STRIP) {
        let strip = &mut strip[..sums.len()];
        strip.copy_from_slice(sums);
        mean.of(strip);
        for value in strip {
            total += f64::from(*value) * f64::from(*value);
        }
    }
    total
}

impl Update<'_> {
    /// Applies the sum of a block to its values and state.
    pub(crate) fn apply(&self, sum: &[f32], values: &mut Values, state: &mut [Vec<f32>]) {
        let mut change = values.change();
        let mut strip = [0.0; STRIP];
        for (index, sum) in sum.chunks(STRIP).enumerate() {
            let at = index * STRIP..index * STRIP + sum.len();
            let gradient = &mut strip[..sum.len()];
            gradient.copy_from_slice(sum);
            self.mean.of(gradient);
            let (params, state) = (change.strip(at.clone()), State::new(state, at));
            self.optimizer.apply(params, gradient, state, self.rate, self.number);
        }
    }

    /// Adds the unclipped mean of a block's sum to its values.
    pub(crate) fn add_mean(&self, sum: &[f32], values: &mut Values) {
        let mut change = values.change();
        let mut strip = [0.0; STRIP];
        for (index, sum) in sum.chunks(STRIP).enumerate() {
            let at = index * STRIP..index * STRIP + sum.len();
            let mean = &mut strip[..sum.len()];
            mean.copy_from_slice(sum);
            self.mean.unclipped().of(mean);
            change.strip(at).iter_mut().zip(mean).for_each(|(value, mean)| *value += *mean);
        }
    }
}
