//! A snapshot over all slots: requests each slot's shard and assembles the checkpoint manifest.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Lane, Millis, Slot, Version};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::position::Position;
use steadfast_common::records::{
    CheckpointRecord, GenerationRecord, PserverRecord, QueueSnapshot, ShardRecord,
};
use steadfast_common::role::Role;
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_coord::{Etcd, now};
use steadfast_host::task::{Broken, TaskSet};
use steadfast_host::time::{Instant, unix_ms};
use steadfast_net::{Channel, TlsIdentity};
use steadfast_proto::kind;
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::{SnapshotReply, SnapshotRequest, Target, snapshot_reply};
use steadfast_store::Location;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::checkpoint::coordinator::{CheckpointError, sleep_until};
use crate::checkpoint::garbage_collection;
use crate::event_loop::handle::ControlError;
use crate::status::status_snapshot::StatusSnapshot;

/// Maximum time for the other slots to finish their uploads after one has failed. Shards that are
/// not reported by then are deleted much later, as orphans, by garbage collection.
const LEFTOVERS_MAX_MS: u64 = 60_000;

/// Number of slots that begin to upload together, and the delay between two such groups.
const UPLOADS_AT_ONCE: u32 = 16;
const UPLOADS_APART: Duration = Duration::from_millis(200);

/// Maximum time for which one request waits at a pserver for the version.
const WAIT_MS: u64 = 5_000;

/// How long slots may take to reach a version. The upload that follows is not bounded by it.
#[derive(Clone, Debug)]
pub(crate) struct VersionWait {
    pub max: Duration,
    /// Cancelled when slots that have not reached the version stop waiting for it.
    pub stop: CancellationToken,
}

/// Who keeps the snapshots.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keeper<'a> {
    /// The store, in which the `newest` checkpoint has objects that stay.
    Store { store: &'a Location, newest: &'a CheckpointRecord },
    /// The slots themselves, in memory.
    Slots,
}

/// A slot whose shard is requested.
pub(crate) struct SlotHolder {
    slot: Slot,
    target: Target,
    channel: Channel,
    /// The object of its shard in the newest checkpoint, or nothing.
    newest: String,
}

/// Looks up the holders of a generation's slots, and their shards in the `newest` checkpoint.
pub(crate) async fn slots(
    etcd: &Etcd,
    keys: &Keys,
    tls: &TlsIdentity,
    generation: &GenerationRecord,
    newest: &CheckpointRecord,
) -> Result<Vec<SlotHolder>, CheckpointError> {
    let mut slots = Vec::new();
    for (slot, incarnation) in generation.slots.iter().enumerate() {
        let slot = Slot(slot as u32);
        let no_holder = || CheckpointError::NoHolder { slot };
        let entry = etcd.get(&keys.ps(slot)).await?.ok_or_else(no_holder)?;
        let record: PserverRecord = entry.json()?;
        if record.incarnation(entry.create_revision) != *incarnation {
            return Err(no_holder());
        }
        let target = Target {
            generation: generation.generation.0,
            slot: slot.0,
            incarnation: incarnation.0,
        };
        let channel = tls.dial(&record.address, Role::Pserver);
        let channel = channel.map_err(|reason| CheckpointError::Slot { slot, reason })?;
        let newest = newest.shards.iter().find(|shard| shard.slot == slot);
        let newest = newest.map(|shard| shard.object.clone()).unwrap_or_default();
        slots.push(SlotHolder { slot, target, channel, newest });
    }
    Ok(slots)
}

/// Requests the shards of all slots. If one slot fails, the objects of the others are deleted. `wait` bounds the time to
/// reach the version; the upload that follows is bounded by the store's limit for its size. A pserver that dies during
/// the upload loses its slot, which ends the generation and the request.
pub(crate) async fn shards(
    keeper: Keeper<'_>,
    slots: Vec<SlotHolder>,
    version: Option<Version>,
    wait: VersionWait,
    status: &watch::Receiver<Arc<StatusSnapshot>>,
) -> Result<Vec<SnapshotReply>, CheckpointError> {
    let mut requests = TaskSet::default();
    for slot in slots {
        let (wait, status) = (wait.clone(), status.clone());
        let hand_over = matches!(keeper, Keeper::Slots);
        requests.spawn(async move {
            let generation = Generation(slot.target.generation);
            let answer = tokio::select! {
                biased;
                answer = snapshot(slot, version, hand_over, &wait) => answer,
                over = generation_over(generation, status) => Err(over.into()),
            };
            if answer.is_err() {
                // The checkpoint has failed, and the other slots may never reach the version.
                wait.stop.cancel();
            }
            answer
        });
    }
    let (mut saved, mut failure, mut until) = (Vec::new(), None, None);
    loop {
        let next = tokio::select! {
            biased;
            next = requests.join_next() => next,
            () = sleep_until(until) => None,
        };
        let Some(answer) = next else { break };
        let broken = |error: Broken| CheckpointError::Aborted(error.to_string());
        match answer.map_err(broken).flatten() {
            Ok(reply) => saved.push(reply),
            // Later errors are only consequences of the first.
            Err(error) => {
                failure.get_or_insert(error);
                until.get_or_insert(Millis(now().0 + LEFTOVERS_MAX_MS));
            }
        }
    }
    let Some(error) = failure else { return Ok(saved) };
    let Keeper::Store { store, newest } = keeper else { return Err(error) };
    for reply in saved {
        if let Err(error) = delete(store, &reply, newest).await {
            warn!(%error, "a shard of a failed checkpoint is not deleted yet");
        }
    }
    Err(error)
}

/// Deletes the objects of a shard that the `newest` checkpoint does not have.
async fn delete(
    store: &Location,
    reply: &SnapshotReply,
    newest: &CheckpointRecord,
) -> Result<(), CheckpointError> {
    let shard: ShardRecord = serde_json::from_slice(&reply.shard)?;
    let kept: BTreeSet<String> = newest.shards.iter().flat_map(ShardRecord::objects).collect();
    let new = shard.objects().filter(|object| !kept.contains(object));
    garbage_collection::delete(store, new.collect()).await
}

/// Waits until the job has a newer generation or this master stops acting.
async fn generation_over(
    found: Generation,
    mut status: watch::Receiver<Arc<StatusSnapshot>>,
) -> ControlError {
    match status.wait_for(|it| found < it.status.generation).await {
        Ok(status) => ControlError::OtherGeneration { found, present: status.status.generation },
        Err(_) => ControlError::NotActing,
    }
}

/// Returns the delay between a slot's snapshot and its upload: it spreads the load that a large job puts on
/// the store.
fn upload_after(slot: Slot) -> Duration {
    UPLOADS_APART * (slot.0 / UPLOADS_AT_ONCE)
}

/// Requests one slot's shard.
async fn snapshot(
    holder: SlotHolder,
    version: Option<Version>,
    hand_over: bool,
    wait: &VersionWait,
) -> Result<SnapshotReply, CheckpointError> {
    let slot = holder.slot;
    let failed = |reason: String| CheckpointError::Slot { slot, reason };
    let mut client = PserverClient::new(holder.channel);
    let started = Instant::now();
    loop {
        let left = wait.max.saturating_sub(started.elapsed());
        let request = SnapshotRequest {
            target: Some(holder.target),
            version: version.map(|version| version.0),
            wait_ms: WAIT_MS.min(left.as_millis() as u64),
            upload_after_ms: upload_after(slot).as_millis() as u64,
            newest: holder.newest.clone(),
            hand_over,
        };
        let reply = client.snapshot(request).await;
        let reply = reply.map_err(|status| match kind(&status) {
            // The job was rolled back meanwhile, which is no failure of the checkpoint.
            ErrorKind::Stale => {
                let found = Generation(holder.target.generation);
                ControlError::OtherGeneration { found, present: Generation(found.0 + 1) }.into()
            }
            ErrorKind::Invalid
            | ErrorKind::NotFound
            | ErrorKind::Conflict
            | ErrorKind::NotYet
            | ErrorKind::Unavailable
            | ErrorKind::TooLarge
            | ErrorKind::Denied
            | ErrorKind::Internal => failed(status.message().to_owned()),
        })?;
        let reply = reply.into_inner();
        match (reply.answer(), version) {
            (snapshot_reply::Answer::Saved, _) => return Ok(reply),
            (snapshot_reply::Answer::Diverged, _) => {
                let at = Version(reply.version);
                return Err(CheckpointError::Diverged { slot, at, what: reply.diverged });
            }
            (snapshot_reply::Answer::NotYet, _) | (snapshot_reply::Answer::Past, None) => {
                if left.is_zero() || wait.stop.is_cancelled() {
                    return Err(CheckpointError::NotReached { slot });
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
    let mut least: Option<(Position, Vec<Lane>)> = None;
    let mut params = Vec::new();
    for reply in saved {
        shards.push(serde_json::from_slice::<ShardRecord>(&reply.shard)?);
        let position = position(&reply);
        // In synchronous mode all positions are equal; in asynchronous mode all shards reflect the lowest.
        if least.as_ref().is_none_or(|(least, _)| position.version < least.version) {
            least = Some((position, reply.exhausted.into_iter().map(Lane).collect()));
        }
        params = reply.params.into_iter().map(ParamSpec::from).collect();
    }
    shards.sort_by_key(|shard| shard.slot);
    let (position, exhausted) = least.unwrap_or_default();
    Ok(CheckpointRecord {
        generation: generation.generation,
        params,
        placement: generation.placement.clone(),
        position,
        exhausted,
        shards,
        queue,
        created_unix_ms: unix_ms(),
        invalidated: None,
    })
}

fn position(reply: &SnapshotReply) -> Position {
    reply.position.unwrap_or_default().into()
}

/// Checks that all slots of a synchronous job have applied the same records. They differ if a task was given
/// up after a lane was pushed to one slot and before it was pushed to another.
fn check_agreement(saved: &[SnapshotReply]) -> Result<(), CheckpointError> {
    let identity = |it: &SnapshotReply| {
        // A loss that is not a number equals no other.
        (Position { loss: None, ..position(it) }, it.exhausted.clone(), it.checksum)
    };
    let Some((first, others)) = saved.split_first() else { return Ok(()) };
    let differs = |it: &&SnapshotReply| identity(it) != identity(first);
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
            position: Some(Position { version: Version(3), examples, ..Position::default() }.into()),
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
