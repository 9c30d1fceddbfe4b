//! Rules about the end of workers, and about signals.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use steadfast_supervise::{Ending, StackDump};
use tokio::time::timeout;

use super::support::{
    KillAtEnd, PATIENCE, id_in, is_alive, python, shell, supervisor, text_of, until_gone, wait_for,
};

#[tokio::test]
async fn a_worker_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let directory = tempfile::tempdir().unwrap();
    let script = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
    let mut worker = supervisor().start(&shell(directory.path(), script)).unwrap();
    text_of(&directory.path().join("stdout.log")).await;
    let (start, grace) = (Instant::now(), Duration::from_millis(300));
    let exit = worker.stop(grace).await;
    assert!(grace <= start.elapsed());
    assert_eq!(exit.ending, Ending::Signal(Signal::SIGKILL as i32));
    assert_eq!(exit.to_string(), "signal SIGKILL");
}

#[tokio::test]
async fn the_command_of_a_shell_saves_its_state_within_the_grace_period() {
    let directory = tempfile::tempdir().unwrap();
    // The outer shell dies of SIGTERM at once.
    let script =
        "(trap 'sleep 0.3; echo saved; exit' TERM; echo ready; while :; do sleep 0.05; done); :";
    let mut worker = supervisor().start(&shell(directory.path(), script)).unwrap();
    let log = directory.path().join("stdout.log");
    text_of(&log).await;
    let exit = worker.stop(PATIENCE).await;
    assert_eq!(exit.to_string(), "signal SIGTERM");
    assert_eq!(text_of(&log).await, "ready\nsaved\n");
}

#[tokio::test]
async fn a_suspended_worker_ends_of_sigterm() {
    let directory = tempfile::tempdir().unwrap();
    let mut worker = supervisor().start(&shell(directory.path(), "kill -STOP $$")).unwrap();
    let stat = format!("/proc/{}/stat", worker.id().unwrap());
    let is_stopped = || std::fs::read_to_string(&stat).ok().filter(|it| it.contains(") T "));
    wait_for("suspended worker", is_stopped).await;
    assert_eq!(worker.stop(PATIENCE).await.to_string(), "signal SIGTERM");
}

#[tokio::test]
async fn a_grandchild_that_keeps_the_output_open_does_not_hold_up_the_end_of_its_worker() {
    let directory = tempfile::tempdir().unwrap();
    let script = r#"setsid sleep 1000 & echo $! >"$DIR/id"; echo error >&2; exit 3"#;
    let mut worker = supervisor().start(&shell(directory.path(), script)).unwrap();
    let exit = timeout(PATIENCE, worker.wait()).await.unwrap();
    assert_eq!(exit.to_string(), "exit code 3");
    assert_eq!(exit.last_lines, ["error"]);
    let grandchild = KillAtEnd(vec![id_in(&directory.path().join("id")).await]);
    assert!(!is_alive(grandchild.0[0]));
    assert_eq!(worker.wait().await, exit, "it can be asked again");
}

/// S003-21: the supervisor learns of the end of each worker, and whether it succeeded.
#[tokio::test]
async fn the_first_worker_to_end_is_returned_first_though_its_output_ends_later() {
    let directory = tempfile::tempdir().unwrap();
    let specs = [
        shell(
            &directory.path().join("0"),
            r#"until [ -e "$DIR/../go" ]; do sleep 0.02; done; exit 1"#,
        ),
        shell(&directory.path().join("1"), r#"(sleep 0.5; >"$DIR/../go"; sleep 1000) & exit 2"#),
    ];
    let mut workers = supervisor().start_all(&specs).await.unwrap();
    let mut ends = Vec::new();
    while let Some((index, exit)) = workers.next_exit().await {
        ends.push((index, exit.to_string()));
    }
    assert_eq!(ends, [(1, "exit code 2".to_owned()), (0, "exit code 1".to_owned())]);
    let exits = workers.stop(Duration::ZERO).await;
    assert_eq!(exits[1].ending, Ending::Code(2), "the exits stay known");
}

#[tokio::test]
async fn a_signal_reaches_every_worker_and_its_children() {
    let directory = tempfile::tempdir().unwrap();
    let script = "trap 'echo outer; exit 7' INT; \
                  sh -c 'trap \"echo inner; exit\" INT; echo ready; while :; do sleep 0.05; done'";
    let specs = ["0", "1"].map(|name| shell(&directory.path().join(name), script));
    let mut workers = supervisor().start_all(&specs).await.unwrap();
    for name in ["0", "1"] {
        text_of(&directory.path().join(name).join("stdout.log")).await;
    }
    workers.signal(Signal::SIGINT);
    while let Some((_, exit)) = timeout(PATIENCE, workers.next_exit()).await.unwrap() {
        assert_eq!(exit.to_string(), "exit code 7");
    }
    for name in ["0", "1"] {
        let text = text_of(&directory.path().join(name).join("stdout.log")).await;
        assert_eq!(text, "ready\ninner\nouter\n");
    }
}

#[tokio::test]
async fn a_hung_python_worker_prints_its_stack() {
    let directory = tempfile::tempdir().unwrap();
    let script = "import faulthandler, signal, threading\n\
                  faulthandler.register(signal.SIGUSR1, all_threads=True)\n\
                  def waits_for_ever():\n\
                  \x20   print('ready', flush=True)\n\
                  \x20   lock = threading.Lock()\n\
                  \x20   lock.acquire()\n\
                  \x20   lock.acquire()\n\
                  waits_for_ever()\n";
    let specs = [python(directory.path(), script)];
    let mut workers = supervisor().start_all(&specs).await.unwrap();
    text_of(&directory.path().join("stdout.log")).await;
    assert_eq!(workers.dump_stacks(), [StackDump::Requested]);
    let log = directory.path().join("stderr.log");
    let is_dumped =
        || std::fs::read_to_string(&log).ok().filter(|it| it.contains("waits_for_ever"));
    wait_for("stack", is_dumped).await;
    assert!(workers.workers()[0].id().is_some(), "it runs on");
    let exits = workers.stop(Duration::ZERO).await;
    assert!(exits[0].last_lines.iter().any(|it| it.contains("waits_for_ever")));
    assert_eq!(workers.dump_stacks(), [StackDump::NotHandled]);
}

#[tokio::test]
async fn a_worker_without_a_handler_is_not_killed_by_the_request_for_its_stack() {
    let directory = tempfile::tempdir().unwrap();
    let mut worker = supervisor()
        .start(&shell(directory.path(), "echo ready; read line; exec sleep 1000"))
        .unwrap();
    text_of(&directory.path().join("stdout.log")).await;
    assert_eq!(worker.dump_stacks(), StackDump::NotHandled);
    assert_eq!(worker.stop(PATIENCE).await.to_string(), "signal SIGTERM");
}

#[tokio::test]
async fn a_dropped_worker_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let script = r#"sleep 1000 & echo $! >"$DIR/id"; wait"#;
    let worker = supervisor().start(&shell(directory.path(), script)).unwrap();
    let id = id_in(&directory.path().join("id")).await;
    drop(worker);
    until_gone(id).await;
}
