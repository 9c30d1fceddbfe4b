//! Edge cases: scaling, the end of a job, interruption, and how a run reports them.

use std::fs::{self, File};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use steadfast_common::ids::Slot;
use steadfast_tests::{
    Cluster, Ended, EtcdServer, Job, Member, Run, Scene, Signal, etcdctl, eventually, program,
};

const INTERRUPTED: Option<i32> = Some(130);

fn stdout_of(cluster: &Cluster<'_>, args: &[&str]) -> String {
    let output = cluster.steadfast(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).expect("it prints text")
}

/// Returns the id of the process that holds a slot, if any.
fn holder(cluster: &Cluster<'_>, slot: u32) -> Option<Value> {
    cluster.value(&format!("/jobs/{}/ps/{slot}", cluster.spec.name)).map(|it| it["id"].clone())
}

/// I12, S004-42: a pserver beyond the number of slots releases its slot, and takes the next free one.
#[test]
fn a_pserver_whose_slot_was_removed_becomes_a_spare() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 2, "2s");
    let (_master, _trainer) = (cluster.master("master"), cluster.trainer("trainer"));
    let pservers: Vec<Member> = ["one", "two"].iter().map(|name| cluster.pserver(name)).collect();
    cluster.until_step(5);
    let surplus = holder(&cluster, 1).expect("slot 1 is held");

    stdout_of(&cluster, &["scale", "--slots", "1"]);
    eventually("slot 1 is given back", || holder(&cluster, 1).is_none().then_some(()));
    eventually("the doctor reports no errors", || {
        cluster.steadfast(&["doctor"]).status.success().then_some(())
    });
    let is_spare = |it: &&Member| it.ask("/readyz").is_some_and(|it| it.body.contains("spare"));
    eventually("its pserver says that it is a spare", || pservers.iter().find(is_spare).map(drop));

    let holds = pservers.iter().find(|it| it.is_ready()).expect("one of them holds slot 0");
    holds.signal(Signal::SIGKILL);
    eventually("the spare takes slot 0", || {
        (holder(&cluster, 0) == Some(surplus.clone())).then_some(())
    });
    let now = cluster.until("it has a step", |it| it["version"].is_u64());
    cluster.until_step(now["version"].as_u64().unwrap_or_default() + 50);
}

/// F38: a job goes on once a member of another version is replaced, and says before that it has to be.
#[test]
fn a_pserver_of_another_version_is_left_out_and_named() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, "2s");
    let slot = cluster.keys.ps(Slot(0));
    let _master = cluster.master("master");
    // As programs wrote it before they had a number.
    let record = json!({"id": uuid::Uuid::nil(), "address": "127.0.0.1:1", "admin": "127.0.0.1:1"});
    cluster.etcd.ctl(&["put", &slot, &record.to_string()]);
    let _members = [cluster.pserver("pserver"), cluster.trainer("trainer")];
    eventually("the master names it", || {
        stdout_of(&cluster, &["why"]).contains("the pserver of slot 0 is left out").then_some(())
    });
    cluster.etcd.ctl(&["del", &slot]);
    cluster.until_step(5);
}

/// I12: a free slot that no pserver takes is reported.
#[test]
fn doctor_and_why_name_a_slot_that_no_pserver_takes() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, "2s");
    let _members = [cluster.master("master"), cluster.pserver("one"), cluster.trainer("trainer")];
    cluster.until_step(5);
    stdout_of(&cluster, &["scale", "--slots", "2"]);
    eventually("the master sees it", || {
        stdout_of(&cluster, &["why"]).contains("slot 1").then_some(())
    });
    let doctor = cluster.steadfast(&["doctor"]);
    assert_eq!(doctor.status.code(), Some(1), "{doctor:?}");
    let text = String::from_utf8_lossy(&doctor.stdout);
    assert!(text.contains("! slot 1: is free, and no pserver takes it"), "{text}");
}

fn interrupt(mut run: Run<'_>, step: u64) -> (Ended, Duration) {
    run.until_step(step);
    run.signal(Signal::SIGINT);
    eventually("the last checkpoint exists", || {
        run.stderr().contains("steadfast: took checkpoint").then_some(())
    });
    let began = Instant::now();
    let ended = run.end();
    (ended, began.elapsed())
}

/// S004-50: every process exits at once, because none waits for one that is leaving.
#[test]
fn an_interrupted_run_ends_at_once_after_its_last_checkpoint() {
    // The timeout for processes that do not exit is ten seconds; a process that waits for calls of others says so.
    let most = Duration::from_secs(10);
    for (name, job) in [
        ("sync", Job::endless()),
        ("async", Job::asynchronous().with("passes = 30", "passes = 300000")),
    ] {
        let scene = Scene::new();
        let mut resumed_at = 0;
        for _ in 0..3 {
            // A step after the one that was resumed at: before, there is nothing new to take.
            let (ended, took) = interrupt(Run::start_in(&scene, &job, name, &[]), resumed_at + 40);
            assert_eq!(ended.code, INTERRUPTED, "{}", ended.stderr);
            assert!(took < most, "{name}: it took {took:?}\n{}", ended.stderr);
            for log in fs::read_dir(scene.path(name).join("logs")).expect("there are logs") {
                let log = log.expect("it is listed").path();
                let text = fs::read_to_string(&log).expect("it is text");
                assert!(!text.contains("aborted"), "{}: it took {took:?}\n{text}", log.display());
            }
            let summary = ended.summary();
            let checkpoint = summary["checkpoint"].as_str().expect("there is one");
            let version: u64 = checkpoint[..12].parse().expect("it begins with the version");
            assert!(Some(version) <= summary["steps"].as_u64(), "{summary}");
            resumed_at = version;
        }
    }
}

/// Reading the status of a finished run does not block the next run: it does not take the lock of its
/// etcd.
#[test]
fn an_interrupted_run_can_be_inspected_while_another_one_runs() {
    let scene = Scene::new();
    let run = Run::start(&scene, &Job::endless(), &[]);
    let data = scene.path("data");
    interrupt(run, 20);
    let lock = File::open(data.join("etcd/lock")).expect("etcd ran there");
    lock.try_lock().expect("the lock is free");
    let mut status = Command::new(program("steadfast"));
    let output = status.args(["status", "--data-dir"]).arg(&data).output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    drop(lock);
    Run::start(&scene, &Job::endless(), &[]).until_step(30);
}

/// Environment variables of the shell do not configure the processes of a local run.
#[test]
fn settings_of_the_shell_do_not_reach_the_processes_of_a_local_run() {
    let scene = Scene::new();
    let file = Job::small().write(&scene);
    let mut command = scene.command(&program("steadfast"));
    command.arg("local").arg(file).args(["--data-dir", "data", "--lease-ttl", "2s"]);
    command.env("STEADFAST_TLS", "/nowhere").env("STEADFAST_ADMIN_TOKEN_FILE", "/nowhere");
    command.env("STEADFAST_WAIT_AFTER_COMPLETION", "true").env("STEADFAST_NOT_INVENTED_YET", "1");
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!errors.contains("restarting it"), "{errors}");
}

/// S004-39, I9: a job may have more slots than etcd takes conditions in a transaction.
#[test]
fn a_job_of_two_hundred_slots_takes_checkpoints() {
    let scene = Scene::new();
    let etcd = EtcdServer::real(&scene);
    let more = ["--pservers", "200", "--trainers", "1", "--etcd", &etcd.url()];
    let summary = Run::to_end(&scene, &Job::small(), "data", &more);
    let id = summary["checkpoint"].as_str().expect("the last one was committed");
    let key = format!("/jobs/digits/checkpoints/{id}");
    let record = etcdctl(&etcd.url(), &["get", &key, "--print-value-only"]);
    let record: Value = serde_json::from_str(&record).expect("the manifest is JSON");
    assert_eq!(record["shards"].as_array().map(Vec::len), Some(200));
}

/// I12: the number of pservers of a resumed run sets the number of slots.
#[test]
fn a_resumed_run_has_the_requested_number_of_slots() {
    let scene = Scene::new();
    let slots = |more: &[&str], wanted: u64| {
        let mut run = Run::start(&scene, &Job::endless(), more);
        let is_whole = |it: &Value| {
            it["ps_desired"] == wanted
                && it["state"] == "training"
                && it["slots"]
                    .as_array()
                    .is_some_and(|it| it.iter().all(|it| it["address"].is_string()))
        };
        let seen = run.until("all slots are held", is_whole);
        let version = seen["version"].as_u64().unwrap_or_default();
        run.until_step(version + 10);
        run.signal(Signal::SIGINT);
        assert_eq!(run.end().code, INTERRUPTED);
    };
    slots(&["--pservers", "3"], 3);
    slots(&["--pservers", "1"], 1);
    // Without the flag, the number of the job is used.
    slots(&[], 1);
    slots(&["--pservers", "2"], 2);
}

/// I12: a model that cannot be written is reported with its cause in all status commands; the job ends
/// once it can be written.
#[test]
fn the_cause_of_a_failed_save_is_reported_until_the_model_is_saved() {
    for job in [Job::small(), Job::asynchronous().with("passes = 30", "passes = 2")] {
        let scene = Scene::new();
        let in_the_way = scene.path("data").join("store/model.safetensors/in/the/way");
        fs::create_dir_all(&in_the_way).expect("a directory can be made");
        let mut run = Run::start(&scene, &job, &[]);
        // Each attempt evaluates the model before it writes it.
        let status = run.until("four attempts failed", |it| {
            it["saving"]["failures"].as_u64() >= Some(4) && it["state"] == "saving"
        });
        let waiting = status["waiting"].to_string();
        assert!(waiting.contains("the model is not saved after"), "{status}");
        assert!(waiting.contains("directory"), "the cause is missing: {status}");
        fs::remove_dir_all(scene.path("data").join("store/model.safetensors"))
            .expect("it was there");
        assert_eq!(run.finish()["state"], "finished");
        scene.leaves_no_process();
    }
}

/// F33: the summary of a run reports that there is no checkpoint, and why.
#[test]
fn a_run_whose_every_checkpoint_failed_reports_it_at_its_end() {
    let scene = Scene::new();
    let job = Job::small().with("every = \"10s\"", "every = \"200ms\"");
    fs::create_dir_all(scene.path("data/store")).expect("a directory can be made");
    fs::write(scene.path("data/store/shards"), "a file in the way").expect("it can be written");
    let summary = Run::start(&scene, &job, &[]).finish();
    assert_eq!(summary["checkpoint"], Value::Null, "{summary}");
    let error = summary["checkpoint_error"].as_str().expect("it says why");
    assert!(error.to_lowercase().contains("directory"), "{error}");
    assert!(1 <= summary["checkpoint_failures"].as_u64().unwrap_or(0), "{summary}");
}

/// A trainer that drains does not wait for a pserver that has left.
#[test]
fn an_asynchronous_trainer_without_its_pserver_drains_within_five_seconds() {
    let scene = Scene::new();
    let job = Job::asynchronous().with("passes = 30", "passes = 300000");
    let cluster = Cluster::new(&scene, &job, 1, "2s");
    let (_master, mut pserver) = (cluster.master("master"), cluster.pserver("pserver"));
    let mut trainer = cluster.trainer("trainer");
    cluster.until("it trains", |it| 100 < it["examples"].as_u64().unwrap_or(0));
    pserver.signal(Signal::SIGKILL);
    pserver.end();
    eventually("its slot is free", || holder(&cluster, 0).is_none().then_some(()));
    let began = Instant::now();
    trainer.signal(Signal::SIGTERM);
    assert_eq!(trainer.end().code, Some(0));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

/// `why` reports that a job is finished, and a later run prints the next possible steps.
#[test]
fn a_finished_job_is_reported_with_the_next_step() {
    let scene = Scene::new();
    let summary = Run::start(&scene, &Job::small(), &[]).finish();
    let model = summary["model"].as_str().expect("it has a model");
    let mut why = scene.command(&steadfast_tests::program("steadfast"));
    let why = why.args(["why", "--data-dir", "data"]).output().expect("it starts");
    let text = String::from_utf8_lossy(&why.stdout).into_owned();
    assert_eq!(text, "not blocked: the job is finished\n", "{why:?}");

    fs::remove_file(model).expect("it was there");
    let again = Run::start(&scene, &Job::small(), &[]).end();
    assert!(
        again.stderr.contains("does not exist; `steadfast checkpoint export"),
        "{}",
        again.stderr
    );

    let other = Job::small().with("passes = 30", "passes = 31");
    let refused = Run::start(&scene, &other, &[]).end();
    assert!(refused.stderr.contains("`passes` differs"), "{}", refused.stderr);
    assert_eq!(refused.summary()["state"], json!("error"));
}

/// The dataset has too few tasks for one to be held out.
#[test]
fn a_fraction_that_holds_out_no_task_is_reported() {
    let scene = Scene::new();
    let job = Job::example("linear")
        .with("passes = 30", "passes = 2")
        .with("records_per_task = 50", "records_per_task = 1000");
    let ended = Run::start(&scene, &job, &[]).end();
    let summary = ended.summary();
    assert_eq!(summary["state"], "finished", "{summary}");
    assert!(summary["warnings"].to_string().contains("no task is held out"), "{summary}");
}
