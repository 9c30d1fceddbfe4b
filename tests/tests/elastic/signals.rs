//! Signals: those that end a program, and those that are passed on to workers.

use std::fs;

use steadfast_tests::{EtcdServer, Process, Scene, Signal, program, within};

use crate::job::LIMIT;

/// A program that needs its other process to save when it is asked to end.
const SAVES: &str = r#"
import os, signal, sys, time
ask, answer = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(ask[1])
    while os.read(ask[0], 1):
        os.write(answer[1], b"data")
    os._exit(0)
os.close(answer[1])
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
signal.signal(signal.SIGUSR1, lambda *_: print("SIGUSR1", os.environ["RANK"], flush=True))
print("ready", flush=True)
while not received and not os.path.exists("finish"):
    time.sleep(0.01)
if received:
    time.sleep(0.3)
    os.write(ask[1], b"x")
    print("saved" if os.read(answer[0], 4) else "lost", *received, flush=True)
"#;

/// Starts a command of `steadfast` with an empty directory for temporary files.
fn start(scene: &Scene, name: &str, args: &[&str]) -> Process {
    let temporary = scene.path("tmp");
    fs::create_dir_all(&temporary).unwrap();
    let mut command = scene.command(&program("steadfast"));
    command.args(args).env("TMPDIR", temporary);
    Process::start(scene.directory(), name, &mut command)
}

#[track_caller]
fn leaves_nothing(scene: &Scene) {
    scene.leaves_no_process();
    let left: Vec<_> = fs::read_dir(scene.path("tmp")).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// S003-26: whatever ends an agent, its workers save within the grace period, with all the processes that they need.
#[test]
fn workers_save_after_any_signal_that_ends_their_agent() {
    let scene = Scene::new();
    let script = scene.write("saves.py", SAVES).display().to_string();
    let wrapped = format!("python3 {script}; exit 3");
    for (signal, code) in [
        (Signal::SIGTERM, 143),
        (Signal::SIGINT, 130),
        (Signal::SIGHUP, 129),
        (Signal::SIGQUIT, 131),
    ] {
        for command in [&["python3", &script][..], &["sh", "-c", &wrapped]] {
            let name = format!("run-{code}-{}", command.len());
            let args = [&["run", "--standalone", "--"], command].concat();
            let mut run = start(&scene, &name, &args);
            within(LIMIT, "the worker runs", || run.stdout().contains("ready").then_some(()));
            run.signal(signal);
            // A terminal that is closed often says so twice.
            if signal == Signal::SIGHUP {
                run.signal(signal);
            }
            let ended = run.end(LIMIT);
            assert_eq!(ended.code, Some(code), "{}", ended.stderr);
            assert!(ended.stdout.contains("saved SIGTERM"), "{signal}: {}", ended.stdout);
            leaves_nothing(&scene);
        }
    }
}

#[test]
fn a_second_signal_ends_an_agent_at_once_and_leaves_nothing() {
    let scene = Scene::new();
    let script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.1; done";
    let args = ["run", "--standalone", "--grace", "1h", "--", "sh", "-c", script];
    let mut run = start(&scene, "run", &args);
    within(LIMIT, "the worker runs", || run.stdout().contains("ready").then_some(()));
    run.signal(Signal::SIGQUIT);
    within(LIMIT, "the worker is asked", || run.stdout().contains("asked").then_some(()));
    run.signal(Signal::SIGTERM);
    assert_eq!(run.end(LIMIT).code, Some(143));
    leaves_nothing(&scene);
}

/// Schedulers warn by these signals. They end no program that does not handle them.
#[test]
fn sigusr1_reaches_the_workers_that_handle_it_and_ends_nothing() {
    let scene = Scene::new();
    let script = scene.write("saves.py", SAVES).display().to_string();
    let shell = "case $RANK in 0) exec python3 \"$0\" ;; *) echo ready; \
                 until [ -e finish ]; do sleep 0.05; done ;; esac";
    let args = ["run", "--standalone", "--nproc-per-node", "2", "--", "sh", "-c", shell, &script];
    let mut run = start(&scene, "run", &args);
    within(LIMIT, "the workers run", || (run.stdout().matches("ready").count() == 2).then_some(()));
    run.signal(Signal::SIGUSR1);
    within(LIMIT, "the signal arrives", || run.stdout().contains("SIGUSR1 0").then_some(()));
    run.signal(Signal::SIGUSR2);
    within(LIMIT, "the other is refused", || run.stderr().contains("SIGUSR2").then_some(()));
    scene.write("finish", "");
    let ended = run.end(LIMIT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    leaves_nothing(&scene);
}

#[test]
fn an_agent_under_nohup_and_its_workers_ignore_a_closed_terminal() {
    let scene = Scene::new();
    let steadfast = program("steadfast").display().to_string();
    let shell = "grep SigIgn /proc/self/status; until [ -e finish ]; do sleep 0.05; done";
    let mut command = scene.command("nohup".as_ref());
    command.args([&steadfast, "run", "--standalone", "--", "sh", "-c", shell]);
    let mut run = Process::start(scene.directory(), "nohup", &mut command);
    within(LIMIT, "the worker runs", || run.stdout().contains("SigIgn").then_some(()));
    run.signal(Signal::SIGHUP);
    scene.write("finish", "");
    let ended = run.end(LIMIT);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let mask = ended.stdout.trim().rsplit('\t').next().unwrap().to_owned();
    assert_eq!(u64::from_str_radix(&mask, 16).unwrap() & 0xffff, 1, "{}", ended.stdout);
}

/// Servers drain, and notices do not concern them.
#[test]
fn servers_drain_after_sighup_and_sigquit_and_not_after_sigusr1() {
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let url = etcd.url();
    let job = "name = \"job\"\nkind = \"elastic\"\n[nodes]\nmin = 1\nmax = 1\n";
    let job = scene.write("job.toml", job).display().to_string();
    let listen = "127.0.0.1:0";
    let master = ["--job", "job", "--job-file", &job, "--etcd-endpoints", &url];
    let pserver = ["--job", "other", "--etcd-endpoints", &url];
    let rendezvous = ["rendezvous", "--rdzv-id", "j", "--nnodes", "1", "--listen", listen];
    let served = ["etcd", "--listen", listen, "--data-dir", "etcd-data"];
    for signal in [Signal::SIGHUP, Signal::SIGQUIT] {
        for (program_name, args, is_up) in [
            ("steadfast-master", &master[..], "acts"),
            ("steadfast-pserver", &pserver, ""),
            ("steadfast-trainer", &pserver, ""),
            ("steadfast", &rendezvous, "agents join"),
            ("steadfast", &served, ""),
        ] {
            let name = format!("{program_name}-{}-{signal}", args[0]);
            let mut process = scene.start(&name, program_name, args);
            within(LIMIT, &format!("{name} has started"), || {
                let handles = handles_signals(&process);
                (handles && process.stderr().contains(is_up)).then_some(())
            });
            process.signal(Signal::SIGUSR1);
            process.signal(Signal::SIGUSR2);
            process.signal(signal);
            let ended = process.end(LIMIT);
            assert_eq!(ended.code, Some(0), "{name}: {}", ended.stderr);
        }
    }
}

/// Returns whether a process has its handlers.
fn handles_signals(process: &Process) -> bool {
    let path = format!("/proc/{}/status", process.pid());
    let status = fs::read_to_string(path).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    let mask = u64::from_str_radix(mask.trim(), 16).unwrap_or(0);
    [Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGTERM]
        .iter()
        .all(|it| mask & (1 << (*it as i32 - 1)) != 0)
}
