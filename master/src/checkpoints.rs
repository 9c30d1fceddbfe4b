//! Takes checkpoints: requests a shard snapshot from every slot, commits the manifest, and only then
//! deletes what the checkpoint supersedes. Errors of the store never stop training; status and metrics
//! report them until a checkpoint succeeds again.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::keys::Keys;
use steadfast_common::records::GenerationRecord;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_coord::{CoordError, Etcd, pauses};
use steadfast_host::random;
use steadfast_host::time::{Instant, sleep};
use steadfast_store::{Location, StoreError};
use tokio::sync::{mpsc, oneshot};
use tracing::{info, warn};

use crate::garbage_collection;
use crate::handle::{ControlError, Event, EventLoopHandle};
use crate::snapshot::{self, RetryPolicy};

/// Pause while no checkpoint can be taken.
const IDLE: Duration = Duration::from_millis(200);

/// Maximum number of multiples of `every_steps` by which a request is ahead of a fast job.
const AHEAD_MAX: u64 = 64;

/// Number of growing pauses after which their length reaches its maximum, one second.
const PAUSES_TO_A_SECOND: usize = 8;

/// Longest pause after failed checkpoints.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Maximum attempts at a checkpoint that is requested or due by time.
const ATTEMPTS_MAX: u32 = 8;

/// Timeout for all slots to reach a version that training has reached.
const REACHED_MAX: Duration = Duration::from_secs(60);

/// Timeout for training to reach a version slightly ahead; training may end before it.
const AHEAD_FOR_MAX: Duration = Duration::from_secs(5);

/// Timeout for training to reach the next multiple of `every_steps`. The loss of a slot is reported
/// long before.
const STEPS_TAKE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Why a checkpoint was not taken.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(transparent)]
    Coord(#[from] CoordError),
    #[error(transparent)]
    EventLoopHandle(#[from] ControlError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("there is no generation yet")]
    NoGeneration,
    #[error("slot {slot} has no holder")]
    NoHolder { slot: Slot },
    #[error("slot {slot}: {reason}")]
    Slot { slot: Slot, reason: String },
    #[error("slot {slot} gave no answer in time")]
    TooLate { slot: Slot },
    #[error("slot {slot} is past version {wanted} already, at {present}")]
    Past { slot: Slot, wanted: Version, present: Version },
    #[error("slot {slot}, version {at}: {what}")]
    Diverged { slot: Slot, at: Version, what: String },
    #[error("slots {} and {} have applied different records", slots[0], slots[1])]
    SlotsDisagree { slots: [Slot; 2] },
    #[error("a question for a shard broke: {0}")]
    Broken(String),
    #[error("a shard's answer cannot be read: {0}")]
    BadAnswer(#[from] serde_json::Error),
}

impl CheckpointError {
    /// Returns whether the pserver set was incomplete or has changed: the next set gets its own checkpoints.
    fn is_of_the_pserver_set(&self) -> bool {
        match self {
            Self::NoGeneration | Self::NoHolder { .. } => true,
            Self::EventLoopHandle(error) => {
                matches!(error, ControlError::OtherGeneration { .. } | ControlError::NotActing)
            }
            Self::Coord(_) | Self::Store(_) | Self::Slot { .. } | Self::TooLate { .. } => false,
            Self::Past { .. } | Self::Diverged { .. } | Self::SlotsDisagree { .. } => false,
            Self::Broken(_) | Self::BadAnswer(_) => false,
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
pub enum CheckpointRequest {
    /// A checkpoint of the present version.
    Now(oneshot::Sender<CheckpointOutcome>),
    /// The checkpoint of the final parameters, which this generation has at this version.
    Final(Generation, Version, oneshot::Sender<CheckpointOutcome>),
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
        self.request(CheckpointRequest::Now).await
    }

    /// Takes the checkpoint of the final parameters.
    pub async fn take_final(&self, generation: Generation, version: Version) -> CheckpointOutcome {
        self.request(|reply| CheckpointRequest::Final(generation, version, reply)).await
    }

    async fn request(
        &self,
        request: impl FnOnce(oneshot::Sender<CheckpointOutcome>) -> CheckpointRequest,
    ) -> CheckpointOutcome {
        let (reply, answer) = oneshot::channel();
        let gone = || CheckpointOutcome {
            latest: None,
            error: Some("this master does not act".to_owned()),
        };
        match self.requests.send(request(reply)).await {
            Ok(()) => answer.await.unwrap_or_else(|_| gone()),
            Err(_) => gone(),
        }
    }

    /// Returns the recent results of checkpointing.
    pub fn health(&self) -> Health {
        self.health.lock().expect("no holder panics").clone()
    }
}

/// Takes checkpoints for one term.
pub struct CheckpointCoordinator {
    etcd: Etcd,
    keys: Keys,
    spec: JobSpec,
    store: Location,
    handle: EventLoopHandle,
    health: Arc<Mutex<Health>>,
    /// The outcome of the checkpoint of the final parameters, once it is known.
    last_one: Option<(Generation, CheckpointOutcome)>,
    by_steps: BySteps,
    /// The newest checkpoint since the last garbage collection. Its commit may not be confirmed.
    uncollected: Option<String>,
    /// When orphans were last deleted.
    swept: Option<Instant>,
}

/// Progress of the checkpoints that are due by steps.
#[derive(Clone, Copy, Debug, Default)]
struct BySteps {
    generation: Generation,
    /// A version that training has reached. The reported position may be older.
    seen: Version,
    /// Consecutive multiples that were missed. The next request is 2^`late` multiples ahead.
    late: u32,
}

/// An attempt at a checkpoint that is due by steps, shared with the code that may cancel it.
#[derive(Debug)]
struct Attempt {
    /// The version that it waits for; `u64::MAX` if none.
    awaited: AtomicU64,
    in_vain: Arc<AtomicBool>,
}

impl Default for Attempt {
    fn default() -> Self {
        Self { awaited: AtomicU64::new(u64::MAX), in_vain: Arc::default() }
    }
}

/// What the checkpoint coordinator does next.
enum Next {
    Requested(Option<CheckpointRequest>),
    Due,
    /// An attempt at a checkpoint that is due by steps is over.
    Tried,
}

/// Incoming requests for checkpoints.
pub type CheckpointRequests = mpsc::Receiver<CheckpointRequest>;

impl CheckpointCoordinator {
    /// Returns the coordinator, its handle, and the receiver of the handle's requests.
    pub fn new(
        etcd: Etcd,
        keys: Keys,
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
            spec,
            store,
            handle,
            health,
            last_one: None,
            by_steps: BySteps::default(),
            uncollected: None,
            swept: None,
        };
        (coordinator, checkpoints, requests)
    }

    /// Takes checkpoints as the spec demands and on request, until dropped.
    pub async fn run(mut self, mut requests: CheckpointRequests) {
        let (every, steps) = (self.spec.checkpoint.every, self.spec.checkpoint.every_steps);
        let mut due = every.map(|every| Instant::now() + every);
        loop {
            match self.next(&mut requests, due, steps).await {
                Next::Requested(None) => return,
                // The caller no longer waits.
                Next::Requested(Some(CheckpointRequest::Now(reply))) if reply.is_closed() => {}
                Next::Requested(Some(CheckpointRequest::Now(reply))) => {
                    let taken = self.take_with_retries(0).await;
                    self.collect().await;
                    let _ = reply.send(taken);
                }
                Next::Requested(Some(CheckpointRequest::Final(generation, version, reply))) => {
                    let taken = self.take_last_one(generation, version).await;
                    // The answer may end the job and this master, so garbage collection runs before it.
                    self.collect().await;
                    let _ = reply.send(taken);
                }
                Next::Due => {
                    // No caller waits, so this one can be of the next version, which no slot has passed.
                    let taken = self.take_with_retries(1).await;
                    due = match taken.error {
                        Some(_) => Some(Instant::now() + self.pause()),
                        None => every.map(|every| Instant::now() + every),
                    };
                }
                Next::Tried => {}
            }
            self.collect().await;
            self.tidy().await;
        }
    }

    /// Waits for the first thing to do. Meanwhile the next checkpoint that is due by steps waits for its
    /// version. Once training has reached that version, the attempt runs to its end: if it were dropped,
    /// the shards that it saved would become orphans.
    async fn next(
        &mut self,
        requests: &mut CheckpointRequests,
        due: Option<Instant>,
        steps: Option<u64>,
    ) -> Next {
        let (snapshot, attempt) = (self.handle.snapshot.clone(), Attempt::default());
        let mut by_steps = pin!(self.by_steps(steps, &attempt));
        let next = tokio::select! {
            biased;
            request = requests.recv() => Next::Requested(request),
            () = sleep_until(due) => Next::Due,
            () = &mut by_steps => return Next::Tried,
        };
        let present = snapshot.borrow().clone();
        let reached = match &next {
            // A delayed request may name a generation that advanced further than the present one has.
            Next::Requested(Some(CheckpointRequest::Final(generation, version, _)))
                if *generation == present.generation =>
            {
                *version
            }
            Next::Requested(_) | Next::Due | Next::Tried => present.position.version,
        };
        if attempt.awaited.load(Ordering::Relaxed) <= reached.0 {
            // Do not wait for slots that have not reached the version.
            attempt.in_vain.store(true, Ordering::Relaxed);
            by_steps.await;
        }
        next
    }

    /// Makes one attempt at the next multiple of `steps` that training has not passed. Stores the
    /// version that it waits for in `attempt`.
    async fn by_steps(&mut self, steps: Option<u64>, attempt: &Attempt) {
        let Some(steps) = steps else { return std::future::pending().await };
        let (generation, present) = self.present();
        if self.by_steps.generation != generation {
            self.by_steps = BySteps { generation, ..BySteps::default() };
        }
        self.by_steps.seen = self.by_steps.seen.max(present);
        let ahead = 1_u64.checked_shl(self.by_steps.late).unwrap_or(AHEAD_MAX).min(AHEAD_MAX);
        let at = Version((self.by_steps.seen.0 / steps + ahead) * steps);
        attempt.awaited.store(at.0, Ordering::Relaxed);
        let policy = RetryPolicy { most: STEPS_TAKE_MAX, in_vain: attempt.in_vain.clone() };
        let taken = self.take(generation, at, policy).await;
        attempt.awaited.store(u64::MAX, Ordering::Relaxed);
        match taken {
            Ok(_) => (self.by_steps.seen, self.by_steps.late) = (at, 0),
            // The reported position always lags slightly.
            Err(CheckpointError::Past { present, .. }) => {
                self.by_steps.seen = present;
                self.by_steps.late += 1;
            }
            Err(error) if error.is_of_the_pserver_set() => sleep(IDLE).await,
            // Cancelled by `next`, for a checkpoint that comes first.
            Err(CheckpointError::TooLate { .. }) => {}
            Err(error) => {
                self.count_failure(&error);
                sleep(self.pause()).await;
            }
        }
    }

    /// Takes a checkpoint of the present version, or at first of the one `margin` steps ahead, with up to
    /// [`ATTEMPTS_MAX`] attempts.
    async fn take_with_retries(&mut self, mut margin: u64) -> CheckpointOutcome {
        let (mut generation, mut seen) = self.present();
        let mut last_error = "training is too fast for a cut".to_owned();
        for attempt in 0..ATTEMPTS_MAX {
            let policy = if margin == 0 { REACHED_MAX } else { AHEAD_FOR_MAX };
            let at = Version(seen.0 + margin);
            match self.take(generation, at, RetryPolicy::of(policy)).await {
                Ok(id) => return CheckpointOutcome { latest: Some(id), error: None },
                // The known version is of the previous generation; the present one may never reach it.
                Err(
                    error @ CheckpointError::EventLoopHandle(ControlError::OtherGeneration {
                        ..
                    }),
                ) => {
                    last_error = error.to_string();
                    sleep(IDLE).await;
                    ((generation, seen), margin) = (self.present(), 0);
                }
                // The slot is already working on the next version, and so are the others.
                Err(CheckpointError::Past { wanted, present, .. }) if wanted == present => {
                    (seen, margin) = (Version(present.0 + 1), 0);
                }
                Err(CheckpointError::Past { present, .. }) => {
                    seen = present;
                    // Training may have ended at this version.
                    margin = if attempt == 0 { 0 } else { (margin * 4).max(2) };
                }
                Err(CheckpointError::EventLoopHandle(error @ ControlError::QueuesMoved)) => {
                    last_error = error.to_string();
                }
                // Training does not reach the version soon, or never: take what the slots have now.
                Err(error @ CheckpointError::TooLate { .. }) if 0 < margin => {
                    last_error = error.to_string();
                    let (now, version) = self.present();
                    seen = if now == generation { seen.max(version) } else { version };
                    (generation, margin) = (now, 0);
                }
                Err(error) => {
                    self.count_failure(&error);
                    last_error = error.to_string();
                    break;
                }
            }
        }
        let latest = self.handle.snapshot.borrow().checkpoint.clone();
        CheckpointOutcome { latest, error: Some(last_error) }
    }

    /// Attempts the checkpoint of the final parameters once per generation. A caller that asks again,
    /// after a lost reply or because a slow store took longer than its call, gets the same outcome.
    async fn take_last_one(
        &mut self,
        generation: Generation,
        version: Version,
    ) -> CheckpointOutcome {
        if let Some((_, taken)) = self.last_one.as_ref().filter(|(known, _)| *known == generation) {
            return taken.clone();
        }
        let taken = match self.take(generation, version, RetryPolicy::of(REACHED_MAX)).await {
            Ok(id) => CheckpointOutcome { latest: Some(id), error: None },
            Err(error) => {
                self.count_failure(&error);
                CheckpointOutcome { latest: None, error: Some(error.to_string()) }
            }
        };
        self.last_one = Some((generation, taken.clone()));
        taken
    }

    /// Returns the generation and its version from the latest status snapshot; both may lag.
    fn present(&self) -> (Generation, Version) {
        let snapshot = self.handle.snapshot.borrow();
        (snapshot.generation, snapshot.position.version)
    }

    /// Takes one checkpoint of the generation `wanted`: in synchronous mode at version `at`, in
    /// asynchronous mode immediately.
    async fn take(
        &mut self,
        wanted: Generation,
        at: Version,
        policy: RetryPolicy,
    ) -> Result<String, CheckpointError> {
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
        let slots = snapshot::slots(&self.etcd, &self.keys, &generation).await?;
        // Done tasks were acknowledged before, so the shard snapshots, taken later, reflect them.
        let queue = self.handle.ask(|reply| Event::Queues { reply }).await?;
        let version = match self.spec.mode {
            Mode::Async => None,
            Mode::Sync => Some(at),
        };
        let snapshot = &self.handle.snapshot;
        let saved = snapshot::shards(&self.store, slots, version, policy, snapshot).await;
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
        self.handle.ask(|reply| Event::Checkpoint { id: named, record, reply }).await?;
        info!(checkpoint = id, version, "checkpoint committed");
        {
            let mut health = self.health.lock().expect("no holder panics");
            let committed = health.committed + 1;
            let last = Some(Instant::now());
            *health = Health { committed, last, failures_in_a_row: 0, error: None };
        }
        Ok(id)
    }

    /// Deletes what a new checkpoint supersedes. Must not be called from a future that may be dropped
    /// half-way: a manifest would be deleted and its files would remain.
    async fn collect(&mut self) {
        let Some(id) = self.uncollected.take() else { return };
        let keep = self.spec.checkpoint.keep as usize;
        let (etcd, keys, store) = (&self.etcd, &self.keys, &self.store);
        let collected =
            garbage_collection::old_checkpoints(etcd, keys, store, &self.handle, keep, &id);
        if let Err(error) = collected.await {
            warn!(%error, "old checkpoints are not all deleted");
        }
    }

    fn count_failure(&self, error: &CheckpointError) {
        let mut health = self.health.lock().expect("no holder panics");
        health.failures_in_a_row += 1;
        health.error = Some(error.to_string());
        warn!(%error, in_a_row = health.failures_in_a_row, "no checkpoint could be taken");
    }

    /// Returns the pause after a failure. It grows with each failure and has jitter.
    fn pause(&self) -> Duration {
        let failures = self.health.lock().expect("no holder panics").failures_in_a_row;
        let second = pauses().nth(PAUSES_TO_A_SECOND).unwrap_or(PAUSE_MAX);
        (second * failures.max(1)).min(PAUSE_MAX)
    }

    /// Deletes orphans, at most once per [`garbage_collection::SWEEP_EVERY`].
    async fn tidy(&mut self) {
        if self.swept.is_some_and(|swept| swept.elapsed() < garbage_collection::SWEEP_EVERY) {
            return;
        }
        self.swept = Some(Instant::now());
        let folder = self.spec.shards_folder();
        let swept = garbage_collection::orphans(&self.etcd, &self.keys, &self.store, &folder);
        if let Err(error) = swept.await {
            warn!(%error, "orphans are not all deleted");
        }
    }
}

/// Sleeps until `due`, or forever if it is absent.
pub(crate) async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => steadfast_host::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
