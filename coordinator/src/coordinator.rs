//! The coordinator of a program.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Generation;
use steadfast_common::job::dataset::sha256;
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_coordinator_core::{ClosureId, Input, Settings, WorkerIndex};
use steadfast_host::random;
use steadfast_host::task::{Task, spawn};
use steadfast_host::time::sleep;
use steadfast_net::{Channel, TlsIdentity};
use steadfast_process::{Admin, AdminServer, Failure, Readiness};
use steadfast_proto::v1::DropRequest;
use steadfast_proto::v1::closures_client::ClosuresClient;
use steadfast_training_client::{ClientError, ParameterClient};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tracing::debug;
use uuid::Uuid;

use crate::admin::of_coordinator;
use crate::announce::discover;
pub use crate::driver::Lock;
use crate::driver::{ARGUMENTS_BYTES_MAX, Driver, send};
use crate::link::Attended;
use crate::parameters::Parameters;
use crate::table::{Scheduled, Shared, Table};
use crate::workers::WorkerSet;

/// Time between looks at what the driver does.
const POLL: Duration = Duration::from_millis(20);

/// The settings of a coordinator.
#[derive(Clone, Debug)]
pub struct CoordinatorSettings {
    pub machine: Settings,
    /// Limits the closures that wait for a worker.
    pub waiting_max: usize,
    pub tls: TlsIdentity,
    /// Selects where results of named closures are stored. Without it, they are kept in memory.
    pub lock: Option<Lock>,
    /// Whether workers that announce themselves below the keys of the lock are added.
    pub discovers: bool,
    /// All parameters that closures train, in order; they need the lock. Empty if there are none.
    pub params: Vec<ParamSpec>,
}

/// The reason for which a call was not scheduled.
#[derive(Debug)]
pub enum ScheduleError {
    /// As many closures wait as may wait; try again.
    Full(Box<Scheduled>),
    Failed(Failure),
}

/// A coordinator: closures that are scheduled run on the workers that were added. [`Coordinator::close`] ends it, and
/// so does dropping it, without a wait.
#[derive(Debug)]
pub struct Coordinator {
    id: Uuid,
    waiting_max: usize,
    /// Absent in a simulation.
    runtime: Option<Handle>,
    workers: Arc<WorkerSet>,
    shared: Arc<Shared>,
    /// Number of the next value of each worker.
    next_value: AtomicU64,
    outbox: mpsc::UnboundedSender<Input>,
    /// Cancelled when the coordinator is closed: what workers run has no outcome.
    closing: CancellationToken,
    /// Dropping it ends the driver.
    leave: Mutex<Option<oneshot::Sender<()>>>,
    driver: Mutex<Option<Task<()>>>,
    /// Holds the tasks that run beside the driver until the coordinator is closed.
    followers: Mutex<Vec<Task<()>>>,
    /// Absent without parameters, and once the coordinator is closed.
    parameters: Mutex<Option<Parameters>>,
}

impl Coordinator {
    /// Starts a coordinator. With a lock it is the only one of its job.
    ///
    /// # Errors
    /// `Conflict` if another coordinator has the lock, or the gradients of the job do not come from closures; and errors
    /// of etcd.
    pub async fn start(settings: CoordinatorSettings) -> Result<Self, Failure> {
        let id = random::uuid();
        let CoordinatorSettings { machine, waiting_max, tls, lock, discovers, params } = settings;
        let found_in = lock.as_ref().filter(|_| discovers);
        let found_in = found_in.map(|it| (it.etcd.clone(), it.keys.clone()));
        let first = match &lock {
            Some(lock) => Some(lock.acquire(id).await?),
            None => None,
        };
        let parameters = match &lock {
            Some(Lock { etcd, keys, .. }) if !params.is_empty() => {
                Some(Parameters::join(etcd, keys, tls.clone(), params).await?)
            }
            Some(_) | None => None,
        };
        let shared = Arc::new(Shared::default());
        let (outbox, inbox) = mpsc::unbounded_channel();
        let (leave, left) = oneshot::channel();
        let closing = CancellationToken::new();
        let driver = Driver {
            id,
            settings: machine,
            lock,
            parameters: parameters.clone(),
            shared: shared.clone(),
            inbox,
            outbox: outbox.clone(),
            leave: left,
            closing: closing.clone(),
        };
        let driver = spawn(driver.run(first));
        let runtime = Handle::try_current().ok();
        let attended = Arc::new(Attended {
            coordinator: id,
            root: parameters.as_ref().map(|it| it.keys.root().to_owned()).unwrap_or_default(),
            params: parameters.as_ref().map(|it| it.params.clone()).unwrap_or_default(),
        });
        let workers = Arc::new(WorkerSet {
            attended,
            tls,
            runtime: runtime.clone(),
            shared: shared.clone(),
            outbox: outbox.clone(),
            links: Mutex::default(),
        });
        let mut followers = Vec::new();
        if let Some(parameters) = parameters.clone() {
            followers.push(spawn(parameters.follow(shared.clone(), outbox.clone())));
        }
        if let Some((etcd, keys)) = found_in {
            followers.push(spawn(discover(workers.clone(), etcd, keys)));
        }
        Ok(Self {
            id,
            waiting_max,
            runtime,
            workers,
            shared,
            next_value: AtomicU64::new(1),
            outbox,
            closing,
            leave: Mutex::new(Some(leave)),
            driver: Mutex::new(Some(driver)),
            followers: Mutex::new(followers),
            parameters: Mutex::new(parameters),
        })
    }

    /// Serves the admin port until the result is dropped.
    pub fn serve_admin(&self, admin: Admin, job: String, token: Option<String>) -> AdminServer {
        let readiness = Readiness::new("");
        readiness.set_ready();
        let shared = self.shared.clone();
        admin.serve(of_coordinator(self.id, job, token, readiness, shared))
    }

    /// Adds the worker at `host:port`, or lets it take closures again under the index that it had.
    ///
    /// # Errors
    /// `Invalid` if the address is none; why the coordinator has ended.
    pub fn add_worker(&self, address: &str) -> Result<WorkerIndex, Failure> {
        self.workers.add(address)
    }

    /// Stops a worker: it ends what it runs, and takes no more closures until it is added again.
    ///
    /// # Errors
    /// `NotFound` if no worker with this address was added.
    pub fn remove_worker(&self, address: &str) -> Result<WorkerIndex, Failure> {
        self.workers.remove(address)
    }

    /// Lets other workers run what a worker runs.
    pub fn take_back(&self, worker: WorkerIndex) {
        send(&self.outbox, Input::GivesBack(worker));
    }

    /// Schedules a call. Its result is kept until [`Coordinator::release`].
    ///
    /// # Errors
    /// [`ScheduleError::Full`] if too many closures wait. `TooLarge` if the arguments do not fit into a message; why
    /// the coordinator has ended.
    pub fn schedule(&self, scheduled: Scheduled) -> Result<ClosureId, ScheduleError> {
        let limit = ARGUMENTS_BYTES_MAX;
        if limit < scheduled.arguments.len() {
            let bytes = scheduled.arguments.len();
            let message = format!(
                "the arguments of `{}` have {bytes} bytes; a closure takes at most {limit}: pass the name of a file, or \
                 make the value on each worker with `create_per_worker_dataset`",
                scheduled.function
            );
            return Err(ScheduleError::Failed(Failure::new(ErrorKind::TooLarge, message)));
        }
        let digest = digest(&scheduled);
        let mut table = self.shared.lock();
        if let Some(failure) = table.ended() {
            return Err(ScheduleError::Failed(failure.clone()));
        }
        if self.waiting_max <= table.waiting() {
            return Err(ScheduleError::Full(Box::new(scheduled)));
        }
        let mut digests = table.digests_of(&scheduled.inputs);
        let digest = match digests.is_empty() {
            true => digest,
            false => {
                digests.push(&digest);
                sha256(digests.join(" ").as_bytes())
            }
        };
        let (id, call) = table.schedule(scheduled, digest);
        // Sent before the table is released, so that closures arrive in the order of their numbers.
        send(&self.outbox, Input::Scheduled { id, call, push: None });
        Ok(id)
    }

    /// Cancels a closure, unless it is over. If it runs, its result is dropped.
    pub fn cancel(&self, id: ClosureId) {
        if let Some(entry) = self.shared.lock().closures.get_mut(&id) {
            entry.is_cancelled = true;
        }
        send(&self.outbox, Input::Cancelled(id));
    }

    /// Drops the result of a closure, once no other closure needs it.
    pub fn release(&self, id: ClosureId) {
        if self.shared.lock().release(id) {
            send(&self.outbox, Input::Forgotten(id));
        }
    }

    /// Creates the handle of a value of each worker. The workers drop theirs when the last handle is gone.
    pub fn worker_value(&self) -> WorkerValue {
        let number = self.next_value.fetch_add(1, Ordering::Relaxed);
        let (runtime, shared) = (self.runtime.clone(), Arc::downgrade(&self.shared));
        WorkerValue { coordinator: self.id, number, runtime, shared }
    }

    /// Waits until the first term has begun: parameters have values then.
    ///
    /// # Errors
    /// Returns why the coordinator has ended.
    pub async fn begun(&self) -> Result<(), Failure> {
        loop {
            {
                let table = self.shared.lock();
                match table.ended() {
                    Some(failure) => return Err(failure.clone()),
                    None if table.has_begun => return Ok(()),
                    None => {}
                }
            }
            sleep(POLL).await;
        }
    }

    /// Returns the client of the parameters, if closures train some, and the coordinator is not closed.
    pub fn parameters(&self) -> Option<Arc<ParameterClient>> {
        let parameters = self.parameters.lock().unwrap_or_else(PoisonError::into_inner);
        parameters.as_ref().map(|it| it.client.clone())
    }

    /// Does something while the push of each closure that is over counts: if a rollback may have undone some of them
    /// meanwhile, it is done again after these closures have run again.
    ///
    /// # Errors
    /// Returns why it has failed, or the coordinator has ended. `Invalid` without parameters.
    pub async fn with_all_pushes<T, F>(&self, act: impl Fn() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let parameters = self.parameters.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let parameters = parameters.ok_or_else(|| {
            Failure::new(ErrorKind::Invalid, "the coordinator has no parameters, or is closed")
        })?;
        let mut newest = Generation(0);
        loop {
            let settled = tokio::select! {
                biased;
                // Nothing undoes a push any more.
                () = parameters.client.cluster().job_ended() => return act().await,
                settled = self.settled(newest) => settled?,
            };
            let done = act().await?;
            newest = parameters.newest_generation().await?;
            if newest <= settled {
                return Ok(done);
            }
        }
    }

    /// Waits until the push of each closure that is over counts in a generation; returns that, which is not before
    /// `first`.
    async fn settled(&self, first: Generation) -> Result<Generation, Failure> {
        loop {
            {
                let table = self.shared.lock();
                if let Some(failure) = table.ended() {
                    return Err(failure.clone());
                }
                if let Some(generation) = table.settled_in().filter(|it| first <= *it) {
                    return Ok(generation);
                }
            }
            sleep(POLL).await;
        }
    }

    /// Waits until a checkpoint has the push of each closure that is over: no loss of processes undoes these then.
    ///
    /// # Errors
    /// As those of [`Coordinator::with_all_pushes`].
    pub async fn secure_pushes(&self) -> Result<(), Failure> {
        let client = &self.parameters();
        self.with_all_pushes(|| async {
            let Some(client) = client else {
                return Err(Failure::unavailable("the coordinator is closed"));
            };
            match client.take_checkpoint().await {
                Ok(()) | Err(ClientError::JobEnded) => Ok(()),
                Err(error) => Err(Failure::new(error.kind(), error.to_string())),
            }
        })
        .await
    }

    /// Forgets the results of all closures with a name. Done when [`Table::forgets_results`] is false.
    pub fn forget_results(&self) {
        self.shared.lock().forgets_results = true;
        send(&self.outbox, Input::ForgetResults);
    }

    /// Waits until `look` finds something in the table, but no longer than `limit`. Blocks the thread.
    pub fn wait_for<T>(
        &self,
        limit: Duration,
        look: impl FnMut(&mut Table) -> Option<T>,
    ) -> Option<T> {
        self.shared.wait_for(limit, look)
    }

    /// Ends the coordinator, and frees its lock. Workers go on without it; closures that are not over have no outcome.
    /// May be called again.
    pub async fn close(&self) {
        self.closing.cancel();
        drop(self.leave.lock().unwrap_or_else(PoisonError::into_inner).take());
        let driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(driver) = driver {
            // It has no outcome but its end.
            let _ = driver.await;
        }
        self.shared.change(Table::cancel_all);
        self.end_followers();
        // Its client follows keys in etcd.
        drop(self.parameters.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn end_followers(&self) {
        for follower in self.followers.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            follower.abort();
        }
        self.workers.end();
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.closing.cancel();
        self.end_followers();
    }
}

/// A value that each worker makes for itself, such as an iterator.
#[derive(Debug)]
pub struct WorkerValue {
    coordinator: Uuid,
    number: u64,
    runtime: Option<Handle>,
    shared: Weak<Shared>,
}

impl WorkerValue {
    /// Returns its number, which is never reused by the coordinator.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for WorkerValue {
    /// Tells the workers. One that does not hear it keeps the value as long as it knows the coordinator.
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let channels: Vec<Channel> = {
            let table = shared.lock();
            let open = table.workers.values().filter(|it| it.threads.is_some());
            open.map(|it| it.channel.clone()).collect()
        };
        let _guard = self.runtime.as_ref().map(Handle::enter);
        for channel in channels {
            let request =
                DropRequest { coordinator: self.coordinator.to_string(), number: self.number };
            spawn(async move {
                if let Err(status) = ClosuresClient::new(channel).drop(request).await {
                    debug!(reason = status.message(), "a worker was not told of a value to drop");
                }
            });
        }
    }
}

/// Returns a digest of what a call computes, up to the closures whose results it takes.
fn digest(scheduled: &Scheduled) -> String {
    let identity = scheduled.identity.as_ref().unwrap_or(&scheduled.arguments);
    sha256(&[scheduled.function.as_bytes(), &[0], identity].concat())
}
