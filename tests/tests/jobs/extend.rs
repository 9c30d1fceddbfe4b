//! Jobs that have ended and train further.

use std::fs;
use std::process::Output;

use serde_json::Value;
use steadfast_tests::{Job, Run, Scene, assert_refused};

/// Runs `steadfast extend` on the job of a data directory.
fn extend(scene: &Scene, data: &str, more: &[&str]) -> Output {
    scene.steadfast(["extend", "--data-dir", data].into_iter().chain(more.iter().copied()))
}

#[track_caller]
fn extended(scene: &Scene, data: &str, more: &[&str]) -> String {
    scene.shown(["extend", "--data-dir", data].into_iter().chain(more.iter().copied()))
}

/// I10: a job that was extended, twice, ends with the bits of one that had this length from the beginning, whatever
/// fails and however many processes there are.
#[test]
fn an_extended_job_has_the_bits_of_a_long_one() {
    let scene = Scene::new();
    let whole = Run::to_end(&scene, &Job::long(), "whole", &["--trainers", "1", "--pservers", "1"]);
    let short = Job::long().with("passes = 300", "passes = 60");
    let first = Run::to_end(&scene, &short, "parts", &["--trainers", "2", "--pservers", "2"]);
    assert_eq!(extended(&scene, "parts", &["--passes", "100"]), "160");
    let second = Run::to_end(&scene, &short, "parts", &["--trainers", "1", "--pservers", "3"]);
    assert_eq!(second["passes"], 160);
    assert_eq!(extended(&scene, "parts", &["--passes", "140"]), "300");
    // The job file may have the new length, too.
    let mut third =
        Run::start_in(&scene, &Job::long(), "parts", &["--trainers", "3", "--pservers", "2"]);
    let steps = first["steps"].as_u64().expect("a number") / 60;
    for (pass, role) in [(180, "pserver"), (220, "trainer"), (260, "master")] {
        third.until_step(pass * steps);
        third.kill_one(role);
    }
    let third = third.finish();
    for key in ["parameters_sha256", "passes", "steps", "examples", "loss", "metric"] {
        assert_eq!(third[key], whole[key], "{key}");
    }
    assert_ne!(first["parameters_sha256"], whole["parameters_sha256"]);
    scene.audited("parts");
}

/// S004-20, I4: an extended asynchronous job counts each record once in each pass.
#[test]
fn an_extended_asynchronous_job_counts_each_record_once() {
    let scene = Scene::new();
    let job = Job::small()
        .with("mode = \"sync\"", "mode = \"async\"")
        .with("[sync]\nlanes = 8\nmicro_batch = 16", "[async]\nbatch = 16");
    let first = Run::to_end(&scene, &job, "data", &[]);
    assert_eq!(extended(&scene, "data", &["--passes", "30"]), "60");
    let second = Run::to_end(&scene, &job, "data", &[]);
    let examples = |summary: &Value| summary["examples"].as_u64().expect("a number");
    assert_eq!((second["passes"].as_u64(), examples(&second)), (Some(60), 2 * examples(&first)));
    scene.audited("data");
}

/// S004-20, I4: an asynchronous job that is extended while it runs counts each record once in each pass.
#[test]
fn an_asynchronous_job_that_is_extended_while_it_runs_counts_each_record_once() {
    let scene = Scene::new();
    let job = Job::small()
        .with("passes = 30", "passes = 40")
        .with("mode = \"sync\"", "mode = \"async\"")
        .with("[sync]\nlanes = 8\nmicro_batch = 16", "[async]\nbatch = 4");
    let mut run = Run::start_in(&scene, &job, "data", &["--trainers", "2", "--pservers", "2"]);
    run.until_pass(5);
    assert_eq!(extended(&scene, "data", &["--passes", "10"]), "50");
    for (pass, role) in [(10, "pserver"), (14, "trainer"), (18, "master")] {
        run.until_pass(pass);
        run.kill_one(role);
    }
    let ended = run.finish();
    let once = Run::to_end(&scene, &job.with("passes = 40", "passes = 1"), "once", &[]);
    let examples = |summary: &Value| summary["examples"].as_u64().expect("a number");
    assert_eq!((ended["passes"].as_u64(), examples(&ended)), (Some(50), 50 * examples(&once)));
    scene.audited("data");
}

/// A job that counts steps is extended by steps.
#[test]
fn an_extended_job_ends_at_its_new_step() {
    let scene = Scene::new();
    let job = |steps| Job::small().with("passes = 30", &format!("steps = {steps}"));
    let whole = Run::to_end(&scene, &job(95), "whole", &[]);
    Run::to_end(&scene, &job(40), "parts", &[]);
    assert_eq!(extended(&scene, "parts", &["--steps", "55"]), "95");
    let ended = Run::to_end(&scene, &job(40), "parts", &[]);
    assert_eq!(ended["parameters_sha256"], whole["parameters_sha256"]);
}

/// What cannot be extended is refused with the reason, and stays as it is.
#[test]
fn a_job_that_cannot_be_extended_stays_as_it_is() {
    let scene = Scene::new();
    let mut run = Run::start_in(&scene, &Job::long(), "running", &[]);
    run.until_step(10);
    assert_refused(&extend(&scene, "running", &["--steps", "1"]), 2, "extend it with --passes");
    let most = u32::MAX.to_string();
    assert_refused(&extend(&scene, "running", &["--passes", &most]), 2, "too many passes");
    assert_eq!(run.finish()["passes"], 300);

    let ended = Run::to_end(&scene, &Job::small(), "ended", &[]);
    assert_refused(&extend(&scene, "ended", &["--steps", "1"]), 2, "extend it with --passes");
    assert_refused(&extend(&scene, "ended", &["--passes", "0"]), 2, "must be at least 1");
    assert_refused(&extend(&scene, "nowhere", &["--passes", "1"]), 3, "");
    assert_eq!(Run::to_end(&scene, &Job::small(), "ended", &[]), ended);
    fs::remove_dir_all(scene.path("ended/store/shards")).expect("it has checkpoints");
    assert_refused(&extend(&scene, "ended", &["--passes", "1"]), 3, "is missing");
    assert_eq!(Run::to_end(&scene, &Job::small(), "ended", &[]), ended);

    let early = Job::long()
        .with("base = 0.003", "base = 0.02")
        .with("fraction = 0.2", "fraction = 0.5\npatience = 4");
    Run::to_end(&scene, &early, "early", &[]);
    assert_refused(&extend(&scene, "early", &["--passes", "1"]), 2, "its evaluations ended it");
}
