//! Audits of real jobs: the report of `steadfast audit` after faults, and after the applied records were
//! tampered with.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use steadfast_tests::{
    Cluster, Ended, Job, Member, Process, Scene, eventually, run_audit, sha256sum,
};

/// Short lease TTL: failures are detected soon.
const SHORT: &str = "2s";

/// Audits the job of a cluster; returns the exit code and the report.
fn audit(cluster: &Cluster, more: &[&str]) -> (i32, Value) {
    steadfast_tests::audit(&cluster.etcd.url(), more)
}

fn run(cluster: &Cluster, more: &[&str]) -> Ended {
    run_audit(&cluster.etcd.url(), more)
}

/// Writes the history of the keys of the job up to its result, in the format of `etcdctl watch`.
fn recorded(scene: &Scene, cluster: &Cluster) -> PathBuf {
    let last = cluster.get(&cluster.keys.result()).expect("the job is over").mod_revision;
    let mut command = scene.command(Path::new("etcdctl"));
    command.env("ETCDCTL_API", "3").args(["--endpoints", &cluster.etcd.url(), "watch"]);
    command.args(["--rev=1", "--prefix", "-w", "json", &format!("{}/", cluster.keys.root())]);
    let mut watch = Process::start(scene.directory(), "history", &mut command);
    let path = watch.stdout_path().to_owned();
    let mark = format!("\"mod_revision\":{last},");
    let text = eventually("the history is read", || {
        assert!(watch.is_running(), "{}", watch.stderr());
        let text = fs::read_to_string(&path).ok()?;
        // The last line may be incomplete.
        let whole = text.rfind('\n').map(|end| text[..end].to_owned())?;
        whole.contains(&mark).then_some(whole)
    });
    scene.write("history.json", text)
}

#[track_caller]
fn is_clean(scene: &Scene, cluster: &Cluster, answer: &(i32, Value)) {
    let (code, answer) = answer;
    assert_eq!((*code, &answer["clean"]), (0, &json!(true)), "{answer:#}");
    let violations = answer["findings"].as_array().expect("it lists findings").iter();
    assert!(violations.clone().all(|it| it["severity"] == "note"), "{answer:#}");
    if cluster.get(&cluster.keys.result()).is_some() {
        let history = recorded(scene, cluster).display().to_string();
        let (code, answer) = audit(cluster, &["--history", &history]);
        assert_eq!(code, 0, "{answer:#}");
        assert_eq!(answer["history"]["broken"], json!([]));
        assert!(1 <= answer["history"]["commits"].as_u64().unwrap(), "{answer:#}");
    }
}

/// Returns the number of proved passes of a report: finished, and exact in every slot.
fn proved(answer: &Value) -> usize {
    let passes = answer["passes"].as_array().expect("it lists passes").iter();
    let exact = |pass: &&Value| {
        let mut slots = pass["slots"].as_array().expect("a pass lists slots").iter();
        pass["state"] == "finished" && slots.all(|slot| slot["verdict"] == "exact")
    };
    passes.filter(exact).count()
}

/// F4, F7, I1, I6, I7, I9
#[test]
fn a_synchronous_job_with_a_killed_trainer_and_a_killed_pserver_audits_clean() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::long(), 2, SHORT);
    let _master = cluster.master("master");
    let pserver = cluster.pserver("pserver-0");
    eventually("it holds a slot", || pserver.is_ready().then_some(()));
    let _others = [cluster.pserver("pserver-1"), cluster.pserver("spare")];
    let (trainer, _trainer) = (cluster.trainer("trainer-0"), cluster.trainer("trainer-1"));
    cluster.until_step(450);
    drop(trainer);
    cluster.until_step(900);
    let (code, answer) = audit(&cluster, &["--now"]);
    assert_eq!((code, &answer["clean"]), (0, &json!(true)), "{answer:#}");
    assert!(70 <= proved(&answer), "{answer:#}");
    drop(pserver);
    let generation = cluster.until("the job continues with the spare", |it| it["generation"] == 2);
    assert!(900 <= generation["version"].as_u64().unwrap(), "{generation}");
    assert_eq!(cluster.result()["state"], "finished");
    let answer = audit(&cluster, &[]);
    is_clean(&scene, &cluster, &answer);
    assert!(200 <= proved(&answer.1), "{:#}", answer.1);
    assert_eq!(answer.1["generations"].as_array().map(Vec::len), Some(2), "{:#}", answer.1);
    let text = run(&cluster, &[]).stdout;
    assert!(text.contains("1440 records applied exactly once to every block"), "{text}");
    assert!(text.ends_with("clean\n"), "{text}");
}

/// F4, F7, I1, I2, I4, I6, I9
#[test]
fn an_asynchronous_job_with_a_killed_trainer_and_a_killed_pserver_audits_clean() {
    let scene = Scene::new();
    let job = Job::asynchronous()
        .with("every = \"10s\"", "every = \"500ms\"")
        .with("passes = 30", "passes = 60");
    let cluster = Cluster::new(&scene, &job, 2, SHORT);
    let _master = cluster.master("master");
    let pserver = cluster.pserver("pserver-0");
    eventually("it holds a slot", || pserver.is_ready().then_some(()));
    let _others = [cluster.pserver("pserver-1"), cluster.pserver("spare")];
    let (trainer, _trainer) = (cluster.trainer("trainer-0"), cluster.trainer("trainer-1"));
    cluster.until("a pass is over", |it| it["pass"].as_u64() >= Some(2));
    drop(trainer);
    cluster.until("a checkpoint exists", |it| it["checkpoint"].is_string());
    drop(pserver);
    cluster.until("the job continues with the spare", |it| it["generation"] == 2);
    assert_eq!(cluster.result()["state"], "finished");
    let answer = audit(&cluster, &[]);
    is_clean(&scene, &cluster, &answer);
    assert!(1 <= proved(&answer.1), "{:#}", answer.1);
}

/// S004-13: without a checkpoint nothing is proved, and that is not an error.
#[test]
fn an_audit_before_the_first_checkpoint_is_inconclusive() {
    let scene = Scene::new();
    let job = Job::endless().with("every_steps = 200", "every = \"1h\"");
    let cluster = Cluster::new(&scene, &job, 1, SHORT);
    let _members =
        [cluster.master("master"), cluster.pserver("pserver"), cluster.trainer("trainer")];
    cluster.until_step(5);
    let ended = run(&cluster, &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("no checkpoint yet: nothing can be proved"), "{}", ended.stdout);
}

/// F34, I6: tampered applied records, with all checksums adjusted to them.
#[test]
fn tampered_counts_are_found() {
    let scene = Scene::new();
    let job = Job::small().with("every = \"10s\"", "every_steps = 50");
    let cluster = Cluster::new(&scene, &job, 2, SHORT);
    let _members: [Member; 4] = [
        cluster.master("master"),
        cluster.pserver("pserver-0"),
        cluster.pserver("pserver-1"),
        cluster.trainer("trainer"),
    ];
    assert_eq!(cluster.result()["state"], "finished");
    let (code, before) = audit(&cluster, &[]);
    assert_eq!(code, 0, "{before:#}");
    tamper(&scene, &cluster, before["checkpoint"].as_str().expect("there is one"), |counts| {
        let sums = &mut counts[0]["passes"][1];
        sums["checksum"] = json!(sums["checksum"].as_u64().unwrap() ^ 1);
    });
    let (code, answer) = audit(&cluster, &[]);
    assert_eq!((code, &answer["clean"]), (1, &json!(false)), "{answer:#}");
    let finding = &answer["findings"][0];
    assert_eq!(
        (&finding["severity"], &finding["rule"]),
        (&json!("violation"), &json!("count_mismatch"))
    );
    assert_eq!((&finding["pass"], &finding["cause"]), (&json!(1), &json!("exchanged")));
    assert_eq!(answer["findings"].as_array().map(Vec::len), Some(1), "{answer:#}");
    let ended = run(&cluster, &[]);
    let line = "steadfast: error: the audit of job digits found 1 violation";
    assert_eq!(ended.errors(), [line], "{}", ended.stderr);
}

/// Changes the applied records of the first shard of a checkpoint, and adjusts its manifest.
fn tamper(scene: &Scene, cluster: &Cluster, id: &str, change: impl Fn(&mut Value)) {
    let key = cluster.keys.checkpoint(id);
    let mut record = cluster.value(&key).expect("it exists");
    let object = record["shards"][0]["object"].as_str().expect("a shard has an object");
    let path = scene.path("store").join(object);
    let bytes = fs::read(&path).expect("it is in the store");
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("it is eight bytes")) as usize;
    let (header, data) = rest.split_at(length);
    let mut header: Value = serde_json::from_slice(header).expect("a header is JSON");
    let text = header["__metadata__"]["steadfast"].as_str().expect("it has our metadata");
    let mut meta: Value = serde_json::from_str(text).expect("our metadata are JSON");
    change(&mut meta["counts"]);
    header["__metadata__"]["steadfast"] = json!(meta.to_string());
    let mut header = header.to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let length = (header.len() as u64).to_le_bytes();
    let bytes = [length.as_slice(), &header, data].concat();
    fs::write(&path, &bytes).expect("the store is writable");
    record["shards"][0]["sha256"] = json!(sha256sum(&path));
    record["shards"][0]["size_bytes"] = json!(bytes.len());
    cluster.etcd.ctl(&["put", &key, &record.to_string()]);
}
