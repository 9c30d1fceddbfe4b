//! The model of a Python program, as the trainer sees it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use pyo3::prelude::*;
use steadfast_common::job::columns::{Column, Values};
use steadfast_common::job::spec::ModelSpec;
use steadfast_common::records::code::Modules;
use steadfast_common::tensor::layout::Layout;
use steadfast_trainer::own_loop::Requests;
use steadfast_trainer::{
    Batch, Evaluation, Metric, MicroBatch, Model, ModelError, ParamSpec, Parameters, Validity,
    fingerprint,
};

use crate::arrays::Write;
use crate::error::model_error;
use crate::request::{Built, Pending, Request};

/// Sends every computation to the Python program.
#[derive(Debug)]
pub struct PythonModel {
    requests: Requests<Request>,
    built: Built,
    features: usize,
    metric: &'static str,
    further: Vec<&'static str>,
    nothing: Arc<Layout>,
    /// The validity of the generation that the trainer is in. The mutex guards only this field.
    validity: Mutex<Validity>,
}

impl PythonModel {
    /// Has the Python program build the model of `spec`, for records of `features` features.
    ///
    /// # Errors
    /// The error of the program.
    pub fn build(
        requests: Requests<Request>,
        spec: &ModelSpec,
        features: usize,
    ) -> Result<Self, ModelError> {
        let spec = serde_json::to_string(spec).expect("a spec is plain data");
        let built = requests.call(|reply| Request::Build { spec, features, reply })?;
        // Names that live as long as the process, which builds few models.
        let leaked = |name: &String| &*Box::leak(name.clone().into_boxed_str());
        let (metric, further) = (leaked(&built.metric), built.further.iter().map(leaked).collect());
        let nothing = Arc::new(Layout::new(Vec::new()));
        let validity = Mutex::new(Validity::new(|| true));
        Ok(Self { requests, built, features, metric, further, nothing, validity })
    }

    fn compute(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
        write: Write,
    ) -> Result<f64, ModelError> {
        let empty = Parameters::zeros(self.nothing.clone());
        let memory = std::mem::replace(gradient, empty);
        let (parameters, records, key) = (parameters.clone(), batch.to_records(), *key);
        let digest = if self.built.prepares { digest(batch) } else { 0 };
        let validity = self.validity.lock().expect("no holder panics").clone();
        let (loss_sum, written) = self.requests.call(|reply| {
            let pending = Pending { gradient: memory, write, validity, reply };
            Request::Gradient { parameters, records, key, digest, pending }
        })?;
        *gradient = written;
        if loss_sum.is_finite() { Ok(loss_sum) } else { Err(ModelError::NotFinite) }
    }
}

impl Model for PythonModel {
    fn parameters(&self) -> Vec<ParamSpec> {
        self.built.parameters.clone()
    }

    fn ids(&self, batch: &Batch, key: Option<&MicroBatch>) -> Result<Vec<Vec<u64>>, ModelError> {
        let (records, key) = (batch.to_records(), key.copied());
        self.requests.call(|reply| Request::Ids { records, key, reply })
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
        self.compute(parameters, batch, key, gradient, Write::Add)
    }

    fn fresh_gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        self.compute(parameters, batch, key, gradient, Write::Replace)
    }

    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError> {
        let (parameters, records) = (parameters.clone(), batch.to_records());
        self.requests.call(|reply| Request::Evaluate { parameters, records, reply })
    }

    fn prepares(&self) -> bool {
        self.built.prepares
    }

    fn prepare(&self, batch: &Batch, key: &MicroBatch) -> Result<(), ModelError> {
        let (records, key, digest) = (batch.to_records(), *key, digest(batch));
        self.requests.call(|reply| Request::Prepare { records, key, digest, reply })
    }

    fn min_records(&self) -> u32 {
        self.built.min_records
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

    fn further_metrics(&self) -> Vec<Metric> {
        self.further.iter().copied().map(Metric::mean).collect()
    }

    fn numerics(&self) -> String {
        format!("{}; {}", self.built.numerics, fingerprint())
    }

    fn modules(&self) -> Modules {
        self.built.modules.clone()
    }

    fn fixed(&self) -> Result<Option<Vec<u8>>, ModelError> {
        // Not a request: the thread of the program may wait for the file that this becomes a part of.
        Python::attach(|py| {
            let file = self.built.model.bind(py).call_method0("fixed");
            file.and_then(|it| it.extract()).map_err(|error| model_error(py, &error))
        })
    }

    fn begin_generation(&self, validity: Validity) {
        *self.validity.lock().expect("no holder panics") = validity;
    }
}

/// Returns a number that differs for other records, to tell them apart in this process.
fn digest(batch: &Batch<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    let numbers = batch.features.iter().chain(batch.labels).chain(batch.weights);
    numbers.for_each(|it| hasher.write_u32(it.to_bits()));
    for Column { name, values, offsets, weights, .. } in batch.columns {
        (name, offsets).hash(&mut hasher);
        weights.iter().for_each(|it| hasher.write_u32(it.to_bits()));
        match values {
            Values::Bool(values) => values.hash(&mut hasher),
            Values::Uint8(values) | Values::Text(values) | Values::Bytes(values) => {
                values.hash(&mut hasher);
            }
            Values::Int64(values) => values.hash(&mut hasher),
            Values::Uint64(values) => values.hash(&mut hasher),
            Values::Float32(values) => values.iter().for_each(|it| hasher.write_u32(it.to_bits())),
            Values::Float64(values) => values.iter().for_each(|it| hasher.write_u64(it.to_bits())),
        }
    }
    hasher.finish()
}
