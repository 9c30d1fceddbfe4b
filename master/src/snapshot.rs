//! A snapshot over all slots: requests each slot's shard and assembles the checkpoint manifest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::keys::Keys;
use steadfast_common::layout::ParamSpec;
use steadfast_common::records::{
    CheckpointRecord, GenerationRecord, PositionRecord, PserverRecord, QueueSnapshot, ShardRecord,
};
use steadfast_common::spec::Mode;
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

use crate::checkpoints::{CheckpointError, sleep_until};
use crate::handle::ControlError;
use crate::status_snapshot::StatusSnapshot;

/// Maximum time for the other slots to finish their uploads after one has failed. Shards that are
/// not reported by then are deleted much later, as orphans, by garbage collection.
const LEFTOVERS_MAX: Duration = Duration::from_secs(60);

/// Number of slots that begin to upload together, and the delay between two such groups.
const UPLOADS_AT_ONCE: u32 = 16;
const UPLOADS_APART: Duration = Duration::from_millis(200);

/// Maximum time for which one request waits at a pserver for the version.
const WAIT_MS: u64 = 5_000;

/// How long slots may take to reach a version. The upload that follows is not bounded by it.
#[derive(Clone, Debug)]
pub(crate) struct RetryPolicy {
    pub most: Duration,
    /// Set when a slot is missing or has failed. The snapshot has then failed, and the remaining slots stop
    /// waiting for the version.
    pub in_vain: Arc<AtomicBool>,
}

impl RetryPolicy {
    /// Returns a policy with the time limit `most`.
    pub fn of(most: Duration) -> Self {
        Self { most, in_vain: Arc::default() }
    }
}

/// A slot whose shard is requested.
pub(crate) struct Asked {
    slot: Slot,
    target: Target,
    address: String,
}

/// Looks up the holders of a generation's slots.
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

/// Requests the shards of all slots. If one slot fails, the objects of the others are deleted. `policy`
/// bounds the time to reach the version; the upload that follows is bounded by the store's limit for its
/// size. A pserver that dies during the upload loses its slot, which ends the generation and the request.
pub(crate) async fn shards(
    store: &Location,
    slots: Vec<Asked>,
    version: Option<Version>,
    policy: RetryPolicy,
    status: &watch::Receiver<Arc<StatusSnapshot>>,
) -> Result<Vec<SnapshotReply>, CheckpointError> {
    let mut asked = TaskSet::default();
    for slot in slots {
        let (policy, status) = (policy.clone(), status.clone());
        asked.spawn(async move {
            let generation = Generation(slot.target.generation);
            let answer = tokio::select! {
                biased;
                answer = snapshot(slot, version, &policy) => answer,
                over = generation_over(generation, status) => Err(over.into()),
            };
            policy.in_vain.fetch_or(answer.is_err(), Ordering::Relaxed);
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
            // Later errors are only consequences of the first.
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

/// Waits until the job has a newer generation or this master stops acting.
async fn generation_over(
    found: Generation,
    mut status: watch::Receiver<Arc<StatusSnapshot>>,
) -> ControlError {
    match status.wait_for(|status| found < status.generation).await {
        Ok(status) => ControlError::OtherGeneration { found, present: status.generation },
        Err(_) => ControlError::NotActing,
    }
}

/// Returns the delay between a slot's snapshot and its upload: it spreads the load that a large job puts on
/// the store.
fn upload_after(slot: Slot) -> Duration {
    UPLOADS_APART * (slot.0 / UPLOADS_AT_ONCE)
}

/// Requests one slot's shard. Stops waiting for the version once another slot has failed, because this slot
/// may never reach it.
async fn snapshot(
    asked: Asked,
    version: Option<Version>,
    policy: &RetryPolicy,
) -> Result<SnapshotReply, CheckpointError> {
    let slot = asked.slot;
    let failed = |reason: String| CheckpointError::Slot { slot, reason };
    let mut client = PserverClient::new(dial(&asked.address, Role::Pserver).map_err(failed)?);
    let started = Instant::now();
    loop {
        let left = policy.most.saturating_sub(started.elapsed());
        let request = SnapshotRequest {
            target: Some(asked.target),
            version: version.map(|version| version.0),
            wait_ms: WAIT_MS.min(left.as_millis() as u64),
            upload_after_ms: upload_after(slot).as_millis() as u64,
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
                if left.is_zero() || policy.in_vain.load(Ordering::Relaxed) {
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

/// Assembles the manifest of a checkpoint.
///
/// # Errors
/// [`CheckpointError::SlotsDisagree`] if the slots of a synchronous job have not applied the same records.
pub(crate) fn assemble(
    mode: Mode,
    generation: &GenerationRecord,
    saved: Vec<SnapshotReply>,
    queue: Option<QueueSnapshot>,
) -> Result<CheckpointRecord, CheckpointError> {
    if mode == Mode::Sync {
        check_agreement(&saved)?;
    }
    let mut shards = Vec::new();
    let mut position: Option<PositionRecord> = None;
    let mut params = Vec::new();
    for reply in saved {
        shards.push(serde_json::from_slice::<ShardRecord>(&reply.shard)?);
        let of_shard: PositionRecord = serde_json::from_slice(&reply.position)?;
        // In synchronous mode all positions are equal; in asynchronous mode all shards reflect the lowest.
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
        invalidated: None,
    })
}

/// Checks that all slots of a synchronous job have applied the same records. They differ if a task was given
/// up after a lane was pushed to one slot and before it was pushed to another.
fn check_agreement(saved: &[SnapshotReply]) -> Result<(), CheckpointError> {
    let Some((first, others)) = saved.split_first() else { return Ok(()) };
    let differs =
        |it: &&SnapshotReply| it.position != first.position || it.checksum != first.checksum;
    let Some(other) = others.iter().find(differs) else { return Ok(()) };
    let slot = |reply: &SnapshotReply| {
        serde_json::from_slice::<ShardRecord>(&reply.shard).map(|shard| shard.slot)
    };
    Err(CheckpointError::SlotsDisagree { slots: [slot(first)?, slot(other)?] })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I7
    #[test]
    fn a_manifest_of_slots_that_applied_other_records_is_refused() {
        let reply = |slot: u32, examples: u64, checksum: u64| {
            SnapshotReply {
            shard: serde_json::json!({
                "slot": slot, "incarnation": 1, "object": "o", "sha256": "", "size_bytes": 1, "version": 3,
            })
            .to_string()
            .into(),
            position: format!(r#"{{"version":3,"pass":0,"pass_start":0,"examples":{examples}}}"#).into(),
            checksum,
            ..SnapshotReply::default()
        }
        };
        let generation = GenerationRecord::default();
        let of = |mode, saved: &[SnapshotReply]| assemble(mode, &generation, saved.to_vec(), None);
        assert!(of(Mode::Sync, &[reply(0, 30, 7), reply(1, 30, 7)]).is_ok());
        for other in [reply(1, 29, 7), reply(1, 30, 8)] {
            let error = of(Mode::Sync, &[reply(0, 30, 7), other.clone()]).unwrap_err();
            assert_eq!(error.to_string(), "slots 0 and 1 have applied different records");
            assert!(of(Mode::Async, &[reply(0, 30, 7), other]).is_ok());
        }
    }

    /// S004-68
    #[test]
    fn at_most_sixteen_slots_begin_to_upload_at_a_time() {
        let begins: Vec<Duration> = (0..100).map(|slot| upload_after(Slot(slot))).collect();
        for begin in &begins {
            assert!(begins.iter().filter(|it| *it == begin).count() <= 16);
        }
        assert_eq!((begins[0], begins[15]), (Duration::ZERO, Duration::ZERO));
        assert!(begins.is_sorted() && begins[16] != Duration::ZERO);
    }
}
