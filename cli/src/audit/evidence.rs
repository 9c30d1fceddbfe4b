//! Reads the input of an audit: etcd at one revision, the dataset manifest, and the shard files of one
//! checkpoint.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use steadfast_audit::{CheckpointEvidence, Evidence, Group, SlotCounts, StreamEvidence};
use steadfast_checkpoint::{Checkpoint, CheckpointError, ShardMeta, verify};
use steadfast_common::code::CodeRecord;
use steadfast_common::dataset::Manifest;
use steadfast_common::error::ErrorKind;
use steadfast_common::given_up::GivenUpRecord;
use steadfast_common::ids::TaskId;
use steadfast_common::keys::Keys;
use steadfast_common::records::{CheckpointRecord, GenerationRecord, ResultRecord};
use steadfast_common::stream::StreamPassRecord;
use steadfast_coord::{Entry, View};
use steadfast_process::Failure;
use steadfast_store::Location;

use crate::checkpoint::choice::one;
use crate::checkpoint::explain;
use crate::checkpoint::manifests::{self, Manifest as Listed, open_store, store_failure};
use crate::job_args::Job;

/// Reads the evidence; `wanted` is the id of a checkpoint or a unique prefix of it.
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
    let object = Manifest::object_name(&record.manifest);
    let manifest = manifest(&store, &object, &record.manifest).await?;
    let checkpoint = match chosen {
        Some((id, manifest)) => {
            let is_final = result.as_ref().is_some_and(|it| it.checkpoint.as_ref() == Some(&id));
            match checkpoint(&store, id.clone(), manifest, is_final).await {
                Ok(checkpoint) => Some(checkpoint),
                Err(CheckpointError::Missing { .. })
                    if job.etcd.get(&keys.checkpoint(&id)).await?.is_none() =>
                {
                    let message =
                        format!("checkpoint {id} was deleted during the audit; audit a newer one");
                    return Err(Failure::new(ErrorKind::Stale, message));
                }
                Err(error) => {
                    let failure = explain(error, &store, &record).await;
                    return Err(failure.context(format!("checkpoint {id}")));
                }
            }
        }
        None => None,
    };
    let stream = match record.spec.dataset.follow {
        true => Some(stream(&view, keys, &store, &record.spec.name).await?),
        false => None,
    };
    let code = view.entries.get(&keys.code()).map(Entry::json::<CodeRecord>).transpose()?;
    Ok(Evidence {
        code_changes: code.unwrap_or_default().changes,
        stream,
        discarded: discarded(&view, keys)?,
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

/// Selects the checkpoint: the one that `wanted` names, else the final one of a job that has ended, else the
/// latest, if there is one.
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

async fn manifest(store: &Location, object: &str, digest: &str) -> Result<Manifest, Failure> {
    let place = store.child(object).map_err(store_failure)?;
    let json = place.read().await.map_err(store_failure)?;
    Manifest::parse(VecDeque::from([json]), digest)
        .map_err(|reason| Failure::invalid(format!("{place} is damaged: {reason}")))
}

/// Reads the passes of a stream.
async fn stream(
    view: &View,
    keys: &Keys,
    store: &Location,
    name: &str,
) -> Result<StreamEvidence, Failure> {
    let mut stream = StreamEvidence::default();
    if let Some(entry) = view.entries.get(&keys.stream()) {
        stream.record = entry.json()?;
    }
    let prefix = keys.stream_passes_prefix();
    for (_, entry) in below(view, &prefix) {
        let Some(pass) = keys.stream_pass_of(&entry.key) else { continue };
        let record: StreamPassRecord = entry.json()?;
        let object = StreamPassRecord::object_name(name, pass, &record.manifest);
        let manifest = manifest(store, &object, &record.manifest).await?;
        stream.passes.insert(pass, (record, manifest));
    }
    Ok(stream)
}

/// Reads the tasks that were given up.
fn discarded(view: &View, keys: &Keys) -> Result<BTreeMap<TaskId, GivenUpRecord>, Failure> {
    let prefix = keys.given_up_prefix();
    let of = |(_, entry): (&str, &Entry)| Some((keys.given_up_of(&entry.key)?, entry.json()));
    let all = below(view, &prefix).filter_map(of);
    all.map(|(task, record)| Ok((task, record?))).collect()
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

/// Reads the shard files of a checkpoint, and verifies the parameters if it is the final one.
async fn checkpoint(
    store: &Location,
    id: String,
    record: CheckpointRecord,
    is_final: bool,
) -> Result<CheckpointEvidence, CheckpointError> {
    let slots = counts(store, &record).await?;
    let parameters_sha256 = match is_final {
        true => Some(verify(store, &record).await?.parameters_sha256),
        false => None,
    };
    Ok(CheckpointEvidence {
        generation: record.generation,
        position: record.position,
        exhausted: record.exhausted,
        slots,
        queue: record.queue,
        invalidated: record.invalidated,
        parameters_sha256,
        id,
    })
}

/// Reads the applied records of each slot's blocks, and checks that every block is in exactly one shard.
async fn counts(
    store: &Location,
    record: &CheckpointRecord,
) -> Result<Vec<SlotCounts>, CheckpointError> {
    let checkpoint = Checkpoint::open(store, record).await?;
    let (mut slots, mut seen) = (Vec::new(), BTreeSet::new());
    for shard in &record.shards {
        let file = checkpoint.read(shard, &|_| false).await?;
        let ranges = checkpoint.ranges(shard, file.meta())?;
        let numbers: Vec<u32> = file.numbers().chain(ranges).collect();
        if let Some(number) = numbers.iter().copied().find(|number| !seen.insert(*number)) {
            let name = checkpoint.names().name(number);
            let reason = format!("it holds `{name}`, which another shard also holds");
            return Err(CheckpointError::Damaged { object: shard.object.clone(), reason });
        }
        slots.push(SlotCounts { slot: shard.slot, groups: groups(file.meta(), &numbers) });
    }
    let all = (checkpoint.layout().blocks().len() + checkpoint.layout().ranges()) as u32;
    match (0..all).find(|number| !seen.contains(number)) {
        Some(number) => Err(CheckpointError::NotHeld { tensor: checkpoint.names().name(number) }),
        None => Ok(slots),
    }
}

/// Divides the blocks and ranges of a shard by their applied records.
fn groups(meta: &ShardMeta, numbers: &[u32]) -> Vec<Group> {
    let mut blocks: BTreeMap<usize, usize> = BTreeMap::new();
    for number in numbers {
        let count = meta.count_of.get(number).copied().unwrap_or(0);
        *blocks.entry(count).or_default() += 1;
    }
    let group = |(at, counted): (usize, &steadfast_common::applied_records::AppliedRecords)| {
        Group { counted: counted.clone(), blocks: blocks.get(&at).copied().unwrap_or(0) }
    };
    meta.counts.iter().enumerate().map(group).collect()
}
