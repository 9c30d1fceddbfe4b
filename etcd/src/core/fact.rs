//! What the store decides and then remembers: the only things that change it.

use etcd_client::proto::PbKeyValue;
use std::sync::Arc;

pub type Key = Vec<u8>;
/// Counts writes; an empty store stands at revision 1.
pub type Revision = i64;
pub type LeaseId = i64;
/// Milliseconds on the caller's monotonic clock.
pub type Millis = u64;

/// Something that happened, complete in itself: applying it needs no decision and cannot fail.
/// It is what the log holds, so recovery folds the same facts as the running store.
#[derive(Debug, Clone, PartialEq)]
pub enum Fact {
    Written(Write),
    LeaseGranted {
        id: LeaseId,
        ttl_s: i64,
    },
    /// Revoked or expired; `write` deletes the keys that were bound to the lease, if any.
    LeaseEnded {
        id: LeaseId,
        write: Option<Write>,
    },
    Compacted {
        revision: Revision,
    },
}

/// All the changes of one revision, in the order in which they were made.
#[derive(Debug, Clone, PartialEq)]
pub struct Write {
    pub revision: Revision,
    pub changes: Vec<Change>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    Put(Arc<PbKeyValue>),
    Delete(Key),
}

impl Fact {
    /// Returns the write that this fact carries, if it moves the revision.
    pub fn write(&self) -> Option<&Write> {
        match self {
            Fact::Written(write) => Some(write),
            Fact::LeaseEnded { write, .. } => write.as_ref(),
            Fact::LeaseGranted { .. } | Fact::Compacted { .. } => None,
        }
    }
}

impl Write {
    pub fn bytes(&self) -> usize {
        self.changes.iter().map(Change::bytes).sum()
    }
}

impl Change {
    pub fn key(&self) -> &[u8] {
        match self {
            Change::Put(kv) => &kv.key,
            Change::Delete(key) => key,
        }
    }

    pub fn kv(&self) -> Option<&Arc<PbKeyValue>> {
        match self {
            Change::Put(kv) => Some(kv),
            Change::Delete(_) => None,
        }
    }

    /// Roughly what the change costs in memory: its bytes and its place in the maps.
    fn bytes(&self) -> usize {
        const OVERHEAD: usize = 160;
        OVERHEAD
            + match self {
                Change::Put(kv) => 2 * kv.key.len() + kv.value.len(),
                Change::Delete(key) => 2 * key.len(),
            }
    }
}
