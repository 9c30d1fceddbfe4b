//! Random sequences of requests, sent step by step to a real etcd and to the embedded one: every reply must
//! be the same. Where they differ, real etcd is right.
//!
//! `SEED=17 cargo test -p steadfast-etcd conformance` repeats one sequence, `SEED=100-200` runs many.

mod generate;
mod odd;
mod pair;
mod watches;

use crate::support::Rng;
use generate::Generator;
use pair::Pair;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

const SEEDS: RangeInclusive<u64> = 1..=8;
const STEPS: u64 = 400;

/// The replies that the sequences must cover; without them, agreement proves little.
const REQUIRED_REPLIES: [&str; 30] = [
    "KV/Compact etcdserver: mvcc: required revision has been compacted",
    "KV/Compact ok",
    "KV/DeleteRange etcdserver: key is not provided",
    "KV/DeleteRange ok",
    "KV/Put etcdserver: key is not provided",
    "KV/Put etcdserver: key not found",
    "KV/Put etcdserver: lease is provided",
    "KV/Put etcdserver: requested lease not found",
    "KV/Put etcdserver: value is provided",
    "KV/Put ok",
    "KV/Range etcdserver: key is not provided",
    "KV/Range etcdserver: mvcc: required revision has been compacted",
    "KV/Range etcdserver: mvcc: required revision is a future revision",
    "KV/Range ok",
    "KV/Txn etcdserver: duplicate key given in txn request",
    "KV/Txn etcdserver: key is not provided",
    "KV/Txn etcdserver: key not found",
    "KV/Txn etcdserver: lease is provided",
    "KV/Txn etcdserver: mvcc: required revision has been compacted",
    "KV/Txn etcdserver: requested lease not found",
    "KV/Txn etcdserver: too many operations in txn request",
    "KV/Txn etcdserver: value is provided",
    "KV/Txn ok",
    "Lease/LeaseGrant etcdserver: lease already exists",
    "Lease/LeaseGrant etcdserver: too large lease TTL",
    "Lease/LeaseGrant ok",
    "Lease/LeaseLeases ok",
    "Lease/LeaseRevoke etcdserver: requested lease not found",
    "Lease/LeaseRevoke ok",
    "Lease/LeaseTimeToLive ok",
];

/// Valid and invalid requests of every kind, and the events that watches receive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_etcd_answers_as_a_real_one_does() {
    let Ok(seeds) = std::env::var("SEED") else {
        let met = play_all(SEEDS).await;
        let missing: Vec<_> =
            REQUIRED_REPLIES.iter().filter(|answer| !met.contains_key(**answer)).collect();
        assert!(missing.is_empty(), "replies that did not occur: {missing:#?}");
        return;
    };
    let (first, last) = seeds.split_once('-').unwrap_or((&seeds, &seeds));
    let met = play_all(first.parse().unwrap()..=last.parse().unwrap()).await;
    println!("{met:#?}");
}

/// Requests that no sequence generates: too large, too deep, out of range.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_etcd_rejects_invalid_requests_as_a_real_one_does() {
    let mut pair = Pair::start(0).await;
    for step in odd::steps() {
        pair.step(step).await;
    }
    pair.compare_everything().await;
}

async fn play_all(seeds: RangeInclusive<u64>) -> BTreeMap<String, u32> {
    let mut met = BTreeMap::new();
    for seed in seeds {
        println!("seed {seed}");
        for (answer, times) in play(seed).await {
            *met.entry(answer).or_insert(0) += times;
        }
    }
    met
}

/// Runs one sequence and returns the number of replies of each kind for each method.
async fn play(seed: u64) -> BTreeMap<String, u32> {
    let mut pair = Pair::start(seed).await;
    let mut generator = Generator::new(Rng::new(seed));
    for _ in 0..STEPS {
        pair.step(generator.next_step(&pair.known)).await;
    }
    pair.compare_everything().await;
    pair.met
}
