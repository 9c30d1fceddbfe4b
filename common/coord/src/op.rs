//! One write operation of a transaction.

use etcd_client::{DeleteOptions, PutOptions, TxnOp};
use serde::Serialize;

/// A put or a delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Put {
        key: String,
        value: Vec<u8>,
        lease: i64,
    },
    Delete {
        key: String,
    },
    /// Deletes every key that begins with `prefix`.
    DeletePrefix {
        prefix: String,
    },
}

impl Op {
    /// Creates an operation that puts `value` as JSON, without a lease.
    ///
    /// # Panics
    /// If `value` cannot be serialized as JSON; plain data always can.
    pub fn put<T: Serialize>(key: &str, value: &T) -> Self {
        let value = serde_json::to_vec(value).expect("records are plain data");
        Self::Put { key: key.to_owned(), value, lease: 0 }
    }

    /// Creates an operation that puts bytes, attached to a lease.
    pub fn put_leased(key: &str, value: Vec<u8>, lease: i64) -> Self {
        Self::Put { key: key.to_owned(), value, lease }
    }

    /// Creates an operation that deletes a key.
    pub fn delete(key: &str) -> Self {
        Self::Delete { key: key.to_owned() }
    }

    /// Creates an operation that deletes every key that begins with `prefix`.
    pub fn delete_prefix(prefix: &str) -> Self {
        Self::DeletePrefix { prefix: prefix.to_owned() }
    }

    /// Returns the key, or the prefix of a [`Op::DeletePrefix`].
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key } | Self::DeletePrefix { prefix: key } => {
                key
            }
        }
    }

    /// Returns the size of the key and the value.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Put { key, value, .. } => key.len() + value.len(),
            Self::Delete { key } | Self::DeletePrefix { prefix: key } => key.len(),
        }
    }
}

pub(crate) fn to_txn(op: &Op) -> TxnOp {
    match op {
        Op::Put { key, value, lease } => {
            let options = (*lease != 0).then(|| PutOptions::new().with_lease(*lease));
            TxnOp::put(key.clone(), value.clone(), options)
        }
        Op::Delete { key } => TxnOp::delete(key.clone(), None),
        Op::DeletePrefix { prefix } => {
            TxnOp::delete(prefix.clone(), Some(DeleteOptions::new().with_prefix()))
        }
    }
}
