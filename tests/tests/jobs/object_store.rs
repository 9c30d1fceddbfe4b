//! Jobs with data, checkpoints and model on an S3 server.

use std::fs;
use std::ops::Range;
use std::time::Duration;

use steadfast_tests::{Cluster, Job, Run, S3Server, Scene, Signal, eventually, get};

/// A secret that must not appear in any output.
const SECRET: &str = "canary-7f3a91c0-secret-key";
const KEY_ID: &str = "canary-key-id-55aa";

/// The environment of processes that use an S3 server.
fn environment(endpoint: &str) -> [(&str, &str); 4] {
    [
        ("AWS_ENDPOINT", endpoint),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", KEY_ID),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
    ]
}

/// I7, I10, F52: data are read from S3, checkpoints and the model are written to it; a pserver dies, the
/// store does not answer for a while; the result has the same bits as a run on local files, and the
/// credentials of the store appear only in the environment of processes.
#[test]
fn a_job_in_s3_survives_gives_the_same_bits_and_logs_no_secret() {
    let scene = Scene::new();
    let Some(s3) = S3Server::start(&scene) else { return };
    let expected = Run::to_end(&scene, &Job::long(), "local", &["--pservers", "2"]);
    let local = format!("{}/data/digits.parquet", steadfast_tests::examples().display());
    let job = Job::long().with(&local, &s3.url("digits.parquet"));
    let secret = scene.write("secret", format!("{SECRET}\n")).display().to_string();
    let endpoint = s3.endpoint();
    let environment = [
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", KEY_ID),
        ("AWS_SECRET_ACCESS_KEY_FILE", &secret),
    ];
    let cluster = Cluster::new(&scene, &job, 2, "2s").with_store(&s3.url("jobs"), &environment);
    let mut members = vec![cluster.master("master")];
    let names = ["pserver-0", "pserver-1", "spare"];
    members.extend(names.iter().map(|name| cluster.pserver(name)));
    members.extend(["trainer-0", "trainer-1"].iter().map(|name| cluster.trainer(name)));

    eventually("a checkpoint exists", || {
        cluster.get(&cluster.keys.checkpoint_latest()).map(|_| ())
    });
    let holder = members.iter_mut().skip(1).find(|it| it.is_ready()).expect("one holds a slot");
    holder.signal(Signal::SIGKILL);
    holder.end();
    cluster.until_step(700);
    s3.stop_answering();
    let shown: Vec<String> = ["/metrics", "/status", "/"]
        .iter()
        .filter_map(|path| Some(get(&members.first()?.admin, path)?.body))
        .collect();
    s3.resume();

    let result = cluster.result();
    assert_eq!(result["state"], "finished", "{result}");
    let sha256 = &result["parameters_sha256"];
    assert_eq!(*sha256, expected["parameters_sha256"], "{result}");
    members.iter_mut().for_each(|it| drop(it.process.end(Duration::from_secs(60))));

    let objects = s3.objects();
    assert!(objects.contains(&"jobs/model.safetensors".to_owned()), "{objects:?}");
    assert!(objects.iter().any(|it| it.starts_with("jobs/shards/digits/")), "{objects:?}");
    let mut verify = cluster.command("steadfast");
    let url = cluster.etcd.url();
    verify.args(["checkpoint", "verify", "--etcd-endpoints", &url]);
    let verified = verify.output().expect("the program starts");
    let report = String::from_utf8_lossy(&verified.stdout).into_owned();
    assert!(verified.status.success() && report.contains(sha256.as_str().unwrap()), "{verified:?}");

    assert_eq!(shown.len(), 3);
    let etcd = cluster.list("/").into_values().map(|it| String::from_utf8(it.value).unwrap());
    let files = fs::read_dir(scene.directory()).unwrap().map(|it| it.unwrap().path());
    let logs = files.filter(|it| it.extension().is_some_and(|it| it == "err" || it == "out"));
    let logs: Vec<String> = logs.map(|it| fs::read_to_string(it).unwrap()).collect();
    assert!(6 < logs.len() && logs.iter().any(|it| it.contains("shard restored")));
    for text in shown.into_iter().chain(etcd).chain(logs).chain([report, result.to_string()]) {
        for canary in [SECRET, KEY_ID] {
            assert!(!text.contains(canary), "{canary} is in: {text}");
        }
    }
}

/// A master names the missing bucket and exits before training starts.
#[test]
fn a_missing_bucket_is_named_with_a_hint() {
    let scene = Scene::new();
    let Some(s3) = S3Server::start(&scene) else { return };
    let endpoint = s3.endpoint();
    let environment = [("AWS_ENDPOINT", endpoint.as_str()), ("AWS_REGION", "us-east-1")];
    let cluster = Cluster::new(&scene, &Job::small(), 1, "2s");
    let cluster = cluster.with_store("s3://no-such-bucket/jobs", &environment);
    let ended = cluster.master("master").end();
    assert_ne!(ended.code, Some(0));
    assert!(ended.stderr.contains("no-such-bucket"), "{}", ended.stderr);
    assert!(cluster.value(&cluster.keys.job()).is_none());
}

/// I7: a shard is saved and restored even if its transfer exceeds the request timeout or its size exceeds
/// the limit of a single upload.
#[test]
fn large_objects_are_uploaded_to_s3_in_parts() {
    let scene = Scene::new();
    let Some(s3) = S3Server::start(&scene) else { return };
    let job = Job::small()
        .with("hidden = [16]", "hidden = [2048, 1024]")
        .with("passes = 30", "passes = 2")
        .with("decay_steps = 340", "decay_steps = 24");
    let endpoint = s3.endpoint();
    let environment = environment(&endpoint);
    let cluster = Cluster::new(&scene, &job, 1, "5s").with_store(&s3.url("jobs"), &environment);
    let members =
        [cluster.master("master"), cluster.pserver("pserver"), cluster.trainer("trainer")];
    let result = cluster.result();
    assert_eq!(result["state"], "finished", "{result}");
    let mut verify = cluster.command("steadfast");
    verify.args(["checkpoint", "verify", "--etcd-endpoints", &cluster.etcd.url()]);
    let verified = verify.output().expect("the program starts");
    assert!(verified.status.success(), "{verified:?}");
    let in_parts = s3.objects_in_parts();
    for place in ["jobs/model.safetensors", "jobs/shards/"] {
        assert!(in_parts.iter().any(|it| it.starts_with(place)), "{place}: {in_parts:?}");
    }
    drop(members);
}

/// S004-2, S004-35: objects that appear below a prefix are trained on, each once, until the stream is drained.
#[test]
fn the_objects_of_a_prefix_are_a_stream() {
    let scene = Scene::new();
    let Some(s3) = S3Server::start(&scene) else { return };
    let local = steadfast_tests::examples().join("data/linear.csv");
    let lines = fs::read_to_string(&local).expect("it is there");
    let lines: Vec<&str> = lines.lines().collect();
    let file = |records: Range<usize>| {
        let records = lines[1 + records.start..=records.end].iter();
        [&lines[0]].into_iter().chain(records).map(|line| format!("{line}\n")).collect::<String>()
    };
    let job = Job::example("linear")
        .with("passes = 30\n", "")
        .with("[dataset]", "[dataset]\nfollow = true")
        .with(&local.display().to_string(), &s3.url("logs/*/*.csv"))
        .with("[evaluation]\nfraction = 0.2", "");
    let endpoint = s3.endpoint();
    let environment = environment(&endpoint);
    let cluster = Cluster::new(&scene, &job, 1, "5s").with_store(&s3.url("jobs"), &environment);
    s3.put("logs/monday/1.csv", &file(0..300));
    let _members =
        [cluster.master("master"), cluster.pserver("pserver"), cluster.trainer("trainer")];
    cluster.until("the first object is trained on", |status| status["examples"] == 300);
    s3.put("logs/tuesday/1.csv", &file(300..500));
    cluster.until("the second object is trained on", |status| status["examples"] == 500);
    let drained = cluster.steadfast(&["drain"]);
    assert!(drained.status.success(), "{}", String::from_utf8_lossy(&drained.stderr));
    let result = cluster.result();
    assert_eq!((&result["examples"], &result["passes"]), (&500.into(), &2.into()), "{result}");
}
