//! Takes checkpoints: asks every slot for its shard of one cut, commits the manifest, and deletes
//! what it makes superfluous only after that.

use std::time::Duration;

use steadfast_common::ids::{Slot, Version};
use steadfast_common::keys::Keys;
use steadfast_common::layout::ParamSpec;
use steadfast_common::records::{
    CheckpointRecord, GenerationRecord, PositionRecord, PserverRecord, ShardRecord,
};
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_coord::{CoordError, Etcd};
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::{SnapshotReply, SnapshotRequest, Target, snapshot_reply};
use steadfast_store::{Location, StoreError};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tonic::transport::Endpoint;
use tracing::{info, warn};
use uuid::Uuid;

use crate::office::{Event, Office, OfficeError};

/// How long one slot may take to reach the version and upload its shard.
const SLOT_TIMEOUT: Duration = Duration::from_secs(60);

/// How long one question waits at a pserver for the version.
const WAIT_MS: u64 = 5_000;

/// Pause after a checkpoint that failed.
const RETRY: Duration = Duration::from_secs(2);

/// Manifests deleted in one transaction.
const FORGOTTEN_AT_ONCE: usize = 32;

/// Attempts for one that somebody waits for.
const ATTEMPTS_MAX: u32 = 5;

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
    #[error("slot {slot} is past version {wanted} already, at {present}")]
    Past { slot: Slot, wanted: Version, present: Version },
    #[error("a question for a shard broke: {0}")]
    Broken(String),
    #[error("a shard's answer cannot be read: {0}")]
    BadAnswer(#[from] serde_json::Error),
}

/// A handle to the task that takes checkpoints.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    requests: mpsc::Sender<oneshot::Sender<Option<String>>>,
}

impl Checkpoints {
    /// Takes a checkpoint now; returns its id, or that of the latest one if none can be taken.
    pub async fn take_now(&self) -> Option<String> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(reply).await.ok()?;
        answer.await.ok().flatten()
    }
}

/// Takes checkpoints for one reign.
pub struct Keeper {
    etcd: Etcd,
    keys: Keys,
    spec: JobSpec,
    store: Location,
    office: Office,
}

/// Where requests for a checkpoint come in.
pub type Requests = mpsc::Receiver<oneshot::Sender<Option<String>>>;

impl Keeper {
    /// A keeper, the handle to it, and what comes in by the handle.
    pub fn new(
        etcd: Etcd,
        keys: Keys,
        spec: JobSpec,
        store: Location,
        office: Office,
    ) -> (Self, Checkpoints, Requests) {
        let (tx, requests) = mpsc::channel(8);
        (Self { etcd, keys, spec, store, office }, Checkpoints { requests: tx }, requests)
    }

    /// Takes checkpoints as the job wants them, and whenever somebody asks, until dropped.
    pub async fn run(self, mut requests: Requests) {
        let mut last = tokio::time::Instant::now();
        loop {
            let due = self.spec.checkpoint.every.map(|every| last + every);
            let steps = self.spec.checkpoint.every_steps;
            tokio::select! {
                request = requests.recv() => match request {
                    Some(reply) => {
                        let id = self.insist().await;
                        let _ = reply.send(id);
                    }
                    None => return,
                },
                () = sleep_until(due) => {
                    self.insist().await;
                }
                () = self.by_steps(steps) => {}
            }
            last = tokio::time::Instant::now();
        }
    }

    /// One checkpoint at the next multiple of `steps`.
    async fn by_steps(&self, steps: Option<u64>) {
        let Some(steps) = steps else { return std::future::pending().await };
        let present = self.office.facts.borrow().position.version.0;
        let wanted = Version((present / steps + 1) * steps);
        match self.take(wanted).await {
            Ok(_) => {}
            // Training was faster than we; the next multiple will do.
            Err(CheckpointError::Past { .. }) => tokio::time::sleep(RETRY / 20).await,
            Err(CheckpointError::NoGeneration | CheckpointError::NoHolder { .. }) => {
                tokio::time::sleep(RETRY).await;
            }
            Err(error) => {
                warn!(%error, "no checkpoint this time");
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    /// Tries some times; the latest checkpoint's id in any case.
    async fn insist(&self) -> Option<String> {
        let (mut seen, mut margin) = (self.office.facts.borrow().position.version, 2);
        for _ in 0..ATTEMPTS_MAX {
            match self.take(Version(seen.0 + margin)).await {
                Ok(id) => return Some(id),
                Err(CheckpointError::Past { present, .. }) => {
                    seen = present;
                    margin *= 4;
                }
                Err(error) => {
                    warn!(%error, "no checkpoint could be taken");
                    break;
                }
            }
        }
        self.office.facts.borrow().checkpoint.clone()
    }

    /// Takes one checkpoint, in synchronous mode at version `at`, in asynchronous mode at once.
    async fn take(&self, at: Version) -> Result<String, CheckpointError> {
        let generation: GenerationRecord = self
            .etcd
            .get_json(&self.keys.generation())
            .await?
            .ok_or(CheckpointError::NoGeneration)?;
        let slots = self.slots(&generation).await?;
        // What the queues call done was acknowledged before, so the shards, cut later, reflect it.
        let queue = self.office.ask(|reply| Event::Queues { reply }).await?;
        let version = match self.spec.mode {
            Mode::Async => None,
            Mode::Sync => Some(at),
        };
        let saved = self.snapshots(slots, version).await?;
        let record = assemble(&generation, saved, queue)?;
        let id = format!("{:012}-{}", record.position.version.0, Uuid::new_v4().simple());
        let kept = record.clone();
        let named = id.clone();
        self.office
            .ask(|reply| Event::Checkpoint { id: named, record: Box::new(kept), reply })
            .await?;
        info!(checkpoint = id, version = record.position.version.0, "checkpoint committed");
        if let Err(error) = self.collect(&id).await {
            warn!(%error, "old checkpoints are not all deleted");
        }
        Ok(id)
    }

    async fn slots(&self, generation: &GenerationRecord) -> Result<Vec<Asked>, CheckpointError> {
        let mut slots = Vec::new();
        for (slot, incarnation) in generation.slots.iter().enumerate() {
            let slot = Slot(slot as u32);
            let entry = self.etcd.get(&self.keys.ps(slot)).await?;
            let entry = entry.filter(|entry| entry.create_revision == incarnation.0);
            let record: PserverRecord = entry.ok_or(CheckpointError::NoHolder { slot })?.json()?;
            let target = Target {
                generation: generation.generation.0,
                slot: slot.0,
                incarnation: incarnation.0,
            };
            slots.push(Asked { slot, target, address: record.address });
        }
        Ok(slots)
    }

    /// All shards of the cut. If one fails, the others' objects are deleted again.
    async fn snapshots(
        &self,
        slots: Vec<Asked>,
        version: Option<Version>,
    ) -> Result<Vec<SnapshotReply>, CheckpointError> {
        let mut asked = JoinSet::new();
        for slot in slots {
            asked.spawn(async move {
                let id = slot.slot;
                match tokio::time::timeout(SLOT_TIMEOUT, snapshot(slot, version)).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        let reason = "no answer in time".to_owned();
                        Err(CheckpointError::Slot { slot: id, reason })
                    }
                }
            });
        }
        let (mut saved, mut failure) = (Vec::new(), None);
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok(Ok(reply)) => saved.push(reply),
                Ok(Err(error)) => failure = Some(error),
                Err(error) => failure = Some(CheckpointError::Broken(error.to_string())),
            }
        }
        match failure {
            None => Ok(saved),
            Some(error) => {
                for reply in saved {
                    let shard: ShardRecord = serde_json::from_slice(&reply.shard)?;
                    self.store.child(&shard.object)?.delete().await?;
                }
                Err(error)
            }
        }
    }

    /// Deletes all but the newest checkpoints: manifests first, then objects that none names.
    async fn collect(&self, latest: &str) -> Result<(), CheckpointError> {
        let prefix = self.keys.checkpoints_prefix();
        let view = self.etcd.list(&prefix).await?;
        let mut manifests: Vec<(String, i64, CheckpointRecord)> = Vec::new();
        for (key, entry) in &view.entries {
            let id = key.strip_prefix(&prefix).unwrap_or(key);
            if *key != self.keys.checkpoint_latest() {
                manifests.push((id.to_owned(), entry.create_revision, entry.json()?));
            }
        }
        manifests.sort_by_key(|(_, revision, _)| std::cmp::Reverse(*revision));
        let keep = self.spec.checkpoint.keep as usize;
        let old: Vec<_> = manifests.into_iter().skip(keep).filter(|it| it.0 != latest).collect();
        if old.is_empty() {
            return Ok(());
        }
        for some in old.chunks(FORGOTTEN_AT_ONCE) {
            let ids: Vec<String> = some.iter().map(|(id, ..)| id.clone()).collect();
            self.office.ask(|reply| Event::ForgetCheckpoints { ids, reply }).await?;
            for shard in some.iter().flat_map(|(_, _, record)| &record.shards) {
                self.store.child(&shard.object)?.delete().await?;
            }
        }
        Ok(())
    }
}

struct Asked {
    slot: Slot,
    target: Target,
    address: String,
}

async fn sleep_until(due: Option<tokio::time::Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

async fn snapshot(
    asked: Asked,
    version: Option<Version>,
) -> Result<SnapshotReply, CheckpointError> {
    let slot = asked.slot;
    let failed = |reason: String| CheckpointError::Slot { slot, reason };
    let endpoint = Endpoint::from_shared(format!("http://{}", asked.address))
        .map_err(|error| failed(error.to_string()))?;
    let channel = endpoint.connect_timeout(Duration::from_secs(2)).connect_lazy();
    let mut client = PserverClient::new(channel);
    loop {
        let request = SnapshotRequest {
            target: Some(asked.target),
            version: version.map(|version| version.0),
            wait_ms: WAIT_MS,
        };
        let reply = client.snapshot(request).await;
        let reply = reply.map_err(|status| failed(status.message().to_owned()))?.into_inner();
        match (reply.answer(), version) {
            (snapshot_reply::Answer::Saved, _) => return Ok(reply),
            (snapshot_reply::Answer::NotYet, _) | (snapshot_reply::Answer::Past, None) => {}
            (snapshot_reply::Answer::Past, Some(wanted)) => {
                let present = Version(reply.version);
                return Err(CheckpointError::Past { slot, wanted, present });
            }
        }
    }
}

fn assemble(
    generation: &GenerationRecord,
    saved: Vec<SnapshotReply>,
    queue: Option<steadfast_common::records::QueueSnapshot>,
) -> Result<CheckpointRecord, CheckpointError> {
    let mut shards = Vec::new();
    let mut position: Option<PositionRecord> = None;
    let mut params = Vec::new();
    for reply in saved {
        shards.push(serde_json::from_slice::<ShardRecord>(&reply.shard)?);
        let of_shard: PositionRecord = serde_json::from_slice(&reply.position)?;
        // In synchronous mode all are equal; in asynchronous mode the least is what all reflect.
        position = Some(match position {
            Some(known) if known.version <= of_shard.version => known,
            Some(_) | None => of_shard,
        });
        params = reply
            .params
            .into_iter()
            .map(|param| ParamSpec {
                name: param.name,
                shape: param.shape.into_iter().map(|side| side as usize).collect(),
            })
            .collect();
    }
    shards.sort_by_key(|shard| shard.slot);
    Ok(CheckpointRecord {
        generation: generation.generation,
        params,
        position: position.unwrap_or_default(),
        shards,
        queue,
    })
}
