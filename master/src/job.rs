//! Brings a job into etcd: plans its dataset, stores the manifest, accepts the spec once.

use std::path::Path;
use std::sync::Arc;

use steadfast_common::dataset::Manifest;
use steadfast_common::error::ErrorKind;
use steadfast_common::job_file;
use steadfast_common::keys::Keys;
use steadfast_common::records::JobRecord;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_coord::Etcd;
use steadfast_data::DataError;
use steadfast_process::Failure;
use steadfast_store::Location;
use tracing::{info, warn};

/// Mini-batches in a task, and tasks for a lane, below which a plan is called coarse.
const ENOUGH: u64 = 4;

/// A job and its dataset.
#[derive(Clone, Debug)]
pub struct Job {
    pub record: JobRecord,
    pub manifest: Arc<Manifest>,
    /// Tasks and records that one pass trains on.
    pub tasks: u32,
    pub records: u64,
}

impl Job {
    fn new(record: JobRecord, manifest: Manifest) -> Self {
        let (tasks, records) =
            (manifest.training_tasks().len() as u32, manifest.training_records());
        Self { record, manifest: Arc::new(manifest), tasks, records }
    }
}

/// What a master was told to run.
#[derive(Clone, Debug)]
pub struct Order {
    pub spec: JobSpec,
    /// Folder of the job file; relative sources are resolved against it.
    pub base: Option<String>,
    pub store: String,
}

impl Order {
    /// Reads and checks a job file.
    ///
    /// # Errors
    /// All its faults.
    pub fn read(path: &Path, store: &str) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Failure::io(format!("cannot read the job file {}", path.display()), &error)
        })?;
        let spec = job_file::parse(&text).map_err(|error| {
            let faults = error.faults.iter().map(|fault| format!("{}: {fault}", path.display()));
            Failure::invalid(faults.collect::<Vec<_>>().join("\n"))
        })?;
        let absolute = std::path::absolute(path)
            .map_err(|error| Failure::io(format!("cannot find {}", path.display()), &error))?;
        let store = if store.contains("://") {
            store.to_owned()
        } else {
            // Everybody reads it from etcd, each in a folder of their own.
            let absolute = std::path::absolute(store)
                .map_err(|error| Failure::io(format!("cannot find {store}"), &error))?;
            absolute.display().to_string()
        };
        let base = absolute.parent().map(|folder| folder.display().to_string());
        Ok(Self { spec, base, store })
    }
}

/// Refuses an order that contradicts the job that etcd holds.
///
/// # Errors
/// If the specs differ, or etcd does not answer.
pub async fn check(etcd: &Etcd, keys: &Keys, order: Option<&Order>) -> Result<(), Failure> {
    let Some(held) = etcd.get_json::<JobRecord>(&keys.job()).await? else { return Ok(()) };
    match order {
        Some(order) if order.spec.digest() != held.digest => Err(conflict(keys, order, &held)),
        Some(_) | None => Ok(()),
    }
}

fn conflict(keys: &Keys, order: &Order, held: &JobRecord) -> Failure {
    let faults = difference(&order.spec, &held.spec);
    Failure::new(
        ErrorKind::Conflict,
        format!(
            "the job `{}` exists with another spec ({}); give the new one another name, or delete \
             the old one: etcdctl del --prefix {}/",
            order.spec.name,
            faults.join(", "),
            keys.root()
        ),
    )
}

/// Names the keys in which two specs differ.
fn difference(new: &JobSpec, old: &JobSpec) -> Vec<String> {
    let fields = |spec: &JobSpec| match serde_json::to_value(spec) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let (new, old) = (fields(new), fields(old));
    let keys: std::collections::BTreeSet<&String> = new.keys().chain(old.keys()).collect();
    let differing = keys.into_iter().filter(|key| new.get(*key) != old.get(*key));
    differing.map(|key| format!("`{key}` differs")).collect()
}

/// The job that etcd holds; brings the ordered one there first if there is none.
///
/// # Errors
/// If nothing was ordered and nothing is there, the dataset cannot be planned, or etcd or the
/// store does not answer.
pub async fn open(etcd: &Etcd, keys: &Keys, order: Option<&Order>) -> Result<Job, Failure> {
    if let Some(record) = etcd.get_json::<JobRecord>(&keys.job()).await? {
        check(etcd, keys, order).await?;
        return load(record).await;
    }
    let Some(order) = order else {
        return Err(Failure::new(
            ErrorKind::NotFound,
            format!("there is no job at {}; start a master with --job-file", keys.job()),
        ));
    };
    let job = plan(order).await?;
    let value = serde_json::to_vec(&job.record)
        .map_err(|error| Failure::internal(format!("the job record: {error}")))?;
    match etcd.create(&keys.job(), &value, 0).await? {
        Ok(_) => Ok(job),
        Err(found) => {
            check(etcd, keys, Some(order)).await?;
            load(found.json()?).await
        }
    }
}

async fn plan(order: &Order) -> Result<Job, Failure> {
    let spec = &order.spec;
    let fraction = spec.evaluation.fraction;
    let manifest = steadfast_data::plan(&spec.dataset, fraction, order.base.as_deref())
        .await
        .map_err(data_failure)?;
    info!(
        files = manifest.files.len(),
        tasks = manifest.task_count(),
        held_out = manifest.held_out.len(),
        records = manifest.training_records(),
        "dataset planned"
    );
    warn_if_coarse(spec, &manifest);
    let record = JobRecord {
        spec: spec.clone(),
        digest: spec.digest(),
        store: order.store.clone(),
        manifest: manifest.digest(),
    };
    let store = open_store(&record)?;
    steadfast_data::store_manifest(&store, &manifest).await.map_err(data_failure)?;
    Ok(Job::new(record, manifest))
}

fn data_failure(error: DataError) -> Failure {
    let kind = match error.kind() {
        steadfast_data::ErrorKind::Permanent => ErrorKind::Invalid,
        steadfast_data::ErrorKind::Transient => ErrorKind::Unavailable,
    };
    Failure::new(kind, error.to_string())
}

/// Few, or small, tasks make for idle trainers: each should hold several mini-batches, and there
/// should be several for each lane.
fn warn_if_coarse(spec: &JobSpec, manifest: &Manifest) {
    let tasks = manifest.training_tasks().len() as u64;
    let records = manifest.training_records() / tasks.max(1);
    match spec.mode {
        Mode::Sync => {
            let lanes = u64::from(spec.sync.lanes);
            if tasks < ENOUGH * lanes {
                warn!(tasks, lanes, "few tasks for so many lanes; lower dataset.records_per_task");
            }
        }
        Mode::Async => {
            let batch = u64::from(spec.asynchronous.batch);
            if records < ENOUGH * batch {
                warn!(records, batch, "small tasks; raise dataset.records_per_task");
            }
        }
    }
}

async fn load(record: JobRecord) -> Result<Job, Failure> {
    let store = open_store(&record)?;
    let manifest = steadfast_data::load_manifest(&store, &record.manifest).await;
    Ok(Job::new(record, manifest.map_err(data_failure)?))
}

fn open_store(record: &JobRecord) -> Result<Location, Failure> {
    steadfast_store::open(&record.store)
        .map_err(|error| Failure::invalid(format!("the store: {error}")))
}
