//! Facts: durable events, the only way to change the store.

use etcd_client::proto::PbKeyValue;
use std::sync::Arc;

pub type Key = Vec<u8>;
/// Number of the latest write; an empty store is at revision 1.
pub type Revision = i64;
pub type LeaseId = i64;
/// Milliseconds on the caller's monotonic clock.
pub type Millis = u64;

/// A durable event. Applying it needs no decision and cannot fail. The log holds facts, so recovery
/// folds the same facts as the running store.
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

/// All changes of one revision, in order.
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

    /// Returns the approximate memory use of the change: its bytes and its map entries.
    fn bytes(&self) -> usize {
        const OVERHEAD: usize = 160;
        OVERHEAD
            + match self {
                Change::Put(kv) => 2 * kv.key.len() + kv.value.len(),
                Change::Delete(key) => 2 * key.len(),
            }
    }
}
