//! Follows the job's generation: takes part in those that name this life of this slot, and loads
//! what they start from.

use std::time::Duration;

use steadfast_common::keys::Keys;
use steadfast_common::records::{CheckpointRecord, GenerationRecord};
use steadfast_coord::{CoordError, Etcd, Mirror};
use tracing::{error, warn};

use crate::engine::{Engine, Event};
use crate::shard_file::{ShardError, ShardStore};

/// Pause between attempts to load a checkpoint.
const RETRY: Duration = Duration::from_secs(1);

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

/// Tells `engine` of every generation, as long as it runs.
pub async fn follow(engine: Engine, etcd: Etcd, keys: Keys, shards: ShardStore, record: Mirror) {
    let mut changes = record.subscribe();
    loop {
        let seen = changes.borrow_and_update().single::<GenerationRecord>();
        match seen {
            Ok(Some(record)) if names(&record, &engine) => {
                let load = begin(&engine, &etcd, &keys, &shards, record);
                tokio::select! {
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

async fn begin(
    engine: &Engine,
    etcd: &Etcd,
    keys: &Keys,
    shards: &ShardStore,
    record: GenerationRecord,
) {
    let (generation, slots) = (record.generation, record.slots.len() as u32);
    let checkpoint = record.checkpoint.clone();
    engine.tell(Event::Generation(record)).await;
    let Some(id) = checkpoint else { return };
    loop {
        let key = keys.checkpoint(&id);
        let loaded = async {
            let manifest: Option<CheckpointRecord> = etcd.get_json(&key).await?;
            let manifest = manifest.ok_or(LoadError::NoManifest)?;
            Ok::<_, LoadError>(shards.load(&manifest, engine.slot, slots).await?)
        };
        match loaded.await {
            Ok((layout, cut)) => {
                engine.tell(Event::Restored { generation, layout, cut }).await;
                return;
            }
            Err(error) => warn!(checkpoint = id, %error, "checkpoint not loaded; trying again"),
        }
        tokio::time::sleep(RETRY).await;
    }
}
