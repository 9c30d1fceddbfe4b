//! `steadfast extend` and `steadfast change` let a job go on from a checkpoint, otherwise than before. The acting
//! master amends a job that runs. The commands act in its place on one that does not.

use std::time::Duration;

use steadfast_checkpoint::Checkpoint;
use steadfast_common::error::ErrorKind;
use steadfast_common::job::dataset::sha256;
use steadfast_common::records::amendment::{Amended, Amendment};
use steadfast_common::records::extension::More;
use steadfast_common::records::{
    CheckpointRecord, EvaluationRecord, JobOutcome, JobRecord, KeptModel, LockRecord, MODEL,
    ResultRecord,
};
use steadfast_common::status::format::plural;
use steadfast_coord::{CoordError, Leadership, Op, Session};
use steadfast_host::time::unix_ms;
use steadfast_process::Failure;
use steadfast_proto::v1::amend_job_request;
use steadfast_store::{Location, StoreError};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use crate::checkpoint::{manifests, now};
use crate::job_args::Job;
use crate::output::notice;

/// Lifetime of the lock while a command holds it.
const TTL: Duration = Duration::from_secs(10);

/// Processes that were killed may still be registered for this long.
const REGISTERED_MAX: Duration = Duration::from_secs(30);

/// An acting master may take this long to answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Polling interval.
const POLL_EVERY: Duration = Duration::from_millis(200);

/// An amendment that a user wants.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub amendment: Amendment,
    /// The text of the job file, for other settings.
    pub job_file: String,
}

/// Whether the processes of a job go on with what it was changed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goes {
    /// They do.
    On,
    /// They were stopped.
    WhenStarted,
}

impl Wanted {
    fn infinitive(&self) -> &'static str {
        match self.amendment {
            Amendment::Extend(_) => "extend",
            Amendment::Change(_) => "change",
        }
    }

    fn participle(&self) -> &'static str {
        match self.amendment {
            Amendment::Extend(_) => "extended",
            Amendment::Change(_) => "changed",
        }
    }

    fn request(&self) -> amend_job_request::Amendment {
        match self.amendment {
            Amendment::Extend(More::Passes(passes)) => amend_job_request::Amendment::Passes(passes),
            Amendment::Extend(More::Steps(steps)) => amend_job_request::Amendment::Steps(steps),
            Amendment::Change(_) => amend_job_request::Amendment::JobFile(self.job_file.clone()),
        }
    }
}

impl Goes {
    /// Says when the job goes on.
    pub fn when(self) -> &'static str {
        match self {
            Self::On => "goes on",
            Self::WhenStarted => "goes on when its processes are started again",
        }
    }
}

/// Amends a job, whether it runs or not; returns its record.
///
/// # Errors
/// If it cannot be amended like this, or its master, etcd or the store does not answer.
pub async fn amend(job: &Job, wanted: &Wanted) -> Result<(JobRecord, Goes), Failure> {
    if let Some(record) = amend_running(job, wanted).await? {
        return Ok((record, Goes::On));
    }
    let session = Session::open(&job.etcd, TTL).await?;
    let amended = amend_stopped(job, &session, wanted).await;
    session.close(&job.etcd).await;
    Ok((amended?, Goes::WhenStarted))
}

/// Requests the amendment from the acting master, after a checkpoint. Returns `None` if none acts, or it has ended.
async fn amend_running(job: &Job, wanted: &Wanted) -> Result<Option<JobRecord>, Failure> {
    let (etcd, keys) = (&job.etcd, &job.keys);
    let has_ended = async || Ok::<_, CoordError>(etcd.get(&keys.result()).await?.is_some());
    if !acts(job).await || has_ended().await? {
        return Ok(None);
    }
    let before: Option<JobRecord> = etcd.get_json(&keys.job()).await?;
    // What was trained since the last checkpoint would be trained again.
    let checkpoint = match now::take(job).await {
        Ok(id) => id,
        Err(_) if has_ended().await? => return Ok(None),
        Err(failure) => return Err(failure),
    };
    notice(format_args!("steadfast: job {} goes on from checkpoint {checkpoint}", job.name));
    let amended = job.master().amend_job(wanted.request()).await;
    let record: Option<JobRecord> = etcd.get_json(&keys.job()).await?;
    let Err(Failure { kind, message }) = amended else { return Ok(record) };
    match kind {
        ErrorKind::Conflict => Ok(None),
        // The reply was lost.
        _ if record != before => Ok(record),
        ErrorKind::Unavailable => Err(Failure::unavailable(format!(
            "job {} is not {} so far: {message}; see `steadfast status` before you repeat this",
            job.name,
            wanted.participle()
        ))),
        _ => Err(Failure::new(kind, format!("job {}: {message}", job.name))),
    }
}

/// Amends the job in the place of a master: under its lock, so that none acts meanwhile.
async fn amend_stopped(
    job: &Job,
    session: &Session,
    wanted: &Wanted,
) -> Result<JobRecord, Failure> {
    let mut stopped = Stopped::acquire(job, session, wanted).await?;
    let found = stopped.read().await?;
    let checkpoint = stopped.last_checkpoint(&found).await?;
    let before = found.evaluation.as_ref();
    let amended = found.record.amended(&wanted.amendment, &checkpoint, before, unix_ms());
    let Amended { record, evaluation } = amended.map_err(|reason| stopped.invalid(&reason))?;
    let key = job.keys.evaluation();
    let evaluation = (evaluation != found.evaluation)
        .then(|| evaluation.as_ref().map_or_else(|| Op::delete(&key), |it| Op::put(&key, it)));
    stopped.commit(&found, &record, evaluation).await?;
    Ok(record)
}

/// Returns whether a master acts.
async fn acts(job: &Job) -> bool {
    matches!(timeout(ANSWER_MAX, job.master().status()).await, Ok(Ok(_)))
}

/// A job that does not run, and cannot begin to while this is held.
struct Stopped<'a> {
    job: &'a Job,
    wanted: &'a Wanted,
    leadership: Leadership,
}

/// A stopped job is described by its records in etcd.
struct Found {
    record: JobRecord,
    evaluation: Option<EvaluationRecord>,
    has_result: bool,
}

impl<'a> Stopped<'a> {
    /// Acquires the lock of the master while no process takes part in the job; keys of those that were killed expire.
    ///
    /// A process that takes part knows the job as it was, and goes on with it in the generation that it is in. If none
    /// takes part, each reads the job when it joins, and compares it when a generation begins.
    ///
    /// # Errors
    /// If the job runs, or etcd does not answer.
    async fn acquire(job: &'a Job, session: &Session, wanted: &'a Wanted) -> Result<Self, Failure> {
        let (etcd, keys) = (&job.etcd, &job.keys);
        let value = serde_json::to_vec(&LockRecord { holder: Uuid::new_v4() })
            .map_err(|error| Failure::internal(format!("the lock: {error}")))?;
        let (started, mut held) = (Instant::now(), None);
        loop {
            let registered = async || {
                let pservers = etcd.list(&keys.ps_prefix()).await?.entries.len();
                let trainers = etcd.list(&keys.trainers_prefix()).await?.entries.len();
                Ok::<_, CoordError>((pservers, trainers))
            };
            let (pservers, trainers) = registered().await?;
            // A job that runs needs its lock, also between two masters.
            if pservers + trainers == 0 && held.is_none() {
                held = Leadership::acquire(etcd, session, &keys.master_lock(), &value).await?.ok();
            }
            if held.is_some() && registered().await? == (0, 0) {
                let leadership = held.ok_or_else(|| Failure::internal("the lock is held"))?;
                return Ok(Self { job, wanted, leadership });
            }
            if REGISTERED_MAX < started.elapsed() || (held.is_none() && acts(job).await) {
                let message = format!(
                    "job {} is starting or stopping ({}, {}), or its master does not answer; {} it once it runs or \
                     has stopped",
                    job.name,
                    plural(pservers, "pserver"),
                    plural(trainers, "trainer"),
                    wanted.infinitive(),
                );
                return Err(Failure::new(ErrorKind::Conflict, message));
            }
            sleep(POLL_EVERY).await;
        }
    }

    /// Reads a job that trains, and has not failed.
    ///
    /// # Errors
    /// If there is no such job, or etcd does not answer.
    async fn read(&self) -> Result<Found, Failure> {
        let (etcd, keys) = (&self.job.etcd, &self.job.keys);
        let record: Option<JobRecord> = etcd.get_json(&keys.job()).await?;
        let record = record.ok_or_else(|| self.not_found("there is no such job"))?;
        let result: Option<ResultRecord> = etcd.get_json(&keys.result()).await?;
        if let Some(failed) = result.as_ref().filter(|it| it.state == JobOutcome::Failed) {
            return Err(self.invalid(&failed.describe()));
        }
        let evaluation = etcd.get_json(&keys.evaluation()).await?;
        Ok(Found { record, evaluation, has_result: result.is_some() })
    }

    /// Commits the next record of a job, and the deletion of its result, with other changes.
    ///
    /// # Errors
    /// If etcd does not answer, or this command has lost the lock.
    async fn commit(
        &mut self,
        found: &Found,
        next: &JobRecord,
        more: Option<Op>,
    ) -> Result<(), Failure> {
        let (etcd, keys) = (&self.job.etcd, &self.job.keys);
        let mut ops = vec![Op::put(&keys.job(), next)];
        ops.extend(more);
        if found.has_result {
            ops.push(Op::delete(&keys.result()));
        }
        let Err(error) = self.leadership.commit(etcd, &ops).await else { return Ok(()) };
        // The reply may be lost.
        match etcd.get_json::<JobRecord>(&keys.job()).await {
            Ok(Some(found)) if found == *next => Ok(()),
            Ok(_) => Err(error.into()),
            Err(_) => Err(Failure::unavailable(format!(
                "job {} may be {} or not: {error}; repeat this once etcd answers, after `steadfast status`",
                self.job.name,
                self.wanted.participle()
            ))),
        }
    }

    /// Returns the latest checkpoint, after a check that its objects exist, and that the best parameters of the job do.
    ///
    /// # Errors
    /// If there is none, or objects are missing.
    async fn last_checkpoint(&self, found: &Found) -> Result<CheckpointRecord, Failure> {
        let store = manifests::open_store(&found.record).await?;
        let course = found.evaluation.as_ref().and_then(|it| it.course.as_ref());
        if let Some(kept) = course.and_then(|course| course.best.model.as_ref()) {
            self.best_exists(&store, kept).await?;
        }
        let (etcd, keys) = (&self.job.etcd, &self.job.keys);
        let latest: Option<String> = etcd.get_json(&keys.checkpoint_latest()).await?;
        let id = latest.ok_or_else(|| self.not_found("it has no checkpoint to go on from"))?;
        let checkpoint: Option<CheckpointRecord> = etcd.get_json(&keys.checkpoint(&id)).await?;
        let missing = || self.not_found(&format!("its checkpoint {id} does not exist any more"));
        let checkpoint = checkpoint.ok_or_else(missing)?;
        if let Some(reason) = &checkpoint.invalidated {
            return Err(self.not_found(&format!("its checkpoint {id} was given up: {reason}")));
        }
        let opened = Checkpoint::open(&store, &checkpoint).await;
        opened.map_err(|error| self.not_found(&format!("its checkpoint {id}: {error}")))?;
        Ok(checkpoint)
    }

    /// Checks that the best parameters so far, which may be the result once more, are in the store.
    async fn best_exists(&self, store: &Location, kept: &KeptModel) -> Result<(), Failure> {
        for name in [kept.url.rsplit('/').next().unwrap_or_default(), MODEL] {
            let bytes = match store.child(name) {
                Ok(file) => file.read().await,
                Err(error) => Err(error),
            };
            match bytes {
                Ok(bytes) if sha256(&bytes) == kept.file_sha256 => return Ok(()),
                Ok(_) | Err(StoreError::NotFound { .. }) => {}
                Err(error) => return Err(manifests::store_failure(error)),
            }
        }
        let reason = format!(
            "its best parameters are not in {store} any more: {MODEL} has others, or is missing"
        );
        Err(self.not_found(&reason))
    }

    fn invalid(&self, reason: &str) -> Failure {
        Failure::invalid(self.cannot(reason))
    }

    fn not_found(&self, reason: &str) -> Failure {
        Failure::new(ErrorKind::NotFound, self.cannot(reason))
    }

    fn cannot(&self, reason: &str) -> String {
        format!("job {} cannot be {}: {reason}", self.job.name, self.wanted.participle())
    }
}
