//! Optimizers with groups of parameters, and schedules, in whole jobs.

use std::fs;
use std::path::Path;

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

/// Returns the digits job with a rule of its own, which uses the norms of parameters, and an average of the parameters.
fn with_text_and_average(job: Job) -> Job {
    let rule = "kind = 'rule'\n\
        rule = \"\"\"\n\
        m = b1*m + (1 - b1)*g\n\
        v = b2*v + (1 - b2)*g**2\n\
        u = m/(1 - b1**t) / (sqrt(v/(1 - b2**t)) + 1e-6) + wd*p\n\
        p -= lr * where(norm(p)*norm(u) > 0, norm(p)/norm(u), 1) * u\n\
        \"\"\"\n\
        states = ['m', 'v']\n\
        constants = { b1 = 0.9, b2 = 0.999 }\n\
        weight_decay = 0.01\n\
        groups = [{ parameters = ['*.bias'], weight_decay = 0, learning_rate = 0.5 }]\n\
        [average]\n\
        decay = 0.99\n\
        start_step = 100";
    job.with("kind = \"adam\"", rule)
}

/// Returns the bytes of the file with the averages of the parameters.
fn average(summary: &Value) -> Vec<u8> {
    let model = summary["model"].as_str().expect("a finished job has a model");
    let path = Path::new(model).with_file_name("average.safetensors");
    fs::read(path).expect("the average is readable")
}

/// I10, S004-48: a rule of the job file with norms of parameters, and the average of the parameters, have the same bits
/// for any number of processes and after kills. Evaluations are of the average.
#[test]
fn a_rule_of_the_job_file_and_an_average_have_the_same_bits_whatever_fails() {
    let scene = Scene::new();
    let job = with_text_and_average(Job::long());
    let expected = Run::to_end(&scene, &job, "alone", &["--trainers", "1", "--pservers", "1"]);
    let mut killed = Run::start_in(&scene, &job, "killed", &["--trainers", "3", "--pservers", "3"]);
    for (step, role) in [(300, "pserver"), (900, "trainer"), (1500, "master")] {
        killed.until_step(step);
        killed.kill_one(role);
    }
    let killed = killed.finish();
    for key in ["parameters_sha256", "loss", "metric"] {
        assert_eq!(killed[key], expected[key], "{key}");
    }
    let averages = [average(&killed), average(&expected)];
    assert!(averages[0] == averages[1], "the averages differ");
    let model = fs::read(expected["model"].as_str().unwrap()).unwrap();
    assert!(averages[0] != model, "the average is that of many steps");
    // The rule is LAMB but for groups, which have their own trust ratio there.
    let lamb = "kind = 'lamb'\nweight_decay = 0.01\n\
        groups = [{ parameters = ['*.bias'], weight_decay = 0, learning_rate = 0.5 }]\n\
        [average]\ndecay = 0.99\nstart_step = 100";
    let lamb = Run::to_end(&scene, &Job::long().with("kind = \"adam\"", lamb), "lamb", &[]);
    assert_eq!(lamb["parameters_sha256"], expected["parameters_sha256"]);
}

/// An asynchronous job has an average, too; best parameters are those of the average that was evaluated.
#[test]
fn an_average_is_evaluated_and_kept() {
    let scene = Scene::new();
    let job = with_text_and_average(Job::small());
    let asynchronous = job
        .clone()
        .with("mode = \"sync\"", "mode = \"async\"")
        .with("[sync]\nlanes = 8\nmicro_batch = 16", "[async]\nbatch = 16");
    let ended = Run::to_end(&scene, &asynchronous, "async", &[]);
    assert_ne!(average(&ended), fs::read(ended["model"].as_str().unwrap()).unwrap());
    let plain = Run::to_end(&scene, &job, "plain", &[]);
    let keeping = job.with("[evaluation]", "[evaluation]\nkeep = \"best\"");
    let kept = Run::to_end(&scene, &keeping, "kept", &[]);
    assert_ne!(tensors(&kept), tensors(&plain), "the kept model is an average");
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
