//! The manifests of a job's checkpoints, as etcd has them.

use steadfast_common::error::ErrorKind;
use steadfast_common::keys::Keys;
use steadfast_common::records::{CheckpointRecord, JobRecord, ResultRecord};
use steadfast_coord::View;
use steadfast_process::Failure;
use steadfast_store::{Location, StoreError};

use super::choice::choose;
use crate::job_args::{Job, known};

/// One checkpoint.
#[derive(Clone, Debug)]
pub struct Manifest {
    pub id: String,
    /// Orders checkpoints by when they were committed.
    pub create_revision: i64,
    /// The manifest, or why it cannot be read.
    pub record: Result<CheckpointRecord, String>,
    /// Whether the job would resume from it.
    pub is_latest: bool,
}

impl Manifest {
    /// The manifest, which must be readable.
    ///
    /// # Errors
    /// If it is not.
    pub fn record(&self) -> Result<&CheckpointRecord, Failure> {
        self.record.as_ref().map_err(|reason| {
            let id = &self.id;
            Failure::invalid(format!("the manifest of checkpoint {id} cannot be read: {reason}"))
        })
    }
}

/// Reads all manifests of a job, the newest first.
///
/// # Errors
/// If etcd does not answer.
pub async fn read(job: &Job) -> Result<Vec<Manifest>, Failure> {
    Ok(of_view(&job.etcd.list(&job.keys.checkpoints_prefix()).await?, &job.keys))
}

/// All manifests of a job among what etcd holds, the newest first.
pub fn of_view(view: &View, keys: &Keys) -> Vec<Manifest> {
    let (prefix, pointer_key) = (keys.checkpoints_prefix(), keys.checkpoint_latest());
    let latest = view.entries.get(&pointer_key).map(|entry| pointer(&entry.value));
    let mut manifests = Vec::new();
    for (key, entry) in view.entries.iter().filter(|(key, _)| **key != pointer_key) {
        let Some(id) = key.strip_prefix(&prefix).map(str::to_owned) else { continue };
        manifests.push(Manifest {
            is_latest: latest.as_ref() == Some(&id),
            create_revision: entry.create_revision,
            record: entry.json().map_err(|error| error.to_string()),
            id,
        });
    }
    manifests.sort_by_key(|manifest| std::cmp::Reverse(manifest.create_revision));
    manifests
}

/// Reads the manifest of one checkpoint: the one that `wanted` names, or else the latest.
///
/// # Errors
/// If there is no such checkpoint, or its manifest cannot be read.
pub async fn read_one(job: &Job, wanted: &[String]) -> Result<Manifest, Failure> {
    let manifests = read(job).await?;
    let mut chosen = choose(&job.name, &manifests, wanted)?;
    match (chosen.pop(), chosen.as_slice()) {
        (Some(only), []) => Ok(only.clone()),
        _ => Err(Failure::invalid(format!(
            "{} are {} checkpoints; name just one",
            wanted.join(", "),
            wanted.len()
        ))),
    }
}

/// Reads what the job is.
///
/// # Errors
/// If etcd has no such job.
pub async fn record(job: &Job) -> Result<JobRecord, Failure> {
    if let Some(record) = job.etcd.get_json(&job.keys.job()).await? {
        return Ok(record);
    }
    let names = known(&job.etcd).await?;
    let way_out = match names.as_slice() {
        [] => "it knows no job at all; is it the right etcd?".to_owned(),
        names => format!("it knows {}; choose with --job", names.join(", ")),
    };
    let (name, key) = (&job.name, job.keys.job());
    let message = format!("etcd has no job {name} (no key `{key}`); {way_out}");
    Err(Failure::new(ErrorKind::NotFound, message))
}

/// Opens the store of a job.
///
/// # Errors
/// If etcd has no such job, or this machine cannot open its store.
pub async fn open_store(job: &JobRecord) -> Result<Location, Failure> {
    steadfast_store::open(&job.store).map_err(|error| {
        store_failure(error).context(format!("the store of job {} cannot be opened", job.spec.name))
    })
}

/// A failed operation on a store.
pub fn store_failure(error: StoreError) -> Failure {
    let kind = match error.kind() {
        steadfast_store::ErrorKind::Permanent => ErrorKind::Invalid,
        steadfast_store::ErrorKind::Transient => ErrorKind::Unavailable,
    };
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
    // Causes of libraries may have several lines.
    let cause = cause.unwrap_or_default().replace('\n', " ");
    Failure::new(kind, format!("{error}{cause}"))
}

/// Refuses what needs a master if the job has ended.
///
/// # Errors
/// If it has ended, or there is no such job.
pub async fn must_go_on(job: &Job) -> Result<(), Failure> {
    record(job).await?;
    let result: Option<ResultRecord> = job.etcd.get_json(&job.keys.result()).await?;
    match result {
        None => Ok(()),
        Some(_) => Err(Failure::new(
            ErrorKind::Conflict,
            format!(
                "job {} is over; its checkpoints can be listed, verified and exported",
                job.name
            ),
        )),
    }
}

/// The id that a pointer names: a JSON text, or text without quotes.
pub fn pointer(value: &[u8]) -> String {
    serde_json::from_slice(value).unwrap_or_else(|_| String::from_utf8_lossy(value).into_owned())
}
