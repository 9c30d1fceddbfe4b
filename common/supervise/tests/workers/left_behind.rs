//! Rules about processes of which none may be left behind.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::support::scenario::{TREE, guards_of, nested, start, tree};
use super::support::{KillAtEnd, id_in, is_alive, shell, supervisor, until_gone, wait_for};

/// Returns the ids of the processes of a tree, once all have started.
async fn ids(directory: &Path) -> KillAtEnd {
    let mut ids = Vec::new();
    for name in TREE {
        ids.push(id_in(&directory.join(name)).await);
    }
    KillAtEnd(ids)
}

/// S003-21: a worker is a process of its own; stopping it ends all processes that it started.
#[tokio::test]
async fn a_stopped_worker_leaves_no_process() {
    let directory = tempfile::tempdir().unwrap();
    let supervisor = supervisor();
    let mut worker = supervisor.start(&tree(directory.path())).unwrap();
    let processes = ids(directory.path()).await;
    let exit = worker.stop(Duration::from_millis(100)).await;
    assert_eq!(exit.to_string(), "signal SIGKILL");
    for id in &processes.0 {
        assert!(!is_alive(*id), "process {id} is left");
    }
}

#[tokio::test]
async fn a_worker_that_ends_leaves_no_process_and_others_stay() {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (directory.path().join("1"), directory.path().join("2"));
    let supervisor = supervisor();
    let script = r#"setsid sleep 1000 & echo $! >"$DIR/id""#;
    let mut lasting = supervisor.start(&tree(&one)).unwrap();
    let processes = ids(&one).await;
    let exit = supervisor.start(&shell(&other, script)).unwrap().wait().await;
    assert!(exit.is_success());
    let grandchild = KillAtEnd(vec![id_in(&other.join("id")).await]);
    assert!(!is_alive(grandchild.0[0]));
    for id in &processes.0 {
        assert!(is_alive(*id), "process {id} of another worker was killed");
    }
    lasting.stop(Duration::ZERO).await;
}

#[tokio::test]
async fn the_end_of_the_run_ends_what_a_dropped_worker_left() {
    let directory = tempfile::tempdir().unwrap();
    let supervisor = supervisor();
    drop(supervisor.start(&tree(directory.path())));
    let mut worker = supervisor.start(&tree(&directory.path().join("2"))).unwrap();
    let processes = ids(&directory.path().join("2")).await;
    worker.stop(Duration::ZERO).await;
    supervisor.close().await.unwrap();
    for id in &processes.0 {
        assert!(!is_alive(*id), "process {id} is left");
    }
}

#[tokio::test]
async fn a_killed_supervisor_leaves_no_process() {
    check_killed_supervisor("hold").await;
}

#[tokio::test]
async fn a_guard_that_was_killed_is_replaced_at_the_next_start() {
    check_killed_supervisor("hold with a new guard").await;
}

async fn check_killed_supervisor(scenario: &str) {
    let directory = tempfile::tempdir().unwrap();
    let mut supervisor = start(scenario, directory.path());
    let own = i32::try_from(supervisor.id()).unwrap();
    let _kill_supervisor = KillAtEnd(vec![own]);
    let mut processes = ids(directory.path()).await;
    // A program has no environment yet at the instant at which the one that started it goes on.
    let guard =
        wait_for("guard that is alive", || guards_of(own).into_iter().find(|it| is_alive(*it)));
    processes.0.push(guard.await);
    assert_eq!(processes.0.len(), TREE.len() + 1, "{processes:?}");
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    for id in &processes.0 {
        until_gone(*id).await;
    }
}

#[tokio::test]
async fn a_run_within_a_worker_of_another_run_is_ended_by_both() {
    let directory = tempfile::tempdir().unwrap();
    let supervisor = supervisor();
    let mut worker = supervisor.start(&nested("hold", directory.path())).unwrap();
    let processes = ids(directory.path()).await;
    worker.stop(Duration::ZERO).await;
    for id in &processes.0 {
        assert!(!is_alive(*id), "process {id} is left");
    }
}

#[tokio::test]
async fn the_guard_ends_with_its_run() {
    let directory = tempfile::tempdir().unwrap();
    let mut supervisor = start("hold", directory.path());
    let own = i32::try_from(supervisor.id()).unwrap();
    let processes = ids(directory.path()).await;
    let guard = *guards_of(own).first().unwrap();
    // The worker of the scenario ends, and with it the run.
    kill(Pid::from_raw(processes.0[0]), Signal::SIGKILL).unwrap();
    let ended = wait_for("end of the supervisor", || supervisor.try_wait().unwrap()).await;
    assert!(ended.success());
    until_gone(guard).await;
    for id in &processes.0 {
        assert!(!is_alive(*id), "process {id} is left");
    }
}
