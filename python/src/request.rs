//! What the trainer asks the Python program to compute.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use steadfast_common::code::Modules;
use steadfast_common::dataset::Records;
use steadfast_trainer::{Evaluation, MicroBatch, ModelError, ParamSpec, Parameters, Validity};

use crate::arrays::Write;

/// The properties of a model that was built.
#[derive(Debug)]
pub struct Built {
    pub parameters: Vec<ParamSpec>,
    pub metric: String,
    pub numerics: String,
    pub min_records: u32,
    pub modules: Modules,
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
    /// Computes the gradient of the sum of losses.
    Gradient { parameters: Parameters, records: Records, key: MicroBatch, pending: Pending },
    /// Sums loss and metric over the records.
    Evaluate { parameters: Parameters, records: Records, reply: Reply<Evaluation> },
}

/// A gradient that is being computed.
#[derive(Debug)]
pub struct Pending {
    /// Where it goes.
    pub gradient: Parameters,
    pub write: Write,
    /// Whether it still counts.
    pub validity: Validity,
    /// Takes the sum of losses, and `gradient`.
    pub reply: Reply<(f64, Parameters)>,
}

/// Where the result of a request goes.
#[derive(Debug)]
pub struct Reply<T>(SyncSender<Result<T, ModelError>>);

impl<T> Reply<T> {
    /// Answers the request. An answer for which the trainer does not wait any more is dropped.
    pub fn send(self, answer: Result<T, ModelError>) {
        let _ = self.0.send(answer);
    }
}

/// Sends requests to the Python program.
#[derive(Clone, Debug)]
pub struct Requests(SyncSender<Request>);

impl Requests {
    /// Creates a channel. It has no buffer: once the receiver is dropped, a request fails at once.
    pub fn channel() -> (Self, Receiver<Request>) {
        let (tx, rx) = sync_channel(0);
        (Self(tx), rx)
    }

    /// Sends a request, and blocks until it is answered.
    ///
    /// # Errors
    /// The error of the model, or that the Python program has stopped to answer.
    pub fn call<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, ModelError> {
        let stopped = || ModelError::Failed { message: "the Python program has ended".to_owned() };
        let (tx, rx) = sync_channel(1);
        self.0.send(request(Reply(tx))).map_err(|_| stopped())?;
        rx.recv().map_err(|_| stopped())?
    }
}
