//! Reads the durable state from etcd.

use steadfast_common::given_up::GivenUpRecord;
use steadfast_common::ids::{Pass, TaskId, TrainerId};
use steadfast_common::keys::Keys;
use steadfast_common::records::QueueRecord;
use steadfast_common::schedule::task_order;
use steadfast_common::spec::Mode;
use steadfast_common::stream::StreamPassRecord;
use steadfast_coord::{CoordError, Etcd};
use steadfast_master_core::given_up::GivenUp;
use steadfast_master_core::job_state::{Fact, JobState};
use steadfast_master_core::ledger::{QueueFact, TaskOrder};
use steadfast_master_core::sync_tasks::FailureFact;
use tracing::warn;

use crate::job::Job;

/// Reads the records of a job, and applies them as the facts that were committed.
///
/// # Errors
/// If etcd does not answer, or a value cannot be parsed.
pub(crate) async fn read(etcd: &Etcd, keys: &Keys, job: &Job) -> Result<JobState, CoordError> {
    let mode = job.record.spec.mode;
    let (given_up, held_out) = given_up(etcd, keys, &job.manifest.held_out).await?;
    let (manifest, seed) = (job.manifest.clone(), job.record.spec.seed);
    let order = match job.record.spec.dataset.follow {
        false => TaskOrder::new(move |pass| task_order(&manifest, seed, pass)),
        true => TaskOrder::of_stream(seed),
    };
    let mut state = JobState::new(mode, order, given_up, held_out);
    // The head of the queues refers to a pass.
    let mut facts = stream(etcd, keys).await?;
    facts.extend(match mode {
        Mode::Sync => failures(etcd, keys).await?,
        Mode::Async => queues(etcd, keys).await?,
    });
    facts.extend(etcd.get_json(&keys.generation()).await?.map(Fact::Generation));
    facts.extend(etcd.get_json(&keys.init()).await?.map(Fact::Init));
    facts.push(Fact::Evaluation(etcd.get_json(&keys.evaluation()).await?));
    facts.push(Fact::Latest(read_pointer(etcd, keys).await?));
    facts.extend(etcd.get_json(&keys.result()).await?.map(Fact::Result));
    facts.iter().for_each(|fact| state.evolve(fact));
    if mode == Mode::Async {
        // An earlier master may not have deleted all of them.
        let view = etcd.list(&keys.tasks_prefix()).await?;
        let rounds = view.entries.keys().filter_map(|key| keys.round_of(key));
        state.stale_rounds = rounds.filter(|it| *it < state.ledger.head().round).collect();
    }
    Ok(state)
}

/// Reads which checkpoint is the latest. For an unreadable pointer it returns an id that does not exist,
/// which makes the caller search for the newest complete checkpoint.
async fn read_pointer(etcd: &Etcd, keys: &Keys) -> Result<Option<String>, CoordError> {
    match etcd.get_json(&keys.checkpoint_latest()).await {
        Ok(pointer) => Ok(pointer),
        Err(error @ CoordError::BadValue { .. }) => {
            warn!(%error, "cannot parse the pointer to the latest checkpoint");
            Ok(Some(String::new()))
        }
        Err(error) => Err(error),
    }
}

/// Reads the passes of a stream.
async fn stream(etcd: &Etcd, keys: &Keys) -> Result<Vec<Fact>, CoordError> {
    let mut facts: Vec<Fact> =
        etcd.get_json(&keys.stream()).await?.map(Fact::Stream).into_iter().collect();
    for (key, entry) in &etcd.list(&keys.stream_passes_prefix()).await?.entries {
        match keys.stream_pass_of(key) {
            Some(pass) => {
                let record: StreamPassRecord = entry.json()?;
                facts.push(Fact::StreamPass { pass, record: Some(record.into()) });
            }
            None => warn!(key, "unknown key ignored"),
        }
    }
    Ok(facts)
}

/// Reads the queues of an asynchronous job.
async fn queues(etcd: &Etcd, keys: &Keys) -> Result<Vec<Fact>, CoordError> {
    let head: Option<QueueRecord> = etcd.get_json(&keys.queue()).await?;
    let Some(head) = head else { return Ok(Vec::new()) };
    let round = head.round;
    let mut facts = vec![QueueFact::Head(head)];
    for (key, entry) in &etcd.list(&keys.round_prefix(round)).await?.entries {
        match keys.task_of(round, key) {
            Some(task) => facts.push(QueueFact::Task { round, task, record: entry.json()? }),
            None => warn!(key, "unknown key ignored"),
        }
    }
    let prefix = keys.replies_prefix();
    for (key, entry) in &etcd.list(&prefix).await?.entries {
        match key.strip_prefix(&prefix).and_then(|id| id.parse().ok()) {
            Some(id) => {
                facts.push(QueueFact::Replied { trainer: TrainerId(id), reply: entry.json()? });
            }
            None => warn!(key, "unknown key ignored"),
        }
    }
    Ok(facts.into_iter().map(Fact::Queue).collect())
}

/// Reads the failed tasks of a synchronous job.
async fn failures(etcd: &Etcd, keys: &Keys) -> Result<Vec<Fact>, CoordError> {
    let mut facts = Vec::new();
    for (key, entry) in &etcd.list(&keys.tasks_prefix()).await?.entries {
        let Some(round) = keys.round_of(key) else { continue };
        let (Ok(pass), Some(task)) = (u32::try_from(round), keys.task_of(round, key)) else {
            continue;
        };
        let record = entry.json()?;
        facts.push(Fact::Failure(FailureFact::Failed { pass: Pass(pass), task, record }));
    }
    Ok(facts)
}

/// Reads the given-up tasks: training tasks, then held-out tasks.
async fn given_up(
    etcd: &Etcd,
    keys: &Keys,
    held_out: &[TaskId],
) -> Result<(GivenUp, GivenUp), CoordError> {
    let (mut training, mut evaluation) = (Vec::new(), Vec::new());
    for (key, entry) in &etcd.list(&keys.given_up_prefix()).await?.entries {
        let Some(task) = keys.given_up_of(key) else {
            warn!(key, "unknown key ignored");
            continue;
        };
        let list = match held_out.binary_search(&task) {
            Ok(_) => &mut evaluation,
            Err(_) => &mut training,
        };
        list.push((task, entry.json::<GivenUpRecord>()?));
    }
    Ok((training.into_iter().collect(), evaluation.into_iter().collect()))
}
