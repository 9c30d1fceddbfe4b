//! Trainers in Rust: a model of one's own, and a loop of one's own.

use std::fs;
use std::time::Duration;

use steadfast_tests::{Job, Process, Run, Scene, program};

/// Timeout of a command.
pub const BOUND: Duration = Duration::from_secs(100);

/// S004-36: a loop that sets, reads and saves the parameters gives the bits of the model alone, also if its trainers
/// are killed.
#[test]
fn a_loop_of_ones_own_trains_what_its_model_would() {
    let scene = Scene::new();
    let trainer = |name| program(name).display().to_string();
    let (own_model, own_loop) = (trainer("own-model"), trainer("own-loop"));
    let job = Job::example("own-model").with("passes = 30", "passes = 100");
    let expected = Run::to_end(&scene, &job, "model", &["--trainer-bin", &own_model]);

    let file = job.write(&scene).display().to_string();
    let saved = scene.path("saved.safetensors");
    let mut command = scene.command(&program("steadfast"));
    command.args(["local", &file, "--data-dir", "loop", "--trainer-bin", &own_loop]);
    command.env("MODEL_TO", &saved);
    let ended = Process::start(scene.directory(), "loop", &mut command).end(BOUND);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let model = expected["model"].as_str().expect("a finished job has a model");
    let model = fs::read(model).expect("the model is readable");
    assert!(model == fs::read(saved).expect("the loop wrote its model"), "the models differ");
    let logs = fs::read_dir(scene.path("loop/logs")).expect("the run has logs");
    let logs = logs.flatten().map(|it| fs::read_to_string(it.path()).unwrap_or_default());
    assert!(logs.into_iter().any(|log| log.contains("bias after ")));

    let mut killed = Run::start_in(&scene, &job, "killed", &["--trainer-bin", &own_loop]);
    for step in [20, 200, 400] {
        killed.until_step(step);
        killed.kill_one("own-loop");
    }
    assert_eq!(killed.finish()["parameters_sha256"], expected["parameters_sha256"]);
}
