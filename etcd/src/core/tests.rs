//! Tests of the whole core: requests, facts and recovery.

use super::*;
use etcd_client::proto::{PbCompare, PbTargetUnion, PbTxnOpRequest, PbTxnRequestOp};

const NOW: Millis = 0;

/// A core that applies every fact at once and records it.
#[derive(Default)]
struct EtcdModel {
    core: Core,
    facts: Vec<Fact>,
}

impl EtcdModel {
    fn apply<T>(&mut self, decided: Result<Decided<T>, Refusal>) -> Result<T, Refusal> {
        let Decided { reply, fact } = decided?;
        if let Some(fact) = fact {
            assert!(self.core.is_next(&fact));
            self.facts.push(fact.clone());
            self.core.evolve(fact, NOW);
        }
        Ok(reply)
    }

    fn put(&mut self, key: &str, lease: LeaseId) -> Result<PbPutResponse, Refusal> {
        let request = Checked::new(put(key, lease))?;
        self.apply(self.core.put(&request))
    }

    fn delete(&mut self, key: &str) -> Result<PbDeleteResponse, Refusal> {
        let request = PbDeleteRequest { key: key.into(), ..Default::default() };
        self.apply(self.core.delete(&Checked::new(request)?))
    }

    fn txn(&mut self, request: PbTxnRequest) -> Result<PbTxnResponse, Refusal> {
        let request = Checked::new(request)?;
        self.apply(self.core.txn(&request))
    }

    fn grant(&mut self, id: LeaseId, ttl: i64) -> Result<PbLeaseGrantResponse, Refusal> {
        self.apply(self.core.grant(&PbLeaseGrantRequest { id, ttl }, 77))
    }

    fn revoke(&mut self, id: LeaseId) -> Result<PbLeaseRevokeResponse, Refusal> {
        self.apply(self.core.revoke(id))
    }

    fn compact(&mut self, to: Revision) -> Result<PbCompactionResponse, Refusal> {
        self.apply(self.core.compact(to))
    }

    fn keys(&self) -> Vec<String> {
        let all = PbRangeRequest { key: vec![0], range_end: vec![0], ..Default::default() };
        let reply = self.core.range(&Checked::new(all).unwrap()).unwrap();
        reply.kvs.into_iter().map(|kv| String::from_utf8(kv.key).unwrap()).collect()
    }
}

fn put(key: &str, lease: LeaseId) -> PbPutRequest {
    PbPutRequest { key: key.into(), value: b"v".to_vec(), lease, ..Default::default() }
}

fn branch(operations: Vec<PbTxnOpRequest>) -> Vec<PbTxnRequestOp> {
    operations.into_iter().map(|request| PbTxnRequestOp { request: Some(request) }).collect()
}

/// Returns the condition of a claim: the key does not exist.
fn if_absent(key: &str) -> Vec<PbCompare> {
    let target_union = Some(PbTargetUnion::CreateRevision(0));
    vec![PbCompare { target: 1, key: key.into(), target_union, ..Default::default() }]
}

/// A request that changes nothing creates no revision and no fact.
#[test]
fn only_a_change_takes_a_revision() {
    let mut model = EtcdModel::default();
    assert_eq!(model.delete("a").unwrap().header.unwrap().revision, 1);
    assert_eq!(model.txn(PbTxnRequest::default()).unwrap().header.unwrap().revision, 1);
    assert!(model.facts.is_empty());
    assert_eq!(model.put("a", 0).unwrap().header.unwrap().revision, 2);
    assert_eq!(model.delete("a").unwrap().header.unwrap().revision, 3);
}

/// Of two claims of the same key, the first succeeds.
#[test]
fn a_key_is_claimed_once() {
    let mut model = EtcdModel::default();
    let claim = PbTxnRequest {
        compare: if_absent("lock"),
        success: branch(vec![PbTxnOpRequest::RequestPut(put("lock", 0))]),
        ..Default::default()
    };
    assert!(model.txn(claim.clone()).unwrap().succeeded);
    assert!(!model.txn(claim).unwrap().succeeded);
    assert_eq!(model.core.revision(), 2);
}

/// All changes of a transaction have the same revision; a refused transaction changes nothing.
#[test]
fn a_transaction_is_one_revision_or_nothing() {
    let mut model = EtcdModel::default();
    let both = |second| {
        let puts = [put("a", 0), put("b", second)];
        let success = branch(puts.map(PbTxnOpRequest::RequestPut).to_vec());
        PbTxnRequest { success, ..Default::default() }
    };
    assert_eq!(model.txn(both(5)).unwrap_err(), Refusal::LeaseNotFound);
    assert!(model.keys().is_empty() && model.core.revision() == 1);
    model.txn(both(0)).unwrap();
    assert_eq!((model.keys(), model.core.revision()), (vec!["a".into(), "b".into()], 2));
}

/// The only way for a put to fail while its transaction runs: the transaction has deleted the key whose
/// value the put keeps. Real etcd panics here.
#[test]
fn a_transaction_that_fails_half_way_changes_nothing() {
    let mut model = EtcdModel::default();
    model.put("k", 0).unwrap();
    let delete = PbDeleteRequest { key: b"k".to_vec(), range_end: vec![0], ..Default::default() };
    let take_over = PbPutRequest { value: Vec::new(), ignore_value: true, ..put("k", 0) };
    let success = branch(vec![
        PbTxnOpRequest::RequestDeleteRange(delete),
        PbTxnOpRequest::RequestPut(take_over),
    ]);
    let refused = model.txn(PbTxnRequest { success, ..Default::default() });
    assert_eq!(refused.unwrap_err(), Refusal::KeyNotFound);
    assert_eq!((model.keys(), model.core.revision()), (vec!["k".into()], 2));
}

/// A revoked lease deletes its keys at one revision, except those that were detached.
#[test]
fn a_lease_takes_its_keys_with_it() {
    let mut model = EtcdModel::default();
    model.grant(5, 10).unwrap();
    for key in ["a", "b", "c"] {
        model.put(key, 5).unwrap();
    }
    model.put("b", 0).unwrap();
    model.revoke(5).unwrap();
    assert_eq!((model.keys(), model.core.revision()), (vec!["b".into()], 6));
    assert_eq!(model.revoke(5).unwrap_err(), Refusal::LeaseNotFound);
    assert_eq!(model.put("a", 5).unwrap_err(), Refusal::LeaseNotFound);
}

/// Zero always means "no lease", so a lease with that id cannot be revoked.
#[test]
fn the_lease_of_id_zero_does_not_exist() {
    let mut model = EtcdModel::default();
    assert_eq!(model.revoke(0).unwrap_err(), Refusal::LeaseNotFound);
    assert_eq!(model.grant(0, 10).unwrap().id, 77);
}

/// The basis of durability: the facts alone rebuild the store, and so does an image from any point with
/// the facts since then.
#[test]
fn facts_and_images_rebuild_the_store() {
    let mut model = EtcdModel::default();
    let mut images = Vec::new();
    for round in 0..6_i64 {
        model.grant(round + 1, 10).unwrap();
        for key in ["a", "b", "c"] {
            model.put(key, round + 1).unwrap();
        }
        model.delete("b").unwrap();
        if round % 2 == 1 {
            model.revoke(round).unwrap();
            model.compact(model.core.revision() - 2).unwrap();
        }
        images.push((model.facts.len(), model.core.image()));
    }
    images.push((0, Core::default().image()));
    for (facts_before, image) in images {
        let mut core = Core::restore(image, NOW);
        for fact in &model.facts[facts_before..] {
            assert!(core.is_next(fact));
            core.evolve(fact.clone(), NOW);
        }
        assert_eq!(core.image(), model.core.image());
        assert_eq!(core.leases, model.core.leases);
    }
}

/// A watcher that starts after the revision of a read gets every later change once, despite compactions
/// before its position.
#[test]
fn a_watcher_misses_nothing_after_the_revision_it_read_at() {
    let mut model = EtcdModel::default();
    model.put("a", 0).unwrap();
    let read_at = model.core.revision();
    let mut watcher = Watcher {
        key: vec![0],
        range_end: vec![0],
        next: read_at + 1,
        options: WatchOptions { prev_kv: true, ..WatchOptions::default() },
    };
    model.delete("a").unwrap();
    model.compact(read_at + 1).unwrap();
    model.put("a", 0).unwrap();
    let update = watcher.advance(model.core.history(), model.core.revision(), usize::MAX);
    let WatchUpdate::Events { events, through } = update else { panic!("{update:?}") };
    let revisions = events.iter().map(|event| event.kv.as_ref().unwrap().mod_revision);
    assert_eq!(revisions.collect::<Vec<_>>(), [3, 4]);
    assert_eq!(through, 4);
    let again = watcher.advance(model.core.history(), model.core.revision(), usize::MAX);
    assert_eq!(again, WatchUpdate::Nothing);
}

/// Regardless of the size limit, a watcher gets events in batches of whole revisions.
#[test]
fn a_watcher_receives_batches_of_whole_revisions() {
    let mut model = EtcdModel::default();
    for _ in 0..5 {
        model.put("a", 0).unwrap();
    }
    let options = WatchOptions::default();
    let mut watcher = Watcher { key: vec![0], range_end: vec![0], next: 1, options };
    watcher.next = 2;
    let mut batches = 0;
    while let WatchUpdate::Events { events, .. } = watcher.advance(model.core.history(), 6, 1) {
        assert_eq!(events.len(), 1);
        batches += 1;
    }
    assert_eq!((batches, watcher.next), (5, 7));
}

/// A fact that cannot be the next one is detected: it means a damaged log.
#[test]
fn a_fact_out_of_order_is_detected() {
    let mut model = EtcdModel::default();
    model.put("a", 0).unwrap();
    let Fact::Written(write) = model.facts[0].clone() else { panic!("a put is a write") };
    assert!(!model.core.is_next(&Fact::Written(write)));
    assert!(!model.core.is_next(&Fact::Compacted { revision: 3 }));
    assert!(model.core.is_next(&Fact::Compacted { revision: 2 }));
}
