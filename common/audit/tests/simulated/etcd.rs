//! A simulated etcd that records its history; each commit also puts the master's lock.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use steadfast_audit::history::{Change, Revision};
use steadfast_common::keys::Keys;
use steadfast_common::records::LockRecord;
use steadfast_master_core::ledger::QueueFact;
use uuid::Uuid;

#[derive(Clone, Debug)]
pub struct Etcd {
    pub keys: Keys,
    pub revisions: Vec<Revision>,
    /// Create-revision and version of each key.
    entries: BTreeMap<String, (i64, i64)>,
    revision: i64,
}

/// A put, or a deletion if there is no value.
pub type Op = (String, Option<String>);

pub fn put<T: Serialize>(key: &str, value: &T) -> Op {
    (key.to_owned(), Some(serde_json::to_string(value).expect("records are plain data")))
}

impl Etcd {
    pub fn new() -> Self {
        let keys = Keys::of_job("job");
        Self { keys, revisions: Vec::new(), entries: BTreeMap::new(), revision: 0 }
    }

    /// One transaction.
    pub fn txn(&mut self, ops: Vec<Op>) {
        self.revision += 1;
        let at = self.revision;
        // etcd allows each key once per transaction.
        let ops: BTreeMap<String, Option<String>> = ops.into_iter().collect();
        let mut changes = Vec::new();
        for (key, value) in ops {
            if value.is_none() && !self.entries.contains_key(&key) {
                continue;
            }
            let entry = self.entries.entry(key.clone()).or_insert((at, 0));
            entry.1 += 1;
            let (create_revision, version) = *entry;
            let change = match value.is_some() {
                true => Change { key: key.clone(), value, create_revision, version },
                false => Change { key: key.clone(), value, create_revision: 0, version: 0 },
            };
            if change.value.is_none() {
                self.entries.remove(&key);
            }
            changes.push(change);
        }
        if !changes.is_empty() {
            self.revisions.push(Revision { revision: at, changes });
        }
    }

    /// The value of a key that exists.
    pub fn value<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let changes = self.revisions.iter().rev().flat_map(|it| &it.changes);
        let value = changes.filter(|it| it.key == key).find_map(|it| it.value.as_deref());
        value.map(|it| serde_json::from_str(it).expect("it was written as JSON"))
    }

    /// The keys that begin with `prefix`.
    pub fn keys_below(&self, prefix: &str) -> impl Iterator<Item = &String> {
        self.entries.keys().filter(move |key| key.starts_with(prefix))
    }

    fn lock(&self, holder: u128) -> Op {
        put(&self.keys.master_lock(), &LockRecord { holder: Uuid::from_u128(holder) })
    }

    /// The previous lock expires, and `holder` acquires it.
    pub fn acquire(&mut self, holder: u128) {
        self.txn(vec![(self.keys.master_lock(), None)]);
        let lock = self.lock(holder);
        self.txn(vec![lock]);
    }

    /// The lock expires.
    pub fn expire_lock(&mut self) {
        self.txn(vec![(self.keys.master_lock(), None)]);
    }

    /// A commit by the acting master.
    pub fn commit(&mut self, holder: u128, mut ops: Vec<Op>) {
        if ops.is_empty() {
            return;
        }
        ops.push(self.lock(holder));
        self.txn(ops);
    }

    /// Translates facts about queues to operations on keys, as the master writes them.
    pub fn ops_of(&self, facts: &[QueueFact]) -> Vec<Op> {
        let keys = &self.keys;
        let op = |fact: &QueueFact| match fact {
            QueueFact::Head(head) => put(&keys.queue(), head),
            QueueFact::Task { round, task, record } => put(&keys.task(*round, *task), record),
            QueueFact::Done { round, task } => (keys.task(*round, *task), None),
            QueueFact::GivenUp { task, record: Some(record) } => put(&keys.given_up(*task), record),
            QueueFact::GivenUp { task, record: None } => (keys.given_up(*task), None),
            QueueFact::Replied { trainer, reply } => put(&keys.reply(*trainer), reply),
            QueueFact::Forgotten { trainer } => (keys.reply(*trainer), None),
        };
        facts.iter().map(op).collect()
    }
}
