//! The models known to a trainer, by their name in job files.

use std::collections::BTreeMap;

use steadfast_common::job::spec::ModelSpec;

use crate::deep_fm::DeepFm;
use crate::error::ModelError;
use crate::factorization_machine::FactorizationMachine;
use crate::model::Model;
use crate::network::Network;
use crate::record_search::TrialStandIn;
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
    /// Stands in for the processes that look for a record which ends them, in a simulation.
    pub trial: Option<TrialStandIn>,
    /// Called before the process ends because its model hangs; it may say where.
    pub on_hang: Option<fn()>,
}

impl Registry {
    /// Creates a registry of the [built-in models](steadfast_common::job::models::BUILT_IN).
    pub fn built_in() -> Self {
        let mut registry = Self { factories: BTreeMap::new(), trial: None, on_hang: None };
        for name in ["linear", "softmax", "mlp"] {
            registry.checked(name, |spec, it| Box::new(Network::new(spec, it.features)));
        }
        registry.checked("fm", |spec, it| Box::new(FactorizationMachine::new(spec, it.features)));
        registry.checked("deepfm", |spec, it| Box::new(DeepFm::new(spec, it)));
        registry.checked("wide-deep", |spec, it| Box::new(WideAndDeep::new(spec, it)));
        registry
    }

    /// Adds a model that is built from settings without errors.
    fn checked(&mut self, name: &str, build: fn(&ModelSpec, Inputs) -> Box<dyn Model>) {
        self.register(name, move |spec, inputs| {
            let errors: Vec<String> = spec.errors().into_iter().map(|error| error.text).collect();
            if errors.is_empty() {
                Ok(build(spec, inputs))
            } else {
                Err(ModelError::BadSpec { errors })
            }
        });
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use steadfast_common::job::models::BUILT_IN;

    use super::*;

    #[test]
    fn a_trainer_has_each_model_that_a_job_file_may_name() {
        let named: BTreeSet<&str> = BUILT_IN.iter().map(|model| model.name).collect();
        assert_eq!(named, Registry::built_in().names().collect());
    }
}
