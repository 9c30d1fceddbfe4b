//! A worker that runs the closures of coordinators in a Python program.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use steadfast_common::role::Role;
use steadfast_coordinator::{Call, WorkerArgs, WorkerServer};
use steadfast_host::random;
use steadfast_process::{Admin, AdminServer, Failure, Shutdown};
use steadfast_proto::MESSAGE_BYTES_MAX;
use steadfast_trainer::Parameters;
use tokio::runtime::{Handle, Runtime};

use crate::arrays::{self, Write};
use crate::coordinator::interruptible;
use crate::error::{exception, raise};
use crate::logs;
use crate::settings::settings;
use crate::values::{self, Referred};

/// The maximum delay until a signal of the user is handled.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Reserves room in a message for its other fields.
const RESULT_ROOM: usize = 64 << 10;

/// A worker that listens.
#[pyclass(frozen, module = "steadfast._native")]
pub struct ClosureWorker {
    runtime: Runtime,
    server: Arc<WorkerServer>,
    modules: Vec<String>,
    threads: u32,
    admin: AdminServer,
    /// Handles signals as long as it exists.
    _shutdown: Shutdown,
}

/// A closure to run.
#[pyclass(frozen, module = "steadfast._native")]
pub struct Closure {
    /// The coordinator.
    #[pyo3(get)]
    coordinator: String,
    /// Index of this worker there.
    #[pyo3(get)]
    worker: u32,
    #[pyo3(get)]
    attempt: u64,
    /// Identifies the closure; equal for all of its attempts.
    #[pyo3(get)]
    key: String,
    /// The function, as `module:function`.
    #[pyo3(get)]
    function: String,
    arguments: bytes::Bytes,
    results: Vec<bytes::Bytes>,
    /// The most bytes of the encoded result.
    result_bytes_max: usize,
    runtime: Handle,
    /// Holds the gradient that the function has pushed, flat. It leaves when the function has returned.
    gradient: Mutex<Option<Vec<f32>>>,
    /// Absent once answered. The mutex guards only this field.
    call: Mutex<Option<Call>>,
}

#[pymethods]
impl ClosureWorker {
    /// Listens, with these command-line arguments.
    #[new]
    fn new(py: Python<'_>, args: Vec<String>) -> PyResult<Self> {
        let args: WorkerArgs = settings(py, "python -m steadfast.worker", args)?;
        let failed = |failure| exception(py, &failure);
        logs::start("worker", "", random::uuid(), &args.log, None).map_err(failed)?;
        let exposure = args.security.exposure(Role::Trainer).map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("steadfast")
            .enable_all()
            .build()?;
        // Its own thread, so that a function that keeps the interpreter does not delay a signal.
        let shutdown = runtime.block_on(async { Shutdown::install() }).map_err(failed)?;
        let etcd = args.etcd.options(&args.security.tls);
        let starting = WorkerServer::start(args.listen, &exposure, args.threads, etcd);
        let server = interruptible(py, &runtime, starting)?.map_err(failed)?;
        let announcing = args.announcement(server.address());
        let binding = Admin::bind(args.admin_listen, exposure.clone());
        let admin = interruptible(py, &runtime, binding)?.map_err(failed)?;
        let token = args.security.admin_token().map_err(failed)?;
        if let Some(announcement) = interruptible(py, &runtime, announcing)?.map_err(failed)? {
            let _entered = runtime.enter();
            server.announce(announcement);
        }
        let server = Arc::new(server);
        let job = args.job.clone().unwrap_or_default();
        let admin = {
            let _entered = runtime.enter();
            server.serve_admin(admin, job, token, shutdown.clone())
        };
        let (drained, leaving) = (shutdown.drain(), server.clone());
        runtime.spawn(async move {
            drained.await;
            leaving.leave();
        });
        let (modules, threads) = (args.modules, args.threads);
        Ok(Self { runtime, server, modules, threads, admin, _shutdown: shutdown })
    }

    /// The address that coordinators connect to.
    #[getter]
    fn address(&self) -> String {
        self.server.address().to_string()
    }

    /// The address of the admin port.
    #[getter]
    fn admin_address(&self) -> String {
        self.admin.local_addr().to_string()
    }

    /// The modules whose functions may run.
    #[getter]
    fn modules(&self) -> Vec<String> {
        self.modules.clone()
    }

    #[getter]
    fn threads(&self) -> u32 {
        self.threads
    }

    /// Waits for a closure; returns `None` after some time, and when the worker leaves and has none.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Closure>> {
        let call = py.detach(|| self.server.next(SIGNALS_EVERY));
        py.check_signals()?;
        Ok(call.map(|call| {
            let request = &call.request;
            Closure {
                coordinator: request.coordinator.clone(),
                worker: request.worker,
                attempt: request.attempt,
                key: request.key.clone(),
                function: request.function.clone(),
                arguments: request.arguments.clone(),
                results: request.results.clone(),
                result_bytes_max: request
                    .result_bytes_max
                    .map_or(MESSAGE_BYTES_MAX - RESULT_ROOM, |it| it as usize),
                runtime: self.runtime.handle().clone(),
                gradient: Mutex::default(),
                call: Mutex::new(Some(call)),
            }
        }))
    }

    /// Returns whether a coordinator uses this worker.
    fn is_attended_by(&self, coordinator: &str) -> bool {
        self.server.is_attended_by(coordinator)
    }

    /// Takes the values that no closure needs any more, by coordinator and number.
    fn take_dropped(&self) -> Vec<(String, u64)> {
        self.server.take_dropped()
    }

    /// Returns whether the worker leaves and has no closure left.
    #[getter]
    fn is_done(&self) -> bool {
        self.server.is_leaving() && self.server.running() == 0
    }

    /// Ends the server after all replies.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.runtime.block_on(self.server.close()));
    }
}

#[pymethods]
impl Closure {
    /// Returns the arguments: the positional ones, and those by name. `per_worker` is called for each value of the
    /// worker among them.
    fn arguments<'py>(
        &self,
        py: Python<'py>,
        per_worker: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let referred = Referred { results: &self.results, per_worker };
        values::decode_arguments(py, &self.arguments, &referred)
    }

    /// Pulls the newest values of the parameters: read-only arrays by name.
    fn get_parameters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let pulled = py.detach(|| {
            self.with_call(|call| {
                let values = self.runtime.block_on(call.pull())?;
                Ok(Parameters::new(call.layout()?.clone(), values))
            })
        });
        arrays::parameters(py, &pulled.map_err(|failure| exception(py, &failure))?)
    }

    /// Keeps a mean gradient, arrays by name, which is pushed when the function has returned.
    fn push(&self, py: Python<'_>, given: &Bound<'_, PyDict>) -> PyResult<()> {
        let layout = self.with_call(|call| call.layout().cloned());
        let mut sum = Parameters::zeros(layout.map_err(|failure| exception(py, &failure))?);
        arrays::write_to(py, given, &mut sum, Write::Replace)?;
        let mut gradient = self.gradient.lock().unwrap_or_else(PoisonError::into_inner);
        if gradient.is_some() {
            let message = "the closure has pushed before; add its gradients, and push their mean";
            return Err(raise(py, "InvalidError", message));
        }
        *gradient = Some(sum.into_values());
        Ok(())
    }

    /// Pushes the gradient, if there is one, and replies with the value that the function has returned.
    fn returned(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let encoded = values::result(value)?;
        let limit = self.result_bytes_max;
        if limit < encoded.len() {
            let message = format!(
                "the result has {} bytes; a closure returns at most {limit}: write it to a file, and return its name",
                encoded.len()
            );
            return Err(pyo3::exceptions::PyValueError::new_err(message));
        }
        let gradient = self.gradient.lock().unwrap_or_else(PoisonError::into_inner).take();
        let pushed = gradient.map(|gradient| {
            py.detach(|| self.with_call(|call| self.runtime.block_on(call.push(gradient))))
        });
        let pushed = pushed.transpose().map_err(|failure| exception(py, &failure))?;
        self.take()?.returned(encoded.into(), pushed);
        Ok(())
    }

    /// Replies that there is no more data.
    fn end_of_data(&self) -> PyResult<()> {
        self.take()?.end_of_data();
        Ok(())
    }

    /// Replies with an exception.
    fn raised(&self, exception: String, message: String, traceback: String) -> PyResult<()> {
        self.take()?.raised(exception, message, traceback);
        Ok(())
    }

    /// Returns whether the coordinator still waits for the outcome.
    #[getter]
    fn is_wanted(&self) -> bool {
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner);
        call.as_ref().is_some_and(Call::is_wanted)
    }
}

impl Closure {
    fn with_call<T>(&self, ask: impl FnOnce(&Call) -> Result<T, Failure>) -> Result<T, Failure> {
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner);
        match &*call {
            Some(call) => ask(call),
            None => Err(Failure::invalid("this closure is over")),
        }
    }

    fn take(&self) -> PyResult<Call> {
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner).take();
        call.ok_or_else(|| PyRuntimeError::new_err("this closure was answered already"))
    }
}

/// Decodes the arguments of a function that makes a value of a worker.
#[pyfunction]
pub fn decode_arguments<'py>(
    py: Python<'py>,
    encoded: &[u8],
    per_worker: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
    values::decode_arguments(py, encoded, &Referred { results: &[], per_worker })
}
