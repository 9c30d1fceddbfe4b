//! Histories with one change: the check reports the broken rule at the right revision.

use steadfast_audit::history::{self, Change, HistoryReport, Job, Revision, Rule};
use steadfast_common::ids::{Generation, TaskId, TrainerId};
use steadfast_common::key_table::KEYS;
use steadfast_common::records::{
    CheckpointRecord, GenerationRecord, QueueRecord, ROLLED_BACK_TO, TaskRecord,
};
use steadfast_common::spec::LostPserver;
use uuid::Uuid;

use crate::async_world::AsyncWorld;
use crate::etcd::put;

const SEEDS: u64 = 60;

fn worlds() -> impl Iterator<Item = AsyncWorld> {
    (1..=SEEDS).map(|seed| {
        let mut world = AsyncWorld::new(seed, LostPserver::Rewind);
        world.run();
        world
    })
}

fn check(world: &AsyncWorld) -> HistoryReport {
    check_from(world, &[], &world.etcd.revisions)
}

fn check_from(world: &AsyncWorld, start: &[Change], revisions: &[Revision]) -> HistoryReport {
    let keys = &world.etcd.keys;
    history::check(&Job { keys, spec: &world.spec, manifest: &world.manifest }, start, revisions)
}

/// Asserts that the last revision breaks this rule, and that no other revision breaks any.
fn assert_reports(world: &AsyncWorld, rule: Rule) {
    let report = check(world);
    let last = world.etcd.revisions.last().expect("there are some").revision;
    assert!(report.broken.iter().any(|it| it.rule == rule), "{rule:?}: {report}");
    assert!(report.broken.iter().all(|it| it.revision == last), "{report}");
}

/// The acting master at the end.
fn holder(world: &AsyncWorld) -> u128 {
    let lock = world.etcd.keys.master_lock();
    let changes = world.etcd.revisions.iter().rev().flat_map(|it| &it.changes);
    let mut values = changes.filter(|it| it.key == lock).filter_map(|it| it.value.as_deref());
    let value: serde_json::Value =
        serde_json::from_str(values.next().expect("a master acts")).expect("it is JSON");
    let id: Uuid = value["holder"].as_str().expect("it has a holder").parse().expect("an id");
    id.as_u128()
}

fn head(world: &AsyncWorld) -> QueueRecord {
    world.state.ledger.head()
}

fn pending(attempt: u64) -> TaskRecord {
    TaskRecord::Pending {
        failures: 0,
        attempt: steadfast_common::ids::Attempt(attempt),
        trainer: TrainerId(Uuid::from_u128(7)),
        request: steadfast_common::ids::RequestId(Uuid::from_u128(8)),
        accepted: false,
        failed_by: Vec::new(),
        backs_up: None,
    }
}

/// Jobs in the middle of a pass, with a task done and another pending.
fn running_worlds() -> impl Iterator<Item = AsyncWorld> {
    (1..=SEEDS).map(|seed| {
        let mut world = AsyncWorld::new(seed, LostPserver::Rewind);
        while world.state.ledger.queues().done == 0 || world.state.ledger.pending().next().is_none()
        {
            world.step();
            assert!(!world.over);
        }
        world
    })
}

/// I1
#[test]
fn a_commit_without_the_lock_is_reported() {
    for mut world in worlds() {
        let lock = world.etcd.keys.master_lock();
        let commits = world.etcd.revisions.iter().filter(|it| 1 < it.changes.len()).count();
        let victim = world.rng.below(commits);
        let mut commits = world.etcd.revisions.iter_mut().filter(|it| 1 < it.changes.len());
        let revision = commits.nth(victim).expect("it was counted");
        revision.changes.retain(|change| change.key != lock);
        let at = revision.revision;
        let report = check(&world);
        assert!(report.broken.iter().any(|it| it.rule == Rule::Fence && it.revision == at));
    }
}

/// I1: of each key that only the acting master may write.
#[test]
fn a_put_of_any_fenced_key_without_the_lock_is_reported() {
    for key in KEYS.iter().filter(|key| key.is_fenced()) {
        let mut world = AsyncWorld::new(1, LostPserver::Rewind);
        world.run();
        let parts = key.path.split('/').map(|part| if part.starts_with('<') { "7" } else { part });
        let path = parts.collect::<Vec<_>>().join("/");
        world.etcd.txn(vec![put(&format!("{}/{path}", world.etcd.keys.root()), &"x")]);
        let last = world.etcd.revisions.last().expect("there are some").revision;
        let report = check(&world);
        let mut broken = report.broken.iter();
        let is_reported = broken.any(|it| it.rule == Rule::Fence && it.revision == last);
        assert!(is_reported, "{path}: {report}");
    }
}

/// I1: the keys that have the lease of the acting master end with it.
#[test]
fn the_end_of_a_masters_lease_breaks_no_rule() {
    for mut world in worlds() {
        let (holder, keys) = (holder(&world), world.etcd.keys.clone());
        let leased = [keys.master_addr(), keys.master_waits()];
        world.etcd.commit(holder, leased.iter().map(|key| put(key, &"x")).collect());
        world
            .etcd
            .txn(leased.into_iter().chain([keys.master_lock()]).map(|it| (it, None)).collect());
        let report = check(&world);
        assert!(report.broken.is_empty(), "{report}");
    }
}

/// I4
#[test]
fn a_reused_attempt_number_is_reported() {
    for mut world in running_worlds() {
        let holder = holder(&world);
        let (task, attempt, _) = world.state.ledger.pending().next().expect("one is pending");
        let record = pending(attempt.0.saturating_sub(1).min(attempt.0));
        if attempt.0 == 0 {
            continue;
        }
        let op = put(&world.etcd.keys.task(head(&world).round, task), &record);
        world.etcd.commit(holder, vec![op]);
        assert_reports(&world, Rule::Attempts);
    }
}

/// I4: attempt numbers never decrease.
#[test]
fn attempt_numbers_that_restart_are_reported() {
    for mut world in running_worlds() {
        let (holder, head) = (holder(&world), head(&world));
        let next_attempt = steadfast_common::ids::Attempt(0);
        let op = put(&world.etcd.keys.queue(), &QueueRecord { next_attempt, ..head });
        world.etcd.commit(holder, vec![op]);
        assert_reports(&world, Rule::Attempts);
    }
}

/// I2: a task that is done does not become pending again in its pass.
#[test]
fn a_done_task_that_is_pending_again_is_reported() {
    for mut world in running_worlds() {
        let (holder, head) = (holder(&world), head(&world));
        let queue = world.state.ledger.snapshot();
        let order =
            steadfast_common::schedule::task_order(&world.manifest, world.spec.seed, queue.pass);
        let done = order
            .into_iter()
            .take(queue.cursor as usize)
            .find(|task| !queue.open.contains_key(task) && !queue.discarded.contains_key(task));
        let done = done.expect("one is done");
        let next = steadfast_common::ids::Attempt(head.next_attempt.0 + 1);
        let keys = world.etcd.keys.clone();
        let ops = vec![
            put(&keys.queue(), &QueueRecord { next_attempt: next, ..head }),
            put(&keys.task(head.round, done), &pending(head.next_attempt.0)),
        ];
        world.etcd.commit(holder, ops);
        assert_reports(&world, Rule::Queues);
    }
}

/// I2: a task is done only after it was dispatched.
#[test]
fn a_skipped_task_is_reported() {
    let mut seen = 0;
    for mut world in running_worlds() {
        let (holder, head) = (holder(&world), head(&world));
        if head.cursor as usize == world.manifest.training_tasks().len() {
            continue;
        }
        let op = put(&world.etcd.keys.queue(), &QueueRecord { cursor: head.cursor + 1, ..head });
        world.etcd.commit(holder, vec![op]);
        assert_reports(&world, Rule::Queues);
        seen += 1;
    }
    assert!(10 < seen);
}

/// I2
#[test]
fn a_key_of_a_task_outside_the_pass_is_reported() {
    for mut world in running_worlds() {
        let holder = holder(&world);
        let key = world.etcd.keys.task(head(&world).round, TaskId(9_999));
        let record = TaskRecord::Discarded { failures: 9, reason: "bad".to_owned() };
        world.etcd.commit(holder, vec![put(&key, &record)]);
        assert_reports(&world, Rule::Queues);
    }
}

/// I3
#[test]
fn a_pass_that_ends_with_a_pending_task_is_reported() {
    for mut world in running_worlds() {
        let (holder, head) = (holder(&world), head(&world));
        let pass = steadfast_common::ids::Pass(head.pass.0 + 1);
        let next = QueueRecord { round: head.round + 1, pass, cursor: 0, ..head };
        world.etcd.commit(holder, vec![put(&world.etcd.keys.queue(), &next)]);
        assert_reports(&world, Rule::PassEnd);
    }
}

/// I2: after a restore, only the tasks that were done in the checkpoint are done.
#[test]
fn queues_rolled_back_to_anything_but_the_checkpoint_are_reported() {
    for mut world in running_worlds() {
        let (holder, head) = (holder(&world), head(&world));
        let next = QueueRecord { round: head.round + 1, cursor: 1, ..head };
        let keys = world.etcd.keys.clone();
        let generation = Generation(world.generations.len() as u64 + 1);
        let record = GenerationRecord { generation, ..GenerationRecord::default() };
        let ops = vec![put(&keys.queue(), &next), put(&keys.generation(), &record)];
        world.etcd.commit(holder, ops);
        assert_reports(&world, Rule::Queues);
    }
}

/// I5
#[test]
fn generations_that_do_not_increase_by_one_are_reported() {
    for (number, mut world) in worlds().enumerate() {
        let holder = holder(&world);
        let present = world.generations.len() as u64;
        let generation = Generation([present, present + 2, 0][number % 3]);
        let record = GenerationRecord { generation, ..GenerationRecord::default() };
        let op = put(&world.etcd.keys.generation(), &record);
        world.etcd.commit(holder, vec![op]);
        assert_reports(&world, Rule::Generations);
    }
}

/// I9
#[test]
fn a_pointer_to_a_missing_checkpoint_is_reported() {
    for (number, mut world) in worlds().enumerate() {
        let holder = holder(&world);
        let keys = world.etcd.keys.clone();
        let latest = world.saved.last().expect("the last is always taken").id.clone();
        let op = match number.is_multiple_of(2) {
            true => put(&keys.checkpoint_latest(), &"none"),
            false => (keys.checkpoint(&latest), None),
        };
        world.etcd.commit(holder, vec![op]);
        assert_reports(&world, Rule::Checkpoints);
    }
}

/// I9: the pointer does not move back past a checkpoint unless that was invalidated.
#[test]
fn a_pointer_that_moves_back_from_a_valid_checkpoint_is_reported() {
    let mut seen = 0;
    for mut world in worlds() {
        let holder = holder(&world);
        let last = world.saved.last().expect("the last is always taken").position.version;
        let older = world.saved.iter().find(|it| it.position.version < last);
        let Some(older) = older.map(|it| it.id.clone()) else { continue };
        let op = put(&world.etcd.keys.checkpoint_latest(), &older);
        world.etcd.commit(holder, vec![op]);
        assert_reports(&world, Rule::Checkpoints);
        seen += 1;
    }
    assert!(10 < seen);
}

/// I9: a master that dies between the two would leave a job without its newest checkpoint and without a rollback.
#[test]
fn a_checkpoint_that_is_abandoned_before_the_rollback_is_reported() {
    for mut world in worlds() {
        let holder = holder(&world);
        let latest = world.saved.last().expect("the last is always taken").id.clone();
        let key = world.etcd.keys.checkpoint(&latest);
        let mut record: CheckpointRecord = world.etcd.value(&key).expect("it exists");
        record.invalidated = Some(format!("{ROLLED_BACK_TO}another"));
        world.etcd.commit(holder, vec![put(&key, &record)]);
        assert_reports(&world, Rule::Checkpoints);
    }
}

/// F35, I9: a manifest that exists is not rewritten.
#[test]
fn a_rewritten_checkpoint_or_generation_is_reported() {
    for mut world in worlds() {
        let holder = holder(&world);
        let keys = world.etcd.keys.clone();
        let op = put(&keys.generation_record(Generation(1)), &GenerationRecord::default());
        world.etcd.commit(holder, vec![op]);
        assert_reports(&world, Rule::Once);
    }
}

/// F19: a history whose beginning was compacted is checked from the state that etcd held then.
#[test]
fn a_history_that_starts_in_the_middle_is_checked_too() {
    for world in worlds() {
        let middle = world.etcd.revisions.len() / 2;
        let (before, after) = world.etcd.revisions.split_at(middle);
        let mut held = std::collections::BTreeMap::new();
        for change in before.iter().flat_map(|it| &it.changes) {
            match change.value {
                Some(_) => held.insert(change.key.clone(), change.clone()),
                None => held.remove(&change.key),
            };
        }
        let start: Vec<Change> = held.into_values().collect();
        let report = check_from(&world, &start, after);
        assert!(report.is_clean(), "{report}");
    }
}
