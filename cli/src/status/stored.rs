//! Reads the status of a job from etcd when its master does not answer.

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Incarnation;
use steadfast_common::records::code::CodeRecord;
use steadfast_common::records::{
    FollowerRecord, GenerationRecord, JobRecord, PserverRecord, TrainerRecord, WaitsRecord,
};
use steadfast_common::status::{SlotStatus, StoredStatus, StoredTrainer};
use steadfast_coord::Entry;
use steadfast_process::Failure;

use crate::checkpoint::pointer;
use crate::job_args::Job;

/// Reads the job's keys. `error` is why no master answers.
///
/// # Errors
/// If etcd does not answer, holds a value that cannot be parsed, or has no such job.
pub async fn read(job: &Job, error: String) -> Result<StoredStatus, Failure> {
    let Job { etcd, keys, name, .. } = job;
    let record: Option<JobRecord> = etcd.get_json(&keys.job()).await?;
    let mut slots = Vec::new();
    let followers = etcd.list(&keys.followers_prefix()).await?;
    for entry in etcd.list(&keys.ps_prefix()).await?.entries.values() {
        let Some(slot) = keys.slot_of(&entry.key) else { continue };
        let pserver: PserverRecord = entry.json()?;
        let incarnation = Some(Incarnation(entry.create_revision));
        let follower = followers.entries.get(&keys.follower(slot));
        let follower: Option<FollowerRecord> = follower.map(Entry::json).transpose()?;
        let (address, follower) = (Some(pserver.address), follower.map(|it| it.address));
        slots.push(SlotStatus { slot, address, incarnation, follower });
    }
    slots.sort_by_key(|slot| slot.slot);
    let mut trainers = Vec::new();
    for entry in etcd.list(&keys.trainers_prefix()).await?.entries.values() {
        let Some(id) = keys.trainer_of(&entry.key) else { continue };
        let trainer: TrainerRecord = entry.json()?;
        trainers.push(StoredTrainer { id: id.to_string(), admin: trainer.admin });
    }
    let result = etcd.get_json(&keys.result()).await?;
    let waits: Option<WaitsRecord> = etcd.get_json(&keys.master_waits()).await?;
    let has_job = record.is_some() || result.is_some() || waits.is_some();
    if !has_job && slots.is_empty() && trainers.is_empty() {
        let root = keys.root();
        let message =
            format!("etcd has no job {name} (no key below `{root}/`): a master creates it");
        return Err(Failure::new(ErrorKind::NotFound, message));
    }
    let code: Option<CodeRecord> = etcd.get_json(&keys.code()).await?;
    let generation: Option<GenerationRecord> = etcd.get_json(&keys.generation()).await?;
    Ok(StoredStatus {
        job: name.clone(),
        mode: record.as_ref().map(|record| record.spec.mode),
        master: None,
        error,
        waits_for: waits.map(|it| it.waits_for),
        generation: generation.map(|it| it.generation),
        ps_desired: etcd.get_json(&keys.ps_desired()).await?,
        slots,
        warm_spares: record.map_or(0, |record| record.spec.warm_spares),
        trainers,
        checkpoint: etcd.get(&keys.checkpoint_latest()).await?.map(|it| pointer(&it.value)),
        evaluation: etcd.get_json(&keys.evaluation()).await?,
        warnings: code.unwrap_or_default().changes.iter().map(ToString::to_string).collect(),
        result,
    })
}
