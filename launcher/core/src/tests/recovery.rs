//! A launcher that is started again.

use steadfast_common::records::launch::LaunchedAgent;

use super::*;

/// A launcher that was killed finds its agents, and disturbs none.
#[test]
fn a_launcher_that_is_started_again_finds_its_agents() {
    let mut driver = Driver::with(settings(2, 8), "b:2 a:2 c:2");
    driver.discovers("b:2 a:2");
    let before = driver.launcher.clone();
    driver.restarts();
    assert_eq!(driver.launcher, before);
    let actions = ["+a:2", "+b:2", "-c removed"];
    assert_eq!(texts(driver.launcher.actions()), actions, "the last ones may be lost");
    assert!(driver.passes(1_000_000).is_empty(), "no host is known, so none is removed");
    assert!(driver.discovers("a:2 b:2").is_empty());
    assert_eq!(driver.running(), "b:2 a:2", "they keep their order");
    let exit = driver.launcher.exited(&name("c"), 3, Exit::Failed, 0, driver.context());
    assert_eq!(exit, [Fact::Stopped { host: name("c") }]);
}

/// S001-10: the blacklist survives. The cool-down begins anew, for the clock is another one.
#[test]
fn the_blacklist_survives_a_restart_of_the_launcher() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    driver.exits("a", Exit::Failed);
    driver.passes(900);
    driver.restarts();
    assert!(driver.discovers("a:2 b:2").is_empty());
    assert_eq!(driver.launcher.blacklist(&driver.timers, driver.now)[0].left_ms, 1_000);
    assert_eq!(driver.passes(1_000), ["+a:2"]);
    driver.exits("a", Exit::Failed);
    driver.restarts();
    assert_eq!(driver.launcher.hosts[&name("a")].cooldown_ms, Some(2_000));
}

/// An outcome is not forgotten: the agents are stopped, and the job does not begin again.
#[test]
fn a_job_that_has_ended_stays_ended() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    driver.commit(&[Fact::Ended(Outcome::Interrupted)]);
    driver.restarts();
    assert_eq!(driver.passes(0), ["-a ended", "-b ended"]);
}

#[test]
fn the_records_read_well_in_etcdctl() {
    let phase = Phase::Stopping { reason: StopReason::SlotsChanged };
    let agent = Some(LaunchedAgent { launch: 7, place: 2, slots: 4, phase });
    let record = HostRecord { failures: 1, cooldown_ms: None, agent };
    let text = concat!(
        r#"{"failures":1,"agent":{"launch":7,"place":2,"slots":4,"#,
        r#""phase":"stopping","reason":"slots_changed"}}"#
    );
    assert_eq!(serde_json::to_string(&record).unwrap(), text);
    assert_eq!(serde_json::from_str::<HostRecord>(text).unwrap(), record);
    let outcome = Some(Outcome::ResetLimit { limit: 3 });
    let record = LauncherRecord { launches: 9, resets: 3, settled: true, outcome };
    let text = concat!(
        r#"{"launches":9,"resets":3,"settled":true,"#,
        r#""outcome":{"result":"reset_limit","limit":3}}"#
    );
    assert_eq!(serde_json::to_string(&record).unwrap(), text);
    assert_eq!(serde_json::from_str::<LauncherRecord>(text).unwrap(), record);
}

/// Records from etcd do not make a launcher panic, whatever they contain.
#[test]
fn absurd_records_do_no_harm() {
    let agent = |phase| {
        let (launch, place, slots) = (u64::MAX, u64::MAX, u32::MAX);
        HostRecord {
            failures: u32::MAX,
            cooldown_ms: Some(u64::MAX),
            agent: Some(LaunchedAgent { launch, place, slots, phase }),
        }
    };
    let mut driver = Driver::new(settings(1, u32::MAX));
    let record =
        LauncherRecord { launches: u64::MAX, resets: u32::MAX, settled: true, outcome: None };
    let reason = StopReason::Removed;
    let hosts = [Phase::Running, Phase::Restarting, Phase::Stopping { reason }];
    let hosts = hosts.into_iter().enumerate();
    let hosts = hosts.map(|(index, phase)| (name(&format!("h{index}")), agent(phase)));
    driver.etcd = (Some(record), hosts.collect());
    driver.restarts();
    driver.discovers("a:4096 h0:1 h1:1 h2:1");
    driver.exits("h0", Exit::Failed);
    driver.passes(u64::MAX / 2);
}
