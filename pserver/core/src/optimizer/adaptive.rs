//! Rules that scale each value's step by the squares of its gradients.

use steadfast_common::job::spec::OptimizerSpec;
use steadfast_common::tensor::widest::widest;

use super::{Rule, State};

/// `n ← n + g²`, `p ← p − rate · g / (√n + ε)` (Duchi, Hazan and Singer 2011).
#[derive(Debug)]
pub(super) struct Adagrad {
    epsilon: f32,
    start: f32,
}

impl Adagrad {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        let epsilon = spec.epsilon.unwrap_or(1e-10);
        Self { epsilon, start: spec.initial_accumulator.unwrap_or(0.0) }
    }
}

impl Rule for Adagrad {
    fn state_names(&self) -> &'static [&'static str] {
        &["square_sum"]
    }

    fn start(&self) -> f32 {
        self.start
    }

    fn apply(&self, params: &mut [f32], gradient: &[f32], state: State<'_>, rate: f32, _: u64) {
        let [squares] = state.by_name();
        let epsilon = self.epsilon;
        widest(|| {
            for ((p, g), n) in params.iter_mut().zip(gradient).zip(squares) {
                *n += *g * *g;
                *p -= rate * *g / (n.sqrt() + epsilon);
            }
        });
    }
}

/// `n ← ρ n + (1 − ρ) g²`, `d = g √(c + ε) / √(n + ε)`, `c ← ρ c + (1 − ρ) d²`, `p ← p − rate · d`
/// (Zeiler 2012, whose rate is 1).
#[derive(Debug)]
pub(super) struct Adadelta {
    rho: f32,
    epsilon: f32,
}

impl Adadelta {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        Self { rho: spec.rho.unwrap_or(0.9), epsilon: spec.epsilon.unwrap_or(1e-6) }
    }
}

impl Rule for Adadelta {
    fn state_names(&self) -> &'static [&'static str] {
        &["square_mean", "change_mean"]
    }

    fn apply(&self, params: &mut [f32], gradient: &[f32], state: State<'_>, rate: f32, _: u64) {
        let [squares, changes] = state.by_name();
        let Self { rho, epsilon } = *self;
        widest(|| {
            for (((p, g), n), c) in params.iter_mut().zip(gradient).zip(squares).zip(changes) {
                *n = rho * *n + (1.0 - rho) * *g * *g;
                let change = (*c + epsilon).sqrt() / (*n + epsilon).sqrt() * *g;
                *c = rho * *c + (1.0 - rho) * change * change;
                *p -= rate * change;
            }
        });
    }
}

/// `n ← ρ n + (1 − ρ) g²`, `d = g / (√n + ε)`, `p ← p − rate · d`; with momentum `u ← μ u + d`,
/// `p ← p − rate · u` (Tieleman and Hinton 2012, in the form of PyTorch).
#[derive(Debug)]
pub(super) struct Rmsprop {
    rho: f32,
    epsilon: f32,
    momentum: f32,
}

impl Rmsprop {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        Self {
            rho: spec.rho.unwrap_or(0.99),
            epsilon: spec.epsilon.unwrap_or(1e-8),
            momentum: spec.momentum.unwrap_or(0.0),
        }
    }
}

impl Rule for Rmsprop {
    fn state_names(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &["square_mean"] } else { &["square_mean", "velocity"] }
    }

    fn apply(&self, params: &mut [f32], gradient: &[f32], state: State<'_>, rate: f32, _: u64) {
        let Self { rho, epsilon, momentum } = *self;
        if momentum == 0.0 {
            let [squares] = state.by_name();
            widest(|| {
                for ((p, g), n) in params.iter_mut().zip(gradient).zip(squares) {
                    *n = rho * *n + (1.0 - rho) * *g * *g;
                    *p -= rate * *g / (n.sqrt() + epsilon);
                }
            });
            return;
        }
        let [squares, velocity] = state.by_name();
        widest(|| {
            for (((p, g), n), u) in params.iter_mut().zip(gradient).zip(squares).zip(velocity) {
                *n = rho * *n + (1.0 - rho) * *g * *g;
                *u = momentum * *u + *g / (n.sqrt() + epsilon);
                *p -= rate * *u;
            }
        });
    }
}
