//! The task queues in etcd: converts facts to key changes, and recovers state from keys.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::given_up::GivenUpRecord;
use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::keys::Keys;
use steadfast_common::records::{QueueRecord, ReplyRecord, TaskRecord};
use steadfast_coord::{CoordError, Etcd, Op};
use steadfast_master_core::given_up::GivenUp;
use steadfast_master_core::ledger::{Fact, Ledger, OrderOf};
use steadfast_master_core::sync_tasks::{self, SyncTasks};
use tracing::warn;

/// Key changes, at most one per key: etcd rejects a transaction that puts a key twice.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    of: BTreeMap<String, Op>,
}

impl Changes {
    /// Adds a change; it replaces an earlier one to the same key.
    pub fn add(&mut self, op: Op) {
        self.of.insert(op.key().to_owned(), op);
    }

    /// Adds the changes of `facts`, the first of which belong to `round`.
    pub fn add_facts(&mut self, keys: &Keys, mut round: u64, facts: &[Fact]) {
        for fact in facts {
            self.add(match fact {
                Fact::Head(head) => {
                    round = head.round;
                    Op::put(&keys.queue(), head)
                }
                Fact::Task { task, record } => Op::put(&keys.task(round, *task), record),
                Fact::Done { task } => Op::delete(&keys.task(round, *task)),
                Fact::GivenUp { task, record: Some(record) } => {
                    Op::put(&keys.given_up(*task), record)
                }
                Fact::GivenUp { task, record: None } => Op::delete(&keys.given_up(*task)),
                Fact::Replied { trainer, reply } => Op::put(&keys.reply(*trainer), reply),
                Fact::Forgotten { trainer } => Op::delete(&keys.reply(*trainer)),
            });
        }
    }

    /// Adds the changes of a synchronous job's fact. The rounds of such a job are its passes.
    pub fn add_sync_fact(&mut self, keys: &Keys, fact: &sync_tasks::FailureFact) {
        let key = |pass: Pass, task| keys.task(u64::from(pass.0), task);
        match fact {
            sync_tasks::FailureFact::Failed { pass, task, record } => {
                self.add(Op::put(&key(*pass, *task), record));
            }
            sync_tasks::FailureFact::GivenUp { pass, task, record } => {
                self.add(Op::delete(&key(*pass, *task)));
                self.add(Op::put(&keys.given_up(*task), record));
            }
            sync_tasks::FailureFact::Forgotten { pass, task } => {
                self.add(Op::delete(&key(*pass, *task)));
            }
        }
    }

    /// Returns the number of changed keys.
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Returns whether there are no changes.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Returns the changes, sorted by key.
    pub fn into_ops(self) -> Vec<Op> {
        self.of.into_values().collect()
    }
}

/// Reads which checkpoint is the latest. For an unreadable pointer it returns an id that does not exist,
/// which makes the caller search for the newest complete checkpoint.
///
/// # Errors
/// If etcd does not answer.
pub async fn read_pointer(etcd: &Etcd, keys: &Keys) -> Result<Option<String>, CoordError> {
    match etcd.get_json(&keys.checkpoint_latest()).await {
        Ok(pointer) => Ok(pointer),
        Err(error @ CoordError::BadValue { .. }) => {
            warn!(%error, "the pointer to the latest checkpoint cannot be read");
            Ok(Some(String::new()))
        }
        Err(error) => Err(error),
    }
}

/// Reads the queues of an asynchronous job.
///
/// # Errors
/// If etcd does not answer, or a value cannot be parsed.
pub async fn recover_ledger(
    etcd: &Etcd,
    keys: &Keys,
    given_up: GivenUp,
    order_of: OrderOf<'_>,
) -> Result<Ledger, CoordError> {
    let head: Option<QueueRecord> = etcd.get_json(&keys.queue()).await?;
    let Some(head) = head else { return Ok(Ledger::new(order_of)) };
    let view = etcd.list(&keys.round_prefix(head.round)).await?;
    let mut tasks = Vec::new();
    for (key, entry) in &view.entries {
        match keys.task_of(head.round, key) {
            Some(task) => tasks.push((task, entry.json::<TaskRecord>()?)),
            None => warn!(key, "a key that is none of ours is ignored"),
        }
    }
    let mut replies = Vec::new();
    let prefix = keys.replies_prefix();
    for (key, entry) in &etcd.list(&prefix).await?.entries {
        match key.strip_prefix(&prefix).and_then(|id| id.parse().ok()) {
            Some(id) => {
                replies.push((steadfast_common::ids::TrainerId(id), entry.json::<ReplyRecord>()?));
            }
            None => warn!(key, "a key that is none of ours is ignored"),
        }
    }
    Ok(Ledger::recover(head, tasks, given_up, replies, order_of))
}

/// Reads the given-up tasks: training tasks, then held-out tasks.
///
/// # Errors
/// If etcd does not answer, or a value cannot be parsed.
pub async fn recover_given_up(
    etcd: &Etcd,
    keys: &Keys,
    held_out: &[TaskId],
) -> Result<(GivenUp, GivenUp), CoordError> {
    let (mut trained_on, mut evaluated) = (Vec::new(), Vec::new());
    for (key, entry) in &etcd.list(&keys.given_up_prefix()).await?.entries {
        let Some(task) = keys.given_up_of(key) else {
            warn!(key, "a key that is none of ours is ignored");
            continue;
        };
        let list = match held_out.binary_search(&task) {
            Ok(_) => &mut evaluated,
            Err(_) => &mut trained_on,
        };
        list.push((task, entry.json::<GivenUpRecord>()?));
    }
    Ok((trained_on.into_iter().collect(), evaluated.into_iter().collect()))
}

/// Returns the rounds before `present` that still have keys, because an earlier master did not delete them.
///
/// # Errors
/// If etcd does not answer.
pub async fn stale_rounds(
    etcd: &Etcd,
    keys: &Keys,
    present: u64,
) -> Result<BTreeSet<u64>, CoordError> {
    let view = etcd.list(&keys.tasks_prefix()).await?;
    let rounds = view.entries.keys().filter_map(|key| keys.round_of(key));
    Ok(rounds.filter(|round| *round < present).collect())
}

/// Reads the failed and given-up tasks of a synchronous job.
///
/// # Errors
/// If etcd does not answer, or a value cannot be parsed.
pub async fn recover_sync_tasks(
    etcd: &Etcd,
    keys: &Keys,
    given_up: GivenUp,
) -> Result<SyncTasks, CoordError> {
    let mut facts = Vec::new();
    for (key, entry) in &etcd.list(&keys.tasks_prefix()).await?.entries {
        let Some(round) = keys.round_of(key) else { continue };
        let (Ok(pass), Some(task)) = (u32::try_from(round), keys.task_of(round, key)) else {
            continue;
        };
        facts.push(sync_tasks::FailureFact::Failed {
            pass: Pass(pass),
            task,
            record: entry.json()?,
        });
    }
    Ok(SyncTasks::recover(facts, given_up))
}
