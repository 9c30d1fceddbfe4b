//! Commits proposals: turns facts into key changes, and writes them to etcd while this master holds the
//! lock.

use std::collections::BTreeMap;

use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::keys::Keys;
use steadfast_coord::{CoordError, Etcd, Leadership, OPS_MAX, Op};
use steadfast_master_core::job_state::Fact;
use steadfast_master_core::ledger::QueueFact;
use steadfast_master_core::sync_tasks::FailureFact;

/// The only writer of a job's keys in one term. It does not depend on the state machine that proposes.
#[derive(Debug)]
pub(crate) struct Committer {
    pub etcd: Etcd,
    pub keys: Keys,
    leadership: Leadership,
}

impl Committer {
    pub fn new(etcd: Etcd, keys: Keys, leadership: Leadership) -> Self {
        Self { etcd, keys, leadership }
    }

    /// Returns the number of this term.
    pub fn epoch(&self) -> i64 {
        self.leadership.epoch()
    }

    /// Commits a proposal in one transaction; returns its revision, or `None` if there was nothing to commit.
    ///
    /// # Errors
    /// When the term is lost, or etcd is unreachable for too long. The outcome may be unknown then, so the
    /// caller ends its term and drops its state.
    pub async fn commit(&mut self, proposal: Proposal) -> Result<Option<i64>, CoordError> {
        if proposal.is_empty() {
            return Ok(None);
        }
        let ops: Vec<Op> = proposal.ops.into_values().collect();
        Ok(Some(self.leadership.commit(&self.etcd, &ops).await?))
    }

    /// Commits changes that have no effect until a later commit, in as many transactions as needed.
    ///
    /// # Errors
    /// See [`Committer::commit`].
    pub async fn commit_ahead(&mut self, ops: &[Op]) -> Result<(), CoordError> {
        for ops in ops.chunks(OPS_MAX) {
            self.leadership.commit(&self.etcd, ops).await?;
        }
        Ok(())
    }
}

/// Key changes, at most one per key: etcd rejects a transaction that puts a key twice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proposal {
    ops: BTreeMap<String, Op>,
}

impl Proposal {
    /// Adds a change; it replaces an earlier one to the same key.
    pub fn add(&mut self, op: Op) {
        self.ops.insert(op.key().to_owned(), op);
    }

    pub fn add_fact(&mut self, keys: &Keys, fact: &Fact) {
        match fact {
            Fact::Queue(fact) => self.add(queue_op(keys, fact)),
            Fact::Failure(fact) => self.add_failure(keys, fact),
            Fact::HeldOutGivenUp { task, record } => {
                self.add(Op::put(&keys.given_up(*task), record));
            }
            Fact::Generation(record) => {
                self.add(Op::put(&keys.generation(), record));
                self.add(Op::put(&keys.generation_record(record.generation), record));
            }
            Fact::Init(record) => self.add(Op::put(&keys.init(), record)),
            Fact::Evaluation(record) => {
                self.add(or_delete(keys.evaluation(), |key| Some(Op::put(key, record.as_ref()?))));
            }
            Fact::Manifest { id, record } => {
                self.add(or_delete(keys.checkpoint(id), |key| {
                    Some(Op::put(key, record.as_ref()?))
                }));
            }
            Fact::Latest(id) => {
                let key = keys.checkpoint_latest();
                self.add(or_delete(key, |key| Some(Op::put(key, id.as_ref()?))));
            }
            Fact::RoundDeleted { round } => {
                self.add(Op::delete_prefix(&keys.round_prefix(*round)));
            }
            Fact::Stream(record) => self.add(Op::put(&keys.stream(), record)),
            Fact::StreamPass { pass, record } => {
                self.add(or_delete(keys.stream_pass(*pass), |key| {
                    Some(Op::put(key, record.as_deref()?))
                }));
            }
            Fact::Result(result) => self.add(Op::put(&keys.result(), result)),
        }
    }

    /// Adds the changes of a synchronous job's fact. The rounds of such a job are its passes.
    fn add_failure(&mut self, keys: &Keys, fact: &FailureFact) {
        let key = |pass: Pass, task: TaskId| keys.task(u64::from(pass.0), task);
        match fact {
            FailureFact::Failed { pass, task, record } => {
                self.add(Op::put(&key(*pass, *task), record));
            }
            FailureFact::GivenUp { pass, task, record } => {
                self.add(Op::delete(&key(*pass, *task)));
                self.add(Op::put(&keys.given_up(*task), record));
            }
            FailureFact::Forgotten { pass, task } => self.add(Op::delete(&key(*pass, *task))),
        }
    }

    /// Removes and returns the changes of keys that begin with `prefix`.
    pub fn split_off(&mut self, prefix: &str) -> Vec<Op> {
        let all = std::mem::take(&mut self.ops).into_iter();
        let (split, kept) = all.partition(|(key, _)| key.starts_with(prefix));
        self.ops = kept;
        BTreeMap::into_values(split).collect()
    }

    pub fn len(&self) -> usize {
        self.ops.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
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
