//! A coordinator of closures in a Python program.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prost::Message;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use steadfast_coordinator::{
    ClosureError, ClosureFailure, ClosureId, Coordinator as Native, CoordinatorArgs, Outcome,
    ScheduleError, Scheduled, Table, WorkerIndex, WorkerValue,
};
use steadfast_host::random;
use steadfast_process::{AdminServer, Failure};
use steadfast_trainer::Snapshot;
use tokio::runtime::Runtime;

use crate::arrays;
use crate::error::{check_process, exception, raise};
use crate::logs;
use crate::own_process::OwnProcess;
use crate::program_parameters::{ProgramParameters, declared};
use crate::settings::settings;
use crate::values::{self, References};

/// The maximum delay until a signal of the user is handled.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// State shared by the coordinator and its values.
struct Inner {
    /// Absent without an admin port, and once the coordinator is closed.
    admin: OwnProcess<Mutex<Option<AdminServer>>>,
    /// Absent without parameters.
    parameters: Option<OwnProcess<ProgramParameters>>,
    // Dropped before the runtime.
    native: OwnProcess<Native>,
    runtime: OwnProcess<Runtime>,
}

/// Runs functions on workers; see `steadfast.Coordinator`.
#[pyclass(frozen, module = "steadfast._native")]
pub struct Coordinator(Arc<Inner>);

/// The result of a closure, wherever it is; see `steadfast.RemoteValue`.
#[pyclass(frozen, module = "steadfast._native")]
pub struct RemoteValue {
    inner: Arc<Inner>,
    id: ClosureId,
}

/// Stands for the value that a function returns on each worker.
#[pyclass(frozen, module = "steadfast._native")]
pub struct PerWorker {
    inner: Arc<Inner>,
    /// Absent in a forked process.
    value: OwnProcess<Arc<WorkerValue>>,
    function: String,
    arguments: Vec<u8>,
    iterates: bool,
}

impl PerWorker {
    pub fn value(&self) -> Arc<WorkerValue> {
        (*self.value).clone()
    }

    pub fn message(&self) -> steadfast_proto::v1::PerWorker {
        steadfast_proto::v1::PerWorker {
            number: self.value.number(),
            function: self.function.clone(),
            arguments: self.arguments.clone().into(),
            iterates: self.iterates,
        }
    }
}

/// Exception, message, traceback, address of the worker.
type Described = (String, String, String, Option<String>);

/// Number and function of a closure, its name, and the failure.
type Error = (u64, String, Option<String>, Described);

/// Index, address, whether it takes closures, threads (0 without a connection), running, finished, why it is lost.
type Row = (u32, String, bool, u32, u32, u64, String);

#[pymethods]
impl Coordinator {
    /// Starts a coordinator with these settings; `STEADFAST_…` variables have those that are missing. Logs go to `emit`.
    /// `parameters` are the initial values of the parameters that closures train, by name.
    #[new]
    #[pyo3(signature = (args, emit, parameters=None))]
    fn new(
        py: Python<'_>,
        args: Vec<String>,
        emit: Py<PyAny>,
        parameters: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let declared = parameters.map(|it| declared(py, it)).transpose()?;
        let args: CoordinatorArgs = settings(py, "coordinator", args)?;
        let job = args.job.as_deref().unwrap_or_default();
        logs::start("coordinator", job, random::uuid(), &args.log, Some(emit))
            .map_err(|it| exception(py, &it))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("steadfast")
            .enable_all()
            .build()?;
        let params = declared.as_ref().map(|it| it.params.clone()).unwrap_or_default();
        let starting = async {
            let (admin, token) = (args.admin().await?, args.security.admin_token()?);
            let native = Native::start(args.settings(params).await?).await?;
            let served = admin.map(|admin| native.serve_admin(admin, job.to_owned(), token));
            Ok((native, served))
        };
        let started: Result<_, Failure> = interruptible(py, &runtime, starting)?;
        let (native, admin) = started.map_err(|it| exception(py, &it))?;
        let parameters = match (declared, native.parameters()) {
            (Some(declared), Some(_)) => {
                let own = ProgramParameters::start(py, &args, declared)?;
                let ready = interruptible(py, &runtime, own.ready(&native))?;
                ready.map_err(|it| exception(py, &it))?;
                Some(OwnProcess::new(own))
            }
            (Some(_) | None, _) => None,
        };
        let (native, runtime) = (OwnProcess::new(native), OwnProcess::new(runtime));
        let admin = OwnProcess::new(Mutex::new(admin));
        Ok(Self(Arc::new(Inner { admin, parameters, native, runtime })))
    }

    /// Adds a worker, or lets it take closures again; returns its index.
    fn add_worker(&self, py: Python<'_>, address: &str) -> PyResult<u32> {
        self.0.check(py)?;
        let added = self.0.native.add_worker(address);
        added.map(|index| index.0).map_err(|it| exception(py, &it))
    }

    /// Lets a worker take no more closures; returns its index.
    fn remove_worker(&self, py: Python<'_>, address: &str) -> PyResult<u32> {
        self.0.check(py)?;
        let removed = self.0.native.remove_worker(address);
        removed.map(|index| index.0).map_err(|it| exception(py, &it))
    }

    /// Waits until a removed worker runs nothing; returns whether it does.
    fn wait_for_rest(&self, py: Python<'_>, worker: u32, timeout: Option<f64>) -> PyResult<bool> {
        let index = WorkerIndex(worker);
        let rested = self.0.wait(py, timeout, |table| {
            let row = table.workers().get(&index);
            match (row.is_none_or(|it| it.is_at_rest || !it.is_stopped), table.ended()) {
                (true, _) => Some(Ok(())),
                (false, Some(failure)) => Some(Err(failure.clone())),
                (false, None) => None,
            }
        })?;
        rested.transpose().map(|it| it.is_some()).map_err(|it| exception(py, &it))
    }

    /// Lets other workers run what a worker runs.
    fn take_back(&self, worker: u32) {
        self.0.native.take_back(WorkerIndex(worker));
    }

    fn workers(&self) -> Vec<Row> {
        self.0.look(|table| {
            let rows = table.workers().iter().map(|(index, it)| {
                let (threads, reason) = (it.threads.unwrap_or(0), it.reason.clone());
                (
                    index.0,
                    it.address.clone(),
                    !it.is_stopped,
                    threads,
                    it.running,
                    it.finished,
                    reason,
                )
            });
            rows.collect()
        })
    }

    /// Schedules a call of `function`; waits while too many closures wait. Returns `None` after the timeout.
    #[pyo3(signature = (function, args, kwargs, *, name=None, worker=None, timeout=None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn schedule(
        &self,
        py: Python<'_>,
        function: String,
        args: &Bound<'_, PyAny>,
        kwargs: Option<&Bound<'_, PyDict>>,
        name: Option<&str>,
        worker: Option<u32>,
        timeout: Option<f64>,
    ) -> PyResult<Option<RemoteValue>> {
        self.0.check(py)?;
        let name = match name.map(str::parse) {
            None => None,
            Some(Ok(name)) => Some(name),
            Some(Err(error)) => {
                let error: steadfast_common::records::closures::BadName = error;
                return Err(raise(py, "InvalidError", error.to_string()));
            }
        };
        let mut references = References::of(self);
        let encoded = values::arguments(args, kwargs, &mut references)?;
        // A name stands for the same call in all programs, which number their values as they make them.
        let identity = (name.is_some() && !references.values.is_empty())
            .then(|| values::without_numbers(&encoded).into());
        let mut scheduled = Scheduled {
            function,
            arguments: encoded.encode_to_vec().into(),
            inputs: references.results,
            name,
            worker: worker.map(WorkerIndex),
            identity,
            values: references.values,
        };
        let begun = Instant::now();
        loop {
            scheduled = match self.0.native.schedule(scheduled) {
                Ok(id) => return Ok(Some(RemoteValue { inner: self.0.clone(), id })),
                Err(ScheduleError::Failed(failure)) => return Err(exception(py, &failure)),
                Err(ScheduleError::Full(scheduled)) => *scheduled,
            };
            let waiting = self.0.look(|table| table.waiting());
            let left = timeout.map(|it| it - begun.elapsed().as_secs_f64());
            let has_room = |table: &mut Table| {
                (table.waiting() < waiting || table.ended().is_some()).then_some(())
            };
            if self.0.wait(py, left, has_room)?.is_none() {
                return Ok(None);
            }
        }
    }

    /// Returns a reference to the value of a function on each worker.
    #[pyo3(signature = (function, args, kwargs, *, iterates))]
    fn per_worker(
        &self,
        py: Python<'_>,
        function: String,
        args: &Bound<'_, PyAny>,
        kwargs: Option<&Bound<'_, PyDict>>,
        iterates: bool,
    ) -> PyResult<PerWorker> {
        self.0.check(py)?;
        let mut references = References::of(self);
        let arguments = values::arguments(args, kwargs, &mut references)?.encode_to_vec();
        if !references.results.is_empty() || !references.values.is_empty() {
            let message = "a value of each worker cannot depend on the result of a closure, or on another such value";
            return Err(PyTypeError::new_err(message));
        }
        let value = OwnProcess::new(Arc::new(self.0.native.worker_value()));
        Ok(PerWorker { inner: self.0.clone(), value, function, arguments, iterates })
    }

    /// Returns how many closures are not over.
    fn pending(&self) -> usize {
        self.0.look(|table| table.pending())
    }

    /// Returns how many closures wait for a worker.
    fn waiting(&self) -> usize {
        self.0.look(|table| table.waiting())
    }

    /// Waits until no closure is left; returns whether that is so.
    fn wait_until_done(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.0.check(py)?;
        let done = self.0.wait(py, timeout, |table| match (table.pending(), table.ended()) {
            (0, _) => Some(Ok(())),
            (_, Some(failure)) => Some(Err(failure.clone())),
            (_, None) => None,
        })?;
        done.transpose().map(|it| it.is_some()).map_err(|it| exception(py, &it))
    }

    /// Takes the errors that were not raised in the program yet, and the number of further ones.
    fn take_errors(&self) -> (Vec<Error>, usize) {
        let (errors, more) = self.0.look(Table::take_errors);
        (errors.into_iter().map(described).collect(), more)
    }

    /// Forgets the results of all closures with a name.
    fn forget_results(&self, py: Python<'_>) -> PyResult<()> {
        self.0.check(py)?;
        self.0.native.forget_results();
        let done =
            self.0.wait(py, None, |table| match (table.forgets_results(), table.ended()) {
                (false, _) => Some(Ok(())),
                (true, Some(failure)) => Some(Err(failure.clone())),
                (true, None) => None,
            })?;
        done.unwrap_or(Ok(())).map_err(|it| exception(py, &it))
    }

    /// Reads the parameters: read-only arrays by name.
    fn get_parameters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        arrays::parameters(py, &self.pulled(py)?.parameters)
    }

    /// Writes the parameters as a model file; returns their SHA-256.
    fn save_model(&self, py: Python<'_>, place: &str) -> PyResult<String> {
        let pulled = self.pulled(py)?;
        interruptible(py, &self.0.runtime, pulled.save(place))?.map_err(|it| exception(py, &it))
    }

    /// Ends the job, and waits until its model is saved.
    fn finish_job(&self, py: Python<'_>) -> PyResult<()> {
        let parameters = self.0.parameters(py)?;
        let Some(client) = self.0.native.parameters() else {
            return Err(raise(py, "UnavailableError", "the coordinator is closed"));
        };
        let finishing = async {
            self.0.native.secure_pushes().await?;
            parameters.finish(client).await
        };
        interruptible(py, &self.0.runtime, finishing)?.map_err(|it| exception(py, &it))
    }

    /// Ends the coordinator. May be called again, and in a forked process, where it does nothing.
    fn close(&self, py: Python<'_>) {
        if !self.0.runtime.is_forked() {
            py.detach(|| {
                self.0.runtime.block_on(self.0.native.close());
                let admin = self.0.admin.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(admin) = admin {
                    self.0.runtime.block_on(admin.close());
                }
                if let Some(parameters) = &self.0.parameters {
                    parameters.close();
                }
            });
        }
    }
}

impl Coordinator {
    /// Pulls the parameters, with the pushes of all closures that are over.
    fn pulled(&self, py: Python<'_>) -> PyResult<Snapshot> {
        let parameters = self.0.parameters(py)?;
        let pulling = self.0.native.with_all_pushes(|| parameters.pull());
        interruptible(py, &self.0.runtime, pulling)?.map_err(|it| exception(py, &it))
    }
}

#[pymethods]
impl RemoteValue {
    /// Waits for the outcome. Returns `None` after the timeout, else its kind (`ready`, `end of data`, `failed`,
    /// `cancelled`), the value, the failure, and why it was cancelled.
    #[allow(clippy::type_complexity, reason = "it is taken apart in Python at once")]
    fn outcome<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Option<(&'static str, Option<Bound<'py, PyAny>>, Option<Error>, String)>> {
        self.inner.check(py)?;
        let id = self.id;
        let found = self.inner.wait(py, timeout, |table| {
            if let Some(outcome) = table.outcome(id) {
                let outcome = outcome.clone();
                let error = table.error_of(id);
                table.told_of(id);
                return Some(Ok((outcome, error)));
            }
            table.ended().map(|failure| Err(failure.clone()))
        })?;
        let Some(found) = found else { return Ok(None) };
        let (outcome, error) = found.map_err(|failure| exception(py, &failure))?;
        Ok(Some(match outcome {
            Outcome::Returned(value) => {
                ("ready", Some(values::decode_result(py, &value)?), None, String::new())
            }
            Outcome::EndOfData => ("end of data", None, None, String::new()),
            Outcome::Failed(_) => ("failed", None, error.map(described), String::new()),
            Outcome::Cancelled(reason) => ("cancelled", None, None, reason),
        }))
    }

    /// Returns `not ready`, `ready` or `aborted`.
    fn state(&self) -> &'static str {
        self.inner.look(|table| match table.outcome(self.id) {
            None => "not ready",
            Some(Outcome::Returned(_) | Outcome::EndOfData) => "ready",
            Some(Outcome::Failed(_) | Outcome::Cancelled(_)) => "aborted",
        })
    }

    /// Cancels the closure.
    fn cancel(&self) {
        self.inner.native.cancel(self.id);
    }

    /// Number of the closure.
    #[getter]
    fn number(&self) -> u64 {
        self.id.0
    }
}

impl RemoteValue {
    pub fn id(&self) -> ClosureId {
        self.id
    }

    /// Returns whether the closure is one of this coordinator.
    pub fn is_of(&self, coordinator: &Coordinator) -> bool {
        Arc::ptr_eq(&self.inner, &coordinator.0)
    }
}

impl PerWorker {
    /// Returns whether the value is one of this coordinator.
    pub fn is_of(&self, coordinator: &Coordinator) -> bool {
        Arc::ptr_eq(&self.inner, &coordinator.0)
    }
}

impl Drop for RemoteValue {
    fn drop(&mut self) {
        if !self.inner.native.is_forked() {
            self.inner.native.release(self.id);
        }
    }
}

impl Inner {
    fn parameters(&self, py: Python<'_>) -> PyResult<&ProgramParameters> {
        self.check(py)?;
        let none = || {
            let message =
                "the coordinator has no parameters: give it some, `Coordinator(…, parameters={…})`";
            raise(py, "InvalidError", message)
        };
        self.parameters.as_deref().ok_or_else(none)
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        check_process(py, self.runtime.process())
    }

    /// Looks at the table once.
    fn look<T>(&self, mut look: impl FnMut(&mut Table) -> T) -> T {
        let found = self.native.wait_for(Duration::MAX, |table| Some(look(table)));
        found.expect("it was found at the first look")
    }

    /// Waits without the GIL until `look` finds something. Handles signals meanwhile.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        mut look: impl FnMut(&mut Table) -> Option<T> + Send,
    ) -> PyResult<Option<T>> {
        let begun = Instant::now();
        let limit = timeout.and_then(|it| Duration::try_from_secs_f64(it.max(0.0)).ok());
        loop {
            let left = limit.map_or(SIGNALS_EVERY, |it| it.saturating_sub(begun.elapsed()));
            let found = py.detach(|| self.native.wait_for(left.min(SIGNALS_EVERY), &mut look));
            if found.is_some() {
                return Ok(found);
            }
            py.check_signals()?;
            if limit.is_some_and(|it| it <= begun.elapsed()) {
                return Ok(None);
            }
        }
    }
}

/// Completes a future without the GIL, until the user interrupts it.
pub fn interruptible<T: Send>(
    py: Python<'_>,
    runtime: &Runtime,
    work: impl Future<Output = T> + Send,
) -> PyResult<T> {
    let mut work = std::pin::pin!(work);
    loop {
        let part = async { tokio::time::timeout(SIGNALS_EVERY, work.as_mut()).await };
        if let Ok(done) = py.detach(|| runtime.block_on(part)) {
            return Ok(done);
        }
        py.check_signals()?;
    }
}

fn described(error: ClosureError) -> Error {
    let ClosureError { id, function, name, failure, worker } = error;
    let message = failure.to_string();
    let described = match failure {
        ClosureFailure::Raised { exception, message, traceback, .. } => {
            (exception, message, traceback, worker)
        }
        ClosureFailure::WorkersLost { .. } => {
            ("WorkerLost".to_owned(), message, String::new(), worker)
        }
        ClosureFailure::NameTaken { .. }
        | ClosureFailure::NotRepeated { .. }
        | ClosureFailure::ResultTooLarge { .. }
        | ClosureFailure::Refused { .. } => (String::new(), message, String::new(), worker),
    };
    (id.0, function, name.map(|it| it.to_string()), described)
}
