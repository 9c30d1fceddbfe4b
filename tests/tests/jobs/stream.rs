//! Datasets that grow while they are trained on.

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant, UNIX_EPOCH};

use serde_json::Value;
use steadfast_common::job::spec::Mode;
use steadfast_tests::{Cluster, Job, Run, Scene, Signal, audit, eventually, examples, program};

/// How long a command may take.
const BOUND: Duration = Duration::from_secs(60);

/// Records of the digits.
const RECORDS: usize = 1_797;

/// A folder that is followed.
struct Folder<'a> {
    scene: &'a Scene,
    lines: Vec<String>,
    /// Number of files so far: each is a second newer than the one before, so that their order is known.
    files: Cell<u64>,
}

impl<'a> Folder<'a> {
    fn new(scene: &'a Scene) -> Self {
        let text = fs::read_to_string(examples().join("data/digits.csv")).expect("it is there");
        fs::create_dir_all(scene.path("in")).expect("there is space");
        Self { scene, lines: text.lines().map(str::to_owned).collect(), files: Cell::new(0) }
    }

    /// Adds a file with records `from` to `to`, under another name first.
    fn add(&self, name: &str, from: usize, to: usize) {
        let records = self.lines[1 + from..1 + to].iter();
        let lines: Vec<&str> =
            [&self.lines[0]].into_iter().chain(records).map(|it| &**it).collect();
        self.put(name, &(lines.join("\n") + "\n"));
    }

    fn put(&self, name: &str, text: &str) {
        let hidden = self.scene.write("written", text);
        let modified = UNIX_EPOCH + Duration::from_secs(1_700_000_000 + self.files.get());
        self.files.set(self.files.get() + 1);
        let file = fs::File::options().write(true).open(&hidden).expect("it was written");
        file.set_modified(modified).expect("the file system keeps times");
        fs::rename(hidden, self.path(name)).expect("it is the same file system");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scene.path("in").join(name)
    }

    /// A synchronous job that follows the folder.
    fn job(&self) -> Job {
        Job::stream(&self.scene.path("in"), Mode::Sync)
    }
}

fn sha(result: &Value) -> &str {
    result["parameters_sha256"].as_str().expect("a finished job has parameters")
}

/// Drains the job of a run in the directory `data`; returns its result.
fn drained(scene: &Scene, mut run: Run<'_>, data: &str) -> Value {
    run.until("files are read", |it| it["stream"]["files"].as_u64() > Some(0));
    let data = scene.path(data);
    let args = ["drain", "--data-dir", data.to_str().expect("it is text")];
    let mut drain = scene.start("drain", "steadfast", &args);
    let ended = run.end();
    let result = ended.summary();
    // 10: some files were left out.
    let expected = if result["left_out"].is_null() { 0 } else { 10 };
    assert_eq!(ended.code, Some(expected), "{}", ended.stderr);
    let drained = drain.end(BOUND);
    assert_eq!(drained.code, Some(0), "{}", drained.stderr);
    assert!(drained.stdout.contains(sha(&result)), "{}", drained.stdout);
    result
}

/// S004-2, I7: a stream has no end of its own. Its files count once, in the order in which they are found, and the
/// result depends on them alone: not on when they come, and not on the number of trainers and pservers.
#[test]
fn a_stream_has_the_same_bits_however_its_files_arrive() {
    let at_once = {
        let scene = Scene::new();
        let folder = Folder::new(&scene);
        for (index, name) in ["b", "a", "c"].iter().enumerate() {
            folder.add(&format!("{name}.csv"), 500 * index, 500 * (index + 1));
        }
        let run = Run::start(&scene, &folder.job(), &["--trainers", "3", "--pservers", "2"]);
        drained(&scene, run, "data")
    };
    let scene = Scene::new();
    let folder = Folder::new(&scene);
    let mut run = Run::start(&scene, &folder.job(), &["--trainers", "1", "--pservers", "1"]);
    waits_for(&scene, "the first file that matches ");
    folder.put("wrong.csv", "x,y\n1,2\n");
    waits_for(&scene, "a file that can be read: ");
    folder.add("b.csv", 0, 500);
    run.until("the first file is trained on", |it| it["examples"] == 500);
    // It is no file before it has content.
    folder.put("empty.csv", "");
    // Its columns differ, so the job goes on without it.
    folder.put("bad.csv", "x,y\n1,2\n");
    folder.add("a.csv", 500, 1000);
    let status = run.until("a file is left out, and the next one trained on", |it| {
        it["examples"] == 1000 && it["stream"]["left_out_files"] == 2
    });
    assert_eq!(status["waiting"][0], "the stream has no new file");
    folder.add("c.csv", 1000, 1500);
    let result = drained(&scene, run, "data");
    assert_eq!((&result["examples"], &result["passes"]), (&1500.into(), &3.into()));
    assert_eq!(sha(&result), sha(&at_once));
    let left_out = &result["left_out"];
    let name = |index: usize| left_out["listed"][index][0].as_str().unwrap_or_default();
    assert_eq!(left_out["files"], 2, "{left_out}");
    assert!(name(0).ends_with("wrong.csv") && name(1).ends_with("bad.csv"), "{left_out}");
}

/// Waits until a command names what the master of a new job waits for.
fn waits_for(scene: &Scene, what: &str) {
    let message = format!("the master waits for {what}");
    for command in ["status", "why"] {
        eventually(&message, || {
            let mut command_line = scene.command(&program("steadfast"));
            let output = command_line.args([command, "--data-dir", "data"]).output().ok()?;
            String::from_utf8_lossy(&output.stdout).contains(&message).then_some(())
        });
    }
}

/// S004-2: a file that is deleted too early is named until it is back, and its records are not lost. Trainers do not
/// ask for it without a pause.
#[test]
fn a_file_that_is_missing_is_named_until_it_is_back() {
    let all = |folder: &Folder<'_>| [folder.job(), folder.asynchronous()];
    for mode in 0..2 {
        let scene = Scene::new();
        let folder = Folder::new(&scene);
        let cluster = Cluster::new(&scene, &all(&folder)[mode], 1, "2s");
        let _others = [cluster.master("master"), cluster.pserver("pserver")];
        folder.add("a.csv", 0, 500);
        cluster.until("the file is known", |it| it["stream"]["files"] == 1);
        fs::rename(folder.path("a.csv"), scene.path("elsewhere")).expect("it is there");
        let trainer = cluster.trainer("trainer");
        let attempts = || trainer.process.stderr().matches("task cannot be computed").count();
        eventually("it was asked for", || (0 < attempts()).then_some(()));
        let first = Instant::now();
        eventually("it was asked for often", || (10 <= attempts()).then_some(()));
        assert!(Duration::from_secs(1) < first.elapsed(), "ten times in {:?}", first.elapsed());
        cluster.until("the missing file is named", |it| {
            let waiting = it["waiting"].as_array().into_iter().flatten();
            waiting.filter_map(Value::as_str).any(|it| it.contains("a.csv"))
        });
        fs::rename(scene.path("elsewhere"), folder.path("a.csv")).expect("it is there");
        cluster.until("it is trained on", |it| it["examples"] == 500 && it["waiting"][1].is_null());
    }
}

/// Files of the job with kills, and their records.
const FILES: usize = 6;
const FILE_RECORDS: usize = RECORDS / FILES;

impl Folder<'_> {
    /// Adds file `index` of those of the job with kills.
    fn add_one(&self, index: usize) {
        let name = format!("{:x}.csv", (index * 7) % 16);
        self.add(&name, FILE_RECORDS * index, FILE_RECORDS * (index + 1));
    }

    fn asynchronous(&self) -> Job {
        Job::stream(&self.scene.path("in"), Mode::Async)
    }
}

/// Trains on files that come while every role is killed; returns the result.
fn with_kills(scene: &Scene, folder: &Folder<'_>, job: &Job) -> Value {
    let cluster = Cluster::new(scene, job, 2, "2s");
    let mut masters = vec![cluster.master("master-0")];
    let mut pservers = vec![cluster.pserver("pserver-0"), cluster.pserver("pserver-1")];
    let mut trainers = vec![cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    for index in 0..FILES {
        folder.add_one(index);
        let trained = (FILE_RECORDS * index) as u64;
        cluster.until(&format!("{index} files are trained on"), |it| {
            it["examples"].as_u64() >= Some(trained) && it["stream"]["files"] != 0
        });
        match index % 3 {
            0 => {
                trainers.remove(0).signal(Signal::SIGKILL);
                trainers.push(cluster.trainer(&format!("trainer-{}", index + 2)));
            }
            1 => {
                masters.remove(0).signal(Signal::SIGKILL);
                masters.push(cluster.master(&format!("master-{}", index + 1)));
            }
            _ => {
                pservers.remove(0).signal(Signal::SIGKILL);
                pservers.push(cluster.pserver(&format!("pserver-{}", index + 2)));
            }
        }
    }
    let drained = cluster.steadfast(&["drain"]);
    assert!(drained.status.success(), "{}", String::from_utf8_lossy(&drained.stderr));
    let result = cluster.result();
    let passes = cluster.list(&cluster.keys.stream_passes_prefix());
    let files: Vec<Value> = passes
        .values()
        .flat_map(|it| it.json::<Value>().expect("it is JSON")["files"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(files.len(), FILES, "{files:?}");
    let (code, report) = audit(&cluster.etcd.url(), &[]);
    assert_eq!(code, 0, "{report}");
    result
}

/// S004-2, F1, F4, I6, I7: each file of a stream counts once whatever is killed, also between the files; in synchronous
/// mode with the same bits.
#[test]
fn each_file_of_a_stream_counts_once_through_kills_of_every_role() {
    let all = FILE_RECORDS * FILES;
    let undisturbed = {
        let scene = Scene::new();
        let folder = Folder::new(&scene);
        (0..FILES).for_each(|index| folder.add_one(index));
        drained(&scene, Run::start(&scene, &folder.job(), &[]), "data")
    };
    assert_eq!(undisturbed["examples"], all);
    let scene = Scene::new();
    let folder = Folder::new(&scene);
    let result = with_kills(&scene, &folder, &folder.job());
    assert_eq!((&result["examples"], sha(&result)), (&all.into(), sha(&undisturbed)));
    let scene = Scene::new();
    let folder = Folder::new(&scene);
    let result = with_kills(&scene, &folder, &folder.asynchronous());
    assert_eq!(result["examples"], all);
}

/// S004-2, I6: passes that no checkpoint needs go from etcd, and their manifests from the store, also one of a master
/// that died before its pass was in etcd. Their files are not trained on again, also by another master.
#[test]
fn what_etcd_forgets_of_a_stream_is_not_trained_on_again() {
    const FILES: usize = 400;
    const FILE_RECORDS: usize = 4;
    const { assert!((FILES + 2) * FILE_RECORDS <= RECORDS) };
    let scene = Scene::new();
    let folder = Folder::new(&scene);
    let add = |index: usize| {
        let from = FILE_RECORDS * index;
        folder.add(&format!("{index:03}.csv"), from, from + FILE_RECORDS);
    };
    (0..FILES).for_each(add);
    let job = folder.job().with("every_steps = 20", "every_steps = 20\nkeep = 1");
    let cluster = Cluster::new(&scene, &job, 1, "2s");
    let manifests = scene.path("store").join("streams/stream");
    fs::create_dir_all(&manifests).expect("there is space");
    fs::write(manifests.join("000000007-dead.json"), "{}").expect("there is space");
    let master = cluster.master("master");
    let _others = [cluster.pserver("pserver"), cluster.trainer("trainer")];
    let passes = || cluster.list(&cluster.keys.stream_passes_prefix()).len();
    cluster.until("all files are trained on", |it| it["examples"] == FILES * FILE_RECORDS);
    eventually("old passes are forgotten", || (passes() < FILES / 2).then_some(()));
    eventually("their manifests are deleted", || {
        let objects = fs::read_dir(&manifests).ok()?.count();
        (objects == passes() + 1).then_some(())
    });
    // However long it took to add so many.
    add(FILES);
    cluster.until("a new file is found", |it| it["examples"] == (FILES + 1) * FILE_RECORDS);
    master.signal(Signal::SIGKILL);
    let _master = cluster.master("another master");
    add(FILES + 1);
    let drained = cluster.steadfast(&["drain"]);
    assert!(drained.status.success(), "{}", String::from_utf8_lossy(&drained.stderr));
    assert_eq!(cluster.result()["examples"], (FILES + 2) * FILE_RECORDS);
}

/// S004-2: a job without a stream ends by itself; one with a stream needs sources that can be listed.
#[test]
fn what_is_no_stream_is_refused_with_the_way_out() {
    let scene = Scene::new();
    let folder = Folder::new(&scene);
    let errors = |job: Job| {
        let ended = Run::start(&scene, &job, &[]).end();
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        ended.stderr
    };
    let path = folder.path("*.csv").display().to_string();
    let single = errors(folder.job().with(&path, "in/a.csv"));
    assert!(single.contains("`dataset.follow` needs sources with `*`"), "{single}");
    let passes = errors(folder.job().with("mode = \"sync\"", "mode = \"sync\"\npasses = 2"));
    assert!(passes.contains("`passes` means nothing with `dataset.follow`"), "{passes}");
    let mut run = Run::start_in(&scene, &Job::endless(), "other", &[]);
    run.until_step(1);
    let data = scene.path("other");
    let args = ["drain", "--data-dir", data.to_str().expect("it is text")];
    let ended = scene.start("drain", "steadfast", &args).end(BOUND);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("only one with `dataset.follow` is drained"), "{}", ended.stderr);
}
