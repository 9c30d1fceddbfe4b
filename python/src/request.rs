//! What the trainer asks the Python program to compute.

use pyo3::prelude::*;
use steadfast_common::job::dataset::Records;
use steadfast_common::records::code::Modules;
use steadfast_trainer::own_loop::Reply;
use steadfast_trainer::{Evaluation, MicroBatch, ParamSpec, Parameters, Validity};

use crate::arrays::Write;

/// The properties of a model that was built.
#[derive(Debug)]
pub struct Built {
    pub parameters: Vec<ParamSpec>,
    pub metric: String,
    /// Names of the further metrics.
    pub further: Vec<String>,
    pub numerics: String,
    pub min_records: u32,
    /// Whether batches are transformed in processes of their own.
    pub prepares: bool,
    pub modules: Modules,
    /// The model itself.
    pub model: Py<PyAny>,
}

/// A computation, and where its result goes.
#[derive(Debug)]
pub enum Request {
    /// Builds the model of a job; `spec` is the `model` section of the job file as JSON.
    Build { spec: String, features: usize, reply: Reply<Built> },
    /// Returns initial values: `parameters`, filled.
    Initialize { seed: u64, parameters: Parameters, reply: Reply<Parameters> },
    /// Returns the ids of each table that a gradient of the records needs; without a key, an evaluation.
    Ids { records: Records, key: Option<MicroBatch>, reply: Reply<Vec<Vec<u64>>> },
    /// Begins to transform records of which a gradient is computed soon. The digest tells the records of one key apart.
    Prepare { records: Records, key: MicroBatch, digest: u64, reply: Reply<()> },
    /// Computes the gradient of the sum of losses.
    Gradient {
        parameters: Parameters,
        records: Records,
        key: MicroBatch,
        digest: u64,
        pending: Pending,
    },
    /// Sums loss and metric over the records.
    Evaluate { parameters: Parameters, records: Records, reply: Reply<Evaluation> },
}

/// A gradient that is being computed.
#[derive(Debug)]
pub struct Pending {
    /// Where the gradient goes.
    pub gradient: Parameters,
    pub write: Write,
    /// Whether the gradient still counts.
    pub validity: Validity,
    /// Takes the sum of losses, and `gradient` with its weight.
    pub reply: Reply<(f64, Parameters)>,
}
