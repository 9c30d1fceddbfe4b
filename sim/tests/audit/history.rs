//! Histories of training with one change: the check reports the broken rule at the right revision.

use steadfast_audit::history::Rule;
use steadfast_common::ids::{Attempt, Generation, Pass, RequestId, TaskId, TrainerId, Version};
use steadfast_common::job::schedule::task_order;
use steadfast_common::records::extension::More;
use steadfast_common::records::key_table::{KEYS, Key};
use steadfast_common::records::{
    CheckpointRecord, EvaluationRecord, GenerationRecord, JobRecord, LockRecord, QueueRecord,
    ROLLED_BACK_TO, ResultRecord, TaskRecord,
};
use uuid::Uuid;

use crate::recorded::{ASYNC, DECIDING, History, Run, SYNC, cuts, put};

/// The queues of a history of an asynchronous job.
struct Queues {
    head: QueueRecord,
    /// The tasks of the pass, in their order.
    order: Vec<TaskId>,
    done: Vec<TaskId>,
    pending: Vec<(TaskId, Attempt)>,
}

/// Returns the queues of a job whose dataset does not grow, if it has any.
fn queues(history: &History) -> Option<Queues> {
    let (keys, manifest) = (&history.run.keys, &history.run.recording.manifest);
    let head: QueueRecord = history.value(&keys.queue())?;
    let spec = history.run.spec();
    if spec.dataset.follow {
        return None;
    }
    let order = task_order(manifest, spec.seed, head.pass);
    let record = |task: &TaskId| history.value::<TaskRecord>(&keys.task(head.round, *task));
    let dispatched = &order[..head.cursor as usize];
    let done = dispatched.iter().copied().filter(|task| record(task).is_none()).collect();
    let attempt = |task: &TaskId| match record(task) {
        Some(TaskRecord::Pending { attempt, .. }) => Some((*task, attempt)),
        Some(TaskRecord::Todo { .. } | TaskRecord::Discarded { .. }) | None => None,
    };
    let pending = dispatched.iter().filter_map(attempt).collect();
    Some(Queues { head, order, done, pending })
}

/// Returns histories of asynchronous jobs in the middle of a pass, with a task done and another pending.
fn running() -> impl Iterator<Item = (History, Queues)> {
    let is_running = |queues: &Queues| !queues.done.is_empty() && !queues.pending.is_empty();
    let all = cuts(&ASYNC, |it| queues(it).as_ref().is_some_and(is_running));
    all.into_iter().map(|it| (it.clone(), queues(&it).expect("it was there")))
}

/// Returns histories of jobs of both kinds that have checkpoints, with the id of the latest.
fn with_checkpoint() -> impl Iterator<Item = (History, String)> {
    let latest = |it: &History| it.value::<String>(&it.run.keys.checkpoint_latest());
    let of = move |runs: &'static [Run]| cuts(runs, move |it| latest(it).is_some());
    let all = of(&SYNC).into_iter().chain(of(&ASYNC));
    all.map(move |it| (it.clone(), latest(&it).expect("it was there")))
}

/// Returns histories of jobs of both kinds that have a generation, with it.
fn with_generation() -> impl Iterator<Item = (History, GenerationRecord)> {
    let present = |it: &History| it.value::<GenerationRecord>(&it.run.keys.generation());
    let of = move |runs: &'static [Run]| cuts(runs, move |it| present(it).is_some());
    let all = of(&SYNC).into_iter().chain(of(&ASYNC));
    all.map(move |it| (it.clone(), present(&it).expect("it was there")))
}

fn checkpoint(history: &History, id: &str) -> CheckpointRecord {
    history.value(&history.run.keys.checkpoint(id)).expect("the pointer names a checkpoint")
}

fn pending(attempt: u64) -> TaskRecord {
    TaskRecord::Pending {
        failures: 0,
        attempt: Attempt(attempt),
        trainer: TrainerId(Uuid::from_u128(7)),
        request: RequestId(Uuid::from_u128(8)),
        accepted: false,
        failed_by: Vec::new(),
        backs_up: None,
    }
}

/// S004-20, I1, F2: a former master whose writes are not fenced is found, whether its lock was acquired by another
/// master or only expired.
#[test]
fn a_commit_of_a_former_master_is_found() {
    for (case, (former, queues)) in running().enumerate() {
        let mut history = former.clone();
        let lock = history.run.keys.master_lock();
        history.txn(vec![(lock.clone(), None)]);
        if case % 2 == 0 {
            history.txn(vec![put(&lock, &LockRecord { holder: Uuid::from_u128(1_000) })]);
        }
        // A decision based on its outdated view of the queues.
        let mut late = vec![put(history.run.keys.queue(), &queues.head)];
        if case % 4 < 2 {
            let of_former = former.value::<LockRecord>(&lock).expect("it was held");
            late.push(put(&lock, &of_former));
        }
        history.txn(late);
        history.assert_reports(Rule::Fence, "");
    }
}

/// I1
#[test]
fn a_commit_without_the_lock_is_reported() {
    let mut cases = 0;
    for run in SYNC.iter().chain(&*ASYNC) {
        let (lock, all) = (run.keys.master_lock(), &run.recording.revisions);
        let is_fenced = |key: &str| run.keys.row_of(key).is_some_and(Key::is_fenced);
        let is_commit = |at: &usize| {
            let changes = &all[*at].changes;
            changes.iter().any(|it| it.key == lock && it.value.is_some())
                && changes.iter().any(|it| is_fenced(&it.key) && it.value.is_some())
                // A change of the job has rules of its own.
                && changes.iter().all(|it| it.key != run.keys.job())
        };
        let commits: Vec<usize> = (0..all.len()).filter(is_commit).collect();
        let Some(victim) = commits.get(cases * 7 % commits.len().max(1)) else { continue };
        let mut revisions = all.clone();
        revisions[*victim].changes.retain(|change| change.key != lock);
        let (report, at) = (run.check(&[], &revisions), all[*victim].revision);
        let mut broken = report.broken.iter();
        assert!(broken.all(|it| it.rule == Rule::Fence && it.revision == at), "{report}");
        assert!(!report.is_clean(), "seed {}, revision {at}", run.seed);
        cases += 1;
    }
    assert!(60 < cases, "{cases} cases");
}

/// I1: of each key that only the acting master may write.
#[test]
fn a_put_of_any_fenced_key_without_the_lock_is_reported() {
    let history = &cuts(&ASYNC, |_| true)[0];
    for key in KEYS.iter().filter(|key| key.is_fenced()) {
        let parts = key.path.split('/').map(|part| if part.starts_with('<') { "7" } else { part });
        let path = parts.collect::<Vec<_>>().join("/");
        let mut history = history.clone();
        history.txn(vec![put(format!("{}/{path}", history.run.keys.root()), "x")]);
        history.assert_reports(Rule::Fence, &path);
    }
}

/// I1: the keys that have the lease of the acting master end with it.
#[test]
fn the_end_of_a_masters_lease_breaks_no_rule() {
    for mut history in cuts(&SYNC, |_| true).into_iter().chain(cuts(&ASYNC, |_| true)) {
        let keys = &history.run.keys;
        let leased = [keys.master_addr(), keys.master_waits()];
        history.commit(leased.iter().map(|key| put(key, "x")).collect());
        history.txn(leased.into_iter().chain([keys.master_lock()]).map(|it| (it, None)).collect());
        history.assert_clean();
    }
}

/// I4
#[test]
fn a_reused_attempt_number_is_reported() {
    let mut cases = 0;
    for (mut history, Queues { head, pending: all, .. }) in running() {
        let (task, attempt) = all[0];
        let Some(before) = attempt.0.checked_sub(1) else { continue };
        history.commit(vec![put(history.run.keys.task(head.round, task), &pending(before))]);
        history.assert_reports(Rule::Attempts, "");
        cases += 1;
    }
    assert!(10 < cases, "{cases} cases");
}

/// I4: attempt numbers never decrease.
#[test]
fn attempt_numbers_that_restart_are_reported() {
    for (mut history, Queues { head, .. }) in running() {
        let next = QueueRecord { next_attempt: Attempt(0), ..head };
        history.commit(vec![put(history.run.keys.queue(), &next)]);
        history.assert_reports(Rule::Attempts, "");
    }
}

/// I2: a task that is done does not become pending again in its pass.
#[test]
fn a_done_task_that_is_pending_again_is_reported() {
    for (mut history, Queues { head, done, .. }) in running() {
        let keys = &history.run.keys;
        let next_attempt = Attempt(head.next_attempt.0 + 1);
        history.commit(vec![
            put(keys.queue(), &QueueRecord { next_attempt, ..head }),
            put(keys.task(head.round, done[0]), &pending(head.next_attempt.0)),
        ]);
        history.assert_reports(Rule::Queues, "");
    }
}

/// I2: a task is done only after it was dispatched.
#[test]
fn a_skipped_task_is_reported() {
    let mut cases = 0;
    for (mut history, Queues { head, order, .. }) in running() {
        if head.cursor as usize == order.len() {
            continue;
        }
        let next = QueueRecord { cursor: head.cursor + 1, ..head };
        history.commit(vec![put(history.run.keys.queue(), &next)]);
        history.assert_reports(Rule::Queues, "");
        cases += 1;
    }
    assert!(0 < cases, "no task was left");
}

/// I2
#[test]
fn a_key_of_a_task_outside_the_pass_is_reported() {
    for (mut history, Queues { head, .. }) in running() {
        let record = TaskRecord::Discarded { failures: 9, reason: "bad".to_owned() };
        history.commit(vec![put(history.run.keys.task(head.round, TaskId(9_999)), &record)]);
        history.assert_reports(Rule::Queues, "");
    }
}

/// I3
#[test]
fn a_pass_that_ends_with_a_pending_task_is_reported() {
    for (mut history, Queues { head, .. }) in running() {
        let pass = Pass(head.pass.0 + 1);
        let next = QueueRecord { round: head.round + 1, pass, cursor: 0, ..head };
        history.commit(vec![put(history.run.keys.queue(), &next)]);
        history.assert_reports(Rule::PassEnd, "");
    }
}

/// I2: after a restore, only the tasks that were done in the checkpoint are done.
#[test]
fn queues_rolled_back_to_anything_but_the_checkpoint_are_reported() {
    for (mut history, Queues { head, .. }) in running() {
        let keys = &history.run.keys;
        let present: GenerationRecord = history.value(&keys.generation()).expect("there is one");
        let generation = Generation(present.generation.0 + 1);
        history.commit(vec![
            put(keys.queue(), &QueueRecord { round: head.round + 1, cursor: 1, ..head }),
            put(keys.generation(), &GenerationRecord { generation, ..Default::default() }),
        ]);
        history.assert_reports(Rule::Queues, "");
    }
}

/// I5
#[test]
fn generations_that_do_not_increase_by_one_are_reported() {
    for (case, (mut history, present)) in with_generation().enumerate() {
        let present = present.generation.0;
        let generation = Generation([present, present + 2, 0][case % 3]);
        let record = GenerationRecord { generation, ..GenerationRecord::default() };
        history.commit(vec![put(history.run.keys.generation(), &record)]);
        history.assert_reports(Rule::Generations, "");
    }
}

/// I10: a master that decides about the course of a job otherwise than its evaluations is found.
#[test]
fn a_course_that_does_not_follow_from_the_evaluations_is_reported() {
    let present = |it: &History| it.value::<EvaluationRecord>(&it.run.keys.evaluation());
    let decides = |it: &History| present(it).is_some_and(|it| it.course.is_some());
    let mut cases = 0;
    for (case, mut history) in cuts(&DECIDING, decides).into_iter().enumerate() {
        let known = present(&history).expect("it was there");
        let next = EvaluationRecord {
            pass: Pass(known.pass.0 + 1),
            version: Version(known.version.0 + 7),
            loss: known.loss / 2.0,
            course: None,
            model: None,
            ..known.clone()
        };
        let rules = &history.run.spec().evaluation;
        let mut next = rules.decided(Some(&known), next);
        let course = next.course.as_mut().expect("it decides");
        match case % 4 {
            0 => course.end = Some(known.pass),
            1 => course.without_improvement += 1,
            // The same evaluation counts twice.
            _ => next = known,
        }
        let key = history.run.keys.evaluation();
        history.commit(vec![if case % 4 == 3 { (key, None) } else { put(key, &next) }]);
        history.assert_reports(Rule::Course, "");
        cases += 1;
    }
    assert!(2 < cases, "{cases} cases");
}

/// I9
#[test]
fn a_pointer_to_a_missing_checkpoint_is_reported() {
    for (case, (mut history, latest)) in with_checkpoint().enumerate() {
        let keys = &history.run.keys;
        history.commit(vec![match case % 2 {
            0 => put(keys.checkpoint_latest(), "none"),
            _ => (keys.checkpoint(&latest), None),
        }]);
        history.assert_reports(Rule::Checkpoints, "");
    }
}

/// I9: the pointer does not move back past a checkpoint unless that was invalidated.
#[test]
fn a_pointer_that_moves_back_from_a_valid_checkpoint_is_reported() {
    let mut cases = 0;
    for (mut history, latest) in with_checkpoint() {
        let keys = &history.run.keys;
        let last = checkpoint(&history, &latest);
        let prefix = keys.checkpoints_prefix();
        let others = history.keys_below(&prefix).into_iter();
        let mut ids = others.filter_map(|key| Some(key.strip_prefix(&prefix)?.to_owned()));
        let is_older = |id: &String| {
            *id != "latest" && checkpoint(&history, id).position.version < last.position.version
        };
        let Some(older) = ids.find(is_older).filter(|_| last.invalidated.is_none()) else {
            continue;
        };
        history.commit(vec![put(keys.checkpoint_latest(), &older)]);
        history.assert_reports(Rule::Checkpoints, "moved back");
        cases += 1;
    }
    assert!(10 < cases, "{cases} cases");
}

/// I9: a master that dies between the two would leave a job without its newest checkpoint and without a rollback.
#[test]
fn a_checkpoint_that_is_abandoned_before_the_rollback_is_reported() {
    for (mut history, latest) in with_checkpoint() {
        let mut record = checkpoint(&history, &latest);
        record.invalidated = Some(format!("{ROLLED_BACK_TO}another"));
        history.commit(vec![put(history.run.keys.checkpoint(&latest), &record)]);
        history.assert_reports(Rule::Checkpoints, "abandoned");
    }
}

/// F35, I9: a manifest or the record of a generation that exists is not rewritten.
#[test]
fn a_rewritten_checkpoint_or_generation_is_reported() {
    for (mut history, GenerationRecord { generation, .. }) in with_generation() {
        let key = history.run.keys.generation_record(generation);
        history.commit(vec![put(key, &GenerationRecord::default())]);
        history.assert_reports(Rule::Once, "");
    }
    for (mut history, latest) in with_checkpoint() {
        let mut record = checkpoint(&history, &latest);
        record.position.examples += 1;
        history.commit(vec![put(history.run.keys.checkpoint(&latest), &record)]);
        history.assert_reports(Rule::Once, "");
    }
}

/// I9: a job and its result are written once, but for an extension, which makes the job longer and deletes the result.
#[test]
fn only_an_extension_or_a_change_of_settings_changes_a_job_and_deletes_its_result() {
    let mut cases = 0;
    for run in SYNC.iter().chain(&*ASYNC) {
        let mut ended = History::whole(run);
        let lock = run.keys.master_lock();
        if ended.value::<LockRecord>(&lock).is_none() {
            ended.txn(vec![put(&lock, &LockRecord { holder: Uuid::from_u128(1_000) })]);
        }
        let (job, result) = (run.keys.job(), run.keys.result());
        let Some(record) = ended.value::<JobRecord>(&job).filter(|it| it.spec.passes.is_some())
        else {
            continue;
        };
        let Some(outcome) = ended.value::<ResultRecord>(&result) else { continue };
        let Some(id) = ended.value::<String>(&run.keys.checkpoint_latest()) else { continue };
        let version = checkpoint(&ended, &id).position.version;
        let longer = record.extended(More::Passes(2), version, 0).unwrap();
        let elsewhere = record.extended(More::Passes(2), Version(version.0 + 1), 0).unwrap();
        let mut extended = ended.clone();
        extended.commit(vec![put(&job, &longer), (result.clone(), None)]);
        extended.assert_clean();
        extended.commit(vec![put(&result, &outcome)]);
        extended.assert_clean();

        let mut spec = record.spec.clone();
        spec.learning_rate.base *= 2.0;
        let changed = record.changed(&spec, version, 0).unwrap();
        let changed_elsewhere = record.changed(&spec, Version(version.0 + 1), 0).unwrap();
        let mut other = ended.clone();
        other.commit(vec![put(&job, &changed), (result.clone(), None)]);
        other.assert_clean();

        let mut unrecorded = longer.clone();
        unrecorded.extensions.clear();
        let deletion = (result.clone(), None);
        for wrong in [
            vec![put(&job, &unrecorded), deletion.clone()],
            vec![deletion],
            vec![put(&job, &longer), put(&result, &outcome)],
            vec![put(&job, &elsewhere), (result.clone(), None)],
            vec![put(&job, &changed_elsewhere), (result.clone(), None)],
            vec![put(&job, &JobRecord { spec, ..record.clone() })],
            vec![(job.clone(), None)],
        ] {
            let mut history = ended.clone();
            history.commit(wrong);
            history.assert_reports(Rule::Once, "changed after it was written");
        }
        let mut unlocked = ended.clone();
        unlocked.txn(vec![put(&job, &longer), (result.clone(), None)]);
        unlocked.assert_reports(Rule::Fence, "");
        cases += 1;
    }
    assert!(10 < cases, "{cases} cases");
}

/// F19: a history whose beginning was compacted is checked from the state that etcd held then.
#[test]
fn a_history_that_starts_in_the_middle_is_checked_too() {
    for history in cuts(&SYNC, |_| true).into_iter().chain(cuts(&ASYNC, |_| true)) {
        let report = history.run.check(&history.held(), history.rest());
        assert!(report.is_clean(), "seed {}: {report}", history.run.seed);
    }
}
