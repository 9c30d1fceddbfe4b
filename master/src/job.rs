//! Creates a job in etcd: plans its dataset, stores the manifest, and accepts the spec once.

use std::path::Path;
use std::sync::Arc;

use steadfast_checkpoint::StartError;
use steadfast_common::error::ErrorKind;
use steadfast_common::job::dataset::Manifest;
use steadfast_common::job::elastic::{AnyJobRecord, ElasticJobRecord, ElasticSpec};
use steadfast_common::job::job_file::{self, JobFile};
use steadfast_common::job::optimizer_errors::name_of;
use steadfast_common::job::spec::JobSpec;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{JobRecord, StartRecord};
use steadfast_coord::Etcd;
use steadfast_data::DataError;
use steadfast_process::Failure;
use steadfast_store::Location;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::{plan_warnings, stream};

/// A job and its dataset.
#[derive(Clone, Debug)]
pub struct Job {
    pub record: JobRecord,
    pub manifest: Arc<Manifest>,
    /// Tasks and records that one pass trains on.
    pub tasks: u32,
    pub records: u64,
    /// Problems of the plan that the user may want to fix.
    pub warnings: Vec<String>,
}

impl Job {
    pub(crate) fn new(record: JobRecord, manifest: Manifest) -> Self {
        let (tasks, records) =
            (manifest.training_tasks().len() as u32, manifest.training_records());
        let warnings = match record.spec.dataset.follow {
            false => plan_warnings::of_plan(&record.spec, &manifest),
            true => Vec::new(),
        };
        Self { record, manifest: Arc::new(manifest), tasks, records, warnings }
    }
}

/// The job that a master was started with.
#[derive(Clone, Debug)]
pub enum Request {
    Training(Box<JobRequest>),
    Elastic(ElasticRequest),
}

/// An elastic job that a master was started with.
#[derive(Clone, Debug)]
pub struct ElasticRequest {
    pub spec: ElasticSpec,
}

/// The job in etcd.
#[derive(Debug)]
pub(crate) enum Opened {
    Training(Box<Job>),
    Elastic(ElasticSpec),
}

impl Request {
    /// Reads and validates a job file. `store` is required for a training job.
    ///
    /// # Errors
    /// If a file or directory cannot be found or read, or with all errors of the job file.
    pub fn read(path: &Path, store: Option<&str>) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Failure::io(format!("cannot read the job file {}", path.display()), &error)
        })?;
        let parsed = job_file::parse_any(&text).map_err(|error| {
            let errors = error.errors.iter().map(|error| format!("{}: {error}", path.display()));
            Failure::invalid(errors.collect::<Vec<_>>().join("\n"))
        })?;
        match parsed {
            JobFile::Elastic(spec) => Ok(Self::Elastic(ElasticRequest { spec })),
            JobFile::Training(spec) => {
                let store = store.ok_or_else(|| {
                    Failure::invalid(
                        "--job-file needs --store, the place of checkpoints and the model",
                    )
                })?;
                JobRequest::new(*spec, path, store).map(|it| Self::Training(Box::new(it)))
            }
        }
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Training(request) => &request.spec.name,
            Self::Elastic(request) => &request.spec.name,
        }
    }

    fn digest(&self) -> String {
        match self {
            Self::Training(request) => request.spec.digest(),
            Self::Elastic(request) => request.spec.digest(),
        }
    }
}

/// A training job that a master was started with.
#[derive(Clone, Debug)]
pub struct JobRequest {
    pub spec: JobSpec,
    /// Directory of the job file; relative sources are resolved against it.
    pub base: Option<String>,
    pub store: String,
}

impl JobRequest {
    fn new(spec: JobSpec, path: &Path, store: &str) -> Result<Self, Failure> {
        let absolute = std::path::absolute(path)
            .map_err(|error| Failure::io(format!("cannot find {}", path.display()), &error))?;
        let store = if store.contains("://") {
            store.to_owned()
        } else {
            // Other processes read it from etcd and run in other directories.
            let absolute = std::path::absolute(store)
                .map_err(|error| Failure::io(format!("cannot find {store}"), &error))?;
            absolute.display().to_string()
        };
        let base = absolute.parent().map(|directory| directory.display().to_string());
        Ok(Self { spec, base, store })
    }
}

/// Rejects a request that contradicts the job in etcd.
///
/// # Errors
/// If the specs differ, or etcd does not answer.
pub(crate) async fn check(
    etcd: &Etcd,
    keys: &Keys,
    request: Option<&Request>,
) -> Result<(), Failure> {
    let Some(held) = etcd.get_json::<AnyJobRecord>(&keys.job()).await? else { return Ok(()) };
    match (request, &held) {
        (Some(request), _) if !held.is_of(&request.digest()) => Err(conflict(keys, request, &held)),
        (Some(Request::Training(request)), AnyJobRecord::Training(held))
            if request.spec.settings() != held.spec.settings() =>
        {
            let difference = request.spec.difference(&held.spec);
            warn!(
                difference,
                "the job was changed while it ran; it keeps its settings, not those of the job file"
            );
            Ok(())
        }
        (Some(_) | None, _) => Ok(()),
    }
}

fn conflict(keys: &Keys, request: &Request, held: &AnyJobRecord) -> Failure {
    let difference = match (request, held) {
        (Request::Training(request), AnyJobRecord::Training(held)) => {
            request.spec.difference(&held.spec)
        }
        (Request::Elastic(_), AnyJobRecord::Elastic(_)) => "`nodes` differs".to_owned(),
        (Request::Training(_), AnyJobRecord::Elastic(_))
        | (Request::Elastic(_), AnyJobRecord::Training(_)) => "`kind` differs".to_owned(),
    };
    Failure::new(
        ErrorKind::Conflict,
        format!(
            "the job `{}` exists with another spec ({difference}); `steadfast change` gives a job other settings; \
             give a new one another name, or delete the old one: etcdctl del --prefix {}/",
            request.name(),
            keys.root()
        ),
    )
}

/// Returns the job in etcd. Creates it from the request if there is none. If that has to wait, `waits_for` says what
/// for.
///
/// # Errors
/// If there is neither a job nor a request, the specs differ, the dataset cannot be planned, or etcd or
/// the store does not answer.
pub(crate) async fn open(
    etcd: &Etcd,
    keys: &Keys,
    request: Option<&Request>,
    waits_for: &watch::Sender<String>,
) -> Result<Opened, Failure> {
    if let Some(record) = etcd.get_json::<AnyJobRecord>(&keys.job()).await? {
        check(etcd, keys, request).await?;
        return load(record).await;
    }
    let Some(request) = request else {
        return Err(Failure::new(
            ErrorKind::NotFound,
            format!("there is no job at {}; start a master with --job-file", keys.job()),
        ));
    };
    let (record, opened) = match request {
        Request::Training(request) => {
            let job = plan(request, waits_for).await?;
            (AnyJobRecord::Training(Box::new(job.record.clone())), Opened::Training(Box::new(job)))
        }
        Request::Elastic(request) => {
            let record = AnyJobRecord::Elastic(ElasticJobRecord::new(&request.spec));
            (record, Opened::Elastic(request.spec.clone()))
        }
    };
    let value = serde_json::to_vec(&record)
        .map_err(|error| Failure::internal(format!("the job record: {error}")))?;
    match etcd.create(&keys.job(), &value, 0).await? {
        Ok(_) => Ok(opened),
        Err(found) => {
            check(etcd, keys, Some(request)).await?;
            load(found.json()?).await
        }
    }
}

async fn plan(request: &JobRequest, waits_for: &watch::Sender<String>) -> Result<Job, Failure> {
    let spec = &request.spec;
    if spec.model.has_closures() {
        return store_plan(request, Manifest::default()).await;
    }
    if spec.dataset.follow {
        let base = request.base.as_deref();
        let manifest = stream::first_columns(&spec.dataset, base, waits_for).await?;
        return store_plan(request, manifest).await;
    }
    let manifest = steadfast_data::plan(&spec.dataset, &spec.evaluation, request.base.as_deref())
        .await
        .map_err(data_failure)?;
    info!(
        files = manifest.files.len(),
        tasks = manifest.task_count(),
        held_out = manifest.held_out.len(),
        records = manifest.training_records(),
        "dataset planned"
    );
    for warning in plan_warnings::of_plan(spec, &manifest) {
        warn!(warning, "the job may not run as expected");
    }
    store_plan(request, manifest).await
}

async fn store_plan(request: &JobRequest, manifest: Manifest) -> Result<Job, Failure> {
    let spec = &request.spec;
    let record = JobRecord {
        base: request.base.clone().filter(|_| spec.dataset.follow),
        start: describe_start(request).await?,
        ..JobRecord::new(spec.clone(), request.store.clone(), manifest.digest())
    };
    let store = open_store(&record)?;
    steadfast_data::store_manifest(&store, &manifest).await.map_err(data_failure)?;
    Ok(Job::new(record, manifest))
}

/// Returns the record of the file with initial values, if the job has one.
async fn describe_start(request: &JobRequest) -> Result<Option<StartRecord>, Failure> {
    let Some(start) = &request.spec.start else { return Ok(None) };
    let file = steadfast_data::resolve(&start.file, request.base.as_deref());
    let file = steadfast_store::open(&file)
        .map_err(|error| Failure::invalid(format!("`start.file`: {error}")))?;
    let failed = |error: StartError| Failure::new(error.kind(), error.to_string());
    let mut record = steadfast_checkpoint::describe_start(&file).await.map_err(failed)?;
    if !start.optimizer.is_empty() {
        let file = steadfast_data::resolve(&start.optimizer, request.base.as_deref());
        let file = steadfast_store::open(&file)
            .map_err(|error| Failure::invalid(format!("`start.optimizer`: {error}")))?;
        let kind = name_of(request.spec.optimizer.kind);
        let described = steadfast_checkpoint::describe_start_optimizer(&file, &kind).await;
        record.optimizer = Some(described.map_err(failed)?);
    }
    Ok(Some(record))
}

pub(crate) fn data_failure(error: DataError) -> Failure {
    let kind = match error.kind() {
        steadfast_data::ErrorKind::Permanent => ErrorKind::Invalid,
        steadfast_data::ErrorKind::Transient => ErrorKind::Unavailable,
    };
    Failure::new(kind, error.to_string())
}

async fn load(record: AnyJobRecord) -> Result<Opened, Failure> {
    let record = match record {
        AnyJobRecord::Training(record) => *record,
        AnyJobRecord::Elastic(record) => return Ok(Opened::Elastic(record.spec)),
    };
    let store = open_store(&record)?;
    let manifest = steadfast_data::load_manifest(&store, &record.manifest).await;
    Ok(Opened::Training(Box::new(Job::new(record, manifest.map_err(data_failure)?))))
}

fn open_store(record: &JobRecord) -> Result<Location, Failure> {
    steadfast_store::open(&record.store)
        .map_err(|error| Failure::invalid(format!("the store: {error}")))
}
