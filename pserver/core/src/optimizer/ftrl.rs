//! FTRL (follow the regularised leader), with L1 for sparse models.

use steadfast_common::job::spec::OptimizerSpec;
use steadfast_common::tensor::widest::widest;

use super::{Rule, State};

/// FTRL-proximal (McMahan et al. 2013), with the constants of TensorFlow's optimizer: `n ← n + g²`,
/// `q ← n^−power / rate`, `z ← z + g − (q − q_before) p`, and `p` becomes the minimum of
/// `z p + ½ q p² + l1 |p| + l2 p²`, which is zero where `|z| ≤ l1`.
///
/// `q` is stored, not recomputed from the previous `n`: otherwise a falling rate would raise all of `q`
/// but not `z`, and shrink the parameters. With a constant rate the results are the same.
#[derive(Debug)]
pub(super) struct Ftrl {
    power: f32,
    l1: f32,
    l2: f32,
    start: f32,
}

impl Ftrl {
    pub(super) fn new(spec: &OptimizerSpec) -> Self {
        Self {
            power: spec.learning_rate_power.unwrap_or(-0.5),
            l1: spec.l1.unwrap_or(0.0),
            l2: spec.l2.unwrap_or(0.0),
            start: spec.initial_accumulator.unwrap_or(0.1),
        }
    }

    /// Applies one update, in which `root` raises the sum of squares to the configured power. It is a type parameter so
    /// that the usual square root gets its own loop, which the compiler can vectorize.
    fn sweep(
        &self,
        params: &mut [f32],
        gradient: &[f32],
        [squares, linear, inverse]: [&mut [f32]; 3],
        rate: f32,
        root: impl Fn(f32) -> f32,
    ) {
        let Self { l1, l2, start, .. } = *self;
        // Before the first update with a rate. Each later value is above 0, since sums of squares begin above 0.
        if 0.0 < start && inverse.first() == Some(&0.0) {
            inverse.fill(root(start) / rate);
        }
        let values = params.iter_mut().zip(gradient).zip(squares).zip(linear).zip(inverse);
        widest(move || {
            for ((((p, g), n), z), q) in values {
                *n += *g * *g;
                let before = *q;
                *q = root(*n) / rate;
                *z += *g - (*q - before) * *p;
                let pull = l1.copysign(*z) - *z;
                *p = if z.abs() > l1 { pull / (*q + 2.0 * l2) } else { 0.0 };
            }
        });
    }
}

impl Rule for Ftrl {
    fn state_names(&self) -> &'static [&'static str] {
        &["square_sum", "linear", "inverse_rate"]
    }

    fn start(&self) -> f32 {
        self.start
    }

    fn apply(&self, params: &mut [f32], gradient: &[f32], state: State<'_>, rate: f32, _: u64) {
        // The limit for ever smaller rates; the formulas would divide by zero.
        if rate == 0.0 {
            return;
        }
        let state = state.by_name();
        match -self.power {
            0.5 => self.sweep(params, gradient, state, rate, |n| n.sqrt()),
            power => {
                self.sweep(params, gradient, state, rate, |n| libm::powf(n, power));
            }
        }
    }
}
