//! Single requests at the limits of valid values.

use super::generate::{NewWatch, Step};
use etcd_client::proto::{
    PbCompactionRequest, PbCompare, PbDeleteRequest, PbLeaseGrantRequest, PbLeaseRevokeRequest,
    PbLeaseTimeToLiveRequest, PbPutRequest, PbRangeRequest, PbTargetUnion, PbTxnOpRequest,
    PbTxnRequest, PbTxnRequestOp,
};

pub fn steps() -> Vec<Step> {
    let mut steps = sizes();
    steps.extend(leases());
    steps.extend(transactions());
    steps.extend(watches());
    steps.extend(revisions());
    steps
}

fn put(key: &str, bytes: usize) -> PbPutRequest {
    PbPutRequest { key: key.into(), value: vec![7; bytes], ..Default::default() }
}

fn txn(success: Vec<PbTxnOpRequest>) -> PbTxnRequest {
    let success = success.into_iter().map(|request| PbTxnRequestOp { request: Some(request) });
    PbTxnRequest { success: success.collect(), ..Default::default() }
}

/// Sizes around the limits of 1.5 MiB for the log and 2 MiB for received messages.
fn sizes() -> Vec<Step> {
    let mut steps = Vec::new();
    for bytes in [1_572_700, 1_573_000, 2_097_000, 2_097_200] {
        steps.push(Step::Put(put("large", bytes)));
        steps.push(Step::Put(put("", bytes)));
        steps.push(Step::Txn(txn(vec![PbTxnOpRequest::RequestPut(put("large", bytes - 20))])));
        let read = PbRangeRequest { key: vec![7; bytes], ..Default::default() };
        steps.push(Step::Txn(txn(vec![PbTxnOpRequest::RequestRange(read.clone())])));
        steps.push(Step::Range(read));
    }
    let key = b"large".to_vec();
    steps.push(Step::Delete(PbDeleteRequest { key, ..Default::default() }));
    steps
}

fn leases() -> Vec<Step> {
    let mut steps = Vec::new();
    for id in [-5, 0, i64::MIN, i64::MAX] {
        for ttl in [i64::MIN, 9_000_000_001] {
            // For zero the server chooses a random id.
            let is_random = id == 0 && ttl < 0;
            if !is_random {
                steps.push(Step::Grant(PbLeaseGrantRequest { id, ttl }));
            }
        }
        steps.push(Step::TimeToLive(PbLeaseTimeToLiveRequest { id, keys: true }));
        steps.push(Step::Revoke(PbLeaseRevokeRequest { id }));
    }
    steps
}

fn transactions() -> Vec<Step> {
    let mut nested = PbTxnRequest::default();
    let mut steps = vec![Step::Txn(nested.clone()), Step::Put(put("k", 1))];
    for _ in 0..40 {
        nested = txn(vec![PbTxnOpRequest::RequestTxn(nested)]);
    }
    steps.push(Step::Txn(nested));
    for (target, result) in [(0, 0), (3, 3), (9, 0), (9, 3), (0, 9), (-1, -1)] {
        for key in ["k", "none"] {
            let target_union = Some(PbTargetUnion::Version(1));
            let key = key.into();
            let compare = PbCompare { result, target, key, target_union, ..Default::default() };
            steps.push(Step::Txn(PbTxnRequest { compare: vec![compare], ..Default::default() }));
        }
    }
    // A delete without an end does not conflict with a put of the same transaction.
    let delete = |range_end: &[u8]| {
        let range_end = range_end.to_vec();
        PbTxnOpRequest::RequestDeleteRange(PbDeleteRequest {
            key: b"k".to_vec(),
            range_end,
            prev_kv: true,
        })
    };
    let put = || PbTxnOpRequest::RequestPut(put("k", 2));
    for range_end in [&b""[..], b"\0", b"l", b"a"] {
        steps.push(Step::Txn(txn(vec![delete(range_end), put()])));
        steps.push(Step::Txn(txn(vec![put(), delete(range_end)])));
    }
    steps
}

fn watches() -> Vec<Step> {
    let span = |key: &[u8], range_end: &[u8]| {
        Step::Watch(NewWatch {
            key: key.to_vec(),
            range_end: range_end.to_vec(),
            ..NewWatch::default()
        })
    };
    let from = |start_revision| {
        let key = b"k".to_vec();
        Step::Watch(NewWatch { key, start_revision, ..NewWatch::default() })
    };
    vec![span(b"k", b"k"), span(b"k", b"a"), span(b"", b""), span(b"", b"\0"), from(-9)]
}

fn revisions() -> Vec<Step> {
    let mut steps = Vec::new();
    for revision in [i64::MIN, -1, 0, 0, i64::MAX] {
        steps.push(Step::Compact(PbCompactionRequest { revision, physical: true }));
        let read = PbRangeRequest { key: b"k".to_vec(), revision, ..Default::default() };
        steps.push(Step::Range(read.clone()));
        steps.push(Step::Txn(txn(vec![PbTxnOpRequest::RequestRange(read)])));
        let limited = PbRangeRequest {
            key: vec![0],
            range_end: vec![0],
            limit: revision,
            min_mod_revision: revision,
            ..Default::default()
        };
        steps.push(Step::Range(limited));
    }
    steps
}
