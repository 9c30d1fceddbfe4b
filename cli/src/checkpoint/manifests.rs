//! Reads the manifests of a job's checkpoints from etcd.

use steadfast_common::error::ErrorKind;
use steadfast_common::records::keys::Keys;
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
    /// Orders checkpoints by commit.
    pub create_revision: i64,
    /// The manifest, or why it cannot be read.
    pub record: Result<CheckpointRecord, String>,
    /// Whether the job would resume from it.
    pub is_latest: bool,
}

impl Manifest {
    /// Returns the manifest.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn record(&self) -> Result<&CheckpointRecord, Failure> {
        self.record.as_ref().map_err(|reason| {
            let id = &self.id;
            Failure::invalid(format!("cannot read the manifest of checkpoint {id}: {reason}"))
        })
    }
}

/// Reads all manifests of a job, newest first.
///
/// # Errors
/// If etcd does not answer.
pub async fn read(job: &Job) -> Result<Vec<Manifest>, Failure> {
    Ok(of_view(&job.etcd.list(&job.keys.checkpoints_prefix()).await?, &job.keys))
}

/// Returns all manifests of a job in a view of etcd, newest first.
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

/// Reads the record of the job.
///
/// # Errors
/// If etcd has no such job.
pub async fn record(job: &Job) -> Result<JobRecord, Failure> {
    if let Some(record) = job.etcd.get_json(&job.keys.job()).await? {
        return Ok(record);
    }
    let names = known(&job.etcd).await?;
    let way_out = match names.as_slice() {
        [] => "it has no jobs at all; is it the right etcd?".to_owned(),
        names => format!("it has {}; choose one with --job", names.join(", ")),
    };
    let (name, key) = (&job.name, job.keys.job());
    let message = format!("etcd has no job {name} (no key `{key}`); {way_out}");
    Err(Failure::new(ErrorKind::NotFound, message))
}

/// Opens the store of a job.
///
/// # Errors
/// If this machine cannot open the store.
pub async fn open_store(job: &JobRecord) -> Result<Location, Failure> {
    steadfast_store::open(&job.store).map_err(|error| {
        store_failure(error).context(format!("cannot open the store of job {}", job.spec.name))
    })
}

pub fn store_failure(error: StoreError) -> Failure {
    let kind = match error.kind() {
        steadfast_store::ErrorKind::Permanent => ErrorKind::Invalid,
        steadfast_store::ErrorKind::Transient => ErrorKind::Unavailable,
    };
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
    // Error messages of libraries can have several lines.
    let cause = cause.unwrap_or_default().replace('\n', " ");
    Failure::new(kind, format!("{error}{cause}"))
}

/// Checks that the job exists and has not ended, for operations that need a master.
///
/// # Errors
/// If the job has ended or does not exist.
pub async fn must_go_on(job: &Job) -> Result<(), Failure> {
    record(job).await?;
    let result: Option<ResultRecord> = job.etcd.get_json(&job.keys.result()).await?;
    match result {
        None => Ok(()),
        Some(_) => Err(Failure::new(
            ErrorKind::Conflict,
            format!(
                "job {} has ended; its checkpoints can only be listed, verified and exported",
                job.name
            ),
        )),
    }
}

/// Returns the id in a pointer value: a JSON string, or text without quotes.
pub fn pointer(value: &[u8]) -> String {
    serde_json::from_slice(value).unwrap_or_else(|_| String::from_utf8_lossy(value).into_owned())
}
