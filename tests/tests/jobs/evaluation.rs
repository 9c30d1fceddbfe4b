//! Jobs whose course depends on evaluations: early stopping, and the best parameters.

use std::fs;
use std::path::Path;

use serde_json::Value;
use steadfast_tests::{Job, Run, Scene};

/// Returns a job that learns its training records by heart, so that its evaluations become worse. Its passes have so many
/// steps that a process can be killed in each of them.
fn overfitting(more: &str) -> Job {
    Job::long()
        .with("micro_batch = 16", "micro_batch = 2")
        .with("hidden = [32]", "hidden = [64]")
        .with("base = 0.003", "base = 0.02")
        .with("fraction = 0.2", &format!("fraction = 0.5\n{more}"))
}

/// Returns the names of the files of kept models in the store of a run.
fn kept(data: &Path) -> Vec<String> {
    let files = fs::read_dir(data.join("store")).expect("the run has a store");
    let names = files.flatten().map(|it| it.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("best-")).collect()
}

fn best_pass(summary: &Value) -> u64 {
    summary["best"]["pass"].as_u64().unwrap_or_else(|| panic!("{summary}"))
}

/// I10: where training ends, and which parameters are the best, depends neither on the number of processes nor on who
/// crashes.
#[test]
fn the_end_and_the_best_parameters_are_the_same_whatever_fails() {
    let scene = Scene::new();
    let job = overfitting("patience = 4\nkeep = \"best\"");
    let expected = Run::to_end(&scene, &job, "alone", &["--trainers", "1", "--pservers", "1"]);
    let (passes, best) = (expected["passes"].as_u64().unwrap(), best_pass(&expected));
    assert_eq!(passes, best + 4, "{expected}");
    assert!((2..300).contains(&passes), "{expected}");
    assert_eq!(expected["loss"], expected["best"]["loss"]);
    assert_eq!(kept(&scene.path("alone")), [""; 0]);

    let mut killed = Run::start_in(&scene, &job, "killed", &["--trainers", "3", "--pservers", "2"]);
    for (pass, role) in [(1, "trainer"), (best, "pserver"), (best + 1, "master")] {
        killed.until_pass(pass);
        killed.kill_one(role);
    }
    let found = killed.finish();
    for key in ["parameters_sha256", "passes", "steps", "best", "loss", "metric"] {
        assert_eq!(found[key], expected[key], "{key}");
    }
    assert_eq!(kept(&scene.path("killed")), [""; 0]);

    // The best parameters are those of a job of as many passes.
    let until = job.with("passes = 300", &format!("passes = {best}"));
    let whole = Run::to_end(&scene, &until, "until", &[]);
    assert_eq!(whole["parameters_sha256"], expected["parameters_sha256"]);
}

/// I10: how far the learning rate is reduced, and so each bit of the parameters, depends neither on the number of
/// processes nor on who crashes.
#[test]
fn a_plateau_reduces_the_learning_rate_in_the_same_steps_whatever_fails() {
    let scene = Scene::new();
    let plateau =
        "reduce_on_plateau = { factor = 0.5, patience = 2, cooldown = 1, min_rate = 1e-4 }";
    let job = overfitting(plateau).with("passes = 300", "passes = 40");
    let plain = overfitting("patience = 1000").with("passes = 300", "passes = 40");
    let plain = Run::to_end(&scene, &plain, "plain", &[]);
    let expected = Run::to_end(&scene, &job, "alone", &["--trainers", "1", "--pservers", "1"]);
    assert_ne!(plain["parameters_sha256"], expected["parameters_sha256"], "it was not reduced");

    let mut killed = Run::start_in(&scene, &job, "killed", &["--trainers", "3", "--pservers", "2"]);
    for (pass, role) in [(8, "trainer"), (14, "pserver"), (20, "master"), (27, "trainer")] {
        killed.until_pass(pass);
        killed.kill_one(role);
    }
    let found = killed.finish();
    for key in ["parameters_sha256", "passes", "steps", "best", "loss", "metric"] {
        assert_eq!(found[key], expected[key], "{key}");
    }
}

/// I10: evaluations in the middle of passes end training, and keep the best parameters, at the same step whatever fails.
#[test]
fn evaluations_between_passes_decide_the_same_whatever_fails() {
    let scene = Scene::new();
    let rules = "every_steps = 70\npatience = 4\nkeep = \"best\"\n\
                 reduce_on_plateau = { factor = 0.5, patience = 2 }";
    let job = overfitting(rules);
    let expected = Run::to_end(&scene, &job, "alone", &["--trainers", "1", "--pservers", "1"]);
    let (steps, best) = (expected["steps"].as_u64(), expected["best"]["version"].as_u64());
    let (steps, best) = (steps.unwrap(), best.unwrap());
    assert_eq!((steps, best % 70), (best + 4 * 70, 0), "{expected}");
    assert_eq!(kept(&scene.path("alone")), [""; 0]);

    let mut killed = Run::start_in(&scene, &job, "killed", &["--trainers", "3", "--pservers", "2"]);
    let last = expected["passes"].as_u64().unwrap();
    for (pass, role) in [(1, "trainer"), (last / 2, "pserver"), (last - 1, "master")] {
        killed.until_pass(pass);
        killed.kill_one(role);
    }
    let found = killed.finish();
    for key in ["parameters_sha256", "passes", "steps", "best", "loss", "metric"] {
        assert_eq!(found[key], expected[key], "{key}");
    }
    scene.audited("killed");

    // The parameters are those of a job of as many steps.
    let until = job.with("passes = 300", &format!("steps = {best}"));
    let whole = Run::to_end(&scene, &until, "until", &[]);
    assert_eq!(whole["parameters_sha256"], expected["parameters_sha256"]);
}

/// Passes between evaluations that do not divide all of them leave out no result.
#[test]
fn the_best_parameters_are_evaluated_after_the_last_pass_too() {
    let scene = Scene::new();
    let job = overfitting("every_passes = 4\nkeep = \"best\"").with("passes = 300", "passes = 6");
    let summary = Run::to_end(&scene, &job, "data", &[]);
    assert_eq!(summary["passes"], 6);
    // The last pass is evaluated although 4 does not divide 6.
    assert_eq!(best_pass(&summary), 6, "{summary}");
}

/// I10: a validation set of its own files is evaluated, and changes no bit of the parameters.
#[test]
fn held_out_files_are_evaluated_and_change_no_parameter() {
    let scene = Scene::new();
    let job = Job::small().with("fraction = 0.2", "fraction = 0.0");
    let alone = Run::to_end(&scene, &job, "alone", &[]);
    assert_eq!(alone["metric"], Value::Null);
    let data = scene.path("held-out.parquet");
    fs::copy(steadfast_tests::examples().join("data/digits.parquet"), &data).unwrap();
    let source = format!("source = ['{}']\nkeep = \"best\"", data.display());
    let evaluated =
        Run::to_end(&scene, &job.clone().with("fraction = 0.0", &source), "evaluated", &[]);
    assert!(evaluated["metric"].as_f64().unwrap() > 0.9, "{evaluated}");
    let last = evaluated["best"]["pass"] == evaluated["passes"];
    assert_eq!(evaluated["parameters_sha256"] == alone["parameters_sha256"], last, "{evaluated}");
    let plain = job.with("fraction = 0.0", &format!("source = ['{}']", data.display()));
    let plain = Run::to_end(&scene, &plain, "plain", &["--trainers", "3", "--pservers", "2"]);
    assert_eq!(plain["parameters_sha256"], alone["parameters_sha256"]);
}

/// Without patience, a job trains to its last pass, and may keep the best parameters nevertheless.
#[test]
fn the_best_parameters_are_the_model_of_a_job_that_trains_to_its_end() {
    let scene = Scene::new();
    let job = overfitting("keep = \"best\"\nmonitor = \"metric\"\ngoal = \"max\"");
    let short = job.with("passes = 300", "passes = 40");
    let summary = Run::to_end(&scene, &short, "data", &[]);
    assert_eq!(summary["passes"], 40);
    assert!(best_pass(&summary) < 40, "{summary}");
    assert_eq!(summary["metric"], summary["best"]["metric"]);
    let text = scene.audited("data");
    assert!(text.contains("the final parameters are those of the best evaluation"), "{text}");

    // An export is the model, unless the last parameters are asked for; and never another file in its place.
    let export = |more: &[&str]| {
        let mut command = scene.command(&steadfast_tests::program("steadfast"));
        command.args(["checkpoint", "export", "--data-dir", "data", "--to", "exported", "--force"]);
        command.args(more).output().unwrap()
    };
    let sha256 = |output: &std::process::Output| {
        Value::from(String::from_utf8_lossy(&output.stdout).trim_end())
    };
    let model = Path::new(summary["model"].as_str().unwrap());
    assert_eq!(sha256(&export(&[])), summary["parameters_sha256"]);
    assert_eq!(fs::read(scene.path("exported")).unwrap(), fs::read(model).unwrap());
    let last = export(&["latest"]);
    assert!(last.status.success() && sha256(&last) != summary["parameters_sha256"], "{last:?}");
    for change in [|model: &Path| fs::write(model, "x"), |model: &Path| fs::remove_file(model)] {
        change(model).unwrap();
        let refused = export(&[]);
        assert!(!refused.status.success(), "{refused:?}");
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(text.contains("`latest` in place of an id exports the last parameters"), "{text}");
    }
}
