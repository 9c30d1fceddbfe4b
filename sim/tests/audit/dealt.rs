//! Histories of elastic jobs that deal their records, with one wrong deal or commit: the check reports it.

use std::collections::BTreeMap;

use steadfast_audit::history::Rule;
use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::records::commits::{
    BegunState, COMMIT_TAG, CommitId, CommitRecord, DealtRecord, Progress, RecordOrder,
};
use steadfast_common::records::ranges::Ranges;
use steadfast_common::records::rendezvous::{ReleaseRecord, RoundData, RoundRecord};

use crate::commits::{between_commits_of, last, next_id, records, round};
use crate::recorded::{History, Op, put};

/// Returns histories of which the round has decided the last commit, and some member holds records that it has not seen.
fn between_commits() -> Vec<History> {
    between_commits_of(RecordOrder::Dynamic, |history| {
        held(history).values().any(|it| !it.is_empty())
    })
}

/// Returns what each member was dealt, and no commit has seen.
fn held(history: &History) -> BTreeMap<NodeId, Ranges> {
    let (round, commit) = (round(history), last(history));
    let held = round.members.iter().map(|member| {
        let key = history.run.keys.dealt(round.round, member.node);
        let mut ranges =
            history.value::<DealtRecord>(&key).map_or_else(Ranges::default, |it| it.ranges);
        ranges.remove(0..commit.first_unseen(records(history.run)));
        ranges.remove_all(&commit.ahead);
        (member.node, ranges)
    });
    held.collect()
}

/// Returns the commit after which all members have used what they hold.
fn next(history: &History, used: &BTreeMap<NodeId, Ranges>) -> CommitRecord {
    let all: Ranges = used.values().flat_map(|it| it.iter().cloned()).collect();
    last(history).and(next_id(history), &all, records(history.run))
}

fn commit(history: &mut History, used: &BTreeMap<NodeId, Ranges>, record: &CommitRecord) {
    let (keys, CommitId { round, phase }) = (&history.run.keys, record.id);
    let mut ops: Vec<Op> = used
        .iter()
        .map(|(node, used)| {
            put(keys.entry(round, COMMIT_TAG, phase, *node), &Progress::Used(used.clone()))
        })
        .collect();
    ops.push(put(keys.released(round, COMMIT_TAG), &ReleaseRecord { phase }));
    ops.push(put(keys.commit(), record));
    history.commit(ops);
}

#[test]
fn a_commit_of_what_members_hold_is_clean() {
    for mut history in between_commits() {
        let used = held(&history);
        let next = next(&history, &used);
        commit(&mut history, &used, &next);
        history.assert_clean();
    }
}

/// S003-51: no record is counted twice, and none that no member has used.
#[test]
fn a_commit_that_has_seen_other_records_is_reported() {
    for mut history in between_commits() {
        let used = held(&history);
        let mut next = next(&history, &used);
        next.position.seen += 1;
        commit(&mut history, &used, &next);
        history.assert_reports(Rule::Commits, "records count, and");
    }
    for mut history in between_commits() {
        let used = held(&history);
        let next = next(&history, &used);
        let none = used.keys().map(|node| (*node, Ranges::default())).collect();
        commit(&mut history, &none, &next);
        history.assert_reports(Rule::Commits, "records count, and");
    }
}

#[test]
fn a_member_that_uses_what_it_does_not_hold_is_reported() {
    for mut history in between_commits() {
        let mut used = held(&history);
        let mut last_entry = used.last_entry().expect("the round has members");
        last_entry.get_mut().add(1 << 40..(1 << 40) + 1);
        let next = next(&history, &used);
        commit(&mut history, &used, &next);
        history.assert_reports(Rule::Commits, "records that it does not hold");
    }
}

/// S002-3: a record has one holder.
#[test]
fn a_record_that_is_dealt_twice_is_reported() {
    let mut cases = 0;
    for mut history in between_commits() {
        let (round, held) = (round(&history), held(&history));
        let Some((owner, ranges)) = held.iter().find(|(_, ranges)| !ranges.is_empty()) else {
            continue;
        };
        let Some(other) = held.keys().find(|node| *node != owner) else { continue };
        let first = ranges.first().expect("it is not empty");
        deal(&mut history, &round, *other, first.start..first.start + 1);
        history.assert_reports(Rule::Commits, "another member holds some of them");
        cases += 1;
    }
    assert!(5 < cases, "{cases} histories");
}

#[test]
fn a_record_that_counts_already_and_is_dealt_is_reported() {
    for mut history in between_commits() {
        let (round, first) = (round(&history), last(&history).first_unseen(records(history.run)));
        let node = round.members[0].node;
        if first == 0 {
            continue;
        }
        let key = history.run.keys.dealt(round.round, node);
        let known = history.value::<DealtRecord>(&key).unwrap_or_default();
        if known.ranges.iter().any(|range| range.contains(&(first - 1))) {
            continue;
        }
        deal(&mut history, &round, node, first - 1..first);
        history.assert_reports(Rule::Commits, "a state has seen some of them");
    }
}

#[test]
fn records_that_a_holder_loses_are_reported() {
    for mut history in between_commits() {
        let (round, held) = (round(&history), held(&history));
        let (node, _) =
            held.iter().find(|(_, ranges)| !ranges.is_empty()).expect("a member holds some");
        let key = history.run.keys.dealt(round.round, *node);
        let known: DealtRecord = history.value(&key).expect("the member was dealt some");
        let lost = DealtRecord { ranges: Ranges::default(), ..known };
        history.commit(vec![put(key, &lost)]);
        history.assert_reports(Rule::Commits, "some that no state has seen are gone");
    }
}

fn deal(history: &mut History, round: &RoundRecord, node: NodeId, more: std::ops::Range<u64>) {
    let key = history.run.keys.dealt(round.round, node);
    let mut record = history.value::<DealtRecord>(&key).unwrap_or_default();
    record.total += more.end - more.start;
    record.ranges.add(more);
    history.commit(vec![put(key, &record)]);
}

/// S002-3: the first commit of a round has seen what the state has that its members begin with.
#[test]
fn a_round_that_begins_with_other_records_is_reported() {
    for mut history in between_commits() {
        let before = last(&history);
        let of_last = round(&history);
        let number = Round(of_last.round.0 + 1);
        let keys = history.run.keys.clone();
        let data = of_last.data.map(|data| RoundData { commit: Some(before.id), ..data });
        let formed = RoundRecord { round: number, data, ..of_last.clone() };
        history.commit(vec![put(keys.formed_round(), &formed)]);
        let id = CommitId { round: number, phase: Phase(0) };
        let state = BegunState { number: before.id.number(), commit: None };
        let mut ops: Vec<Op> = of_last
            .members
            .iter()
            .map(|member| {
                let key = keys.entry(number, COMMIT_TAG, id.phase, member.node);
                put(key, &Progress::State(state.clone()))
            })
            .collect();
        let mut wrong = CommitRecord { id, ..before };
        wrong.position.seen += 1;
        ops.push(put(keys.released(number, COMMIT_TAG), &ReleaseRecord { phase: id.phase }));
        ops.push(put(keys.commit(), &wrong));
        history.commit(ops);
        let report = history.check();
        let found = report
            .broken
            .iter()
            .any(|it| it.rule == Rule::Commits && it.text.contains("its state is not the one"));
        assert!(found, "seed {}: {report}", history.run.seed);
    }
}
