//! The key changes of one transaction.

use std::collections::BTreeMap;

use steadfast_common::machine::Size;

use crate::{OPS_MAX, Op};

/// Largest size of a transaction that several decisions share, less than etcd's limit of 1.5 MiB.
const BYTES_MAX: usize = 1280 * 1024;

/// Key changes, at most one per key: etcd rejects a transaction that puts a key twice.
#[derive(Clone, Debug, Default)]
pub struct Transaction {
    ops: BTreeMap<String, Op>,
    /// Bytes of all keys and values, those of replaced changes included.
    bytes: usize,
}

impl Transaction {
    /// Adds a change; it replaces an earlier one to the same key.
    pub fn add(&mut self, op: Op) {
        self.bytes += op.bytes();
        self.ops.insert(op.key().to_owned(), op);
    }

    /// Deletes all keys that begin with `prefix`; earlier changes of such keys are void.
    pub fn delete_all(&mut self, prefix: &str) {
        self.ops.retain(|key, _| !key.starts_with(prefix));
        self.add(Op::delete_prefix(prefix));
    }

    /// Returns whether facts of this size fit in beside the others.
    pub fn has_room(&self, size: Size) -> bool {
        self.ops.len() + size.changes <= OPS_MAX && self.bytes + size.bytes <= BYTES_MAX
    }

    /// Returns the number of changes.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Returns whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Returns the changes in the order of their keys.
    pub fn into_ops(self) -> Vec<Op> {
        self.ops.into_values().collect()
    }
}
