//! Reads what an audit looks at: etcd as of one revision, the dataset manifest, and the shard files
//! of one checkpoint.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use steadfast_audit::{Cut, Evidence, Group, SlotCounts};
use steadfast_checkpoint::{Checkpoint, Fault, ShardFile, verify};
use steadfast_common::dataset::Manifest;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::keys::Keys;
use steadfast_common::records::{
    CheckpointRecord, DiscardedTask, GenerationRecord, ResultRecord, TaskRecord,
};
use steadfast_common::spec::Mode;
use steadfast_coord::{Entry, View};
use steadfast_process::Failure;
use steadfast_store::Location;

use crate::checkpoint::choice::one;
use crate::checkpoint::explain;
use crate::checkpoint::manifests::{self, Manifest as Listed, open_store, store_failure};
use crate::job_args::Job;

/// Reads everything; `wanted` names a checkpoint, or how its id begins.
///
/// # Errors
/// If there is no such job or checkpoint, or something cannot be read.
pub async fn read(job: &Job, wanted: Option<&str>) -> Result<Evidence, Failure> {
    let keys = &job.keys;
    let view = job.etcd.list(&format!("{}/", keys.root())).await?;
    let record = manifests::record(job).await?;
    let entry = view.entries.get(&keys.result());
    let result: Option<ResultRecord> = entry.map(Entry::json).transpose()?;
    let chosen = chosen(job, &manifests::of_view(&view, keys), wanted, result.as_ref())?;
    let store = open_store(&record).await?;
    let manifest = dataset(&store, &record.manifest).await?;
    let checkpoint = match chosen {
        Some((id, manifest)) => {
            let is_final = result.as_ref().is_some_and(|it| it.checkpoint.as_ref() == Some(&id));
            match cut(&store, id.clone(), manifest, is_final).await {
                Ok(cut) => Some(cut),
                Err(Fault::Missing { .. })
                    if job.etcd.get(&keys.checkpoint(&id)).await?.is_none() =>
                {
                    let message =
                        format!("checkpoint {id} was deleted meanwhile; audit a newer one");
                    return Err(Failure::new(ErrorKind::Stale, message));
                }
                Err(fault) => {
                    let failure = explain(fault, &store, &record).await;
                    return Err(failure.context(format!("checkpoint {id}")));
                }
            }
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

fn below<'a>(view: &'a View, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a Entry)> {
    let all = view.entries.range(prefix.to_owned()..);
    all.map_while(move |(key, entry)| Some((key.strip_prefix(prefix)?, entry)))
}

/// The checkpoint that is meant: the one that `wanted` names, or else the final one of a job that is
/// over, or the latest, if there is one.
fn chosen(
    job: &Job,
    manifests: &[Listed],
    wanted: Option<&str>,
    result: Option<&ResultRecord>,
) -> Result<Option<(String, CheckpointRecord)>, Failure> {
    let last = result.and_then(|it| it.checkpoint.as_deref());
    let found = match wanted {
        Some(wanted) => Some(one(&job.name, manifests, wanted)?),
        None => manifests
            .iter()
            .find(|it| last == Some(it.id.as_str()))
            .or_else(|| manifests.iter().find(|it| it.is_latest)),
    };
    found.map(|it| Ok((it.id.clone(), it.record()?.clone()))).transpose()
}

async fn dataset(store: &Location, digest: &str) -> Result<Manifest, Failure> {
    let place = store.child(&Manifest::object_name(digest)).map_err(store_failure)?;
    let json = place.read().await.map_err(store_failure)?;
    Manifest::parse(VecDeque::from([json]), digest)
        .map_err(|reason| Failure::invalid(format!("{place} is damaged: {reason}")))
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
    store: &Location,
    id: String,
    record: CheckpointRecord,
    is_final: bool,
) -> Result<Cut, Fault> {
    let slots = counts(store, &record).await?;
    let parameters_sha256 = match is_final {
        true => Some(verify(store, &record).await?.parameters_sha256),
        false => None,
    };
    Ok(Cut {
        generation: record.generation,
        position: record.position,
        slots,
        queue: record.queue,
        set_aside: record.set_aside,
        parameters_sha256,
        id,
    })
}

/// What the blocks of each slot reflect. Every block is in one shard.
async fn counts(store: &Location, record: &CheckpointRecord) -> Result<Vec<SlotCounts>, Fault> {
    let checkpoint = Checkpoint::open(store, record).await?;
    let (mut slots, mut seen) = (Vec::new(), BTreeSet::new());
    for shard in &record.shards {
        let file = checkpoint.read(shard, &|_| false).await?;
        if let Some(number) = file.numbers().find(|number| !seen.insert(*number)) {
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
    for number in file.numbers() {
        let count = meta.count_of.get(&number).copied().unwrap_or(0);
        *blocks.entry(count).or_default() += 1;
    }
    let group = |(at, counted): (usize, &steadfast_common::tally::Counted)| Group {
        counted: counted.clone(),
        blocks: blocks.get(&at).copied().unwrap_or(0),
    };
    meta.counts.iter().enumerate().map(group).collect()
}
