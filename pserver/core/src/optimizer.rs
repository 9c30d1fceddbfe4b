//! Update rules: apply a mean gradient to one block of parameters.
//!
//! Each value is updated on its own, with IEEE operations in a fixed order. The result depends neither
//! on the partition of parameters into blocks nor on the machine.

mod adam;
mod adaptive;
mod descent;
mod ftrl;
mod moments;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use steadfast_common::job::spec::{GroupSpec, OptimizerKind, OptimizerSpec};

use self::adam::Adam;
use self::adaptive::{Adadelta, Adagrad, Rmsprop};
use self::descent::{Lion, Momentum, Sgd};
use self::ftrl::Ftrl;
use self::moments::{Nadam, Radam};

/// An update rule with its constants. Clones are cheap and equivalent.
#[derive(Clone, Debug)]
pub struct Optimizer {
    rule: Arc<dyn Rule>,
    decay: Decay,
    /// Factor of the learning rate.
    rate_factor: f32,
}

/// What weight decay applies to.
#[derive(Clone, Copy, Debug)]
enum Decay {
    /// The gradient: decay adds the derivative of an L2 penalty.
    Gradient(f32),
    /// The parameters themselves (Loshchilov and Hutter 2019).
    Parameters(f32),
}

/// One update rule. All vectors have the same length.
trait Rule: fmt::Debug + Send + Sync {
    /// Returns the names of the state vectors kept between updates.
    fn state_names(&self) -> &'static [&'static str];

    /// Returns the initial value of the first state vector; the others start at zero.
    fn start(&self) -> f32 {
        0.0
    }

    /// Updates `params` and `state` with one gradient; `update` counts from 1.
    fn apply(&self, params: &mut [f32], gradient: &[f32], state: State<'_>, rate: f32, update: u64);
}

/// The most state vectors of a rule.
const STATES_MAX: usize = 3;

/// The state vectors of a rule, for some values.
#[derive(Debug)]
pub struct State<'a> {
    /// As many vectors as the rule has state names, then empty ones.
    vectors: [&'a mut [f32]; STATES_MAX],
    /// Length of each vector.
    len: usize,
}

impl<'a> State<'a> {
    /// Selects the part of the block's `vectors` that belongs to the values in `range`.
    pub fn new(vectors: &'a mut [Vec<f32>], range: Range<usize>) -> Self {
        let len = range.len();
        Self::of(vectors.iter_mut().map(|vector| &mut vector[range.clone()]), len)
    }

    /// Divides the state of a row of a table into its vectors, each of which has `width` values.
    pub fn of_row(state: &'a mut [f32], width: usize) -> Self {
        Self::of(state.chunks_exact_mut(width), width)
    }

    fn of(all: impl Iterator<Item = &'a mut [f32]>, len: usize) -> Self {
        let mut vectors: [&mut [f32]; STATES_MAX] = Default::default();
        vectors.iter_mut().zip(all).for_each(|(vector, given)| *vector = given);
        Self { vectors, len }
    }

    /// Returns the vectors in the order of the rule's state names.
    fn by_name<const N: usize>(self) -> [&'a mut [f32]; N] {
        let mut all = self.vectors.into_iter();
        std::array::from_fn(|_| all.next().expect("a rule has at most three vectors"))
    }
}

impl Optimizer {
    /// Creates the rule of `spec` with the defaults of PyTorch (of TensorFlow for FTRL), except that weight
    /// decay is off by default. `spec` has passed
    /// [validation](steadfast_common::job::optimizer_errors::optimizer). Keys that the rule does not use are
    /// ignored, and so are bounds on the gradient, which the caller applies.
    pub fn new(spec: &OptimizerSpec) -> Self {
        let rule: Arc<dyn Rule> = match spec.kind {
            OptimizerKind::Sgd => Arc::new(Sgd),
            OptimizerKind::Momentum => Arc::new(Momentum::new(spec)),
            OptimizerKind::Adagrad => Arc::new(Adagrad::new(spec)),
            OptimizerKind::Adadelta => Arc::new(Adadelta::new(spec)),
            OptimizerKind::Rmsprop => Arc::new(Rmsprop::new(spec)),
            OptimizerKind::Adam | OptimizerKind::Adamw => Arc::new(Adam::new(spec)),
            OptimizerKind::Ftrl => Arc::new(Ftrl::new(spec)),
            OptimizerKind::Lion => Arc::new(Lion::new(spec)),
            OptimizerKind::Nadam => Arc::new(Nadam::new(spec)),
            OptimizerKind::Radam => Arc::new(Radam::new(spec)),
        };
        let decay = match spec.kind {
            OptimizerKind::Adamw | OptimizerKind::Lion => Decay::Parameters(spec.weight_decay),
            OptimizerKind::Sgd
            | OptimizerKind::Momentum
            | OptimizerKind::Adagrad
            | OptimizerKind::Adadelta
            | OptimizerKind::Rmsprop
            | OptimizerKind::Adam
            | OptimizerKind::Nadam
            | OptimizerKind::Radam
            | OptimizerKind::Ftrl => match spec.decoupled.unwrap_or(false) {
                true => Decay::Parameters(spec.weight_decay),
                false => Decay::Gradient(spec.weight_decay),
            },
        };
        Self { rule, decay, rate_factor: 1.0 }
    }

    /// Returns the rule with the settings of a group in place of those of the job.
    #[must_use]
    pub fn of_group(&self, group: &GroupSpec) -> Self {
        let decay = match self.decay {
            Decay::Gradient(decay) => Decay::Gradient(group.weight_decay.unwrap_or(decay)),
            Decay::Parameters(decay) => Decay::Parameters(group.weight_decay.unwrap_or(decay)),
        };
        let rate_factor = group.learning_rate.unwrap_or(1.0);
        Self { rule: self.rule.clone(), decay, rate_factor }
    }

    /// Returns the names of the state vectors, as used in checkpoints.
    pub fn state_names(&self) -> &'static [&'static str] {
        self.rule.state_names()
    }

    /// Returns the state before the first update of `params`: one vector per name, each as long as `params`.
    pub fn initial_state(&self, params: &[f32]) -> Vec<Vec<f32>> {
        let mut state = vec![vec![0.0; params.len()]; self.state_names().len()];
        if let Some(first) = state.first_mut() {
            first.fill(self.rule.start());
        }
        state
    }

    /// Sets the state of a row of `width` values, one vector after the other, to that before the first update.
    pub fn begin_row(&self, width: usize, state: &mut [f32]) {
        state.fill(0.0);
        if let Some(first) = state.get_mut(..width) {
            first.fill(self.rule.start());
        }
    }

    /// Applies one update to a block or a part of it. `gradient` holds the mean gradient, already clipped;
    /// weight decay overwrites it. `update` counts the updates of this block from 1.
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
        // The loops stop at the shortest vector, so a short one would go unnoticed.
        assert_eq!(gradient.len(), params.len(), "a gradient is as long as its block");
        assert_eq!(state.len, params.len(), "a state is as long as its block");
        let rate = rate * self.rate_factor;
        self.decay.apply(params, gradient, rate);
        self.rule.apply(params, gradient, state, rate, update);
    }
}

impl Decay {
    fn apply(self, params: &mut [f32], gradient: &mut [f32], rate: f32) {
        match self {
            // Not just an optimization: adding 0 × ∞ would give NaN.
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
