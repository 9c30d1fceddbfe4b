//! Every key at every revision since the last compaction.

use super::fact::{Key, Revision, Write};
use super::span::Span;
use etcd_client::proto::PbKeyValue;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The revision of an empty store.
const FIRST_REVISION: Revision = 1;
/// The value of `compacted` before the first compaction, as in real etcd.
const NEVER_COMPACTED: Revision = -1;
/// How many writes, and how many bytes of them, survive a compaction for watchers that have not read
/// them yet. Real etcd delivers events while it writes; our watchers fetch them slightly later, and a
/// compaction in between must not cancel a watcher.
const GRACE_WRITES: usize = 1_000;
const GRACE_BYTES: usize = 16 << 20;

/// Two indexes of the same values: by key, for reads, and by revision, for watchers.
///
/// Invariants: versions of a key ascend by revision and are never empty; at most one of them is
/// at or below `compacted`, and that one is not a deletion; `writes` holds every revision from
/// `floor` to `revision` (except the first), and `floor <= max(compacted, FIRST_REVISION)`.
#[derive(Debug, Clone, PartialEq)]
pub struct History {
    revision: Revision,
    compacted: Revision,
    floor: Revision,
    keys: BTreeMap<Key, Vec<Version>>,
    writes: BTreeMap<Revision, Arc<Write>>,
    /// Size of the writes from `compacted` on.
    bytes: usize,
}

#[derive(Debug, Clone, PartialEq)]
struct Version {
    revision: Revision,
    /// `None` if the key was deleted.
    kv: Option<Arc<PbKeyValue>>,
}

/// Everything that a [`History`] is rebuilt from; cheap to create, because it shares the values.
#[derive(Debug, Clone, PartialEq)]
pub struct HistoryImage {
    pub revision: Revision,
    pub compacted: Revision,
    /// Values older than the compaction that are still current.
    pub kept: Vec<Arc<PbKeyValue>>,
    /// Writes from the compaction on.
    pub writes: Vec<Arc<Write>>,
}

impl HistoryImage {
    /// Returns whether this is a valid history: one write for each revision from the compaction on, and
    /// a latest revision that can be incremented.
    pub fn is_sound(&self) -> bool {
        let revisions = self.compacted.max(FIRST_REVISION + 1)..=self.revision;
        (FIRST_REVISION..Revision::MAX).contains(&self.revision)
            && (NEVER_COMPACTED..=self.revision).contains(&self.compacted)
            && self.kept.iter().all(|kv| kv.mod_revision < self.compacted)
            && self.writes.iter().map(|write| write.revision).eq(revisions)
    }
}

/// How much history is kept without an explicit compaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    pub revisions: u64,
    pub bytes: usize,
}

impl Default for Retention {
    fn default() -> Self {
        Retention { revisions: 100_000, bytes: 256 << 20 }
    }
}

impl Default for History {
    fn default() -> Self {
        History {
            revision: FIRST_REVISION,
            compacted: NEVER_COMPACTED,
            floor: FIRST_REVISION,
            keys: BTreeMap::new(),
            writes: BTreeMap::new(),
            bytes: 0,
        }
    }
}

impl History {
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Returns the revision below which reads are refused.
    pub fn compacted(&self) -> Revision {
        self.compacted
    }

    /// Returns the revision below which the writes are deleted.
    pub fn floor(&self) -> Revision {
        self.floor
    }

    /// Reads one key as of revision `at`.
    pub fn get(&self, key: &[u8], at: Revision) -> Option<&Arc<PbKeyValue>> {
        version_at(self.keys.get(key)?, at)
    }

    /// Reads a span of keys, in order, as of revision `at`.
    pub fn scan<'h>(
        &'h self,
        span: Span<'_>,
        at: Revision,
    ) -> impl Iterator<Item = &'h Arc<PbKeyValue>> {
        span.bounds()
            .into_iter()
            .flat_map(|bounds| self.keys.range::<[u8], _>(bounds))
            .filter_map(move |(_, versions)| version_at(versions, at))
    }

    /// Returns the kept writes of `from..=through`, oldest first.
    pub fn writes(
        &self,
        from: Revision,
        through: Revision,
    ) -> impl Iterator<Item = &Write> + use<'_> {
        // An ordered map panics on a range that ends before it starts.
        let range = (from <= through).then(|| self.writes.range(from..=through));
        range.into_iter().flatten().map(|(_, write)| write.as_ref())
    }

    /// Adds the next revision.
    pub fn record(&mut self, write: Write) {
        for change in &write.changes {
            let version = Version { revision: write.revision, kv: change.kv().cloned() };
            match self.keys.get_mut(change.key()) {
                Some(versions) => versions.push(version),
                None => {
                    self.keys.insert(change.key().to_vec(), vec![version]);
                }
            }
        }
        self.revision = write.revision;
        self.bytes += write.bytes();
        self.writes.insert(write.revision, Arc::new(write));
    }

    /// Deletes history below `to`; reads below `to` are refused from now on.
    ///
    /// The writes of revision `to` itself are kept, including deletions: a client that read at `to - 1`
    /// may still watch from `to`, and must miss nothing.
    pub fn compact(&mut self, to: Revision) {
        let touched: BTreeSet<Key> = self
            .writes(self.compacted, to)
            .flat_map(|write| &write.changes)
            .map(|change| change.key().to_vec())
            .collect();
        self.bytes -= self.writes(self.compacted, to - 1).map(Write::bytes).sum::<usize>();
        self.compacted = to;
        for key in touched {
            self.trim(&key);
        }
        self.floor = self.floor.max(self.grace_floor(to));
        self.writes = self.writes.split_off(&self.floor);
    }

    /// Returns the revision to compact to if more history is kept than `retention` allows, plus some
    /// slack, so that one compaction covers many writes.
    pub fn overdue(&self, retention: Retention) -> Option<Revision> {
        let revisions = i64::try_from(retention.revisions).unwrap_or(i64::MAX);
        let oldest = self.compacted.max(FIRST_REVISION);
        let slack = revisions / 10 + 1;
        let excess = self.revision - oldest;
        if excess >= revisions.saturating_add(slack) {
            return Some(self.revision - revisions);
        }
        if self.bytes > retention.bytes {
            return self.revision_that_halves(retention.bytes).filter(|to| *to > self.compacted);
        }
        None
    }

    /// Returns the input for [`History::restore`].
    pub fn image(&self) -> HistoryImage {
        let standing = self.keys.values().filter_map(|versions| versions.first());
        let kept = standing.filter(|version| version.revision < self.compacted);
        HistoryImage {
            revision: self.revision,
            compacted: self.compacted,
            kept: kept.filter_map(|version| version.kv.clone()).collect(),
            writes: self.writes.range(self.compacted..).map(|(_, write)| write.clone()).collect(),
        }
    }

    pub fn restore(image: HistoryImage) -> Self {
        let mut history = History { compacted: image.compacted, ..History::default() };
        for kv in image.kept {
            let version = Version { revision: kv.mod_revision, kv: Some(kv.clone()) };
            history.keys.insert(kv.key.clone(), vec![version]);
        }
        for write in image.writes {
            history.record(Arc::unwrap_or_clone(write));
        }
        // The writes of the compacted revision restore versions that the compaction had trimmed.
        let at_compaction = history.writes.get(&image.compacted).cloned();
        for change in at_compaction.iter().flat_map(|write| &write.changes) {
            history.trim(change.key());
        }
        history.revision = image.revision;
        history.floor = image.compacted.max(FIRST_REVISION);
        history
    }

    /// Drops the versions of a key that no read can reach after the compaction.
    fn trim(&mut self, key: &[u8]) {
        let Some(versions) = self.keys.get_mut(key) else { return };
        let reachable = versions.partition_point(|v| v.revision <= self.compacted);
        versions.drain(..reachable.saturating_sub(1));
        if versions.first().is_some_and(|v| v.revision <= self.compacted && v.kv.is_none()) {
            versions.remove(0);
        }
        if versions.is_empty() {
            self.keys.remove(key);
        }
    }

    /// Returns the oldest revision whose write survives a compaction to `to`.
    fn grace_floor(&self, to: Revision) -> Revision {
        let mut floor = to;
        let mut bytes = 0;
        for (revision, write) in self.writes.range(..to).rev().take(GRACE_WRITES) {
            bytes += write.bytes();
            if bytes > GRACE_BYTES {
                break;
            }
            floor = *revision;
        }
        floor
    }

    fn revision_that_halves(&self, bytes_max: usize) -> Option<Revision> {
        let mut bytes = self.bytes;
        for (revision, write) in self.writes.range(self.compacted..) {
            if bytes <= bytes_max / 2 {
                return Some(*revision);
            }
            bytes -= write.bytes();
        }
        Some(self.revision)
    }
}

fn version_at(versions: &[Version], at: Revision) -> Option<&Arc<PbKeyValue>> {
    let later = versions.partition_point(|version| version.revision <= at);
    versions[..later].last()?.kv.as_ref()
}

#[cfg(test)]
mod tests {
    use super::super::fact::Change;
    use super::*;

    fn put(revision: Revision, key: &str) -> Write {
        let kv = PbKeyValue {
            key: key.into(),
            value: format!("{revision}").into(),
            mod_revision: revision,
            ..Default::default()
        };
        Write { revision, changes: vec![Change::Put(Arc::new(kv))] }
    }

    fn delete(revision: Revision, key: &str) -> Write {
        Write { revision, changes: vec![Change::Delete(key.into())] }
    }

    fn history(writes: impl IntoIterator<Item = Write>) -> History {
        let mut history = History::default();
        writes.into_iter().for_each(|write| history.record(write));
        history
    }

    fn value(history: &History, key: &str, at: Revision) -> Option<String> {
        let kv = history.get(key.as_bytes(), at)?;
        Some(String::from_utf8(kv.value.clone()).unwrap())
    }

    /// Reads at an old revision return the old values.
    #[test]
    fn a_key_reads_as_it_was_at_each_revision() {
        let h = history([put(2, "a"), put(3, "b"), delete(4, "a"), put(5, "a")]);
        let seen: Vec<_> = (1..=5).map(|at| value(&h, "a", at)).collect();
        let wanted = [None, Some("2"), Some("2"), None, Some("5")];
        assert_eq!(seen, wanted.map(|v| v.map(String::from)));
    }

    /// A compaction limits which revisions can be read, but not the results.
    #[test]
    fn a_compaction_keeps_every_answer_from_its_revision_on() {
        let writes = [put(2, "a"), put(3, "b"), delete(4, "a"), put(5, "b"), put(6, "a")];
        for to in 2..=6 {
            let (whole, mut compacted) = (history(writes.clone()), history(writes.clone()));
            compacted.compact(to);
            for at in to..=6 {
                for key in ["a", "b"] {
                    assert_eq!(value(&whole, key, at), value(&compacted, key, at), "{to} {at}");
                }
            }
        }
    }

    /// A deleted key uses no memory after compaction.
    #[test]
    fn a_compacted_deletion_frees_the_key() {
        let mut h = history([put(2, "a"), delete(3, "a"), put(4, "b")]);
        h.compact(3);
        assert_eq!(h.keys.len(), 1);
        assert_eq!(h.writes(3, 3).count(), 1, "but a watcher from 3 on still gets the event");
    }

    /// Restoring an image yields the same history, except for writes that survived the compaction.
    #[test]
    fn an_image_restores_the_same_history() {
        let writes = [put(2, "a"), put(3, "b"), delete(4, "a"), put(5, "b"), put(6, "a")];
        for to in [None, Some(2), Some(3), Some(4), Some(6)] {
            let mut h = history(writes.clone());
            to.into_iter().for_each(|to| h.compact(to));
            let restored = History::restore(h.image());
            assert_eq!(restored.image(), h.image());
            assert_eq!(restored.keys, h.keys, "compacted to {to:?}");
        }
    }

    /// The number of kept writes is bounded.
    #[test]
    fn too_many_revisions_are_overdue_for_compaction() {
        let retention = Retention { revisions: 10, bytes: usize::MAX };
        let mut h = history((2..=12).map(|revision| put(revision, "a")));
        assert_eq!(h.overdue(retention), None);
        h.record(put(13, "a"));
        assert_eq!(h.overdue(retention), Some(3));
        h.compact(3);
        assert_eq!(h.overdue(retention), None);
    }

    /// The size of kept writes is bounded.
    #[test]
    fn too_many_bytes_are_overdue_for_compaction() {
        let mut h = history((2..=101).map(|revision| put(revision, "a")));
        let retention = Retention { revisions: 1_000_000, bytes: h.bytes / 2 };
        let to = h.overdue(retention).unwrap();
        assert!((70..80).contains(&to), "{to}");
        h.compact(to);
        assert_eq!(value(&h, "a", 101).unwrap(), "101");
    }
}
