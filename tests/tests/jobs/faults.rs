//! Jobs of real processes under faults: each ends with the parameters of the undisturbed run, and its
//! etcd history keeps the invariants at every revision.

use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use steadfast_common::job::spec::Mode;
use steadfast_tests::faults::{Fault, FaultTarget, Kind, Outcome, Role, Schedule, Shape};
use steadfast_tests::{
    EtcdCluster, Job, Network, Preloaded, Quota, Run, Scene, Signal, eventually, program,
};

/// Returns the SHA-256 of the job of all worlds after an undisturbed run.
fn undisturbed() -> &'static str {
    static SHA: OnceLock<String> = OnceLock::new();
    SHA.get_or_init(|| {
        let scene = Scene::new();
        undisturbed_sha(&scene, &Shape::default().job(&scene))
    })
}

fn undisturbed_sha(scene: &Scene, job: &Job) -> String {
    let summary = Run::to_end(scene, job, "data", &[]);
    summary["parameters_sha256"].as_str().expect("a finished job has parameters").to_owned()
}

/// Runs a job under a schedule; the result must not change.
fn survives(shape: &Shape, seed: Option<u64>, schedule: &Schedule) -> Outcome {
    let expected = undisturbed();
    let scene = Scene::new();
    let mut world = FaultTarget::start(&scene, shape.clone());
    let came = world.run(seed, schedule);
    world.finish_as(|outcome| {
        assert_eq!(outcome.sha, expected);
        assert_eq!(came, schedule.events.len(), "the job ended before the faults");
    })
}

fn with_three_etcd_members() -> Shape {
    Shape { etcd: 3, ..Shape::default() }
}

/// Returns the number of processes that ended before the job.
fn deaths(outcome: &Outcome) -> u32 {
    outcome.ends.values().sum()
}

/// S004-2, S004-21, S004-24, S004-33, S004-34, S004-40, S004-46, F1, F4, F7, F8, I1, I7, I9, I12
#[test]
fn a_job_survives_twenty_two_kills_of_masters_pservers_and_trainers() {
    let (seed, shape) = (11, Shape::default());
    let schedule = Schedule::random(seed, 22, &[Kind::Kill], &shape);
    let outcome = survives(&shape, Some(seed), &schedule);
    // Some kills hit a process that is not yet restarted after the previous kill.
    assert!(16 <= deaths(&outcome), "{:?}", outcome.ends);
}

/// S004-2, S004-20, S004-31, S004-43, F2, F3, F14, F19, F22, F29, I1, I7, I9, I12
#[test]
fn a_job_survives_kills_pauses_cuts_compaction_and_changes_of_the_leader() {
    let (seed, shape) = (5, with_three_etcd_members());
    let kinds = [Kind::Kill, Kind::Pause, Kind::Cut, Kind::EtcdCompact, Kind::EtcdMoveLeader];
    survives(&shape, Some(seed), &Schedule::random(seed, 9, &kinds, &shape));
}

/// The audit at the end of each run proves that each record was applied once per pass.
///
/// S004-3, S004-5, S004-45, F1, F4, F7, F8, I1, I2, I4, I6, I9, I12
#[test]
fn an_asynchronous_job_counts_each_record_once_through_kills_pauses_and_cuts() {
    let (seed, shape) = (3, Shape { mode: Mode::Async, ..Shape::default() });
    let kinds = [Kind::Kill, Kind::Kill, Kind::Pause, Kind::Leave, Kind::Isolate];
    let schedule = Schedule::random(seed, 8, &kinds, &shape);
    let scene = Scene::new();
    let mut world = FaultTarget::start(&scene, shape);
    let came = world.run(Some(seed), &schedule);
    world.finish_as(|outcome| {
        assert_eq!(came, schedule.events.len(), "the job ended before the faults");
        let metric = outcome.result["metric"].as_f64().expect("it was evaluated");
        assert!(0.94 <= metric, "{}", outcome.result);
    });
}

/// S004-20, F11, F40: a process that drains exits with 0, and the job continues.
#[test]
fn a_job_survives_draining_members_of_every_role() {
    let text = "@60 leave trainer 0; +60 leave master 0; +60 leave pserver 0; +60 leave master 1; \
                +60 leave trainer 1; +0 leave trainer 2";
    let outcome = survives(&Shape::default(), None, &text.parse().expect("it is a schedule"));
    assert!(outcome.ends.keys().all(|it| it.ends_with("with 0")), "{:?}", outcome.ends);
    assert_eq!(deaths(&outcome), 6, "{:?}", outcome.ends);
}

/// F22, F23, F26, F27
#[test]
fn a_job_survives_one_way_slow_and_reset_connections_to_etcd() {
    let text = "@60 isolate pserver 0; +0 slow trainer 0; +20 reset master 0; +0 reset pserver 1; \
                +40 deafen master 0; +0 deafen master 1; +20 isolate trainer 1";
    let schedule = text.parse().expect("it is a schedule");
    survives(&Shape::default(), None, &schedule);
}

/// F14
#[test]
fn the_death_of_the_leader_of_etcd_costs_no_lease() {
    let expected = undisturbed();
    let scene = Scene::new();
    let shape = Shape { lease_ttl_s: 9, ..with_three_etcd_members() };
    let mut world = FaultTarget::start(&scene, shape);
    world.until_step(200);
    world.inject(Fault::of_all(Kind::EtcdKillLeader));
    let (killed, last) = (Instant::now(), world.recorder.last());
    world.until("etcd takes commits again", |it| (last < it.recorder.last()).then_some(()));
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    let outcome = world.finish_as(|outcome| assert_eq!(outcome.sha, expected));
    assert_eq!(deaths(&outcome), 0, "{:?}", outcome.ends);
    let history = &outcome.audit["history"];
    assert_eq!((&history["terms"], &history["generations"]), (&json!(1), &json!(1)));
}

/// F15
#[test]
fn a_job_survives_a_dead_and_a_silent_member_of_etcd() {
    let text = "@100 etcd-kill 0; +100 etcd-pause 1; +100 etcd-kill 2";
    let shape = with_three_etcd_members();
    survives(&shape, None, &text.parse().expect("it is a schedule"));
}

/// S004-31, F19, F24
#[test]
fn a_trainer_that_missed_compacted_history_finds_the_new_master() {
    let expected = undisturbed();
    let scene = Scene::new();
    let shape = Shape { masters: 1, spares: 0, lease_ttl_s: 30, ..Shape::default() };
    let mut world = FaultTarget::start(&scene, shape);
    world.until_step(100);
    world.inject_for_long(Fault::of(Kind::Cut, Role::Trainer, 0));
    world.inject(Fault::of(Kind::Leave, Role::Master, 0));
    let address = world.keys.master_addr();
    world.until("another master acts", |world| {
        let found = world.recorder.changes();
        (found.filter(|it| it.key == address && it.value.is_some()).count() == 2).then_some(())
    });
    world.inject(Fault::of_all(Kind::EtcdCompact));
    world.heal_all();
    let lives = [0, 1, 2].map(|it| world.lives(Role::Trainer, it));
    assert_eq!(lives, [1; 3], "their leases are long");
    let outcome = world.finish_as(|outcome| assert_eq!(outcome.sha, expected));
    assert_eq!(deaths(&outcome), 1, "{:?}", outcome.ends);
    assert_eq!(outcome.audit["history"]["terms"], 2);
}

/// A trainer that dies between its pushes leaves the slots one step apart. The trainer that computes the
/// missing lanes must use parameters of a single step.
///
/// S004-2, S004-33, F7, I7
#[test]
fn a_job_survives_a_trainer_that_dies_while_the_slots_are_one_step_apart() {
    let expected = undisturbed();
    let scene = Scene::new();
    let shape = Shape { masters: 1, spares: 0, trainers: 1, ..Shape::default() };
    let mut world = FaultTarget::start(&scene, shape);
    world.until_step(100);
    let shut = Fault::of(Kind::Shut, Role::Pserver, 0);
    // All pushes of the step may already have arrived; then try again.
    let mut is_apart = false;
    while !is_apart {
        world.inject_for_long(shut);
        let mut seen = (Vec::new(), Instant::now());
        is_apart = world.until("no slot makes progress", |world| {
            let steps = world.steps_of_pservers();
            if steps != seen.0 {
                seen = (steps, Instant::now());
            }
            let is_still = Duration::from_millis(500) < seen.1.elapsed();
            is_still.then(|| seen.0.len() == 2 && seen.0[0] != seen.0[1])
        });
        if is_apart {
            world.inject(Fault::of(Kind::Kill, Role::Trainer, 0));
        }
        world.heal_all();
        let step = world.steps();
        world.until_step(step + 2);
    }
    world.finish_as(|outcome| assert_eq!(outcome.sha, expected));
}

/// Returns the latest checkpoint in etcd.
fn latest(world: &FaultTarget) -> Option<String> {
    let puts = world.recorder.changes().filter(|it| it.key == world.keys.checkpoint_latest());
    puts.filter_map(|it| it.value.clone()).last()
}

/// Training continues while no checkpoint can be stored, and existing checkpoints stay valid.
fn survives_a_store_that_fails(kind: Kind) {
    static SHA: OnceLock<String> = OnceLock::new();
    let scene = Scene::new();
    // Long enough to continue while checkpoints fail.
    let job = Shape::default().job(&scene).with("passes = 120", "passes = 250");
    let expected = SHA.get_or_init(|| undisturbed_sha(&scene, &job));
    let mut world = FaultTarget::start_job(&scene, Shape::default(), &job);
    if kind == Kind::StoreFull && !world.store_can_be_full() {
        eprintln!("skipped: this test may not mount a file system; run it as root");
        return;
    }
    world.until("a checkpoint exists", |world| latest(world));
    world.inject_for_long(Fault::of_all(kind));
    let failed = "checkpoint failed";
    world.until("a failed checkpoint is logged", |world| world.says(Role::Master, failed));
    let (before, step) = (latest(&world), world.steps());
    world.until("an alert would be raised", |world| {
        let failures = world.metric(Role::Master, "steadfast_checkpoint_failures_in_a_row")?;
        (2.0 <= failures).then_some(())
    });
    world.until_step(step + 100);
    assert_eq!(latest(&world), before, "nothing can be stored");
    // Loading the checkpoint requires the store.
    world.heal_all();
    world.until("a checkpoint is taken again", |world| {
        let now = latest(world);
        (now != before).then_some(())
    });
    world.until("the alert ends by itself", |world| {
        let failures = world.metric(Role::Master, "steadfast_checkpoint_failures_in_a_row")?;
        (failures == 0.0).then_some(())
    });
    world.inject(Fault::of(Kind::Kill, Role::Pserver, 0));
    world.finish_as(|outcome| assert_eq!(&outcome.sha, expected));
}

/// F33
#[test]
fn a_job_survives_an_unreachable_store_while_checkpoints_are_taken() {
    survives_a_store_that_fails(Kind::StoreAway);
}

/// F30
#[test]
fn a_job_survives_a_full_store_while_checkpoints_are_taken() {
    survives_a_store_that_fails(Kind::StoreFull);
}

/// F16, F17
#[test]
fn a_job_survives_an_etcd_that_stalls_until_all_leases_expire() {
    survives(&Shape::default(), None, &"@200 etcd-stall".parse().expect("it is a schedule"));
}

/// F16, F17
#[test]
fn pservers_keep_their_memory_after_etcd_stalled_until_all_leases_expired() {
    let expected = undisturbed();
    let scene = Scene::new();
    let shape = Shape { spares: 0, ..Shape::default() };
    let mut world = FaultTarget::start(&scene, shape);
    world.until_step(200);
    world.inject(Fault::of_all(Kind::EtcdStall));
    let outcome = world.finish_as(|outcome| assert_eq!(outcome.sha, expected));
    let of_pservers = outcome.ends.keys().filter(|it| it.starts_with("pserver"));
    assert_eq!(of_pservers.count(), 0, "{:?}", outcome.ends);
    assert_eq!(outcome.checkpoints_loaded, Vec::<Value>::new(), "a checkpoint was restored");
}

/// Waits until a pserver and a trainer have passed the deadlines of their leases.
fn until_leases_are_late(world: &mut FaultTarget<'_>) {
    for role in [Role::Pserver, Role::Trainer] {
        world.until("a lease is not renewed in time", |world| {
            world.says(role, "etcd did not renew the lease in time")
        });
    }
}

/// Checks that no pserver and no trainer has ended, and that no checkpoint was restored.
fn assert_no_step_was_taken_back(outcome: &Outcome) {
    let servers = outcome.ends.keys().filter(|it| !it.starts_with("master"));
    assert_eq!(servers.count(), 0, "{:?}", outcome.ends);
    assert_eq!(outcome.checkpoints_loaded, Vec::<Value>::new(), "a checkpoint was restored");
}

/// F16, F17: a step of a synchronous job needs no commit.
#[test]
fn synchronous_steps_go_on_while_etcd_is_away_for_longer_than_a_lease() {
    let scene = Scene::new();
    let job = Shape::default().job(&scene).with("passes = 120", "passes = 400");
    let expected = Run::to_end(&scene, &job, "data", &[]);
    let all = expected["steps"].as_u64().expect("a finished job has steps");
    let mut world = FaultTarget::start_job(&scene, Shape::default(), &job);
    world.until_step(100);
    world.inject_for_long(Fault::of_all(Kind::EtcdStall));
    until_leases_are_late(&mut world);
    let (step, checkpoint) = (world.steps(), latest(&world));
    // A fast machine may be at the end by now.
    world.until_step((step + 100).min(all));
    assert_eq!(latest(&world), checkpoint, "nothing can be committed");
    world.heal_all();
    let sha = &expected["parameters_sha256"];
    let outcome = world.finish_as(|outcome| assert_eq!(outcome.sha, *sha));
    assert_no_step_was_taken_back(&outcome);
}

/// F16: the end of a job is a commit.
#[test]
fn a_job_that_has_computed_its_last_step_waits_for_etcd() {
    let scene = Scene::new();
    let job = Shape::default().job(&scene);
    let expected = Run::to_end(&scene, &job, "data", &[]);
    let mut world = FaultTarget::start_job(&scene, Shape::default(), &job);
    world.until_step(100);
    world.inject_for_long(Fault::of_all(Kind::EtcdStall));
    until_leases_are_late(&mut world);
    world.until_step(expected["steps"].as_u64().expect("a finished job has steps"));
    world.heal_all();
    let sha = &expected["parameters_sha256"];
    let outcome = world.finish_as(|outcome| assert_eq!(outcome.sha, *sha));
    assert_no_step_was_taken_back(&outcome);
}

/// F31: rows in limited memory, shards and the model are synced. A process whose sync fails does not take it for done.
#[test]
fn a_job_with_a_table_survives_syncs_that_fail() {
    let schedule = "@60 sync-fail; +60 sync-fail; +20 kill pserver 0; +40 sync-fail";
    survives_in_chaos(&["--job", "table", "--spares", "1"], schedule);
}

/// F31: an etcd whose log cannot be synced acknowledges nothing more, and ends. Another one takes over what is durable.
#[test]
fn a_job_goes_on_after_its_embedded_etcd_could_not_sync_its_log() {
    let scene = Scene::new();
    let job = Job::long();
    let expected = undisturbed_sha(&scene, &job);
    let Some(faults) = Preloaded::build(&scene) else {
        eprintln!("skipped: there is no C compiler");
        return;
    };
    let mut run = Run::start_with(&scene, &job, "failing", &faults.environment());
    run.until_step(200);
    faults.fail_syncs(true);
    eventually("the reason is told", || {
        let told = |line: &str| line.contains("etcd ended") && line.contains("cannot sync");
        run.stderr().lines().any(told).then_some(())
    });
    faults.fail_syncs(false);
    let summary = run.finish();
    assert_eq!(summary["parameters_sha256"], expected.as_str());
    scene.audited("failing");
}

/// F28: leases, deadlines and pauses are not measured with the calendar.
#[test]
fn jumps_of_the_calendar_time_move_no_lease_and_no_step() {
    let schedule = "@60 clock; +100 clock; +100 clock; +100 clock";
    let outcome = survives(&Shape::default(), None, &schedule.parse().expect("it is a schedule"));
    assert_eq!(deaths(&outcome), 0, "{:?}", outcome.ends);
    let history = &outcome.audit["history"];
    assert_eq!((&history["terms"], &history["generations"]), (&json!(1), &json!(1)), "{history}");
}

/// F20
#[test]
fn a_job_survives_an_etcd_without_space() {
    let expected = undisturbed();
    let scene = Scene::new();
    let mut world = FaultTarget::start(&scene, Shape::default());
    world.until_step(200);
    world.inject(Fault::of_all(Kind::EtcdFull));
    assert!(world.etcd.is_full());
    world.finish_as(|outcome| assert_eq!(outcome.sha, expected));
}

/// Each fault of etcd has the described effect.
#[test]
fn an_etcd_of_three_members_recovers_from_every_fault_that_the_suite_injects() {
    let scene = Scene::new();
    let mut etcd = EtcdCluster::start(&scene, 3, Quota::Bytes(8 << 20));
    let first = etcd.leader().expect("it answers");
    let second = etcd.move_leader().expect("another one can lead");
    assert_ne!(first, second);
    eventually("it leads", || (etcd.leader() == Some(second)).then_some(()));
    etcd.kill(second);
    let third = eventually("one of the others leads", || etcd.leader());
    assert_ne!(third, second);
    etcd.start_missing();
    etcd.signal(third, Signal::SIGSTOP);
    eventually("one of the others leads", || etcd.leader().filter(|it| *it != third));
    etcd.signal(third, Signal::SIGCONT);
    assert!(etcd.fill("mark") && etcd.is_full());
    eventually("what filled it is deleted", || etcd.empty("mark").then_some(()));
    let now = etcd.revision().expect("it answers");
    eventually("there is space again", || etcd.reclaim(now).then_some(()));
}

/// Returns how often a slot was lost.
fn slots_lost(world: &FaultTarget) -> usize {
    let of_slots =
        world.recorder.changes().filter(|it| it.key.starts_with(&world.keys.ps_prefix()));
    of_slots.filter(|it| it.value.is_none()).count()
}

/// S004-43, F16, F22, F23, F27
#[test]
fn a_job_survives_a_pserver_whose_network_loses_etcd_and_then_everything() {
    let expected = undisturbed();
    let network = match Network::make() {
        Ok(network) => network,
        Err(reason) => {
            eprintln!("skipped: no network of its own can be made here (run it as root): {reason}");
            return;
        }
    };
    let scene = Scene::new();
    let (shape, role) = (Shape { spares: 0, ..Shape::default() }, Role::Pserver);
    let job = shape.job(&scene);
    let mut world = FaultTarget::start_apart(&scene, shape, &job, Some((role, 0, network)));
    world.until_step(100);
    let ports = world.etcd_ports(role, 0);
    ports.iter().for_each(|it| world.network(role, 0).drop_port(*it));
    world.until("its slot is free", |world| (1 <= slots_lost(world)).then_some(()));
    ports.iter().for_each(|it| world.network(role, 0).pass_port(*it));
    let step = world.steps();
    world.until_step(step + 100);

    world.network(role, 0).link_down();
    world.until("its slot is free again", |world| (2 <= slots_lost(world)).then_some(()));
    world.network(role, 0).link_up();
    let outcome = world.finish_as(|outcome| assert_eq!(outcome.sha, expected));
    assert_eq!(outcome.checkpoints_loaded, Vec::<Value>::new(), "it kept its memory both times");
}

/// F22, F23, F24, F27: packets of one direction are lost between hosts, and between hosts and etcd.
#[test]
fn a_job_on_hosts_of_their_own_survives_packets_that_are_lost_in_one_direction() {
    if let Err(reason) = Network::make() {
        eprintln!("skipped: no network of its own can be made here (run it as root): {reason}");
        return;
    }
    let schedule = "@60 mute pserver 0; +20 shut trainer 1; +20 isolate trainer 0; +20 deafen pserver 1; \
                    +20 mute trainer 2; +20 shut pserver 1; +20 mute master 0; +20 isolate pserver 0";
    survives_in_chaos(&["--hosts"], schedule);
}

/// Runs a schedule with the program `chaos`.
fn survives_in_chaos(shape: &[&str], schedule: &str) {
    // It waits until it may have a scene, so this test has none.
    let mut command = Command::new(program("chaos"));
    let output = command.args(shape).args(["--schedule", schedule]).output();
    let output = output.expect("the program starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let faults = schedule.split(';').count();
    assert!(text.contains(&format!("survived {faults} faults")), "{text}");
}

/// I7: a spare may still read the rows of a table when the job ends, and then exits in order.
#[test]
fn a_job_with_a_table_survives_changes_of_its_slots_while_spares_follow_them() {
    let schedule = "@46 slow pserver 2; +0 kill trainer 2; +13 slots; +25 leave master 0; +52 slots; \
                    +10 etcd-pause 1; +50 kill-all; +48 etcd-compact; +44 shut master 0";
    survives_in_chaos(&["--job", "table", "--spares", "2", "--warm-spares", "1"], schedule);
}

/// F37, I7: an operator changes the number of slots while processes are killed.
#[test]
fn a_job_survives_changes_of_the_number_of_slots_under_kills() {
    let schedule = "@60 slots; +20 kill pserver 0; +30 kill trainer 1; +30 slots; +0 kill pserver 1; \
                    +40 slots; +20 kill master 0";
    survives(&Shape::default(), None, &schedule.parse().expect("it is a schedule"));
}

/// S004-24, F16, F18
#[test]
fn a_job_survives_the_death_of_everything_including_etcd() {
    let schedule = "@400 kill-all; +100 kill-all".parse().expect("it is a schedule");
    survives(&with_three_etcd_members(), None, &schedule);
}
