//! Reads the durable state from etcd, and writes its facts.

use serde::de::DeserializeOwned;
use steadfast_common::ids::{Pass, TaskId, TrainerId};
use steadfast_common::job::schedule::task_order;
use steadfast_common::job::spec::Mode;
use steadfast_common::records::QueueRecord;
use steadfast_common::records::given_up::GivenUpRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::stream::StreamPassRecord;
use steadfast_coord::{CoordError, Entry, Etcd, Op, Transaction, View};
use steadfast_master_core::given_up::GivenUp;
use steadfast_master_core::job_state::{Fact, JobState};
use steadfast_master_core::ledger::{QueueFact, TaskOrder};
use steadfast_master_core::restore_point::Candidate;
use steadfast_master_core::sync_tasks::FailureFact;
use tracing::warn;

use crate::event_loop::generations::Stored;
use crate::job::Job;

/// Reads keys of etcd.
pub(crate) trait Reader: Sync {
    /// Reads all keys below `prefix` as they were at one revision.
    fn list(&self, prefix: &str) -> impl Future<Output = Result<View, CoordError>> + Send;

    /// Reads one key.
    fn entry(&self, key: &str) -> impl Future<Output = Result<Option<Entry>, CoordError>> + Send;
}

impl Reader for Etcd {
    async fn list(&self, prefix: &str) -> Result<View, CoordError> {
        Self::list(self, prefix).await
    }

    async fn entry(&self, key: &str) -> Result<Option<Entry>, CoordError> {
        self.get(key).await
    }
}

async fn json<T: DeserializeOwned>(etcd: &impl Reader, key: &str) -> Result<Option<T>, CoordError> {
    etcd.entry(key).await?.as_ref().map(Entry::json).transpose()
}

/// Reads the records of a job, and applies them as the facts that were committed.
///
/// # Errors
/// If etcd does not answer, or a value cannot be parsed.
pub(crate) async fn read(
    etcd: &impl Reader,
    keys: &Keys,
    job: &Job,
) -> Result<JobState, CoordError> {
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
    facts.extend(json(etcd, &keys.generation()).await?.map(Fact::Generation));
    facts.extend(json(etcd, &keys.init()).await?.map(Fact::Init));
    facts.push(Fact::Evaluation(json(etcd, &keys.evaluation()).await?));
    facts.push(Fact::Latest(read_pointer(etcd, keys).await?));
    facts.extend(json(etcd, &keys.trainers_desired()).await?.map(Fact::Scaled));
    facts.extend(json(etcd, &keys.result()).await?.map(Fact::Result));
    facts.iter().for_each(|fact| state.evolve(fact));
    if mode == Mode::Async {
        // An earlier master may not have deleted all of them. Those of a later round are of a rollback in whose middle
        // it died: when the present pass ends, they must not become tasks of the next.
        let view = etcd.list(&keys.tasks_prefix()).await?;
        let rounds = view.entries.keys().filter_map(|key| keys.round_of(key));
        state.stale_rounds = rounds.filter(|it| *it != state.ledger.head().round).collect();
    }
    Ok(state)
}

/// Reads what a generation needs beside the state: all manifests, and the tasks of a round, if there are any yet.
///
/// # Errors
/// If etcd does not answer.
pub(crate) async fn read_stored(
    etcd: &impl Reader,
    keys: &Keys,
    round: Option<u64>,
) -> Result<Stored, CoordError> {
    let (prefix, pointer) = (keys.checkpoints_prefix(), keys.checkpoint_latest());
    let view = etcd.list(&prefix).await?;
    let manifests = view.entries.iter().filter(|(key, _)| **key != pointer);
    let manifests = manifests.map(|(key, entry)| Candidate {
        id: key.strip_prefix(&prefix).unwrap_or(key).to_owned(),
        create_revision: entry.create_revision,
        record: entry.json().map_err(|error| error.to_string()),
    });
    let manifests = manifests.collect();
    let mut stored = Stored { manifests, round, stale: Vec::new() };
    if let Some(round) = round {
        let tasks = etcd.list(&keys.round_prefix(round)).await?;
        stored.stale = tasks.entries.keys().filter_map(|key| keys.task_of(round, key)).collect();
    }
    Ok(stored)
}

/// Reads which checkpoint is the latest. For an unreadable pointer it returns an id that does not exist,
/// which makes the caller search for the newest complete checkpoint.
async fn read_pointer(etcd: &impl Reader, keys: &Keys) -> Result<Option<String>, CoordError> {
    match json(etcd, &keys.checkpoint_latest()).await {
        Ok(pointer) => Ok(pointer),
        Err(error @ CoordError::BadValue { .. }) => {
            warn!(%error, "cannot parse the pointer to the latest checkpoint");
            Ok(Some(String::new()))
        }
        Err(error) => Err(error),
    }
}

/// Reads the passes of a stream.
async fn stream(etcd: &impl Reader, keys: &Keys) -> Result<Vec<Fact>, CoordError> {
    let mut facts: Vec<Fact> =
        json(etcd, &keys.stream()).await?.map(Fact::Stream).into_iter().collect();
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
async fn queues(etcd: &impl Reader, keys: &Keys) -> Result<Vec<Fact>, CoordError> {
    let head: Option<QueueRecord> = json(etcd, &keys.queue()).await?;
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
async fn failures(etcd: &impl Reader, keys: &Keys) -> Result<Vec<Fact>, CoordError> {
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
    etcd: &impl Reader,
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

/// Adds the key changes of a fact to a transaction.
pub(crate) fn write(keys: &Keys, fact: &Fact, to: &mut Transaction) {
    match fact {
        Fact::Job(record) => to.add(Op::put(&keys.job(), record)),
        Fact::Queue(fact) => to.add(queue_op(keys, fact)),
        Fact::Failure(fact) => write_failure(keys, fact, to),
        Fact::HeldOutGivenUp { task, record } => {
            to.add(Op::put(&keys.given_up(*task), record));
        }
        Fact::Generation(record) => {
            to.add(Op::put(&keys.generation(), record));
            to.add(Op::put(&keys.generation_record(record.generation), record));
        }
        Fact::Init(record) => to.add(Op::put(&keys.init(), record)),
        Fact::Evaluation(record) => {
            to.add(or_delete(keys.evaluation(), |key| Some(Op::put(key, record.as_ref()?))));
        }
        Fact::Manifest { id, record } => {
            to.add(or_delete(keys.checkpoint(id), |key| Some(Op::put(key, record.as_ref()?))));
        }
        Fact::Latest(id) => {
            let key = keys.checkpoint_latest();
            to.add(or_delete(key, |key| Some(Op::put(key, id.as_ref()?))));
        }
        Fact::RoundDeleted { round } => {
            to.add(Op::delete_prefix(&keys.round_prefix(*round)));
        }
        Fact::Stream(record) => to.add(Op::put(&keys.stream(), record)),
        Fact::StreamPass { pass, record } => {
            to.add(or_delete(keys.stream_pass(*pass), |key| {
                Some(Op::put(key, record.as_deref()?))
            }));
        }
        Fact::Scaled(record) => to.add(Op::put(&keys.trainers_desired(), &**record)),
        Fact::Result(result) => to.add(Op::put(&keys.result(), result)),
    }
}

/// Adds the changes of a synchronous job's fact. The rounds of such a job are its passes.
fn write_failure(keys: &Keys, fact: &FailureFact, to: &mut Transaction) {
    let key = |pass: Pass, task: TaskId| keys.task(u64::from(pass.0), task);
    match fact {
        FailureFact::Failed { pass, task, record } => {
            to.add(Op::put(&key(*pass, *task), record));
        }
        FailureFact::GivenUp { pass, task, record } => {
            to.add(Op::delete(&key(*pass, *task)));
            to.add(Op::put(&keys.given_up(*task), record));
        }
        FailureFact::Forgotten { pass, task } => to.add(Op::delete(&key(*pass, *task))),
    }
}

fn queue_op(keys: &Keys, fact: &QueueFact) -> Op {
    match fact {
        QueueFact::Head(head) => Op::put(&keys.queue(), head),
        QueueFact::Task { round, task, record } => Op::put(&keys.task(*round, *task), record),
        QueueFact::Done { round, task } => Op::delete(&keys.task(*round, *task)),
        QueueFact::GivenUp { task, record } => {
            or_delete(keys.given_up(*task), |key| Some(Op::put(key, record.as_ref()?)))
        }
        QueueFact::Replied { trainer, reply } => Op::put(&keys.reply(*trainer), reply),
        QueueFact::Forgotten { trainer } => Op::delete(&keys.reply(*trainer)),
    }
}

/// Returns the put of a key, or the deletion of the key if `put` returns `None`.
fn or_delete(key: String, put: impl FnOnce(&str) -> Option<Op>) -> Op {
    put(&key).unwrap_or_else(|| Op::delete(&key))
}
