//! Takes checkpoints: requests a shard snapshot from every slot, commits the manifest, and only then
//! deletes what the checkpoint supersedes. Errors of the store never stop training; status and metrics
//! report them until a checkpoint succeeds again.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::ids::{Generation, Millis, Slot, Version};
use steadfast_common::job::spec::{CheckpointSpec, JobSpec, Mode};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{CheckpointRecord, GenerationRecord};
use steadfast_coord::{CoordError, Etcd, backoff, now};
use steadfast_host::random;
use steadfast_host::time::{Instant, sleep};
use steadfast_master_core::checkpoint_schedule::{
    Acceptance, Attempt, CheckpointSchedule, Next, Outcome, Progress, Request, Service, Trigger,
};
use steadfast_net::TlsIdentity;
use steadfast_store::{Location, StoreError};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::checkpoint::garbage_collection;
use crate::checkpoint::snapshot::{self, Keeper, VersionWait};
use crate::event_loop::handle::{ControlError, Event, EventLoopHandle};

/// Number of growing pauses after which their length reaches its maximum, one second.
const PAUSES_TO_A_SECOND: usize = 8;

/// Why a request ends without a checkpoint if no attempt failed for another reason.
const TOO_FAST: &str = "training passed every version for which a snapshot was requested";

/// Why a checkpoint was not taken.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(transparent)]
    Coord(#[from] CoordError),
    #[error(transparent)]
    EventLoop(#[from] ControlError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("there is no generation yet")]
    NoGeneration,
    #[error("slot {slot} has no holder")]
    NoHolder { slot: Slot },
    #[error("slot {slot}: {reason}")]
    Slot { slot: Slot, reason: String },
    #[error("slot {slot} did not reach the version in time")]
    NotReached { slot: Slot },
    #[error("slot {slot} is at version {present}, past the requested version {wanted}")]
    Past { slot: Slot, wanted: Version, present: Version },
    #[error("slot {slot}, version {at}: {what}")]
    Diverged { slot: Slot, at: Version, what: String },
    #[error("slots {} and {} have applied different records", slots[0], slots[1])]
    SlotsDisagree { slots: [Slot; 2] },
    #[error("a snapshot request was aborted: {0}")]
    Aborted(String),
    #[error("cannot parse a snapshot reply: {0}")]
    BadReply(#[from] serde_json::Error),
    #[error("the model has too many parameters to describe them in a generation: {bytes} bytes")]
    TooManyParameters { bytes: usize },
}

impl CheckpointError {
    /// Returns what the schedule needs to know of the error.
    pub(crate) fn outcome(&self) -> Outcome {
        match self {
            Self::Past { present, .. } => Outcome::Past { present: *present },
            Self::NotReached { .. } => Outcome::NotReached,
            Self::EventLoop(ControlError::OtherGeneration { .. }) => Outcome::OtherGeneration,
            Self::EventLoop(ControlError::QueuesMoved) => Outcome::QueuesMoved,
            Self::EventLoop(ControlError::NotActing)
            | Self::NoGeneration
            | Self::NoHolder { .. } => Outcome::NoPserverSet,
            Self::EventLoop(_) | Self::Coord(_) | Self::Store(_) | Self::Slot { .. } => {
                Outcome::Failed
            }
            Self::Diverged { .. } | Self::SlotsDisagree { .. } => Outcome::Failed,
            Self::Aborted(_) | Self::BadReply(_) | Self::TooManyParameters { .. } => {
                Outcome::Failed
            }
        }
    }
}

/// The recent results of checkpointing.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Checkpoints committed in this term.
    pub committed: u64,
    pub failures_in_a_row: u32,
    /// The last error; absent after a success.
    pub error: Option<String>,
    /// When the last checkpoint was committed.
    pub last: Option<Instant>,
}

/// A request to the checkpoint coordinator.
#[derive(Debug)]
pub struct CheckpointRequest {
    request: Request,
    reply: oneshot::Sender<CheckpointOutcome>,
}

/// The outcome of a request.
#[derive(Clone, Debug, Default)]
pub struct CheckpointOutcome {
    /// The checkpoint that the job would resume from.
    pub latest: Option<String>,
    /// Why `latest` is not a new checkpoint.
    pub error: Option<String>,
}

/// A handle to the task that takes checkpoints.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    requests: mpsc::Sender<CheckpointRequest>,
    /// The mutex guards only this value.
    health: Arc<Mutex<Health>>,
}

impl Checkpoints {
    /// Takes a checkpoint now.
    pub async fn take_now(&self) -> CheckpointOutcome {
        self.request(Request::Now).await
    }

    /// Takes the checkpoint of the final parameters.
    pub async fn take_final(&self, generation: Generation, version: Version) -> CheckpointOutcome {
        self.request(Request::Final(Progress { generation, version })).await
    }

    async fn request(&self, request: Request) -> CheckpointOutcome {
        let (reply, outcome) = oneshot::channel();
        let not_acting =
            || CheckpointOutcome { latest: None, error: Some(ControlError::NotActing.to_string()) };
        match self.requests.send(CheckpointRequest { request, reply }).await {
            Ok(()) => outcome.await.unwrap_or_else(|_| not_acting()),
            Err(_) => not_acting(),
        }
    }

    /// Returns the recent results of checkpointing.
    pub fn health(&self) -> Health {
        self.health.lock().expect("no holder panics").clone()
    }
}

/// Takes checkpoints for one term, as the schedule decides.
pub struct CheckpointCoordinator {
    etcd: Etcd,
    keys: Keys,
    tls: TlsIdentity,
    spec: JobSpec,
    store: Location,
    handle: EventLoopHandle,
    health: Arc<Mutex<Health>>,
    /// The caller of the request in service.
    caller: Option<oneshot::Sender<CheckpointOutcome>>,
    /// Why the last attempt for the request in service failed, unless training was only too fast for it.
    error: Option<String>,
    /// The outcome of the latest checkpoint of final parameters.
    final_outcome: CheckpointOutcome,
    /// The newest checkpoint since the last garbage collection. Its commit may not be confirmed.
    uncollected: Option<String>,
    /// When orphans were last deleted.
    swept: Option<Instant>,
}

/// Incoming requests for checkpoints.
pub type CheckpointRequests = mpsc::Receiver<CheckpointRequest>;

impl CheckpointCoordinator {
    /// Returns the coordinator, its handle, and the receiver of the handle's requests.
    pub fn new(
        etcd: Etcd,
        keys: Keys,
        tls: TlsIdentity,
        spec: JobSpec,
        store: Location,
        handle: EventLoopHandle,
    ) -> (Self, Checkpoints, CheckpointRequests) {
        let (tx, requests) = mpsc::channel(8);
        let health = Arc::<Mutex<Health>>::default();
        let checkpoints = Checkpoints { requests: tx, health: health.clone() };
        let coordinator = Self {
            etcd,
            keys,
            tls,
            spec,
            store,
            handle,
            health,
            caller: None,
            error: None,
            final_outcome: CheckpointOutcome::default(),
            uncollected: None,
            swept: None,
        };
        (coordinator, checkpoints, requests)
    }

    /// Takes checkpoints as the job demands and on request, until dropped.
    pub async fn run(mut self, mut requests: CheckpointRequests) {
        let mut rules = self.handle.checkpoints.clone();
        let intervals = |rules: &CheckpointSpec| {
            let every_ms = rules.every.map(|every| every.as_millis() as u64);
            (every_ms, rules.every_steps)
        };
        let mut schedule = CheckpointSchedule::new(intervals(&rules.borrow_and_update()), now());
        loop {
            // A change begins a generation, which ends an attempt that waits for its step.
            if rules.has_changed().is_ok_and(|it| it) {
                schedule.change(intervals(&rules.borrow_and_update()), now());
            }
            match schedule.next(now(), self.progress()) {
                Next::Wait(until) => {
                    tokio::select! {
                        biased;
                        Some(request) = requests.recv() => self.accept(&mut schedule, request),
                        Ok(()) = rules.changed() => rules.mark_changed(),
                        () = sleep_until(until) => schedule.wake(now()),
                    }
                }
                Next::Pause(until) => sleep_until(Some(until)).await,
                Next::Take(attempt) => self.carry_out(&mut schedule, attempt, &mut requests).await,
            }
        }
    }

    fn accept(&mut self, schedule: &mut CheckpointSchedule, request: CheckpointRequest) {
        let CheckpointRequest { request, reply } = request;
        if request == Request::Now && reply.is_closed() {
            // The caller no longer waits.
            return;
        }
        match schedule.request(request) {
            Acceptance::Accepted => self.caller = Some(reply),
            Acceptance::Repeated => {
                let _ = reply.send(self.final_outcome.clone());
            }
        }
    }

    /// Makes an attempt. A request or a checkpoint that is due by time interrupts an attempt by steps, which
    /// is then dropped or runs to its end.
    async fn carry_out(
        &mut self,
        schedule: &mut CheckpointSchedule,
        attempt: Attempt,
        requests: &mut CheckpointRequests,
    ) {
        let is_interruptible = attempt.trigger == Trigger::Steps;
        let (stop, handle, mut request) = (CancellationToken::new(), self.handle.clone(), None);
        let taken = {
            let mut taking = pin!(self.take(&attempt, stop.clone()));
            tokio::select! {
                biased;
                taken = &mut taking => Some(taken),
                interrupt = next_interrupt(requests, schedule.due()), if is_interruptible => {
                    let reason = interrupt.as_ref().map(|it| it.request);
                    request = interrupt;
                    match CheckpointSchedule::finishes(&attempt, reason, progress(&handle)) {
                        true => {
                            stop.cancel();
                            Some(taking.await)
                        }
                        false => None,
                    }
                }
            }
        };
        if let Some(taken) = taken {
            self.conclude(schedule, &attempt, taken).await;
        }
        if let Some(request) = request {
            self.accept(schedule, request);
        }
    }

    /// Records the result of an attempt, and answers the request that it served.
    async fn conclude(
        &mut self,
        schedule: &mut CheckpointSchedule,
        attempt: &Attempt,
        taken: Result<String, CheckpointError>,
    ) {
        let outcome = taken.as_ref().map_or_else(CheckpointError::outcome, |_| Outcome::Committed);
        let pause = backoff().nth(PAUSES_TO_A_SECOND).unwrap_or_default().as_millis() as u64;
        let service = schedule.ended(attempt, outcome, now(), self.progress(), pause);
        self.publish(schedule.failures_in_a_row(), &taken);
        // The answer may end the job and this master, so garbage collection runs before it.
        self.collect_garbage().await;
        match &taken {
            Ok(_) | Err(CheckpointError::Past { .. }) => {}
            // No request waits for the outcome.
            Err(_) if attempt.trigger == Trigger::Steps => {}
            Err(error) => self.error = Some(error.to_string()),
        }
        if service == Service::Over {
            let error = self.error.take().unwrap_or_else(|| TOO_FAST.to_owned());
            let outcome = match (taken, attempt.trigger) {
                (Ok(id), _) => CheckpointOutcome { latest: Some(id), error: None },
                (Err(_), Trigger::Final) => CheckpointOutcome { latest: None, error: Some(error) },
                (Err(_), Trigger::Request | Trigger::Time | Trigger::Steps) => {
                    let latest = self.handle.snapshot.borrow().status.checkpoint.clone();
                    CheckpointOutcome { latest, error: Some(error) }
                }
            };
            if attempt.trigger == Trigger::Final {
                self.final_outcome = outcome.clone();
            }
            if let Some(caller) = self.caller.take() {
                let _ = caller.send(outcome);
            }
        }
        self.delete_orphans().await;
    }

    fn progress(&self) -> Progress {
        progress(&self.handle)
    }

    /// Takes one checkpoint of the attempt's generation: in synchronous mode at its version, in
    /// asynchronous mode immediately. Once `stop` is cancelled, slots do not wait for the version.
    async fn take(
        &mut self,
        attempt: &Attempt,
        stop: CancellationToken,
    ) -> Result<String, CheckpointError> {
        let wanted = attempt.generation;
        let generation: GenerationRecord = self
            .etcd
            .get_json(&self.keys.generation())
            .await?
            .ok_or(CheckpointError::NoGeneration)?;
        // A version is meaningful only in its own generation: another one may never reach it.
        if wanted != generation.generation {
            let (found, present) = (wanted, generation.generation);
            return Err(ControlError::OtherGeneration { found, present }.into());
        }
        let newest = self.newest().await?;
        let slots =
            snapshot::slots(&self.etcd, &self.keys, &self.tls, &generation, &newest).await?;
        // Done tasks were acknowledged before, so the shard snapshots, taken later, reflect them.
        let queue = self.handle.ask(|reply| Event::Queues { reply }).await?;
        let version = match self.spec.mode {
            Mode::Async => None,
            Mode::Sync => Some(attempt.version),
        };
        let wait = VersionWait { max: Duration::from_millis(attempt.reach_max_ms), stop };
        let snapshot = &self.handle.snapshot;
        let keeper = Keeper::Store { store: &self.store, newest: &newest };
        let saved = snapshot::shards(keeper, slots, version, wait, snapshot).await;
        if let Err(error @ CheckpointError::Diverged { .. }) = &saved {
            let (generation, reason) = (generation.generation, error.to_string());
            self.handle.ask(|reply| Event::Diverged { generation, reason, reply }).await?;
        }
        let saved = saved?;
        let record = snapshot::assemble(self.spec.mode, &generation, saved, queue);
        if let Err(error @ CheckpointError::SlotsDisagree { .. }) = &record {
            let (generation, reason) = (generation.generation, error.to_string());
            self.handle.ask(|reply| Event::Inconsistent { generation, reason, reply }).await?;
        }
        let record = record?;
        let id = format!("{:012}-{}", record.position.version.0, random::uuid().simple());
        let (named, version) = (id.clone(), record.position.version.0);
        let record = Box::new(record);
        self.uncollected = Some(id.clone());
        self.handle.ask(|reply| Event::CommitCheckpoint { id: named, record, reply }).await?;
        info!(checkpoint = id, version, "checkpoint committed");
        Ok(id)
    }

    /// Returns the newest valid checkpoint, or an empty one.
    async fn newest(&self) -> Result<CheckpointRecord, CheckpointError> {
        let pointer = self.etcd.get(&self.keys.checkpoint_latest()).await?;
        let Some(id) = pointer.and_then(|entry| entry.json::<String>().ok()) else {
            return Ok(CheckpointRecord::default());
        };
        let manifest = self.etcd.get(&self.keys.checkpoint(&id)).await?;
        // No further checkpoint can begin with one that cannot be read.
        Ok(manifest.and_then(|entry| entry.json().ok()).unwrap_or_default())
    }

    /// Deletes what a new checkpoint supersedes. A term that ends meanwhile leaves files without a manifest to
    /// [`Self::delete_orphans`] of a later one.
    async fn collect_garbage(&mut self) {
        let Some(id) = self.uncollected.take() else { return };
        let keep = self.handle.checkpoints.borrow().keep as usize;
        let (etcd, keys, store) = (&self.etcd, &self.keys, &self.store);
        let collected =
            garbage_collection::old_checkpoints(etcd, keys, store, &self.handle, keep, &id);
        if let Err(error) = collected.await {
            warn!(%error, "some old checkpoints are not deleted");
        }
    }

    fn publish(&self, failures_in_a_row: u32, taken: &Result<String, CheckpointError>) {
        let mut health = self.health.lock().expect("no holder panics");
        match taken {
            Ok(_) => {
                (health.committed, health.last) = (health.committed + 1, Some(Instant::now()));
                health.error = None;
            }
            Err(error) if health.failures_in_a_row < failures_in_a_row => {
                health.error = Some(error.to_string());
                warn!(%error, in_a_row = failures_in_a_row, "checkpoint failed");
            }
            Err(_) => {}
        }
        health.failures_in_a_row = failures_in_a_row;
    }

    /// Deletes orphans, at most once per [`garbage_collection::SWEEP_EVERY`].
    async fn delete_orphans(&mut self) {
        if self.swept.is_some_and(|swept| swept.elapsed() < garbage_collection::SWEEP_EVERY) {
            return;
        }
        self.swept = Some(Instant::now());
        let directory = self.spec.shards_directory();
        let swept = garbage_collection::orphans(&self.etcd, &self.keys, &self.store, &directory);
        if let Err(error) = swept.await {
            warn!(%error, "some orphaned shards are not deleted");
        }
    }
}

/// Returns the generation and its version from the latest status snapshot; both may lag.
pub(crate) fn progress(handle: &EventLoopHandle) -> Progress {
    let snapshot = handle.snapshot.borrow();
    Progress { generation: snapshot.status.generation, version: snapshot.status.version }
}

/// Waits for a request, or until a checkpoint is due by time.
async fn next_interrupt(
    requests: &mut CheckpointRequests,
    due: Option<Millis>,
) -> Option<CheckpointRequest> {
    tokio::select! {
        biased;
        Some(request) = requests.recv() => Some(request),
        () = sleep_until(due) => None,
    }
}

/// Sleeps until `due`, or forever if it is absent.
pub(crate) async fn sleep_until(due: Option<Millis>) {
    match due {
        Some(due) => sleep(Duration::from_millis(due.0.saturating_sub(now().0))).await,
        None => std::future::pending().await,
    }
}
