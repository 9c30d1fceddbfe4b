//! Reads what an audit looks at: etcd as of one revision, the dataset manifest, and the shard files
//! of one checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use steadfast_audit::{Cut, Evidence, Group, SlotCounts};
use steadfast_checkpoint::{Checkpoint, Fault, ShardFile, verify};
use steadfast_common::dataset::Manifest;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::keys::Keys;
use steadfast_common::records::{
    CheckpointRecord, DiscardedTask, GenerationRecord, JobRecord, ResultRecord, TaskRecord,
};
use steadfast_common::spec::Mode;
use steadfast_coord::{Entry, View};
use steadfast_process::Failure;
use steadfast_store::{Location, StoreError};

use crate::checkpoint::pointer;
use crate::job_args::Job;

/// Reads everything; `wanted` names a checkpoint, or how its id begins.
///
/// # Errors
/// If there is no such job or checkpoint, or something cannot be read.
pub async fn read(job: &Job, wanted: Option<&str>) -> Result<Evidence, Failure> {
    let keys = &job.keys;
    let view = job.etcd.list(&format!("{}/", keys.root())).await?;
    let record: JobRecord = one(&view, &keys.job())?.ok_or_else(|| {
        let message = format!("etcd has no job {} (no key `{}`)", job.name, keys.job());
        Failure::new(ErrorKind::NotFound, message)
    })?;
    let result: Option<ResultRecord> = one(&view, &keys.result())?;
    let chosen = choose(&view, keys, wanted, result.as_ref())?;
    let store = steadfast_store::open(&record.store).map_err(|error| of_store(&error))?;
    let manifest = dataset(&store, &record.manifest).await?;
    let checkpoint = match chosen {
        Some((id, record)) => {
            let is_final = result.as_ref().is_some_and(|it| it.checkpoint.as_ref() == Some(&id));
            Some(cut(job, &store, id, record, is_final).await?)
        }
        None => None,
    };
    Ok(Evidence {
        discarded: discarded(&view, keys, record.spec.mode, &manifest)?,
        generations: generations(&view, keys)?,
        spec: record.spec,
        manifest,
        checkpoint,
        result,
    })
}

fn one<T: DeserializeOwned>(view: &View, key: &str) -> Result<Option<T>, Failure> {
    Ok(view.entries.get(key).map(Entry::json).transpose()?)
}

fn below<'a>(view: &'a View, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a Entry)> {
    let all = view.entries.range(prefix.to_owned()..);
    all.map_while(move |(key, entry)| Some((key.strip_prefix(prefix)?, entry)))
}

/// The checkpoint that is meant, if there is one.
fn choose(
    view: &View,
    keys: &Keys,
    wanted: Option<&str>,
    result: Option<&ResultRecord>,
) -> Result<Option<(String, CheckpointRecord)>, Failure> {
    let prefix = keys.checkpoints_prefix();
    let latest_key = keys.checkpoint_latest();
    let latest = view.entries.get(&latest_key).map(|entry| pointer(&entry.value));
    let last = result.and_then(|it| it.checkpoint.clone());
    let id = match wanted {
        Some("latest") => latest,
        None => last.filter(|id| view.entries.contains_key(&keys.checkpoint(id))).or(latest),
        Some(wanted) => {
            let ids = below(view, &prefix).map(|(id, _)| id).filter(|id| *id != "latest");
            let found: Vec<&str> = ids.filter(|id| id.starts_with(wanted)).collect();
            match found.iter().find(|id| **id == wanted).or(found.first()) {
                Some(id) if found.len() == 1 || *id == wanted => Some((*id).to_owned()),
                Some(_) => {
                    let several = found.join(", ");
                    let message = format!("{wanted} may be any of {several}; write more of it");
                    return Err(Failure::invalid(message));
                }
                None => return Err(no_such(wanted)),
            }
        }
    };
    let Some(id) = id else { return Ok(None) };
    let record = one(view, &keys.checkpoint(&id))?.ok_or_else(|| no_such(&id))?;
    Ok(Some((id, record)))
}

fn no_such(id: &str) -> Failure {
    let message = format!("there is no checkpoint {id}; see `steadfast checkpoint list`");
    Failure::new(ErrorKind::NotFound, message)
}

async fn dataset(store: &Location, digest: &str) -> Result<Manifest, Failure> {
    let place = store.child(&Manifest::object_name(digest)).map_err(|error| of_store(&error))?;
    let bytes = place.read().await.map_err(|error| of_store(&error))?;
    let damaged = |reason: String| Failure::invalid(format!("{place} is damaged: {reason}"));
    let manifest: Manifest =
        serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    match manifest.digest() == digest {
        true => Ok(manifest),
        false => Err(damaged(format!("its SHA-256 is {}, not {digest}", manifest.digest()))),
    }
}

/// Tasks that were given up: under keys of their own, or among the keys of a synchronous job's
/// rounds, which are its passes.
fn discarded(
    view: &View,
    keys: &Keys,
    mode: Mode,
    manifest: &Manifest,
) -> Result<Vec<DiscardedTask>, Failure> {
    let mut all = Vec::new();
    let mut list = |pass: Pass, task: TaskId, reason: String| {
        all.push(DiscardedTask { pass, task, reason, records: manifest.records_named(task) });
    };
    match mode {
        Mode::Async => {
            let prefix = keys.given_up_prefix();
            for (_, entry) in below(view, &prefix) {
                if let Some((pass, task)) = keys.given_up_of(&entry.key) {
                    list(pass, task, entry.json()?);
                }
            }
        }
        Mode::Sync => {
            let prefix = keys.tasks_prefix();
            for (rest, entry) in below(view, &prefix) {
                let round = rest.split_once('/').and_then(|(round, _)| round.parse().ok());
                let Some(round) = round else { continue };
                let Some(task) = keys.task_of(u64::from(round), &entry.key) else { continue };
                if let TaskRecord::Discarded { reason, .. } = entry.json()? {
                    list(Pass(round), task, reason);
                }
            }
        }
    }
    Ok(all)
}

fn generations(view: &View, keys: &Keys) -> Result<Vec<GenerationRecord>, Failure> {
    let prefix = keys.generations_prefix();
    let mut all = Vec::new();
    for (_, entry) in below(view, &prefix) {
        all.push(entry.json::<GenerationRecord>()?);
    }
    all.sort_by_key(|it| it.generation);
    Ok(all)
}

/// What the shard files of a checkpoint say; the parameters as well if it is the final one.
async fn cut(
    job: &Job,
    store: &Location,
    id: String,
    record: CheckpointRecord,
    is_final: bool,
) -> Result<Cut, Failure> {
    let read = async {
        let slots = counts(store, &record).await?;
        let parameters = match is_final {
            true => Some(verify(store, &record).await?.parameters_sha256),
            false => None,
        };
        Ok::<_, Fault>((slots, parameters))
    };
    match read.await {
        Ok((slots, parameters_sha256)) => Ok(Cut {
            generation: record.generation,
            position: record.position,
            slots,
            queue: record.queue,
            set_aside: record.set_aside,
            parameters_sha256,
            id,
        }),
        Err(Fault::Missing { .. }) if job.etcd.get(&job.keys.checkpoint(&id)).await?.is_none() => {
            let message = format!("checkpoint {id} was deleted meanwhile; audit a newer one");
            Err(Failure::new(ErrorKind::Stale, message))
        }
        Err(fault) => {
            let kind = match fault.is_permanent() {
                true => ErrorKind::Invalid,
                false => ErrorKind::Unavailable,
            };
            Err(Failure::new(kind, format!("checkpoint {id}: {fault} (in {store})")))
        }
    }
}

/// What the blocks of each slot reflect. Every block is in one shard.
async fn counts(store: &Location, record: &CheckpointRecord) -> Result<Vec<SlotCounts>, Fault> {
    let checkpoint = Checkpoint::open(store, record).await?;
    let (mut slots, mut seen) = (Vec::new(), BTreeSet::new());
    for shard in &record.shards {
        let file = checkpoint.read(shard).await?;
        if let Some(number) = file.blocks().find(|number| !seen.insert(*number)) {
            let name = checkpoint.names().block(number).1;
            let reason = format!("it holds `{name}`, which another shard holds as well");
            return Err(Fault::Damaged { object: shard.object.clone(), reason });
        }
        slots.push(SlotCounts { slot: shard.slot, groups: groups(&file) });
    }
    let all = checkpoint.layout().blocks().len() as u32;
    match (0..all).find(|number| !seen.contains(number)) {
        Some(number) => Err(Fault::NotHeld { tensor: checkpoint.names().block(number).1 }),
        None => Ok(slots),
    }
}

fn groups(file: &ShardFile) -> Vec<Group> {
    let meta = file.meta();
    let mut blocks: BTreeMap<usize, usize> = BTreeMap::new();
    for number in file.blocks() {
        let count = meta.count_of.get(&number).copied().unwrap_or(0);
        *blocks.entry(count).or_default() += 1;
    }
    let group = |(at, counted): (usize, &steadfast_common::tally::Counted)| Group {
        counted: counted.clone(),
        blocks: blocks.get(&at).copied().unwrap_or(0),
    };
    meta.counts.iter().enumerate().map(group).collect()
}

fn of_store(error: &StoreError) -> Failure {
    let kind = match error.kind() {
        steadfast_store::ErrorKind::Permanent => ErrorKind::Invalid,
        steadfast_store::ErrorKind::Transient => ErrorKind::Unavailable,
    };
    Failure::new(kind, error.to_string())
}
