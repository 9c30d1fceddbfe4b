//! Records on which the model ends the process that computes them.

use std::fs;

use serde_json::{Value, json};
use steadfast_tests::{Job, Run, Scene, program};

/// The record that ends processes, counted from 1 without the header.
const BAD: usize = 1234;

const PASSES: u64 = 3;
const RECORDS: u64 = 2000;

/// Returns a job whose model ends its process on a record like `end`, or ignores the record.
fn job(scene: &Scene, end: &str) -> Job {
    let (data, file) = files(scene);
    let job = without_evaluation(end);
    job.with(&data, &file)
}

/// Returns a job whose model does so on a held-out record.
fn evaluating_job(scene: &Scene, end: &str, settings: &str) -> Job {
    let (_, file) = files(scene);
    let evaluation = format!("[evaluation]\nsource = [\"{file}\"]\n{settings}\n[checkpoint]");
    without_evaluation(end).with("[checkpoint]", &evaluation)
}

/// Returns the names of a file of the examples, and of one whose record [`BAD`] ends processes.
fn files(scene: &Scene) -> (String, String) {
    let data = steadfast_tests::examples().join("data/linear.csv");
    let text = fs::read_to_string(&data).expect("the example has data");
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let (features, _) = lines[BAD].rsplit_once(',').expect("a record has a label");
    lines[BAD] = format!("{features},666");
    let file = scene.write("records.csv", &(lines.join("\n") + "\n"));
    (data.display().to_string(), file.display().to_string())
}

fn without_evaluation(end: &str) -> Job {
    Job::example("own-model")
        .with("passes = 30", &format!("passes = {PASSES}"))
        .with("kind = \"huber\"", "kind = \"fragile\"")
        .with("{ delta = 0.5 }", &format!("{{ end = \"{end}\" }}"))
        .with("base = 0.1", "base = 0.01")
        .with("[evaluation]\nfraction = 0.2", "[checkpoint]\nevery = \"1s\"")
}

fn run(scene: &Scene, job: &Job, data: &str, trainers: &str) -> Value {
    let trainer = program("fragile-trainer").display().to_string();
    let more = ["--trainer-bin", &trainer, "--trainers", trainers];
    let ended = Run::start_in(scene, job, data, &more).end();
    let summary = ended.summary();
    // 10: something was discarded.
    let code = if summary["discarded"]["tasks"] == 0 { 0 } else { 10 };
    assert_eq!((ended.code, &summary["state"]), (Some(code), &json!("finished")), "{ended:?}");
    summary
}

/// Checks that the one record was left out of each pass, and that the audit knows.
#[track_caller]
fn check(scene: &Scene, summary: &Value, data: &str, how: &str) {
    assert_eq!(summary["examples"], json!(PASSES * (RECORDS - 1)), "{summary}");
    let discarded = &summary["discarded"];
    assert_eq!((&discarded["tasks"], &discarded["times"]), (&json!(1), &json!(PASSES)));
    let listed = &discarded["listed"][0];
    assert_eq!(listed["records"][0]["first"], json!(BAD - 1), "{listed}");
    assert_eq!(listed["records"][0]["records"], json!(1), "{listed}");
    assert!(listed["reason"].as_str().is_some_and(|it| it.contains(how)), "{listed}");
    scene.audited(data);
}

/// F9, I7: however the process ends, and whatever the number of trainers, the job goes on without the record, with the
/// bits of a job to which the record adds nothing.
#[test]
fn a_record_that_ends_its_process_is_left_out_and_the_bits_are_those_without_it() {
    let scene = Scene::new();
    let expected = run(&scene, &job(&scene, "never"), "never", "2");
    assert_eq!(expected["discarded"]["tasks"], json!(0));
    for (end, trainers, how) in
        [("abort", "2", "SIGABRT"), ("segfault", "1", "SIGSEGV"), ("exit", "3", "exit status: 3")]
    {
        let summary = run(&scene, &job(&scene, end), end, trainers);
        assert_eq!(summary["parameters_sha256"], expected["parameters_sha256"], "{end}");
        check(&scene, &summary, end, how);
    }
}

/// F9, I7: a trainer whose model does not return ends, and the record is found.
#[test]
fn a_record_on_which_the_model_hangs_is_left_out_and_the_bits_are_those_without_it() {
    let scene = Scene::new();
    let expected = run(&scene, &job(&scene, "never"), "never", "2");
    let job =
        job(&scene, "hang").with("[checkpoint]", "[tasks]\ndeadline = \"1s\"\n\n[checkpoint]");
    let summary = run(&scene, &job, "hang", "2");
    assert_eq!(summary["parameters_sha256"], expected["parameters_sha256"]);
    check(&scene, &summary, "hang", "longer than 1s");
}

/// F9, I7: a held-out record that ends processes, however it does so, is left out of evaluations, whether they follow the last step, go on
/// beside steps or come between them, and the parameters are those of a job whose evaluations do no harm.
#[test]
fn a_held_out_record_that_ends_its_process_is_left_out_of_evaluations() {
    let scene = Scene::new();
    for (mode, settings, end, how) in [
        ("sync", "", "abort", "SIGABRT"),
        ("sync", "patience = 3\n\n[tasks]\ndeadline = \"1s\"\n", "hang", "longer than 1s"),
        ("async", "", "exit", "exit status: 3"),
    ] {
        let job = |end| {
            let job = evaluating_job(&scene, end, settings);
            job.with("mode = \"sync\"", &format!("mode = \"{mode}\""))
        };
        let data = format!("{mode}{}", settings.len());
        let summary = run(&scene, &job(end), &data, "2");
        let discarded = &summary["discarded"];
        assert_eq!((&discarded["tasks"], &discarded["times"]), (&json!(1), &json!(0)));
        let listed = &discarded["listed"][0];
        assert_eq!(listed["records"][0]["first"], json!(BAD - 1), "{listed}");
        assert!(listed["reason"].as_str().is_some_and(|it| it.contains(how)), "{listed}");
        assert_eq!(
            (&listed["held_out"], &listed["records"][0]["records"]),
            (&json!(true), &json!(1))
        );
        scene.audited(&data);
        assert_eq!(summary["examples"], json!(PASSES * RECORDS), "{summary}");
        if mode == "sync" {
            let expected = run(&scene, &job("never"), &format!("{data}-never"), "2");
            assert_eq!(summary["parameters_sha256"], expected["parameters_sha256"]);
        }
    }
}

/// F9, I6: in an asynchronous job every other record counts once in each pass.
#[test]
fn an_asynchronous_job_leaves_out_the_record_that_ends_its_process_and_no_other() {
    let scene = Scene::new();
    let job = job(&scene, "abort").with("mode = \"sync\"", "mode = \"async\"");
    let summary = run(&scene, &job, "data", "2");
    check(&scene, &summary, "data", "SIGABRT");
}
