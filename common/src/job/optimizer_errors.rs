//! Checks the settings of the optimizer and the learning rate: invalid values, and values that the chosen
//! rule or schedule would silently ignore.

use serde::Serialize;

use crate::job::average::AverageSpec;
use crate::job::spec::{GroupSpec, LearningRateSpec, OptimizerKind, OptimizerSpec, Schedule};
use crate::job::spec_errors::SpecError;

/// Returns the errors of the optimizer's settings.
pub fn optimizer(spec: &OptimizerSpec) -> Vec<SpecError> {
    let mut section = Section::new("optimizer", "kind", name_of(spec.kind));
    let moments = ["adam", "adamw", "lamb", "nadam", "radam"];
    section.check("momentum", spec.momentum, &["momentum", "lars", "rmsprop"], Range::Share);
    section.only("nesterov", spec.nesterov.is_some(), &["momentum"]);
    section.check("beta1", spec.beta1, &[&moments[..], &["lion"]].concat(), Range::Share);
    section.check("beta2", spec.beta2, &[&moments[..], &["lion"]].concat(), Range::Share);
    section.check("rho", spec.rho, &["adadelta", "rmsprop"], Range::Share);
    let dividing = [&["adagrad", "adadelta", "rmsprop"], &moments[..]].concat();
    section.check("epsilon", spec.epsilon, &dividing, Range::Positive);
    let summing = ["adagrad", "ftrl", "rule"];
    section.check("initial_accumulator", spec.initial_accumulator, &summing, Range::NotNegative);
    let power = spec.learning_rate_power;
    section.check("learning_rate_power", power, &["ftrl"], Range::Between(-1.0, 0.0));
    section.check("l1", spec.l1, &["ftrl"], Range::NotNegative);
    section.check("l2", spec.l2, &["ftrl"], Range::NotNegative);
    section.check("momentum_decay", spec.momentum_decay, &["nadam"], Range::NotNegative);
    section.check("trust_coefficient", spec.trust_coefficient, &["lars"], Range::Positive);
    section.need("rule", spec.rule.is_some(), &["rule"]);
    section.only("rule", spec.rule.is_some(), &["rule"]);
    section.only("states", !spec.states.is_empty(), &["rule"]);
    section.only("constants", !spec.constants.is_empty(), &["rule"]);
    if let (Some(_), Some(Err(error))) = (&spec.rule, spec.program(None)) {
        section.error(&["rule", "kind"], format!("`optimizer.rule` is invalid: {error}"));
    }
    let coupled =
        ["sgd", "momentum", "adagrad", "adadelta", "rmsprop", "adam", "nadam", "radam", "rule"];
    section.only("decoupled", spec.decoupled.is_some(), &coupled);
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
    for group in &spec.groups {
        section.group(group);
    }
    section.errors
}

/// Returns the errors of the settings of the average of the parameters.
pub fn average(spec: &AverageSpec) -> Vec<SpecError> {
    let mut section = Section::new("average", "decay", String::new());
    if let Some(decay) = spec.decay.filter(|it| !(0.0 < *it && *it < 1.0)) {
        let text = format!("`average.decay` is {decay}; it must lie in 0 < … < 1");
        section.error(&["decay"], text);
    }
    section.range_of_count("every_steps", spec.every_steps);
    section.errors
}

/// Returns the errors of the learning rate's settings.
pub fn learning_rate(spec: &LearningRateSpec) -> Vec<SpecError> {
    let mut section = Section::new("learning_rate", "schedule", name_of(spec.schedule));
    let (repeated, bounded) = (["step", "exponential"], ["polynomial", "linear", "cosine"]);
    let ended = [&bounded[..], &["cosine-restarts"]].concat();
    let lasting = [&ended[..], &["one-cycle"]].concat();
    section.range("base", Some(spec.base), Range::Positive);
    let with_period = [&repeated[..], &["inverse-sqrt"]].concat();
    section.need("every_steps", spec.every_steps.is_some(), &repeated);
    section.count("every_steps", spec.every_steps, &with_period);
    section.need("gamma", spec.gamma.is_some(), &repeated);
    section.check("gamma", spec.gamma, &repeated, Range::Factor);
    section.need("decay_steps", spec.decay_steps.is_some(), &lasting);
    section.count("decay_steps", spec.decay_steps, &lasting);
    section.check("end", spec.end, &ended, Range::NotNegative);
    section.check("power", spec.power, &["polynomial"], Range::Positive);
    section.count("period_factor", spec.period_factor, &["cosine-restarts"]);
    section.check("pct_start", spec.pct_start, &["one-cycle"], Range::Share);
    section.check("div_factor", spec.div_factor, &["one-cycle"], Range::Positive);
    section.check("final_div_factor", spec.final_div_factor, &["one-cycle"], Range::Positive);
    section.need("points", !spec.points.is_empty(), &["table"]);
    section.only("points", !spec.points.is_empty(), &["table"]);
    section.only("interpolation", spec.interpolation.is_some(), &["table"]);
    if section.is_one_of(&ended) && spec.end.is_some_and(|end| spec.base < end) {
        let text = "`learning_rate.end` must not exceed `learning_rate.base`";
        section.error(&["end", "base", "schedule"], text);
    }
    if spec.schedule == Schedule::OneCycle && spec.warmup_steps != 0 {
        let text = "`one-cycle` has a warm-up of its own, `learning_rate.pct_start`; remove \
                    `learning_rate.warmup_steps`";
        section.error(&["warmup_steps", "schedule"], text);
    }
    section.points(spec);
    for factor in &spec.factors {
        section.factor(factor);
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

    /// Checks that a count applies, and is not 0.
    fn count(&mut self, key: &str, value: Option<u64>, users: &[&str]) {
        self.only(key, value.is_some(), users);
        if self.is_one_of(users) {
            self.range_of_count(key, value.unwrap_or(1));
        }
    }

    fn range_of_count(&mut self, key: &str, value: u64) {
        if value == 0 {
            let text = format!("`{}.{key}` must be at least 1", self.name);
            self.error(&[key], text);
        }
    }

    /// Checks a group of parameters.
    fn group(&mut self, group: &GroupSpec) {
        let GroupSpec { parameters, weight_decay, learning_rate, frozen, trust_ratio } = group;
        let has_trust_ratio = self.is_one_of(&["lamb", "lars"]);
        let mut error = |text: String| self.error(&["groups"], text);
        if parameters.is_empty() {
            error("a group of `optimizer.groups` names no parameters".to_owned());
            return;
        }
        let name = format!("the group of `{}` in `optimizer.groups`", parameters.join("`, `"));
        let numbers = [("weight_decay", *weight_decay), ("learning_rate", *learning_rate)];
        for (key, value) in numbers {
            if let Some(value) = value.filter(|value| !Range::NotNegative.contains(*value)) {
                let words = Range::NotNegative.in_words();
                error(format!("{name} has `{key}` = {value}; it must {words}"));
            }
            if *frozen && value.is_some() {
                error(format!("`{key}` does not apply to {name}, which is frozen; remove it"));
            }
        }
        if trust_ratio.is_some() && !has_trust_ratio {
            error(format!("`trust_ratio` of {name} applies to `lamb` and `lars` only; remove it"));
        }
        let is_set = weight_decay.is_some() || learning_rate.is_some() || trust_ratio.is_some();
        if !*frozen && !is_set {
            error(format!("{name} sets nothing; add `weight_decay`, `learning_rate` or `frozen`"));
        }
    }

    /// Checks the points of a table.
    fn points(&mut self, spec: &LearningRateSpec) {
        let default = LearningRateSpec::default().base;
        if spec.schedule == Schedule::Table && spec.base != default {
            let text =
                "`learning_rate.base` does not apply to `table`, whose points are rates; remove it";
            self.error(&["base", "schedule"], text);
        }
        if spec.points.windows(2).any(|pair| pair[1].0 <= pair[0].0) {
            self.error(&["points"], "the steps of `learning_rate.points` must ascend");
        }
        for (step, rate) in &spec.points {
            if !Range::NotNegative.contains(*rate) {
                let words = Range::NotNegative.in_words();
                let text =
                    format!("`learning_rate.points` has {rate} at step {step}; it must {words}");
                self.error(&["points"], text);
            }
        }
    }

    /// Checks one of the schedules that a learning rate is multiplied by.
    fn factor(&mut self, factor: &LearningRateSpec) {
        if factor.base != LearningRateSpec::default().base {
            let text =
                "`base` does not apply to `learning_rate.factors`, which begin at 1; remove it";
            self.error(&["factors"], text);
        }
        if !factor.factors.is_empty() {
            self.error(
                &["factors"],
                "`learning_rate.factors` have no factors of their own; add them to the list",
            );
        }
        let is_table = factor.schedule == Schedule::Table;
        let base = if is_table { LearningRateSpec::default().base } else { 1.0 };
        let spec = LearningRateSpec { base, factors: Vec::new(), ..factor.clone() };
        for error in learning_rate(&spec) {
            let text = error.text.replace("`learning_rate.", "`learning_rate.factors.");
            self.error(&["factors"], text);
        }
    }
}

/// Returns the name of a choice in a job file.
pub fn name_of(choice: impl Serialize) -> String {
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
        let kinds = [
            "sgd", "momentum", "adagrad", "adadelta", "rmsprop", "adam", "adamw", "ftrl", "lion",
            "nadam", "radam", "lamb", "lars",
        ];
        for kind in kinds {
            assert!(optimizer_errors(&format!("kind = \"{kind}\"")).is_empty());
        }
        assert!(rate_errors("").is_empty());
    }

    #[test]
    fn an_average_has_a_decay_below_one_and_an_interval() {
        let errors = |text: &str| -> Vec<String> {
            average(&toml::from_str(text).unwrap()).into_iter().map(|error| error.text).collect()
        };
        assert_eq!(errors(""), [""; 0]);
        assert_eq!(errors("decay = 0.999\nstart_step = 10\nevery_steps = 5"), [""; 0]);
        assert_eq!(
            errors("decay = 1.0\nevery_steps = 0"),
            [
                "`average.decay` is 1; it must lie in 0 < … < 1",
                "`average.every_steps` must be at least 1"
            ]
        );
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
        let expected = [
            "`optimizer.beta1` does not apply to `sgd`; remove it or choose `adam` or `adamw` or \
              `lamb` or `nadam` or `radam` or `lion`",
        ];
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
    fn a_group_that_sets_nothing_or_contradicts_itself_is_an_error() {
        let group = |keys: &str| optimizer_errors(&format!("groups = [{{ {keys} }}]"));
        assert_eq!(group("parameters = ['*.bias'], weight_decay = 0"), [""; 0]);
        assert_eq!(group("parameters = ['a', 'b'], frozen = true"), [""; 0]);
        for (keys, named) in [
            ("parameters = [], frozen = true", "names no parameters"),
            ("parameters = ['a']", "sets nothing"),
            (
                "parameters = ['a'], frozen = true, weight_decay = 1",
                "`weight_decay` does not apply",
            ),
            ("parameters = ['a'], learning_rate = -1", "must be finite and at least 0"),
        ] {
            let found = group(keys);
            assert!(found.len() == 1 && found[0].contains(named), "{keys}: {found:?}");
        }
    }

    #[test]
    fn a_table_of_rates_and_factors_are_checked() {
        for (keys, named) in [
            ("schedule = 'table'", "`table` requires `learning_rate.points`"),
            ("schedule = 'table'\npoints = [[1, 1], [1, 2]]", "must ascend"),
            ("schedule = 'table'\npoints = [[0, -1]]", "has -1 at step 0"),
            (
                "schedule = 'table'\nbase = 0.5\npoints = [[0, 1]]",
                "`learning_rate.base` does not apply",
            ),
            (
                "schedule = 'one-cycle'\ndecay_steps = 9\nwarmup_steps = 1",
                "has a warm-up of its own",
            ),
            (
                "factors = [{ schedule = 'step', every_steps = 1 }]",
                "requires `learning_rate.factors.gamma`",
            ),
            ("factors = [{ base = 0.5 }]", "`base` does not apply"),
        ] {
            let found = rate_errors(keys);
            assert!(found.len() == 1 && found[0].contains(named), "{keys}: {found:?}");
        }
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
