//! Deletes what nobody will restore: old checkpoints, manifests first, and shards that no manifest
//! names.

use std::time::{Duration, SystemTime};

use steadfast_common::keys::Keys;
use steadfast_common::records::CheckpointRecord;
use steadfast_coord::Etcd;
use steadfast_host::time::system_time;
use steadfast_store::Location;
use tracing::{info, warn};

use crate::checkpoints::CheckpointError;
use crate::office::{Event, Office};

/// Manifests deleted in one transaction.
const FORGOTTEN_AT_ONCE: usize = 32;

/// Time between looks for what nobody will ever need.
pub(crate) const SWEEP_EVERY: Duration = Duration::from_secs(3600);

/// Age from which a shard without a manifest is an orphan. Where objects are as old as the beginning of
/// their upload, one that is still to get its manifest is safe, whoever else collects at the same time: no
/// checkpoint is a day under way.
const ORPHAN_AGE: Duration = Duration::from_secs(24 * 3600);

/// How long a file that is being written may stay as it is.
const STALLED_MAX: Duration = Duration::from_secs(3600);

struct Manifest {
    id: String,
    create_revision: i64,
    record: CheckpointRecord,
}

/// Deletes all but the newest `keep` checkpoints, and as many of those that were set aside.
pub(crate) async fn old_checkpoints(
    etcd: &Etcd,
    keys: &Keys,
    store: &Location,
    office: &Office,
    keep: usize,
    latest: &str,
) -> Result<(), CheckpointError> {
    let Manifests { mut manifests, .. } = manifests(etcd, keys).await?;
    manifests.sort_by_key(|it| std::cmp::Reverse(it.create_revision));
    let (good, aside): (Vec<_>, Vec<_>) =
        manifests.into_iter().partition(|it| it.record.set_aside.is_none());
    let old: Vec<Manifest> = good
        .into_iter()
        .skip(keep)
        .chain(aside.into_iter().skip(keep))
        .filter(|it| it.id != latest)
        .collect();
    for some in old.chunks(FORGOTTEN_AT_ONCE) {
        let ids: Vec<String> = some.iter().map(|it| it.id.clone()).collect();
        let forgotten = office.ask(|reply| Event::ForgetCheckpoints { ids, reply }).await?;
        let gone = some.iter().filter(|it| forgotten.contains(&it.id));
        for shard in gone.flat_map(|it| &it.record.shards) {
            store.child(&shard.object)?.delete().await?;
        }
    }
    Ok(())
}

/// Deletes old shards that no manifest names, whole or in part: what a process left that died while it
/// uploaded one, or before it was committed.
pub(crate) async fn orphans(
    etcd: &Etcd,
    keys: &Keys,
    store: &Location,
    folder: &str,
) -> Result<(), CheckpointError> {
    // Listed before the manifests are read, so that a shard which gets its manifest now is not seen
    // as one without.
    let place = store.child(folder)?;
    let ago = |age| system_time().checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH);
    for name in place.delete_unfinished(ago(STALLED_MAX)).await? {
        info!(name, "what is left of an upload is deleted");
    }
    let listed = place.list_modified().await?;
    let Manifests { manifests, unreadable } = manifests(etcd, keys).await?;
    if 0 < unreadable {
        // Nobody knows which shards these name.
        return Ok(());
    }
    let named: std::collections::BTreeSet<&str> =
        manifests.iter().flat_map(|it| &it.record.shards).map(|it| it.object.as_str()).collect();
    let before = ago(ORPHAN_AGE);
    for (name, modified) in listed {
        let object = format!("{folder}/{name}");
        if modified < before && !named.contains(object.as_str()) {
            info!(object, "a shard without a manifest is deleted");
            store.child(&object)?.delete().await?;
        }
    }
    Ok(())
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
                warn!(%error, "a manifest cannot be read; it is left alone");
                unreadable += 1;
            }
        }
    }
    Ok(Manifests { manifests, unreadable })
}
