//! Curves, read by TensorBoard itself.

use std::fs;
use std::process::Command;

use serde_json::Value;
use steadfast_tests::{Job, Run, Scene, python};

/// Prints the steps and the values of each curve in a TensorBoard directory.
const READ: &str = r#"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [(it.step, it.value) for it in events.Scalars(tag)] for tag in tags}))
"#;

/// Two masters write the curves of one job, the second one from where the first one died; no step is
/// written twice, and the last values equal the result of the job.
#[test]
fn tensorboard_reads_one_curve_however_many_masters_wrote_it() {
    let packages = ["tensorboard==2.20.0", "setuptools==80.9.0"];
    let Some(python) = python("tensorboard", &packages) else { return };
    let scene = Scene::new();
    let directory = scene.path("curves");
    let more = ["--tensorboard", directory.to_str().expect("it is text")];
    let mut run = Run::start(&scene, &Job::long(), &more);
    run.until_step(60);
    let acting = run.status().expect("it answers")["master"]["epoch"].clone();
    run.kill_one("master");
    run.until("another master acts", |it| it["master"]["epoch"] != acting);
    let result = run.finish();

    let files = fs::read_dir(&directory).expect("it was made").count();
    assert!(2 <= files, "{files} files");
    let script = scene.write("read.py", READ);
    let output = Command::new(python).arg(script).arg(&directory).output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let curves: Value = serde_json::from_slice(&output.stdout).expect("it prints JSON");
    for (tag, curve) in curves.as_object().expect("there are curves") {
        let steps: Vec<u64> =
            curve.as_array().unwrap().iter().map(|it| it[0].as_u64().unwrap()).collect();
        assert!(steps.is_sorted(), "{tag}: {steps:?}");
    }
    let last = |tag: &str| curves[tag].as_array().and_then(|it| it.last().cloned());
    assert!(last("train/loss").is_some() && last("train/examples_per_second").is_some());
    let last = last("held_out/loss").expect("there are held-out records");
    assert_eq!(last[0], result["steps"], "{curves}");
    let (written, is) = (last[1].as_f64().unwrap(), result["loss"].as_f64().unwrap());
    assert!((written - is).abs() <= 1e-6 * is.abs(), "{written} {is}");
}
