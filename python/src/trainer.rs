//! A trainer that runs beside a Python program.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use steadfast_common::job::dataset::Records;
use steadfast_common::tensor::layout::UpdateRule;
use steadfast_process::{Failure, Shutdown};
use steadfast_trainer::own_loop::{Requests, Running, wait_for};
use steadfast_trainer::{
    Args, Current, Evaluation, FurtherSum, Initial, ModelError, ParamSpec, Parameters, Ranking,
    Registry, WeightedSum, Weights,
};

use crate::arrays::{self, Write};
use crate::error::{check_process, exception, model_error};
use crate::logs;
use crate::model::PythonModel;
use crate::request::{Built, Request};
use crate::settings::settings;
use crate::work::{Key, Work, dict_of};

/// Longest time in which a signal of the user goes unnoticed.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// The trainer's part of a Python program: an iterator of the gradients to compute.
#[pyclass(frozen, module = "steadfast._native")]
pub struct Trainer {
    /// The process that joined the job.
    process: u32,
    /// Builds the model: called with the `model` section of the job file and the number of features.
    build: Py<PyAny>,
    /// The model that was built last. The mutexes guard only their fields.
    model: Mutex<Option<Py<PyAny>>>,
    /// The initial values, if they are not the model's.
    initial: Mutex<Option<Py<PyAny>>>,
    requests: Mutex<Receiver<Request>>,
    running: Running,
    /// The work that was returned last.
    last: Mutex<Option<Py<Work>>>,
}

#[pymethods]
impl Trainer {
    /// Starts a trainer with these command-line arguments, which override `STEADFAST_…` variables. Logs go to
    /// `emit`, called with logger, level and message, or to stderr.
    #[new]
    #[pyo3(signature = (args, build, emit=None))]
    fn new(
        py: Python<'_>,
        args: Vec<String>,
        build: Py<PyAny>,
        emit: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let args: Args = settings(py, "steadfast-trainer", args)?;
        keep_freed_memory();
        let (requests, receiver) = Requests::channel();
        let mut registry = Registry::built_in();
        registry.register("python", move |spec, inputs| {
            Ok(Box::new(PythonModel::build(requests.clone(), spec, inputs.features)?))
        });
        registry.on_hang = Some(print_stacks);
        let log =
            |args: &Args, id| logs::start("trainer", &args.common.job, id, &args.common.log, emit);
        let running = Running::start(args, registry, Shutdown::manual(), log)
            .map_err(|it| exception(py, &it))?;
        Ok(Self {
            process: std::process::id(),
            build,
            model: Mutex::new(None),
            initial: Mutex::new(None),
            requests: Mutex::new(receiver),
            running,
            last: Mutex::new(None),
        })
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Waits for the next gradient to compute. Meanwhile answers the trainer's other requests. A work that
    /// was not answered has failed.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<Work>>> {
        check_process(py, self.process)?;
        let last = self.last.lock().expect("no holder panics").take();
        if let Some(work) = last {
            work.get().abandon();
        }
        while let Some(request) = self.receive(py)? {
            if let Some(work) = self.answer(py, request)? {
                let work = Py::new(py, work)?;
                *self.last.lock().expect("no holder panics") = Some(work.clone_ref(py));
                return Ok(Some(work));
            }
        }
        self.join(py)?;
        Ok(None)
    }

    /// Leaves the job, and waits until the trainer has ended. Work that it still requests is not computed:
    /// its lanes and tasks are reassigned.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(py, self.process)?;
        self.leave();
        let last = self.last.lock().expect("no holder panics").take();
        let mut is_cut_short = last.is_some_and(|work| work.get().abandon());
        while let Some(request) = self.receive(py)? {
            // Without an answer, the computation fails.
            is_cut_short |= self.answer(py, request)?.is_some();
        }
        match self.join(py) {
            Err(_) if is_cut_short => Ok(()),
            outcome => outcome,
        }
    }

    /// Asks the trainer to leave the job: work in progress is finished or reassigned, nothing is lost.
    fn leave(&self) {
        self.running.leave();
    }

    /// Sets the values with which training begins, in place of the model's.
    fn set_parameters(&self, values: Py<PyAny>) {
        *self.initial.lock().expect("no holder panics") = Some(values);
    }

    /// Pulls the parameters of the job: read-only arrays by name.
    fn get_parameters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let current = self.current(py)?;
        let snapshot = call(py, async move { current.pull().await })?;
        arrays::parameters(py, &snapshot.parameters)
    }

    /// Writes the parameters of the job as a model file; returns their SHA-256.
    fn save_model(&self, py: Python<'_>, place: String) -> PyResult<String> {
        let current = self.current(py)?;
        call(py, async move { current.pull().await?.save(&place).await })
    }
}

impl Trainer {
    /// Waits for a request, without the GIL; `None` once the trainer has ended.
    fn receive(&self, py: Python<'_>) -> PyResult<Option<Request>> {
        loop {
            let received = py.detach(|| {
                self.requests.lock().expect("no holder panics").recv_timeout(SIGNALS_EVERY)
            });
            match received {
                Ok(request) => return Ok(Some(request)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            py.check_signals()?;
            if self.running.has_ended() {
                return Ok(None);
            }
        }
    }

    /// Returns the outcome of the trainer, once.
    fn join(&self, py: Python<'_>) -> PyResult<()> {
        let outcome = py.detach(|| self.running.join());
        outcome.map_err(|failure| exception(py, &failure))
    }

    fn current(&self, py: Python<'_>) -> PyResult<Current> {
        check_process(py, self.process)?;
        Ok(self.running.current().clone())
    }

    /// Answers a request, or returns the work that it consists of.
    fn answer(&self, py: Python<'_>, request: Request) -> PyResult<Option<Work>> {
        match request {
            Request::Gradient { parameters, records, key, digest, pending } => {
                let (count, key) = (records.len(), Py::new(py, Key(key))?);
                let batch = self.prepared(py, records, &key, digest);
                return match reported(py, batch)? {
                    Ok(batch) => Work::new(py, &parameters, count, batch, key, pending).map(Some),
                    Err(error) => {
                        pending.reply.send(Err(error));
                        Ok(None)
                    }
                };
            }
            Request::Build { spec, features, reply } => {
                reply.send(reported(py, self.build(py, &spec, features))?);
            }
            Request::Ids { records, key, reply } => {
                let key = key.map(|key| Py::new(py, Key(key))).transpose()?;
                reply.send(reported(py, self.ids(py, records, key.as_ref()))?);
            }
            Request::Prepare { records, key, digest, reply } => {
                let begun = Py::new(py, Key(key)).and_then(|key| {
                    let given = (self.model(py)?, arrays::batch(py, records)?, key, digest);
                    py.import("steadfast._ahead")?.call_method1("prepare", given)?;
                    Ok(())
                });
                reply.send(reported(py, begun)?);
            }
            Request::Initialize { seed, parameters, reply } => {
                reply.send(reported(py, self.initialize(py, seed, parameters))?);
            }
            Request::Evaluate { parameters, records, reply } => {
                let count = records.len() as u64;
                let sums = self.model(py).and_then(|model| {
                    let parameters = arrays::parameters(py, &parameters)?;
                    let given = (model, parameters, self.transformed(py, records, None)?, count);
                    let evaluated =
                        py.import("steadfast.model")?.call_method1("evaluated", given)?;
                    Ok(sums_of(count, evaluated.extract()?))
                });
                reply.send(reported(py, sums)?);
            }
        }
        Ok(None)
    }

    /// Returns the columns of the records, changed by the model's `transform`; without a key, for evaluation.
    /// Before that, sets the random states that it and the computation may draw from.
    fn transformed<'py>(
        &self,
        py: Python<'py>,
        records: Records,
        key: Option<&Py<Key>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let count = records.len();
        let batch = arrays::batch(py, records)?;
        let model = self.model(py)?;
        let transformed = py
            .import("steadfast.model")?
            .call_method1("transformed", (model, batch, key, count))?;
        dict_of(&transformed)
    }

    /// Returns the same, with what was prepared of it.
    fn prepared<'py>(
        &self,
        py: Python<'py>,
        records: Records,
        key: &Py<Key>,
        digest: u64,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (model, count) = (self.model(py)?, records.len());
        let given = (model, arrays::batch(py, records)?, key, digest, count);
        dict_of(&py.import("steadfast._ahead")?.call_method1("transformed", given)?)
    }

    fn model<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let model = self.model.lock().expect("no holder panics");
        let model = model.as_ref().map(|model| model.bind(py).clone());
        model.ok_or_else(|| PyRuntimeError::new_err("the model is not built yet"))
    }

    fn build(&self, py: Python<'_>, spec: &str, features: usize) -> PyResult<Built> {
        let spec = py.import("json")?.call_method1("loads", (spec,))?;
        let model = self.build.bind(py).call1((&spec, features))?;
        let shapes = model.call_method0("parameters")?;
        let averaged = model.call_method0("averaged")?;
        let groups = dict_of(&model.call_method0("settings")?)?;
        let mut parameters = Vec::new();
        for (name, shape) in shapes_of(&shapes)? {
            parameters.push(match averaged.contains(&name)? {
                true => ParamSpec::averaged(name, &shape),
                false => match groups.get_item(&name)? {
                    None => ParamSpec::new(name, &shape),
                    Some(settings) => with_settings(ParamSpec::new(name, &shape), &settings)?,
                },
            });
        }
        for table in model.call_method0("tables")?.call_method0("items")?.try_iter()? {
            let (name, table) = table?.extract()?;
            parameters.push(table_of(name, &table)?);
        }
        let metric = model.getattr("metric_name")?.extract()?;
        let further = py.import("steadfast.model")?.call_method1("further_metrics", (&model,))?;
        let further = further.extract()?;
        let min_records = model.getattr("min_records")?.extract()?;
        let prepares =
            py.import("steadfast._ahead")?.call_method1("prepares", (&model,))?.extract()?;
        let identity = py.import("steadfast.model")?.getattr("identity")?;
        let numerics = identity.call1((&model,))?.extract()?;
        let modules = py.import("steadfast._sources")?.call_method1("modules", (&spec, &model))?;
        let modules = modules.extract()?;
        let model = model.unbind();
        *self.model.lock().expect("no holder panics") = Some(model.clone_ref(py));
        Ok(Built { parameters, metric, further, numerics, min_records, prepares, modules, model })
    }

    /// Asks the model for the row ids of its tables for a batch of records; returns them in the order of the tables.
    fn ids(
        &self,
        py: Python<'_>,
        records: Records,
        key: Option<&Py<Key>>,
    ) -> PyResult<Vec<Vec<u64>>> {
        let (model, batch) = (self.model(py)?, self.transformed(py, records, key)?);
        let ids = py.import("steadfast.tables")?.call_method1("ids_of", (model, batch))?;
        let vector = |ids: PyResult<Bound<'_, PyAny>>| {
            Ok(ids?.cast_into::<PyArray1<u64>>()?.readonly().as_slice()?.to_vec())
        };
        ids.try_iter()?.map(vector).collect()
    }

    fn initialize(
        &self,
        py: Python<'_>,
        seed: u64,
        mut parameters: Parameters,
    ) -> PyResult<Parameters> {
        let given = self.initial.lock().expect("no holder panics");
        let given = given.as_ref().map(|values| values.bind(py).clone());
        let values = self.model(py)?.call_method1("initialize", (seed,))?;
        arrays::write_to(py, &dict_of(&values)?, &mut parameters, Write::Replace)?;
        if let Some(given) = given {
            arrays::write_to(py, &dict_of(&given)?, &mut parameters, Write::Overwrite)?;
        }
        Ok(parameters)
    }
}

/// A sum with its weight, or the scores, labels and weights of ranked records.
#[derive(FromPyObject)]
enum Summed<'py> {
    Weighted((f64, f64)),
    Ranked((PyReadonlyArray1<'py, f32>, PyReadonlyArray1<'py, bool>, PyReadonlyArray1<'py, f64>)),
}

impl Summed<'_> {
    fn into_sum(self) -> FurtherSum {
        let (scores, labels, weights) = match self {
            Self::Weighted((sum, weight)) => {
                return FurtherSum::Weighted(WeightedSum { sum, weight });
            }
            Self::Ranked(it) => it,
        };
        let mut ranking = Ranking::default();
        let labels_and_weights = labels.as_array().into_iter().zip(weights.as_array());
        for (score, (label, weight)) in scores.as_array().into_iter().zip(labels_and_weights) {
            ranking.add(*score, *label, *weight);
        }
        FurtherSum::Ranking(ranking)
    }
}

/// Returns an evaluation of sums: those of the loss, of the metric, and of the further metrics.
fn sums_of(records: u64, sums: Vec<Summed<'_>>) -> Evaluation {
    let mut sums = sums.into_iter();
    let (loss, metric) = match (sums.next(), sums.next()) {
        (Some(Summed::Weighted(loss)), Some(Summed::Weighted(metric))) => (loss, metric),
        _ => return Evaluation { records, ..Evaluation::default() },
    };
    Evaluation {
        records,
        loss_sum: loss.0,
        metric_sum: metric.0,
        weights: Some(Weights { loss: loss.1, metric: metric.1 }),
        further: sums.map(Summed::into_sum).collect(),
    }
}

/// Runs a call to its end, without the GIL; a signal of the user ends the wait.
fn call<T: Send + 'static>(
    py: Python<'_>,
    call: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> PyResult<T> {
    let (tx, mut rx) = sync_channel(1);
    let thread = std::thread::Builder::new().name("steadfast-call".to_owned());
    thread.spawn(move || tx.send(wait_for(call)))?;
    loop {
        let rx = &mut rx;
        match py.detach(move || rx.recv_timeout(SIGNALS_EVERY)) {
            Ok(outcome) => return outcome.map_err(|failure| exception(py, &failure)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the call panicked"));
            }
        }
    }
}

/// Describes a parameter to which the model gives settings of its own.
fn with_settings(spec: ParamSpec, settings: &Bound<'_, PyAny>) -> PyResult<ParamSpec> {
    let settings = dict_of(settings)?;
    let number = |key: &str| settings.get_item(key)?.map(|value| value.extract()).transpose();
    let frozen: Option<bool> = settings.get_item("frozen")?.map(|it| it.extract()).transpose()?;
    let update = match frozen {
        Some(true) => UpdateRule::Frozen,
        Some(false) | None => spec.update,
    };
    let (weight_decay, learning_rate) = (number("weight_decay")?, number("learning_rate")?);
    Ok(ParamSpec { weight_decay, learning_rate, update, ..spec })
}

/// Describes a table that the model has declared.
fn table_of(name: String, table: &Bound<'_, PyAny>) -> PyResult<ParamSpec> {
    let dim = table.getattr("dim")?.extract()?;
    let (kind, scale): (String, f32) = table.getattr("initial")?.extract()?;
    let initial = match kind.as_str() {
        "normal" => Initial::Normal(scale),
        "uniform" => Initial::Uniform(scale),
        _ => Initial::Zeros,
    };
    Ok(ParamSpec::table(name, dim, initial))
}

/// Returns the items of a dict from names to shapes.
fn shapes_of(shapes: &Bound<'_, PyAny>) -> PyResult<Vec<(String, Vec<usize>)>> {
    let expected =
        |_| PyTypeError::new_err("`parameters()` must return a dict from names to shapes");
    let items = shapes.call_method0("items").map_err(expected)?;
    items.try_iter()?.map(|item| item?.extract().map_err(expected)).collect()
}

/// Separates errors of the model from requests to end the program, such as Ctrl-C.
fn reported<T>(py: Python<'_>, outcome: PyResult<T>) -> PyResult<Result<T, ModelError>> {
    match outcome {
        Ok(value) => Ok(Ok(value)),
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyException>(py) => {
            Ok(Err(model_error(py, &error)))
        }
        Err(error) => Err(error),
    }
}

/// Sends this process SIGUSR1, for which Python has a handler that prints the stacks of all threads, or the program has
/// one of its own.
fn print_stacks() {
    // SAFETY: the action is plain data, into which the first call writes; the second one calls a handler that is there.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let is_known = libc::sigaction(libc::SIGUSR1, std::ptr::null(), &raw mut action) == 0;
        if is_known && ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction) {
            libc::raise(libc::SIGUSR1);
        }
    }
}

/// Makes the allocator keep freed memory of any size. PyTorch allocates a gradient in each step, and glibc maps
/// and clears the memory of a large one anew each time, which takes a fifth of a backward pass.
fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets two parameters of the allocator, which later calls of it read.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}
