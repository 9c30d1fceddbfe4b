//! Jobs whose settings change while they go on.

use std::fs;
use std::process::Output;

use serde_json::Value;
use steadfast_tests::{Job, Run, Scene, Signal, assert_refused};

/// Runs `steadfast change` on the job of a data directory, with a job file.
fn change(scene: &Scene, data: &str, job: &Job) -> Output {
    let file = scene.write("changed.toml", &job.text);
    scene.steadfast(["change", &file.display().to_string(), "--data-dir", data])
}

/// Changes the job; returns from which step on.
#[track_caller]
fn changed(scene: &Scene, data: &str, job: &Job) -> u64 {
    let output = change(scene, data, job);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).trim_end().parse().expect("a number")
}

#[track_caller]
fn extended(scene: &Scene, data: &str, more: [&str; 2]) {
    scene.shown(["extend", "--data-dir", data].into_iter().chain(more));
}

/// The settings of each part of a job.
const RATES: [&str; 3] = ["base = 0.003", "base = 0.001", "base = 0.0004"];

fn with_rate(job: Job, rate: &str) -> Job {
    job.with(RATES[0], rate)
}

/// I10: a job that is changed twice, and extended before and after, has the same bits for any number of processes and
/// whatever fails.
#[test]
fn a_changed_job_has_the_same_bits_whatever_fails() {
    let scene = Scene::new();
    let job = || Job::long().with("passes = 300", "passes = 40");
    let clipped =
        with_rate(job(), RATES[2]).with("kind = \"adam\"", "kind = \"adam\"\nclip_norm = 0.5");
    let mut found = Vec::new();
    for (data, trainers, pservers) in [("alone", "1", "1"), ("killed", "3", "2")] {
        let processes = ["--trainers", trainers, "--pservers", pservers];
        let first = Run::to_end(&scene, &job(), data, &processes);
        let second = with_rate(job(), RATES[1]);
        assert_eq!(Some(changed(&scene, data, &second)), first["steps"].as_u64());
        extended(&scene, data, ["--passes", "60"]);
        let second = finished(&scene, &second, data, &processes, 55);
        extended(&scene, data, ["--passes", "60"]);
        assert_eq!(Some(changed(&scene, data, &clipped)), second["steps"].as_u64());
        let third = finished(&scene, &clipped, data, &processes, 120);
        assert_eq!(third["passes"], 160);
        scene.audited(data);
        found.push(third);
    }
    for key in ["parameters_sha256", "passes", "steps", "examples", "loss", "metric"] {
        assert_eq!(found[0][key], found[1][key], "{key}");
    }
    let plain = Job::long().with("passes = 300", "passes = 160");
    let plain = Run::to_end(&scene, &plain, "plain", &[]);
    assert_ne!(plain["parameters_sha256"], found[0]["parameters_sha256"]);
}

/// Runs a job to its end; kills a process of each kind from some pass on, if it has several trainers.
fn finished(scene: &Scene, job: &Job, data: &str, processes: &[&str], pass: u64) -> Value {
    let mut run = Run::start_in(scene, job, data, processes);
    if processes[1] != "1" {
        for (number, role) in (0..).zip(["pserver", "trainer", "master"]) {
            run.until_pass(pass + 8 * number);
            run.kill_one(role);
        }
    }
    run.finish()
}

/// I10: a job that is changed and extended while it runs has the bits of one that was stopped at the same step, changed,
/// and started again; its processes are replaced with the job file that they were started with.
#[test]
fn a_job_that_is_changed_while_it_runs_has_the_bits_of_one_that_was_stopped() {
    let scene = Scene::new();
    let job = |steps: u64| Job::long().with("passes = 300", &format!("steps = {steps}"));
    let processes = ["--trainers", "3", "--pservers", "2"];
    let mut run = Run::start_in(&scene, &job(3000), "running", &processes);
    run.until_step(300);
    let from = changed(&scene, "running", &with_rate(job(3000), RATES[1]));
    assert!((300..2500).contains(&from), "{from}");
    run.until_step(from + 20);
    for role in ["master", "pserver", "trainer"] {
        run.kill_one(role);
    }
    run.until_step(from + 100);
    extended(&scene, "running", ["--steps", "400"]);
    let found = run.finish();
    assert_eq!(found["steps"], 3400);
    scene.audited("running");

    let alone = ["--trainers", "1", "--pservers", "1"];
    Run::to_end(&scene, &job(from), "stopped", &alone);
    let second = with_rate(job(from), RATES[1]);
    assert_eq!(changed(&scene, "stopped", &second), from);
    extended(&scene, "stopped", ["--steps", &(3400 - from).to_string()]);
    let expected = Run::to_end(&scene, &second, "stopped", &alone);
    for key in ["parameters_sha256", "passes", "steps", "examples", "loss", "metric"] {
        assert_eq!(found[key], expected[key], "{key}");
    }
    // The file that the job was started with is still one of the job.
    assert_eq!(Run::to_end(&scene, &job(3000), "running", &alone)["steps"], 3400);
}

/// A job that runs takes its checkpoints by other rules at once.
#[test]
fn a_job_that_runs_takes_checkpoints_by_its_new_rules() {
    let scene = Scene::new();
    let seldom = Job::endless().with("every_steps = 200", "every = \"1h\"");
    let mut run = Run::start_in(&scene, &seldom, "data", &[]);
    run.until_step(50);
    changed(
        &scene,
        "data",
        &Job::endless().with("every_steps = 200", "every_steps = 100\nkeep = 3"),
    );
    let first = run.status().expect("the master answers")["checkpoint"].clone();
    run.until("another checkpoint", |it| it["checkpoint"] != first);
    run.until("three checkpoints are kept", |_| {
        scene.shown(["checkpoint", "list", "--data-dir", "data"]).lines().count() == 4
    });
    run.signal(Signal::SIGTERM);
    run.end();
}

/// I10: a job that goes back to a checkpoint before a change trains again with the settings of that time.
#[test]
fn a_job_that_loses_its_last_checkpoint_repeats_steps_with_their_settings() {
    let scene = Scene::new();
    // There are checkpoints before the last one.
    let job = || {
        let short = Job::long().with("passes = 300", "passes = 40");
        short.with("every_steps = 200", "every_steps = 40")
    };
    let second = with_rate(job(), RATES[1]);
    let mut found = Vec::new();
    for data in ["whole", "damaged"] {
        Run::to_end(&scene, &job(), data, &[]);
        changed(&scene, data, &second);
        extended(&scene, data, ["--passes", "20"]);
        if data == "damaged" {
            let shards = fs::read_dir(scene.path("damaged/store/shards/digits"));
            let shards = shards.expect("shards exist").map(|it| it.unwrap());
            let newest = shards.max_by_key(|it| it.metadata().unwrap().modified().unwrap());
            fs::write(newest.expect("there is one").path(), "x").unwrap();
        }
        found.push(Run::to_end(&scene, &second, data, &[]));
    }
    assert_eq!(found[0]["parameters_sha256"], found[1]["parameters_sha256"]);
}

/// A job that its evaluations have ended goes on with more patience.
#[test]
fn more_patience_lets_a_job_go_on_that_its_evaluations_have_ended() {
    let scene = Scene::new();
    let patience = |most: u32| {
        Job::long()
            .with(RATES[0], "base = 0.02")
            .with("fraction = 0.2", &format!("fraction = 0.5\npatience = {most}"))
    };
    let first = Run::to_end(&scene, &patience(3), "data", &[]);
    assert_ne!(first["passes"], 300);
    changed(&scene, "data", &patience(1000));
    assert_eq!(Run::to_end(&scene, &patience(1000), "data", &[])["passes"], 300);
    scene.audited("data");
}

/// What makes another job is refused with the reason, and the job stays as it is.
#[test]
fn a_job_that_cannot_be_changed_stays_as_it_is() {
    let scene = Scene::new();
    let other = with_rate(Job::long(), RATES[1]);
    let mut run = Run::start_in(&scene, &Job::long(), "running", &[]);
    run.until_step(10);
    let model = other.with("hidden = [32]", "hidden = [8]");
    assert_refused(&change(&scene, "running", &model), 2, "`model` differs");
    assert_refused(&change(&scene, "running", &Job::long()), 2, "the settings that it has");
    run.until("the job was not disturbed", |it| it["generation"] == 1);
    run.finish();

    let ended = Run::to_end(&scene, &Job::small(), "ended", &[]);
    let model = Job::small().with("hidden = [16]", "hidden = [8]");
    assert_refused(&change(&scene, "ended", &model), 2, "`model` differs");
    let longer = Job::small().with("passes = 30", "passes = 40");
    assert_refused(&change(&scene, "ended", &longer), 2, "steadfast extend");
    assert_refused(&change(&scene, "ended", &Job::small()), 2, "the settings that it has");
    assert_refused(&change(&scene, "nowhere", &Job::small()), 3, "");
    assert_eq!(Run::to_end(&scene, &Job::small(), "ended", &[]), ended);
}
