//! Which hosts run an agent.

use steadfast_common::error::ErrorKind;

use super::*;
use crate::blacklist::Cooldown;
use crate::launcher::FACTS_MAX;

/// S001-11, S001-12: hosts are taken in order, up to `max_np` workers.
#[test]
fn hosts_beyond_the_maximum_get_no_agent() {
    let mut driver = Driver::new(settings(2, 6));
    assert_eq!(driver.discovers("c:2 a:2 b:4 d:1"), ["+c:2", "+a:2", "+b:2"]);
    assert_eq!(driver.running(), "c:2 a:2 b:2");
    assert!(driver.discovers("c:2 a:2 b:4 d:1").is_empty());
}

/// S001-20: nothing is started below `min_np`.
#[test]
fn nothing_is_started_below_the_minimum() {
    let mut driver = Driver::new(settings(4, 8));
    assert!(driver.discovers("a:2 b:1").is_empty());
    let shortage = driver.launcher.shortage(&driver.settings, driver.discovered.as_deref());
    assert_eq!(shortage.unwrap().to_string(), "found 3 of 4 slots on a:2, b:1");
    assert_eq!(driver.discovers("a:2 b:2"), ["+a:2", "+b:2"]);
    assert_eq!(driver.launcher.shortage(&driver.settings, driver.discovered.as_deref()), None);
}

/// S001-20: an agent that runs is not disturbed while hosts are missing, and nothing else is started.
#[test]
fn agents_that_run_wait_while_hosts_are_missing() {
    let mut driver = Driver::with(settings(4, 8), "a:2 b:2");
    assert_eq!(driver.discovers("a:1 c:1"), ["-b removed"]);
    assert!(driver.exits("b", Exit::Failed).is_empty());
    assert_eq!(driver.running(), "a:2");
    assert_eq!(driver.discovers("a:2 c:1 d:2"), ["+c:1", "+d:2"]);
}

/// S001-12: after the elastic timeout the job ends, with what was found.
#[test]
fn the_job_ends_if_hosts_are_missing_for_too_long() {
    let cooldown = Cooldown::new(1_000_000, 1_000_000).unwrap();
    let mut driver = Driver::with(Settings { cooldown, ..settings(4, 8) }, "a:2 b:1 c:1");
    driver.exits("c", Exit::Failed);
    let deadline = driver.launcher.deadline(driver.context());
    assert_eq!(deadline, Some(Millis(driver.now.0 + 600_000)));
    assert!(driver.passes(599_999).is_empty());
    assert_eq!(driver.passes(1), ["-a ended", "-b ended"]);
    let message = "too few slots for 600 s: found 3 of 4 slots on a:2, b:1; on the blacklist: c";
    assert_eq!(driver.outcome().unwrap().to_string(), message);
    assert_eq!(driver.outcome().unwrap().kind(), Some(ErrorKind::NotYet));
    driver.exits("b", Exit::Failed);
    assert!(!driver.launcher.is_over());
    driver.exits("a", Exit::Succeeded);
    assert!(driver.launcher.is_over());
}

/// S001-12: the timeout begins anew when the minimum is reached.
#[test]
fn the_elastic_timeout_begins_with_the_shortage() {
    let mut driver = Driver::with(settings(4, 8), "a:2");
    driver.passes(599_999);
    driver.discovers("a:2 b:2");
    driver.passes(1_000_000);
    driver.discovers("a:2");
    driver.passes(599_999);
    assert_eq!(driver.outcome(), None);
    driver.passes(1);
    assert!(matches!(driver.outcome(), Some(Outcome::TooFewSlots { .. })));
}

/// S001-20: the message names the hosts on the blacklist.
#[test]
fn a_shortage_names_the_hosts_on_the_blacklist() {
    let mut driver = Driver::with(settings(4, 8), "a:2 b:2");
    driver.exits("b", Exit::Failed);
    let shortage = driver.launcher.shortage(&driver.settings, driver.discovered.as_deref());
    let message = "found 2 of 4 slots on a:2; on the blacklist: b";
    assert_eq!(shortage.unwrap().to_string(), message);
    let many = Vec::from_iter((0..10).map(|it| format!("h{it}:1"))).join(" ");
    let driver = Driver::with(settings(20, 20), &many);
    let shortage = driver.launcher.shortage(&driver.settings, driver.discovered.as_deref());
    assert!(shortage.unwrap().to_string().ends_with("h6:1, h7:1 and 2 more"));
}

/// S001-8: more or fewer slots restart the agent, which keeps its place.
#[test]
fn a_change_of_slots_restarts_the_agent_at_its_place() {
    let mut driver = Driver::with(settings(2, 8), "a:2 b:2");
    assert_eq!(driver.discovers("a:4 b:2"), ["-a slots"]);
    assert!(driver.discovers("a:4 b:2").is_empty());
    assert_eq!(driver.exits("a", Exit::Failed), ["+a:4"]);
    assert_eq!(driver.running(), "a:4 b:2");
    assert!(driver.launcher.blacklist(&driver.timers, driver.now).is_empty());
    assert_eq!(driver.discovers("a:1 b:2"), ["-a slots"]);
    assert_eq!(driver.exits("a", Exit::Succeeded), ["+a:1"]);
    assert_eq!(driver.outcome(), None, "an agent that was stopped has not finished the job");
}

/// S001-11: an older host that grows takes the slots of younger ones, without a detour.
#[test]
fn an_older_host_that_grows_displaces_a_younger_one_once() {
    for first in ["a", "b"] {
        let mut driver = Driver::with(settings(2, 6), "a:2 b:4");
        assert_eq!(driver.discovers("b:4 a:6"), ["-a slots", "-b surplus"]);
        let second = if first == "a" { "b" } else { "a" };
        let actions = [driver.exits(first, Exit::Failed), driver.exits(second, Exit::Failed)];
        assert_eq!(actions.concat(), ["+a:6"], "{first} exits first");
    }
}

/// S001-8: a removed host's agent is stopped; its place goes to the next host.
#[test]
fn a_removed_host_is_replaced_by_the_next_one() {
    let mut driver = Driver::with(settings(2, 4), "a:2 b:2 c:2");
    assert_eq!(driver.discovers("b:2 c:2"), ["-a removed"]);
    assert_eq!(driver.exits("a", Exit::Failed), ["+c:2"]);
    assert!(driver.discovers("a:2 b:2 c:2").is_empty());
    assert_eq!(driver.running(), "b:2 c:2");
}

/// S001-11: a host that failed has lost its state, so it is not the oldest any more.
#[test]
fn a_host_that_returns_from_the_blacklist_is_the_youngest() {
    let mut driver = Driver::with(settings(2, 4), "a:2 b:2 c:2");
    assert_eq!(driver.exits("a", Exit::Failed), ["+c:2"]);
    assert!(driver.passes(1_000).is_empty());
    assert_eq!(driver.running(), "b:2 c:2");
    assert_eq!(driver.exits("b", Exit::Failed), ["+a:2"]);
}

/// A host that is listed again while its agent stops gets a new one afterwards.
#[test]
fn a_host_that_returns_while_its_agent_stops_is_started_again() {
    let mut driver = Driver::with(settings(1, 4), "a:2 b:2");
    driver.discovers("a:2");
    assert!(driver.discovers("a:2 b:2").is_empty());
    assert_eq!(driver.exits("b", Exit::Failed), ["+b:2"]);
    driver.discovers("a:2 b:1");
    driver.discovers("a:2");
    assert!(driver.exits("b", Exit::Failed).is_empty(), "removed while it was to restart");
    assert_eq!(driver.running(), "a:2");
    assert_eq!(driver.launcher.agents().count(), 1);
}

/// S001-12: the first start is no reset; each change after the agents have settled is one, however many
/// agents change.
#[test]
fn a_job_ends_at_its_reset_limit() {
    let settings = Settings { reset_limit: Some(3), ..settings(1, 8) };
    let mut driver = Driver::with(settings, "a:2 b:2 c:2");
    assert_eq!(driver.launcher.record().resets, 0);
    driver.exits("a", Exit::Failed);
    driver.exits("b", Exit::Failed);
    assert_eq!(driver.launcher.record().resets, 2);
    driver.passes(1_000);
    assert_eq!((driver.launcher.record().resets, driver.running().as_str()), (3, "c:2 a:2 b:2"));
    driver.exits("c", Exit::Failed);
    assert_eq!(driver.outcome(), Some(&Outcome::ResetLimit { limit: 3 }));
    assert_eq!(driver.running(), "");
}

/// S001-12: the stop and the start of a restart are one reset.
#[test]
fn a_restart_with_other_slots_is_one_reset() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    driver.discovers("a:3 b:3 c:1");
    driver.exits("a", Exit::Failed);
    driver.exits("b", Exit::Failed);
    assert_eq!((driver.launcher.record().resets, driver.running().as_str()), (1, "a:3 b:3 c:1"));
    let settings = Settings { reset_limit: Some(0), ..settings(1, 8) };
    let mut driver = Driver::with(settings, "a:2 b:2");
    assert_eq!(driver.discovers("a:2 b:2 c:2"), ["-a ended", "-b ended"]);
}

/// A transaction in etcd has a limit.
#[test]
fn many_hosts_are_started_in_several_decisions_without_a_reset() {
    let many = Vec::from_iter((0..300).map(|it| format!("h{it}:1"))).join(" ");
    let mut driver = Driver::new(settings(300, 400));
    driver.discovered = Some(hosts(&many));
    driver.follow();
    let facts = driver.launcher.due(driver.context());
    assert_eq!(facts.len(), FACTS_MAX);
    assert_eq!(driver.launcher.changes(&facts).len(), FACTS_MAX + 1);
    assert_eq!(driver.settle().len(), 300);
    assert_eq!(driver.launcher.record().resets, 0);
    let stops = driver.discovers("h299:1");
    assert_eq!((stops.len(), driver.launcher.record().resets), (299, 1));
}
