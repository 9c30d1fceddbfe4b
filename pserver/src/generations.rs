//! Follows the job's generations: joins those that name this incarnation of the slot, and loads the
//! checkpoint from which they start.

use std::time::Duration;

use steadfast_common::ids::Generation;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{CheckpointRecord, GenerationRecord};
use steadfast_common::tensor::placement::PlacementRecord;
use steadfast_coord::{CoordError, Etcd, Mirror, backoff};
use steadfast_host::time::{sleep, timeout};
use steadfast_net::TlsIdentity;
use steadfast_proto::v1::ReportDamageRequest;
use tracing::{error, warn};

use crate::event::{Begun, Event};
use crate::event_loop::EventLoopHandle;
use crate::master;
use crate::shard_file::{LoadedShard, ShardError, ShardStore};

/// Timeout of a damage report to the master.
const CALL_MAX: Duration = Duration::from_secs(5);

/// The reason why a checkpoint could not be loaded.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error(transparent)]
    Coord(#[from] CoordError),
    #[error("the manifest is missing in etcd")]
    NoManifest,
    #[error(transparent)]
    Shard(#[from] ShardError),
}

impl LoadError {
    /// Returns whether a retry cannot succeed.
    fn is_permanent(&self) -> bool {
        match self {
            Self::NoManifest => true,
            Self::Coord(error) => !error.is_transient(),
            Self::Shard(error) => error.is_permanent(),
        }
    }
}

/// The reason why no generation is followed any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Followed {
    /// The process ends.
    Ended,
    /// A generation has settings of the job that this pserver does not know.
    JobChanged,
}

/// Reports every generation to `event_loop`, until dropped, or until one takes into account another number of changes of
/// the job's settings than `known`.
pub async fn follow(
    event_loop: EventLoopHandle,
    etcd: &Etcd,
    keys: &Keys,
    tls: &TlsIdentity,
    shards: &ShardStore,
    known: u32,
    record: Mirror,
) -> Followed {
    let mut changes = record.subscribe();
    loop {
        let seen = changes.borrow_and_update().single::<GenerationRecord>();
        match seen {
            Ok(Some(record)) if includes(&record, &event_loop) && record.changes != known => {
                warn!(generation = record.generation.0, "the job was changed; joining it anew");
                return Followed::JobChanged;
            }
            Ok(Some(record)) if includes(&record, &event_loop) => {
                let load = begin(&event_loop, etcd, keys, tls, shards, record);
                tokio::select! {
                    biased;
                    () = load => {}
                    // A new generation makes this checkpoint irrelevant.
                    changed = changes.changed() => match changed {
                        Ok(()) => continue,
                        Err(_) => return Followed::Ended,
                    },
                }
            }
            Ok(Some(_) | None) => {}
            Err(error) => error!(%error, "cannot read the generation"),
        }
        if changes.changed().await.is_err() {
            return Followed::Ended;
        }
    }
}

fn includes(record: &GenerationRecord, event_loop: &EventLoopHandle) -> bool {
    record.slots.get(event_loop.slot.0 as usize) == Some(&event_loop.incarnation)
}

/// Enters a generation with the values that the slot keeps, or with those of a checkpoint.
async fn begin(
    event_loop: &EventLoopHandle,
    etcd: &Etcd,
    keys: &Keys,
    tls: &TlsIdentity,
    shards: &ShardStore,
    record: GenerationRecord,
) {
    let (generation, placement) = (record.generation, record.placement.clone());
    let checkpoint = record.checkpoint.clone();
    let begun = event_loop.call(|reply| Event::Generation { record, reply }).await;
    let (Ok(Begun::Empty), Some(id)) = (begun, checkpoint) else { return };
    let mut pauses = backoff();
    loop {
        match load(event_loop, etcd, keys, shards, &id, &placement).await {
            Ok(loaded) => {
                event_loop.send(Event::Restored { generation, loaded }).await;
                return;
            }
            Err(LoadError::Shard(ShardError::Storage(error))) => {
                event_loop.send(Event::StorageFailed { error }).await;
                return;
            }
            Err(error) if error.is_permanent() => {
                error!(checkpoint = id, %error, "cannot load the checkpoint");
                // Retries until a new generation begins from another checkpoint: the damage may be
                // limited to this machine.
                report_damage(etcd, keys, tls, generation, &id, &error).await;
            }
            Err(error) => warn!(checkpoint = id, %error, "checkpoint not loaded yet; retrying"),
        }
        sleep(pauses.next().unwrap_or(CALL_MAX)).await;
    }
}

async fn load(
    event_loop: &EventLoopHandle,
    etcd: &Etcd,
    keys: &Keys,
    shards: &ShardStore,
    id: &str,
    placement: &PlacementRecord,
) -> Result<LoadedShard, LoadError> {
    let manifest: Option<CheckpointRecord> = etcd.get_json(&keys.checkpoint(id)).await?;
    let manifest = manifest.ok_or(LoadError::NoManifest)?;
    Ok(shards.load(&manifest, event_loop.slot, placement).await?)
}

/// Reports damage to the acting master, which rolls the job back to the previous checkpoint.
async fn report_damage(
    etcd: &Etcd,
    keys: &Keys,
    tls: &TlsIdentity,
    generation: Generation,
    id: &str,
    error: &LoadError,
) {
    let request = ReportDamageRequest {
        generation: generation.0,
        checkpoint: id.to_owned(),
        reason: error.to_string(),
    };
    let reported = async {
        let mut master = master::acting(etcd, keys, tls).await?;
        master.report_damage(request).await.map_err(|status| status.message().to_owned())
    };
    match timeout(CALL_MAX, reported).await {
        Ok(Ok(_)) => {}
        Ok(Err(reason)) => warn!(reason, "damage not reported yet"),
        Err(_) => warn!("damage not reported yet: timeout"),
    }
}
