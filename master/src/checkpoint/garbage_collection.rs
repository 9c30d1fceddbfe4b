//! Deletes what will not be restored: old checkpoints, manifests first, and shards that no manifest
//! names.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use steadfast_common::records::keys::Keys;
use steadfast_common::records::{CheckpointRecord, ShardRecord};
use steadfast_coord::Etcd;
use steadfast_host::time::system_time;
use steadfast_store::Location;
use tracing::{info, warn};

use crate::checkpoint::coordinator::CheckpointError;
use crate::event_loop::handle::{Event, EventLoopHandle};

/// Objects deleted at a time.
const OBJECTS_AT_ONCE: usize = 16;

/// Manifests deleted in one transaction.
const DELETED_AT_ONCE: usize = 32;

/// Time between two searches for orphans.
pub(crate) const SWEEP_EVERY: Duration = Duration::from_secs(3600);

/// Age from which a shard without a manifest is an orphan. No checkpoint takes a day, so a shard that is
/// still to get its manifest is safe from concurrent garbage collection, even in a store that dates objects
/// from the beginning of their upload.
const ORPHAN_AGE: Duration = Duration::from_secs(24 * 3600);

/// How long a file that is being written may stay unmodified.
const STALLED_MAX: Duration = Duration::from_secs(3600);

struct Manifest {
    id: String,
    create_revision: i64,
    record: CheckpointRecord,
}

/// Deletes all but the newest `keep` valid checkpoints and the newest `keep` invalidated ones.
pub(crate) async fn old_checkpoints(
    etcd: &Etcd,
    keys: &Keys,
    store: &Location,
    handle: &EventLoopHandle,
    keep: usize,
    latest: &str,
) -> Result<(), CheckpointError> {
    let Manifests { mut manifests, unreadable } = manifests(etcd, keys).await?;
    manifests.sort_by_key(|it| std::cmp::Reverse(it.create_revision));
    let (mut valid, mut invalidated) = (0, 0);
    let is_old = |it: &Manifest| {
        let newer = if it.record.invalidated.is_none() { &mut valid } else { &mut invalidated };
        *newer += 1;
        keep < *newer && it.id != latest
    };
    let (old, mut kept): (Vec<_>, Vec<_>) = manifests.into_iter().partition(is_old);
    let mut deleted = Vec::new();
    let mut old = old.into_iter().peekable();
    while old.peek().is_some() {
        let chunk: Vec<Manifest> = old.by_ref().take(DELETED_AT_ONCE).collect();
        let ids: Vec<String> = chunk.iter().map(|it| it.id.clone()).collect();
        let gone = handle.ask(|reply| Event::DeleteManifests { ids, reply }).await?;
        let (gone, there): (Vec<_>, Vec<_>) =
            chunk.into_iter().partition(|it| gone.contains(&it.id));
        deleted.extend(gone);
        kept.extend(there);
    }
    // Checkpoints share row files. What an unreadable manifest names is unknown.
    let kept = objects(&kept);
    let mut old = Vec::new();
    for shard in deleted.iter().flat_map(|it| &it.record.shards) {
        let is_shared = |object: &String| 0 < unreadable && *object != shard.object;
        old.extend(shard.objects().filter(|it| !kept.contains(it) && !is_shared(it)));
    }
    delete(store, old).await
}

/// Deletes objects, some at a time; returns the first error after all.
pub(crate) async fn delete(store: &Location, objects: Vec<String>) -> Result<(), CheckpointError> {
    let mut outcome = Ok(());
    for together in objects.chunks(OBJECTS_AT_ONCE) {
        let places = together.iter().map(|object| store.child(object));
        let places: Vec<Location> = places.collect::<Result<_, _>>()?;
        let deleted = futures::future::join_all(places.iter().map(Location::delete)).await;
        outcome = outcome.and(deleted.into_iter().collect());
    }
    Ok(outcome?)
}

/// Returns the names of all objects of some checkpoints.
fn objects(manifests: &[Manifest]) -> BTreeSet<String> {
    let shards = manifests.iter().flat_map(|it| &it.record.shards);
    shards.flat_map(ShardRecord::objects).collect()
}

/// Deletes old shards, complete or partial, that no manifest names: they remain when a process dies
/// during an upload, or before the commit.
pub(crate) async fn orphans(
    etcd: &Etcd,
    keys: &Keys,
    store: &Location,
    directory: &str,
) -> Result<(), CheckpointError> {
    // List the shards before reading the manifests: a shard whose manifest is committed in between must
    // not look like an orphan.
    let place = store.child(directory)?;
    let ago = |age| system_time().checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH);
    for name in place.delete_unfinished(ago(STALLED_MAX)).await? {
        info!(name, "incomplete upload deleted");
    }
    let listed = place.list_modified().await?;
    let Manifests { manifests, unreadable } = manifests(etcd, keys).await?;
    if 0 < unreadable {
        // The shards that these manifests name are unknown.
        return Ok(());
    }
    let named = objects(&manifests);
    let before = ago(ORPHAN_AGE);
    let mut orphans = Vec::new();
    for (name, modified) in listed {
        let object = format!("{directory}/{name}");
        if modified < before && !named.contains(&object) {
            info!(object, "orphaned shard deleted");
            orphans.push(object);
        }
    }
    delete(store, orphans).await
}

struct Manifests {
    manifests: Vec<Manifest>,
    unreadable: usize,
}

async fn manifests(etcd: &Etcd, keys: &Keys) -> Result<Manifests, CheckpointError> {
    let prefix = keys.checkpoints_prefix();
    let view = etcd.list(&prefix).await?;
    let (mut manifests, mut unreadable) = (Vec::new(), 0);
    for (key, entry) in view.entries.iter().filter(|(key, _)| **key != keys.checkpoint_latest()) {
        match entry.json() {
            Ok(record) => manifests.push(Manifest {
                id: key.strip_prefix(&prefix).unwrap_or(key).to_owned(),
                create_revision: entry.create_revision,
                record,
            }),
            Err(error) => {
                warn!(
                    key, %error,
                    "cannot parse a manifest; neither it nor any row file is deleted until its key is repaired or deleted"
                );
                unreadable += 1;
            }
        }
    }
    Ok(Manifests { manifests, unreadable })
}
