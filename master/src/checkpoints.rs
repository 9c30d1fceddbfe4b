//! Takes checkpoints: asks every slot for its shard of one cut, commits the manifest, and deletes
//! what it makes superfluous only after that. Trouble with the store never stops training; it shows
//! in status and metrics until a checkpoint succeeds again.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::keys::Keys;
use steadfast_common::records::GenerationRecord;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_coord::{CoordError, Etcd, pauses};
use steadfast_host::chance;
use steadfast_host::time::{Instant, sleep};
use steadfast_store::{Location, StoreError};
use tokio::sync::{mpsc, oneshot};
use tracing::{info, warn};

use crate::collection;
use crate::office::{Event, Office, OfficeError};
use crate::snapshot::{self, Patience};

/// Pause while there is nothing to take a checkpoint of.
const IDLE: Duration = Duration::from_millis(200);

/// How many multiples ahead of a fast job the next checkpoint is asked for at most.
const AHEAD_MAX: u64 = 64;

/// Growing pauses after which they have come to a second, and stay there.
const PAUSES_TO_A_SECOND: usize = 8;

/// Longest pause after checkpoints that failed.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Attempts for one that somebody waits for.
const ATTEMPTS_MAX: u32 = 8;

/// How long all slots may take to come to a version that training has reached.
const REACHED_MAX: Duration = Duration::from_secs(60);

/// How long training may take to come to a version a little ahead; it may also be over before.
const AHEAD_FOR_MAX: Duration = Duration::from_secs(5);

/// How long training may take to come to the next multiple of some steps. A slot that is lost
/// meanwhile says so long before.
const STEPS_TAKE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Why there is no checkpoint this time.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(transparent)]
    Coord(#[from] CoordError),
    #[error(transparent)]
    Office(#[from] OfficeError),
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
    #[error("a question for a shard broke: {0}")]
    Broken(String),
    #[error("a shard's answer cannot be read: {0}")]
    BadAnswer(#[from] serde_json::Error),
}

impl CheckpointError {
    /// Whether the crew was not whole, or is another by now: the next one gets its own checkpoints.
    fn is_of_the_crew(&self) -> bool {
        match self {
            Self::NoGeneration | Self::NoHolder { .. } => true,
            Self::Office(error) => {
                matches!(error, OfficeError::OtherGeneration { .. } | OfficeError::NotActing)
            }
            Self::Coord(_) | Self::Store(_) | Self::Slot { .. } | Self::TooLate { .. } => false,
            Self::Past { .. } | Self::Diverged { .. } | Self::Broken(_) | Self::BadAnswer(_) => {
                false
            }
        }
    }
}

/// How taking checkpoints goes.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Checkpoints committed in this reign.
    pub committed: u64,
    pub failures_in_a_row: u32,
    /// What went wrong last; absent while all is well.
    pub trouble: Option<String>,
    /// When the last one was committed.
    pub last: Option<Instant>,
}

/// What somebody asks of the keeper.
#[derive(Debug)]
pub enum Wish {
    /// A checkpoint of what is there now.
    Now(oneshot::Sender<Taken>),
    /// The one that holds the final parameters, which this generation has at this version.
    Final(Generation, Version, oneshot::Sender<Taken>),
}

/// What came of a wish.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// The checkpoint that the job would resume from.
    pub latest: Option<String>,
    /// Why it is not a new one.
    pub trouble: Option<String>,
}

/// A handle to the task that takes checkpoints.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    wishes: mpsc::Sender<Wish>,
    /// Guards only itself.
    health: Arc<Mutex<Health>>,
}

impl Checkpoints {
    /// Takes a checkpoint now.
    pub async fn take_now(&self) -> Taken {
        self.wish(Wish::Now).await
    }

    /// Takes the one that holds the final parameters.
    pub async fn take_final(&self, generation: Generation, version: Version) -> Taken {
        self.wish(|reply| Wish::Final(generation, version, reply)).await
    }

    async fn wish(&self, wish: impl FnOnce(oneshot::Sender<Taken>) -> Wish) -> Taken {
        let (reply, answer) = oneshot::channel();
        let gone = || Taken { latest: None, trouble: Some("this master does not act".to_owned()) };
        match self.wishes.send(wish(reply)).await {
            Ok(()) => answer.await.unwrap_or_else(|_| gone()),
            Err(_) => gone(),
        }
    }

    /// How it goes.
    pub fn health(&self) -> Health {
        self.health.lock().expect("no holder panics").clone()
    }
}

/// Takes checkpoints for one reign.
pub struct Keeper {
    etcd: Etcd,
    keys: Keys,
    spec: JobSpec,
    store: Location,
    office: Office,
    health: Arc<Mutex<Health>>,
    /// What came of the checkpoint of the final parameters, once that is known.
    last_one: Option<(Generation, Taken)>,
    by_steps: BySteps,
    /// The newest one since what is superfluous was deleted, committed for all we know.
    uncollected: Option<String>,
    /// When orphans were looked for.
    swept: Option<Instant>,
}

/// How far the checkpoints are that are due by steps.
#[derive(Clone, Copy, Debug, Default)]
struct BySteps {
    generation: Generation,
    /// Training is there at least. What we hear of the position may be older.
    seen: Version,
    /// How many multiples we were late in a row: the next one is so much further ahead.
    late: u32,
}

/// An attempt at a checkpoint that is due by steps, for whoever may be in its way.
#[derive(Debug)]
struct Attempt {
    /// The version that it waits for; none is that high.
    awaited: AtomicU64,
    in_vain: Arc<AtomicBool>,
}

impl Default for Attempt {
    fn default() -> Self {
        Self { awaited: AtomicU64::new(u64::MAX), in_vain: Arc::default() }
    }
}

/// What the keeper does next.
enum Next {
    Wish(Option<Wish>),
    Due,
    /// An attempt at one that is due by steps is over.
    Tried,
}

/// Where wishes come in.
pub type Wishes = mpsc::Receiver<Wish>;

impl Keeper {
    /// A keeper, the handle to it, and what comes in by the handle.
    pub fn new(
        etcd: Etcd,
        keys: Keys,
        spec: JobSpec,
        store: Location,
        office: Office,
    ) -> (Self, Checkpoints, Wishes) {
        let (tx, wishes) = mpsc::channel(8);
        let health = Arc::<Mutex<Health>>::default();
        let handle = Checkpoints { wishes: tx, health: health.clone() };
        let keeper = Self {
            etcd,
            keys,
            spec,
            store,
            office,
            health,
            last_one: None,
            by_steps: BySteps::default(),
            uncollected: None,
            swept: None,
        };
        (keeper, handle, wishes)
    }

    /// Takes checkpoints as the job wants them, and whenever somebody asks, until dropped.
    pub async fn run(mut self, mut wishes: Wishes) {
        let (every, steps) = (self.spec.checkpoint.every, self.spec.checkpoint.every_steps);
        let mut due = every.map(|every| Instant::now() + every);
        loop {
            match self.next(&mut wishes, due, steps).await {
                Next::Wish(None) => return,
                // Whoever wished that has gone.
                Next::Wish(Some(Wish::Now(reply))) if reply.is_closed() => {}
                Next::Wish(Some(Wish::Now(reply))) => {
                    let taken = self.insist(0).await;
                    self.collect().await;
                    let _ = reply.send(taken);
                }
                Next::Wish(Some(Wish::Final(generation, version, reply))) => {
                    let taken = self.take_last_one(generation, version).await;
                    // The job may be over with the answer, and this master with it.
                    self.collect().await;
                    let _ = reply.send(taken);
                }
                Next::Due => {
                    // Nobody waits for it: the next version is one that no slot is past yet.
                    let taken = self.insist(1).await;
                    due = match taken.trouble {
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

    /// What comes first. Meanwhile the next checkpoint that is due by steps waits for its version. If
    /// training has come there it is not dropped, since the shards that it saved would stay.
    async fn next(
        &mut self,
        wishes: &mut Wishes,
        due: Option<Instant>,
        steps: Option<u64>,
    ) -> Next {
        let (facts, attempt) = (self.office.facts.clone(), Attempt::default());
        let mut by_steps = pin!(self.by_steps(steps, &attempt));
        let next = tokio::select! {
            biased;
            wish = wishes.recv() => Next::Wish(wish),
            () = sleep_until(due) => Next::Due,
            () = &mut by_steps => return Next::Tried,
        };
        let present = facts.borrow().clone();
        let reached = match &next {
            // A late one may be of a generation that came further than the present one has yet.
            Next::Wish(Some(Wish::Final(generation, version, _)))
                if *generation == present.generation =>
            {
                *version
            }
            Next::Wish(_) | Next::Due | Next::Tried => present.position.version,
        };
        if attempt.awaited.load(Ordering::Relaxed) <= reached.0 {
            // Slots that are not at the version after all are not waited for.
            attempt.in_vain.store(true, Ordering::Relaxed);
            by_steps.await;
        }
        next
    }

    /// One attempt at the next multiple of `steps` that training has not passed; tells which version
    /// it waits for.
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
        let patience = Patience { most: STEPS_TAKE_MAX, in_vain: attempt.in_vain.clone() };
        let taken = self.take(generation, at, patience).await;
        attempt.awaited.store(u64::MAX, Ordering::Relaxed);
        match taken {
            Ok(_) => (self.by_steps.seen, self.by_steps.late) = (at, 0),
            // What we know of the position is always a little old.
            Err(CheckpointError::Past { present, .. }) => {
                self.by_steps.seen = present;
                self.by_steps.late += 1;
            }
            Err(error) if error.is_of_the_crew() => sleep(IDLE).await,
            // Somebody wants another one first.
            Err(CheckpointError::TooLate { .. }) => {}
            Err(error) => {
                self.count_failure(&error);
                sleep(self.pause()).await;
            }
        }
    }

    /// Tries some times to take one of what is there now, or at first of what will be there in `margin`
    /// steps.
    async fn insist(&mut self, mut margin: u64) -> Taken {
        let (mut generation, mut seen) = self.present();
        let mut trouble = "training is too fast for a cut".to_owned();
        for attempt in 0..ATTEMPTS_MAX {
            let patience = if margin == 0 { REACHED_MAX } else { AHEAD_FOR_MAX };
            let at = Version(seen.0 + margin);
            match self.take(generation, at, Patience::of(patience)).await {
                Ok(id) => return Taken { latest: Some(id), trouble: None },
                // What we know is of the one before: the present one may never come so far.
                Err(error @ CheckpointError::Office(OfficeError::OtherGeneration { .. })) => {
                    trouble = error.to_string();
                    sleep(IDLE).await;
                    ((generation, seen), margin) = (self.present(), 0);
                }
                // The slot is on its way to the next one already, and so are the others.
                Err(CheckpointError::Past { wanted, present, .. }) if wanted == present => {
                    (seen, margin) = (Version(present.0 + 1), 0);
                }
                Err(CheckpointError::Past { present, .. }) => {
                    seen = present;
                    // Perhaps nobody trains any more, and that is where it ended.
                    margin = if attempt == 0 { 0 } else { (margin * 4).max(2) };
                }
                Err(CheckpointError::Office(error @ OfficeError::QueuesMoved)) => {
                    trouble = error.to_string();
                }
                // Training does not get there soon, or ever: what is there now, as slots told, will do.
                Err(error @ CheckpointError::TooLate { .. }) if 0 < margin => {
                    trouble = error.to_string();
                    let (now, version) = self.present();
                    seen = if now == generation { seen.max(version) } else { version };
                    (generation, margin) = (now, 0);
                }
                Err(error) => {
                    self.count_failure(&error);
                    trouble = error.to_string();
                    break;
                }
            }
        }
        let latest = self.office.facts.borrow().checkpoint.clone();
        Taken { latest, trouble: Some(trouble) }
    }

    /// Takes the one that holds the final parameters, or fails to, once a generation: whoever asks again
    /// after a lost reply, or because a slow store took longer than a call, gets the same.
    async fn take_last_one(&mut self, generation: Generation, version: Version) -> Taken {
        if let Some((_, taken)) = self.last_one.as_ref().filter(|(known, _)| *known == generation) {
            return taken.clone();
        }
        let taken = match self.take(generation, version, Patience::of(REACHED_MAX)).await {
            Ok(id) => Taken { latest: Some(id), trouble: None },
            Err(error) => {
                self.count_failure(&error);
                Taken { latest: None, trouble: Some(error.to_string()) }
            }
        };
        self.last_one = Some((generation, taken.clone()));
        taken
    }

    /// The generation that we know of, and how far it is, as of some moments ago.
    fn present(&self) -> (Generation, Version) {
        let facts = self.office.facts.borrow();
        (facts.generation, facts.position.version)
    }

    /// Takes one checkpoint of that generation, in synchronous mode at version `at`, in asynchronous
    /// mode at once.
    async fn take(
        &mut self,
        wanted: Generation,
        at: Version,
        patience: Patience,
    ) -> Result<String, CheckpointError> {
        let generation: GenerationRecord = self
            .etcd
            .get_json(&self.keys.generation())
            .await?
            .ok_or(CheckpointError::NoGeneration)?;
        // A version means something in its own generation only: another one may never come so far.
        if wanted != generation.generation {
            let (found, present) = (wanted, generation.generation);
            return Err(OfficeError::OtherGeneration { found, present }.into());
        }
        let slots = snapshot::slots(&self.etcd, &self.keys, &generation).await?;
        // What the queues call done was acknowledged before, so the shards, cut later, reflect it.
        let queue = self.office.ask(|reply| Event::Queues { reply }).await?;
        let version = match self.spec.mode {
            Mode::Async => None,
            Mode::Sync => Some(at),
        };
        let facts = &self.office.facts;
        let saved = snapshot::shards(&self.store, slots, version, patience, facts).await;
        if let Err(error @ CheckpointError::Diverged { .. }) = &saved {
            let (generation, reason) = (generation.generation, error.to_string());
            self.office.ask(|reply| Event::Diverged { generation, reason, reply }).await?;
        }
        let saved = saved?;
        let record = snapshot::assemble(&generation, saved, queue)?;
        let id = format!("{:012}-{}", record.position.version.0, chance::uuid().simple());
        let (named, version) = (id.clone(), record.position.version.0);
        let record = Box::new(record);
        self.uncollected = Some(id.clone());
        self.office.ask(|reply| Event::Checkpoint { id: named, record, reply }).await?;
        info!(checkpoint = id, version, "checkpoint committed");
        {
            let mut health = self.health.lock().expect("no holder panics");
            let committed = health.committed + 1;
            let last = Some(Instant::now());
            *health = Health { committed, last, failures_in_a_row: 0, trouble: None };
        }
        Ok(id)
    }

    /// Deletes what a new checkpoint makes superfluous. Nothing that may be dropped half-way does so: a
    /// manifest would be gone, and its files would stay.
    async fn collect(&mut self) {
        let Some(id) = self.uncollected.take() else { return };
        let keep = self.spec.checkpoint.keep as usize;
        let (etcd, keys, store) = (&self.etcd, &self.keys, &self.store);
        let collected = collection::old_checkpoints(etcd, keys, store, &self.office, keep, &id);
        if let Err(error) = collected.await {
            warn!(%error, "old checkpoints are not all deleted");
        }
    }

    fn count_failure(&self, error: &CheckpointError) {
        let mut health = self.health.lock().expect("no holder panics");
        health.failures_in_a_row += 1;
        health.trouble = Some(error.to_string());
        warn!(%error, in_a_row = health.failures_in_a_row, "no checkpoint could be taken");
    }

    /// The pause after a failure: longer after each, with jitter.
    fn pause(&self) -> Duration {
        let failures = self.health.lock().expect("no holder panics").failures_in_a_row;
        let second = pauses().nth(PAUSES_TO_A_SECOND).unwrap_or(PAUSE_MAX);
        (second * failures.max(1)).min(PAUSE_MAX)
    }

    /// Deletes orphans, seldom.
    async fn tidy(&mut self) {
        if self.swept.is_some_and(|swept| swept.elapsed() < collection::SWEEP_EVERY) {
            return;
        }
        self.swept = Some(Instant::now());
        let folder = self.spec.shards_folder();
        let swept = collection::orphans(&self.etcd, &self.keys, &self.store, &folder);
        if let Err(error) = swept.await {
            warn!(%error, "orphans are not all deleted");
        }
    }
}

/// Sleeps for ever if nothing is due.
pub(crate) async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => steadfast_host::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
