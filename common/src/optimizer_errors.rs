//! Checks the settings of the optimizer and the learning rate: invalid values, and values that the chosen
//! rule or schedule would silently ignore.

use serde::Serialize;

use crate::spec::{LearningRateSpec, OptimizerKind, OptimizerSpec};
use crate::spec_errors::SpecError;

/// Returns the errors of the optimizer's settings.
pub fn optimizer(spec: &OptimizerSpec) -> Vec<SpecError> {
    let mut section = Section::new("optimizer", "kind", name_of(spec.kind));
    section.check("momentum", spec.momentum, &["momentum", "rmsprop"], Range::Share);
    section.only("nesterov", spec.nesterov.is_some(), &["momentum"]);
    section.check("beta1", spec.beta1, &["adam", "adamw"], Range::Share);
    section.check("beta2", spec.beta2, &["adam", "adamw"], Range::Share);
    section.check("rho", spec.rho, &["adadelta", "rmsprop"], Range::Share);
    let dividing = ["adagrad", "adadelta", "rmsprop", "adam", "adamw"];
    section.check("epsilon", spec.epsilon, &dividing, Range::Positive);
    let summing = ["adagrad", "ftrl"];
    section.check("initial_accumulator", spec.initial_accumulator, &summing, Range::NotNegative);
    let power = spec.learning_rate_power;
    section.check("learning_rate_power", power, &["ftrl"], Range::Between(-1.0, 0.0));
    section.check("l1", spec.l1, &["ftrl"], Range::NotNegative);
    section.check("l2", spec.l2, &["ftrl"], Range::NotNegative);
    section.range("weight_decay", Some(spec.weight_decay), Range::NotNegative);
    section.range("clip_value", spec.clip_value, Range::Positive);
    section.range("clip_norm", spec.clip_norm, Range::Positive);
    if spec.kind == OptimizerKind::Momentum
        && spec.momentum == Some(0.0)
        && spec.nesterov == Some(true)
    {
        let text = "`optimizer.nesterov` needs `optimizer.momentum` above 0";
        section.error(&["momentum", "nesterov", "kind"], text);
    }
    section.errors
}

/// Returns the errors of the learning rate's settings.
pub fn learning_rate(spec: &LearningRateSpec) -> Vec<SpecError> {
    let mut section = Section::new("learning_rate", "schedule", name_of(spec.schedule));
    let (repeated, bounded) = (["step", "exponential"], ["polynomial", "cosine"]);
    section.range("base", Some(spec.base), Range::Positive);
    section.need_count("every_steps", spec.every_steps, &repeated);
    section.need("gamma", spec.gamma.is_some(), &repeated);
    section.check("gamma", spec.gamma, &repeated, Range::Factor);
    section.need_count("decay_steps", spec.decay_steps, &bounded);
    section.check("end", spec.end, &bounded, Range::NotNegative);
    section.check("power", spec.power, &["polynomial"], Range::Positive);
    if section.is_one_of(&bounded) && spec.end.is_some_and(|end| spec.base < end) {
        let text = "`learning_rate.end` must not exceed `learning_rate.base`";
        section.error(&["end", "base", "schedule"], text);
    }
    section.errors
}

/// Valid ranges of numbers; none includes infinity or NaN.
#[derive(Clone, Copy)]
enum Range {
    Positive,
    NotNegative,
    /// 0 ≤ … < 1.
    Share,
    /// 0 < … ≤ 1.
    Factor,
    Between(f32, f32),
}

impl Range {
    fn contains(self, value: f32) -> bool {
        match self {
            Self::Positive => value.is_finite() && 0.0 < value,
            Self::NotNegative => value.is_finite() && 0.0 <= value,
            Self::Share => (0.0..1.0).contains(&value),
            Self::Factor => 0.0 < value && value <= 1.0,
            Self::Between(least, most) => (least..=most).contains(&value),
        }
    }

    fn in_words(self) -> String {
        match self {
            Self::Positive => "be finite and above 0".to_owned(),
            Self::NotNegative => "be finite and at least 0".to_owned(),
            Self::Share => "lie in 0 ≤ … < 1".to_owned(),
            Self::Factor => "lie in 0 < … ≤ 1".to_owned(),
            Self::Between(least, most) => format!("lie in {least} ≤ … ≤ {most}"),
        }
    }
}

/// A section of the job file in which the value of one key decides which other keys apply.
struct Section {
    name: &'static str,
    /// The key whose value decides which other keys apply.
    chooser: &'static str,
    choice: String,
    errors: Vec<SpecError>,
}

impl Section {
    fn new(name: &'static str, chooser: &'static str, choice: String) -> Self {
        Self { name, chooser, choice, errors: Vec::new() }
    }

    fn is_one_of(&self, choices: &[&str]) -> bool {
        choices.contains(&self.choice.as_str())
    }

    fn error(&mut self, keys: &[&str], text: impl Into<String>) {
        let keys: Vec<String> = keys.iter().map(|key| format!("{}.{key}", self.name)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.errors.push(SpecError::new(&keys, text));
    }

    /// Checks that a number applies, and its range if it does.
    fn check(&mut self, key: &str, value: Option<f32>, users: &[&str], range: Range) {
        self.only(key, value.is_some(), users);
        if self.is_one_of(users) {
            self.range(key, value, range);
        }
    }

    fn range(&mut self, key: &str, value: Option<f32>, range: Range) {
        if let Some(value) = value.filter(|value| !range.contains(*value)) {
            let words = range.in_words();
            let text = format!("`{}.{key}` is {value}; it must {words}", self.name);
            self.error(&[key], text);
        }
    }

    /// Checks that a key is set only if it applies.
    fn only(&mut self, key: &str, is_given: bool, users: &[&str]) {
        if is_given && !self.is_one_of(users) {
            let users: Vec<String> = users.iter().map(|user| format!("`{user}`")).collect();
            let text = format!(
                "`{}.{key}` does not apply to `{}`; remove it or choose {}",
                self.name,
                self.choice,
                users.join(" or ")
            );
            self.error(&[key, self.chooser], text);
        }
    }

    /// Checks that a required key is set.
    fn need(&mut self, key: &str, is_given: bool, users: &[&str]) {
        if !is_given && self.is_one_of(users) {
            let text = format!("`{}` requires `{}.{key}`", self.choice, self.name);
            self.error(&[key, self.chooser], text);
        }
    }

    fn need_count(&mut self, key: &str, value: Option<u64>, users: &[&str]) {
        self.need(key, value.is_some(), users);
        self.only(key, value.is_some(), users);
        if value == Some(0) && self.is_one_of(users) {
            let text = format!("`{}.{key}` must be at least 1", self.name);
            self.error(&[key, self.chooser], text);
        }
    }
}

/// Returns the name of a choice in a job file.
fn name_of(choice: impl Serialize) -> String {
    let name = serde_json::to_value(choice).ok();
    name.and_then(|name| name.as_str().map(str::to_owned)).expect("a choice is a name")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn optimizer_errors(text: &str) -> Vec<String> {
        optimizer(&toml::from_str(text).unwrap()).into_iter().map(|error| error.text).collect()
    }

    fn rate_errors(text: &str) -> Vec<String> {
        learning_rate(&toml::from_str(text).unwrap()).into_iter().map(|error| error.text).collect()
    }

    #[test]
    fn an_omitted_setting_is_not_an_error() {
        let kinds = ["sgd", "momentum", "adagrad", "adadelta", "rmsprop", "adam", "adamw", "ftrl"];
        for kind in kinds {
            assert!(optimizer_errors(&format!("kind = \"{kind}\"")).is_empty());
        }
        assert!(rate_errors("").is_empty());
    }

    #[test]
    fn valid_settings_have_no_errors() {
        let sound = [
            "kind = \"momentum\"\nmomentum = 0.5\nnesterov = true\nweight_decay = 0.1",
            "kind = \"rmsprop\"\nmomentum = 0.5\nrho = 0.9\nepsilon = 1e-6\nclip_norm = 1.0",
            "kind = \"adamw\"\nbeta1 = 0.0\nbeta2 = 0.9\nepsilon = 1e-6\nclip_value = 0.5",
            "kind = \"ftrl\"\nl1 = 0.0\nl2 = 1.0\nlearning_rate_power = -1.0\n\
             initial_accumulator = 0.0",
        ];
        for text in sound {
            assert_eq!(optimizer_errors(text), [""; 0], "{text}");
        }
        let sound = [
            "schedule = \"step\"\nevery_steps = 1\ngamma = 1.0\nwarmup_steps = 10",
            "schedule = \"exponential\"\nevery_steps = 9\ngamma = 0.5",
            "schedule = \"cosine\"\ndecay_steps = 9",
            "schedule = \"polynomial\"\ndecay_steps = 9\nend = 0.001\npower = 2.0",
        ];
        for text in sound {
            assert_eq!(rate_errors(text), [""; 0], "{text}");
        }
    }

    #[test]
    fn a_key_that_the_rule_ignores_is_an_error_whatever_its_value() {
        let expected =
            ["`optimizer.beta1` does not apply to `sgd`; remove it or choose `adam` or `adamw`"];
        assert_eq!(optimizer_errors("beta1 = 0.9"), expected);
        assert_eq!(optimizer_errors("beta1 = 9.0"), expected);
        let keys = [
            "momentum = 0.5",
            "nesterov = false",
            "beta2 = 0.5",
            "rho = 0.5",
            "epsilon = 0.5",
            "initial_accumulator = 0.5",
            "learning_rate_power = -0.5",
            "l1 = 0.5",
            "l2 = 0.5",
        ];
        for key in keys {
            assert_eq!(optimizer_errors(key).len(), 1, "{key}");
        }
        for key in ["every_steps = 5", "gamma = 0.5", "decay_steps = 5", "end = 0.0", "power = 1.0"]
        {
            assert_eq!(rate_errors(key).len(), 1, "{key}");
        }
    }

    #[test]
    fn every_value_out_of_range_is_named_at_once() {
        let errors = optimizer_errors(
            "kind = \"adam\"\nbeta1 = 1.0\nbeta2 = -0.1\nepsilon = 0.0\nweight_decay = -1.0\n\
             clip_value = nan\nclip_norm = inf",
        );
        assert_eq!(errors.len(), 6);
        assert_eq!(errors[0], "`optimizer.beta1` is 1; it must lie in 0 ≤ … < 1");
        let errors = optimizer_errors("kind = \"ftrl\"\nlearning_rate_power = 0.5\nl1 = -1.0");
        assert_eq!(errors[0], "`optimizer.learning_rate_power` is 0.5; it must lie in -1 ≤ … ≤ 0");
        assert_eq!(errors.len(), 2);
        let text = "kind = \"momentum\"\nmomentum = 0.0\nnesterov = true";
        assert_eq!(optimizer_errors(text).len(), 1);
        let errors = rate_errors("schedule = \"step\"\nbase = 0.0\nevery_steps = 0\ngamma = 1.5");
        assert_eq!(errors.len(), 3);
        let errors = rate_errors("schedule = \"cosine\"\nbase = 0.1\ndecay_steps = 9\nend = 0.2");
        assert_eq!(errors, ["`learning_rate.end` must not exceed `learning_rate.base`"]);
    }

    #[test]
    fn a_schedule_reports_the_settings_that_it_lacks() {
        assert_eq!(
            rate_errors("schedule = \"cosine\""),
            ["`cosine` requires `learning_rate.decay_steps`"]
        );
        assert_eq!(rate_errors("schedule = \"exponential\"").len(), 2);
    }
}
