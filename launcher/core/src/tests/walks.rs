//! Every sequence of events of a small world, and random ones of a larger world.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use super::*;

/// An event. Hosts are given by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A poll finds the host with so many slots; with 0 it does not find it.
    Finds(usize, u32),
    Exits(usize, Exit),
    /// Time passes until the next deadline.
    TimePasses,
    /// The launcher is killed and started again, and polls.
    Restarts,
}

fn events(hosts: usize, slots_max: u32) -> Vec<Event> {
    let of = |host| {
        let finds = (0..=slots_max).map(move |slots| Event::Finds(host, slots));
        finds.chain([Event::Exits(host, Exit::Failed), Event::Exits(host, Exit::Succeeded)])
    };
    (0..hosts).flat_map(of).chain([Event::TimePasses, Event::Restarts]).collect()
}

fn host_name(index: usize) -> HostName {
    name(&format!("h{index}"))
}

/// The world after an event, or `None` if it is not possible.
fn after(before: &Driver, event: Event) -> Option<Driver> {
    let mut driver = before.clone();
    driver.facts.clear();
    match event {
        Event::Finds(index, slots) => {
            let found = driver.discovered.get_or_insert_default();
            let known = found.iter().position(|host| host.name == host_name(index));
            match (known, slots) {
                (None, 0) => return None,
                (None, _) => found.push(Host { name: host_name(index), slots }),
                (Some(at), 0) => drop(found.remove(at)),
                (Some(at), _) if found[at].slots == slots => return None,
                (Some(at), _) => found[at].slots = slots,
            }
            driver.follow();
        }
        Event::Exits(index, exit) => {
            let agent = driver.launcher.agent(&host_name(index))?;
            if agent.phase == Phase::Restarting {
                return None;
            }
            let (host, launch) = (host_name(index), agent.launch);
            driver.handle(Input::Exited { host, launch, exit, seed: 0 });
        }
        Event::TimePasses => driver.now = driver.launcher.deadline(driver.context())?,
        Event::Restarts => {
            let discovered = driver.discovered.take();
            driver.restarts();
            check_steady(&driver);
            driver.discovered = discovered;
            driver.follow();
        }
    }
    settle(&mut driver);
    check(before, &driver);
    Some(driver)
}

/// Commits what is due, and checks each decision.
fn settle(driver: &mut Driver) {
    for _ in 0..100 {
        let facts = driver.launcher.due(driver.context());
        if facts.is_empty() {
            return;
        }
        let is_short =
            driver.launcher.shortage(&driver.settings, driver.discovered.as_deref()).is_some();
        for fact in &facts {
            if let Fact::Started { host, .. } = fact {
                let record = driver.launcher.hosts.get(host);
                assert!(record.is_none_or(|it| it.cooldown_ms.is_none()), "{host} is blacklisted");
                let found = driver.discovered.as_ref().unwrap();
                assert!(found.iter().any(|it| it.name == *host), "{host} is not discovered");
                assert_eq!(driver.outcome(), None, "{host} is started after the end");
                assert!(!is_short, "{host} is started below the minimum");
            }
            if let Fact::StopRequested { host, reason, .. } = fact {
                let is_needed = matches!(reason, StopReason::Removed | StopReason::JobEnded);
                assert!(is_needed || !is_short, "{host} is stopped below the minimum");
            }
        }
        driver.commit(&facts);
        let alive = driver.launcher.agents().filter(|(_, it)| it.phase != Phase::Restarting);
        let slots: u32 = alive.map(|(_, agent)| agent.slots).sum();
        assert!(slots <= driver.settings.workers.max_np(), "{slots} slots");
    }
    panic!("there is always something due");
}

/// S001-9, S001-11, S001-12, S001-20: the rules after each event.
fn check(before: &Driver, driver: &Driver) {
    check_steady(driver);
    let (record, hosts) = driver.etcd.clone();
    assert_eq!(Launcher::from_records(record, hosts), driver.launcher, "the records are the state");
    let found: BTreeMap<&HostName, u32> =
        driver.discovered.iter().flatten().map(|it| (&it.name, it.slots)).collect();
    for (host, agent) in driver.launcher.agents().filter(|(_, it)| it.phase == Phase::Running) {
        let may_run = found.contains_key(host) || driver.outcome().is_some();
        assert!(may_run, "{host} runs and is not discovered");
        assert!(1 <= agent.slots && agent.place <= agent.launch);
    }
    check_order(before, driver);
    let resets = driver.launcher.record().resets - before.launcher.record().resets;
    assert!(resets <= 1, "{resets} resets by one event");
    check_plan(driver);
}

/// The same input again leads to no action, and no deadline has passed.
fn check_steady(driver: &Driver) {
    let mut again = driver.clone();
    again.follow();
    assert_eq!(again.timers, driver.timers);
    assert_eq!(again.launcher.due(again.context()), []);
    let deadline = driver.launcher.deadline(driver.context());
    assert!(deadline.is_none_or(|it| driver.now < it), "{deadline:?} has passed");
}

/// S001-11: an agent keeps its place unless it ended for good, the youngest agents are the surplus, and hosts
/// get new agents in the order of discovery.
fn check_order(before: &Driver, driver: &Driver) {
    let running = driver.launcher.agents().filter(|(_, it)| it.phase == Phase::Running);
    let youngest = running.map(|(_, agent)| agent.place).max().unwrap_or(0);
    let surplus = Phase::Stopping { reason: StopReason::Surplus };
    for (host, agent) in driver.launcher.agents() {
        let Some(earlier) = before.launcher.agent(host) else {
            continue;
        };
        let kept = earlier.place == agent.place;
        let restarts = Phase::Stopping { reason: StopReason::SlotsChanged };
        let may_end = matches!(earlier.phase, Phase::Stopping { .. }) && earlier.phase != restarts;
        assert!(kept || may_end, "{host} lost its place");
        let is_new = earlier.phase == Phase::Running && agent.phase == surplus;
        assert!(!is_new || youngest < agent.place, "{host} is the surplus, and is older");
    }
    let mut is_skipped = false;
    for Host { name, .. } in driver.discovered.iter().flatten() {
        let (had, has) = (before.launcher.agent(name), driver.launcher.agent(name));
        let record = driver.launcher.hosts.get(name);
        let is_blacklisted = record.is_some_and(|it| it.cooldown_ms.is_some());
        assert!(had.is_some() || has.is_none() || !is_skipped, "{name} was not the next");
        is_skipped |= has.is_none() && !is_blacklisted;
    }
}

/// If no agent stops and the minimum is reached, no slot that is allowed is left unused.
fn check_plan(driver: &Driver) {
    let is_short = driver.launcher.shortage(&driver.settings, driver.discovered.as_deref());
    let all_run = driver.launcher.agents().all(|(_, it)| it.phase == Phase::Running);
    if is_short.is_some() || !all_run || driver.outcome().is_some() {
        return;
    }
    let used: u32 = driver.launcher.agents().map(|(_, agent)| agent.slots).sum();
    let is_usable = |host: &&Host| {
        driver.launcher.hosts.get(&host.name).is_none_or(|it| it.cooldown_ms.is_none())
    };
    let usable: u32 = driver.discovered.iter().flatten().filter(is_usable).map(|it| it.slots).sum();
    assert_eq!(used, usable.min(driver.settings.workers.max_np()));
    assert!(driver.launcher.record().settled);
}

/// If nothing else happens than that agents do what they are asked to, the world comes to rest, and no agent
/// is started or stopped twice.
fn check_rest(driver: &Driver) {
    let mut driver = driver.clone();
    driver.facts.clear();
    let stopping = |driver: &Driver| {
        let is_stopping = |it: &&HostRecord| {
            it.agent.as_ref().is_some_and(|it| matches!(it.phase, Phase::Stopping { .. }))
        };
        let mut hosts = driver.launcher.hosts.iter();
        let (host, record) = hosts.find(|(_, record)| is_stopping(record))?;
        Some((host.clone(), record.agent.as_ref()?.launch))
    };
    while let Some((host, launch)) = stopping(&driver) {
        let facts = driver.launcher.exited(&host, launch, Exit::Failed, 0, driver.context());
        driver.commit(&facts);
        settle(&mut driver);
    }
    let mut seen = BTreeSet::new();
    for action in driver.facts.iter().filter_map(Fact::action) {
        let key = match action {
            Action::Start { host, .. } => (host, "start"),
            Action::Stop { host, .. } => (host, "stop"),
        };
        assert!(seen.insert(key.clone()), "{key:?} twice");
    }
    check_plan(&driver);
}

/// Applies every event in every state that can be reached in `depth` events; returns the number of states.
fn explore(start: Driver, events: &[Event], depth: usize) -> usize {
    let key = |driver: &Driver| {
        let mut at_zero = driver.clone();
        at_zero.facts.clear();
        format!("{at_zero:?}")
    };
    let mut seen = BTreeSet::from([key(&start)]);
    let mut frontier = vec![start];
    for _ in 0..depth {
        let mut next = Vec::new();
        for driver in &frontier {
            for reached in events.iter().filter_map(|event| after(driver, *event)) {
                if seen.insert(key(&reached)) {
                    check_rest(&reached);
                    next.push(reached);
                }
            }
        }
        frontier = next;
    }
    seen.len()
}

/// The build without optimization explores less.
const DEPTH: usize = if cfg!(debug_assertions) { 4 } else { 5 };

/// S001-9, S001-11, S001-12, S001-20, S001-42: from nothing, every sequence of events of three hosts keeps the
/// rules.
#[test]
fn every_sequence_of_events_of_three_hosts_keeps_the_rules() {
    let start = Driver::with(settings(2, 3), "");
    let states = explore(start, &events(3, 2), DEPTH);
    assert!(1_000 < states, "explored only {states} states");
}

/// The same from three hosts that run, of which the last one has too many slots, with few resets.
#[test]
fn every_sequence_of_events_around_a_full_job_keeps_the_rules() {
    let settings = Settings { reset_limit: Some(2), ..settings(2, 4) };
    let start = Driver::with(settings, "h0:1 h1:2 h2:2");
    let states = explore(start, &events(3, 2), DEPTH);
    assert!(1_000 < states, "explored only {states} states");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(debug_assertions) { 100 } else { 2_000 },
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    /// The same for random walks of seven hosts.
    #[test]
    fn random_walks_of_seven_hosts_keep_the_rules(
        choices in proptest::collection::vec(any::<prop::sample::Index>(), 50..200),
        min_np in 1u32..8,
        more in 0u32..10,
    ) {
        // A walk is long only if successes are rare.
        let is_success = |it: &Event| matches!(it, Event::Exits(_, Exit::Succeeded));
        let (successes, others): (Vec<_>, Vec<_>) = events(7, 4).into_iter().partition(is_success);
        let events = [vec![others; 40].concat(), successes].concat();
        let mut driver = Driver::with(settings(min_np, min_np + more), "");
        for choice in choices {
            if let Some(reached) = after(&driver, *choice.get(&events)) {
                check_rest(&reached);
                driver = reached;
            }
        }
    }
}
