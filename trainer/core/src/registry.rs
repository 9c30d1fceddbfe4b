//! The models known to a trainer, by their name in job files.

use std::collections::BTreeMap;

use steadfast_common::spec::ModelSpec;

use crate::deep_fm::DeepFm;
use crate::error::ModelError;
use crate::factorization_machine::FactorizationMachine;
use crate::model::Model;
use crate::network::Network;
use crate::wide_and_deep::WideAndDeep;

/// What the records of a dataset have, beside a label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inputs {
    /// Numbers: the width of [`Batch::features`](crate::Batch::features).
    pub features: usize,
    /// Columns in [`Batch::columns`](crate::Batch::columns); for built-in models, those of categories.
    pub columns: usize,
}

/// Builds a model from the `model` section of the job file and the inputs of a record.
pub type ModelFactory =
    Box<dyn Fn(&ModelSpec, Inputs) -> Result<Box<dyn Model>, ModelError> + Send + Sync>;

/// Factories of models by name.
pub struct Registry {
    factories: BTreeMap<String, ModelFactory>,
}

impl Registry {
    /// Creates a registry of `linear`, `softmax`, `mlp`, `fm`, `deepfm` and `wide-deep`.
    pub fn built_in() -> Self {
        let mut registry = Self { factories: BTreeMap::new() };
        registry.register("linear", |spec, it| Ok(Box::new(Network::linear(spec, it.features)?)));
        registry.register("softmax", |spec, it| Ok(Box::new(Network::softmax(spec, it.features)?)));
        registry.register("mlp", |spec, it| Ok(Box::new(Network::mlp(spec, it.features)?)));
        let fm = FactorizationMachine::new;
        registry.register("fm", move |spec, it| Ok(Box::new(fm(spec, it.features)?)));
        registry.register("deepfm", |spec, it| Ok(Box::new(DeepFm::new(spec, it)?)));
        registry.register("wide-deep", |spec, it| Ok(Box::new(WideAndDeep::new(spec, it)?)));
        registry
    }

    /// Adds a model, replacing an existing one of the same name. All trainers of a job must register the same
    /// model under the same name.
    pub fn register(
        &mut self,
        name: impl Into<String>,
        factory: impl Fn(&ModelSpec, Inputs) -> Result<Box<dyn Model>, ModelError>
        + Send
        + Sync
        + 'static,
    ) -> &mut Self {
        self.factories.insert(name.into(), Box::new(factory));
        self
    }

    /// Returns the names of all models, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.factories.keys().map(String::as_str)
    }

    /// Builds the model named by `spec`, for records with these inputs.
    pub fn build(&self, spec: &ModelSpec, inputs: Inputs) -> Result<Box<dyn Model>, ModelError> {
        match self.factories.get(&spec.kind) {
            Some(factory) => factory(spec, inputs),
            None => Err(ModelError::UnknownModel {
                kind: spec.kind.clone(),
                known: self.names().map(String::from).collect(),
            }),
        }
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::built_in()
    }
}
