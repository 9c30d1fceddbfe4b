//! Results of polls.

use proptest::prelude::*;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Millis;

use super::hosts;
use crate::discovery::{Discovery, PollError, Update};

const TIMEOUT_MS: u64 = 600_000;

/// S001-3: a first failure is a misconfiguration.
#[test]
fn a_first_failure_ends_the_job() {
    let error = Discovery::new(TIMEOUT_MS).failed(Millis(0), "exit code 127");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let message = "misconfiguration: the first discovery of hosts failed: exit code 127";
    assert_eq!(error.to_string(), message);
}

/// S001-3: later failures are retried until a timeout after the last success. The hosts stay.
#[test]
fn a_later_failure_is_retried_until_the_timeout() {
    let mut discovery = Discovery::new(TIMEOUT_MS);
    discovery.succeeded(Millis(100), &hosts("a:1"));
    let reason = || "line 2".to_owned();
    let error = discovery.failed(Millis(100 + TIMEOUT_MS - 1), "line 2");
    assert_eq!(error, PollError::Retried { reason: reason(), left_ms: 1 });
    assert_eq!(discovery.hosts(), Some(&*hosts("a:1")));
    let error = discovery.failed(Millis(100 + TIMEOUT_MS), "line 2");
    assert_eq!(error, PollError::TimedOut { reason: reason(), failed_ms: TIMEOUT_MS });
    discovery.succeeded(Millis(200), &hosts("a:1"));
    let error = discovery.failed(Millis(100 + TIMEOUT_MS), "line 2");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

/// S001-3: a launcher that is started again does not end a job for a failure that would have been retried.
#[test]
fn a_first_failure_after_a_restart_is_retried() {
    let discovery = Discovery::resumed(TIMEOUT_MS, Millis(5));
    assert_eq!(discovery.hosts(), None);
    assert_eq!(discovery.failed(Millis(5), "").kind(), ErrorKind::Unavailable);
    assert_eq!(discovery.failed(Millis(5 + TIMEOUT_MS), "").kind(), ErrorKind::NotYet);
}

/// The reason ends up in a record.
#[test]
fn a_reason_is_shortened() {
    let error = Discovery::new(0).failed(Millis(0), &"ü".repeat(5_000)).to_string();
    assert!(error.len() < 1_200, "{} bytes", error.len());
}

/// S001-8
#[test]
fn an_update_says_what_was_added_and_removed() {
    for (before, after, bits) in [
        ("", "", 0),
        ("a:1 b:2", "b:2 a:1", 0),
        ("a:1", "", 1),
        ("a:2", "a:1", 1),
        ("a:1", "a:1 b:1", 2),
        ("a:1", "a:2", 2),
        ("a:1 b:1", "a:1 c:1", 3),
        ("a:2 b:1", "a:1 b:2", 3),
        ("a:2", "a:1 b:1", 3),
    ] {
        let update = Update::between(&hosts(before), &hosts(after));
        assert_eq!(update.bits(), bits, "{before} to {after}");
    }
}

/// S001-8: several updates are combined bit by bit.
#[test]
fn updates_are_combined_by_their_bits() {
    let all = [Update::NoUpdate, Update::Removed, Update::Added, Update::Mixed];
    for (one, other) in all.into_iter().flat_map(|one| all.map(|other| (one, other))) {
        assert_eq!((one | other).bits(), one.bits() | other.bits());
    }
}

/// S001-11: the oldest host is the first; new hosts follow in the order of the script.
#[test]
fn the_order_of_hosts_is_kept_and_new_hosts_follow() {
    let mut discovery = Discovery::new(TIMEOUT_MS);
    let mut order = |found| {
        let update = discovery.succeeded(Millis(0), &hosts(found));
        (update.bits(), discovery.hosts().unwrap().to_vec())
    };
    assert_eq!(order("c:1 a:1"), (2, hosts("c:1 a:1")));
    assert_eq!(order("z:1 a:1 b:1 c:3"), (2, hosts("c:3 a:1 z:1 b:1")));
    assert_eq!(order("b:1 a:1"), (1, hosts("a:1 b:1")));
    assert_eq!(order("c:1 b:1 a:1"), (2, hosts("a:1 b:1 c:1")), "a host that was away is new");
    assert_eq!(order(""), (1, Vec::new()));
}

proptest! {
    /// S001-11, S001-8: any two lists: old hosts keep their order, new ones that of the script, and only an
    /// equal list is no update.
    #[test]
    fn any_two_lists_keep_both_orders(
        lists in proptest::collection::vec(proptest::collection::btree_map("[a-f]", 1u32..3, 0..6), 2),
        reverse in any::<bool>(),
    ) {
        let mut lists = lists.into_iter().map(|list| {
            list.into_iter().map(|(host, slots)| crate::hosts::Host { name: super::name(&host), slots })
        });
        let before: Vec<_> = lists.next().unwrap().collect();
        let mut found: Vec<_> = lists.next().unwrap().collect();
        if reverse {
            found.reverse();
        }
        let mut discovery = Discovery::new(0);
        discovery.succeeded(Millis(0), &before);
        let update = discovery.succeeded(Millis(0), &found);
        let after = discovery.hosts().unwrap();
        let is_old = |host: &&crate::hosts::Host| before.iter().any(|it| it.name == host.name);
        let (old, new): (Vec<_>, Vec<_>) = after.iter().partition(is_old);
        prop_assert!(old.is_sorted_by_key(|it| &it.name));
        prop_assert_eq!(new.clone(), Vec::from_iter(found.iter().filter(|it| !is_old(it))));
        prop_assert_eq!(Vec::from_iter(old.into_iter().chain(new)), Vec::from_iter(after));
        let sorted = |list: &[crate::hosts::Host]| {
            let mut list = Vec::from_iter(list.iter().map(|it| (it.name.clone(), it.slots)));
            list.sort();
            list
        };
        prop_assert_eq!(sorted(after), sorted(&found));
        prop_assert_eq!(update == Update::NoUpdate, sorted(&before) == sorted(&found));
    }
}
