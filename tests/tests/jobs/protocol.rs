//! The protocol between processes on a real etcd: leadership, slots, processes that resume after their
//! lease expired, and the etcd history.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use steadfast_audit::history::{HistoryReport, Revision, check};
use steadfast_common::job::dataset::Manifest;
use steadfast_tests::{
    Cluster, EtcdServer, Job, Member, Run, Scene, Signal, etcdctl, eventually, history, program,
    within,
};

/// Short lease TTL: failures are detected soon.
const SHORT: &str = "2s";

/// Long lease TTL: whatever happens earlier is not caused by expiry.
const LONG: &str = "60s";

/// Upper bound for an immediate reaction, on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(10);

fn sha(result: &Value) -> String {
    result["parameters_sha256"].as_str().expect("a finished job has parameters").to_owned()
}

/// Returns the SHA-256 of the long job after an undisturbed run.
fn undisturbed() -> String {
    sha(&Run::undisturbed(&Job::long()))
}

/// Returns the holders of the slots: admin address and create-revision, by key.
fn holders(cluster: &Cluster) -> BTreeMap<String, (String, i64)> {
    let slots = cluster.list(&cluster.keys.ps_prefix());
    let holder = |entry: &steadfast_coord::Entry| {
        let record: Value = entry.json().expect("slots are JSON");
        let admin = record["admin"].as_str().expect("a holder has an admin port").to_owned();
        (admin, entry.create_revision)
    };
    slots.iter().map(|(key, entry)| (key.clone(), holder(entry))).collect()
}

/// S004-40, S004-41, S004-47, D3, F6
#[test]
fn of_more_pservers_than_slots_each_slot_gets_one_and_spares_take_over_freed_ones() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::long(), 2, SHORT);
    let mut pservers: Vec<Member> =
        (0..5).map(|it| cluster.pserver(&format!("pserver-{it}"))).collect();
    let _master = cluster.master("master");
    let is_spare = |it: &Member| {
        it.ask("/readyz").is_some_and(|it| it.body.contains("spare: all 2 slots are taken"))
    };
    eventually("two pservers hold slots and three are spares", || {
        let ready = pservers.iter().filter(|it| it.is_ready()).count();
        let spare = pservers.iter().filter(|it| is_spare(it)).count();
        ((ready, spare) == (2, 3)).then_some(())
    });
    let mut before = holders(&cluster);
    let slots = [0, 1].map(|slot| cluster.keys.ps(steadfast_common::ids::Slot(slot)));
    assert!(before.keys().eq(slots.iter()), "{before:?}");
    let different: BTreeSet<&String> = before.values().map(|(admin, _)| admin).collect();
    assert_eq!(different.len(), 2, "{before:?}");

    for slot in &slots {
        let (admin, incarnation) = before[slot].clone();
        let index = pservers.iter().position(|it| it.admin == admin).expect("it is one of them");
        drop(pservers.remove(index));
        eventually("a spare holds the slot", || {
            let (now, newer) = holders(&cluster).get(slot)?.clone();
            (incarnation < newer && pservers.iter().any(|it| it.admin == now)).then_some(())
        });
        let after = holders(&cluster);
        assert!(after.keys().eq(slots.iter()), "{after:?}");
        before = after;
    }
    let desired = cluster.get(&cluster.keys.ps_desired()).expect("it outlives its writer");
    assert_eq!((desired.value.as_slice(), desired.lease), (b"2".as_slice(), 0));
}

/// S004-20, S004-22, S004-23
#[test]
fn one_master_acts_and_a_standby_takes_over_after_a_kill_and_at_once_after_a_sigterm() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::long(), 1, SHORT);
    let first = cluster.master("first");
    eventually("the first acts", || first.is_ready().then_some(()));
    let second = cluster.master("second");
    eventually("the second stands by", || {
        second.ask("/readyz").filter(|it| it.code == 503 && it.body.contains("standby"))
    });
    let idle = second.ask("/status").expect("it answers");
    assert_eq!(serde_json::from_str::<Value>(&idle.body).unwrap(), json!({ "acting": false }));
    assert_eq!(cluster.acting(), first.admin);
    let lock = cluster.get(&cluster.keys.master_lock()).expect("it is held");
    let address = cluster.get(&cluster.keys.master_addr()).expect("a master acts");
    assert_ne!(lock.lease, 0);
    assert_eq!(address.lease, lock.lease, "the address goes with the lock");

    first.signal(Signal::SIGKILL);
    eventually("the second acts", || {
        (cluster.acting_now()? == second.admin && second.is_ready()).then_some(())
    });
    let taken = cluster.get(&cluster.keys.master_lock()).expect("it is held");
    assert!(lock.create_revision < taken.create_revision, "another leadership");

    drop(first);
    let with_long_leases = Cluster::new(&scene, &Job::long(), 1, LONG);
    draining_releases_the_role_at_once(&with_long_leases);
}

fn draining_releases_the_role_at_once(cluster: &Cluster) {
    let mut third = cluster.master("third");
    eventually("the third acts", || third.is_ready().then_some(()));
    let fourth = cluster.master("fourth");
    eventually("the fourth stands by", || fourth.ask("/readyz").filter(|it| it.code == 503));
    third.signal(Signal::SIGTERM);
    within(AT_ONCE, "the fourth acts", || {
        (cluster.acting_now()? == fourth.admin && fourth.is_ready()).then_some(())
    });
    assert_eq!(third.end().code, Some(0));
}

/// S004-20, F2
#[test]
fn a_master_stopped_beyond_its_lease_changes_nothing_and_exits() {
    let expected = undisturbed();
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::long(), 2, SHORT);
    let mut former = cluster.master("former");
    eventually("it acts", || former.is_ready().then_some(()));
    let _others: Vec<Member> = vec![
        cluster.master("successor"),
        cluster.pserver("pserver-0"),
        cluster.pserver("pserver-1"),
        cluster.trainer("trainer-0"),
        cluster.trainer("trainer-1"),
    ];
    cluster.until_step(200);
    former.signal(Signal::SIGSTOP);
    eventually("another acts", || (cluster.acting_now()? != former.admin).then_some(()));
    let leadership = cluster.get(&cluster.keys.master_lock()).expect("it is held");
    former.signal(Signal::SIGCONT);
    let ended = former.end();
    assert!(!matches!(ended.code, None | Some(0)), "{ended:?}");
    assert_eq!(ended.errors().len(), 1, "{}", ended.stderr);
    assert!(ended.errors()[0].contains("lease"), "{}", ended.stderr);

    assert_eq!(sha(&cluster.result()), expected);
    let result = cluster.get(&cluster.keys.result()).expect("it was just seen");
    let (revisions, report) = checked_history(&scene, &cluster, result.mod_revision);
    assert_eq!(report.terms, 2, "the former one and its successor");
    // The former holder does not put the lock after its successor has acquired it.
    let mut puts = revisions.iter().flat_map(|it| &it.changes).filter(|it| it.value.is_some());
    let last = puts.rfind(|it| it.key == cluster.keys.master_lock());
    assert_eq!(last.map(|it| it.create_revision), Some(leadership.create_revision));
}

/// S004-20, S004-23
#[test]
fn a_lock_overwritten_by_a_user_ends_the_term_and_the_remedy_is_logged() {
    let expected = undisturbed();
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::long(), 1, SHORT);
    let master = cluster.master("master");
    eventually("it acts", || master.is_ready().then_some(()));
    let key = cluster.keys.master_lock();
    let lock = cluster.get(&key).expect("it is held");
    let value = String::from_utf8(lock.value).expect("it is JSON");
    etcdctl(&cluster.etcd.url(), &["put", &key, &value]);
    // The next commit of the master detects the loss.
    let _others = [cluster.pserver("pserver"), cluster.trainer("trainer")];
    eventually("it reports the cause", || {
        master.ask("/readyz").filter(|it| it.code == 503 && it.body.contains("etcdctl del"))
    });
    etcdctl(&cluster.etcd.url(), &["del", &key]);
    assert_eq!(sha(&cluster.result()), expected);
}

/// S004-43, S004-46, D4, F3
#[test]
fn a_pserver_stopped_beyond_its_lease_acknowledges_nothing_and_exits() {
    let expected = undisturbed();
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::long(), 2, SHORT);
    let mut pservers: Vec<Member> =
        (0..3).map(|it| cluster.pserver(&format!("pserver-{it}"))).collect();
    let _others =
        [cluster.master("master"), cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    cluster.until_step(500);
    let (slot, (admin, incarnation)) =
        holders(&cluster).into_iter().next().expect("the slots are held");
    let index = pservers.iter().position(|it| it.admin == admin).expect("it is one of them");
    let mut former = pservers.remove(index);
    former.signal(Signal::SIGSTOP);
    eventually("the spare holds the slot", || {
        holders(&cluster).get(&slot).filter(|(_, newer)| incarnation < *newer).map(|_| ())
    });
    former.signal(Signal::SIGCONT);
    let ended = former.end();
    assert!(!matches!(ended.code, None | Some(0)), "{ended:?}");
    assert_eq!(ended.errors().len(), 1, "{}", ended.stderr);
    assert!(ended.errors()[0].contains("lease"), "{}", ended.stderr);
    assert_eq!(sha(&cluster.result()), expected);
    let generation = cluster.value(&cluster.keys.generation()).expect("it has one");
    assert!(2 <= generation["generation"].as_u64().unwrap(), "{generation}");
}

/// S004-38, S004-46, S004-30
#[test]
fn training_waits_for_an_empty_slot_and_status_shows_it() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::small(), 2, SHORT);
    let _others =
        [cluster.master("master"), cluster.pserver("pserver-0"), cluster.trainer("trainer-0")];
    let waiting = cluster.until("it waits for a slot", |it| {
        it["state"] == "waiting" && it["waiting"].to_string().contains("slot")
    });
    assert_eq!(waiting["version"], 0);
    let _second = cluster.pserver("pserver-1");
    assert_eq!(cluster.result()["state"], "finished");
}

/// S004-3, S004-5, S004-7, S004-10, S004-16, S004-21
#[test]
fn at_every_revision_each_task_is_in_one_queue_and_no_attempt_repeats() {
    let scene = Scene::new();
    let csv = std::fs::read_to_string(steadfast_tests::examples().join("data/digits.csv"));
    let mut lines: Vec<String> = csv.expect("it exists").lines().map(str::to_owned).collect();
    lines[2] = lines[2].replace(|it: char| it.is_ascii_digit(), "x");
    let data = scene.write("digits.csv", lines.join("\n") + "\n").display().to_string();
    let original = steadfast_tests::examples().join("data/digits.csv").display().to_string();
    let job = Job::asynchronous().with(&original, &data).with("fraction = 0.2", "fraction = 0.0");
    let cluster = Cluster::new(&scene, &job, 2, SHORT);
    let first = cluster.master("first");
    eventually("it acts", || first.is_ready().then_some(()));
    let trainer = cluster.trainer("trainer-0");
    let _others: Vec<Member> = vec![
        cluster.master("second"),
        cluster.pserver("pserver-0"),
        cluster.pserver("pserver-1"),
        cluster.trainer("trainer-1"),
    ];
    cluster.until("the third pass began", |it| it["pass"].as_u64() >= Some(2));
    drop(trainer);
    cluster.until("its death was detected", |it| {
        it["trainers"].as_array().is_some_and(|it| it.len() == 1)
    });
    drop(first);
    let result = cluster.result();
    assert_eq!(result["state"], "finished");
    assert_eq!(result["passes"], 30);

    let last = cluster.get(&cluster.keys.result()).expect("it was just seen").mod_revision;
    let (revisions, report) = checked_history(&scene, &cluster, last);
    // Each pass dispatched each of its tasks.
    let tasks = u64::from(manifest(&scene, &cluster).task_count());
    assert!(30 * tasks <= report.attempts, "{report}");
    let tasks = cluster.keys.tasks_prefix();
    let changes =
        revisions.iter().flat_map(|it| &it.changes).filter(|it| it.key.starts_with(&tasks));
    let states = |it: &str| {
        changes.clone().filter_map(|it| it.value.as_ref()).any(|value| value.contains(it))
    };
    assert!(states("\"state\":\"todo\""), "the dead trainer's tasks went back");
    assert!(states("\"state\":\"discarded\""), "the bad record's task was given up");
}

/// Returns the etcd history up to a revision; it must keep all invariants.
fn checked_history(scene: &Scene, cluster: &Cluster, last: i64) -> (Vec<Revision>, HistoryReport) {
    let revisions = history(scene, &cluster.etcd.url(), cluster.keys.root(), last);
    let manifest = manifest(scene, cluster);
    let (keys, spec) = (&cluster.keys, &cluster.spec);
    let job = steadfast_audit::history::Job { keys, spec, manifest: &manifest };
    let report = check(&job, &[], &revisions);
    assert!(report.is_clean(), "{report}");
    (revisions, report)
}

fn manifest(scene: &Scene, cluster: &Cluster) -> Manifest {
    let record = cluster.value(&cluster.keys.job()).expect("the job was accepted");
    let name = Manifest::object_name(record["manifest"].as_str().expect("it has a manifest"));
    let text = std::fs::read_to_string(scene.path("store").join(name)).expect("it is stored");
    serde_json::from_str(&text).expect("a manifest is JSON")
}

/// Checks the metrics text of a scrape; returns the names of its metrics.
fn check_metrics(text: &str) -> BTreeSet<String> {
    let mut kinds: BTreeMap<&str, &str> = BTreeMap::new();
    assert!(text.ends_with("# EOF\n"), "{text}");
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["#", "TYPE", name, kind] => assert!(kinds.insert(name, kind).is_none(), "{line}"),
            ["#", "HELP" | "UNIT", _, ..] | ["#", "EOF"] => {}
            [series, value] => {
                let name = series.split('{').next().unwrap_or_default();
                assert!(value.parse::<f64>().is_ok(), "{line}");
                let family =
                    |suffix: &str| name.strip_suffix(suffix).and_then(|it| kinds.get(it)).copied();
                let is_counter = family("_total") == Some("counter");
                let is_gauge = kinds.get(name) == Some(&"gauge");
                let is_histogram = ["_bucket", "_sum", "_count"]
                    .iter()
                    .any(|it| family(it) == Some("histogram") && name.contains("_seconds"));
                assert!(is_counter || is_gauge || is_histogram, "{line}");
                assert!(name.starts_with("steadfast_"), "{line}");
            }
            _ => panic!("{line}"),
        }
    }
    kinds.keys().map(|name| (*name).to_owned()).collect()
}

fn check_admin_port(member: &Member, metric: &str) -> Value {
    let ask = |path: &str| member.ask(path).unwrap_or_else(|| panic!("{path} is not answered"));
    assert_eq!(ask("/healthz").code, 200);
    assert_eq!(ask("/readyz").code, 200);
    let page = ask("/");
    assert!(page.code == 200 && page.head.contains("text/html"), "{page:?}");
    assert!(page.body.contains("digits"), "{page:?}");
    let metrics = ask("/metrics");
    assert!(metrics.code == 200 && metrics.head.contains("openmetrics-text"), "{}", metrics.head);
    let names = check_metrics(&metrics.body);
    assert!(names.contains(metric), "{names:?}");
    assert_eq!(ask("/none").code, 404);
    let status = ask("/status");
    assert!(status.code == 200 && status.head.contains("application/json"), "{}", status.head);
    serde_json::from_str(&status.body).expect("the status is JSON")
}

#[test]
fn every_role_answers_on_its_admin_port() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, SHORT);
    let master = cluster.master("master");
    let standby = {
        eventually("the master acts", || master.is_ready().then_some(()));
        cluster.master("standby")
    };
    let (pserver, trainer) = (cluster.pserver("pserver"), cluster.trainer("trainer"));
    cluster.until_step(50);
    assert_eq!(check_admin_port(&master, "steadfast_master_acting")["job"], "digits");
    assert_eq!(check_admin_port(&pserver, "steadfast_pserver_pushes")["slot"], 0);
    assert!(check_admin_port(&trainer, "steadfast_trainer_examples").is_object());
    assert_eq!(standby.ask("/readyz").expect("it answers").code, 503);
    check_metrics(&standby.ask("/metrics").expect("it answers").body);
}

fn status(etcd: &EtcdServer, more: &[&str]) -> String {
    let mut command = std::process::Command::new(program("steadfast"));
    command.args(["status", "--etcd-endpoints", &etcd.url()]).args(more);
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it is text")
}

#[test]
fn the_status_of_a_running_job_shows_queues_members_and_steps() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 2, SHORT);
    let _members = [
        cluster.master("master"),
        cluster.pserver("pserver-0"),
        cluster.pserver("pserver-1"),
        cluster.trainer("trainer"),
    ];
    cluster.until_step(50);
    let json: Value = serde_json::from_str(&status(&cluster.etcd, &["--output", "json"])).unwrap();
    assert_eq!(json["state"], "training", "{json}");
    assert_eq!(json["slots"].as_array().map(Vec::len), Some(2));
    assert_eq!(json["trainers"][0]["lanes"].as_array().map(Vec::len), Some(8));
    let queues = json["queues"].as_object().expect("it has queues");
    let total: u64 = queues.values().filter_map(Value::as_u64).sum();
    assert_eq!(total, 32, "40 tasks, a fifth of which is held out: {json}");
    let text = status(&cluster.etcd, &[]);
    for words in ["job digits: training (synchronous)", "tasks ", "2 of 2 slots", "trainers    1"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

/// S004-3
#[test]
fn two_jobs_share_one_etcd_without_a_common_key() {
    let scene = Scene::new();
    let etcd = EtcdServer::real(&scene);
    let url = etcd.url();
    let linear = Run::start_in(&scene, &Job::example("linear"), "linear", &["--etcd", &url]);
    let digits = Run::start_in(&scene, &Job::small(), "digits", &["--etcd", &url]);
    let started = Instant::now();
    assert_eq!(linear.finish()["job"], "linear");
    assert_eq!(digits.finish()["job"], "digits");
    assert!(started.elapsed() < Duration::from_secs(100));
    let keys = etcd.ctl(&["get", "--prefix", "--keys-only", ""]);
    for key in keys.lines().filter(|it| !it.is_empty()) {
        let of_one = ["/jobs/linear/", "/jobs/digits/"].iter().any(|root| key.starts_with(root));
        assert!(of_one, "{key}");
    }
}
