//! A write under construction.

use super::fact::{Change, Key, Revision, Write};
use super::history::History;
use super::span::Span;
use etcd_client::proto::PbKeyValue;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The latest revision plus uncommitted changes: the view of the operations of one transaction.
/// Dropping it discards the changes.
pub struct Staged<'h> {
    history: &'h History,
    changes: Vec<Change>,
    /// The index in `changes` of the last change of each key.
    latest: BTreeMap<Key, usize>,
}

impl<'h> Staged<'h> {
    pub fn new(history: &'h History) -> Self {
        Staged { history, changes: Vec::new(), latest: BTreeMap::new() }
    }

    pub fn history(&self) -> &'h History {
        self.history
    }

    /// Returns the revision that a read in this view reports: the next one, once there is a change.
    pub fn revision(&self) -> Revision {
        match self.changes.is_empty() {
            true => self.history.revision(),
            false => self.next_revision(),
        }
    }

    /// Returns the revision that the changes will have.
    pub fn next_revision(&self) -> Revision {
        self.history.revision() + 1
    }

    pub fn get(&self, key: &[u8]) -> Option<&Arc<PbKeyValue>> {
        match self.latest.get(key) {
            Some(&index) => self.changes[index].kv(),
            None => self.history.get(key, Revision::MAX),
        }
    }

    /// Reads a span of keys, in order.
    pub fn scan(&self, span: Span<'_>) -> Vec<&Arc<PbKeyValue>> {
        let committed = self.history.scan(span, Revision::MAX);
        if self.latest.is_empty() {
            return committed.collect();
        }
        let mut merged: BTreeMap<&[u8], &Arc<PbKeyValue>> =
            committed.map(|kv| (kv.key.as_slice(), kv)).collect();
        for (key, &index) in self.latest.iter().filter(|(key, _)| span.contains(key)) {
            match self.changes[index].kv() {
                Some(kv) => merged.insert(key, kv),
                None => merged.remove(key.as_slice()),
            };
        }
        merged.into_values().collect()
    }

    pub fn change(&mut self, change: Change) {
        self.latest.insert(change.key().to_vec(), self.changes.len());
        self.changes.push(change);
    }

    /// Returns the write, if anything changed.
    pub fn finish(self) -> Option<Write> {
        let revision = self.next_revision();
        (!self.changes.is_empty()).then_some(Write { revision, changes: self.changes })
    }
}
