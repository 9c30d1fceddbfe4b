//! The records that the members of a round were given, in a job whose order is dynamic.

use std::collections::BTreeMap;

use steadfast_common::ids::{NodeId, Phase};
use steadfast_common::records::commits::{
    BegunState, CommitId, CommitRecord, DealtRecord, Progress,
};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::ranges::Ranges;
use steadfast_common::records::rendezvous::RoundRecord;

use super::records::read;
use super::{Change, HistoryReport, Rule};

/// Follows what each member of the last round was given.
#[derive(Default)]
pub(super) struct Dealt(BTreeMap<NodeId, DealtRecord>);

impl Dealt {
    /// Forgets what the members of the round before were given.
    pub fn begin_round(&mut self) {
        self.0.clear();
    }

    /// Applies a change, and checks that a member is given only what no other one holds and no state has seen.
    pub fn apply(
        &mut self,
        keys: &Keys,
        at: i64,
        change: &Change,
        known: (Option<&RoundRecord>, Option<&CommitRecord>, u64),
        report: &mut HistoryReport,
    ) {
        let (Some(round), commit, records) = known else { return };
        if change.value.is_none() {
            return;
        }
        let Some(node) = keys.dealt_to(round.round, &change.key) else { return };
        let Some(record) = read::<DealtRecord>(at, change, report) else { return };
        let before = self.0.get(&node).cloned().unwrap_or_default();
        let mut new = record.ranges.clone();
        new.remove_all(&before.ranges);
        let mut lost = before.ranges.clone();
        lost.remove_all(&record.ranges);
        let others = self.0.iter().filter(|(other, _)| **other != node);
        let others: Ranges = others.flat_map(|(_, other)| other.ranges.iter().cloned()).collect();
        let found = [
            round
                .members
                .iter()
                .all(|it| it.node != node)
                .then_some("it is no member of the round"),
            others.overlaps(&new).then_some("another member holds some of them"),
            has_seen(commit, &new, records).then_some("a state has seen some of them"),
            (record.total != before.total + new.count()).then_some("their number is another one"),
            has_not_seen(commit, &lost, records).then_some("some that no state has seen are gone"),
        ];
        for text in found.into_iter().flatten() {
            let text = format!("records are dealt to node {node}: {text}");
            report.breaks(at, Rule::Commits, text);
        }
        self.0.insert(node, record);
    }

    /// Returns why a commit is not that of what its members have passed to its barrier, if it is not.
    pub fn is_not_next(
        &self,
        record: &CommitRecord,
        last: Option<&CommitRecord>,
        passed: &BTreeMap<NodeId, String>,
        records: u64,
    ) -> Option<String> {
        let mut used = Ranges::default();
        let mut states = Vec::new();
        for (node, passed) in passed {
            match Progress::parse(passed.as_bytes()) {
                Some(Progress::State(state)) => states.push(state),
                Some(Progress::Used(own)) => {
                    let held = self.0.get(node).map(|held| &held.ranges);
                    if !own.is_empty() && !held.is_some_and(|held| held.contains_all(&own)) {
                        return Some(format!("node {node} has used records that it does not hold"));
                    }
                    if used.overlaps(&own) || has_seen(last, &own, records) {
                        return Some(format!("node {node} has used records that count already"));
                    }
                    used.add_all(&own);
                }
                None => return Some(format!("node {node} has passed {passed}")),
            }
        }
        let CommitId { phase, .. } = record.id;
        let due = match (phase, last) {
            (Phase(0), _) => return begins_otherwise(record, last, &states, records),
            (_, Some(last)) => last.and(record.id, &used, records),
            (_, None) => return Some("no state was there before".to_owned()),
        };
        (*record != due || !states.is_empty()).then(|| {
            format!("{} records count, and {} were used", record.position.seen, due.position.seen)
        })
    }
}

/// The members of a round begin with the last state, an earlier one, or anew.
fn begins_otherwise(
    record: &CommitRecord,
    last: Option<&CommitRecord>,
    states: &[BegunState],
    records: u64,
) -> Option<String> {
    let begun = |state: &BegunState| state.begin(record.id, last, records);
    let is_right = states.iter().all(|state| begun(state).as_ref() == Some(record));
    (!is_right).then(|| "its state is not the one that the members begin with".to_owned())
}

fn has_seen(commit: Option<&CommitRecord>, ranges: &Ranges, records: u64) -> bool {
    commit.is_some_and(|commit| {
        let first = commit.first_unseen(records);
        ranges.first().is_some_and(|range| range.start < first) || commit.ahead.overlaps(ranges)
    })
}

fn has_not_seen(commit: Option<&CommitRecord>, ranges: &Ranges, records: u64) -> bool {
    let mut unseen = ranges.clone();
    if let Some(commit) = commit {
        unseen.remove(0..commit.first_unseen(records));
        unseen.remove_all(&commit.ahead);
    }
    !unseen.is_empty()
}
