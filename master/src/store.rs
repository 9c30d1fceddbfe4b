//! The queues in etcd: facts as changes of keys, and back.

use std::collections::BTreeMap;

use steadfast_common::ids::Pass;
use steadfast_common::keys::Keys;
use steadfast_common::records::{QueueRecord, ReplyRecord, TaskRecord};
use steadfast_coord::{CoordError, Etcd, Op};
use steadfast_master_core::ledger::{Fact, Ledger, OrderOf};
use steadfast_master_core::sync_tasks::{self, SyncTasks};
use tracing::warn;

/// Changes of keys, at most one a key: etcd refuses a transaction that puts a key twice.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    of: BTreeMap<String, Op>,
}

impl Changes {
    /// Adds a change; it replaces an earlier one of the same key.
    pub fn add(&mut self, op: Op) {
        self.of.insert(op.key().to_owned(), op);
    }

    /// Adds what `facts` change, beginning in `round`.
    pub fn add_facts(&mut self, keys: &Keys, mut round: u64, facts: &[Fact]) {
        for fact in facts {
            self.add(match fact {
                Fact::Head(head) => {
                    round = head.round;
                    Op::put(&keys.queue(), head)
                }
                Fact::Task { task, record } => Op::put(&keys.task(round, *task), record),
                Fact::Done { task } => Op::delete(&keys.task(round, *task)),
                Fact::GivenUp { pass, task, reason } => {
                    Op::put(&keys.given_up(*pass, *task), reason)
                }
                Fact::TakenBack { pass, task } => Op::delete(&keys.given_up(*pass, *task)),
                Fact::Replied { trainer, reply } => Op::put(&keys.reply(*trainer), reply),
                Fact::Forgotten { trainer } => Op::delete(&keys.reply(*trainer)),
            });
        }
    }

    /// Adds what a fact of a synchronous job changes. Its rounds are its passes.
    pub fn add_sync_fact(&mut self, keys: &Keys, fact: &sync_tasks::Fact) {
        let key = keys.task(u64::from(fact.pass.0), fact.task);
        self.add(Op::put(&key, &fact.record));
    }

    /// Number of keys that change.
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// The changes, by key.
    pub fn into_ops(self) -> Vec<Op> {
        self.of.into_values().collect()
    }
}

/// Which checkpoint is the latest. A pointer that cannot be read points at nothing that exists, so
/// that the newest whole checkpoint is looked for.
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
/// If etcd does not answer, or holds a value that is not ours.
pub async fn recover_ledger(
    etcd: &Etcd,
    keys: &Keys,
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
    let mut given_up = Vec::new();
    for (key, entry) in &etcd.list(&keys.given_up_prefix()).await?.entries {
        match keys.given_up_of(key) {
            Some(which) => given_up.push((which, entry.json::<String>()?)),
            None => warn!(key, "a key that is none of ours is ignored"),
        }
    }
    Ok(Ledger::recover(head, tasks, given_up, replies, order_of))
}

/// Reads the failed and given-up tasks of a synchronous job.
///
/// # Errors
/// If etcd does not answer, or holds a value that is not ours.
pub async fn recover_sync_tasks(etcd: &Etcd, keys: &Keys) -> Result<SyncTasks, CoordError> {
    let prefix = keys.tasks_prefix();
    let mut facts = Vec::new();
    for (key, entry) in &etcd.list(&prefix).await?.entries {
        let Some((round, _)) = key.strip_prefix(&prefix).and_then(|rest| rest.split_once('/'))
        else {
            continue;
        };
        let Ok(round) = round.parse::<u32>() else { continue };
        if let Some(task) = keys.task_of(u64::from(round), key) {
            facts.push(sync_tasks::Fact { pass: Pass(round), task, record: entry.json()? });
        }
    }
    Ok(SyncTasks::recover(facts))
}
