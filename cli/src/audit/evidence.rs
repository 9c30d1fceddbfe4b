//! Reads the input of an audit: etcd at one revision, the dataset manifest, and the shard files of one
//! checkpoint.

use std::collections::VecDeque;

use steadfast_audit::{CheckpointEvidence, Evidence, Group, SlotCounts};
use steadfast_checkpoint::{AppliedToBlocks, CheckpointError, applied_by_slot, verify};
use steadfast_common::error::ErrorKind;
use steadfast_common::job::dataset::Manifest;
use steadfast_common::records::stream::StreamPassRecord;
use steadfast_common::records::{CheckpointRecord, ResultRecord};
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
    let values = view.entries.iter().map(|(key, entry)| (key.as_str(), entry.value.as_slice()));
    let mut evidence = Evidence::of_etcd(keys, record.spec.clone(), values)
        .map_err(|error| Failure::invalid(error.to_string()))?;
    let result = evidence.result.as_ref();
    let chosen = chosen(job, &manifests::of_view(&view, keys), wanted, result)?;
    let store = open_store(&record).await?;
    let object = Manifest::object_name(&record.manifest);
    let manifest = read_manifest(&store, &object, &record.manifest).await?;
    let checkpoint = match chosen {
        Some((id, manifest)) => {
            let is_final = result.is_some_and(|it| it.checkpoint.as_ref() == Some(&id));
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
    if let Some(stream) = &mut evidence.stream {
        for (pass, (pass_record, manifest)) in &mut stream.passes {
            let digest = &pass_record.manifest;
            let object = StreamPassRecord::object_name(&evidence.spec.name, *pass, digest);
            *manifest = read_manifest(&store, &object, digest).await?;
        }
    }
    Ok(Evidence { manifest, checkpoint, ..evidence })
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

async fn read_manifest(store: &Location, object: &str, digest: &str) -> Result<Manifest, Failure> {
    let place = store.child(object).map_err(store_failure)?;
    let json = place.read().await.map_err(store_failure)?;
    Manifest::parse(VecDeque::from([json]), digest)
        .map_err(|reason| Failure::invalid(format!("{place} is damaged: {reason}")))
}

/// Reads the shard files of a checkpoint, and verifies the parameters if it is the final one.
async fn checkpoint(
    store: &Location,
    id: String,
    record: CheckpointRecord,
    is_final: bool,
) -> Result<CheckpointEvidence, CheckpointError> {
    let slots = applied_by_slot(store, &record).await?.into_iter().map(|(slot, applied)| {
        let groups = applied.into_iter();
        let group = |AppliedToBlocks { counted, blocks }| Group { counted, blocks };
        SlotCounts { slot, groups: groups.map(group).collect() }
    });
    let parameters_sha256 = match is_final {
        true => Some(verify(store, &record).await?.parameters_sha256),
        false => None,
    };
    Ok(CheckpointEvidence {
        parameters_sha256,
        ..CheckpointEvidence::new(id, record, slots.collect())
    })
}
