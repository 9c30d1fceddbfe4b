//! One update: a mean gradient, applied block by block.
//!
//! A block goes through strip by strip: all that happens to a value happens while it is in the fastest
//! cache, and memory is read and written once. Values do not depend on each other, so the result does
//! not depend on the strips.

use steadfast_common::finite::bounded;

use crate::optimizer::{Optimizer, State};
use crate::values::Values;

/// Values in a strip: with an optimizer's state a few of these fit into the fastest cache.
pub(crate) const STRIP: usize = 1 << 10;

/// How a sum of gradients changes parameters.
#[derive(Debug)]
pub(crate) struct Update<'a> {
    pub optimizer: &'a Optimizer,
    pub mean: Mean,
    pub rate: f32,
    /// Updates of the block so far, this one included.
    pub number: u64,
}

/// What makes a bounded mean of a sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mean {
    scale: f32,
    /// Bound of each value.
    clip: Option<f32>,
    /// What brings the bounded mean to its bound by norm.
    shrink: f32,
}

impl Mean {
    /// Of a sum over `records`, each value bounded by `clip`.
    pub(crate) fn new(records: u64, clip: Option<f32>) -> Self {
        let scale = if records == 0 { 0.0 } else { 1.0 / records as f32 };
        Self { scale, clip, shrink: 1.0 }
    }

    /// The same, shrunk to `bound` if its `norm` is beyond it.
    pub(crate) fn shrunk(self, norm: Option<f64>, bound: Option<f32>) -> Self {
        let shrink = match (norm, bound) {
            (Some(norm), Some(bound)) if f64::from(bound) < norm => {
                (f64::from(bound) / norm) as f32
            }
            (Some(_) | None, Some(_) | None) => 1.0,
        };
        Self { shrink, ..self }
    }

    /// Makes means of sums.
    pub(crate) fn of(self, sums: &mut [f32]) {
        // Each in a loop of its own, which the compiler can vectorise.
        sums.iter_mut().for_each(|it| *it *= self.scale);
        if let Some(bound) = self.clip {
            sums.iter_mut().for_each(|it| *it = bounded(*it, bound));
        }
        if self.shrink != 1.0 {
            sums.iter_mut().for_each(|it| *it *= self.shrink);
        }
    }
}

/// The squares of the means of sums, from the first to the last, added in `f64`.
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
    /// Applies a sum.
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
}
