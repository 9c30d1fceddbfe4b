//! Recovery after failures, without lost work and within a short time, with processes on a real etcd.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use steadfast_common::ids::Slot;
use steadfast_tests::{
    Cluster, Job, Member, Proxy, Run, Scene, Signal, eventually, free_address, program, sha256sum,
    within,
};
use uuid::Uuid;

/// Short lease TTL: failures are detected soon.
const SHORT: &str = "2s";

/// Long lease TTL: whatever happens earlier is not caused by expiry.
const LONG: &str = "60s";

/// Upper bound for an immediate reaction, on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(10);

fn sha(result: &Value) -> String {
    result["parameters_sha256"].as_str().expect("a finished job has parameters").to_owned()
}

/// Returns the SHA-256 of a job after an undisturbed run.
fn undisturbed(job: &Job) -> String {
    sha(&Run::undisturbed(job))
}

pub(crate) fn generation(cluster: &Cluster) -> Value {
    cluster.value(&cluster.keys.generation()).expect("a generation began")
}

/// Waits for the generation after `before`.
pub(crate) fn next_generation(cluster: &Cluster, before: &Value) -> Value {
    let number = |it: &Value| it["generation"].as_u64();
    eventually("another generation begins", || {
        cluster.value(&cluster.keys.generation()).filter(|it| number(before) < number(it))
    })
}

fn latest(cluster: &Cluster) -> String {
    let key = cluster.keys.checkpoint_latest();
    let pointer = eventually("there is a checkpoint", || cluster.value(&key));
    pointer.as_str().expect("a pointer is text").to_owned()
}

fn manifest(cluster: &Cluster, id: &str) -> Value {
    cluster.value(&cluster.keys.checkpoint(id)).unwrap_or_default()
}

/// A job of several seconds: its first checkpoints may come too early, and are then tried again after a while.
fn longer() -> Job {
    Job::long().with("passes = 300", "passes = 600")
}

/// Waits for two checkpoints, then removes the only trainer, so no further checkpoint is taken.
fn train_until_two_checkpoints_are_there(cluster: &Cluster, trainer: Member) {
    eventually("two checkpoints and the pointer exist", || {
        (cluster.list(&cluster.keys.checkpoints_prefix()).len() == 3).then_some(())
    });
    drop(trainer);
    cluster.until("no trainer is left", |it| it["trainers"] == json!([]));
}

/// Returns the file of a shard of a checkpoint.
fn shard(scene: &Scene, manifest: &Value, slot: usize) -> PathBuf {
    let object = manifest["shards"][slot]["object"].as_str().expect("a shard has an object");
    scene.path("store").join(object)
}

/// Returns the member that holds a slot.
fn holder<'m>(cluster: &Cluster, pservers: &'m [Member], slot: u32) -> &'m Member {
    let record = cluster.value(&cluster.keys.ps(Slot(slot))).expect("the slot is held");
    pservers.iter().find(|it| record["admin"] == it.admin.as_str()).expect("by one of them")
}

fn pservers(cluster: &Cluster, count: u32) -> Vec<Member> {
    (0..count).map(|it| cluster.pserver(&format!("pserver-{it}"))).collect()
}

/// F1, F4, F7, S004-20, S004-41: a closed connection reveals a dead process at once; the lease would take
/// a minute.
#[test]
fn the_work_of_a_killed_process_is_reassigned_long_before_its_lease_expires() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 2, LONG);
    let first = cluster.master("first");
    eventually("it acts", || first.is_ready().then_some(()));
    let second = cluster.master("second");
    let pservers = pservers(&cluster, 3);
    let trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    cluster.until_step(100);

    trainers[0].signal(Signal::SIGKILL);
    within(AT_ONCE, "the other trainer has all lanes", || {
        let status = cluster.until("it answers", |_| true);
        let lanes = status["trainers"][0]["lanes"].as_array().map(Vec::len);
        (status["trainers"].as_array()?.len() == 1 && lanes == Some(8)).then_some(())
    });

    let before = generation(&cluster);
    holder(&cluster, &pservers, 1).signal(Signal::SIGKILL);
    let after = within(AT_ONCE, "the spare takes part", || {
        let record = generation(&cluster);
        (before["generation"].as_u64() < record["generation"].as_u64()).then_some(record)
    });
    assert_eq!(after["slots"][0], before["slots"][0]);
    assert_ne!(after["slots"][1], before["slots"][1]);

    first.signal(Signal::SIGKILL);
    within(AT_ONCE, "the standby acts", || {
        (cluster.acting_now()? == second.admin && second.is_ready()).then_some(())
    });
    let resumed = cluster.until("training continues", |it| it["state"] == "training");
    let step = resumed["version"].as_u64().expect("a version is a number");
    cluster.until_step(step + 20);
    let recoveries = cluster.until("pauses are reported", |it| {
        it["recoveries"].as_array().is_some_and(|it| !it.is_empty())
    });
    assert!(recoveries["recoveries"][0]["seconds"].as_f64() < Some(30.0), "{recoveries}");
}

/// F34, S004-67, D1: if the newest checkpoint is damaged, the one before it is used; the damaged one is
/// kept, with the reason.
#[test]
fn a_damaged_checkpoint_is_skipped_and_the_result_stays_the_same() {
    let expected = undisturbed(&longer());
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &longer(), 2, SHORT);
    let _master = cluster.master("master");
    let pservers = pservers(&cluster, 3);
    let trainer = cluster.trainer("trainer-0");
    train_until_two_checkpoints_are_there(&cluster, trainer);
    let id = latest(&cluster);
    let path = shard(&scene, &manifest(&cluster, &id), 0);
    let mut bytes = fs::read(&path).expect("the shard exists");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(&path, &bytes).expect("the shard can be written");

    holder(&cluster, &pservers, 1).signal(Signal::SIGKILL);
    let chosen = eventually("a generation begins from another checkpoint", || {
        let record = generation(&cluster);
        let begins_from = record["checkpoint"].as_str()?.to_owned();
        (begins_from != id).then_some(begins_from)
    });
    assert!(chosen < id, "{chosen} comes before {id}");
    assert_eq!(latest(&cluster), chosen);
    let reason = manifest(&cluster, &id)["invalidated"].to_string();
    let object = path.file_name().expect("it is a file").to_string_lossy().into_owned();
    assert!(reason.contains(&object), "{reason} names the object {object}");
    assert_eq!(fs::read(&path).expect("it is kept"), bytes);

    let _trainer = cluster.trainer("trainer-1");
    assert_eq!(sha(&cluster.result()), expected);
}

/// F10, F34, S004-67: a missing shard counts as a damaged one; without a checkpoint the job starts anew
/// and ends with the same bits.
#[test]
fn a_job_that_lost_all_checkpoints_restarts_and_the_result_stays_the_same() {
    let expected = undisturbed(&Job::long());
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::long(), 1, SHORT);
    let _master = cluster.master("master");
    let pservers = pservers(&cluster, 2);
    let trainer = cluster.trainer("trainer-0");
    train_until_two_checkpoints_are_there(&cluster, trainer);
    fs::remove_dir_all(scene.path("store/shards")).expect("the shards can be removed");
    holder(&cluster, &pservers, 0).signal(Signal::SIGKILL);
    eventually("a generation starts without a checkpoint", || {
        let record = generation(&cluster);
        (record["generation"] != 1 && record["checkpoint"].is_null()).then_some(())
    });
    let _trainer = cluster.trainer("trainer-1");
    assert_eq!(sha(&cluster.result()), expected);
}

/// F35: a manifest to which no commit points is ignored; a dangling pointer does not hide the existing
/// checkpoints.
#[test]
fn forged_manifests_and_pointers_are_skipped() {
    let expected = undisturbed(&Job::long());
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::long(), 1, SHORT);
    let first = cluster.master("first");
    let pservers = pservers(&cluster, 3);
    let trainer = cluster.trainer("trainer-0");
    train_until_two_checkpoints_are_there(&cluster, trainer);
    let id = latest(&cluster);
    let mut forged = manifest(&cluster, &id);
    forged["position"]["version"] = json!(999_999);
    let forged_id = "000000999999-forged";
    let key = cluster.keys.checkpoint(forged_id);
    cluster.etcd.ctl(&["put", &key, &forged.to_string()]);

    let before = generation(&cluster);
    holder(&cluster, &pservers, 0).signal(Signal::SIGKILL);
    let after = next_generation(&cluster, &before);
    assert!(after["checkpoint"].as_str().is_some_and(|it| it != forged_id), "{after}");

    forged["shards"] = json!([]);
    cluster.etcd.ctl(&["put", &key, &forged.to_string()]);
    cluster.etcd.ctl(&["put", &cluster.keys.checkpoint_latest(), "no JSON"]);
    drop(first);
    let _second = cluster.master("second");
    holder(&cluster, &pservers, 0).signal(Signal::SIGKILL);
    let last = next_generation(&cluster, &after);
    assert!(last["checkpoint"].as_str().is_some_and(|it| it != forged_id), "{last}");
    eventually("the pointer is repaired", || {
        let pointer = cluster.get(&cluster.keys.checkpoint_latest())?;
        pointer.json::<String>().ok().filter(|it| it != forged_id)
    });
    let _trainer = cluster.trainer("trainer-1");
    assert_eq!(sha(&cluster.result()), expected);
}

/// F37, D2: the number of slots changes while the job runs; the new holders take checkpoints as well.
#[test]
fn a_changed_number_of_slots_moves_the_parameters_and_changes_no_bit() {
    let expected = undisturbed(&Job::long());
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::long(), 2, SHORT);
    let _master = cluster.master("master");
    let _pservers = pservers(&cluster, 3);
    let _trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    cluster.until_step(500);
    let before = generation(&cluster);
    cluster.etcd.ctl(&["put", &cluster.keys.ps_desired(), "3"]);
    let after = next_generation(&cluster, &before);
    assert_eq!(after["slots"].as_array().map(Vec::len), Some(3));
    eventually("the new generation takes checkpoints as well", || {
        (manifest(&cluster, &latest(&cluster))["generation"] == after["generation"]).then_some(())
    });
    assert_eq!(sha(&cluster.result()), expected);
}

/// F37, D2: slots that are added or removed read their state from the others, so that no step is taken back although
/// there is no checkpoint.
#[test]
fn a_changed_number_of_slots_takes_no_step_back() {
    let job = Job::long().with("every_steps = 200", "every = \"1h\"");
    let expected = undisturbed(&job);
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &job, 2, SHORT);
    let _master = cluster.master("master");
    let _pservers = pservers(&cluster, 3);
    let _trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    // The only checkpoint is that of the end.
    let none = |cluster: &Cluster<'_>| cluster.value(&cluster.keys.checkpoint_latest()).is_none();
    for (slots, step) in [("3", 300), ("1", 600), ("2", 900)] {
        cluster.until_step(step);
        let before = generation(&cluster);
        cluster.etcd.ctl(&["put", &cluster.keys.ps_desired(), slots]);
        let after = next_generation(&cluster, &before);
        assert_eq!(after["slots"].as_array().map(|it| it.len().to_string()), Some(slots.into()));
        let version = after["handover"]["position"]["version"].as_u64();
        assert!(Some(step) <= version, "{after}");
        assert!(none(&cluster), "a checkpoint was taken");
        eventually("the surplus pservers are spares", || {
            (cluster.list(&cluster.keys.ps_prefix()).len().to_string() == slots).then_some(())
        });
    }
    assert_eq!(sha(&cluster.result()), expected);
}

/// F40: a pserver that drains takes a checkpoint first.
#[test]
fn a_draining_pserver_loses_no_step() {
    drain_a_pserver(|_| ());
}

/// F40, F11: it does so as well if the acting master has just died: it waits for the standby.
#[test]
fn a_pserver_that_drains_during_a_failover_loses_no_step() {
    drain_a_pserver(|master| {
        master.signal(Signal::SIGKILL);
        master.end();
    });
}

/// Drains the pserver of a slot after something has happened to the acting master, and checks that no step is lost.
fn drain_a_pserver(before: impl Fn(&mut Member)) {
    let job = Job::long().with("every_steps = 200", "every = \"1h\"");
    let expected = undisturbed(&job);
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &job, 2, SHORT);
    let mut master = cluster.master("master");
    eventually("the first master acts", || master.is_ready().then_some(()));
    let _standby = cluster.master("standby");
    let mut pservers = pservers(&cluster, 3);
    let _trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    cluster.until_step(400);
    let present = generation(&cluster);
    let record = cluster.value(&cluster.keys.ps(Slot(0))).expect("the slot is held");
    let leaver = pservers.iter_mut().find(|it| record["admin"] == it.admin.as_str());
    let leaver = leaver.expect("it is one of them");
    before(&mut master);
    leaver.signal(Signal::SIGTERM);
    assert_eq!(leaver.end().code, Some(0));
    let after = next_generation(&cluster, &present);
    let id = after["checkpoint"].as_str().expect("it left a checkpoint").to_owned();
    let version = manifest(&cluster, &id)["position"]["version"].as_u64();
    assert!(Some(400) <= version, "{version:?}");
    assert_eq!(sha(&cluster.result()), expected);
}

/// F40: a trainer that drains in the middle of a task exits even if no pserver accepts its gradients.
#[test]
fn a_trainer_drains_while_a_slot_is_empty() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &asynchronous("rewind"), 1, SHORT);
    let _master = cluster.master("master");
    let mut pserver = cluster.pserver("pserver");
    let mut trainer = cluster.trainer("trainer");
    eventually("a checkpoint exists", || cluster.value(&cluster.keys.checkpoint_latest()));
    pserver.signal(Signal::SIGKILL);
    pserver.end();
    eventually("the slot is free", || {
        cluster.value(&cluster.keys.ps(Slot(0))).is_none().then_some(())
    });
    trainer.signal(Signal::SIGTERM);
    assert_eq!(trainer.end().code, Some(0));
    assert!(cluster.list(&cluster.keys.trainers_prefix()).is_empty());
}

/// S004-61, S004-62, S004-63, S004-64: shard files are named by UUIDs, manifests contain their SHA-256;
/// expired checkpoints are deleted once a newer one is committed.
#[test]
fn only_the_newest_checkpoints_are_kept_and_no_file_of_an_older_one() {
    let scene = Scene::new();
    // A periodic checkpoint is due at the same step as the final one. The first ones may come too early.
    let cluster = Cluster::new(&scene, &longer(), 2, SHORT);
    let _members = (cluster.master("master"), cluster.trainer("trainer"), pservers(&cluster, 2));
    let result = cluster.result();
    let prefix = cluster.keys.checkpoints_prefix();
    let pointer = cluster.keys.checkpoint_latest();
    let entries = cluster.list(&prefix).into_values().filter(|it| it.key != pointer);
    let manifests: Vec<Value> = entries.map(|it| it.json().expect("it is JSON")).collect();
    assert_eq!(manifests.len(), 2, "{manifests:?}");
    let versions = manifests.iter().map(|it| it["position"]["version"].as_u64());
    assert_eq!(versions.max().flatten(), result["steps"].as_u64());
    let mut named = BTreeSet::new();
    for shard in manifests.iter().flat_map(|it| it["shards"].as_array().expect("it has shards")) {
        let object = shard["object"].as_str().expect("a shard has an object");
        let path = scene.path("store").join(object);
        let name = path.file_stem().and_then(|it| it.to_str()).expect("a file has a name");
        assert!(name.parse::<Uuid>().is_ok(), "{object}");
        assert_eq!(shard["sha256"], sha256sum(&path), "{object}");
        named.insert(path);
    }
    assert_eq!(named.len(), 2 * 2);
    eventually("all other files are deleted", || {
        let files =
            fs::read_dir(scene.path("store/shards/digits")).expect("it is a directory").flatten();
        (files.map(|it| it.path()).collect::<BTreeSet<_>>() == named).then_some(())
    });
}

/// I5: a pserver holds one slot. A delayed duplicate of a request may claim another one later.
#[test]
fn an_excess_slot_held_by_a_pserver_is_released() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::small(), 2, LONG);
    let _members = [cluster.master("master"), cluster.pserver("first"), cluster.trainer("trainer")];
    let own = cluster.keys.ps(Slot(0));
    let entry = eventually("a slot is taken", || cluster.get(&own));
    let other = cluster.keys.ps(Slot(1));
    cluster.etcd.ctl(&["put", &other, &String::from_utf8_lossy(&entry.value)]);
    eventually("the other slot is free", || cluster.get(&other).is_none().then_some(()));
    assert!(cluster.get(&own).is_some());
    let _second = cluster.pserver("second");
    cluster.result();
}

/// F5: shards of a pserver that died between upload and commit are deleted later. Recent shards, whose
/// commit may be pending, and shards of other jobs in the same store are not.
#[test]
fn old_shards_without_a_manifest_are_deleted_and_new_ones_are_not() {
    let scene = Scene::new();
    let shards = scene.path("store/shards/digits");
    fs::create_dir_all(&shards).expect("the directory can be made");
    let (old, new) = (shards.join("old.safetensors"), shards.join("new.safetensors"));
    fs::write(&old, "orphan").expect("it can be written");
    fs::write(&new, "about to be committed").expect("it can be written");
    let of_another_job = scene.path("store/shards/other/old.safetensors");
    fs::create_dir_all(scene.path("store/shards/other")).expect("the directory can be made");
    fs::write(&of_another_job, "not ours").expect("it can be written");
    let day_ago = SystemTime::now() - Duration::from_secs(86_400);
    for path in [&old, &of_another_job] {
        let file = File::options().write(true).open(path).expect("it exists");
        file.set_modified(day_ago).expect("its time can be set");
    }
    let cluster = Cluster::new(&scene, &Job::endless(), 1, SHORT);
    let _members =
        [cluster.master("master"), cluster.pserver("pserver"), cluster.trainer("trainer")];
    eventually("the orphan is deleted", || (!old.exists()).then_some(()));
    assert!(new.exists() && of_another_job.exists());
    eventually("a checkpoint exists", || cluster.value(&cluster.keys.checkpoint_latest()));
    let path = shard(&scene, &manifest(&cluster, &latest(&cluster)), 0);
    assert!(path.exists(), "what a manifest names stays");
}

fn asynchronous(policy: &str) -> Job {
    Job::asynchronous()
        .with("passes = 30", "passes = 60")
        .with("[async]", &format!("[async]\nlost_pserver = \"{policy}\""))
        .with("every = \"10s\"", "every = \"300ms\"")
}

/// Kills the pserver of slot 1 of an asynchronous job after the first checkpoint; returns the next
/// generation and the result.
fn a_pserver_lost_under(policy: &str) -> (Value, Value) {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &asynchronous(policy), 2, SHORT);
    let _master = cluster.master("master");
    let pservers = pservers(&cluster, 3);
    let _trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    cluster.until("a checkpoint exists", |it| {
        it["checkpoint"].is_string() && it["pass"].as_u64() >= Some(5)
    });
    let before = generation(&cluster);
    holder(&cluster, &pservers, 1).signal(Signal::SIGKILL);
    let after = next_generation(&cluster, &before);
    (after, cluster.result())
}

/// D8, S004-70, I6: all slots and the queues are rolled back: no record is lost or counted twice.
#[test]
fn under_rewind_a_lost_pserver_rolls_back_all_slots_and_every_record_counts_once() {
    let (generation, result) = a_pserver_lost_under("rewind");
    assert!(generation.get("kept").is_none(), "{generation}");
    assert!(generation["checkpoint"].is_string(), "{generation}");
    assert_eq!(result["examples"], 60 * 1440);
}

/// S004-70: the other slots keep their state; only the lost one is rolled back.
#[test]
fn under_continue_a_lost_pserver_is_rolled_back_alone() {
    let (generation, result) = a_pserver_lost_under("continue");
    assert_eq!(generation["kept"], json!([0]), "{generation}");
    assert!(generation["checkpoint"].is_string(), "{generation}");
    let least = result["examples"].as_u64().expect("it is counted");
    assert!(60 * 1440 / 2 < least && least <= 60 * 1440, "{result}");
}

/// F35, I9: only an operator can roll the job back behind its latest checkpoint, and must confirm it.
#[test]
fn a_manual_rollback_requires_force_and_invalidates_later_checkpoints() {
    let expected = undisturbed(&longer());
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &longer(), 2, SHORT);
    let _master = cluster.master("master");
    let _pservers = pservers(&cluster, 2);
    train_until_two_checkpoints_are_there(&cluster, cluster.trainer("trainer-0"));
    let prefix = cluster.keys.checkpoints_prefix();
    let keys: Vec<String> = cluster.list(&prefix).into_keys().collect();
    let older = keys[0].trim_start_matches(&prefix).to_owned();
    let newer = latest(&cluster);
    let url = cluster.etcd.url();
    let restore = |more: &[&str]| {
        let mut command = std::process::Command::new(program("steadfast"));
        command.args(["checkpoint", "restore", &older, "--etcd-endpoints", &url]).args(more);
        command.output().expect("the program starts")
    };
    let before = generation(&cluster);
    let refused = restore(&[]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{words}");
    assert!(words.contains("discards") && words.contains("--force"), "{words}");
    assert_eq!(generation(&cluster), before);

    let done = restore(&["--force"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let after = next_generation(&cluster, &before);
    assert_eq!(after["checkpoint"], older.as_str());
    assert_eq!(latest(&cluster), older);
    assert!(manifest(&cluster, &newer)["invalidated"].to_string().contains("rolled back"));
    let _trainer = cluster.trainer("trainer-1");
    assert_eq!(sha(&cluster.result()), expected);
}

/// Returns the number of updates of a pserver.
fn updates(pserver: &Member) -> Option<u64> {
    let name = "steadfast_pserver_pushes_total{outcome=\"complete\"} ";
    let metrics = pserver.ask("/metrics")?.body;
    metrics.lines().find_map(|line| line.strip_prefix(name)?.parse().ok())
}

/// F39: a push that has reached one slot reaches the others even if its trainer drains meanwhile.
/// Otherwise, without another trainer, the slots would have no common version for a checkpoint.
#[test]
fn a_draining_trainer_completes_the_pushes_that_it_began() {
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    let scene = Scene::new();
    let job = Job::endless().with("hidden = [32]", "hidden = [2048]");
    let cluster = Cluster::new(&scene, &job, 2, LONG);
    let _master = cluster.master("master");
    let near = cluster.pserver("near");
    let listens = free_address();
    // Each step takes more than a second.
    let link = runtime.block_on(Proxy::start(&format!("http://{listens}")));
    link.slow(256 << 10);
    let at = ["--listen", &listens.to_string(), "--advertise", &link.address().to_string()];
    let far = cluster.pserver_with("far", &at);
    let mut trainer = cluster.trainer("trainer");
    let ahead = eventually("one slot is a step ahead", || {
        let (near, far) = (updates(&near)?, updates(&far)?);
        (far < near).then_some(near)
    });
    trainer.signal(Signal::SIGTERM);
    assert_eq!(trainer.end().code, Some(0));
    assert!(Some(ahead) <= updates(&far));
    assert_eq!(updates(&near), updates(&far));
    let requested = Instant::now();
    assert!(cluster.steadfast(&["checkpoint", "now"]).status.success());
    // A wait for a step that no trainer computes would take longer.
    assert!(requested.elapsed() < Duration::from_secs(5), "{:?}", requested.elapsed());
}
