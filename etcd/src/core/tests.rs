//! The core as a whole: requests in, facts out, facts folded.

use super::*;
use etcd_client::proto::{PbCompare, PbTargetUnion, PbTxnOpRequest, PbTxnRequestOp};

const NOW: Millis = 0;

/// A core that evolves by every fact at once, and keeps them.
#[derive(Default)]
struct World {
    core: Core,
    facts: Vec<Fact>,
}

impl World {
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

/// The condition that claims are made under: the key does not exist.
fn if_absent(key: &str) -> Vec<PbCompare> {
    let target_union = Some(PbTargetUnion::CreateRevision(0));
    vec![PbCompare { target: 1, key: key.into(), target_union, ..Default::default() }]
}

/// A request that changes nothing leaves no revision and no fact.
#[test]
fn only_a_change_takes_a_revision() {
    let mut world = World::default();
    assert_eq!(world.delete("a").unwrap().header.unwrap().revision, 1);
    assert_eq!(world.txn(PbTxnRequest::default()).unwrap().header.unwrap().revision, 1);
    assert!(world.facts.is_empty());
    assert_eq!(world.put("a", 0).unwrap().header.unwrap().revision, 2);
    assert_eq!(world.delete("a").unwrap().header.unwrap().revision, 3);
}

/// Two who claim the same key in turn: the first gets it.
#[test]
fn a_key_is_claimed_once() {
    let mut world = World::default();
    let claim = PbTxnRequest {
        compare: if_absent("lock"),
        success: branch(vec![PbTxnOpRequest::RequestPut(put("lock", 0))]),
        ..Default::default()
    };
    assert!(world.txn(claim.clone()).unwrap().succeeded);
    assert!(!world.txn(claim).unwrap().succeeded);
    assert_eq!(world.core.revision(), 2);
}

/// Every change of a transaction has the same revision, and a refused one has none.
#[test]
fn a_transaction_is_one_revision_or_nothing() {
    let mut world = World::default();
    let both = |second| {
        let puts = [put("a", 0), put("b", second)];
        let success = branch(puts.map(PbTxnOpRequest::RequestPut).to_vec());
        PbTxnRequest { success, ..Default::default() }
    };
    assert_eq!(world.txn(both(5)).unwrap_err(), Refusal::LeaseNotFound);
    assert!(world.keys().is_empty() && world.core.revision() == 1);
    world.txn(both(0)).unwrap();
    assert_eq!((world.keys(), world.core.revision()), (vec!["a".into(), "b".into()], 2));
}

/// The one way to make a put of a transaction fail while it runs: its own transaction has deleted
/// the key whose value it takes over. Real etcd panics here.
#[test]
fn a_transaction_that_fails_half_way_changes_nothing() {
    let mut world = World::default();
    world.put("k", 0).unwrap();
    let delete = PbDeleteRequest { key: b"k".to_vec(), range_end: vec![0], ..Default::default() };
    let take_over = PbPutRequest { value: Vec::new(), ignore_value: true, ..put("k", 0) };
    let success = branch(vec![
        PbTxnOpRequest::RequestDeleteRange(delete),
        PbTxnOpRequest::RequestPut(take_over),
    ]);
    let refused = world.txn(PbTxnRequest { success, ..Default::default() });
    assert_eq!(refused.unwrap_err(), Refusal::KeyNotFound);
    assert_eq!((world.keys(), world.core.revision()), (vec!["k".into()], 2));
}

/// A lease takes its keys with it, at one revision, but not those that have left it.
#[test]
fn a_lease_takes_its_keys_with_it() {
    let mut world = World::default();
    world.grant(5, 10).unwrap();
    for key in ["a", "b", "c"] {
        world.put(key, 5).unwrap();
    }
    world.put("b", 0).unwrap();
    world.revoke(5).unwrap();
    assert_eq!((world.keys(), world.core.revision()), (vec!["b".into()], 6));
    assert_eq!(world.revoke(5).unwrap_err(), Refusal::LeaseNotFound);
    assert_eq!(world.put("a", 5).unwrap_err(), Refusal::LeaseNotFound);
}

/// Zero means "no lease" everywhere, so there is none of that id to revoke.
#[test]
fn the_lease_of_id_zero_does_not_exist() {
    let mut world = World::default();
    assert_eq!(world.revoke(0).unwrap_err(), Refusal::LeaseNotFound);
    assert_eq!(world.grant(0, 10).unwrap().id, 77);
}

/// The promise that everything durable rests on: facts alone rebuild the store, and so does an
/// image of it at any point with the facts since.
#[test]
fn facts_and_images_rebuild_the_store() {
    let mut world = World::default();
    let mut images = Vec::new();
    for round in 0..6_i64 {
        world.grant(round + 1, 10).unwrap();
        for key in ["a", "b", "c"] {
            world.put(key, round + 1).unwrap();
        }
        world.delete("b").unwrap();
        if round % 2 == 1 {
            world.revoke(round).unwrap();
            world.compact(world.core.revision() - 2).unwrap();
        }
        images.push((world.facts.len(), world.core.image()));
    }
    images.push((0, Core::default().image()));
    for (facts_before, image) in images {
        let mut core = Core::restore(image, NOW);
        for fact in &world.facts[facts_before..] {
            assert!(core.is_next(fact));
            core.evolve(fact.clone(), NOW);
        }
        assert_eq!(core.image(), world.core.image());
        assert_eq!(core.leases, world.core.leases);
    }
}

/// A watcher that starts where a read stood is told of every later change, each once, through any
/// compaction short of its position.
#[test]
fn a_watcher_misses_nothing_after_the_revision_it_read_at() {
    let mut world = World::default();
    world.put("a", 0).unwrap();
    let read_at = world.core.revision();
    let mut watcher = Watcher {
        key: vec![0],
        range_end: vec![0],
        next: read_at + 1,
        wants: Wants { prev_kv: true, ..Wants::default() },
    };
    world.delete("a").unwrap();
    world.compact(read_at + 1).unwrap();
    world.put("a", 0).unwrap();
    let told = watcher.advance(world.core.history(), world.core.revision(), usize::MAX);
    let Told::Events { events, through } = told else { panic!("{told:?}") };
    let revisions = events.iter().map(|event| event.kv.as_ref().unwrap().mod_revision);
    assert_eq!(revisions.collect::<Vec<_>>(), [3, 4]);
    assert_eq!(through, 4);
    let again = watcher.advance(world.core.history(), world.core.revision(), usize::MAX);
    assert_eq!(again, Told::Nothing);
}

/// However many bytes its events are, a watcher gets them in pieces of whole revisions.
#[test]
fn a_watcher_is_told_in_pieces_of_whole_revisions() {
    let mut world = World::default();
    for _ in 0..5 {
        world.put("a", 0).unwrap();
    }
    let wants = Wants::default();
    let mut watcher = Watcher { key: vec![0], range_end: vec![0], next: 1, wants };
    watcher.next = 2;
    let mut pieces = 0;
    while let Told::Events { events, .. } = watcher.advance(world.core.history(), 6, 1) {
        assert_eq!(events.len(), 1);
        pieces += 1;
    }
    assert_eq!((pieces, watcher.next), (5, 7));
}

/// A fact that does not fit is told from one that does: it is what a damaged log looks like.
#[test]
fn a_fact_out_of_order_is_recognised() {
    let mut world = World::default();
    world.put("a", 0).unwrap();
    let Fact::Written(write) = world.facts[0].clone() else { panic!("a put writes") };
    assert!(!world.core.is_next(&Fact::Written(write)));
    assert!(!world.core.is_next(&Fact::Compacted { revision: 3 }));
    assert!(world.core.is_next(&Fact::Compacted { revision: 2 }));
}
