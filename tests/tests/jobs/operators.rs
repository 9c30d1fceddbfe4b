//! Operator commands of `steadfast`.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use steadfast_tests::{Certificates, Cluster, Job, Scene, Signal, eventually};

fn stdout_of(cluster: &Cluster<'_>, args: &[&str]) -> String {
    let output = cluster.steadfast(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).expect("it prints text")
}

fn json(cluster: &Cluster<'_>, command: &str) -> Value {
    serde_json::from_str(&stdout_of(cluster, &[command, "-o", "json"])).expect("it prints JSON")
}

/// I12: the process that blocks a job is identified through the whole wait chain.
#[test]
fn why_names_the_trainer_that_blocks_a_step() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let cluster = Cluster::secured(&scene, &Job::endless(), 1, "30s", &certificates);
    let why = || stdout_of(&cluster, &["why"]);
    let waiting = cluster.steadfast(&["why"]);
    let text = String::from_utf8_lossy(&waiting.stdout).into_owned();
    assert!(text.contains("the job waits for\n  an acting master: "), "{text}");
    let _master = cluster.master("master");
    let waits = "slot 0 has no pserver";
    eventually("it waits for a pserver", || why().contains(waits).then_some(()));
    let _pserver = cluster.pserver("pserver");
    eventually("it waits for trainers", || {
        why().contains("no trainer is registered").then_some(())
    });
    let trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    cluster.until_step(20);
    assert!(why().contains("not blocked"), "{}", why());

    let stopped = &trainers[1];
    stopped.signal(Signal::SIGSTOP);
    let output = eventually("a stopped trainer is named, and no other", || {
        let output = why();
        assert!(!output.contains(&trainers[0].admin), "{output}");
        // Shortly after the last step the job counts as slow, not blocked, because of the same trainer.
        (output.contains(&stopped.admin) && output.starts_with("version ")).then_some(output)
    });
    stopped.signal(Signal::SIGCONT);
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines[0].starts_with("version ") && lines[0].ends_with("waits for"), "{output}");
    assert!(lines[1].starts_with("  slot 0 (pserver 127.0.0.1:"), "{output}");
    assert!(lines[2].starts_with("    lane") && lines[2].contains("does not answer"), "{output}");
}

/// F12: a trainer with a tenth of the CPU time is named while the job continues, and no other trainer is.
#[test]
fn why_names_the_trainer_that_slows_all_steps() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, "30s");
    let why = || stdout_of(&cluster, &["why"]);
    let _members = [cluster.master("master"), cluster.pserver("pserver")];
    let trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    cluster.until("both have lanes", |it| {
        let lanes = it["trainers"].as_array().into_iter().flatten().map(|it| &it["lanes"]);
        lanes.filter(|it| it.as_array().is_some_and(|it| !it.is_empty())).count() == 2
    });
    assert!(why().contains("not blocked"), "{}", why());

    let slow = &trainers[1];
    let found = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for _ in 0..60 {
                if found.load(Ordering::Relaxed) {
                    return;
                }
                slow.signal(Signal::SIGSTOP);
                std::thread::sleep(Duration::from_millis(900));
                slow.signal(Signal::SIGCONT);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        eventually("the slow trainer is named, and no other", || {
            let text = why();
            assert!(!text.contains(&trainers[0].admin), "{text}");
            let is_named = text.contains("each step waits for") && text.contains(&slow.admin);
            found.store(is_named, Ordering::Relaxed);
            is_named.then_some(())
        });
    });
}

/// Lists show the content of etcd, the number of slots changes while a job runs, and the doctor finds
/// errors.
#[test]
fn a_job_is_inspected_and_scaled() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let cluster = Cluster::secured(&scene, &Job::endless(), 1, "2s", &certificates);
    let (_master, _pserver) = (cluster.master("master"), cluster.pserver("pserver"));
    let mut trainer = cluster.trainer("trainer");
    cluster.until_step(5);
    let roles: Vec<Value> = json(&cluster, "members").as_array().unwrap().clone();
    let roles: Vec<&str> = roles.iter().map(|it| it["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["master", "pserver", "trainer"]);
    assert!(stdout_of(&cluster, &["tasks"]).starts_with("task      state"));
    let well = json(&cluster, "doctor");
    let findings = well.as_array().expect("they are a list");
    // The etcd of a test may run without authentication.
    let is_ok = |it: &Value| {
        it["verdict"] == "ok" || it["what"].as_str().is_some_and(|it| it.starts_with("etcd "))
    };
    assert!(findings.iter().all(is_ok), "{well}");
    assert!(6 <= findings.len(), "{well}");

    let _second = cluster.pserver("second");
    stdout_of(&cluster, &["scale", "--slots", "2"]);
    cluster
        .until("there are two slots", |it| it["slots"].as_array().is_some_and(|it| it.len() == 2));
    let slots = eventually("both are held", || {
        let slots = json(&cluster, "slots");
        slots
            .as_array()
            .is_some_and(|it| it.iter().all(|it| it["address"].is_string()))
            .then_some(slots)
    });
    assert_eq!(slots.as_array().map(Vec::len), Some(2), "{slots}");

    trainer.signal(Signal::SIGSTOP);
    let ill = cluster.steadfast(&["doctor"]);
    trainer.signal(Signal::SIGCONT);
    let text = String::from_utf8_lossy(&ill.stdout).into_owned();
    assert!(text.lines().any(|it| !it.starts_with("  ") && it.contains("trainer ")), "{text}");
    trainer.signal(Signal::SIGTERM);
    trainer.end();
}

/// Shell completions are available, and each command has a manual page.
#[test]
fn completions_and_a_manual_are_generated() {
    let scene = Scene::new();
    let directory = scene.directory().display().to_string();
    let run = |args: &[&str]| {
        let output = scene.command(&steadfast_tests::program("steadfast")).args(args).output();
        let output = output.expect("the program starts");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("it prints text")
    };
    assert!(run(&["completions", "bash"]).contains("etcd-users"));
    run(&["man", "--dir", &directory]);
    let page = std::fs::read_to_string(scene.path("steadfast-why.1")).expect("it exists");
    assert!(page.contains("waits for which"), "{page}");
}

/// S004-1: with `--wait-after-completion` a process stays after the end of its job until SIGTERM, holds
/// nothing and is not ready, so a supervisor does not restart it.
#[test]
fn a_process_that_waits_after_completion_holds_no_lease() {
    let scene = Scene::new();
    let store = scene.path("store").display().to_string();
    let cluster = Cluster::new(&scene, &Job::small(), 1, "2s");
    let cluster = cluster.with_store(&store, &[("STEADFAST_WAIT_AFTER_COMPLETION", "true")]);
    let mut members = vec![cluster.master("master"), cluster.pserver("pserver")];
    members.extend([cluster.pserver("spare"), cluster.trainer("trainer")]);
    assert_eq!(cluster.result()["state"], "finished");
    for member in &members {
        eventually("it says why it is not ready", || {
            let stdout_of = member.ask("/readyz")?;
            (stdout_of.code == 503 && stdout_of.body.contains("the job is over")).then_some(())
        });
        assert_eq!(member.ask("/healthz").map(|it| it.code), Some(200));
    }
    let keys = &cluster.keys;
    eventually("no lease is held", || {
        let members = [keys.ps_prefix(), keys.trainers_prefix(), keys.master_addr()];
        members.iter().all(|prefix| cluster.list(prefix).is_empty()).then_some(())
    });
    for member in &mut members {
        member.signal(Signal::SIGTERM);
        assert_eq!(member.end().code, Some(0));
    }
}

/// F40: a drained process hands its work to another one, and the job continues; `drain` rejects processes
/// that are not part of the job.
#[test]
fn a_drained_process_is_replaced_at_once() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let cluster = Cluster::secured(&scene, &Job::endless(), 1, "5s", &certificates);
    let mut master = cluster.master("master");
    cluster.until("it acts", |_| true);
    let (mut pserver, mut trainer) = (cluster.pserver("pserver"), cluster.trainer("trainer-0"));
    cluster.until_step(5);
    let others = [cluster.master("standby"), cluster.pserver("spare"), cluster.trainer("other")];
    cluster.until("two train", |it| it["trainers"].as_array().is_some_and(|it| it.len() == 2));

    let unknown = cluster.steadfast(&["drain", "slot", "7"]);
    let said_no = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(said_no.contains("no member `slot 7`; its members: master, slot 0"), "{said_no}");
    let list = json(&cluster, "members");
    let of_trainer = list.as_array().unwrap().iter().find(|it| it["admin"] == trainer.admin);
    let id = of_trainer.unwrap()["name"].as_str().unwrap();
    let output = stdout_of(&cluster, &["drain", "trainer", &id[..12]]);
    assert!(output.ends_with("has left; other trainers continue its work\n"), "{output}");
    for (name, member) in [("slot 0", &mut pserver), ("master", &mut master)] {
        let output = stdout_of(&cluster, &["drain", name]);
        assert!(output.starts_with(&format!("{name} has left; ")), "{output}");
        assert_eq!(member.end().code, Some(0));
    }
    assert_eq!(trainer.end().code, Some(0));
    let at = cluster.until("it trains again", |it| it["state"] == "training");
    cluster.until_step(at["version"].as_u64().unwrap() + 5);
    drop(others);
}

/// `top` shows the job in a terminal and restores the screen on exit.
#[test]
fn top_shows_the_job_until_a_key_is_pressed() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, "2s");
    let (_master, _pserver) = (cluster.master("master"), cluster.pserver("pserver"));
    let _trainer = cluster.trainer("trainer");
    cluster.until_step(5);
    let refused = cluster.steadfast(&["top"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("needs a terminal"), "{refused:?}");

    let script = scene.write("terminal.py", TERMINAL);
    let (top, mut python) = (cluster.tool(&["top"]), scene.command(Path::new("python3")));
    python
        .arg(script)
        .arg("digits,second,quits,events,generation,lanes")
        .arg(top.get_program())
        .args(top.get_args());
    let output = python.output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a program in a terminal, and checks what it shows.
const TERMINAL: &str = include_str!("../terminal.py");
