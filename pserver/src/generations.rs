//! Follows the job's generation: takes part in those that name this life of this slot, and loads
//! what they start from.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::ids::Generation;
use steadfast_common::keys::Keys;
use steadfast_common::layout::Layout;
use steadfast_common::records::{CheckpointRecord, GenerationRecord};
use steadfast_coord::{CoordError, Etcd, Mirror, pauses};
use steadfast_host::time::{sleep, timeout};
use steadfast_proto::v1::ReportDamageRequest;
use steadfast_pserver_core::shard::Cut;
use tracing::{error, warn};

use crate::engine::Engine;
use crate::event::{Begun, Event};
use crate::master;
use crate::shard_file::{ShardError, ShardStore};

/// Longest time that the master may take to hear of damage.
const CALL_MAX: Duration = Duration::from_secs(5);

/// Why a checkpoint could not be loaded.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error(transparent)]
    Coord(#[from] CoordError),
    #[error("the manifest is gone")]
    NoManifest,
    #[error(transparent)]
    Shard(#[from] ShardError),
}

impl LoadError {
    /// Whether trying again is of no use.
    fn is_permanent(&self) -> bool {
        match self {
            Self::NoManifest => true,
            Self::Coord(error) => !error.is_transient(),
            Self::Shard(error) => error.is_permanent(),
        }
    }
}

/// Tells `engine` of every generation, as long as it runs.
pub async fn follow(engine: Engine, etcd: Etcd, keys: Keys, shards: ShardStore, record: Mirror) {
    let mut changes = record.subscribe();
    loop {
        let seen = changes.borrow_and_update().single::<GenerationRecord>();
        match seen {
            Ok(Some(record)) if names(&record, &engine) => {
                let load = begin(&engine, &etcd, &keys, &shards, record);
                tokio::select! {
                    biased;
                    () = load => {}
                    // Another generation makes this one's checkpoint irrelevant.
                    changed = changes.changed() => match changed {
                        Ok(()) => continue,
                        Err(_) => return,
                    },
                }
            }
            Ok(Some(_) | None) => {}
            Err(error) => error!(%error, "the generation cannot be read"),
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn names(record: &GenerationRecord, engine: &Engine) -> bool {
    record.slots.get(engine.slot.0 as usize) == Some(&engine.incarnation)
}

/// Enters a generation with the memory that it keeps, or with what its checkpoint holds.
async fn begin(
    engine: &Engine,
    etcd: &Etcd,
    keys: &Keys,
    shards: &ShardStore,
    record: GenerationRecord,
) {
    let (generation, slots) = (record.generation, record.slots.len() as u32);
    let checkpoint = record.checkpoint.clone();
    let begun = engine.ask(|reply| Event::Generation { record, reply }).await;
    let (Ok(Begun::Nothing), Some(id)) = (begun, checkpoint) else { return };
    let mut pauses = pauses();
    loop {
        match load(engine, etcd, keys, shards, &id, slots).await {
            Ok((layout, cut)) => {
                engine.tell(Event::Restored { generation, layout, cut }).await;
                return;
            }
            Err(error) if error.is_permanent() => {
                error!(checkpoint = id, %error, "checkpoint cannot be loaded");
                // Until another generation begins from another checkpoint it is tried again: what
                // one of us finds damaged may have been a fault of its own.
                report_damage(etcd, keys, generation, &id, &error).await;
            }
            Err(error) => warn!(checkpoint = id, %error, "checkpoint not loaded; trying again"),
        }
        sleep(pauses.next().unwrap_or(CALL_MAX)).await;
    }
}

async fn load(
    engine: &Engine,
    etcd: &Etcd,
    keys: &Keys,
    shards: &ShardStore,
    id: &str,
    slots: u32,
) -> Result<(Arc<Layout>, Cut), LoadError> {
    let manifest: Option<CheckpointRecord> = etcd.get_json(&keys.checkpoint(id)).await?;
    let manifest = manifest.ok_or(LoadError::NoManifest)?;
    Ok(shards.load(&manifest, engine.slot, slots).await?)
}

/// Tells the acting master, which sends everybody to the checkpoint before.
async fn report_damage(
    etcd: &Etcd,
    keys: &Keys,
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
        let mut master = master::acting(etcd, keys).await?;
        master.report_damage(request).await.map_err(|status| status.message().to_owned())
    };
    match timeout(CALL_MAX, reported).await {
        Ok(Ok(_)) => {}
        Ok(Err(reason)) => warn!(reason, "damage not reported yet"),
        Err(_) => warn!("damage not reported yet: the master does not answer"),
    }
}
