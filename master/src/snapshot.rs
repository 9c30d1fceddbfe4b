//! One cut over all slots: asks each for its shard, and puts the answers together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::keys::Keys;
use steadfast_common::layout::ParamSpec;
use steadfast_common::records::{
    CheckpointRecord, GenerationRecord, PositionRecord, PserverRecord, QueueSnapshot, ShardRecord,
};
use steadfast_coord::Etcd;
use steadfast_host::net::dial;
use steadfast_host::role::Role;
use steadfast_host::task::{Broken, TaskSet};
use steadfast_host::time::{Instant, unix_ms};
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::{SnapshotReply, SnapshotRequest, Target, snapshot_reply};
use steadfast_store::Location;
use tokio::sync::watch;
use tracing::warn;

use crate::board::Facts;
use crate::checkpoints::{CheckpointError, sleep_until};
use crate::office::OfficeError;

/// How long slots may still upload once another one has failed: what they do not tell us of is deleted as
/// an orphan, much later.
const LEFTOVERS_MAX: Duration = Duration::from_secs(60);

/// How long one question waits at a pserver for the version.
const WAIT_MS: u64 = 5_000;

/// How long slots may take to come to a version. The upload that follows is not bounded by it.
#[derive(Clone, Debug)]
pub(crate) struct Patience {
    pub most: Duration,
    /// Nobody waits for a version any more: a slot that is not there, or has failed, makes the others'
    /// shards useless.
    pub in_vain: Arc<AtomicBool>,
}

impl Patience {
    /// That long.
    pub fn of(most: Duration) -> Self {
        Self { most, in_vain: Arc::default() }
    }
}

/// A slot that is asked for its shard.
pub(crate) struct Asked {
    slot: Slot,
    target: Target,
    address: String,
}

/// Where the holders of a generation's slots are.
pub(crate) async fn slots(
    etcd: &Etcd,
    keys: &Keys,
    generation: &GenerationRecord,
) -> Result<Vec<Asked>, CheckpointError> {
    let mut slots = Vec::new();
    for (slot, incarnation) in generation.slots.iter().enumerate() {
        let slot = Slot(slot as u32);
        let nobody = || CheckpointError::NoHolder { slot };
        let entry = etcd.get(&keys.ps(slot)).await?.ok_or_else(nobody)?;
        let record: PserverRecord = entry.json()?;
        if record.incarnation(entry.create_revision) != *incarnation {
            return Err(nobody());
        }
        let target = Target {
            generation: generation.generation.0,
            slot: slot.0,
            incarnation: incarnation.0,
        };
        slots.push(Asked { slot, target, address: record.address });
    }
    Ok(slots)
}

/// All shards of the cut. If one fails, the others' objects are deleted again. A slot may take as
/// long as `patience` says to reach the version. Then it uploads its shard, for which it has as long as the
/// store lets it take for so many bytes: whoever does not live through that loses its slot, and so the
/// generation ends.
pub(crate) async fn shards(
    store: &Location,
    slots: Vec<Asked>,
    version: Option<Version>,
    patience: Patience,
    facts: &watch::Receiver<Arc<Facts>>,
) -> Result<Vec<SnapshotReply>, CheckpointError> {
    let mut asked = TaskSet::default();
    for slot in slots {
        let (patience, facts) = (patience.clone(), facts.clone());
        asked.spawn(async move {
            let generation = Generation(slot.target.generation);
            let answer = tokio::select! {
                biased;
                answer = snapshot(slot, version, &patience) => answer,
                over = generation_over(generation, facts) => Err(over.into()),
            };
            patience.in_vain.fetch_or(answer.is_err(), Ordering::Relaxed);
            answer
        });
    }
    let (mut saved, mut failure, mut until) = (Vec::new(), None, None);
    loop {
        let next = tokio::select! {
            biased;
            next = asked.join_next() => next,
            () = sleep_until(until) => None,
        };
        let Some(answer) = next else { break };
        let broken = |error: Broken| CheckpointError::Broken(error.to_string());
        match answer.map_err(broken).flatten() {
            Ok(reply) => saved.push(reply),
            // After the first all others are in vain, and say no more than that.
            Err(error) => {
                failure.get_or_insert(error);
                until.get_or_insert(Instant::now() + LEFTOVERS_MAX);
            }
        }
    }
    let Some(error) = failure else { return Ok(saved) };
    for reply in saved {
        if let Err(error) = delete(store, &reply).await {
            warn!(%error, "a shard that is of no use is not deleted yet");
        }
    }
    Err(error)
}

async fn delete(store: &Location, reply: &SnapshotReply) -> Result<(), CheckpointError> {
    let shard: ShardRecord = serde_json::from_slice(&reply.shard)?;
    Ok(store.child(&shard.object)?.delete().await?)
}

/// Waits until the job has another generation, or this master does not act any more.
async fn generation_over(found: Generation, mut facts: watch::Receiver<Arc<Facts>>) -> OfficeError {
    match facts.wait_for(|facts| found < facts.generation).await {
        Ok(facts) => OfficeError::OtherGeneration { found, present: facts.generation },
        Err(_) => OfficeError::NotActing,
    }
}

/// One slot's shard. Nobody waits for the version once all is in vain: the slot may never come to it.
async fn snapshot(
    asked: Asked,
    version: Option<Version>,
    patience: &Patience,
) -> Result<SnapshotReply, CheckpointError> {
    let slot = asked.slot;
    let failed = |reason: String| CheckpointError::Slot { slot, reason };
    let mut client = PserverClient::new(dial(&asked.address, Role::Pserver).map_err(failed)?);
    let started = Instant::now();
    loop {
        let left = patience.most.saturating_sub(started.elapsed());
        let request = SnapshotRequest {
            target: Some(asked.target),
            version: version.map(|version| version.0),
            wait_ms: WAIT_MS.min(left.as_millis() as u64),
        };
        let reply = client.snapshot(request).await;
        let reply = reply.map_err(|status| failed(status.message().to_owned()))?.into_inner();
        match (reply.answer(), version) {
            (snapshot_reply::Answer::Saved, _) => return Ok(reply),
            (snapshot_reply::Answer::Diverged, _) => {
                let at = Version(reply.version);
                return Err(CheckpointError::Diverged { slot, at, what: reply.diverged });
            }
            (snapshot_reply::Answer::NotYet, _) | (snapshot_reply::Answer::Past, None) => {
                if left.is_zero() || patience.in_vain.load(Ordering::Relaxed) {
                    return Err(CheckpointError::TooLate { slot });
                }
            }
            (snapshot_reply::Answer::Past, Some(wanted)) => {
                let present = Version(reply.version);
                return Err(CheckpointError::Past { slot, wanted, present });
            }
        }
    }
}

/// The manifest of a cut.
pub(crate) fn assemble(
    generation: &GenerationRecord,
    saved: Vec<SnapshotReply>,
    queue: Option<QueueSnapshot>,
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
        created_unix_ms: unix_ms(),
        set_aside: None,
    })
}
