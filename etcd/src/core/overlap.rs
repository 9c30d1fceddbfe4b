//! The rule that a transaction must not change a key twice.

use super::refusal::Refusal;
use super::span::Span;
use etcd_client::proto::{PbTxnOpRequest, PbTxnRequest, PbTxnRequestOp};
use std::collections::BTreeSet;

/// The possible changes of one branch, including nested transactions.
#[derive(Default)]
struct Changes<'r> {
    puts: BTreeSet<&'r [u8]>,
    deletes: Vec<Span<'r>>,
}

/// Refuses a transaction if one of its branches puts a key twice, or both puts and deletes it.
///
/// Follows real etcd in two exceptions: deletes may overlap each other, and a delete without an end
/// (`range_end` of one zero byte) is not checked.
pub fn check(request: &PbTxnRequest) -> Result<(), Refusal> {
    changes_of(&request.success)?;
    changes_of(&request.failure)?;
    Ok(())
}

fn changes_of(branch: &[PbTxnRequestOp]) -> Result<Changes<'_>, Refusal> {
    let mut changes = Changes { deletes: deletes_of(branch), ..Changes::default() };
    for operation in branch {
        if let Some(PbTxnOpRequest::RequestTxn(nested)) = &operation.request {
            changes.add_either(changes_of(&nested.success)?, changes_of(&nested.failure)?)?;
        }
    }
    for operation in branch {
        if let Some(PbTxnOpRequest::RequestPut(put)) = &operation.request {
            changes.add_put(&put.key)?;
        }
    }
    Ok(changes)
}

fn deletes_of(branch: &[PbTxnRequestOp]) -> Vec<Span<'_>> {
    let mut deletes = Vec::new();
    for operation in branch {
        if let Some(PbTxnOpRequest::RequestDeleteRange(delete)) = &operation.request {
            match Span::new(&delete.key, &delete.range_end) {
                Span::From(_) => {}
                span @ (Span::One(_) | Span::Between(..)) => deletes.push(span),
            }
        }
    }
    deletes
}

impl<'r> Changes<'r> {
    fn add_put(&mut self, key: &'r [u8]) -> Result<(), Refusal> {
        if self.is_deleted(key) || !self.puts.insert(key) {
            return Err(Refusal::DuplicateKey);
        }
        Ok(())
    }

    /// Adds a nested transaction. Only one of its branches runs, so both may put the same keys.
    fn add_either(&mut self, success: Changes<'r>, failure: Changes<'r>) -> Result<(), Refusal> {
        for key in success.puts.union(&failure.puts) {
            self.add_put(key)?;
        }
        self.deletes.extend(success.deletes);
        self.deletes.extend(failure.deletes);
        Ok(())
    }

    fn is_deleted(&self, key: &[u8]) -> bool {
        self.deletes.iter().any(|span| span.contains(key))
    }
}
