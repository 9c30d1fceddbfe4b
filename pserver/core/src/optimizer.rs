//! Update rules: how a mean gradient changes one block of parameters.
//!
//! Each value is updated on its own, by IEEE operations in a fixed order, so the result does not
//! depend on how parameters are cut into blocks, nor on the machine.

mod adam;
mod adaptive;
mod descent;
mod ftrl;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use steadfast_common::spec::{OptimizerKind, OptimizerSpec};

use self::adam::Adam;
use self::adaptive::{Adadelta, Adagrad, Rmsprop};
use self::descent::{Momentum, Sgd};
use self::ftrl::Ftrl;

/// An update rule with its constants. A clone is cheap and the same rule.
#[derive(Clone, Debug)]
pub struct Optimizer {
    rule: Arc<dyn Rule>,
    decay: Decay,
}

/// What weight decay is taken from.
#[derive(Clone, Copy, Debug)]
enum Decay {
    /// The gradient, to which it adds the derivative of an L2 penalty.
    Gradient(f32),
    /// The parameters themselves (Loshchilov and Hutter 2019).
    Parameters(f32),
}

/// One update rule. All vectors are equally long.
trait Rule: fmt::Debug + Send + Sync {
    /// Names of the vectors kept from update to update.
    fn state_names(&self) -> &'static [&'static str];

    /// What the first vector of the state is filled with before the first update; others start at
    /// zero.
    fn start(&self) -> f32 {
        0.0
    }

    /// Changes `params` and `state` by one gradient; `update` counts from 1.
    fn apply(&self, params: &mut [f32], gradient: &[f32], state: State<'_>, rate: f32, update: u64);
}

/// A rule's vectors for some of a block's values.
#[derive(Debug)]
pub struct State<'a> {
    vectors: &'a mut [Vec<f32>],
    range: Range<usize>,
}

impl<'a> State<'a> {
    /// The part of the block's `vectors` that belongs to the values in `range`.
    pub fn new(vectors: &'a mut [Vec<f32>], range: Range<usize>) -> Self {
        Self { vectors, range }
    }

    /// The vectors by name: as many as the rule named.
    fn by_name<const N: usize>(self) -> [&'a mut [f32]; N] {
        let vectors: &mut [Vec<f32>; N] =
            self.vectors.try_into().expect("a state has one vector for each name");
        vectors.each_mut().map(|vector| &mut vector[self.range.clone()])
    }
}

impl Optimizer {
    /// Completes `spec` with the defaults of PyTorch (of TensorFlow for FTRL), except that weight
    /// decay is off unless asked for. `spec` has no
    /// [faults](steadfast_common::faults_optimizer::optimizer); keys that the rule does not use
    /// are ignored, and so are bounds on the gradient, which the caller applies.
    pub fn new(spec: &OptimizerSpec) -> Self {
        let rule: Arc<dyn Rule> = match spec.kind {
            OptimizerKind::Sgd => Arc::new(Sgd),
            OptimizerKind::Momentum => Arc::new(Momentum::new(spec)),
            OptimizerKind::Adagrad => Arc::new(Adagrad::new(spec)),
            OptimizerKind::Adadelta => Arc::new(Adadelta::new(spec)),
            OptimizerKind::Rmsprop => Arc::new(Rmsprop::new(spec)),
            OptimizerKind::Adam | OptimizerKind::Adamw => Arc::new(Adam::new(spec)),
            OptimizerKind::Ftrl => Arc::new(Ftrl::new(spec)),
        };
        let decay = match spec.kind {
            OptimizerKind::Adamw => Decay::Parameters(spec.weight_decay),
            OptimizerKind::Sgd
            | OptimizerKind::Momentum
            | OptimizerKind::Adagrad
            | OptimizerKind::Adadelta
            | OptimizerKind::Rmsprop
            | OptimizerKind::Adam
            | OptimizerKind::Ftrl => Decay::Gradient(spec.weight_decay),
        };
        Self { rule, decay }
    }

    /// Names of the vectors that the rule keeps from update to update, as in checkpoints.
    pub fn state_names(&self) -> &'static [&'static str] {
        self.rule.state_names()
    }

    /// The state before the first update of `params`: one vector a name, each as long as `params`.
    pub fn initial_state(&self, params: &[f32]) -> Vec<Vec<f32>> {
        let mut state = vec![vec![0.0; params.len()]; self.state_names().len()];
        if let Some(first) = state.first_mut() {
            first.fill(self.rule.start());
        }
        state
    }

    /// Applies one update to one block, or to a part of it. `gradient` holds the mean gradient, bounded
    /// already; weight decay overwrites it. `update` counts the updates of this block from 1.
    ///
    /// # Panics
    /// If `gradient` or `state` is not as long as `params`, or a vector is missing.
    pub fn apply(
        &self,
        params: &mut [f32],
        gradient: &mut [f32],
        state: State<'_>,
        rate: f32,
        update: u64,
    ) {
        // The loops end with the shortest vector, so a short one would go unnoticed.
        assert_eq!(gradient.len(), params.len(), "a gradient is as long as its block");
        assert_eq!(state.range.len(), params.len(), "a state is as long as its block");
        self.decay.apply(params, gradient, rate);
        self.rule.apply(params, gradient, state, rate, update);
    }
}

impl Decay {
    fn apply(self, params: &mut [f32], gradient: &mut [f32], rate: f32) {
        match self {
            // Not a mere short cut: adding 0 × ∞ would give NaN.
            Self::Gradient(0.0) | Self::Parameters(0.0) => {}
            Self::Gradient(decay) => {
                for (g, p) in gradient.iter_mut().zip(params.iter()) {
                    *g += decay * *p;
                }
            }
            Self::Parameters(decay) => {
                let kept = (1.0 - f64::from(rate) * f64::from(decay)) as f32;
                params.iter_mut().for_each(|p| *p *= kept);
            }
        }
    }
}
