//! Rules about processes of which none may be left behind.

use std::fs;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::support::scenario::{TREE, guards_of, nested, start, tree};
use super::support::{KillAtEnd, id_in, is_alive, python, shell, supervisor, until_gone, wait_for};

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

/// S003-21: in the middle of its start a process has no environment, and so no marker.
#[tokio::test]
async fn a_process_that_starts_slowly_is_not_left() {
    let directory = tempfile::tempdir().unwrap();
    // The program takes arguments and environment from itself, as the kernel does for the time of an `exec`, with
    // prctl(PR_SET_MM, PR_SET_MM_MAP) and the addresses that it has.
    let script = r#"
import ctypes, os, struct, subprocess, sys, time
slow = """
import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
code, data, heap, stack = map(int, fields[23:25]), map(int, fields[42:44]), int(fields[44]), int(fields[25])
arguments, environment = int(fields[45]), int(fields[47])
texts = (arguments, arguments, environment, environment)
parts = (*code, *data, heap, libc.sbrk(0), stack, *texts, 0, 0, 2**32 - 1)
memory = struct.pack("12Q2I", *parts)
if libc.prctl(35, 14, memory, len(memory), 0) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
time.sleep(0.5)
os.execvp("sleep", ["sleep", "1000"])
"""
process = subprocess.Popen([sys.executable, "-c", slow], start_new_session=True)
print(process.pid, file=open(os.environ["DIR"] + "/id", "w"))
while process.poll() is None and open(f"/proc/{process.pid}/cmdline").read():
    time.sleep(0.001)
assert process.poll() is None
os._exit(0)
"#;
    let exit = supervisor().start(&python(directory.path(), script)).unwrap().wait().await;
    assert!(exit.is_success());
    let process = KillAtEnd(vec![id_in(&directory.path().join("id")).await]);
    assert!(!is_alive(process.0[0]));
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

/// S003-21: a process is over when its last thread is, no matter which of them was the first.
#[tokio::test]
async fn a_process_whose_first_thread_has_ended_is_not_left() {
    let directory = tempfile::tempdir().unwrap();
    let supervisor = supervisor();
    let script = r#"
import os, subprocess, sys, time
program = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
print(os.getpid(), file=open("id", "w"))
ctypes.CDLL(None).pthread_exit(None)
"""
subprocess.Popen([sys.executable, "-c", program], cwd=os.environ["DIR"])
time.sleep(1000)
"#;
    let mut worker = supervisor.start(&python(directory.path(), script)).unwrap();
    let process = KillAtEnd(vec![id_in(&directory.path().join("id")).await]);
    wait_for("end of the first thread", || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.0[0])).unwrap();
        stat.contains(") Z ").then_some(())
    })
    .await;
    worker.stop(Duration::from_millis(100)).await;
    assert!(!is_alive(process.0[0]));
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
