//! `steadfast extend`: lets a job that has ended train further.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use steadfast_checkpoint::Checkpoint;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Version;
use steadfast_common::job::dataset::sha256;
use steadfast_common::records::extension::More;
use steadfast_common::records::{
    CheckpointRecord, EvaluationRecord, JobOutcome, JobRecord, KeptModel, LockRecord, MODEL,
    ResultRecord,
};
use steadfast_common::status::format::plural;
use steadfast_coord::{CoordError, Leadership, Op, Session};
use steadfast_host::time::unix_ms;
use steadfast_process::{Failure, print_line};
use steadfast_store::{Location, StoreError};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use crate::checkpoint::manifests;
use crate::job_args::{Job, JobArgs};
use crate::output::notice;

/// Lifetime of the lock while this command holds it.
const TTL: Duration = Duration::from_secs(10);

/// How long processes that were killed may still be registered.
const REGISTERED_MAX: Duration = Duration::from_secs(30);

/// How long an acting master may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Polling interval.
const POLL_EVERY: Duration = Duration::from_millis(200);

/// Let a job that has ended train further.
///
/// The job goes on from its last checkpoint when its processes are started again, with the same job file: after its
/// last pass it has the parameters of a job that had this length from the beginning. Its result is deleted; a new one
/// follows.
#[derive(Debug, Args)]
pub struct ExtendArgs {
    /// Passes to add to those of the job.
    #[arg(long, value_name = "N", required_unless_present = "steps", conflicts_with = "steps")]
    passes: Option<u32>,
    /// Steps to add, of a job that counts steps.
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    #[command(flatten)]
    job: JobArgs,
}

/// Extends the job; prints its new length to stdout.
pub async fn run(args: ExtendArgs) -> Result<ExitCode, Failure> {
    let more = match (args.passes, args.steps) {
        (Some(passes @ 1..), _) => More::Passes(passes),
        (None, Some(steps @ 1..)) => More::Steps(steps),
        _ => return Err(Failure::invalid("--passes or --steps must be at least 1")),
    };
    let job = args.job.find_stopped().await?;
    job.must_train("its program decides when it ends").await?;
    let session = Session::open(&job.etcd, TTL).await?;
    let extended = extend(&job, &session, more).await;
    session.close(&job.etcd).await;
    let record = extended?;
    let (length, what) = match (record.spec.passes, record.spec.steps) {
        (Some(passes), _) => (u64::from(passes), "passes"),
        (None, steps) => (steps.unwrap_or_default(), "steps"),
    };
    notice(format_args!(
        "steadfast: job {} has {length} {what} now; it goes on when its processes are started again",
        job.name
    ));
    print_line(length);
    Ok(ExitCode::SUCCESS)
}

/// Extends the job in the place of a master: under its lock, so that none acts meanwhile.
async fn extend(job: &Job, session: &Session, more: More) -> Result<JobRecord, Failure> {
    let mut leadership = acquire(job, session).await?;
    let (etcd, keys) = (&job.etcd, &job.keys);
    let record: JobRecord =
        etcd.get_json(&keys.job()).await?.ok_or_else(|| not_found(job, "there is no such job"))?;
    if record.spec.dataset.follow {
        return Err(invalid(job, "it is a stream, which has no length"));
    }
    let result: Option<ResultRecord> = etcd.get_json(&keys.result()).await?;
    if let Some(failed) = result.as_ref().filter(|it| it.state == JobOutcome::Failed) {
        return Err(invalid(job, &failed.describe()));
    }
    let evaluation: Option<EvaluationRecord> = etcd.get_json(&keys.evaluation()).await?;
    let course = evaluation.and_then(|it| it.course);
    let (end, best) = course.map_or((None, None), |course| (course.end, Some(course.best)));
    if end.is_some() {
        let reason = "its evaluations ended it (`evaluation.patience`); a new job with `[start]` begins from its model";
        return Err(invalid(job, reason));
    }
    let store = manifests::open_store(&record).await?;
    if let Some(kept) = best.and_then(|best| best.model) {
        best_exists(job, &store, &kept).await?;
    }
    let from = last_checkpoint(job, &store).await?;
    let record = record.extended(more, from, unix_ms()).map_err(|reason| invalid(job, &reason))?;
    let mut ops = vec![Op::put(&keys.job(), &record)];
    if result.is_some() {
        ops.push(Op::delete(&keys.result()));
    }
    let Err(error) = leadership.commit(etcd, &ops).await else { return Ok(record) };
    // The reply may be lost.
    match etcd.get_json::<JobRecord>(&keys.job()).await {
        Ok(Some(found)) if found == record => Ok(record),
        Ok(_) => Err(error.into()),
        Err(_) => Err(Failure::unavailable(format!(
            "job {} may be extended or not: {error}; `steadfast status` shows its passes before you repeat this",
            job.name
        ))),
    }
}

/// Returns the step of the latest checkpoint, after a check that its objects exist.
async fn last_checkpoint(job: &Job, store: &Location) -> Result<Version, Failure> {
    let latest: Option<String> = job.etcd.get_json(&job.keys.checkpoint_latest()).await?;
    let id = latest.ok_or_else(|| not_found(job, "it has no checkpoint to go on from"))?;
    let checkpoint: Option<CheckpointRecord> = job.etcd.get_json(&job.keys.checkpoint(&id)).await?;
    let missing = || not_found(job, &format!("its checkpoint {id} does not exist any more"));
    let checkpoint = checkpoint.ok_or_else(missing)?;
    if let Some(reason) = &checkpoint.invalidated {
        return Err(not_found(job, &format!("its checkpoint {id} was given up: {reason}")));
    }
    let opened = Checkpoint::open(store, &checkpoint).await;
    opened.map_err(|error| not_found(job, &format!("its checkpoint {id}: {error}")))?;
    Ok(checkpoint.position.version)
}

/// Checks that the best parameters so far, which may be the result once more, are in the store.
async fn best_exists(job: &Job, store: &Location, kept: &KeptModel) -> Result<(), Failure> {
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
    Err(not_found(job, &reason))
}

/// Acquires the lock of the master while no process takes part in the job; keys of those that were killed expire.
///
/// A trainer that takes part knows the old length, and goes on with it in the generation that it is in. If none takes
/// part, each reads the job when it registers, and compares it when it joins a generation.
async fn acquire(job: &Job, session: &Session) -> Result<Leadership, Failure> {
    let (etcd, keys) = (&job.etcd, &job.keys);
    let value = serde_json::to_vec(&LockRecord { holder: Uuid::new_v4() })
        .map_err(|error| Failure::internal(format!("the lock: {error}")))?;
    let (started, mut master, mut held) = (Instant::now(), job.master(), None);
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
            return held.ok_or_else(|| Failure::internal("the lock is held"));
        }
        let acts = async { matches!(timeout(ANSWER_MAX, master.status()).await, Ok(Ok(_))) };
        if REGISTERED_MAX < started.elapsed() || (held.is_none() && acts.await) {
            let message = format!(
                "job {} runs ({}, {}); stop its processes first, extend it, and start them again: it goes on from its \
                 last checkpoint",
                job.name,
                plural(pservers, "pserver"),
                plural(trainers, "trainer"),
            );
            return Err(Failure::new(ErrorKind::Conflict, message));
        }
        sleep(POLL_EVERY).await;
    }
}

fn invalid(job: &Job, reason: &str) -> Failure {
    Failure::invalid(format!("job {} cannot be extended: {reason}", job.name))
}

fn not_found(job: &Job, reason: &str) -> Failure {
    let message = format!("job {} cannot be extended: {reason}", job.name);
    Failure::new(ErrorKind::NotFound, message)
}
