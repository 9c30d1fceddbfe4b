//! User errors: each is reported in one clear line that names the object and the solution, exits with the
//! code of its kind, and leaves no process behind.

use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use steadfast_tests::{Ended, EtcdServer, Job, Run, Scene, etcdctl, examples, send_garbage};

const INVALID: Option<i32> = Some(2);
const CONFLICT: Option<i32> = Some(4);
const UNAVAILABLE: Option<i32> = Some(6);
const FINISHED_WITH_LOSSES: Option<i32> = Some(10);

/// Timeout for the exit of a process after a user error.
const SOON: Duration = Duration::from_secs(15);

/// Returns a linear regression job on a CSV file.
fn linear(csv: &Path) -> Job {
    let data = examples().join("data/linear.csv");
    Job::example("linear")
        .with(&data.display().to_string(), &csv.display().to_string())
        .with("passes = 30", "passes = 2")
        .with("fraction = 0.2", "fraction = 0.0")
}

fn in_mode(job: Job, mode: &str) -> Job {
    match mode {
        "sync" => job,
        _ => job
            .with("mode = \"sync\"", "mode = \"async\"")
            .with("[sync]\nlanes = 4\nmicro_batch = 25", "[async]\nbatch = 25"),
    }
}

/// Writes the generated records with one line replaced (line 0 is the header).
fn csv_with(scene: &Scene, line: usize, text: &str) -> std::path::PathBuf {
    let whole = fs::read_to_string(examples().join("data/linear.csv")).expect("it exists");
    let mut changed = String::new();
    for (number, old) in whole.lines().enumerate() {
        let new = if number == line { text } else { old };
        writeln!(changed, "{new}").expect("a string takes any text");
    }
    scene.write("records.csv", changed)
}

/// Runs a job that must be rejected with one line that contains all `words`.
#[track_caller]
fn refused(scene: &Scene, job: &Job, more: &[&str], code: Option<i32>, words: &[&str]) -> Ended {
    let ended = Run::start(scene, job, more).end();
    check(&ended, code, words);
    // Stdout has one JSON object for scripts, however a run ends.
    let found = ended.summary();
    assert_eq!(found["state"], "error", "{found}");
    assert!(found["reason"].is_string(), "{found}");
    scene.leaves_no_process();
    ended
}

#[track_caller]
fn check(ended: &Ended, code: Option<i32>, words: &[&str]) {
    let stderr = &ended.stderr;
    assert_eq!(ended.code, code, "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    let errors = ended.errors();
    assert_eq!(errors.len(), 1, "{stderr}");
    for word in words {
        assert!(errors[0].contains(word), "`{word}` is not in: {}", errors[0]);
    }
}

#[test]
fn every_error_of_a_job_file_is_reported_together_with_the_nearest_known_key() {
    let scene = Scene::new();
    let job = Job::example("linear")
        .with("passes = 30", "pases = 30")
        .with("name = \"linear\"", "name = \"no good\"")
        .with("base = 0.1", "base = -0.1")
        .with("kind = \"sgd\"", "kind = \"sgd\"\nmomentun = 0.5");
    let ended = Run::start(&scene, &job, &[]).end();
    assert_eq!(ended.code, INVALID);
    let errors = ended.errors().join("\n");
    for words in ["linear.toml", "`pases`", "`passes`", "no good", "-0.1", "momentun`", "momentum`"]
    {
        assert!(errors.contains(words), "{words}: {errors}");
    }
    assert!(4 <= ended.errors().len(), "{errors}");
    assert!(!scene.path("data").exists(), "nothing was created");
    scene.leaves_no_process();
}

#[test]
fn a_missing_job_file_is_named() {
    let scene = Scene::new();
    let ended = Run::start_file(&scene, &scene.path("none.toml"), "data", &[]).end();
    check(&ended, INVALID, &["none.toml", "no such file"]);
}

#[test]
fn an_unknown_kind_of_model_is_rejected_with_the_nearest_known_one() {
    let scene = Scene::new();
    let job = Job::example("linear").with("kind = \"linear\"", "kind = \"liner\"");
    refused(&scene, &job, &[], INVALID, &["`liner`", "`linear`"]);
}

#[test]
fn a_perceptron_without_hidden_layers_is_rejected_with_an_example() {
    let scene = Scene::new();
    let job = Job::example("linear").with("kind = \"linear\"", "kind = \"mlp\"");
    refused(&scene, &job, &[], INVALID, &["`model.hidden`", "mlp", "[64, 32]"]);
}

#[test]
fn an_unknown_column_is_named_with_its_file() {
    let scene = Scene::new();
    let job = Job::example("linear").with("\"x*\"", "\"x0\", \"x77\"");
    refused(&scene, &job, &[], INVALID, &["linear.csv", "no column `x77`"]);
}

/// S004-15
#[test]
fn a_pattern_that_matches_nothing_is_rejected() {
    let scene = Scene::new();
    let job = linear(&scene.path("none-*.csv"));
    refused(&scene, &job, &[], INVALID, &["nothing matches", "none-*.csv", "check the path"]);
}

#[test]
fn a_record_with_the_wrong_number_of_fields_is_named_with_its_line() {
    let scene = Scene::new();
    let job = linear(&csv_with(&scene, 101, "1,2,3"));
    let words = ["records.csv", "line 102", "3 fields instead of 7", "separator"];
    refused(&scene, &job, &[], INVALID, &words);
}

#[test]
fn a_truncated_parquet_file_is_named() {
    let scene = Scene::new();
    let whole = fs::read(examples().join("data/digits.parquet")).expect("it exists");
    let path = scene.write("cut.parquet", &whole[..whole.len() / 2]);
    let data = examples().join("data/digits.parquet").display().to_string();
    let job = Job::small().with(&data, &path.display().to_string());
    refused(&scene, &job, &[], INVALID, &["cut.parquet", "Parquet"]);
}

#[test]
fn an_unreachable_etcd_is_named_within_seconds() {
    let scene = Scene::new();
    let started = Instant::now();
    let words = ["http://127.0.0.1:1", "does not answer", "is it running"];
    refused(&scene, &Job::small(), &["--etcd", "http://127.0.0.1:1"], UNAVAILABLE, &words);
    let words = [&words[..], &["--etcd-start-timeout"]].concat();
    for server in ["master", "pserver", "trainer"] {
        let endpoints = ["--job", "digits", "--etcd-endpoints", "http://127.0.0.1:1"];
        let settings = [&endpoints[..], &["--etcd-start-timeout", "1s"]].concat();
        let program = format!("steadfast-{server}");
        let ended = scene.start(server, &program, &settings).end(SOON);
        check(&ended, UNAVAILABLE, &words);
    }
    assert!(started.elapsed() < SOON);
}

#[test]
fn a_port_in_use_is_named_with_the_flag_that_chooses_another() {
    let scene = Scene::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("loopback has free ports");
    let address = taken.local_addr().expect("it is bound").to_string();
    let job = Job::small().write(&scene).display().to_string();
    let store = scene.path("store").display().to_string();
    let of_master = ["--job", "digits", "--job-file", &job, "--store", &store];
    let of_others = ["--job", "digits"];
    let servers: [(&str, &[&str], &str); 5] = [
        ("master", &of_master, "--listen"),
        ("master", &of_master, "--admin-listen"),
        ("pserver", &of_others, "--listen"),
        ("pserver", &of_others, "--admin-listen"),
        ("trainer", &of_others, "--admin-listen"),
    ];
    for (server, args, flag) in servers {
        let args = [args, &[flag, &address]].concat();
        let ended = scene.start(server, &format!("steadfast-{server}"), &args).end(SOON);
        let way_out = format!("choose another with {flag}");
        check(&ended, CONFLICT, &[&address, "in use", &way_out]);
    }
}

/// S004-14
#[test]
fn a_second_job_of_the_same_name_with_another_spec_is_rejected() {
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let url = etcd.url();
    let mut run = Run::start(&scene, &Job::long(), &["--etcd", &url]);
    // This run uses another etcd, so request the status there.
    run.at(&url);
    run.until_step(1);
    let other = Job::long().with("seed = 7", "seed = 8");
    let ended = Run::start_in(&scene, &other, "other", &["--etcd", &url]).end();
    check(&ended, CONFLICT, &["digits", "another"]);
    assert_eq!(run.finish()["state"], "finished", "the first one was not disturbed");

    let ended = Run::start_in(&scene, &other, "other", &["--etcd", &url]).end();
    check(&ended, CONFLICT, &["digits", "another"]);
}

#[test]
fn an_unknown_key_of_a_settings_file_is_rejected_with_the_nearest_known_one() {
    let scene = Scene::new();
    scene.write("settings.toml", "leese_ttl = \"3s\"\n");
    for server in ["master", "pserver", "trainer"] {
        let args = ["--job", "digits", "--config", "settings.toml"];
        let ended = scene.start(server, &format!("steadfast-{server}"), &args).end(SOON);
        check(&ended, INVALID, &["settings.toml", "`leese_ttl`", "`lease_ttl`"]);
    }
}

#[test]
fn all_errors_of_flags_are_reported_together() {
    let scene = Scene::new();
    let args = ["--job", "a/b", "--lease-ttl", "3", "--lisen", "x"];
    let ended = scene.start("pserver", "steadfast-pserver", &args).end(SOON);
    assert_eq!(ended.code, INVALID);
    let errors = ended.errors();
    assert_eq!(errors.len(), 3, "{errors:?}");
    for (words, way_out) in [("`a/b`", "letters"), ("`3`", "30s"), ("`--lisen`", "`--listen`")] {
        let found = errors.iter().any(|it| it.contains(words) && it.contains(way_out));
        assert!(found, "{words}: {errors:?}");
    }
}

/// A record with an invalid label costs its task, in every pass, and nothing else.
fn a_bad_label_loses_only_its_task(mode: &str) {
    let scene = Scene::new();
    let path = csv_with(&scene, 76, "0.1,0.2,0.3,0.4,0.5,0.6,oops");
    let job = in_mode(linear(&path), mode);
    let ended = Run::start(&scene, &job, &[]).end();
    scene.leaves_no_process();
    let summary = ended.summary();
    assert_eq!(summary["state"], "finished", "{summary}");
    // 40 tasks of 50 records in two passes, without the bad task.
    assert_eq!(summary["examples"], 2 * 39 * 50, "{summary}");
    let discarded = &summary["discarded"];
    assert_eq!((&discarded["tasks"], &discarded["times"]), (&json!(1), &json!(2)), "{summary}");
    assert_eq!(discarded["listed"][0]["passes"], json!([[0, 1]]), "{summary}");
    let list = discarded["list"].as_str().expect("the whole list is in the store");
    let list = std::fs::read_to_string(list.trim_start_matches("file://")).expect("it exists");
    assert_eq!(list.lines().count(), 1, "{list}");
    for task in discarded["listed"].as_array().expect("it is a list") {
        let reason = task["reason"].as_str().expect("it has a reason");
        for words in ["records.csv", "record 75", "column `y`", "`oops`"] {
            assert!(reason.contains(words), "{words}: {reason}");
        }
    }
    assert_eq!(ended.code, FINISHED_WITH_LOSSES, "{}", ended.stderr);
}

/// S004-8, S004-10, S004-12, F9
#[test]
fn a_bad_label_loses_only_its_task_in_synchronous_mode() {
    a_bad_label_loses_only_its_task("sync");
}

/// S004-8, S004-10, S004-12
#[test]
fn a_bad_label_loses_only_its_task_in_asynchronous_mode() {
    a_bad_label_loses_only_its_task("async");
}

/// I7: the number of steps does not depend on whether a bad task was already known. Each pass has one
/// good task of one step and one bad task, which comes last in some of the passes.
#[test]
fn a_lane_whose_last_task_is_bad_ends_with_its_last_good_record() {
    let scene = Scene::new();
    let path = csv_with(&scene, 76, "0.1,0.2,0.3,0.4,0.5,0.6,oops");
    let job = linear(&path)
        .with("records_per_task = 50", "records_per_task = 1000")
        .with("lanes = 4\nmicro_batch = 25", "lanes = 1\nmicro_batch = 1000")
        .with("passes = 2", "passes = 8");
    let summary = Run::start(&scene, &job, &[]).end().summary();
    assert_eq!(summary["examples"], 8 * 1000, "{summary}");
    assert_eq!(summary["steps"], 8, "{summary}");
}

/// A record with an invalid number in a held-out task costs the evaluation that task, and nothing else.
///
/// S004-8, I12
fn a_bad_held_out_record_loses_only_its_task(mode: &str) {
    let scene = Scene::new();
    // Of five tasks with 50 records each, task 4 is the first one held out.
    let path = csv_with(&scene, 4 * 50 + 7, "0.1,0.2,0.3,0.4,0.5,0.6,NaN");
    let job = in_mode(linear(&path), mode).with("fraction = 0.0", "fraction = 0.2");
    let ended = Run::start(&scene, &job, &[]).end();
    scene.leaves_no_process();
    let summary = ended.summary();
    assert_eq!(summary["state"], "finished", "{summary}");
    assert!(summary["model"].is_string() && summary["metric"].is_f64(), "{summary}");
    assert_eq!(summary["discarded"]["tasks"], 1, "{summary}");
    let task = &summary["discarded"]["listed"][0];
    assert_eq!((&task["task"], &task["held_out"]), (&json!(4), &json!(true)), "{summary}");
    let reason = task["reason"].as_str().expect("it has a reason");
    assert!(reason.contains("records.csv") && reason.contains("record 206"), "{reason}");
    assert_eq!(ended.code, FINISHED_WITH_LOSSES, "{}", ended.stderr);
}

#[test]
fn a_bad_held_out_record_loses_only_its_task_of_the_evaluation_in_synchronous_mode() {
    a_bad_held_out_record_loses_only_its_task("sync");
}

#[test]
fn a_bad_held_out_record_loses_only_its_task_of_the_evaluation_in_asynchronous_mode() {
    a_bad_held_out_record_loses_only_its_task("async");
}

/// S004-13
#[test]
fn a_job_with_only_bad_tasks_fails_with_that_reason() {
    for mode in ["sync", "async"] {
        let scene = Scene::new();
        let text = format!("x0,x1,y\n{}", "1,2,oops\n".repeat(40));
        let job = linear(&scene.write("records.csv", text))
            .with("records_per_task = 50", "records_per_task = 5");
        let ended = Run::start(&scene, &in_mode(job, mode), &[]).end();
        scene.leaves_no_process();
        assert_eq!(ended.code, Some(1), "{mode}: {}{}", ended.stdout, ended.stderr);
        let summary = ended.summary();
        assert_eq!(summary["state"], "failed", "{mode}: {summary}");
        let reason = summary["reason"].as_str().expect("a failure has a reason");
        assert!(reason.contains("given up"), "{mode}: {reason}");
        let discarded = summary["discarded"]["listed"].as_array().expect("it is a list");
        let is_named = |task: &Value| task["reason"].as_str().is_some_and(|it| it.contains("oops"));
        assert!(!discarded.is_empty() && discarded.iter().all(is_named), "{mode}: {summary}");
    }
}

/// No later step would be finite either, so training stops, and existing checkpoints are kept.
///
/// F41, I11
#[test]
fn a_job_that_diverges_fails_with_the_reason_and_keeps_only_what_is_finite() {
    for mode in ["sync", "async"] {
        let scene = Scene::new();
        let job = in_mode(Job::example("linear"), mode).with("base = 0.1", "base = 1e6");
        let ended = Run::start(&scene, &job, &[]).end();
        scene.leaves_no_process();
        assert_eq!(ended.code, Some(1), "{mode}: {}{}", ended.stdout, ended.stderr);
        let summary = ended.summary();
        let reason = summary["reason"].as_str().expect("a failure has a reason");
        assert!(reason.contains("not finite"), "{mode}: {reason}");
        assert!(reason.contains("learning rate"), "{mode}: {reason}");
        assert_eq!(summary["model"], Value::Null, "{mode}: {summary}");
    }
}

#[test]
fn bytes_that_are_not_a_request_end_no_process() {
    let scene = Scene::new();
    let mut run = Run::start(&scene, &Job::endless(), &[]);
    run.until_step(1);
    let before = scene.processes();
    let endpoint = run.endpoint();
    let mut ports = vec![endpoint.trim_start_matches("http://").to_owned()];
    for prefix in ["master/addr", "ps/", "trainers/"] {
        let prefix = format!("/jobs/digits/{prefix}");
        let values = etcdctl(&endpoint, &["get", "--prefix", &prefix, "--print-value-only"]);
        for line in values.lines().filter(|it| !it.is_empty()) {
            let member: Value = serde_json::from_str(line).expect("members are JSON");
            let known = ["address", "admin"].map(|it| member[it].as_str().map(str::to_owned));
            ports.extend(known.into_iter().flatten());
        }
    }
    assert_eq!(ports.len(), 1 + 2 + 2 * 2 + 2, "{ports:?}");
    ports.iter().for_each(|port| send_garbage(port));
    assert_eq!(scene.processes(), before);
    let now = run.until("it has a step", |it| it["version"].is_u64());
    run.until_step(now["version"].as_u64().unwrap_or_default() + 100);
    assert_eq!(scene.processes(), before, "a process was restarted");
}
