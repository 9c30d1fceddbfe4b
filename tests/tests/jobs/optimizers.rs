//! Optimizers with groups of parameters, and schedules, in whole jobs.

use std::fs;

use safetensors::SafeTensors;
use serde_json::Value;
use steadfast_tests::{Job, Run, Scene};

/// Returns the digits job with a frozen layer, biases without weight decay, and a chained schedule.
fn grouped(job: Job) -> Job {
    let groups = "[optimizer]\n\
        groups = [{ parameters = ['layers.0.*'], frozen = true }, \
        { parameters = ['layers.1.bias'], weight_decay = 0, learning_rate = 0.5 }]";
    job.with("[optimizer]", groups)
        .with("kind = \"adam\"", "kind = \"radam\"\ndecoupled = true\nweight_decay = 0.01")
        .with("schedule = \"cosine\"", "schedule = \"one-cycle\"")
        .with("warmup_steps = 20\n", "")
        .with("end = 0.0001", "factors = [{ schedule = 'step', every_steps = 100, gamma = 0.9 }]")
}

/// Returns the bytes of each tensor of a job's model, by name.
pub fn tensors(summary: &Value) -> Vec<(String, Vec<u8>)> {
    let path = summary["model"].as_str().expect("a finished job has a model");
    let bytes = fs::read(path).expect("the model is readable");
    let model = SafeTensors::deserialize(&bytes).expect("it is a safetensors file");
    let mut tensors: Vec<_> =
        model.tensors().into_iter().map(|(name, it)| (name, it.data().to_vec())).collect();
    tensors.sort();
    tensors
}

/// I10, S004-48: the settings of groups are those of the job for any number of processes and after kills.
#[test]
fn groups_of_parameters_give_the_same_bits_whatever_fails() {
    let scene = Scene::new();
    let job = grouped(Job::long());
    let expected = Run::to_end(&scene, &job, "alone", &["--trainers", "1", "--pservers", "1"]);
    let mut killed = Run::start_in(&scene, &job, "killed", &["--trainers", "3", "--pservers", "2"]);
    for (step, role) in [(300, "pserver"), (900, "trainer"), (1500, "master")] {
        killed.until_step(step);
        killed.kill_one(role);
    }
    assert_eq!(killed.finish()["parameters_sha256"], expected["parameters_sha256"]);
}

/// A frozen parameter keeps the bits with which it began, in either mode, and the others do not.
#[test]
fn a_frozen_parameter_keeps_its_initial_values() {
    let scene = Scene::new();
    let synchronous = grouped(Job::small());
    let asynchronous = synchronous
        .clone()
        .with("mode = \"sync\"", "mode = \"async\"")
        .with("[sync]\nlanes = 8\nmicro_batch = 16", "[async]\nbatch = 16");
    for (name, job) in [("sync", synchronous), ("async", asynchronous)] {
        let short = job.clone().with("passes = 30", "passes = 1");
        let [long, short] = [("long", job), ("short", short)].map(|(length, job)| {
            tensors(&Run::to_end(&scene, &job, &format!("{name}-{length}"), &[]))
        });
        let same: Vec<&str> = long
            .iter()
            .zip(&short)
            .filter(|(long, short)| long == short)
            .map(|(long, _)| long.0.as_str())
            .collect();
        assert_eq!(same, ["layers.0.bias", "layers.0.weight"], "{name}");
    }
}

/// A pattern without a parameter is reported before anything is computed, with the names of the model.
#[test]
fn a_group_of_no_parameter_ends_the_job_with_the_names_of_the_model() {
    let scene = Scene::new();
    let job = grouped(Job::small()).with("'layers.0.*'", "'layer.0.*'");
    let ended = Run::start(&scene, &job, &[]).end();
    assert_ne!(ended.code, Some(0));
    let expected = "`layer.0.*` in `optimizer.groups` matches no parameter that the optimizer updates; the model has \
                    `layers.0.weight`";
    assert!(ended.stderr.contains(expected), "{}", ended.stderr);
}
