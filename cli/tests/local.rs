//! Tests `steadfast local` and `steadfast status` as processes, with scripts in place of the programs of
//! the job.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::process::{Output, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use steadfast_common::records::keys::Keys;
use steadfast_coord::Etcd;

use support::{FakeMaster, Stage, all_exited, eventually};

/// One master, two pservers, two trainers.
const PROCESSES: usize = 5;

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

async fn put_result(etcd: &Etcd, discarded: Value) {
    let result = serde_json::json!({
        "state": "finished", "passes": 2, "steps": 44, "examples": 1000, "loss": 0.25,
        "metric": 0.5, "metric_name": "accuracy", "parameters_sha256": "ab",
        "model": "file:///tmp/model.safetensors", "discarded": discarded
    });
    etcd.put(&Keys::of_job("digits").result(), result.to_string().as_bytes()).await.unwrap();
}

#[tokio::test]
async fn the_command_of_a_finished_job_prints_its_summary_again() {
    let stage = Stage::new();
    let running = stage.start(&["--output", "json"]);
    let pids = stage.pids(PROCESSES).await;
    let etcd = stage.etcd().await;
    let fake = FakeMaster::default();
    let master = fake.start(&etcd).await;
    eventually(|| (3 <= fake.requests.load(Ordering::SeqCst)).then_some(())).await;
    put_result(&etcd, serde_json::json!({ "tasks": 0, "times": 0, "listed": [] })).await;
    stage.finish_processes();
    let output = running.end().await;
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let summary: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(summary["state"], "finished");
    assert_eq!(summary["model"], "/tmp/model.safetensors");
    assert_eq!(summary["steps"], 44);
    assert!(stderr(&output).contains("pass 2/2 · tasks 6/10"), "{}", stderr(&output));
    all_exited(&pids).await;
    master.abort();

    let again = stage.start(&["--output", "json"]).end().await;
    assert_eq!(again.status.code(), Some(0), "{}", stderr(&again));
    assert_eq!(stdout(&again), stdout(&output));
    assert_eq!(stage.pids(0).await.len(), PROCESSES, "nothing was started for it");
}

#[tokio::test]
async fn a_job_that_lost_data_ends_with_a_code_of_its_own() {
    let stage = Stage::new();
    let running = stage.start(&[]);
    let etcd = stage.etcd().await;
    stage.pids(PROCESSES).await;
    let task = serde_json::json!({
        "task": 3, "passes": [[0, 0]], "times": 1, "reason": "bad record", "records": [],
    });
    let lost = serde_json::json!({ "tasks": 1, "times": 1, "listed": [task] });
    put_result(&etcd, lost).await;
    stage.finish_processes();
    let output = running.end().await;
    assert_eq!(output.status.code(), Some(10));
    assert!(stdout(&output).contains("discarded  task 3 in pass 1: bad record"));
}

/// Puts the job of the stage, as a master does.
async fn put_job(etcd: &Etcd) {
    let spec = steadfast_common::job::job_file::parse(support::JOB).unwrap();
    let (format, store) = (steadfast_common::records::FORMAT, "file:///");
    let record = serde_json::json!({
        "format": format, "spec": spec, "digest": "", "store": store, "manifest": "",
    });
    let key = Keys::of_job("digits").job();
    etcd.put(&key, record.to_string().as_bytes()).await.unwrap();
}

/// A job without a checkpoint begins anew in any case, so its file may be corrected.
#[tokio::test]
async fn a_corrected_job_file_replaces_a_job_that_left_no_checkpoint() {
    let stage = Stage::new();
    let keys = Keys::of_job("digits");
    let running = stage.start(&[]);
    let etcd = stage.etcd().await;
    stage.pids(PROCESSES).await;
    put_job(&etcd).await;
    running.signal(Signal::SIGINT);
    running.end().await;

    fs::write(stage.path("job.toml"), format!("seed = 7\n{}", support::JOB)).unwrap();
    let running = stage.start(&[]);
    stage.pids(2 * PROCESSES).await;
    let etcd = stage.etcd().await;
    assert!(etcd.get(&keys.job()).await.unwrap().is_none(), "the earlier job is deleted");
    put_job(&etcd).await;
    etcd.put(&keys.checkpoint_latest(), b"\"any\"").await.unwrap();
    running.signal(Signal::SIGINT);
    let output = running.end().await;
    let said = "`seed` differs; the job file replaces the earlier one, which left no checkpoint";
    assert!(stderr(&output).contains(said), "{}", stderr(&output));

    let output = stage.start(&[]).end().await;
    assert_eq!(output.status.code(), Some(4), "with a checkpoint it is refused");
    assert!(stderr(&output).contains("exists with another spec"));
}

#[tokio::test]
async fn another_job_file_under_the_name_of_an_ended_job_is_refused() {
    let stage = Stage::new();
    let running = stage.start(&[]);
    let etcd = stage.etcd().await;
    stage.pids(PROCESSES).await;
    put_job(&etcd).await;
    put_result(&etcd, serde_json::json!({ "tasks": 0, "times": 0, "listed": [] })).await;
    stage.finish_processes();
    assert_eq!(running.end().await.status.code(), Some(0));

    fs::write(stage.path("job.toml"), format!("seed = 7\n{}", support::JOB)).unwrap();
    let output = stage.start(&[]).end().await;
    assert_eq!(output.status.code(), Some(4));
    assert!(stderr(&output).contains("exists with another spec"));
}

#[tokio::test]
async fn an_error_that_needs_user_action_ends_the_run_and_leaves_no_process() {
    let stage = Stage::new();
    stage.script("master", "sleep 0.3; echo 'steadfast-master: error: no column `digit`'; exit 2");
    let output = stage.start(&[]).end().await;
    assert_eq!(output.status.code(), Some(2));
    let expected = "steadfast: error: master-0 ended (exit code 2): no column `digit`";
    assert!(stderr(&output).lines().any(|line| line == expected), "{}", stderr(&output));
    assert_eq!(stdout(&output), "");
    all_exited(&stage.pids(PROCESSES).await).await;
}

#[tokio::test]
async fn a_killed_process_is_started_again() {
    let stage = Stage::new();
    let running = stage.start(&[]);
    let pids = stage.pids(PROCESSES).await;
    kill(pids[4], Signal::SIGKILL).unwrap();
    let pids = stage.pids(PROCESSES + 1).await;
    running.signal(Signal::SIGINT);
    let output = running.end().await;
    assert!(stderr(&output).contains("ended (signal SIGKILL"), "{}", stderr(&output));
    all_exited(&pids).await;
}

#[tokio::test]
async fn an_interrupt_takes_a_checkpoint_prints_how_to_resume_and_leaves_no_process() {
    let stage = Stage::new();
    let running = stage.start(&["--output=json"]);
    let pids = stage.pids(PROCESSES).await;
    let etcd = stage.etcd().await;
    let fake = FakeMaster::default();
    let master = fake.start(&etcd).await;
    running.signal(Signal::SIGINT);
    let output = running.end().await;
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(fake.checkpoints.load(Ordering::SeqCst), 1);
    let text = stderr(&output);
    assert!(text.contains("took checkpoint c-7"), "{text}");
    assert!(text.contains("resume it with the same command: "), "{text}");
    assert!(text.contains("local job.toml --bin-dir . --data-dir data --output=json"), "{text}");
    let summary: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(summary["state"], "drained");
    all_exited(&pids).await;
    master.abort();
}

#[tokio::test]
async fn a_second_interrupt_ends_the_run_at_once_and_leaves_no_process() {
    let stage = Stage::new();
    for role in ["master", "pserver", "trainer"] {
        stage.script(role, "trap 'touch \"$here/terminating\"' TERM; while :; do sleep 0.05; done");
    }
    let running = stage.start(&[]);
    let pids = stage.pids(PROCESSES).await;
    running.signal(Signal::SIGINT);
    // No master takes a checkpoint and no process obeys SIGTERM: without a second signal this takes 10 s.
    eventually(|| stage.path("terminating").exists().then_some(())).await;
    let signaled = Instant::now();
    running.signal(Signal::SIGINT);
    assert_eq!(running.end().await.status.code(), Some(130));
    assert!(signaled.elapsed() < Duration::from_secs(5));
    all_exited(&pids).await;
}

/// A closed terminal stops a run in order, also if it says so twice; warnings reach the trainers that handle them.
#[tokio::test]
async fn a_closed_terminal_stops_a_run_and_a_warning_does_not() {
    let stage = Stage::new();
    let handles = "trap 'touch \"$here/warned\"' USR1; touch \"$here/armed\"; \
                   while :; do sleep 0.05; done";
    stage.script("trainer", handles);
    let running = stage.start(&[]);
    let pids = stage.pids(PROCESSES).await;
    eventually(|| stage.path("armed").exists().then_some(())).await;
    running.signal(Signal::SIGUSR1);
    eventually(|| stage.path("warned").exists().then_some(())).await;
    running.signal(Signal::SIGHUP);
    running.signal(Signal::SIGHUP);
    let output = running.end().await;
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("resume it with the same command: "), "{}", stderr(&output));
    all_exited(&pids).await;
}

#[tokio::test]
async fn no_process_outlives_a_killed_run() {
    let stage = Stage::new();
    let running = stage.start(&[]);
    let pids = stage.pids(PROCESSES).await;
    running.signal(Signal::SIGKILL);
    running.end().await;
    all_exited(&pids).await;
}

#[tokio::test]
async fn a_second_run_in_the_same_directory_is_refused() {
    let stage = Stage::new();
    let running = stage.start(&[]);
    stage.pids(PROCESSES).await;
    let second = stage.start(&[]).end().await;
    assert_eq!(second.status.code(), Some(4));
    let expected = format!("process {} already runs a job", running.pid());
    assert!(stderr(&second).contains(&expected), "{}", stderr(&second));
    running.signal(Signal::SIGTERM);
    running.end().await;
}

#[tokio::test]
async fn a_broken_job_file_is_refused_before_anything_is_started_or_created() {
    let stage = Stage::new();
    fs::write(stage.path("job.toml"), support::JOB.replace("passes", "pases")).unwrap();
    let output = stage.start(&[]).end().await;
    assert_eq!(output.status.code(), Some(2));
    let expected = "steadfast: error: job.toml: unknown key `pases`; did you mean `passes`?";
    assert!(stderr(&output).lines().any(|line| line == expected), "{}", stderr(&output));
    assert!(!stage.path("data").exists());
}

#[tokio::test]
async fn an_unreachable_etcd_is_named() {
    let stage = Stage::new();
    let output = stage.start(&["--etcd", "http://127.0.0.1:1"]).end().await;
    assert_eq!(output.status.code(), Some(6));
    assert!(stderr(&output).contains("etcd at http://127.0.0.1:1 does not answer"));
}

#[tokio::test]
async fn status_shows_the_masters_view_or_without_a_master_the_contents_of_etcd() {
    let stage = Stage::new();
    let running = stage.start(&[]);
    stage.pids(PROCESSES).await;
    let etcd = stage.etcd().await;
    let none = stage.status(&[]);
    assert_eq!(none.status.code(), Some(3));
    assert!(stderr(&none).contains("etcd has no job"), "{}", stderr(&none));

    let keys = Keys::of_job("digits");
    etcd.put(&keys.ps_desired(), b"2").await.unwrap();
    let slot = serde_json::json!({
        "id": "00000000-0000-0000-0000-000000000002", "address": "127.0.0.1:5", "admin": "x:1"
    });
    let slot_key = keys.ps(steadfast_common::ids::Slot(0));
    etcd.put(&slot_key, slot.to_string().as_bytes()).await.unwrap();
    let no_master = stage.status(&[]);
    let text = stdout(&no_master);
    assert!(text.starts_with("job digits: no master answers\n"), "{text}{}", stderr(&no_master));
    assert!(text.contains("pservers    1 of 2 slots"), "{text}");
    let json: Value = serde_json::from_str(&stdout(&stage.status(&["--output=json"]))).unwrap();
    assert_eq!(json["master"], Value::Null);
    assert_eq!(json["slots"][0]["address"], "127.0.0.1:5");

    let master = FakeMaster::default().start(&etcd).await;
    let live = tokio::task::spawn_blocking(move || (stage.status(&["--output=json"]), stage));
    let (live, stage) = live.await.unwrap();
    let json: Value = serde_json::from_str(&stdout(&live)).unwrap();
    assert_eq!(json, support::status_json());
    master.abort();

    put_result(&etcd, serde_json::json!({ "tasks": 0, "times": 0, "listed": [] })).await;
    stage.finish_processes();
    running.end().await;
    // The embedded etcd has ended with the run.
    let over = stage.status(&[]);
    assert!(stdout(&over).starts_with("job digits: finished\n"), "{}", stderr(&over));
}

#[test]
fn a_command_ends_quietly_once_the_reader_of_its_output_is_gone() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_steadfast"));
    command.args(["completions", "bash"]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    drop(child.stdout.take());
    let ended = child.wait_with_output().expect("it ends");
    assert_eq!((ended.status.code(), stderr(&ended).as_str()), (Some(0), ""));
}
