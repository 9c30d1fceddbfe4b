//! Groups of parameters: settings of the optimizer for parameters by their names.

use crate::job::spec::{GroupSpec, OptimizerSpec};
use crate::job::wildcard::wildcard;
use crate::tensor::layout::{ParamSpec, UpdateRule};

impl OptimizerSpec {
    /// Returns the group of a parameter; `None` if it has the settings of the optimizer.
    pub fn group_of(&self, parameter: &str) -> Option<&GroupSpec> {
        self.groups.iter().find(|group| group.has(parameter))
    }

    /// Marks the parameters of a model that are frozen. Tables, and buffers that are averaged, have no group.
    ///
    /// # Errors
    /// A message, if a name or pattern matches no parameter, or a parameter is in two groups, or in one of the model
    /// too.
    pub fn grouped(&self, mut parameters: Vec<ParamSpec>) -> Result<Vec<ParamSpec>, String> {
        let is_grouped =
            |it: &&mut ParamSpec| it.table.is_none() && it.update != UpdateRule::AddMean;
        let mut unused: Vec<&String> = self.groups.iter().flat_map(|it| &it.parameters).collect();
        for parameter in parameters.iter_mut().filter(is_grouped) {
            let name = &parameter.name;
            for (key, value) in [
                ("weight_decay", parameter.weight_decay),
                ("learning_rate", parameter.learning_rate),
            ] {
                if let Some(value) = value.filter(|it| !(it.is_finite() && 0.0 <= *it)) {
                    return Err(format!(
                        "the model sets `{key}` = {value} for the parameter `{name}`; it must be finite and at least 0"
                    ));
                }
            }
            unused.retain(|pattern| !wildcard(pattern).matches(name));
            let mut groups = self.groups.iter().filter(|group| group.has(name));
            let (first, second) = (groups.next(), groups.next());
            if let (Some(first), Some(second)) = (first, second) {
                return Err(format!(
                    "the parameter `{name}` is in two groups of `optimizer.groups`: that of `{}` and that of `{}`",
                    first.parameters.join("`, `"),
                    second.parameters.join("`, `"),
                ));
            }
            if let Some(first) = first.filter(|_| parameter.is_grouped()) {
                return Err(format!(
                    "the parameter `{name}` is in a group of the model and in that of `{}` in `optimizer.groups`; remove \
                     it from one of them",
                    first.parameters.join("`, `")
                ));
            }
            if first.is_some_and(|group| group.frozen) {
                parameter.update = UpdateRule::Frozen;
            }
        }
        let Some(pattern) = unused.first() else { return Ok(parameters) };
        let names: Vec<&str> = parameters.iter().map(|it| it.name.as_str()).take(SHOWN).collect();
        let more = if SHOWN < parameters.len() { ", …" } else { "" };
        Err(format!(
            "`{pattern}` in `optimizer.groups` matches no parameter that the optimizer updates; the model has `{}`{more}",
            names.join("`, `")
        ))
    }
}

/// Number of parameters that a message names.
const SHOWN: usize = 20;

impl GroupSpec {
    fn has(&self, parameter: &str) -> bool {
        self.parameters.iter().any(|pattern| wildcard(pattern).matches(parameter))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::table::Initial;

    fn parameters() -> Vec<ParamSpec> {
        vec![
            ParamSpec::new("body.weight", &[2]),
            ParamSpec::new("body.bias", &[1]),
            ParamSpec::new("head.weight", &[2]),
            ParamSpec::averaged("body.mean", &[1]),
            ParamSpec::table("body.rows", 2, Initial::Zeros),
        ]
    }

    fn grouped(groups: &str) -> Result<Vec<UpdateRule>, String> {
        let optimizer: OptimizerSpec = toml::from_str(&format!("groups = [{groups}]")).unwrap();
        let parameters = optimizer.grouped(parameters())?;
        Ok(parameters.into_iter().map(|it| it.update).collect())
    }

    #[test]
    fn frozen_parameters_keep_their_values_and_buffers_are_in_no_group() {
        use UpdateRule::{AddMean, Frozen, Optimizer};
        let frozen = grouped("{ parameters = ['body.*'], frozen = true }").unwrap();
        assert_eq!(frozen, [Frozen, Frozen, Optimizer, AddMean, Optimizer]);
        let slower = grouped("{ parameters = ['*'], learning_rate = 0.1 }").unwrap();
        assert_eq!(slower, [Optimizer, Optimizer, Optimizer, AddMean, Optimizer]);
    }

    #[test]
    fn a_pattern_that_matches_nothing_or_twice_is_an_error() {
        let error = grouped("{ parameters = ['*.bias', 'tail.*'], frozen = true }").unwrap_err();
        assert!(
            error.starts_with("`tail.*` in `optimizer.groups` matches no parameter"),
            "{error}"
        );
        assert!(error.ends_with("`body.mean`, `body.rows`"), "{error}");
        let buffer = grouped("{ parameters = ['*.mean'], frozen = true }").unwrap_err();
        assert!(buffer.starts_with("`*.mean`"), "{buffer}");
        let twice = grouped(
            "{ parameters = ['*.bias'], frozen = true }, { parameters = ['body.*'], weight_decay = 0 }",
        );
        let error = twice.unwrap_err();
        assert!(error.starts_with("the parameter `body.bias` is in two groups"), "{error}");
    }

    #[test]
    fn a_parameter_is_in_a_group_of_the_model_or_of_the_job() {
        let optimizer: OptimizerSpec =
            toml::from_str("groups = [{ parameters = ['*.bias'], weight_decay = 0 }]").unwrap();
        let decayed = |name| ParamSpec { weight_decay: Some(0.5), ..ParamSpec::new(name, &[1]) };
        let fine = vec![decayed("weight"), ParamSpec::new("a.bias", &[1])];
        assert_eq!(optimizer.grouped(fine.clone()).unwrap(), fine);
        let error = optimizer.grouped(vec![decayed("a.bias")]).unwrap_err();
        assert!(
            error.starts_with(
                "the parameter `a.bias` is in a group of the model and in that of `*.bias`"
            ),
            "{error}"
        );
    }
}
