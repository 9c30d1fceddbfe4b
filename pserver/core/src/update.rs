//! One update: a mean gradient, applied block by block.
//!
//! A block is processed in strips: all operations on a value happen while it is in the fastest cache,
//! and memory is read and written once. Values are independent of each other, so the strip size does
//! not affect the result.

use std::ops::Range;

use steadfast_common::tensor::finite::bounded;

use crate::contribution::Divisor;
use crate::optimizer::{Moment, Optimizer, State, norms_of};
use crate::values::Values;

/// Values per strip; a few strips with optimizer state fit into the fastest cache.
pub(crate) const STRIP: usize = 1 << 10;

/// The parameters of one update.
#[derive(Debug)]
pub(crate) struct Update {
    pub optimizer: Optimizer,
    pub mean: Mean,
    pub rate: f32,
    /// Number of the update, counted from 1.
    pub number: u64,
    /// The norms of the block's parameter, if the rule uses them.
    pub norms: Vec<Vec<f64>>,
}

/// Turns a sum of gradients into a clipped mean.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mean {
    scale: f32,
    /// Factor of sums of which each record counts once.
    of_records: f32,
    /// Bound on the absolute value of each element.
    clip: Option<f32>,
    /// Factor that reduces the clipped mean to the bound on its norm.
    shrink: f32,
}

impl Mean {
    /// Creates the mean of a sum, with each value clipped to `clip`. It is zero if nothing counts.
    pub(crate) fn new(by: Divisor, clip: Option<f32>) -> Self {
        let scale = if by.weight == 0.0 { 0.0 } else { 1.0 / by.weight as f32 };
        let of_records = if by.records == 0 { 0.0 } else { 1.0 / by.records as f32 };
        Self { scale, of_records, clip, shrink: 1.0 }
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

    /// Returns the mean over records that count once each, without clipping.
    pub(crate) fn over_records(self) -> Self {
        Self { scale: self.of_records, clip: None, shrink: 1.0, ..self }
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

/// Passes the means of `sums` to `visit` strip by strip, each with its range.
fn strips(mean: Mean, sums: &[f32], mut visit: impl FnMut(Range<usize>, &mut [f32])) {
    let mut strip = [0.0; STRIP];
    for (index, sums) in sums.chunks(STRIP).enumerate() {
        let at = index * STRIP..index * STRIP + sums.len();
        let strip = &mut strip[..sums.len()];
        strip.copy_from_slice(sums);
        mean.of(strip);
        visit(at, strip);
    }
}

/// Returns the sum of the squared means, added in order in `f64`.
pub(crate) fn squares(mean: Mean, sums: &[f32]) -> f64 {
    let mut total = 0.0;
    strips(mean, sums, |_, means| {
        for value in means {
            total += f64::from(*value) * f64::from(*value);
        }
    });
    total
}

/// A block of a parameter whose norms are measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured<'a> {
    /// The sum of its gradients.
    pub sum: &'a [f32],
    pub values: &'a [f32],
    pub state: &'a [Vec<f32>],
}

impl Update {
    /// Measures the norms of a parameter, of which `blocks` are all blocks in order.
    pub(crate) fn measure(&mut self, blocks: &[Measured<'_>]) {
        for _ in 0..self.optimizer.measuring_passes() {
            let mut squares = Vec::new();
            let mut rule = self.optimizer.begin(self.moment());
            for Measured { sum, values, state } in blocks {
                strips(self.mean, sum, |at, gradient| {
                    let state: Vec<&[f32]> = state.iter().map(|it| &it[at.clone()]).collect();
                    rule.measure(&values[at], gradient, &state, &mut squares);
                });
            }
            self.norms.push(norms_of(squares));
        }
    }

    fn moment(&self) -> Moment<'_> {
        Moment { rate: self.rate, update: self.number, norms: &self.norms }
    }

    /// Applies the sum of a block to its values and state.
    pub(crate) fn apply(&self, sum: &[f32], values: &mut Values, state: &mut [Vec<f32>]) {
        let mut change = values.change();
        let mut rule = self.optimizer.begin(self.moment());
        strips(self.mean, sum, |at, gradient| {
            rule.change(change.strip(at.clone()), gradient, State::new(state, at));
        });
    }

    /// Adds the unclipped mean over records of a block's sum to its values.
    pub(crate) fn add_mean(&self, sum: &[f32], values: &mut Values) {
        let mut change = values.change();
        strips(self.mean.over_records(), sum, |at, mean| {
            change.strip(at).iter_mut().zip(mean).for_each(|(value, mean)| *value += *mean);
        });
    }
}
