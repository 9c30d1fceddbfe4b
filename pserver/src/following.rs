//! Follows a slot as a spare: copies its shard, applies each of its steps, and takes the slot over when its holder is
//! lost.

use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Incarnation, Slot, Version};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::contribution::ContributionName;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{FollowerRecord, GenerationRecord, PserverRecord};
use steadfast_common::role::Role;
use steadfast_coord::{CoordError, Entry, Etcd, Mirror, Op, Range, Session, Unchanged, View};
use steadfast_host::task::{TaskSet, low_priority};
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_net::{Channel, TlsIdentity};
use steadfast_process::Readiness;
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::{
    FollowSlotRequest, FollowStepHeader, FollowStepRequest, ReportDigestRequest, Target,
};
use steadfast_proto::{Decoder, TensorMethod, call, framed, kind, next, status};
use steadfast_pserver_core::contribution::Contribution;
use tokio::sync::watch;
use tonic::Status;
use tracing::{debug, info, warn};

use crate::event::{Event, FollowerReport, Keeper, SlotSnapshot, SnapshotAnswer};
use crate::event_loop::EventLoopHandle;
use crate::push_assembler::PushAssembler;
use crate::run::{JobContext, JobSource};
use crate::shard_file::{SavedShard, ShardError, ShardStore};
use crate::state;
use crate::tensor_service::push_name;

/// Pause before another attempt to follow a slot. It is doubled after each copy that failed, since copies are expensive.
const RETRY: Duration = Duration::from_millis(500);
const DOUBLED_MAX: u32 = 7;

/// After this time, a slot was followed well, and earlier failures do not matter.
const FOLLOWED_WELL: Duration = Duration::from_secs(60);

/// Pause before a call to the holder is repeated, and how often that is done.
const CALL_PAUSE: Duration = Duration::from_millis(100);
const CALLS_MAX: u32 = 50;

/// The longest time that a report of a state takes, and the pause before it is sent again.
const REPORT_MAX: Duration = Duration::from_secs(3);
const REPORT_PAUSE: Duration = Duration::from_secs(1);

/// The longest time without a byte of an answer; then the call is repeated.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A spare.
pub(crate) struct Spare<'a> {
    pub etcd: &'a Etcd,
    pub keys: &'a Keys,
    pub tls: &'a TlsIdentity,
    pub session: &'a Session,
    pub record: &'a PserverRecord,
    pub source: &'a JobSource<'a>,
    pub readiness: &'a Readiness,
}

/// A slot that was taken over with its shard.
pub(crate) struct TakenOver {
    pub job: JobContext,
    pub event_loop: EventLoopHandle,
    /// The incarnation of the shard under the holder before.
    pub followed: Incarnation,
}

/// The mirrors that a spare follows.
struct Mirrors {
    slots: Mirror,
    followers: Mirror,
    generation: Mirror,
}

/// The slot that is followed.
#[derive(Clone, Copy, Debug)]
struct Followed {
    slot: Slot,
    of: Incarnation,
}

/// Says why a slot is not followed, or not any more.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("the slot has another holder")]
    OtherHolder,
    #[error("the copy is not that of the present generation")]
    Outdated,
    #[error("the job has fewer slots now")]
    Surplus,
    #[error("the settings of the job changed meanwhile")]
    JobChanged,
    #[error(transparent)]
    Coord(#[from] CoordError),
    #[error("{}", .0.message())]
    Call(Status),
    #[error("the copy cannot take a step: {0}")]
    Broken(String),
}

impl Ended {
    /// Returns whether another attempt may fail in the same way after a whole copy was made.
    fn is_failure(&self) -> bool {
        match self {
            Self::OtherHolder | Self::Outdated | Self::Surplus | Self::JobChanged => false,
            // The slot has no values yet, or another follower.
            Self::Call(status) => {
                !matches!(kind(status), ErrorKind::NotYet | ErrorKind::Conflict | ErrorKind::Stale)
            }
            Self::Coord(_) | Self::Broken(_) => true,
        }
    }
}

impl From<Status> for Ended {
    fn from(status: Status) -> Self {
        Self::Call(status)
    }
}

impl Spare<'_> {
    /// Follows slots, one after the other, until one is taken over.
    ///
    /// # Errors
    /// If the mirrors cannot be started.
    pub fn take_over(&self) -> BoxFuture<'_, Result<TakenOver, CoordError>> {
        self.follow_slots().boxed()
    }

    async fn follow_slots(&self) -> Result<TakenOver, CoordError> {
        let mirror = |range| Mirror::start(self.etcd, range);
        let mirrors = Mirrors {
            slots: mirror(Range::Prefix(self.keys.ps_prefix())).await?,
            followers: mirror(Range::Prefix(self.keys.followers_prefix())).await?,
            generation: mirror(Range::Key(self.keys.generation())).await?,
        };
        let (mut slots, mut followers) = (mirrors.slots.subscribe(), mirrors.followers.subscribe());
        let mut failures = 0;
        loop {
            let (held, followed) =
                (slots.borrow_and_update().clone(), followers.borrow_and_update().clone());
            self.release(&held, &followed).await;
            if let Ok(Some(generation)) = mirrors.generation.view().single::<GenerationRecord>() {
                for (slot, holder) in self.free_to_follow(&held, &followed) {
                    let began = Instant::now();
                    let ended = self.follow(slot, &holder, &generation, &mirrors).await;
                    if FOLLOWED_WELL < began.elapsed() {
                        failures = 0;
                    }
                    match ended {
                        Ok(taken) => return Ok(taken),
                        Err(reason) if reason.is_failure() => {
                            failures += 1;
                            warn!(%slot, %reason, failures, "the slot cannot be followed");
                        }
                        Err(reason) => debug!(%slot, %reason, "the slot is not followed"),
                    }
                }
            }
            let pause = RETRY * 2_u32.pow(failures.min(DOUBLED_MAX));
            tokio::select! {
                biased;
                _ = slots.changed(), if failures == 0 => {}
                _ = followers.changed(), if failures == 0 => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// Deletes what earlier attempts have left under the name of this pserver: a slot that was claimed too late, and a
    /// record that it follows one.
    async fn release(&self, held: &View, followed: &View) {
        let is_ours = |entry: &&Entry| entry.lease == self.session.lease();
        let was_followed =
            |entry: &&Entry| entry.json::<PserverRecord>().is_ok_and(|it| it.followed.is_some());
        let late = held.entries.values().filter(is_ours).filter(was_followed);
        for entry in late.chain(followed.entries.values().filter(is_ours)) {
            release(self.etcd, entry).await;
        }
    }

    /// Returns the slots without a follower, with their holders, unless the job has enough followers.
    fn free_to_follow(&self, held: &View, followed: &View) -> Vec<(Slot, Entry)> {
        if self.source.warm_spares() as usize <= followed.entries.len() {
            return Vec::new();
        }
        let slot_of = |entry: &Entry| Some((self.keys.slot_of(&entry.key)?, entry.clone()));
        let free = held.entries.values().filter_map(slot_of);
        free.filter(|(slot, _)| !followed.entries.contains_key(&self.keys.follower(*slot)))
            .collect()
    }

    /// Follows one slot until it is taken over.
    async fn follow(
        &self,
        slot: Slot,
        holder: &Entry,
        generation: &GenerationRecord,
        mirrors: &Mirrors,
    ) -> Result<TakenOver, Ended> {
        let record: PserverRecord = holder.json()?;
        let of = record.incarnation(holder.create_revision);
        let is_other = record.protocol != self.record.protocol;
        if is_other || generation.slots.get(slot.0 as usize) != Some(&of) {
            return Err(Ended::OtherHolder);
        }
        let job = self.source.context().await;
        let job = job.map_err(|failure| Ended::Broken(failure.to_string()))?;
        if job.changes != generation.changes {
            return Err(Ended::JobChanged);
        }
        let invalid = |reason| Ended::Call(status(ErrorKind::Invalid, reason));
        let channel = self.tls.dial(&record.address, Role::Pserver).map_err(invalid)?;
        let target =
            Target { generation: generation.generation.0, slot: slot.0, incarnation: of.0 };
        let (version, mut event_loop) = self.copy(&job, generation, target, &channel).await?;
        info!(%slot, %version, "follows the slot");
        self.readiness.set_not_ready(format!("spare: follows slot {slot}"));
        // The holder of a slot does without its follower only after a commit.
        if job.shards.rules.mode == Mode::Sync {
            self.session.outlast_etcd();
        }
        let followed = Followed { slot, of };
        let (refused_tx, refused) = watch::channel(false);
        let copied =
            self.copy_steps(&job.shards, &event_loop, target, version, &channel, refused_tx);
        let outcome = tokio::select! {
            biased;
            claimed = self.claim_when_free(followed, mirrors, refused) => claimed,
            ended = copied => Err(ended),
        };
        let incarnation = match outcome {
            Ok(incarnation) => incarnation,
            Err(ended) => {
                warn!(%slot, reason = %ended, "no longer follows the slot");
                // Whatever is recorded of the copy must be gone before it is.
                let key = self.keys.follower(slot);
                let ours = self.etcd.get(&key).await?;
                if let Some(entry) = ours.filter(|it| it.lease == self.session.lease()) {
                    release(self.etcd, &entry).await;
                }
                return Err(ended);
            }
        };
        info!(%slot, "slot taken over with its shard");
        event_loop.incarnation = incarnation;
        Ok(TakenOver { job, event_loop, followed: of })
    }

    /// Copies the shard of a slot.
    async fn copy(
        &self,
        job: &JobContext,
        generation: &GenerationRecord,
        target: Target,
        channel: &Channel,
    ) -> Result<(Version, EventLoopHandle), Ended> {
        let request = FollowSlotRequest {
            target: Some(target),
            follower: self.record.id.to_string(),
            address: self.record.address.clone(),
            admin: self.record.admin.clone(),
            lease: self.session.lease(),
        };
        let slot = Slot(target.slot);
        let mut channel = channel.clone();
        // A slot in the middle of a step waits for its end.
        let begun = call(&mut channel, TensorMethod::FollowSlot, vec![framed(&request)]);
        let mut body = begun.await?;
        let (number, loaded) = state::receive(&job.shards, slot, &mut body).await?;
        let version = loaded.snapshot.position.version;
        let event_loop = EventLoopHandle::start(slot, Incarnation(0), job.shards.rules.clone());
        let record = GenerationRecord { kept: Vec::new(), ..generation.clone() };
        if number != record.generation {
            return Err(Ended::Outdated);
        }
        let begun = event_loop.call(|reply| Event::Generation { record, reply }).await;
        begun.map_err(|error| Ended::Broken(error.to_string()))?;
        event_loop.send(Event::Restored { generation: number, loaded }).await;
        Ok((version, event_loop))
    }

    /// Copies one step after the other, until one fails. Shows with `refused` that the holder does not know this
    /// follower any more.
    async fn copy_steps(
        &self,
        shards: &ShardStore,
        event_loop: &EventLoopHandle,
        target: Target,
        mut version: Version,
        channel: &Channel,
        refused: watch::Sender<bool>,
    ) -> Ended {
        let mut applied = futures::future::Either::Left(std::future::ready(Ok(())));
        let mut failures = 0;
        // The reports that are being made; they end with this copy.
        let mut reports = TaskSet::default();
        let mut comparison = 0;
        loop {
            while reports.try_join_next().is_some() {}
            let request = FollowStepRequest {
                target: Some(target),
                follower: self.record.id.to_string(),
                version: version.0,
                comparison,
            };
            let step = receive_step(event_loop, channel.clone(), request);
            let (step, before) = futures::future::join(step, applied).await;
            if let Err(error) = before {
                return Ended::Broken(error);
            }
            applied = futures::future::Either::Left(std::future::ready(Ok(())));
            match step {
                Ok(Received::Compare { number, save_after }) => {
                    let snapshot = match snapshot(event_loop, version).await {
                        Ok(snapshot) => snapshot,
                        Err(error) => return Ended::Broken(error),
                    };
                    comparison = number;
                    let report = ReportDigestRequest {
                        target: Some(target),
                        follower: self.record.id.to_string(),
                        comparison,
                        digest: String::new(),
                        shard: Bytes::new(),
                    };
                    let of = (Slot(target.slot), Incarnation(target.incarnation));
                    let (shards, holder) = (shards.clone(), PserverClient::new(channel.clone()));
                    // The holder waits for the newest report only.
                    reports = TaskSet::default();
                    reports.spawn(async move {
                        let state = reported(&shards, of, snapshot, save_after).await;
                        report_state(state, report, holder).await;
                    });
                }
                Ok(Received::Step { norm, name, contribution }) => {
                    failures = 0;
                    let apply = apply(event_loop, version, name, *contribution, norm).await;
                    applied = futures::future::Either::Right(apply);
                    version = Version(version.0 + 1);
                }
                Err(status) if kind(&status) == ErrorKind::Stale => {
                    debug!(reason = status.message(), "the holder of the slot refuses");
                    refused.send_replace(true);
                    return std::future::pending().await;
                }
                Err(status) if kind(&status) == ErrorKind::NotYet => {}
                // The holder may be lost, and this copy is the only one then.
                Err(status) => {
                    failures += 1;
                    if CALLS_MAX < failures {
                        debug!(reason = status.message(), "the holder of the slot does not answer");
                        refused.send_replace(true);
                        return std::future::pending().await;
                    }
                    sleep(CALL_PAUSE).await;
                }
            }
        }
    }

    /// Waits until the slot has no holder, and claims it; ends if the copy is of no use any more.
    async fn claim_when_free(
        &self,
        followed: Followed,
        mirrors: &Mirrors,
        mut refused: watch::Receiver<bool>,
    ) -> Result<Incarnation, Ended> {
        let (ps, follower) = (self.keys.ps(followed.slot), self.keys.follower(followed.slot));
        let (mut slots, mut followers) = (mirrors.slots.subscribe(), mirrors.followers.subscribe());
        let mut generation = mirrors.generation.subscribe();
        let is_ours = |entry: &&Entry| entry.lease == self.session.lease();
        loop {
            let held = slots.borrow_and_update().entries.get(&ps).cloned();
            let ours = followers.borrow_and_update().entries.get(&follower).cloned();
            let ours = ours.filter(|entry| is_ours(&entry));
            let present = generation.borrow_and_update().single::<GenerationRecord>();
            let is_refused = *refused.borrow_and_update();
            match (&held, &ours) {
                (Some(entry), _) => {
                    let holder: PserverRecord = entry.json()?;
                    // A claim whose answer was lost.
                    if is_ours(&entry) && holder.followed == Some(followed.of) {
                        return Ok(Incarnation(entry.create_revision));
                    }
                    if holder.incarnation(entry.create_revision) != followed.of {
                        return Err(Ended::OtherHolder);
                    }
                }
                (None, Some(_)) => match self.claim(followed).await {
                    Ok(Some(incarnation)) => return Ok(incarnation),
                    Ok(None) => {}
                    Err(Ended::Coord(error)) if error.is_transient() => {
                        warn!(%error, "slot not taken over yet");
                    }
                    Err(ended) => return Err(ended),
                },
                (None, None) => return Err(Ended::OtherHolder),
            }
            let current = |entry: &Entry, present: &GenerationRecord| {
                let record: Result<FollowerRecord, _> = entry.json();
                record.is_ok_and(|record| record.is_current(followed.slot, present))
            };
            match (&ours, present?) {
                (None, _) if is_refused => {
                    return Err(Ended::Call(status(ErrorKind::Stale, "its holder gave up on it")));
                }
                (Some(entry), Some(present)) if is_refused && !current(entry, &present) => {
                    return Err(Ended::Outdated);
                }
                _ => {}
            }
            tokio::select! {
                biased;
                _ = slots.changed() => {}
                _ = followers.changed() => {}
                _ = generation.changed() => {}
                _ = refused.changed(), if !is_refused => {}
                () = sleep(RETRY), if held.is_none() => {}
            }
        }
    }

    /// Claims the slot, unless it is held, or this copy is not what its holder had last. Returns `None` if a key has
    /// changed meanwhile.
    async fn claim(&self, followed: Followed) -> Result<Option<Incarnation>, Ended> {
        let Followed { slot, of } = followed;
        let follower = self.etcd.get(&self.keys.follower(slot)).await?;
        let follower = follower.filter(|entry| entry.lease == self.session.lease());
        let generation = self.etcd.get(&self.keys.generation()).await?;
        let desired: Option<u32> = self.etcd.get_json(&self.keys.ps_desired()).await?;
        let (Some(follower), Some(generation)) = (follower, generation) else { return Ok(None) };
        if desired.is_some_and(|desired| desired <= slot.0) {
            return Err(Ended::Surplus);
        }
        let (record, present): (FollowerRecord, GenerationRecord) =
            (follower.json()?, generation.json()?);
        if record.of != of || !record.is_current(slot, &present) {
            return Err(Ended::Outdated);
        }
        let unchanged = [
            Unchanged { key: self.keys.ps(slot), mod_revision: 0 },
            Unchanged { key: follower.key, mod_revision: follower.mod_revision },
            Unchanged { key: generation.key, mod_revision: generation.mod_revision },
        ];
        let record = PserverRecord { followed: Some(of), ..self.record.clone() };
        let value = serde_json::to_vec(&record).expect("records are plain data");
        let put = Op::put_leased(&self.keys.ps(slot), value, self.session.lease());
        Ok(self.etcd.put_if(&put, &unchanged).await?.map(Incarnation))
    }
}

/// Deletes a key, unless it has changed.
async fn release(etcd: &Etcd, entry: &Entry) {
    let unchanged = [Unchanged { key: entry.key.clone(), mod_revision: entry.mod_revision }];
    if let Err(error) = etcd.put_if(&Op::delete(&entry.key), &unchanged).await {
        warn!(key = entry.key, %error, "the key is not released yet");
    }
}

/// Returns the status of a step that is not complete for a while: training may wait for something.
fn silent() -> Status {
    status(ErrorKind::NotYet, "the step is not complete")
}

fn late() -> Status {
    status(ErrorKind::Unavailable, "the holder of the slot does not answer")
}

/// Holds what the holder of a slot sends to its follower.
enum Received {
    Step {
        /// The global norm of the mean gradient, if the job clips by it.
        norm: Option<f64>,
        name: ContributionName,
        contribution: Box<Contribution>,
    },
    /// Asks for a report of the follower's state, with the number of the comparison; and, after a time, to save it.
    Compare { number: u64, save_after: Option<Duration> },
}

/// Returns the state of a copy, which is at `version`.
async fn snapshot(event_loop: &EventLoopHandle, version: Version) -> Result<SlotSnapshot, String> {
    let generation = event_loop.published().borrow().generation;
    let version = Some(version);
    let keeper = Keeper::Caller;
    match event_loop.call(|reply| Event::Snapshot { generation, version, keeper, reply }).await {
        Ok(SnapshotAnswer::Snapshot { snapshot, .. }) => Ok(*snapshot),
        Ok(SnapshotAnswer::Past { present }) => Err(format!("it is at version {present}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns what to report of a state, after saving it if that is wanted. An error costs only this comparison, and the
/// holder saves its own state then.
async fn reported(
    shards: &ShardStore,
    of: (Slot, Incarnation),
    snapshot: SlotSnapshot,
    save_after: Option<Duration>,
) -> FollowerReport {
    let version = snapshot.shard.position.version;
    if let Some(after) = save_after {
        sleep(after).await;
        let (shards, snapshot) = (shards.clone(), snapshot.clone());
        let saving = async move { shards.save(of, snapshot, "").await };
        let failure = match low_priority(saving).await {
            Ok(Ok(SavedShard { record, state: Some(digest), .. })) => {
                info!(slot = %of.0, %version, "saved the shard of the slot");
                return FollowerReport { digest: Some(digest), saved: Some(record) };
            }
            Ok(Ok(_)) => "the job has no spares".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(broken) => broken.to_string(),
        };
        warn!(%version, error = failure, "the shard of the slot was not saved");
    }
    let shards = shards.clone();
    let digest = low_priority(async move {
        let SlotSnapshot { layout, shard, tables, .. } = snapshot;
        shards.state_digest(&layout, shard, &tables)
    });
    let failure = match digest.await {
        Ok(Ok(digest)) => return FollowerReport { digest: Some(digest), saved: None },
        // The state itself is not what it should be.
        Ok(Err(error @ ShardError::Encode(_))) => {
            return FollowerReport { digest: Some(format!("(none: {error})")), saved: None };
        }
        Ok(Err(error)) => error.to_string(),
        Err(broken) => broken.to_string(),
    };
    warn!(%version, error = failure, "the digest of the state cannot be computed");
    FollowerReport { digest: None, saved: None }
}

/// Reports a state to the holder of the slot.
async fn report_state(
    state: FollowerReport,
    mut report: ReportDigestRequest,
    mut holder: PserverClient<Channel>,
) {
    let json = |record| serde_json::to_vec(record).expect("records are plain data").into();
    report.shard = state.saved.as_ref().map(json).unwrap_or_default();
    report.digest = state.digest.unwrap_or_default();
    // The holder waits for it as long as its slot is followed.
    loop {
        match timeout(REPORT_MAX, holder.report_digest(report.clone())).await {
            Ok(Ok(_)) => return,
            Ok(Err(status)) => {
                warn!(reason = status.message(), "state not reported");
                if kind(&status) != ErrorKind::Unavailable {
                    return;
                }
            }
            Err(_) => warn!("state not reported: timeout"),
        }
        sleep(REPORT_PAUSE).await;
    }
}

/// Receives one step.
async fn receive_step(
    event_loop: &EventLoopHandle,
    mut channel: Channel,
    request: FollowStepRequest,
) -> Result<Received, Status> {
    let request = vec![framed(&request)];
    let begun = call(&mut channel, TensorMethod::FollowStep, request);
    let mut body = timeout(SILENCE_MAX, begun).await.map_err(|_| late())??;
    let published = event_loop.published().borrow().clone();
    let shard = published.shard.as_ref().ok_or_else(late)?;
    // The sum over all lanes may have more rows than one push.
    let mut assembler = PushAssembler::new(shard, usize::MAX);
    let mut decoder = Decoder::<FollowStepHeader>::default();
    while let Some(bytes) = timeout(SILENCE_MAX, next(&mut body)).await.map_err(|_| silent())?? {
        decoder.feed(bytes, |_, number, data| assembler.take(number, &data))?;
    }
    let header = decoder.end()?.ok_or_else(late)?;
    if 0 < header.comparison {
        let save_after = header.save_after_ms.map(Duration::from_millis);
        return Ok(Received::Compare { number: header.comparison, save_after });
    }
    let push = header.push.ok_or_else(late)?;
    let name = push_name(&push)?;
    let (contribution, _) = assembler.finish(&push)?;
    Ok(Received::Step { norm: header.norm, name, contribution: contribution.into() })
}

/// Hands a step to the event loop; the returned future completes when it is applied.
async fn apply(
    event_loop: &EventLoopHandle,
    version: Version,
    name: ContributionName,
    contribution: Contribution,
    norm: Option<f64>,
) -> impl Future<Output = Result<(), String>> + use<> {
    let generation = event_loop.published().borrow().generation;
    let (reply, applied) = tokio::sync::oneshot::channel();
    event_loop.send(Event::Push { generation, name, contribution, reply }).await;
    if let Some(norm) = norm {
        event_loop.send(Event::Norm { generation, version, norm }).await;
    }
    async move {
        match applied.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("its event loop has ended".to_owned()),
        }
    }
}
