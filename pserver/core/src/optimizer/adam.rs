//! Adam and AdamW, which differ only in weight decay.

use steadfast_common::job::spec::OptimizerSpec;
use steadfast_common::tensor::widest::widest;

use super::moments::{Moments, correction};
use super::{Rule, State};

/// `m ← m + (1 − β₁)(g − m)`, `v ← β₂ v + (1 − β₂) g²`,
/// `p ← p − rate · m̂ / (√v̂ + ε)` with `m̂ = m / (1 − β₁ᵗ)` and `v̂ = v / (1 − β₂ᵗ)` (Kingma and Ba
/// 2015).
#[derive(Debug)]
pub(super) struct Adam(Moments);

impl Adam {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        Self(Moments::new(spec))
    }
}

impl Rule for Adam {
    fn state_names(&self) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn apply(
        &self,
        params: &mut [f32],
        gradient: &[f32],
        state: State<'_>,
        rate: f32,
        update: u64,
    ) {
        let [first, second] = state.by_name();
        let Moments { beta1, beta2, epsilon } = self.0;
        // 1 − β is exact in `f32` for β ≥ 0.5; otherwise the corrections cancel its rounding error.
        let (gain1, gain2) = (1.0 - beta1, 1.0 - beta2);
        let step = (f64::from(rate) / correction(beta1, update)) as f32;
        let scale = (1.0 / correction(beta2, update).sqrt()) as f32;
        widest(|| {
            for (((p, g), m), v) in params.iter_mut().zip(gradient).zip(first).zip(second) {
                *m += gain1 * (*g - *m);
                *v = beta2 * *v + gain2 * *g * *g;
                *p -= step * *m / (v.sqrt() * scale + epsilon);
            }
        });
    }
}
