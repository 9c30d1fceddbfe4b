//! The model of a Python program, as the trainer sees it.

use std::sync::Arc;

use steadfast_common::dataset::Records;
use steadfast_common::layout::Layout;
use steadfast_common::spec::ModelSpec;
use steadfast_trainer::{
    Batch, Evaluation, Metric, MicroBatch, Model, ModelError, ParamSpec, Parameters, fingerprint,
};

use crate::request::{Built, Request, Requests};

/// Sends every computation to the Python program.
#[derive(Debug)]
pub struct PythonModel {
    requests: Requests,
    built: Built,
    features: usize,
    metric: &'static str,
    nothing: Arc<Layout>,
}

impl PythonModel {
    /// Has the Python program build the model of `spec`, for records of `features` features.
    ///
    /// # Errors
    /// The error of the program.
    pub fn build(
        requests: Requests,
        spec: &ModelSpec,
        features: usize,
    ) -> Result<Self, ModelError> {
        let spec = serde_json::to_string(spec).expect("a spec is plain data");
        let built = requests.call(|reply| Request::Build { spec, features, reply })?;
        // A name that lives as long as the process, which builds few models.
        let metric = Box::leak(built.metric.clone().into_boxed_str());
        Ok(Self { requests, built, features, metric, nothing: Arc::new(Layout::new(Vec::new())) })
    }
}

impl Model for PythonModel {
    fn parameters(&self) -> Vec<ParamSpec> {
        self.built.parameters.clone()
    }

    fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        let empty = Parameters::zeros(self.nothing.clone());
        let wanted = std::mem::replace(parameters, empty);
        *parameters =
            self.requests.call(|reply| Request::Initialize { seed, parameters: wanted, reply })?;
        Ok(())
    }

    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        let empty = Parameters::zeros(self.nothing.clone());
        let sum = std::mem::replace(gradient, empty);
        let (parameters, records, key) = (parameters.clone(), records(batch), *key);
        let (loss_sum, sum) = self.requests.call(|reply| Request::Gradient {
            parameters,
            records,
            key,
            gradient: sum,
            reply,
        })?;
        *gradient = sum;
        if loss_sum.is_finite() { Ok(loss_sum) } else { Err(ModelError::NotFinite) }
    }

    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError> {
        let (parameters, records) = (parameters.clone(), records(batch));
        self.requests.call(|reply| Request::Evaluate { parameters, records, reply })
    }

    fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        match batch.columns.is_empty() {
            true => batch.check(self.features),
            // The types of columns are checked when they are read.
            false => Ok(()),
        }
    }

    fn metric(&self) -> Metric {
        Metric::mean(self.metric)
    }

    fn numerics(&self) -> String {
        format!("{}; {}", self.built.numerics, fingerprint())
    }
}

/// Copies the records: they move to NumPy.
fn records(batch: &Batch) -> Records {
    Records {
        features: batch.features.iter().copied().collect(),
        width: batch.features.ncols(),
        labels: batch.labels.to_vec(),
        columns: batch.columns.to_vec(),
    }
}
