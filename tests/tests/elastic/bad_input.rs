//! Each invalid input gets one clear error.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use steadfast_tests::{Scene, Signal, program, within};

use crate::job::{ElasticJob, LIMIT, stubborn};

#[track_caller]
fn fails(scene: &Scene, args: &[&str], code: i32, message: &str) {
    let ended = scene.start("fails", "steadfast", args).end(LIMIT);
    assert_eq!(ended.code, Some(code), "{args:?}: {}", ended.stderr);
    assert!(ended.stderr.contains(message), "{args:?}: {}", ended.stderr);
    assert_eq!(ended.stdout, "");
}

/// S003-20: impossible flags are refused before anything is started.
#[test]
fn impossible_flags_are_refused() {
    let scene = Scene::new();
    let run = |flags: &[&'static str]| [&["run"], flags, &["--", "true"]].concat();
    for (flags, message) in [
        (&["--standalone", "--nnodes", "3:2"][..], "3 is more than 2"),
        (&["--standalone", "--nnodes", "0:2"], "numbers from 1 to 2048"),
        (&["--standalone", "--nnodes", "2:3"], "--standalone is for a job of this node alone"),
        (&["--standalone", "--nproc-per-node", "0"], "a number from 1 to 4096"),
        (&["--standalone", "--nproc-per-node", "gpu"], "no GPU"),
        (&["--standalone", "--redirects", "3"], "--log-dir"),
        (&["--standalone", "--tee", "4"], "use 0 (none)"),
        (&["--standalone", "--start-method", "exec"], "forkserver"),
        (&["--standalone", "-m", "--no-python"], "cannot be used with"),
        (&["--standalone", "--nproc-per-nod", "2"], "unexpected argument"),
        (&["--standalone", "--rdzv-endpoint", "a:1"], "cannot be used with"),
        (&["--standalone", "--quiet"], "--log-dir"),
        (&["--rdzv-id", "a/b", "--rdzv-endpoint", "a:1"], "letters, digits"),
        (&[], "--rdzv-endpoint"),
        (&["--standalone", "--address", "a:b"], "is not a port"),
        (&["--standalone", "--warm-workers", "1"], "--warm-workers is for a program that Python"),
        (&["--standalone", "--warm-imports", "torch"], "--warm-workers <N>"),
        (&["--standalone", "--nic", "no-such"], "there is no interface of this name"),
        (&["--standalone", "--nic", "lo", "--address", "a"], "both say where this node is reached"),
    ] {
        fails(&scene, &run(flags), 2, message);
    }
    fails(
        &scene,
        &["run", "--standalone", "--", "no-such-program"],
        3,
        "no program `no-such-program`",
    );
    fails(&scene, &["run", "--standalone"], 2, "<CMD>");
}

/// S003-20: what cannot be executed is known before a round begins, and is no failure of a worker.
#[test]
fn a_program_that_cannot_be_executed_is_refused_before_a_round_begins() {
    let scene = Scene::new();
    let write = |name: &str, content: &[u8], mode: u32| {
        let path = scene.write(name, content);
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path.display().to_string()
    };
    let mut foreign = fs::read(program("steadfast")).unwrap();
    foreign.truncate(4096);
    foreign[18] ^= 0x55;
    let directory = scene.directory().display().to_string();
    for (path, message) in [
        (write("plain", b"#!/bin/sh\n", 0o644), "no permission; use `chmod +x"),
        (write("lost", b"#!/no/such/sh\n", 0o755), "no program `/no/such/sh`"),
        (write("env", b"#!/usr/bin/env no-such\n", 0o755), "no program `no-such`"),
        (write("data", b"\x00\x01\x02", 0o755), "neither a program nor a script"),
        (write("foreign", &foreign, 0o755), "another kind of processor"),
        (directory, "it is a directory"),
        ("./missing.py".to_owned(), "no program `./missing.py`"),
    ] {
        let args = ["run", "--standalone", "--", &path];
        let ended = scene.start("refused", "steadfast", &args).end(LIMIT);
        assert_eq!(ended.code, Some(3), "{path}: {}", ended.stderr);
        assert!(ended.stderr.contains(message), "{path}: {}", ended.stderr);
        assert!(!ended.stderr.contains("round begins"), "{path}: {}", ended.stderr);
    }
}

/// A wrong name of the job is an error, not a wait without an end.
#[test]
fn an_agent_of_a_job_without_a_master_gives_up() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:1", &[]);
    let etcd = job.etcd.to_string();
    let flags = ["run", "--rdzv-endpoint", &etcd, "--rdzv-id", "other"];
    let args = [&flags[..], &["--start-timeout", "500ms", "--", "true"]].concat();
    fails(&scene, &args, 6, "no master of the job at `/jobs/other` in etcd answered within 500ms");
}

/// S003-1: agents that expect other numbers of nodes, or have the address of another, are refused.
#[test]
fn an_agent_that_does_not_belong_is_refused() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:3", &["--last-call", "100ms"]);
    let _agent = job.agent_of("a", &["--address", "127.0.0.1:21999"], &["sleep", "1000"]);
    job.until_running(1);
    let etcd = job.etcd.to_string();
    let run = |nodes: &'static str, address: &'static str| {
        let args = ["run", "--rdzv-endpoint", &etcd, "--rdzv-id", "job", "--nnodes", nodes];
        let args = [&args[..], &["--lease-ttl", "2s", "--address", address, "--", "true"]].concat();
        args.into_iter().map(str::to_owned).collect::<Vec<String>>()
    };
    for (args, message) in [
        (run("1:2", "127.0.0.1"), "the node expects 1 to 2 nodes, and the job 1 to 3"),
        (run("1:3", "127.0.0.1:21999"), "the address 127.0.0.1:21999 is that of node"),
    ] {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        fails(&scene, &args, 4, message);
    }
    job.until_running(1);
}

/// The exit code of an interrupted agent says by which signal.
#[test]
fn an_agent_that_is_interrupted_exits_with_128_and_the_number_of_the_signal() {
    let scene = Scene::new();
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let args = ["run", "--standalone", "--", "sh", "-c", "echo ready; exec sleep 1000"];
        let mut run = scene.start(&format!("run-{code}"), "steadfast", &args);
        within(LIMIT, "the worker runs", || run.stdout().contains("ready").then_some(()));
        run.signal(signal);
        assert_eq!(run.end(LIMIT).code, Some(code));
        scene.leaves_no_process();
    }
}

/// S003-26: SIGTERM reaches the workers. One that ignores it is killed after the grace period.
#[test]
fn a_worker_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let scene = Scene::new();
    let script = stubborn(&scene).display().to_string();
    let args = ["run", "--standalone", "--grace", "300ms", "--", "sh", &script];
    let mut run = scene.start("run", "steadfast", &args);
    within(LIMIT, "the worker runs", || run.stdout().contains("ready").then_some(()));
    run.signal(Signal::SIGTERM);
    assert_eq!(run.end(LIMIT).code, Some(143));
    scene.leaves_no_process();
}

/// A port that is taken is named with the flag that chooses another.
#[test]
fn a_port_that_is_taken_is_named() {
    let scene = Scene::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let args = ["run", "--standalone", "--admin-listen", &address, "--", "true"];
    fails(&scene, &args, 4, "choose another with --admin-listen");
    let args = ["rendezvous", "--rdzv-id", "j", "--nnodes", "1:1", "--listen", &address];
    fails(&scene, &args, 4, &address);
}
