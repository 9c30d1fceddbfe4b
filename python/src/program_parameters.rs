//! The parameters of a program with a coordinator: a trainer in its process sets their initial values, and saves the
//! model.

use std::sync::Arc;
use std::time::Duration;

use numpy::PyUntypedArrayMethods;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use steadfast_common::error::ErrorKind;
use steadfast_common::job::spec::CLOSURES;
use steadfast_coordinator::{Coordinator, CoordinatorArgs, ParameterClient};
use steadfast_host::time::sleep;
use steadfast_process::{Failure, Shutdown};
use steadfast_trainer::own_loop::Running;
use steadfast_trainer::{Args, Declared, ParamSpec, Registry, Snapshot};

use crate::arrays::float32;
use crate::error::{exception, raise};
use crate::logs;
use crate::settings::settings;

/// Time between attempts to read parameters while the job begins another generation, and between looks at whether the
/// trainer has ended.
const POLL: Duration = Duration::from_millis(50);

/// The trainer of a program, and its access to the parameters.
pub struct ProgramParameters {
    running: Running,
}

impl ProgramParameters {
    /// Starts the trainer in the job of a coordinator.
    pub fn start(py: Python<'_>, args: &CoordinatorArgs, declared: Declared) -> PyResult<Self> {
        let job = args.job.clone().unwrap_or_default();
        let mut own: Args = settings(py, "steadfast-trainer", vec![format!("--job={job}")])?;
        (own.common.root, own.common.lease_ttl) = (None, args.lease_ttl);
        own.common.etcd = args.etcd.clone();
        own.common.security.tls.tls = args.trainer_tls.clone();
        let mut registry = Registry::built_in();
        registry.register(CLOSURES, move |_, _| Ok(Box::new(declared.clone())));
        let log =
            |args: &Args, id| logs::start("trainer", &args.common.job, id, &args.common.log, None);
        let running = Running::start(own, registry, Shutdown::manual(), log);
        Ok(Self { running: running.map_err(|it| exception(py, &it))? })
    }

    /// Waits until the parameters have values.
    ///
    /// # Errors
    /// Returns why the trainer or the coordinator has ended.
    pub async fn ready(&self, coordinator: &Coordinator) -> Result<(), Failure> {
        let over = async {
            loop {
                if self.running.has_ended() {
                    let left = || Failure::unavailable("the job has ended");
                    return self.running.join().err().unwrap_or_else(left);
                }
                sleep(POLL).await;
            }
        };
        tokio::select! {
            biased;
            begun = coordinator.begun() => begun,
            failure = over => Err(failure),
        }
    }

    /// Reads the parameters; waits while the job begins another generation.
    ///
    /// # Errors
    /// As those of [`steadfast_trainer::Current::pull`].
    pub async fn pull(&self) -> Result<Snapshot, Failure> {
        loop {
            match self.running.current().pull().await {
                Err(failure)
                    if matches!(failure.kind, ErrorKind::Unavailable | ErrorKind::NotYet)
                        && !self.running.has_ended() =>
                {
                    sleep(POLL).await;
                }
                pulled => return pulled,
            }
        }
    }

    /// Ends the job, and waits until its model is saved.
    ///
    /// # Errors
    /// The rejection of the master, or why the trainer has failed.
    pub async fn finish(&self, client: Arc<ParameterClient>) -> Result<(), Failure> {
        use steadfast_coordinator::ParameterError::JobEnded;
        match client.drain().await {
            Ok(()) | Err(JobEnded) => {}
            Err(error) => return Err(Failure::new(error.kind(), error.to_string())),
        }
        while !self.running.has_ended() {
            sleep(POLL).await;
        }
        self.running.join()
    }

    /// Leaves the job, and waits until the trainer has.
    pub fn close(&self) {
        self.running.leave();
        // What went wrong with it was logged, and what matters was raised by the calls.
        let _ = self.running.join();
    }
}

/// Returns the parameters that a program declares, with their initial values.
///
/// # Errors
/// If there are none, or a value is no array of numbers.
pub fn declared(py: Python<'_>, given: &Bound<'_, PyDict>) -> PyResult<Declared> {
    if given.is_empty() {
        let message = "`parameters` is empty; leave it out, or give arrays with initial values";
        return Err(raise(py, "InvalidError", message));
    }
    let (mut params, mut values) = (Vec::new(), Vec::new());
    for (name, array) in given {
        let name: String = name.extract().map_err(|_| {
            PyTypeError::new_err("`parameters` is a dict from names to arrays of initial values")
        })?;
        let array = float32(&array, &name)?;
        params.push(ParamSpec::new(name, array.shape()));
        values.extend_from_slice(array.as_slice()?);
    }
    Ok(Declared { params, values })
}
