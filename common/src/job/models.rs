//! The built-in models: what they compute with, and which settings they take.

use crate::job::spec::{Activation, ModelSpec};
use crate::job::spec_errors::SpecError;
use crate::tensor::table::WIDTH_MAX;

/// The kind of models that compute in Python.
pub const PYTHON: &str = "python";

/// A model that every trainer supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuiltIn {
    /// The value of `model.kind` that chooses the model.
    pub name: &'static str,
    pub inputs: Inputs,
    pub hidden: Hidden,
    pub classes: Classes,
}

/// The inputs of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inputs {
    Features,
    /// `dataset.categories`, beside features if there are some.
    Categories,
}

/// Whether a model has hidden layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    None,
    Required,
}

/// What `model.classes` may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Classes {
    /// The key must be absent: the model predicts a number.
    None,
    /// The key may be absent: the model then predicts a number.
    Optional,
    Required,
    /// The key is 2, or absent: the model then predicts a number.
    Two,
}

/// All built-in models, in the order in which they are listed for users.
pub const BUILT_IN: &[BuiltIn] = &[
    built_in("linear", Inputs::Features, Hidden::None, Classes::None),
    built_in("softmax", Inputs::Features, Hidden::None, Classes::Required),
    built_in("mlp", Inputs::Features, Hidden::Required, Classes::Optional),
    built_in("fm", Inputs::Categories, Hidden::None, Classes::Two),
    built_in("deepfm", Inputs::Categories, Hidden::Required, Classes::Two),
    built_in("wide-deep", Inputs::Categories, Hidden::Required, Classes::Two),
];

const fn built_in(name: &'static str, inputs: Inputs, hidden: Hidden, classes: Classes) -> BuiltIn {
    BuiltIn { name, inputs, hidden, classes }
}

impl BuiltIn {
    /// Returns the model with this name.
    pub fn of(name: &str) -> Option<&'static Self> {
        BUILT_IN.iter().find(|model| model.name == name)
    }
}

/// Returns the names of the models for which `filter` holds, as they are shown to users.
pub fn names(filter: impl Fn(&BuiltIn) -> bool) -> String {
    let names = BUILT_IN.iter().filter(|model| filter(model)).map(|model| model.name);
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

impl ModelSpec {
    /// Returns the errors of the settings of a model. For a model that is not built in, checks only `model.factors` and
    /// the ranges of numbers, because that model may give the settings any meaning.
    pub fn errors(&self) -> Vec<SpecError> {
        let mut found = Found { kind: &self.kind, errors: Vec::new() };
        found.range("hidden", !self.hidden.contains(&0), "has a layer of width 0");
        found.range("dropout", (0.0..1.0).contains(&self.dropout), "must lie in 0 ≤ … < 1");
        found.range("classes", self.classes.is_none_or(|it| 2 <= it), "must be at least 2");
        let model = BuiltIn::of(&self.kind);
        if model.is_none_or(|model| model.inputs == Inputs::Features) {
            found.inapplicable("factors", self.factors.is_some());
        }
        let are_weights = self.class_weights.iter().all(|it| it.is_finite() && 0.0 <= *it);
        found.range("class_weights", are_weights, "must be finite numbers from 0 on");
        match (model, self.classes) {
            (None, _) | (Some(_), None) => {
                found.inapplicable("class_weights", !self.class_weights.is_empty());
            }
            (Some(_), Some(classes)) => {
                let fits = [0, classes].contains(&self.class_weights.len());
                found.range("class_weights", fits, "must have a number for each class");
            }
        }
        if let Some(model) = model {
            let factors_max = WIDTH_MAX - 1;
            let is_within = self.factors.is_none_or(|it| (1..=factors_max).contains(&it));
            found.range("factors", is_within, &format!("must be from 1 to {factors_max}"));
            self.classes_errors(model, &mut found);
            self.hidden_errors(model, &mut found);
            found.inapplicable("options", !self.options.is_empty());
        }
        found.errors
    }

    fn classes_errors(&self, model: &BuiltIn, found: &mut Found<'_>) {
        match (model.classes, self.classes) {
            (Classes::None, classes) => found.inapplicable("classes", classes.is_some()),
            (Classes::Required, None) => found.required("classes", ""),
            (Classes::Two, Some(classes)) if 2 < classes => found.push(
                "classes",
                format!(
                    "`{}` tells two classes apart (`model.classes = 2`), or predicts a number",
                    self.kind
                ),
            ),
            (Classes::Optional | Classes::Required | Classes::Two, _) => {}
        }
    }

    fn hidden_errors(&self, model: &BuiltIn, found: &mut Found<'_>) {
        match model.hidden {
            Hidden::None => {
                found.inapplicable("hidden", !self.hidden.is_empty());
                found.inapplicable("activation", self.activation != Activation::default());
                found.inapplicable("dropout", self.dropout != 0.0);
            }
            Hidden::Required => {
                if self.hidden.is_empty() {
                    found.required("hidden", ", for example [64, 32]");
                }
            }
        }
    }
}

/// Collects the errors of the settings of a model.
struct Found<'a> {
    kind: &'a str,
    errors: Vec<SpecError>,
}

impl Found<'_> {
    fn push(&mut self, key: &str, text: String) {
        self.errors.push(SpecError::new(&[&format!("model.{key}"), "model.kind"], text));
    }

    fn inapplicable(&mut self, key: &str, is_given: bool) {
        if is_given {
            let kind = self.kind;
            self.push(key, format!("`model.{key}` does not apply to `{kind}`; remove it"));
        }
    }

    fn required(&mut self, key: &str, example: &str) {
        let kind = self.kind;
        self.push(key, format!("`{kind}` requires `model.{key}`{example}"));
    }

    fn range(&mut self, key: &str, is_within: bool, rule: &str) {
        if !is_within {
            self.push(key, format!("`model.{key}` {rule}"));
        }
    }
}
