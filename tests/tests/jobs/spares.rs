//! Slots that spares follow: what the loss of a pserver costs then.

use serde_json::{Value, json};
use steadfast_common::ids::Slot;
use steadfast_tests::{Cluster, Job, Member, Run, Scene, Signal, audit, eventually};

use crate::recovery::{generation, next_generation};

const TTL: &str = "10s";

/// No checkpoint is taken before the end.
const NEVER: &str = "every = \"1h\"";

fn synchronous() -> Job {
    Job::long().with("every_steps = 200", NEVER)
}

fn asynchronous() -> Job {
    Job::asynchronous().with("passes = 30", "passes = 60").with("every = \"10s\"", NEVER)
}

fn followed(job: Job) -> Job {
    job.with("seed = 7", "seed = 7\nwarm_spares = 2")
}

fn pservers(cluster: &Cluster, count: u32) -> Vec<Member> {
    (0..count).map(|it| cluster.pserver(&format!("pserver-{it}"))).collect()
}

/// Returns the member whose key has this value.
fn owner<'m>(record: &Value, pservers: &'m [Member]) -> &'m Member {
    pservers.iter().find(|it| record["admin"] == it.admin.as_str()).expect("by one of them")
}

fn holder(cluster: &Cluster, slot: u32) -> Value {
    cluster.value(&cluster.keys.ps(Slot(slot))).expect("the slot is held")
}

/// Waits until a slot has a follower other than `before`; returns its record.
fn follower(cluster: &Cluster, slot: u32, before: &Value) -> Value {
    eventually("the slot is followed", || {
        let record = cluster.value(&cluster.keys.follower(Slot(slot)))?;
        let holder = cluster.value(&cluster.keys.ps(Slot(slot)))?;
        (record["id"] != before["id"] && record["id"] != holder["id"]).then_some(record)
    })
}

/// Loses the pserver of each of two slots, one after the other, by `signal`; each follower takes over.
fn lose_both_pservers(cluster: &Cluster, pservers: &[Member], signal: Signal) {
    for slot in [1, 0] {
        let heir = follower(cluster, slot, &Value::Null);
        let before = generation(cluster);
        let lost = holder(cluster, slot);
        owner(&lost, pservers).signal(signal);
        let after = next_generation(cluster, &before);
        assert_eq!(after["kept"], json!([0, 1]), "{after}");
        assert_eq!(after.get("checkpoint"), None, "{after}");
        assert_eq!(after["reason"], format!("followers took over slot {slot}"));
        let holder = holder(cluster, slot);
        assert_eq!(holder["id"], heir["id"]);
        assert_eq!(holder["followed"], before["slots"][slot as usize]);
    }
}

/// Trains a job whose pservers are killed; returns the result and the audit.
fn trained_while_both_pservers_are_killed(job: &Job) -> (Value, Value) {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, job, 2, TTL);
    let _master = cluster.master("master");
    let pservers = pservers(&cluster, 5);
    let _trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    lose_both_pservers(&cluster, &pservers, Signal::SIGKILL);
    let result = cluster.result();
    let (code, report) = audit(&cluster.etcd.url(), &["--job", &job.name]);
    assert_eq!(code, 0, "{report}");
    (result, report)
}

/// F1, S004-41, I7: with followers, the death of a parameter server takes no step back: nothing is read from a
/// checkpoint, and the bits are those of an undisturbed run without spares.
#[test]
fn a_killed_pserver_takes_no_step_back_if_its_slot_is_followed() {
    let expected = Run::undisturbed(&synchronous());
    let (result, _) = trained_while_both_pservers_are_killed(&followed(synchronous()));
    assert_eq!(result["parameters_sha256"], expected["parameters_sha256"]);
    assert_eq!(result["steps"], expected["steps"]);
}

/// F1, I6: in asynchronous mode, too, each record counts once on each slot, whichever pserver is killed.
#[test]
fn an_acknowledged_push_is_not_lost_with_a_pserver_whose_slot_is_followed() {
    let (result, report) = trained_while_both_pservers_are_killed(&followed(asynchronous()));
    assert_eq!(result["examples"], 60 * 1440);
    assert_eq!(report["findings"], json!([]), "{report}");
}

/// F1, I7: rows of tables are followed as parameters are.
#[test]
fn rows_of_tables_are_followed() {
    let job = Job::example("clicks");
    let expected = Run::undisturbed(&job);
    let job = job.with("seed = 3", "seed = 3\nwarm_spares = 2");
    let (result, _) = trained_while_both_pservers_are_killed(&job);
    assert_eq!(result["parameters_sha256"], expected["parameters_sha256"]);
}

/// S004-41: a pserver that is drained hands its slot to the follower, and takes no checkpoint before.
#[test]
fn a_drained_pserver_hands_its_slot_to_the_follower() {
    let scene = Scene::new();
    let cluster =
        Cluster::new(&scene, &followed(Job::endless().with("every_steps = 200", NEVER)), 2, TTL);
    let _master = cluster.master("master");
    let pservers = pservers(&cluster, 5);
    let _trainer = cluster.trainer("trainer");
    lose_both_pservers(&cluster, &pservers, Signal::SIGTERM);
    let step = cluster.until("it answers", |_| true)["version"].as_u64();
    cluster.until("training goes on", |it| step < it["version"].as_u64());
}

/// F1, I7: a follower that is killed, or hangs, holds training up for a bounded time, and another spare follows instead.
#[test]
fn training_goes_on_without_a_follower_that_is_lost() {
    let scene = Scene::new();
    let job = followed(Job::endless());
    let cluster = Cluster::new(&scene, &job, 1, TTL);
    let _master = cluster.master("master");
    let pservers = pservers(&cluster, 3);
    let _trainer = cluster.trainer("trainer");
    let mut known = Value::Null;
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let record = follower(&cluster, 0, &known);
        owner(&record, &pservers).signal(signal);
        let key = cluster.keys.follower(Slot(0));
        eventually("the slot goes on without it", || {
            (cluster.value(&key).as_ref() != Some(&record)).then_some(())
        });
        let step = cluster.until("it answers", |_| true)["version"].as_u64();
        cluster.until("training goes on", |it| step.map(|it| it + 50) < it["version"].as_u64());
        known = record;
    }
    assert_eq!(generation(&cluster)["generation"], 1);
}

/// F3: a slot that loses its pserver and its follower together goes back to the checkpoint with all others.
#[test]
fn a_slot_that_loses_its_follower_as_well_goes_back_to_the_checkpoint() {
    let expected = Run::undisturbed(&Job::long());
    let scene = Scene::new();
    let job = followed(Job::long());
    let cluster = Cluster::new(&scene, &job, 2, "2s");
    let _master = cluster.master("master");
    let pservers = pservers(&cluster, 6);
    let _trainers = [cluster.trainer("trainer-0"), cluster.trainer("trainer-1")];
    cluster.until("a checkpoint exists", |it| it["checkpoint"].is_string());
    let heir = follower(&cluster, 1, &Value::Null);
    let before = generation(&cluster);
    let lost = holder(&cluster, 1);
    for record in [&heir, &lost] {
        owner(record, &pservers).signal(Signal::SIGKILL);
    }
    let after = next_generation(&cluster, &before);
    assert_eq!(after.get("kept"), None, "{after}");
    assert!(after["checkpoint"].is_string(), "{after}");
    assert_eq!(cluster.result()["parameters_sha256"], expected["parameters_sha256"]);
}

/// S004-41: the follower of a slot saves its shard of a checkpoint; without one the slot does.
#[test]
fn the_follower_saves_the_shard_of_its_slot() {
    let scene = Scene::new();
    let job = followed(Job::endless().with("every_steps = 200", NEVER));
    let cluster = Cluster::new(&scene, &job, 1, TTL);
    let _master = cluster.master("master");
    let pservers = pservers(&cluster, 2);
    let _trainer = cluster.trainer("trainer");
    let record = follower(&cluster, 0, &Value::Null);
    let checkpoint = |args: &[&str]| {
        let output = cluster.steadfast(&[&["checkpoint"], args].concat());
        assert!(output.status.success(), "{output:?}");
    };
    checkpoint(&["now"]);
    let spare = owner(&record, &pservers);
    let saved = || spare.process.stderr().matches("saved the shard of the slot").count();
    assert_eq!(saved(), 1, "{}", spare.process.stderr());
    checkpoint(&["verify", "latest"]);

    spare.signal(Signal::SIGKILL);
    checkpoint(&["now"]);
    assert_eq!(saved(), 1);
    checkpoint(&["verify", "--all"]);
}

/// S004-41: commands show who follows a slot.
#[test]
fn followers_are_listed() {
    let scene = Scene::new();
    let job = followed(Job::endless());
    let cluster = Cluster::new(&scene, &job, 1, TTL);
    let master = cluster.master("master");
    let _pservers = pservers(&cluster, 2);
    let _trainer = cluster.trainer("trainer");
    let record = follower(&cluster, 0, &Value::Null);
    let address = record["address"].as_str().expect("it has an address");
    let output = |args: &[&str]| {
        let output = cluster.steadfast(args);
        String::from_utf8(output.stdout).expect("it is text")
    };
    assert!(output(&["slots"]).contains(address));
    assert!(output(&["members"]).contains("follower of slot 0"));
    let status = cluster.until("the follower is shown", |it| it["slots"][0]["follower"] == address);
    assert_eq!(status["warm_spares"], 2);
    let metrics = master.ask("/metrics").expect("the master answers").body;
    assert!(metrics.contains("steadfast_slots_followed 1"), "{metrics}");
}
