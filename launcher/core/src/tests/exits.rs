//! Ends of agents and of jobs.

use super::*;

/// S001-42: any success ends the job well; the others have time to finish.
#[test]
fn a_job_ends_well_after_any_success() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2 c:2 d:2");
    driver.exits("d", Exit::Failed);
    assert!(driver.exits("a", Exit::Succeeded).is_empty());
    assert_eq!(driver.outcome(), Some(&Outcome::Succeeded));
    assert!(driver.exits("b", Exit::Failed).is_empty());
    assert!(driver.discovers("c:4 d:2 e:2").is_empty(), "nothing is started any more");
    let deadline = driver.launcher.deadline(driver.context());
    assert_eq!(deadline, Some(Millis(driver.now.0 + driver.settings.finish_timeout_ms)));
    assert!(driver.passes(driver.settings.finish_timeout_ms - 1).is_empty());
    assert_eq!(driver.passes(1), ["-c ended"]);
    assert!(!driver.launcher.is_over());
    driver.exits("c", Exit::Failed);
    assert!(driver.launcher.is_over());
    assert_eq!(driver.launcher.deadline(driver.context()), None);
    assert_eq!(driver.outcome(), Some(&Outcome::Succeeded));
}

/// S001-42: all agents failed, so all hosts are on the blacklist: the job ends.
#[test]
fn a_job_ends_if_all_agents_failed() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    driver.exits("a", Exit::Failed);
    assert_eq!(driver.outcome(), None);
    driver.exits("b", Exit::Failed);
    let outcome = driver.outcome().unwrap().to_string();
    assert_eq!(outcome, "the agents of all hosts failed: a, b");
    assert!(driver.launcher.is_over());
    assert!(driver.passes(1_000_000).is_empty());
}

/// S001-42: it also ends if a host could be tried again, but failed, too.
#[test]
fn a_job_ends_if_all_hosts_failed_one_after_the_other() {
    let mut driver = Driver::with(settings(2, 2), "a:2 b:2");
    assert_eq!(driver.exits("a", Exit::Failed), ["+b:2"]);
    driver.passes(1_000);
    assert!(driver.launcher.blacklist(&driver.timers, driver.now).is_empty());
    driver.exits("b", Exit::Failed);
    assert!(matches!(driver.outcome(), Some(Outcome::AllFailed { .. })));
}

/// S001-42: a host that has not failed takes over.
#[test]
fn a_job_goes_on_while_a_host_has_not_failed() {
    let mut driver = Driver::with(settings(2, 2), "a:2 b:2");
    assert_eq!(driver.exits("a", Exit::Failed), ["+b:2"]);
    assert_eq!(driver.outcome(), None);
}

/// An agent that was asked to stop neither fails nor finishes the job.
#[test]
fn a_job_waits_for_hosts_if_all_are_removed() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    driver.discovers("");
    driver.exits("a", Exit::Failed);
    driver.exits("b", Exit::Succeeded);
    assert_eq!(driver.outcome(), None);
    assert_eq!(driver.discovers("a:2"), ["+a:2"]);
}

/// A report is repeated if its answer was lost.
#[test]
fn an_exit_of_an_earlier_launch_has_no_effect() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    driver.exits("a", Exit::Failed);
    for exit in [Exit::Failed, Exit::Succeeded] {
        assert!(driver.launcher.exited(&name("a"), 1, exit, 0, driver.context()).is_empty());
    }
    assert_eq!(driver.passes(1_000), ["+a:2"]);
    for (host, launch) in [("a", 1), ("a", 4), ("b", 1), ("z", 1)] {
        let exit = driver.launcher.exited(&name(host), launch, Exit::Failed, 0, driver.context());
        assert!(exit.is_empty(), "{host} {launch}");
    }
    assert!(driver.discovers("a:3 b:2").contains(&"-a slots".to_owned()));
    driver.settings.workers = WorkerRange::new(7, 8).unwrap();
    driver.exits("a", Exit::Failed);
    assert!(driver.launcher.exited(&name("a"), 3, Exit::Failed, 0, driver.context()).is_empty());
}

/// The first outcome counts, and all agents are stopped.
#[test]
fn a_job_ends_once() {
    let mut driver = Driver::with(settings(1, 8), "a:2 b:2");
    let facts = driver.launcher.end(Outcome::Interrupted);
    driver.commit(&facts);
    assert_eq!(texts(driver.settle()), ["-a ended", "-b ended"]);
    let reason = "exit code 1".to_owned();
    assert!(driver.launcher.end(Outcome::DiscoveryFailed { reason }).is_empty());
    driver.exits("a", Exit::Succeeded);
    driver.exits("b", Exit::Failed);
    assert_eq!((driver.outcome(), driver.launcher.is_over()), (Some(&Outcome::Interrupted), true));
}
