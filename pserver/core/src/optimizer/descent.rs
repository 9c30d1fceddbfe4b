//! Gradient descent: plain, with momentum, and by the sign of a momentum.

use steadfast_common::job::spec::OptimizerSpec;
use steadfast_common::tensor::widest::widest;

use super::{Rule, State};

/// `p ← p − rate · g`.
#[derive(Debug)]
pub(super) struct Sgd;

impl Rule for Sgd {
    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn apply(&self, params: &mut [f32], gradient: &[f32], _: State<'_>, rate: f32, _: u64) {
        widest(|| {
            for (p, g) in params.iter_mut().zip(gradient) {
                *p -= rate * *g;
            }
        });
    }
}

/// `u ← μ u + g`, `p ← p − rate · u`; with Nesterov's look-ahead `p ← p − rate · (g + μ u)`
/// (Sutskever et al. 2013, in the form of PyTorch: the rate is not part of the velocity).
#[derive(Debug)]
pub(super) struct Momentum {
    momentum: f32,
    nesterov: bool,
}

impl Momentum {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        let momentum = spec.momentum.unwrap_or(0.9);
        Self { momentum, nesterov: spec.nesterov.unwrap_or(false) }
    }
}

impl Rule for Momentum {
    fn state_names(&self) -> &'static [&'static str] {
        &["velocity"]
    }

    fn apply(&self, params: &mut [f32], gradient: &[f32], state: State<'_>, rate: f32, _: u64) {
        let [velocity] = state.by_name();
        let momentum = self.momentum;
        let values = params.iter_mut().zip(gradient).zip(velocity);
        if self.nesterov {
            widest(|| {
                for ((p, g), u) in values {
                    *u = momentum * *u + *g;
                    *p -= rate * (*g + momentum * *u);
                }
            });
        } else {
            widest(|| {
                for ((p, g), u) in values {
                    *u = momentum * *u + *g;
                    *p -= rate * *u;
                }
            });
        }
    }
}

/// `p ← p − rate · sign(β₁ m + (1 − β₁) g)`, `m ← β₂ m + (1 − β₂) g` (Chen et al. 2023).
#[derive(Debug)]
pub(super) struct Lion {
    beta1: f32,
    beta2: f32,
}

impl Lion {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        Self { beta1: spec.beta1.unwrap_or(0.9), beta2: spec.beta2.unwrap_or(0.99) }
    }
}

impl Rule for Lion {
    fn state_names(&self) -> &'static [&'static str] {
        &["m"]
    }

    fn apply(&self, params: &mut [f32], gradient: &[f32], state: State<'_>, rate: f32, _: u64) {
        let [moment] = state.by_name();
        let Self { beta1, beta2 } = *self;
        widest(|| {
            for ((p, g), m) in params.iter_mut().zip(gradient).zip(moment) {
                let direction = beta1 * *m + (1.0 - beta1) * *g;
                let sign = if direction == 0.0 { 0.0 } else { 1.0_f32.copysign(direction) };
                *p -= rate * sign;
                *m = beta2 * *m + (1.0 - beta2) * *g;
            }
        });
    }
}
