//! Variants of Adam: rules of a first and a second moment.

use std::sync::Mutex;

use steadfast_common::job::spec::OptimizerSpec;
use steadfast_common::tensor::widest::widest;

use super::{Rule, State};

/// The constants of a rule with two moments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moments {
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    pub(super) epsilon: f32,
}

impl Moments {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        Self {
            beta1: spec.beta1.unwrap_or(0.9),
            beta2: spec.beta2.unwrap_or(0.999),
            epsilon: spec.epsilon.unwrap_or(1e-8),
        }
    }
}

/// Returns `1 − βᵗ`, the bias correction of a running mean that starts at zero, where `t` is `update`.
pub(super) fn correction(beta: f32, update: u64) -> f64 {
    1.0 - libm::pow(f64::from(beta), update as f64)
}

/// Adam with Nesterov's momentum (Dozat 2016, in the form of PyTorch): with `μᵗ = β₁ (1 − ½ · 0.96^(ψ t))` and `Πᵗ` their
/// product up to `t`, `p ← p − rate · ((1 − μᵗ) / (1 − Πᵗ) · g + μᵗ⁺¹ / (1 − Πᵗ⁺¹) · m) / (√v̂ + ε)`.
#[derive(Debug)]
pub(super) struct Nadam {
    moments: Moments,
    momentum_decay: f32,
    /// `Π¹`, `Π²`, … as far as they were needed. None is computed after one that is
    /// too small to change `1 − Π` noticeably.
    products: Mutex<Vec<f64>>,
}

impl Nadam {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        let momentum_decay = spec.momentum_decay.unwrap_or(4e-3);
        Self { moments: Moments::new(spec), momentum_decay, products: Mutex::default() }
    }

    fn momentum(&self, update: u64) -> f64 {
        let fallen = libm::pow(0.96, update as f64 * f64::from(self.momentum_decay));
        f64::from(self.moments.beta1) * (1.0 - 0.5 * fallen)
    }

    /// Returns the product of the momentums of the updates from 1 to `update`; 0 where it no longer matters.
    fn product(&self, update: u64) -> f64 {
        let mut products = self.products.lock().expect("no holder panics");
        while (products.len() as u64) < update {
            let last = products.last().copied().unwrap_or(1.0);
            if last < f64::EPSILON / 2.0 {
                return 0.0;
            }
            let next = products.len() as u64 + 1;
            products.push(last * self.momentum(next));
        }
        products.get(update as usize - 1).copied().unwrap_or(1.0)
    }
}

impl Rule for Nadam {
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
        let Moments { beta1, beta2, epsilon } = self.moments;
        let (gain1, gain2) = (1.0 - beta1, 1.0 - beta2);
        let rate = f64::from(rate);
        let (present, next) = (self.momentum(update), self.momentum(update + 1));
        let of_gradient = (rate * (1.0 - present) / (1.0 - self.product(update))) as f32;
        let of_moment = (rate * next / (1.0 - self.product(update + 1))) as f32;
        let scale = (1.0 / correction(beta2, update).sqrt()) as f32;
        widest(|| {
            for (((p, g), m), v) in params.iter_mut().zip(gradient).zip(first).zip(second) {
                *m += gain1 * (*g - *m);
                *v = beta2 * *v + gain2 * *g * *g;
                *p -= (of_gradient * *g + of_moment * *m) / (v.sqrt() * scale + epsilon);
            }
        });
    }
}

/// Adam whose steps are rectified while the variance of `v` is large (Liu et al. 2020): `p ← p − rate · r · m̂ / (√v̂ + ε′)`
/// once `ρᵗ > 5`, and `p ← p − rate · m̂` before. As in PyTorch, ε is added to `√v` before its bias is corrected.
#[derive(Debug)]
pub(super) struct Radam {
    moments: Moments,
}

impl Radam {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        Self { moments: Moments::new(spec) }
    }

    /// Returns the factor `r` by which an adaptive step is rectified; `None` while steps are not adaptive.
    fn rectification(&self, update: u64) -> Option<f64> {
        let beta2 = f64::from(self.moments.beta2);
        let longest = 2.0 / (1.0 - beta2) - 1.0;
        let power = libm::pow(beta2, update as f64);
        let length = longest - 2.0 * update as f64 * power / (1.0 - power);
        let variance = |length: f64| (length - 4.0) * (length - 2.0) / length;
        (5.0 < length).then(|| (variance(length) / variance(longest)).sqrt())
    }
}

impl Rule for Radam {
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
        let Moments { beta1, beta2, epsilon } = self.moments;
        let (gain1, gain2) = (1.0 - beta1, 1.0 - beta2);
        let step = f64::from(rate) / correction(beta1, update);
        let values = params.iter_mut().zip(gradient).zip(first).zip(second);
        match self.rectification(update) {
            Some(factor) => {
                let step = (step * factor * correction(beta2, update).sqrt()) as f32;
                widest(|| {
                    for (((p, g), m), v) in values {
                        *m += gain1 * (*g - *m);
                        *v = beta2 * *v + gain2 * *g * *g;
                        *p -= step * *m / (v.sqrt() + epsilon);
                    }
                });
            }
            None => {
                let step = step as f32;
                widest(|| {
                    for (((p, g), m), v) in values {
                        *m += gain1 * (*g - *m);
                        *v = beta2 * *v + gain2 * *g * *g;
                        *p -= step * *m;
                    }
                });
            }
        }
    }
}
