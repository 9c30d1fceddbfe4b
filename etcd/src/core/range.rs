//! The Range request: selection, order and limit.

use super::fact::Revision;
use super::refusal::Refusal;
use super::reply;
use super::span::Span;
use super::staged::Staged;
use etcd_client::proto::{PbKeyValue, PbRangeRequest, PbRangeResponse};
use std::cmp::Ordering;
use std::sync::Arc;

const ORDER_NONE: i32 = 0;
const ORDER_ASCENDING: i32 = 1;
const ORDER_DESCENDING: i32 = 2;
const TARGET_KEY: i32 = 0;
const TARGET_VALUE: i32 = 4;

/// Validates a request without access to the store.
pub fn check(request: &PbRangeRequest) -> Result<(), Refusal> {
    if request.key.is_empty() {
        return Err(Refusal::EmptyKey);
    }
    let known = (ORDER_NONE..=ORDER_DESCENDING).contains(&request.sort_order)
        && (TARGET_KEY..=TARGET_VALUE).contains(&request.sort_target);
    known.then_some(()).ok_or(Refusal::InvalidSortOption)
}

/// Checks the requested revision outside of a transaction, where any number that is not positive means
/// "the latest".
pub fn check_revision(
    request: &PbRangeRequest,
    latest: Revision,
    compacted: Revision,
) -> Result<(), Refusal> {
    if request.revision > latest {
        return Err(Refusal::FutureRevision);
    }
    if request.revision > 0 && request.revision < compacted {
        return Err(Refusal::Compacted);
    }
    Ok(())
}

/// Checks the requested revision inside of a transaction, where real etcd is stricter: only zero means
/// "the latest".
pub fn check_revision_in_txn(
    request: &PbRangeRequest,
    latest: Revision,
    compacted: Revision,
) -> Result<(), Refusal> {
    if request.revision > latest {
        return Err(Refusal::FutureRevision);
    }
    if request.revision != 0 && request.revision < compacted {
        return Err(Refusal::Compacted);
    }
    Ok(())
}

/// Answers a request that has passed the checks.
pub fn read(view: &Staged<'_>, request: &PbRangeRequest) -> PbRangeResponse {
    let span = Span::new(&request.key, &request.range_end);
    let mut pairs = match request.revision > 0 {
        true => view.history().scan(span, request.revision).collect(),
        false => view.scan(span),
    };
    // The count is that of the span, before filters and limit.
    let count = i64::try_from(pairs.len()).unwrap_or(i64::MAX);
    let header = Some(reply::inner_header(view.revision()));
    if request.count_only {
        return PbRangeResponse { header, kvs: Vec::new(), more: false, count };
    }
    let limit = usize::try_from(request.limit).ok().filter(|limit| *limit > 0);
    if let Some(limit) = limit.filter(|_| is_cut_before_sort(request)) {
        pairs.truncate(limit.saturating_add(1));
    }
    pairs.retain(|kv| passes(kv, request));
    sort(&mut pairs, request);
    let more = limit.is_some_and(|limit| pairs.len() > limit);
    pairs.truncate(limit.unwrap_or(usize::MAX));
    let kvs = pairs.into_iter().map(|kv| copy(kv, request)).collect();
    PbRangeResponse { header, kvs, more, count }
}

/// Returns whether the limit is applied before the sort. Without a sort order, real etcd still sorts by a target other
/// than the key, but only among the first pairs by key. Clients may rely on this.
fn is_cut_before_sort(request: &PbRangeRequest) -> bool {
    request.sort_order == ORDER_NONE
        && request.min_mod_revision == 0
        && request.max_mod_revision == 0
        && request.min_create_revision == 0
        && request.max_create_revision == 0
}

fn passes(kv: &PbKeyValue, request: &PbRangeRequest) -> bool {
    let within =
        |revision, min, max| (min == 0 || revision >= min) && (max == 0 || revision <= max);
    within(kv.mod_revision, request.min_mod_revision, request.max_mod_revision)
        && within(kv.create_revision, request.min_create_revision, request.max_create_revision)
}

/// Sorts the pairs; pairs that compare equal stay in key order.
fn sort(pairs: &mut [&Arc<PbKeyValue>], request: &PbRangeRequest) {
    let order = match (request.sort_order, request.sort_target) {
        (ORDER_NONE, TARGET_KEY) => return,
        (ORDER_NONE, _) => ORDER_ASCENDING,
        (order, _) => order,
    };
    pairs.sort_by(|a, b| {
        let ascending = compare(a, b, request.sort_target);
        if order == ORDER_DESCENDING { ascending.reverse() } else { ascending }
    });
}

fn compare(a: &PbKeyValue, b: &PbKeyValue, target: i32) -> Ordering {
    match target {
        TARGET_KEY => a.key.cmp(&b.key),
        1 => a.version.cmp(&b.version),
        2 => a.create_revision.cmp(&b.create_revision),
        3 => a.mod_revision.cmp(&b.mod_revision),
        _ => a.value.cmp(&b.value),
    }
}

fn copy(kv: &PbKeyValue, request: &PbRangeRequest) -> PbKeyValue {
    if !request.keys_only {
        return kv.clone();
    }
    PbKeyValue {
        key: kv.key.clone(),
        value: Vec::new(),
        create_revision: kv.create_revision,
        mod_revision: kv.mod_revision,
        version: kv.version,
        lease: kv.lease,
    }
}
