//! Rules about the end of workers, and about signals.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use steadfast_supervise::{Ending, Notified, WorkerSpec};
use tokio::time::timeout;

use super::support::{
    KillAtEnd, PATIENCE, id_in, is_alive, python, shell, start_all, supervisor, text_of,
    until_gone, wait_for,
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

/// A wait that is cancelled often would otherwise begin its search for descendants again and again.
#[tokio::test]
async fn the_end_of_a_worker_is_seen_however_often_a_wait_for_it_is_cancelled() {
    let directory = tempfile::tempdir().unwrap();
    let mut worker = supervisor().start(&shell(directory.path(), "exit 3")).unwrap();
    let start = Instant::now();
    let exit = loop {
        // Shorter than a search for descendants takes.
        if let Ok(exit) = timeout(Duration::from_millis(1), worker.wait()).await {
            break exit;
        }
        assert!(start.elapsed() < PATIENCE);
    };
    assert_eq!(exit.to_string(), "exit code 3");
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
    let mut workers = start_all(&supervisor(), &specs).unwrap();
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
    let supervisor = supervisor();
    let mut workers = start_all(&supervisor, &specs).unwrap();
    for name in ["0", "1"] {
        text_of(&directory.path().join(name).join("stdout.log")).await;
    }
    supervisor.signaller().notify(Signal::SIGINT).await;
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
    let wrapped = "python3 -c \"$PROGRAM\"; exit 3";
    let mut wrapper = shell(&directory.path().join("1"), wrapped);
    wrapper.env.push(("PROGRAM".into(), script.into()));
    let specs = [python(&directory.path().join("0"), script), wrapper];
    let supervisor = supervisor();
    let mut workers = start_all(&supervisor, &specs).unwrap();
    for name in ["0", "1"] {
        text_of(&directory.path().join(name).join("stdout.log")).await;
    }
    let notified = supervisor.signaller().notify(Signal::SIGUSR1).await;
    assert_eq!(notified, Notified { processes: 2, workers_without_handler: 0 });
    for (index, name) in ["0", "1"].into_iter().enumerate() {
        let log = directory.path().join(name).join("stderr.log");
        let is_dumped =
            || std::fs::read_to_string(&log).ok().filter(|it| it.contains("waits_for_ever"));
        wait_for("stack", is_dumped).await;
        assert!(workers.workers()[index].id().is_some(), "it runs on");
    }
    let exits = workers.stop(Duration::ZERO).await;
    assert!(exits[0].last_lines.iter().any(|it| it.contains("waits_for_ever")));
    assert_eq!(supervisor.signaller().notify(Signal::SIGUSR1).await, Notified::default());
}

#[tokio::test]
async fn a_worker_without_a_handler_is_not_killed_by_a_notice() {
    let directory = tempfile::tempdir().unwrap();
    let supervisor = supervisor();
    let mut worker =
        supervisor.start(&shell(directory.path(), "echo ready; exec sleep 1000")).unwrap();
    text_of(&directory.path().join("stdout.log")).await;
    let notified = supervisor.signaller().notify(Signal::SIGUSR1).await;
    assert_eq!(notified, Notified { processes: 0, workers_without_handler: 1 });
    assert_eq!(worker.stop(PATIENCE).await.to_string(), "signal SIGTERM");
}

/// A program that saves, with a process that loads its data, when it is asked to end, and says which signal it got.
const SAVES: &str = r#"
import os, signal, sys, time
def handle():
    for it in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(it, lambda number, _: received.append(signal.Signals(number).name))
received = []
ask, answer = os.pipe(), os.pipe()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(ask[1])
    while os.read(ask[0], 1):
        os.write(answer[1], b"data")
    os._exit(0)
os.close(answer[1])
handle()
print("ready", flush=True)
while not received:
    time.sleep(0.01)
# A second signal, or one to the other process, would have come by the end of a save.
time.sleep(0.3)
try:
    os.write(ask[1], b"x")
    data = os.read(answer[0], 4)
except OSError:
    data = b""
print("saved" if data == b"data" else "lost", *received, flush=True)
"#;

#[tokio::test]
async fn processes_that_load_data_run_until_the_worker_has_saved() {
    let directory = tempfile::tempdir().unwrap();
    let mut worker = supervisor().start(&python(directory.path(), SAVES)).unwrap();
    let log = directory.path().join("stdout.log");
    text_of(&log).await;
    let exit = worker.stop(PATIENCE).await;
    assert_eq!(exit.to_string(), "exit code 0");
    assert_eq!(text_of(&log).await, "ready\nsaved SIGTERM\n");
}

#[tokio::test]
async fn a_signal_that_a_worker_handles_takes_the_place_of_sigterm() {
    let directory = tempfile::tempdir().unwrap();
    // As `uv run`: it passes on each signal, and its program handles but one.
    let forwards = "import os, signal, subprocess, sys\n\
                    child = subprocess.Popen(['python3', '-c', os.environ['PROGRAM']])\n\
                    for it in (signal.SIGTERM, signal.SIGHUP):\n\
                    \x20   signal.signal(it, lambda number, _: child.send_signal(number))\n\
                    sys.exit(child.wait())\n";
    let only_sigterm = SAVES.replace("signal.SIGHUP", "signal.SIGTERM");
    let alone = SAVES.replace("signal.signal(signal.SIGTERM, signal.SIG_DFL)", "handle()");
    for (name, script, signal, expected) in [
        ("handled", alone.as_str(), Signal::SIGHUP, "SIGHUP"),
        ("not handled", &alone, Signal::SIGQUIT, "SIGTERM"),
        ("passed on", forwards, Signal::SIGHUP, "SIGTERM"),
    ] {
        let directory = directory.path().join(name);
        let mut spec = python(&directory, script);
        spec.env.push(("PROGRAM".into(), only_sigterm.clone().into()));
        let mut workers = start_all(&supervisor(), &[spec]).unwrap();
        text_of(&directory.join("stdout.log")).await;
        workers.stop_by(signal, PATIENCE).await;
        let text = text_of(&directory.join("stdout.log")).await;
        assert_eq!(text, format!("ready\nsaved {expected}\n"), "{name}");
    }
}

#[tokio::test]
async fn a_wrapper_does_not_swallow_the_signal() {
    let directory = tempfile::tempdir().unwrap();
    let run = r#"python3 -c "$PROGRAM""#;
    let forwards = "import os, signal, subprocess, sys\n\
                    child = subprocess.Popen(['python3', '-c', os.environ['PROGRAM']])\n\
                    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))\n\
                    sys.exit(child.wait())\n";
    // As `conda run`: Python, a shell, and the program.
    let calls =
        "import subprocess\nsubprocess.call(['sh', '-c', 'python3 -c \"$PROGRAM\"; exit 3'])\n";
    type Start = fn(&Path, &str) -> WorkerSpec;
    let wrappers: [(&str, Start, String); 5] = [
        ("a shell", shell, format!("{run}; exit 3")),
        ("a shell with a handler", shell, format!("trap 'exit 3' TERM; {run}; exit 4")),
        ("shells", shell, format!("(trap '' HUP; {run}; exit 3); exit 3")),
        ("a program that does not wait", python, calls.to_owned()),
        ("a program that forwards", python, forwards.to_owned()),
    ];
    for (name, wrapper, script) in wrappers {
        let directory = directory.path().join(name);
        let mut spec = wrapper(&directory, &script);
        spec.env.push(("PROGRAM".into(), SAVES.into()));
        let mut worker = supervisor().start(&spec).unwrap();
        let log = directory.join("stdout.log");
        text_of(&log).await;
        worker.stop(PATIENCE).await;
        assert_eq!(text_of(&log).await, "ready\nsaved SIGTERM\n", "{name}");
    }
}

/// The search for what is left of a worker reads all processes of the machine.
#[tokio::test]
async fn the_ends_of_many_workers_are_seen_with_one_search() {
    let directory = tempfile::tempdir().unwrap();
    let mut times = Vec::new();
    for count in [1, 64] {
        let specs: Vec<WorkerSpec> = (0..count)
            .map(|index| shell(&directory.path().join(index.to_string()), &format!("exit {index}")))
            .collect();
        let mut workers = start_all(&supervisor(), &specs).unwrap();
        for worker in workers.workers() {
            until_gone(worker.id().unwrap().try_into().unwrap()).await;
        }
        let start = Instant::now();
        let mut codes = Vec::new();
        while let Some((_, exit)) = workers.next_exit().await {
            codes.push(exit.ending);
        }
        times.push(start.elapsed());
        assert!((0..count).all(|it| codes.contains(&Ending::Code(it))), "{codes:?}");
    }
    assert!(times[1] < 16 * times[0], "{times:?}");
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
