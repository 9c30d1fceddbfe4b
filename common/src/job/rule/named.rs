//! The update rules of optimizers that are texts: that of the job file, and those that use norms of parameters.

use std::collections::BTreeMap;

use crate::job::rule::program::{Decay, Program};
use crate::job::spec::{GroupSpec, OptimizerKind, OptimizerSpec};

/// Algorithm 2 of You et al. 2020, with the identity as its φ. Where a norm is 0, the step is that of Adam.
const LAMB: &str = "
m = b1*m + (1 - b1)*g
v = b2*v + (1 - b2)*g**2
u = m/(1 - b1**t) / (sqrt(v/(1 - b2**t)) + eps) + wd*p
size = norm(p)
whole = norm(u)
p -= lr * where(trust*size*whole > 0, size/whole, 1) * u
";

/// Algorithm 1 of You, Gitman and Ginsburg 2017. Where a norm is 0, the step is that of momentum.
const LARS: &str = "
size = norm(p)
whole = norm(g) + wd*size
local = where(trust*size*whole > 0, coefficient*size/whole, 1)
velocity = momentum*velocity + lr*local*(g + wd*p)
p -= velocity
";

impl OptimizerSpec {
    /// Compiles the update rule of a group of parameters, or of those in no group. Returns `None` for a rule that is not
    /// a text.
    ///
    /// # Errors
    /// A message that names what is wrong with the rule.
    pub fn program(&self, group: Option<&GroupSpec>) -> Option<Result<Program, String>> {
        let trust = f64::from(u8::from(group.and_then(|it| it.trust_ratio).unwrap_or(true)));
        let number = |given: Option<f32>, default: f64| given.map_or(default, f64::from);
        let constants = |all: &[(&str, f64)]| {
            all.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
        };
        let (text, states, constants): (&str, Vec<String>, BTreeMap<String, f64>) = match self.kind
        {
            OptimizerKind::Lamb => (
                LAMB,
                vec!["m".to_owned(), "v".to_owned()],
                constants(&[
                    ("b1", number(self.beta1, 0.9)),
                    ("b2", number(self.beta2, 0.999)),
                    ("eps", number(self.epsilon, 1e-6)),
                    ("trust", trust),
                ]),
            ),
            OptimizerKind::Lars => (
                LARS,
                vec!["velocity".to_owned()],
                constants(&[
                    ("momentum", number(self.momentum, 0.9)),
                    ("coefficient", number(self.trust_coefficient, 1e-3)),
                    ("trust", trust),
                ]),
            ),
            OptimizerKind::Rule => (
                self.rule.as_deref().unwrap_or_default(),
                self.states.clone(),
                self.constants.clone(),
            ),
            OptimizerKind::Sgd
            | OptimizerKind::Momentum
            | OptimizerKind::Adagrad
            | OptimizerKind::Adadelta
            | OptimizerKind::Rmsprop
            | OptimizerKind::Adam
            | OptimizerKind::Adamw
            | OptimizerKind::Ftrl
            | OptimizerKind::Lion
            | OptimizerKind::Nadam
            | OptimizerKind::Radam => return None,
        };
        let decay = group.and_then(|it| it.weight_decay).unwrap_or(self.weight_decay);
        let decay = match self.decoupled.unwrap_or(false) {
            true => Decay::Parameters(decay),
            false => Decay::Gradient(decay),
        };
        Some(Program::compile(text, &states, &constants, decay))
    }

    /// Returns whether an update needs all values of a parameter, so that a parameter may not lie on several slots.
    pub fn needs_whole_parameters(&self) -> bool {
        self.program(None).is_some_and(|program| program.is_ok_and(|it| it.has_norms()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_with_norms_need_whole_parameters() {
        let needs =
            |text: &str| toml::from_str::<OptimizerSpec>(text).unwrap().needs_whole_parameters();
        assert!(needs("kind = 'lamb'") && needs("kind = 'lars'"));
        assert!(needs("kind = 'rule'\nrule = 'p -= lr*g/norm(g)'"));
        assert!(!needs("kind = 'rule'\nrule = 'p -= lr*g'") && !needs("kind = 'adam'"));
    }

    #[test]
    fn a_group_has_a_weight_decay_and_a_trust_ratio_of_its_own() {
        let spec: OptimizerSpec = toml::from_str("kind = 'lamb'\nweight_decay = 0.5").unwrap();
        let group =
            GroupSpec { trust_ratio: Some(false), weight_decay: Some(0.0), ..GroupSpec::default() };
        let (whole, own) = (spec.program(None).unwrap(), spec.program(Some(&group)).unwrap());
        assert_ne!(whole.unwrap(), own.unwrap());
    }
}
