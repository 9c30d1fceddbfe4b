//! The check that a trainer has the job's code: a model that is edited in the middle of a job gives other parameters.

use std::collections::BTreeSet;

use steadfast_common::ids::{Incarnation, TrainerId};
use steadfast_common::records::code::{CodeChange, CodeRecord, Modules};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{GenerationRecord, InitRecord, PserverRecord};
use steadfast_coord::{CoordError, Entry, Etcd, Op, Unchanged};
use steadfast_host::time::unix_ms;
use tracing::{info, warn};

use crate::RegisterError;

/// Compares the sources of a trainer's model with those of the job, which its first trainer sets. Parameters that
/// depend on other sources are trained further only if `accept` is set; the record then has the change.
///
/// # Errors
/// [`RegisterError::OtherCode`], or if etcd fails.
pub(crate) async fn check(
    etcd: &Etcd,
    keys: &Keys,
    trainer: TrainerId,
    modules: &Modules,
    accept: bool,
) -> Result<(), RegisterError> {
    let key = keys.code();
    loop {
        let known = etcd.get(&key).await?;
        let record: Option<CodeRecord> = known.as_ref().map(Entry::json).transpose()?;
        let record = record.unwrap_or_default();
        let differing = record.differing(modules);
        let is_new = known.is_none();
        if !is_new && differing.is_empty() && record.changes.is_empty() {
            return Ok(());
        }
        let wanted = if is_new || !has_values(etcd, keys).await? {
            if !differing.is_empty() {
                info!(?differing, "the code of the model has changed; no parameters depend on it");
            }
            CodeRecord { modules: modules.clone(), changes: Vec::new() }
        } else if differing.is_empty() {
            return Ok(());
        } else if accept {
            let change = CodeChange { modules: differing, trainer, at_unix_ms: unix_ms() };
            warn!(%change, "the code of the model has changed");
            record.changed(modules, change)
        } else {
            return Err(RegisterError::OtherCode { modules: differing });
        };
        let mod_revision = known.map_or(0, |it| it.mod_revision);
        let unchanged = [Unchanged { key: key.clone(), mod_revision }];
        // Another trainer may have been faster.
        if etcd.put_if(&Op::put(&key, &wanted), &unchanged).await?.is_some() {
            return Ok(());
        }
    }
}

/// Returns whether parameters exist that depend on the model's code: in a checkpoint, or initialized in the memory of
/// the pservers of the present generation.
async fn has_values(etcd: &Etcd, keys: &Keys) -> Result<bool, CoordError> {
    if etcd.get(&keys.checkpoint_latest()).await?.is_some() {
        return Ok(true);
    }
    let generation: Option<GenerationRecord> = etcd.get_json(&keys.generation()).await?;
    let init: Option<InitRecord> = etcd.get_json(&keys.init()).await?;
    let Some(generation) = generation else { return Ok(false) };
    if init.is_none_or(|it| !it.done || it.generation != generation.generation) {
        return Ok(false);
    }
    let slots = etcd.list(&keys.ps_prefix()).await?;
    let held: BTreeSet<Incarnation> = slots
        .entries
        .values()
        .filter_map(|entry| {
            let pserver: PserverRecord = entry.json().ok()?;
            Some(pserver.incarnation(entry.create_revision))
        })
        .collect();
    Ok(generation.slots.iter().all(|it| held.contains(it)))
}
