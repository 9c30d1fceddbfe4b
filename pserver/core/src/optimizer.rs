//! Update rules: apply a mean gradient to one block of parameters.
//!
//! Each value is updated on its own, with IEEE operations in a fixed order. The result depends neither
//! on the partition of parameters into blocks nor on the machine. Only rules with norms use all values of a
//! parameter; their last bits depend on its blocks.

mod adam;
mod adaptive;
mod descent;
mod ftrl;
mod moments;
mod program;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use steadfast_common::job::average::{AVERAGE, AverageSpec};
use steadfast_common::job::spec::{GroupSpec, OptimizerKind, OptimizerSpec};
use steadfast_common::tensor::widest::widest;

use self::adam::Adam;
use self::adaptive::{Adadelta, Adagrad, Rmsprop};
use self::descent::{Lion, Momentum, Sgd};
use self::ftrl::Ftrl;
use self::moments::{Nadam, Radam};
use self::program::{ProgramRule, RunningProgram};

/// An update rule with its constants. Clones are cheap and equivalent.
#[derive(Clone, Debug)]
pub struct Optimizer {
    form: Form,
    /// Initial value of the first state vector; the others start at zero.
    start: f32,
    /// Factor of the learning rate.
    rate_factor: f32,
    /// The average of the parameters, which is the last state vector.
    average: Option<AverageSpec>,
}

#[derive(Clone, Debug)]
enum Form {
    BuiltIn {
        rule: Arc<dyn Rule>,
        decay: Decay,
    },
    /// Weight decay is a part of the text.
    Text(Arc<ProgramRule>),
}

/// A pass over a parameter. What all of its values have in common is computed once.
#[derive(Debug)]
pub(crate) struct Running<'a> {
    optimizer: &'a Optimizer,
    moment: Moment<'a>,
    form: RunningForm<'a>,
}

#[derive(Debug)]
enum RunningForm<'a> {
    BuiltIn { rule: &'a dyn Rule, decay: Decay },
    Text(RunningProgram<'a>),
}

/// What an update depends on besides the values.
#[derive(Clone, Copy, Debug)]
pub struct Moment<'a> {
    pub rate: f32,
    /// Number of the update, from 1.
    pub update: u64,
    /// The norms that were measured, pass by pass, see [`Optimizer::measuring_passes`].
    pub norms: &'a [Vec<f64>],
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

/// The most state vectors: those of a rule, and the average.
const STATES_MAX: usize = 5;

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
        std::array::from_fn(|_| all.next().expect("a rule has at most as many"))
    }
}

impl Optimizer {
    /// Creates the rule of `spec` with the defaults of PyTorch (of TensorFlow for FTRL, of their authors for Lion, LAMB and
    /// LARS), except that weight decay is off by default. `spec` has passed
    /// [validation](steadfast_common::job::optimizer_errors::optimizer). Keys that the rule does not use are
    /// ignored, and so are bounds on the gradient, which the caller applies.
    ///
    /// # Panics
    /// If the text of the rule is invalid.
    pub fn new(spec: &OptimizerSpec) -> Self {
        Self::of_group(spec, None)
    }

    /// Creates the rule with the settings of a group in place of those of the job.
    ///
    /// # Panics
    /// As [`Optimizer::new`].
    pub fn of_group(spec: &OptimizerSpec, group: Option<&GroupSpec>) -> Self {
        let form = match spec.program(group) {
            Some(program) => {
                Form::Text(Arc::new(ProgramRule::new(program.expect("the rule was validated"))))
            }
            None => Form::built_in(spec, group),
        };
        let start = match &form {
            Form::BuiltIn { rule, .. } => rule.start(),
            Form::Text(_) => spec.initial_accumulator.unwrap_or(0.0),
        };
        let rate_factor = group.and_then(|group| group.learning_rate).unwrap_or(1.0);
        Self { form, start, rate_factor, average: None }
    }

    /// Returns the rule with one more state vector, the average of the parameters.
    #[must_use]
    pub fn with_average(self, average: Option<AverageSpec>) -> Self {
        Self { average, ..self }
    }

    /// Returns the names of the state vectors, as used in checkpoints.
    pub fn state_names(&self) -> Vec<String> {
        let of_rule = match &self.form {
            Form::BuiltIn { rule, .. } => {
                rule.state_names().iter().map(|name| (*name).to_owned()).collect()
            }
            Form::Text(rule) => rule.state_names().to_vec(),
        };
        of_rule.into_iter().chain(self.average.map(|_| AVERAGE.to_owned())).collect()
    }

    /// Returns the number of state vectors.
    pub fn states(&self) -> usize {
        self.states_of_rule() + usize::from(self.average.is_some())
    }

    fn states_of_rule(&self) -> usize {
        match &self.form {
            Form::BuiltIn { rule, .. } => rule.state_names().len(),
            Form::Text(rule) => rule.state_names().len(),
        }
    }

    /// Returns the state before the first update of `params`: one vector per name, each as long as `params`.
    pub fn initial_state(&self, params: &[f32]) -> Vec<Vec<f32>> {
        let mut state = vec![vec![0.0; params.len()]; self.states_of_rule()];
        if let Some(first) = state.first_mut() {
            first.fill(self.start);
        }
        state.extend(self.average.map(|_| params.to_vec()));
        state
    }

    /// Sets the state of a row of `width` values, one vector after the other, to that before the first update.
    pub fn begin_row(&self, width: usize, state: &mut [f32]) {
        state.fill(0.0);
        if let Some(first) = state.get_mut(..width) {
            first.fill(self.start);
        }
    }

    /// Returns the number of passes over a parameter that measure norms, before the one that changes it. With 0, parts
    /// of a parameter are updated independently of each other.
    pub fn measuring_passes(&self) -> usize {
        match &self.form {
            Form::BuiltIn { .. } => 0,
            Form::Text(rule) => rule.measuring_passes(),
        }
    }

    /// Begins a pass over a parameter: the next one that measures or, if all norms are known, the one that changes it.
    pub(crate) fn begin<'a>(&'a self, moment: Moment<'a>) -> Running<'a> {
        let moment = Moment { rate: moment.rate * self.rate_factor, ..moment };
        let form = match &self.form {
            Form::BuiltIn { rule, decay } => RunningForm::BuiltIn { rule: &**rule, decay: *decay },
            Form::Text(rule) => RunningForm::Text(rule.begin(&moment)),
        };
        Running { optimizer: self, moment, form }
    }

    /// Applies one update to a whole parameter or, if the rule has no norms, to a part of it. `gradient` holds the mean
    /// gradient, already clipped; weight decay overwrites it. `update` counts the updates of this block from 1.
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
        let mut norms = Vec::new();
        for _ in 0..self.measuring_passes() {
            let (mut squares, moment) = (Vec::new(), Moment { rate, update, norms: &norms });
            let vectors: Vec<&[f32]> = state.vectors.iter().map(|vector| &**vector).collect();
            let vectors = &vectors[..self.states()];
            self.begin(moment).measure(params, gradient, vectors, &mut squares);
            norms.push(norms_of(squares));
        }
        self.begin(Moment { rate, update, norms: &norms }).change(params, gradient, state);
    }
}

impl Running<'_> {
    /// Measures some values of a parameter; adds the squares of its norms to `squares`. The caller passes on all values of
    /// the parameter, in order.
    pub(crate) fn measure(
        &mut self,
        params: &[f32],
        gradient: &[f32],
        state: &[&[f32]],
        squares: &mut Vec<f64>,
    ) {
        if let RunningForm::Text(rule) = &mut self.form {
            rule.measure(params, gradient, state, squares);
        }
    }

    /// Changes some values of a parameter and of its state. Weight decay overwrites `gradient`.
    ///
    /// # Panics
    /// If `gradient` or `state` is not as long as `params`, or a vector is missing.
    pub(crate) fn change(&mut self, params: &mut [f32], gradient: &mut [f32], state: State<'_>) {
        // The loops stop at the shortest vector, so a short one would go unnoticed.
        assert_eq!(gradient.len(), params.len(), "a gradient is as long as its block");
        assert_eq!(state.len, params.len(), "a state is as long as its block");
        let Moment { rate, update, .. } = self.moment;
        let mut state = state;
        let average = self.optimizer.average.map(|spec| {
            let place = &mut state.vectors[self.optimizer.states_of_rule()];
            (spec.weight(update), std::mem::take(place))
        });
        match &mut self.form {
            RunningForm::BuiltIn { rule, decay } => {
                decay.apply(params, gradient, rate);
                rule.apply(params, gradient, state, rate, update);
            }
            RunningForm::Text(rule) => rule.change(params, gradient, state),
        }
        if let Some((Some(weight), average)) = average {
            add_to_average(average, params, weight);
        }
    }
}

fn add_to_average(average: &mut [f32], params: &[f32], weight: f32) {
    if weight == 1.0 {
        return average.copy_from_slice(params);
    }
    widest(|| {
        for (a, p) in average.iter_mut().zip(params) {
            *a += weight * (*p - *a);
        }
    });
}

/// Returns the norms of a pass from the sums of its squares.
pub(crate) fn norms_of(squares: Vec<f64>) -> Vec<f64> {
    squares.into_iter().map(f64::sqrt).collect()
}

impl Form {
    fn built_in(spec: &OptimizerSpec, group: Option<&GroupSpec>) -> Self {
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
            OptimizerKind::Lamb | OptimizerKind::Lars | OptimizerKind::Rule => {
                unreachable!("these rules are texts")
            }
        };
        let decay = group.and_then(|it| it.weight_decay).unwrap_or(spec.weight_decay);
        let is_decoupled = match spec.kind {
            OptimizerKind::Adamw | OptimizerKind::Lion => true,
            OptimizerKind::Sgd
            | OptimizerKind::Momentum
            | OptimizerKind::Adagrad
            | OptimizerKind::Adadelta
            | OptimizerKind::Rmsprop
            | OptimizerKind::Adam
            | OptimizerKind::Nadam
            | OptimizerKind::Radam
            | OptimizerKind::Ftrl
            | OptimizerKind::Lamb
            | OptimizerKind::Lars
            | OptimizerKind::Rule => spec.decoupled.unwrap_or(false),
        };
        let decay = if is_decoupled { Decay::Parameters(decay) } else { Decay::Gradient(decay) };
        Self::BuiltIn { rule, decay }
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
