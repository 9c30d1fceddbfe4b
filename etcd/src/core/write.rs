//! The Put and DeleteRange requests, by themselves or inside of a transaction.

use super::fact::Change;
use super::refusal::Refusal;
use super::reply;
use super::span::Span;
use super::staged::Staged;
use etcd_client::proto::{
    PbDeleteRequest, PbDeleteResponse, PbKeyValue, PbPutRequest, PbPutResponse,
};
use std::sync::Arc;

/// Validates a put without access to the store.
pub fn check_put(request: &PbPutRequest) -> Result<(), Refusal> {
    if request.key.is_empty() {
        return Err(Refusal::EmptyKey);
    }
    if request.ignore_value && !request.value.is_empty() {
        return Err(Refusal::ValueProvided);
    }
    if request.ignore_lease && request.lease != 0 {
        return Err(Refusal::LeaseProvided);
    }
    Ok(())
}

/// Validates a delete without access to the store.
pub fn check_delete(request: &PbDeleteRequest) -> Result<(), Refusal> {
    if request.key.is_empty() { Err(Refusal::EmptyKey) } else { Ok(()) }
}

/// Returns whether a put keeps the old value or lease, so that the key must exist.
pub fn needs_previous(request: &PbPutRequest) -> bool {
    request.ignore_value || request.ignore_lease
}

pub fn put(staged: &mut Staged<'_>, request: &PbPutRequest) -> Result<PbPutResponse, Refusal> {
    let previous = staged.get(&request.key).cloned();
    if needs_previous(request) && previous.is_none() {
        return Err(Refusal::KeyNotFound);
    }
    let revision = staged.next_revision();
    let mut kv = PbKeyValue {
        key: request.key.clone(),
        value: request.value.clone(),
        create_revision: revision,
        mod_revision: revision,
        version: 1,
        lease: request.lease,
    };
    if let Some(previous) = &previous {
        kv.create_revision = previous.create_revision;
        kv.version = previous.version + 1;
        if request.ignore_value {
            kv.value = previous.value.clone();
        }
        if request.ignore_lease {
            kv.lease = previous.lease;
        }
    }
    staged.change(Change::Put(Arc::new(kv)));
    Ok(PbPutResponse {
        header: Some(reply::inner_header(revision)),
        prev_kv: previous.filter(|_| request.prev_kv).map(Arc::unwrap_or_clone),
    })
}

pub fn delete(staged: &mut Staged<'_>, request: &PbDeleteRequest) -> PbDeleteResponse {
    let span = Span::new(&request.key, &request.range_end);
    let deletions: Vec<_> = staged.scan(span).into_iter().cloned().collect();
    for kv in &deletions {
        staged.change(Change::Delete(kv.key.clone()));
    }
    let deleted = i64::try_from(deletions.len()).unwrap_or(i64::MAX);
    let prev_kvs = match request.prev_kv {
        true => deletions.into_iter().map(Arc::unwrap_or_clone).collect(),
        false => Vec::new(),
    };
    let header = Some(reply::inner_header(staged.revision()));
    PbDeleteResponse { header, deleted, prev_kvs }
}
