//! The blacklist.

use super::*;
use crate::blacklist::{BlacklistedHost, Cooldown, KNOWN_MAX};

/// S001-10: lower·2^count and a random part, capped.
#[test]
fn a_cooldown_doubles_with_each_failure_up_to_a_limit() {
    let cooldown = Cooldown::default();
    let lengths: Vec<u64> = (0..14).map(|failures| cooldown.length_ms(failures, 0)).collect();
    assert_eq!(lengths[..4], [1_000, 2_000, 4_000, 8_000]);
    assert_eq!(lengths[11..], [2_048_000, 3_600_000, 3_600_000]);
    assert_eq!(cooldown.length_ms(0, 999), 1_999);
    for (failures, random) in [(0, u64::MAX), (63, 1), (64, 1), (u32::MAX, u64::MAX)] {
        let length_ms = cooldown.length_ms(failures, random);
        assert!((1_000..=3_600_000).contains(&length_ms), "{length_ms}");
    }
    let largest = Cooldown::new(u64::MAX, u64::MAX).unwrap();
    assert_eq!(largest.length_ms(u32::MAX, u64::MAX - 1), u64::MAX);
    assert_eq!((Cooldown::new(0, 1), Cooldown::new(2, 1)), (None, None));
}

/// S001-9, S001-10: a host on the blacklist gets no agent until its cool-down ends by itself.
#[test]
fn a_blacklisted_host_gets_no_agent_until_it_has_cooled_down() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    assert!(driver.exits("a", Exit::Failed).is_empty());
    assert!(driver.discovers("b:2 a:2").is_empty());
    let entry = |left_ms| BlacklistedHost { host: name("a"), failures: 1, left_ms };
    assert_eq!(driver.launcher.blacklist(&driver.timers, driver.now), [entry(1_000)]);
    assert!(driver.passes(999).is_empty());
    assert_eq!(driver.launcher.blacklist(&driver.timers, driver.now), [entry(1)]);
    assert_eq!(driver.launcher.deadline(driver.context()), Some(Millis(driver.now.0 + 1)));
    assert_eq!(driver.passes(1), ["+a:2"]);
    assert!(driver.launcher.blacklist(&driver.timers, driver.now).is_empty());
    for cooldown_ms in [2_000, 4_000, 8_000] {
        driver.exits("a", Exit::Failed);
        assert!(driver.passes(cooldown_ms - 1).is_empty());
        assert_eq!(driver.passes(1), ["+a:2"]);
    }
}

/// S001-10: a host that was away is still on the blacklist when it returns.
#[test]
fn a_host_that_is_removed_and_added_again_stays_on_the_blacklist() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    driver.exits("a", Exit::Failed);
    driver.passes(400);
    driver.discovers("b:2");
    driver.passes(400);
    assert!(driver.discovers("b:2 a:2").is_empty());
    assert_eq!(driver.passes(200), ["+a:2"]);
    assert_eq!(driver.launcher.hosts[&name("a")].failures, 1);
}

/// S001-10: the failures of a host that runs well are forgotten.
#[test]
fn a_host_that_runs_well_for_long_enough_forgets_its_failures() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    driver.exits("a", Exit::Failed);
    driver.passes(1_000);
    driver.passes(driver.settings.forget_after_ms - 1);
    assert_eq!(driver.launcher.hosts[&name("a")].failures, 1);
    let deadline = driver.launcher.deadline(driver.context());
    assert_eq!(deadline, Some(Millis(driver.now.0 + 1)));
    assert!(driver.passes(1).is_empty());
    assert_eq!(driver.launcher.hosts[&name("a")].failures, 0);
    assert_eq!(driver.running(), "b:2 a:2");
}

/// Launchers run for months, and hosts in a cloud have ever new names.
#[test]
fn a_host_that_does_not_return_is_forgotten() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    driver.exits("a", Exit::Failed);
    driver.discovers("b:2");
    driver.passes(1_000);
    assert_eq!(driver.etcd.1.len(), 2);
    driver.passes(driver.settings.forget_after_ms);
    assert_eq!(driver.etcd.1.len(), 1);

    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    let record = HostRecord { failures: 1, cooldown_ms: Some(3_600_000), agent: None };
    for index in 0..KNOWN_MAX {
        driver.launcher.hosts.insert(name(&format!("gone-{index}")), record.clone());
    }
    driver.follow();
    driver.settle();
    assert_eq!(driver.launcher.hosts.len(), KNOWN_MAX);
    assert_eq!(driver.running(), "a:2 b:2");
}
