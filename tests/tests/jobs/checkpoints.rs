//! `steadfast checkpoint` on real jobs.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::Value;
use steadfast_common::records::MasterRecord;
use steadfast_proto::v1::master_client::MasterClient;
use steadfast_proto::v1::{RestoreCheckpointRequest, TakeCheckpointReply, TakeCheckpointRequest};
use steadfast_tests::{Cluster, EtcdServer, Job, Run, Scene, Signal, program};

/// A job on an etcd that outlives its run.
struct Stage<'a> {
    scene: &'a Scene,
    etcd: EtcdServer,
}

impl<'a> Stage<'a> {
    fn new(scene: &'a Scene) -> Self {
        Self { scene, etcd: EtcdServer::embedded(scene) }
    }

    /// Runs a job to its end; returns its summary.
    fn to_end(&self, job: &Job) -> Value {
        Run::to_end(self.scene, job, "data", &["--etcd", &self.etcd.url()])
    }

    fn start(&self, job: &Job) -> Run<'a> {
        let mut run = Run::start(self.scene, job, &["--etcd", &self.etcd.url()]);
        run.at(&self.etcd.url());
        run
    }

    /// Runs `steadfast checkpoint`.
    fn checkpoint(&self, args: &[&str]) -> Output {
        let mut command = self.scene.command(&program("steadfast"));
        command.arg("checkpoint").args(args).args(["--etcd-endpoints", &self.etcd.url()]);
        command.output().expect("the program starts")
    }

    /// Runs a command that must succeed; returns its stdout without the trailing newline.
    #[track_caller]
    fn run_ok(&self, args: &[&str]) -> String {
        let output = self.checkpoint(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        text(&output.stdout).trim_end().to_owned()
    }

    /// Runs a command that must fail with one line; returns its exit code and the line.
    #[track_caller]
    fn refused(&self, args: &[&str]) -> (i32, String) {
        let output = self.checkpoint(args);
        let stderr = text(&output.stderr);
        let line = stderr.trim_end().strip_prefix("steadfast: error: ").unwrap_or_default();
        assert!(!line.is_empty() && !line.contains('\n'), "{args:?}: {output:?}");
        (output.status.code().expect("no signal ended it"), line.to_owned())
    }

    /// Returns all checkpoints, the newest first.
    fn list(&self) -> Vec<Value> {
        let list = serde_json::from_str(&self.run_ok(&["list", "--json"]));
        list.expect("the list is a JSON array")
    }

    /// Returns the shard files in the store.
    fn shards(&self) -> Vec<PathBuf> {
        let directory =
            fs::read_dir(self.scene.path("data/store/shards/digits")).expect("shards exist");
        let mut shards: Vec<PathBuf> =
            directory.map(|entry| entry.expect("the directory can be read").path()).collect();
        shards.sort();
        shards
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Flips the last bit of a file.
fn flip(path: &PathBuf) {
    let mut bytes = fs::read(path).expect("the object exists");
    *bytes.last_mut().expect("it is not empty") ^= 1;
    fs::write(path, bytes).expect("the store is writable");
}

/// I10
#[test]
fn an_export_of_a_finished_job_equals_its_saved_model_bit_by_bit() {
    let scene = Scene::new();
    let stage = Stage::new(&scene);
    let summary = stage.to_end(&Job::small());
    let sha = summary["parameters_sha256"].as_str().expect("a finished job has parameters");

    let list = stage.list();
    let last = &list[0];
    let id = last["id"].as_str().expect("a checkpoint has an id");
    assert_eq!(last["latest"], true);
    assert_eq!(last["version"], summary["steps"]);
    assert_eq!(last["examples"], summary["examples"]);
    assert_eq!(last["shards"], stage.shards().len());
    assert_eq!(last["error"], Value::Null);
    assert!(last["age_seconds"].as_u64().is_some_and(|age| age < 600), "{last}");
    let table = stage.run_ok(&["list"]);
    assert!(table.lines().nth(1).is_some_and(|line| line.starts_with(id)), "{table}");

    assert_eq!(stage.run_ok(&["verify"]), format!("OK {id} parameters_sha256 {sha}"));
    let verified: Value =
        serde_json::from_str(&stage.run_ok(&["verify", "--all", "--json"])).unwrap();
    assert_eq!(verified[0]["parameters_sha256"], sha);
    let counted = &verified[0]["counted"][0]["counted"]["passes"];
    let records = counted.as_array().unwrap().iter().map(|it| it["records"].as_u64().unwrap());
    assert_eq!(summary["examples"].as_u64(), Some(records.sum()));

    assert_eq!(stage.run_ok(&["export", "--to", "exported.safetensors"]), sha);
    let exported = fs::read(scene.path("exported.safetensors")).unwrap();
    let saved = fs::read(summary["model"].as_str().unwrap()).unwrap();
    assert!(exported == saved, "the files differ");
}

/// The data of the embedded etcd can be read after its run.
#[test]
fn an_ended_run_can_be_inspected_with_the_same_commands() {
    let scene = Scene::new();
    let summary = Run::to_end(&scene, &Job::small(), "data", &[]);
    let data = scene.path("data").display().to_string();
    let run_ok = |args: &[&str]| {
        let mut command = scene.command(&program("steadfast"));
        let output = command.args(args).args(["--data-dir", &data]).output();
        output.expect("the program starts")
    };
    let sha = summary["parameters_sha256"].as_str().expect("a finished job has parameters");
    for args in [&["status"][..], &["audit"], &["checkpoint", "verify"], &["checkpoint", "list"]] {
        let output = run_ok(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
    }
    assert!(text(&run_ok(&["checkpoint", "verify"]).stdout).trim_end().ends_with(sha));
    let output = run_ok(&["status", "--watch"]);
    assert!(text(&output.stderr).contains("no run is active"), "{output:?}");
    assert_eq!(output.status.code(), Some(6));
}

#[test]
fn an_export_replaces_a_file_only_with_force() {
    let scene = Scene::new();
    let stage = Stage::new(&scene);
    stage.to_end(&Job::small().with("passes = 30", "passes = 3"));
    let path = scene.write("mine", "a file of mine");
    let (code, line) = stage.refused(&["export", "--to", "mine"]);
    assert_eq!(code, 4);
    assert!(line.contains("/mine already exists; ") && line.contains("--force"), "{line}");
    assert_eq!(fs::read(&path).unwrap(), b"a file of mine");
    let sha = stage.run_ok(&["export", "--to", "mine", "--force"]);
    assert_ne!(fs::read(&path).unwrap(), b"a file of mine");
    let url = format!("file://{}", scene.path("other/place").display());
    assert_eq!(stage.run_ok(&["export", "latest", "--to", &url]), sha);
    assert_eq!(fs::read(scene.path("other/place")).unwrap(), fs::read(&path).unwrap());
}

/// F34
#[test]
fn a_flipped_bit_is_found_and_its_object_named() {
    let scene = Scene::new();
    let stage = Stage::new(&scene);
    stage.to_end(&Job::small().with("passes = 30", "passes = 3"));
    let id = stage.list()[0]["id"].as_str().expect("a checkpoint has an id").to_owned();
    for shard in stage.shards() {
        let object = format!("shards/digits/{}", shard.file_name().unwrap().to_string_lossy());
        flip(&shard);
        let output = stage.checkpoint(&["verify"]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let line = text(&output.stdout);
        let expected = format!("ERROR {id}: {object} is damaged: its SHA-256 is ");
        assert!(line.starts_with(&expected), "{line}");
        let (code, line) = stage.refused(&["export", "--to", "exported"]);
        assert_eq!(code, 2);
        assert!(line.contains(&format!("{object} is damaged")), "{line}");
        assert!(!scene.path("exported").exists());
        flip(&shard);
        stage.run_ok(&["verify"]);

        fs::rename(&shard, scene.path("away")).unwrap();
        let (_, line) = stage.refused(&["export", "--to", "exported"]);
        assert!(line.contains(&format!("{object} is missing (in file:///")), "{line}");
        fs::rename(scene.path("away"), &shard).unwrap();
    }
    fs::rename(scene.path("data/store"), scene.path("away")).unwrap();
    let (code, line) = stage.refused(&["export", "--to", "exported"]);
    assert_eq!(code, 6);
    assert!(line.contains("/data/store is unavailable or not the job's store; "), "{line}");
}

/// I9, F35
#[test]
fn a_requested_checkpoint_can_be_restored() {
    let scene = Scene::new();
    let stage = Stage::new(&scene);
    let job = Job::endless().with("every_steps = 200", "every = \"1h\"");
    let mut run = stage.start(&job);
    run.until_step(50);
    let id = stage.run_ok(&["now"]);
    let list = stage.list();
    assert_eq!(list.len(), 1);
    assert_eq!(list[0]["id"], *id);
    assert_eq!(list[0]["latest"], true);
    let step = list[0]["version"].as_u64().expect("it has a step");
    assert!(50 <= step);
    assert!(stage.run_ok(&["verify", &id]).starts_with(&format!("OK {id} parameters_sha256 ")));

    run.until_step(step + 200);
    let (_, line) = stage.refused(&["restore", &id]);
    assert!(line.contains("--force"), "{line}");
    // An unreadable manifest is ignored.
    stage.etcd.ctl(&["put", "/jobs/digits/checkpoints/nonsense", "nonsense"]);
    assert_eq!(stage.run_ok(&["restore", &id, "--force"]), "2");
    run.until("it trains in the next generation", |it| {
        it["generation"] == 2 && it["version"].as_u64() > Some(step)
    });
}

/// I9: a checkpoint of a generation that the job abandoned, rolled back to, and abandoned again is never
/// the latest.
#[test]
fn a_rollback_invalidates_later_checkpoints() {
    let scene = Scene::new();
    let stage = Stage::new(&scene);
    let job = Job::endless().with("every_steps = 200", "every = \"1h\"");
    let mut run = stage.start(&job);
    run.until_step(10);
    let first = stage.run_ok(&["now"]);
    run.until_step(3_000);
    let ahead = stage.run_ok(&["now"]);
    stage.run_ok(&["restore", &first, "--force"]);
    let between = stage.run_ok(&["now"]);
    let state = |id: &str| {
        let list = stage.list();
        let row = list.into_iter().find(|it| it["id"] == *id).expect("it is listed");
        (row["version"].as_u64(), row["latest"] == true, row["invalidated"].is_string())
    };
    assert!(state(&between).0 < state(&ahead).0, "the machine is too slow for this test");
    stage.run_ok(&["restore", &ahead, "--force"]);
    assert_eq!((state(&ahead).1, state(&between).2), (true, true));
    stage.run_ok(&["restore", &between, "--force"]);
    assert_eq!((state(&between).1, state(&between).2), (true, false));
    assert!(state(&ahead).2, "the job could continue from an abandoned generation");
}

/// I9: the version before a rollback is not used for a checkpoint after it.
#[test]
fn a_checkpoint_requested_during_a_rollback_holds_the_restored_state() {
    let scene = Scene::new();
    // No periodic checkpoint interferes.
    let job = Job::endless().with("every_steps = 200", "every_steps = 1000000");
    let cluster = Cluster::new(&scene, &job, 1, "30s");
    let _servers = [cluster.master("master"), cluster.pserver("pserver")];
    let trainer = cluster.trainer("trainer");
    cluster.until_step(3);
    let entry = cluster.get(&cluster.keys.master_addr()).expect("a master acts");
    let master: MasterRecord = entry.json().expect("it is a record");
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    let mut client = runtime
        .block_on(MasterClient::connect(format!("http://{}", master.address)))
        .expect("the master listens");
    let version = |id: &str| {
        let manifest = cluster.value(&cluster.keys.checkpoint(id)).expect("it is committed");
        manifest["position"]["version"].as_u64().expect("it has a step")
    };
    for _ in 0..3 {
        let taken = runtime.block_on(client.take_checkpoint(TakeCheckpointRequest {}));
        let first = taken.expect("the master answers").into_inner().checkpoint;
        cluster.until_step(version(&first) + 50);
        // No trainer advances the job.
        trainer.signal(Signal::SIGSTOP);
        let taken = runtime.block_on(async {
            let back = RestoreCheckpointRequest { checkpoint: first.clone(), force: true };
            client.restore_checkpoint(back).await.expect("the job goes back");
            client.take_checkpoint(TakeCheckpointRequest {}).await.expect("the master answers")
        });
        trainer.signal(Signal::SIGCONT);
        let TakeCheckpointReply { checkpoint, error } = taken.into_inner();
        assert_eq!(error, "");
        assert_eq!(version(&checkpoint), version(&first));
    }
}

#[test]
fn bad_input_is_rejected_in_one_line_with_a_hint() {
    let scene = Scene::new();
    let stage = Stage::new(&scene);
    let job = Job::endless().with("every_steps = 200", "every = \"1h\"");
    let (code, line) = stage.refused(&["list", "--job", "digits"]);
    assert_eq!(code, 3);
    assert!(line.starts_with("etcd has no job digits ") && line.contains("right etcd"), "{line}");

    let mut run = stage.start(&job);
    run.until_step(10);
    let (code, line) = stage.refused(&["list", "--job", "other"]);
    assert_eq!(code, 3);
    assert!(line.contains("it has digits; choose one with --job"), "{line}");
    let (code, line) = stage.refused(&["verify"]);
    let none = "job digits has no checkpoint; take one with `steadfast checkpoint now`";
    assert_eq!((code, line.as_str()), (3, none));

    stage.run_ok(&["now"]);
    for args in [&["verify", "zzz"][..], &["export", "zzz", "--to", "x"], &["restore", "zzz"]] {
        let (code, line) = stage.refused(args);
        assert_eq!(code, 3);
        assert_eq!(line, "job digits has no checkpoint zzz; see `steadfast checkpoint list`");
    }
    let (code, line) = stage.refused(&["restore", "latest", "0"]);
    assert_eq!(code, 2);
    assert_eq!(line, "latest, 0 are 2 checkpoints; name just one");
    let (code, line) = stage.refused(&["export", "--to", "data/"]);
    assert_eq!(code, 2);
    assert!(line.contains("--to data/ is a directory; name the file"), "{line}");
}
