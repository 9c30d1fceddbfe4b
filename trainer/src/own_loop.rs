//! A trainer for a program with a training loop of its own: it yields the gradients to compute.
//!
//! ```no_run
//! use steadfast_trainer::own_loop;
//! # use steadfast_trainer::own_loop::ModelSpec;
//! # use steadfast_trainer::{Inputs, Model, ModelError, Registry};
//! # fn build(spec: &ModelSpec, inputs: Inputs) -> Result<Box<dyn Model>, ModelError> {
//! #     Registry::built_in().build(spec, inputs)
//! # }
//!
//! fn main() -> std::process::ExitCode {
//!     own_loop::main("my-model", build, |trainer| {
//!         while let Some(work) = trainer.next_work()? {
//!             let mut gradient = work.zeros();
//!             // Of the records in `work.batch()`, at `work.parameters()`:
//!             gradient.vector_mut(0)[0] += 1.0;
//!             work.push(gradient, 1.0);
//!         }
//!         trainer.save_model("model.safetensors")?;
//!         Ok(())
//!     })
//! }
//! ```

use std::cell::RefCell;
use std::fmt;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use steadfast_common::job::dataset::Records;
pub use steadfast_common::job::spec::ModelSpec;
use steadfast_common::records::code::Modules;
use steadfast_host::random;
use steadfast_host::task::in_place;
pub use steadfast_process::Failure;
use steadfast_process::{LogIdentity, Shutdown, init_logging};
use steadfast_trainer_core::{
    Batch, Evaluation, Inputs, Metric, MicroBatch, Model, ModelError, ParamSpec, Parameters,
    Registry, Validity,
};
use tokio::runtime::{Builder, Runtime};
use uuid::Uuid;

use crate::current::{Current, Snapshot};
use crate::hang_watch;
use crate::run::{Args, run_process};

/// Sends requests to the program whose loop computes.
#[derive(Debug)]
pub struct Requests<R>(SyncSender<R>);

impl<R> Clone for Requests<R> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<R> Requests<R> {
    /// Creates a channel. It has no buffer: once the receiver is dropped, a request fails at once.
    pub fn channel() -> (Self, Receiver<R>) {
        let (tx, rx) = sync_channel(0);
        (Self(tx), rx)
    }

    /// Sends a request, and blocks until it is answered.
    ///
    /// # Errors
    /// The error of the model, or that the program does not answer any more.
    pub fn call<T>(&self, request: impl FnOnce(Reply<T>) -> R) -> Result<T, ModelError> {
        let stopped = || ModelError::Failed { message: "the program's loop has ended".to_owned() };
        let (tx, rx) = sync_channel(1);
        self.0.send(request(Reply(tx))).map_err(|_| stopped())?;
        // What the program did before it took the request may have taken long.
        hang_watch::restart();
        rx.recv().map_err(|_| stopped())?
    }
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

/// A trainer in a thread of this process.
#[derive(Debug)]
pub struct Running {
    shutdown: Shutdown,
    current: Current,
    /// `None` once joined. The mutex guards only this field.
    thread: Mutex<Option<JoinHandle<Result<(), Failure>>>>,
}

impl Running {
    /// Starts a trainer with the models in `registry`, which leaves the job when `shutdown` is triggered. `log` starts
    /// logging with the settings of a process with this id.
    ///
    /// # Errors
    /// If threads cannot be started.
    pub fn start(
        args: Args,
        registry: Registry,
        shutdown: Shutdown,
        log: impl FnOnce(&Args, Uuid) -> Result<LogIdentity, Failure> + Send + 'static,
    ) -> Result<Self, Failure> {
        let current = Current::default();
        let runtime = runtime(&mut Builder::new_multi_thread())?;
        let running = {
            let (shutdown, current) = (shutdown.clone(), current.clone());
            async move {
                let id = random::uuid();
                let identity = log(&args, id)?;
                run_process(args, registry, id, identity, shutdown, &current).await
            }
        };
        let run = move || {
            let outcome = runtime.block_on(running);
            // Calls in flight are dropped; waiting for those that compute in the program would never end.
            runtime.shutdown_background();
            outcome
        };
        let thread = std::thread::Builder::new().name("steadfast".to_owned()).spawn(run);
        let thread = thread.map_err(|error| Failure::io("cannot start a thread", &error))?;
        Ok(Self { shutdown, current, thread: Mutex::new(Some(thread)) })
    }

    /// Asks the trainer to leave the job: work in progress is finished or reassigned, nothing is lost.
    pub fn leave(&self) {
        self.shutdown.trigger();
    }

    pub fn has_ended(&self) -> bool {
        let thread = self.thread.lock().expect("no holder panics");
        thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the end of the trainer; returns its outcome, once.
    ///
    /// # Errors
    /// Errors that require user action.
    pub fn join(&self) -> Result<(), Failure> {
        let thread = self.thread.lock().expect("no holder panics").take();
        let Some(thread) = thread else { return Ok(()) };
        let panicked = |_| Err(Failure::internal("the trainer panicked; its log says where"));
        thread.join().unwrap_or_else(panicked)
    }

    /// Returns the access to the parameters.
    pub fn current(&self) -> &Current {
        &self.current
    }
}

/// A program may drop it in the middle of its loop.
impl Drop for Running {
    fn drop(&mut self) {
        self.shutdown.trigger();
    }
}

fn runtime(builder: &mut Builder) -> Result<Runtime, Failure> {
    let runtime = builder.enable_all().build();
    runtime.map_err(|error| Failure::io("cannot start threads", &error))
}

/// Runs a call of the program to its end.
///
/// # Errors
/// If the call fails, or threads cannot be started.
pub fn wait_for<T>(call: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    runtime(Builder::new_multi_thread().worker_threads(1))?.block_on(call)
}

/// A trainer that runs beside a loop in Rust.
///
/// The loop computes gradients; the model describes the parameters, sets initial values, and evaluates. What happens
/// to the job (a process is lost, a lane moves, the job is rolled back) is dealt with inside: a push that the job
/// does not need any more has no effect. Dropping the trainer leaves the job; other trainers continue its work.
pub struct Trainer {
    running: Running,
    requests: Receiver<Request>,
    /// Sets the initial values in place of the model.
    initial: RefCell<Option<Box<Values>>>,
}

type Values = dyn Fn(&mut Parameters);

/// A request of the trainer, which the loop answers.
enum Request {
    Work(Work),
    Initialize {
        model: Arc<dyn Model>,
        seed: u64,
        parameters: Parameters,
        reply: Reply<Parameters>,
    },
}

impl fmt::Debug for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer").field("running", &self.running).finish_non_exhaustive()
    }
}

impl Trainer {
    /// Starts a trainer that takes part in the job of `args`, whose job file has `model.kind = kind`, until `shutdown`
    /// is triggered.
    ///
    /// # Errors
    /// If threads cannot be started. Other errors are those of [`Trainer::next_work`].
    pub fn start(
        args: Args,
        kind: &str,
        build: impl Fn(&ModelSpec, Inputs) -> Result<Box<dyn Model>, ModelError> + Send + Sync + 'static,
        shutdown: Shutdown,
    ) -> Result<Self, Failure> {
        steadfast_process::keep_freed_memory();
        let (sender, requests) = Requests::channel();
        let mut registry = Registry::built_in();
        registry.register(kind, move |spec, inputs| {
            let (model, requests) = (Arc::from(build(spec, inputs)?), sender.clone());
            let validity = Mutex::new(Validity::new(|| true));
            Ok(Box::new(InLoop { model, requests, validity }))
        });
        let log = |args: &Args, id| init_logging("trainer", &args.common.job, id, &args.common.log);
        let running = Running::start(args, registry, shutdown, log)?;
        Ok(Self { running, requests, initial: RefCell::default() })
    }

    /// Waits for the next gradient to compute; `None` once the job is over, or the trainer has left it.
    ///
    /// # Errors
    /// Errors that require user action, such as those of settings; and a work that was dropped without an answer.
    pub fn next_work(&self) -> Result<Option<Work>, Failure> {
        loop {
            match self.requests.recv() {
                Ok(Request::Work(work)) => return Ok(Some(work)),
                Ok(Request::Initialize { model, seed, mut parameters, reply }) => {
                    let initialized = model.initialize(seed, &mut parameters);
                    reply.send(initialized.map(|()| {
                        if let Some(change) = self.initial.borrow().as_ref() {
                            change(&mut parameters);
                        }
                        parameters
                    }));
                }
                Err(_) => return self.running.join().map(|()| None),
            }
        }
    }

    /// Changes the values with which training begins, which are those of [`Model::initialize`] before. This has an effect
    /// only in a job that has not begun, and only if the master elects this trainer as the initializer: all trainers of
    /// a job set the same values. Call it before the first [`Trainer::next_work`].
    pub fn set_parameters(&self, change: impl Fn(&mut Parameters) + 'static) {
        *self.initial.borrow_mut() = Some(Box::new(change));
    }

    /// Pulls the parameters of the job, as [`Current::pull`] does.
    ///
    /// # Errors
    /// See [`Current::pull`].
    pub fn get_parameters(&self) -> Result<Snapshot, Failure> {
        wait_for(self.running.current().pull())
    }

    /// Writes the parameters of the job as a model file to a path or a URL, as [`Snapshot::save`] does; returns their
    /// SHA-256.
    ///
    /// # Errors
    /// See [`Snapshot::save`] and [`Trainer::get_parameters`].
    pub fn save_model(&self, place: &str) -> Result<String, Failure> {
        wait_for(async { self.running.current().pull().await?.save(place).await })
    }

    /// Asks the trainer to leave the job: [`Trainer::next_work`] returns `None` once the work in progress is pushed.
    pub fn leave(&self) {
        self.running.leave();
    }

    /// Leaves the job at once. Work that is still requested is computed by other trainers.
    ///
    /// # Errors
    /// As [`Trainer::next_work`].
    pub fn close(self) -> Result<(), Failure> {
        self.leave();
        // Without an answer, the computation fails.
        let is_cut_short = 0 < self.requests.iter().map(drop).count();
        match self.running.join() {
            Err(_) if is_cut_short => Ok(()),
            outcome => outcome,
        }
    }
}

/// Runs a program whose loop is `program`: a trainer with the settings of the command line, which leaves the job on
/// SIGTERM. Returns the exit code, as every process of the job does.
pub fn main(
    kind: &str,
    build: impl Fn(&ModelSpec, Inputs) -> Result<Box<dyn Model>, ModelError> + Send + Sync + 'static,
    program: impl FnOnce(&Trainer) -> Result<(), Failure>,
) -> ExitCode {
    let args: Args = steadfast_process::parse();
    steadfast_process::run("steadfast-trainer", async {
        let trainer = Trainer::start(args, kind, build, Shutdown::install()?)?;
        in_place(|| program(&trainer).and_then(|()| trainer.close()))
    })
}

/// A gradient to compute. If it is dropped without an answer, the trainer ends with an error.
pub struct Work {
    model: Arc<dyn Model>,
    parameters: Parameters,
    records: Records,
    key: MicroBatch,
    validity: Validity,
    reply: Reply<(f64, Parameters)>,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Work {
    /// Returns the model that the trainer has built.
    pub fn model(&self) -> &dyn Model {
        self.model.as_ref()
    }

    /// Returns the parameters at which to compute the gradient.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Returns the records: a lane's micro-batch of a step, or a mini-batch of a task in an asynchronous job.
    pub fn batch(&self) -> Batch<'_> {
        Batch::from(&self.records)
    }

    /// Returns the key of the random numbers of the gradient.
    pub fn key(&self) -> &MicroBatch {
        &self.key
    }

    /// Returns a gradient of zeros.
    pub fn zeros(&self) -> Parameters {
        let tables = self.parameters.tables().iter().map(|table| table.zeros()).collect();
        Parameters::zeros(self.parameters.layout().clone()).with_tables(tables)
    }

    /// Pushes the gradient of the *sum* of the records' losses. Returns whether it still counts: not if the job was
    /// rolled back meanwhile, or the trainer's lease was lost. A gradient that does not count has no effect; its
    /// records are computed again. The learning rate is that of the job file for all trainers, so none is given.
    ///
    /// # Panics
    /// If `gradient` has another layout than [`Work::zeros`].
    pub fn push(self, gradient: Parameters, loss_sum: f64) -> bool {
        assert_eq!(gradient.layout(), self.parameters.layout(), "the gradient has another layout");
        let counts = self.validity.holds();
        self.reply.send(Ok((loss_sum, gradient)));
        counts
    }

    /// Ends the trainer with the reason why the gradient cannot be computed.
    pub fn fail(self, reason: impl Into<String>) {
        self.reply.send(Err(ModelError::Failed { message: reason.into() }));
    }
}

/// A model whose gradients the loop computes.
struct InLoop {
    model: Arc<dyn Model>,
    requests: Requests<Request>,
    /// Tells whether the generation that the trainer is in goes on. The mutex guards only this field.
    validity: Mutex<Validity>,
}

impl Model for InLoop {
    fn parameters(&self) -> Vec<ParamSpec> {
        self.model.parameters()
    }

    fn ids(&self, batch: &Batch, key: Option<&MicroBatch>) -> Result<Vec<Vec<u64>>, ModelError> {
        self.model.ids(batch, key)
    }

    fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        let wanted = parameters.clone();
        *parameters = self.requests.call(|reply| {
            let model = self.model.clone();
            Request::Initialize { model, seed, parameters: wanted, reply }
        })?;
        Ok(())
    }

    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        let mut computed = Parameters::zeros(parameters.layout().clone());
        let loss_sum = self.fresh_gradient(parameters, batch, key, &mut computed)?;
        gradient.add(&computed);
        if let Some(weight) = computed.take_weight() {
            gradient.set_weight(weight);
        }
        Ok(loss_sum)
    }

    fn fresh_gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        let validity = self.validity.lock().expect("no holder panics").clone();
        let (parameters, records, key) = (parameters.clone(), batch.to_records(), *key);
        let model = self.model.clone();
        let work = |reply| Request::Work(Work { model, parameters, records, key, validity, reply });
        let (loss_sum, computed) = self.requests.call(work)?;
        *gradient = computed;
        if loss_sum.is_finite() { Ok(loss_sum) } else { Err(ModelError::NotFinite) }
    }

    fn min_records(&self) -> u32 {
        self.model.min_records()
    }

    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError> {
        self.model.evaluate(parameters, batch)
    }

    fn check(&self, batch: &Batch) -> Result<(), ModelError> {
        self.model.check(batch)
    }

    fn metric(&self) -> Metric {
        self.model.metric()
    }

    fn further_metrics(&self) -> Vec<Metric> {
        self.model.further_metrics()
    }

    fn fixed(&self) -> Result<Option<Vec<u8>>, ModelError> {
        self.model.fixed()
    }

    fn numerics(&self) -> String {
        self.model.numerics()
    }

    fn modules(&self) -> Modules {
        self.model.modules()
    }

    fn prepares(&self) -> bool {
        self.model.prepares()
    }

    fn prepare(&self, batch: &Batch, key: &MicroBatch) -> Result<(), ModelError> {
        self.model.prepare(batch, key)
    }

    fn begin_generation(&self, validity: Validity) {
        self.model.begin_generation(validity.clone());
        *self.validity.lock().expect("no holder panics") = validity;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use steadfast_common::tensor::layout::Layout;

    /// S004-36: the values are awaited, so that the loop may set them after the trainer has started.
    #[test]
    fn values_that_the_loop_sets_take_the_place_of_the_models() {
        let spec: ModelSpec = serde_json::from_str(r#"{"kind": "linear"}"#).unwrap();
        let inputs = Inputs { features: 2, columns: 0 };
        let model: Arc<dyn Model> = Arc::from(Registry::built_in().build(&spec, inputs).unwrap());
        let layout = Arc::new(Layout::new(model.parameters()));
        let (requests, receiver) = Requests::channel();
        let validity = Mutex::new(Validity::new(|| true));
        let in_loop = InLoop { model, requests, validity };
        let initial = std::thread::spawn(move || {
            let mut parameters = Parameters::zeros(layout);
            in_loop.initialize(1, &mut parameters).map(|()| parameters)
        });
        let running = Running {
            shutdown: Shutdown::manual(),
            current: Current::default(),
            thread: Mutex::default(),
        };
        let trainer = Trainer { running, requests: receiver, initial: RefCell::default() };
        trainer.set_parameters(|parameters| parameters.values_mut().fill(7.0));
        assert!(trainer.next_work().unwrap().is_none());
        assert_eq!(initial.join().unwrap().unwrap().values(), [7.0; 3]);
    }
}
