//! Generates requests: few keys and small numbers, so that requests interact, and some invalid values, which
//! must be refused.

use crate::support::Rng;
use etcd_client::WatchFilterType;
use etcd_client::proto::{
    PbCompactionRequest, PbCompare, PbDeleteRequest, PbLeaseGrantRequest, PbLeaseRevokeRequest,
    PbLeaseTimeToLiveRequest, PbPutRequest, PbRangeRequest, PbTargetUnion, PbTxnOpRequest,
    PbTxnRequest, PbTxnRequestOp,
};

/// At most twelve: real etcd's sort is only stable up to twelve pairs.
const KEYS: [&str; 9] = ["a", "aa", "ab", "b", "b/1", "b/2", "b/3", "c", "d"];
const VALUES: [&str; 4] = ["", "1", "2", "three"];
/// Granted for so long that they end only by revocation.
const LEASES: [i64; 4] = [11, 12, 13, 14];
const TTL_S: i64 = 1_000;

#[derive(Debug, Clone)]
pub enum Step {
    Range(PbRangeRequest),
    Put(PbPutRequest),
    Delete(PbDeleteRequest),
    Txn(PbTxnRequest),
    Compact(PbCompactionRequest),
    Grant(PbLeaseGrantRequest),
    Revoke(PbLeaseRevokeRequest),
    TimeToLive(PbLeaseTimeToLiveRequest),
    KeepAlive(i64),
    Leases,
    Watch(NewWatch),
    /// Selects one of the live watches by this number.
    CancelWatch(u64),
}

#[derive(Debug, Clone, Default)]
pub struct NewWatch {
    pub key: Vec<u8>,
    pub range_end: Vec<u8>,
    pub start_revision: i64,
    pub prev_kv: bool,
    pub filter: Option<WatchFilterType>,
    pub fragment: bool,
}

/// The state that the sequence has produced so far.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    pub revision: i64,
    pub compacted: i64,
}

pub struct Generator {
    rng: Rng,
}

impl Generator {
    pub fn new(rng: Rng) -> Self {
        Generator { rng }
    }

    pub fn next_step(&mut self, known: &Known) -> Step {
        match self.rng.below(100) {
            0..=24 => Step::Put(self.put()),
            25..=49 => Step::Range(self.range(known)),
            50..=57 => Step::Delete(self.delete()),
            58..=79 => Step::Txn(self.txn(known, 0)),
            80..=81 => Step::Compact(self.compact(known)),
            82..=86 => Step::Grant(self.grant()),
            87..=88 => Step::Revoke(PbLeaseRevokeRequest { id: self.lease() }),
            89..=91 => Step::TimeToLive(PbLeaseTimeToLiveRequest {
                id: self.lease(),
                keys: self.rng.one_in(2),
            }),
            92..=93 => Step::KeepAlive(self.lease()),
            94 => Step::Leases,
            95 => Step::CancelWatch(self.rng.next()),
            _ => Step::Watch(self.watch(known)),
        }
    }

    fn put(&mut self) -> PbPutRequest {
        let odd = self.rng.one_in(6);
        PbPutRequest {
            key: self.key(),
            value: self.value(),
            lease: if self.rng.one_in(3) { self.lease() } else { 0 },
            prev_kv: self.rng.one_in(2),
            ignore_value: odd && self.rng.one_in(2),
            ignore_lease: odd && self.rng.one_in(2),
        }
    }

    fn range(&mut self, known: &Known) -> PbRangeRequest {
        let (key, range_end) = self.span();
        let filters = self.rng.one_in(4);
        let sort = self.rng.one_in(3);
        PbRangeRequest {
            key,
            range_end,
            limit: if self.rng.one_in(3) { self.rng.between(-1, 5) } else { 0 },
            revision: if self.rng.one_in(3) { self.revision(known) } else { 0 },
            sort_order: if sort { self.number(0, 2) } else { 0 },
            sort_target: if sort { self.number(0, 4) } else { 0 },
            serializable: self.rng.one_in(4),
            keys_only: self.rng.one_in(4),
            count_only: self.rng.one_in(6),
            min_mod_revision: self.bound(filters, known),
            max_mod_revision: self.bound(filters, known),
            min_create_revision: self.bound(filters, known),
            max_create_revision: self.bound(filters, known),
        }
    }

    fn bound(&mut self, filters: bool, known: &Known) -> i64 {
        if filters && self.rng.one_in(3) { self.revision(known) } else { 0 }
    }

    fn delete(&mut self) -> PbDeleteRequest {
        let (key, range_end) =
            if self.rng.one_in(4) { self.span() } else { (self.key(), Vec::new()) };
        PbDeleteRequest { key, range_end, prev_kv: self.rng.one_in(2) }
    }

    fn txn(&mut self, known: &Known, depth: u32) -> PbTxnRequest {
        if depth == 0 && self.rng.one_in(40) {
            return self.long_txn();
        }
        PbTxnRequest {
            compare: (0..self.rng.below(3)).map(|_| self.compare(known)).collect(),
            success: self.branch(known, depth),
            failure: self.branch(known, depth),
        }
    }

    /// A transaction around the limit of operations.
    fn long_txn(&mut self) -> PbTxnRequest {
        let operations = self.rng.between(126, 130);
        let get = |n| PbRangeRequest { key: format!("k{n}").into(), ..Default::default() };
        let success = (0..operations).map(|n| operation(PbTxnOpRequest::RequestRange(get(n))));
        PbTxnRequest { success: success.collect(), ..Default::default() }
    }

    fn branch(&mut self, known: &Known, depth: u32) -> Vec<PbTxnRequestOp> {
        (0..self.rng.below(4)).map(|_| self.operation(known, depth)).collect()
    }

    fn operation(&mut self, known: &Known, depth: u32) -> PbTxnRequestOp {
        match self.rng.below(30) {
            0..=8 => operation(PbTxnOpRequest::RequestRange(self.range(known))),
            9..=20 => operation(PbTxnOpRequest::RequestPut(self.put())),
            21..=25 => operation(PbTxnOpRequest::RequestDeleteRange(self.delete())),
            26..=28 if depth < 2 => {
                operation(PbTxnOpRequest::RequestTxn(self.txn(known, depth + 1)))
            }
            26..=28 => operation(PbTxnOpRequest::RequestRange(self.range(known))),
            _ if self.rng.one_in(4) => PbTxnRequestOp { request: None },
            _ => operation(PbTxnOpRequest::RequestPut(self.put())),
        }
    }

    fn compare(&mut self, known: &Known) -> PbCompare {
        let (key, range_end) =
            if self.rng.one_in(5) { self.span() } else { (self.key(), Vec::new()) };
        let kind = self.number(0, 4);
        let operand = match if self.rng.one_in(15) { self.number(0, 5) } else { kind } {
            0 => Some(PbTargetUnion::Version(self.rng.between(0, 3))),
            1 => Some(PbTargetUnion::CreateRevision(self.revision_or_none(known))),
            2 => Some(PbTargetUnion::ModRevision(self.revision_or_none(known))),
            3 => Some(PbTargetUnion::Value(self.value())),
            4 => Some(PbTargetUnion::Lease(self.lease())),
            _ => None,
        };
        let result = self.number(0, 3);
        PbCompare { result, target: kind, key, range_end, target_union: operand }
    }

    fn compact(&mut self, known: &Known) -> PbCompactionRequest {
        let recent = (known.revision - 40).max(known.compacted);
        let revision = match self.rng.below(4) {
            0 => self.revision(known),
            _ => self.rng.between(recent, known.revision),
        };
        PbCompactionRequest { revision, physical: true }
    }

    fn grant(&mut self) -> PbLeaseGrantRequest {
        let ttl = if self.rng.one_in(20) { 9_000_000_001 } else { TTL_S };
        PbLeaseGrantRequest { id: *self.rng.pick(&LEASES), ttl }
    }

    fn watch(&mut self, known: &Known) -> NewWatch {
        let (key, range_end) = self.span();
        let filter = match self.rng.below(6) {
            0 => Some(WatchFilterType::NoPut),
            1 => Some(WatchFilterType::NoDelete),
            _ => None,
        };
        NewWatch {
            key,
            range_end,
            start_revision: if self.rng.one_in(2) { self.watch_start(known) } else { 0 },
            prev_kv: self.rng.one_in(2),
            filter,
            fragment: self.rng.one_in(4),
        }
    }

    /// Any revision except the compacted one: what real etcd returns for that depends on the progress of
    /// its compaction.
    fn watch_start(&mut self, known: &Known) -> i64 {
        let revision = self.rng.between(1, known.revision);
        if revision == known.compacted { revision + 1 } else { revision }
    }

    /// A revision that usually exists.
    fn revision(&mut self, known: &Known) -> i64 {
        self.rng.between(-2, known.revision + 2)
    }

    fn revision_or_none(&mut self, known: &Known) -> i64 {
        if self.rng.one_in(2) { 0 } else { self.revision(known) }
    }

    fn key(&mut self) -> Vec<u8> {
        if self.rng.one_in(60) { Vec::new() } else { (*self.rng.pick(&KEYS)).into() }
    }

    /// One key, a prefix, an interval (possibly inverted), or all keys from one on.
    fn span(&mut self) -> (Vec<u8>, Vec<u8>) {
        let key = self.key();
        match self.rng.below(5) {
            0 => (key, Vec::new()),
            1 => (b"b/".to_vec(), b"b0".to_vec()),
            2 => (key, vec![0]),
            _ => (key, self.key()),
        }
    }

    fn value(&mut self) -> Vec<u8> {
        (*self.rng.pick(&VALUES)).into()
    }

    fn lease(&mut self) -> i64 {
        if self.rng.one_in(8) { 99 } else { *self.rng.pick(&LEASES) }
    }

    fn number(&mut self, first: i64, last: i64) -> i32 {
        i32::try_from(self.rng.between(first, last)).unwrap()
    }
}

fn operation(request: PbTxnOpRequest) -> PbTxnRequestOp {
    PbTxnRequestOp { request: Some(request) }
}
