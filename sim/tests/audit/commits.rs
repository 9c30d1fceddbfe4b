//! Histories of elastic jobs with records and one wrong commit: the check reports it.

use std::collections::BTreeMap;

use steadfast_audit::history::Rule;
use steadfast_common::ids::{NodeId, Pass, Phase, Round};
use steadfast_common::records::commits::{
    COMMIT_TAG, CommitId, CommitRecord, DataPosition, RecordOrder,
};
use steadfast_common::records::rendezvous::{ReleaseRecord, RoundData, RoundRecord};
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_sim::Workload;

use crate::recorded::{ELASTIC, History, Op, Run, cuts, put};

fn between_commits() -> Vec<History> {
    between_commits_of(RecordOrder::Fixed, |_| true)
}

/// Returns histories of which the round has decided the last commit, and no member has entered the next one.
pub fn between_commits_of(
    order: RecordOrder,
    is_wanted: impl Fn(&History) -> bool,
) -> Vec<History> {
    cuts(&ELASTIC, |history| {
        let keys = &history.run.keys;
        let Some(commit) = history.value::<CommitRecord>(&keys.commit()) else { return false };
        let round: RoundRecord = history.value(&keys.formed_round()).expect("a round was formed");
        let next = Phase(commit.id.phase.0 + 1);
        let entries = keys.entries_prefix(round.round, COMMIT_TAG, next);
        commit.id.round == round.round
            && history.keys_below(&entries).is_empty()
            && !history.holds(&keys.result())
            && round.data.is_some_and(|data| data.order == order)
            && is_wanted(history)
    })
}

pub fn last(history: &History) -> CommitRecord {
    history.value(&history.run.keys.commit()).expect("a commit was decided")
}

pub fn round(history: &History) -> RoundRecord {
    history.value(&history.run.keys.formed_round()).expect("a round was formed")
}

pub fn records(run: &Run) -> u64 {
    let Workload::Elastic(job) = &run.job else { panic!("an elastic job") };
    job.spec.records.expect("its records are counted")
}

/// The position after another record.
fn next_record(history: &History) -> DataPosition {
    let DataPosition { pass, used, seen } = last(history).position;
    match used == records(history.run) {
        true => DataPosition { pass: Pass(pass.0 + 1), used: 1, seen: seen + 1 },
        false => DataPosition { pass, used: used + 1, seen: seen + 1 },
    }
}

/// All members pass a position to the barrier of the next commit.
fn enter(history: &History, id: CommitId, position: DataPosition) -> BTreeMap<NodeId, Op> {
    let members = round(history).members.into_iter().map(|member| member.node);
    let value = String::from_utf8(position.to_json()).expect("JSON is UTF-8");
    let entry = |node| {
        let key = history.run.keys.entry(id.round, COMMIT_TAG, id.phase, node);
        (node, (key, Some(value.clone())))
    };
    members.map(entry).collect()
}

/// The release of the barrier and the commit.
fn decide(history: &History, id: CommitId, position: DataPosition) -> Vec<Op> {
    let keys = &history.run.keys;
    let released = ReleaseRecord { phase: id.phase };
    vec![
        put(keys.released(id.round, COMMIT_TAG), &released),
        put(keys.commit(), &CommitRecord::new(id, position)),
    ]
}

pub fn next_id(history: &History) -> CommitId {
    let CommitId { round, phase } = last(history).id;
    CommitId { round, phase: Phase(phase.0 + 1) }
}

/// Commits a position that all members have passed.
fn commit(history: &mut History, position: DataPosition) {
    let id = next_id(history);
    commit_as(history, id, position);
}

/// The same, as the commit with this number.
fn commit_as(history: &mut History, id: CommitId, position: DataPosition) {
    let mut ops: Vec<Op> = enter(history, id, position).into_values().collect();
    ops.extend(decide(history, id, position));
    history.commit(ops);
}

#[test]
fn a_commit_of_the_next_record_is_clean() {
    for mut history in between_commits() {
        let next = next_record(&history);
        commit(&mut history, next);
        history.assert_clean();
        let data = history.check().data.expect("the history has commits");
        assert_eq!((data.position, data.left_out), (next, 0), "seed {}", history.run.seed);
    }
}

/// S003-9: a state of which a member has no copy does not count.
#[test]
fn a_commit_without_a_member_is_reported() {
    for mut history in between_commits() {
        let (id, next) = (next_id(&history), next_record(&history));
        let mut entries = enter(&history, id, next);
        entries.pop_last();
        let mut ops: Vec<Op> = entries.into_values().collect();
        ops.extend(decide(&history, id, next));
        history.commit(ops);
        history.assert_reports(Rule::Commits, "members have this state");
    }
}

#[test]
fn a_commit_of_another_position_than_that_of_its_members_is_reported() {
    for mut history in between_commits() {
        let (id, next) = (next_id(&history), next_record(&history));
        let mut ops: Vec<Op> = enter(&history, id, next).into_values().collect();
        ops.extend(decide(&history, id, last(&history).position));
        history.commit(ops);
        history.assert_reports(Rule::Commits, "0 of");
    }
}

/// S003-51: no record is counted twice, and none without an update that has used it.
#[test]
fn a_record_that_counts_twice_is_reported() {
    for mut history in between_commits() {
        let next = next_record(&history);
        commit(&mut history, DataPosition { seen: next.seen + 1, ..next });
        history.assert_reports(Rule::Commits, "records are counted");
    }
    for mut history in between_commits() {
        let position = last(&history).position;
        if position.used == 0 {
            continue;
        }
        let used = position.used - 1;
        commit(&mut history, DataPosition { used, ..position });
        history.assert_reports(Rule::Commits, "records are counted");
    }
}

#[test]
fn more_records_than_a_pass_has_are_reported() {
    for mut history in between_commits() {
        let position = last(&history).position;
        let more = records(history.run) + 1 - position.used;
        let (used, seen) = (position.used + more, position.seen + more);
        commit(&mut history, DataPosition { used, seen, ..position });
        history.assert_reports(Rule::Commits, "records are used");
    }
}

/// `drop_last` leaves out the end of a pass.
#[test]
fn a_pass_that_ends_early_is_clean_and_what_it_left_out_is_counted() {
    for mut history in between_commits() {
        let DataPosition { pass, used, seen } = last(&history).position;
        let next = DataPosition { pass: Pass(pass.0 + 1), used: 1, seen: seen + 1 };
        commit(&mut history, next);
        history.assert_clean();
        let left_out = history.check().data.map(|data| data.left_out);
        assert_eq!(left_out, Some(records(history.run) - used), "seed {}", history.run.seed);
    }
}

#[test]
fn a_commit_out_of_its_order_is_reported() {
    for mut history in between_commits() {
        let (CommitId { round, phase }, next) = (next_id(&history), next_record(&history));
        let id = CommitId { round, phase: Phase(phase.0 + 1) };
        commit_as(&mut history, id, next);
        history.assert_reports(Rule::Commits, "is the next one");
    }
}

#[test]
fn a_commit_without_its_barrier_is_reported() {
    for mut history in between_commits() {
        let (id, next) = (next_id(&history), next_record(&history));
        let mut ops: Vec<Op> = enter(&history, id, next).into_values().collect();
        ops.extend(decide(&history, id, next).pop());
        history.commit(ops);
        history.assert_reports(Rule::Commits, "no barrier was released");
    }
    for mut history in between_commits() {
        let (id, next) = (next_id(&history), next_record(&history));
        let mut ops: Vec<Op> = enter(&history, id, next).into_values().collect();
        ops.extend(decide(&history, id, next).into_iter().next());
        history.commit(ops);
        history.assert_reports(Rule::Commits, "released, and not recorded");
    }
}

/// S002-9: a round whose members have the last commit begins with it, and not with an earlier one.
#[test]
fn a_state_that_goes_back_beside_a_member_that_has_a_later_one_is_reported() {
    for mut history in between_commits() {
        let before = last(&history);
        let next = next_record(&history);
        commit(&mut history, next);
        let of_last = round(&history);
        let (number, decided) = (Round(of_last.round.0 + 1), last(&history).id);
        let data = Some(RoundData {
            records: records(history.run),
            order: RecordOrder::Fixed,
            commit: Some(decided),
        });
        let formed = RoundRecord { round: number, data, ..of_last };
        history.commit(vec![put(history.run.keys.formed_round(), &formed)]);
        let id = CommitId { round: number, phase: Phase(0) };
        commit_as(&mut history, id, before.position);
        let report = history.check();
        let text = format!("a member has commit {decided}");
        let found =
            report.broken.iter().any(|it| it.rule == Rule::Commits && it.text.contains(&text));
        assert!(found, "seed {}: {report}", history.run.seed);
    }
}

/// S003-51: in the honest runs, a job that finished has seen each record of each pass.
#[test]
fn a_finished_job_has_seen_each_record_of_each_pass() {
    let mut finished = 0;
    for run in ELASTIC.iter() {
        let Workload::Elastic(job) = &run.job else { continue };
        let Some(due) = job.last_position() else { continue };
        let history = History::whole(run);
        let report = history.check();
        let result: Option<ResultRecord> = history.value(&run.keys.result());
        if result.is_some_and(|it| it.state == JobOutcome::Finished) {
            let data = report.data.expect("the job has commits");
            assert_eq!((data.position, data.left_out), (due, 0), "seed {}", run.seed);
            finished += 1;
        }
    }
    assert!(5 < finished, "{finished} runs");
}
