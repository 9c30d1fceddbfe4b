//! Jobs that start from a model that was trained before.

use std::fs;
use std::process::Output;

use safetensors::SafeTensors;
use steadfast_tests::{Job, Run, Scene};

use crate::optimizers::tensors;

/// Returns a job that starts from a file, with other settings of the section.
fn starting(job: Job, file: &str, settings: &str) -> Job {
    let section = format!("[start]\nfile = '{file}'\n{settings}\n[optimizer]");
    job.with("[optimizer]", &section)
}

/// I10, S004-48: a job that starts from a file has the same bits for any number of processes and after kills, also of
/// those that come before its first checkpoint; a frozen layer ends as it stands in the file, in either mode.
#[test]
fn a_job_goes_on_from_the_model_of_another_whatever_fails() {
    let scene = Scene::new();
    let first = Job::small().with("hidden = [16]", "hidden = [32]");
    let first = Run::to_end(&scene, &first, "first", &[]);
    let file = first["model"].as_str().expect("a finished job has a model");
    let frozen = "[optimizer]\ngroups = [{ parameters = ['layers.0.*'], frozen = true }]";
    let job = |job: Job| {
        starting(job, file, "new = ['layers.1.*']")
            .with("[optimizer]", frozen)
            .with("seed = 7", "seed = 8")
    };
    let alone = ["--trainers", "1", "--pservers", "1"];
    let expected = Run::to_end(&scene, &job(Job::long()), "alone", &alone);
    let mut killed =
        Run::start_in(&scene, &job(Job::long()), "killed", &["--trainers", "3", "--pservers", "2"]);
    for (step, role) in [(1, "pserver"), (5, "trainer"), (300, "pserver"), (900, "master")] {
        killed.until_step(step);
        killed.kill_one(role);
    }
    assert_eq!(killed.finish()["parameters_sha256"], expected["parameters_sha256"]);
    let asynchronous = job(Job::small().with("hidden = [16]", "hidden = [32]"))
        .with("mode = \"sync\"", "mode = \"async\"")
        .with("[sync]\nlanes = 8\nmicro_batch = 16", "[async]\nbatch = 16");
    let asynchronous = Run::to_end(&scene, &asynchronous, "async", &[]);
    for ended in [&expected, &asynchronous] {
        let same: Vec<String> = tensors(ended)
            .into_iter()
            .zip(tensors(&first))
            .filter(|(own, of_file)| own == of_file)
            .map(|((name, _), _)| name)
            .collect();
        assert_eq!(same, ["layers.0.bias", "layers.0.weight"]);
    }
}

/// Whatever does not fit is reported before anything is computed, with the way out.
#[test]
fn a_file_that_does_not_fit_ends_the_job_with_what_to_do() {
    let scene = Scene::new();
    let first = Run::to_end(&scene, &Job::small(), "first", &[]);
    let file = first["model"].as_str().expect("a finished job has a model");
    let pickled = scene.write("net.pt", "PK\u{3}\u{4} a file of torch.save");
    let pickled = pickled.to_str().expect("a path in UTF-8");
    for (name, job, expected) in [
        (
            "missing",
            starting(Job::small(), "/nowhere.safetensors", ""),
            "/nowhere.safetensors does not exist",
        ),
        ("pickled", starting(Job::small(), pickled, ""), "is no safetensors file"),
        (
            "shape",
            starting(Job::small().with("hidden = [16]", "hidden = [32]"), file, ""),
            "`layers.0.bias` is [16], not [32]",
        ),
        (
            "deeper",
            starting(Job::small().with("hidden = [16]", "hidden = [16, 10]"), file, ""),
            "the file of `start` lacks `layers.2.weight`, `layers.2.bias`; map their names",
        ),
        (
            "pattern",
            starting(Job::small(), file, "new = ['head.*']"),
            "`head.*` in `start.new` matches no parameter",
        ),
        (
            "stars",
            starting(Job::small(), file, "names = { 'a*' = 'b' }"),
            "must have one `*` on both sides",
        ),
    ] {
        let ended = Run::start_in(&scene, &job, name, &[]).end();
        assert_ne!(ended.code, Some(0), "{name}");
        assert!(ended.stderr.contains(expected), "{name}: {}", ended.stderr);
    }
}

/// A file that did not fit is replaced by one that does, and the same command goes on with it; a job that has progress
/// does not need its file any more.
#[test]
fn a_corrected_file_at_the_same_place_is_used() {
    let scene = Scene::new();
    let first = Run::to_end(&scene, &Job::small(), "first", &[]);
    let model = first["model"].as_str().expect("a finished job has a model");
    let wider = Job::small().with("hidden = [16]", "hidden = [32]");
    let other = Run::to_end(&scene, &wider, "other", &[]);
    let file = scene.path("start.safetensors");
    fs::copy(other["model"].as_str().expect("a path"), &file).expect("it can be copied");
    let job = starting(Job::small(), file.to_str().expect("a path in UTF-8"), "");
    assert_ne!(Run::start_in(&scene, &job, "data", &[]).end().code, Some(0));
    fs::copy(model, &file).expect("it can be copied");
    let ended = Run::start_in(&scene, &job, "data", &[]).end();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("the file of `start` has changed"), "{}", ended.stderr);
    fs::remove_file(&file).expect("it exists");
    assert_eq!(Run::to_end(&scene, &job, "data", &[]), ended.summary());
}

/// Exports the last checkpoint of a run, with the state of the optimizer; returns both files.
fn exported(scene: &Scene, data: &str, more: &[&str]) -> (Output, [String; 2]) {
    let files = ["model", "optimizer"].map(|it| scene.path(&format!("{data}.{it}")));
    let [model, optimizer] = files.map(|it| it.to_str().expect("a path in UTF-8").to_owned());
    let mut command = scene.command(&steadfast_tests::program("steadfast"));
    command.args(["checkpoint", "export", "--data-dir", data, "--to", &model]);
    command.args(["--optimizer", &optimizer]).args(more);
    (command.output().expect("the program starts"), [model, optimizer])
}

/// I10: the state of an optimizer that a job starts from has the same effect for any number of processes and after kills;
/// its number of updates is counted on.
#[test]
fn a_job_goes_on_with_the_optimizer_of_another_whatever_fails() {
    let scene = Scene::new();
    Run::to_end(&scene, &Job::small(), "first", &[]);
    let (done, [model, optimizer]) = exported(&scene, "first", &[]);
    assert!(done.status.success(), "{done:?}");
    let with_state = format!("optimizer = '{optimizer}'");
    let job = |settings: &str| {
        starting(Job::long().with("hidden = [32]", "hidden = [16]"), &model, settings)
    };
    let alone = ["--trainers", "1", "--pservers", "1"];
    let expected = Run::to_end(&scene, &job(&with_state), "alone", &alone);
    let anew = Run::to_end(&scene, &job(""), "anew", &alone);
    assert_ne!(expected["parameters_sha256"], anew["parameters_sha256"]);
    let more = ["--trainers", "3", "--pservers", "2"];
    let mut killed = Run::start_in(&scene, &job(&with_state), "killed", &more);
    for (step, role) in [(1, "pserver"), (5, "trainer"), (300, "pserver")] {
        killed.until_step(step);
        killed.kill_one(role);
    }
    assert_eq!(killed.finish()["parameters_sha256"], expected["parameters_sha256"]);
    let updates = |file: &str| -> u64 {
        let bytes = fs::read(file).expect("it was written");
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("it is a safetensors file");
        let metadata = header.metadata().clone().expect("it has metadata");
        metadata["updates"].parse().expect("a number")
    };
    let (done, [_, last]) = exported(&scene, "alone", &[]);
    assert!(done.status.success(), "{done:?}");
    let (_, [_, of_anew]) = exported(&scene, "anew", &[]);
    assert_eq!(updates(&last), updates(&optimizer) + updates(&of_anew));
    let again = exported(&scene, "alone", &[]).0;
    assert!(String::from_utf8_lossy(&again.stderr).contains("already exists"), "{again:?}");
    for (name, job, message) in [
        (
            "kind",
            starting(Job::small(), &model, &with_state)
                .with("kind = \"adam\"", "kind = \"momentum\""),
            "has the state of `adam`, and the optimizer of the job is",
        ),
        (
            "model",
            starting(Job::small(), &model, &format!("optimizer = '{model}'")),
            "has no state of an optimizer",
        ),
        (
            "missing",
            starting(Job::small(), &model, "optimizer = '/nowhere'"),
            "`start.optimizer`: ",
        ),
    ] {
        let ended = Run::start_in(&scene, &job, name, &[]).end();
        assert_ne!(ended.code, Some(0), "{name}");
        assert!(ended.stderr.contains(message), "{name}: {}", ended.stderr);
    }
}
