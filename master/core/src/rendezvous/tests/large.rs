//! Many nodes: the work per request does not grow with their number.

use std::fs;
use std::time::Duration;

use super::*;

const NODES: usize = 1_000;

/// Each request of a thousand nodes makes one fact, each answer has a bounded size, and the members share
/// one record.
#[test]
fn a_thousand_nodes_make_one_round_with_one_fact_each() {
    let started = processor_time();
    let mut master = Master::new(2, NODES as u32);
    (0..NODES).for_each(|node| master.announce(node));
    for node in 0..NODES {
        master.join(node, 0);
        if node + 1 < NODES {
            let Directive::Wait { awaited, .. } = master.ask(node, 0) else { panic!("no wait") };
            assert_eq!(
                (awaited.listed.len(), awaited.count),
                ((NODES - 1 - node).min(8), NODES - 1 - node)
            );
        }
    }
    assert_eq!(master.facts.len(), 2 * NODES + 1);
    let round = Arc::clone(master.state.round().unwrap());
    for node in 0..NODES {
        let Directive::Start(record) = master.ask(node, 0) else { panic!("no round") };
        assert!(Arc::ptr_eq(&record, &round));
    }

    let at = barrier_id(1, "start", 0);
    (0..NODES).for_each(|node| master.enter(node, &at, b"ready").unwrap());
    assert_eq!(master.facts.len(), 3 * NODES + 2);
    assert!(matches!(master.barrier(0, &at), Outcome::Released(_)));

    master.lose(0);
    (1..NODES).for_each(|node| assert_eq!(master.waiting_nodes(node), -1));
    (1..NODES).for_each(|node| master.join(node, 1));
    assert_eq!(master.state.members().len(), NODES - 1);
    // A quadratic step takes minutes without optimization. All of this takes milliseconds with it.
    let limit = Duration::from_secs(if cfg!(debug_assertions) { 20 } else { 1 });
    let took = processor_time() - started;
    assert!(took < limit, "it took {took:?}");
}

/// Returns the processor time of this thread so far, which does not depend on what else the machine does.
fn processor_time() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

/// Members that are late become so in several transactions, none of them too large.
#[test]
fn many_late_survivors_fit_into_transactions() {
    let mut master = Master::with_round(300, 2, 300);
    master.lose(7);
    (0..2).for_each(|node| master.join(node, 1));
    master.now = Millis(master.now.0 + JOIN_TIMEOUT_MS);
    let mut decisions = Vec::new();
    loop {
        let facts = master.state.due(&master.settings, &master.timers, master.now);
        if facts.is_empty() {
            break;
        }
        decisions.push(facts.len());
        master.commit(facts);
    }
    assert_eq!(decisions, [64, 64, 64, 64, 41, 2]);
    assert_eq!(master.members(), [id(0), id(1)]);
}
