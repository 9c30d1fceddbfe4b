//! A gradient to compute.

use std::sync::Mutex;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use steadfast_common::ids::{Lane, Pass};
use steadfast_trainer::{MicroBatch, ModelError, Parameters, Purpose, Random};

use crate::arrays;
use crate::error::{check_process, model_error};
use crate::request::Pending;

/// The records of a gradient, and the parameters at which to compute it.
#[pyclass(frozen, module = "steadfast")]
pub struct Work {
    /// The parameters: read-only float32 arrays by name.
    #[pyo3(get)]
    parameters: Py<PyDict>,
    /// The records, as the model's `transform` returned them: arrays by column.
    #[pyo3(get)]
    batch: Py<PyDict>,
    /// What the random numbers of this gradient depend on.
    #[pyo3(get)]
    key: Py<Key>,
    /// Number of records.
    #[pyo3(get)]
    records: usize,
    /// The process that joined the job.
    process: u32,
    /// Absent once answered. The mutex guards only this field.
    pending: Mutex<Option<Pending>>,
}

impl Work {
    pub fn new(
        py: Python<'_>,
        parameters: &Parameters,
        records: usize,
        batch: Bound<'_, PyDict>,
        key: Py<Key>,
        pending: Pending,
    ) -> PyResult<Self> {
        Ok(Self {
            parameters: arrays::parameters(py, parameters)?.unbind(),
            batch: batch.unbind(),
            key,
            records,
            process: std::process::id(),
            pending: Mutex::new(Some(pending)),
        })
    }

    /// Fails the work if it was not answered; returns whether it did.
    pub fn abandon(&self) -> bool {
        let Ok(Pending { reply, .. }) = self.take() else { return false };
        let message = "a work was neither pushed nor failed".to_owned();
        reply.send(Err(ModelError::Failed { message }));
        true
    }

    fn take(&self) -> PyResult<Pending> {
        let pending = self.pending.lock().expect("no holder panics").take();
        pending.ok_or_else(|| PyRuntimeError::new_err("this work was answered already"))
    }
}

#[pymethods]
impl Work {
    /// Pushes the gradient of the *sum* of the records' losses. Returns whether it still counts: not if
    /// the job was rolled back meanwhile, or the trainer's lease was lost. A gradient that does not count has
    /// no effect; its records are computed again.
    ///
    /// `gradients` has one array per parameter, by name; `None` or a missing name counts as zero. `weight` is what the
    /// records count together; by default their number.
    #[pyo3(signature = (gradients, *, loss_sum, weight=None))]
    fn push(
        &self,
        py: Python<'_>,
        gradients: &Bound<'_, PyAny>,
        loss_sum: f64,
        weight: Option<f64>,
    ) -> PyResult<bool> {
        check_process(py, self.process)?;
        let Pending { mut gradient, write, validity, reply } = self.take()?;
        let given = dict_of(gradients);
        match given.and_then(|it| arrays::write_to(py, &it, &mut gradient, write)) {
            Ok(()) => {
                if let Some(weight) = weight {
                    gradient.set_weight(weight);
                }
                let counts = validity.holds();
                reply.send(Ok((loss_sum, gradient)));
                Ok(counts)
            }
            Err(error) => {
                reply.send(Err(model_error(py, &error)));
                Err(error)
            }
        }
    }

    /// Ends the trainer with this reason: the gradient cannot be computed.
    fn fail(&self, reason: String) -> PyResult<()> {
        self.take()?.reply.send(Err(ModelError::Failed { message: reason }));
        Ok(())
    }

    fn __repr__(&self) -> String {
        let key = self.key.get().0;
        format!("<Work: {} records, step {} of pass {}>", self.records, key.step, key.pass.0)
    }
}

/// Returns a mapping as a dict.
pub fn dict_of<'py>(mapping: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    match mapping.cast::<PyDict>() {
        Ok(dict) => Ok(dict.clone()),
        Err(_) => Ok(mapping.py().get_type::<PyDict>().call1((mapping,))?.cast_into()?),
    }
}

/// What the random numbers of a gradient depend on: equal on every trainer that computes it.
#[pyclass(frozen, module = "steadfast")]
pub struct Key(pub MicroBatch);

#[pymethods]
impl Key {
    #[new]
    fn new(job_seed: u64, pass_number: u32, step: u64, lane: u32) -> Self {
        Self(MicroBatch { seed: job_seed, pass: Pass(pass_number), step, lane: Lane(lane) })
    }

    /// Lets a key be sent to another process.
    fn __getnewargs__(&self) -> (u64, u32, u64, u32) {
        let MicroBatch { seed, pass, step, lane } = self.0;
        (seed, pass.0, step, lane.0)
    }

    /// Returns a seed from all parts of the key, from 0 to 2**63 - 1.
    #[getter]
    fn seed(&self) -> u64 {
        let pass_and_lane = u64::from(self.0.pass.0) << 32 | u64::from(self.0.lane.0);
        Random::keyed(self.0.seed, Purpose::Framework, pass_and_lane, self.0.step, 0).integer() >> 1
    }

    /// Returns the seed of the job.
    #[getter]
    fn job_seed(&self) -> u64 {
        self.0.seed
    }

    /// Returns the number of the pass over the data, from 0.
    #[getter]
    fn pass_number(&self) -> u32 {
        self.0.pass.0
    }

    /// Returns the number of the step within the pass, from 0.
    #[getter]
    fn step(&self) -> u64 {
        self.0.step
    }

    /// Returns the number of the lane; 0 in asynchronous jobs.
    #[getter]
    fn lane(&self) -> u32 {
        self.0.lane.0
    }

    fn __repr__(&self) -> String {
        let MicroBatch { seed, pass, step, lane } = self.0;
        format!("Key(job_seed={seed}, pass_number={}, step={step}, lane={})", pass.0, lane.0)
    }
}
