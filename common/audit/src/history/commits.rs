//! The commits of an elastic job whose records are counted, reconstructed from their keys.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{Incarnation, NodeId, Phase, Round};
use steadfast_common::records::commits::{
    COMMIT_TAG, CommitId, CommitRecord, DataPosition, RecordOrder,
};
use steadfast_common::records::keys::{Keys, TagKey};
use steadfast_common::records::rendezvous::{MemberRecord, RoundRecord};

use super::dealt::Dealt;
use super::records::read;
use super::{Change, DataSeen, HistoryReport, Revision, Rule};

/// The commits as of the last revision.
pub(super) struct Commits<'a> {
    keys: &'a Keys,
    /// The number of records of a pass.
    records: u64,
    round: Option<RoundRecord>,
    /// Holds what the members of the last round passed to the barrier of each commit.
    entered: BTreeMap<Phase, BTreeMap<NodeId, String>>,
    /// Follows what they were given, if the order is dynamic.
    dealt: Dealt,
    last: Option<CommitRecord>,
    /// The position of the first commit.
    first: Option<DataPosition>,
    /// The members of the round that decided the last commit: each of them has it.
    holders: BTreeSet<(NodeId, Incarnation)>,
    /// The positions of all commits, as pairs of the pass and the records that it has used, with the records in all.
    positions: BTreeSet<(u32, u64, u64)>,
}

impl<'a> Commits<'a> {
    pub fn new(keys: &'a Keys, records: u64, start: &[Change]) -> Self {
        let mut commits = Self {
            keys,
            records,
            round: None,
            entered: BTreeMap::new(),
            dealt: Dealt::default(),
            last: None,
            first: None,
            holders: BTreeSet::new(),
            positions: BTreeSet::new(),
        };
        // Violations within the initial state are not reported.
        let start = Revision { revision: 0, changes: start.to_vec() };
        commits.check(&start, &mut HistoryReport::default());
        commits
    }

    /// Checks one revision and applies it.
    pub fn check(&mut self, revision: &Revision, report: &mut HistoryReport) {
        let (at, changes) = (revision.revision, &revision.changes);
        for change in changes {
            self.apply_round(at, change, report);
        }
        let mut released = None;
        for change in changes {
            released = self.apply_tag(change).or(released);
        }
        for change in changes {
            let known = (self.round.as_ref(), self.last.as_ref(), self.records);
            self.dealt.apply(self.keys, at, change, known, report);
        }
        let decided = changes.iter().find(|change| change.key == self.keys.commit());
        match decided {
            Some(change) => self.apply_commit(at, change, released, report),
            None if released.is_some() => {
                report.breaks(at, Rule::Commits, "a commit was released, and not recorded");
            }
            None => {}
        }
    }

    fn apply_round(&mut self, at: i64, change: &Change, report: &mut HistoryReport) {
        if change.key != self.keys.formed_round() || change.value.is_none() {
            return;
        }
        let Some(formed) = read::<RoundRecord>(at, change, &mut HistoryReport::default()) else {
            return;
        };
        let told = formed.data.and_then(|data| data.commit);
        let known = self.last.as_ref().map(|last| last.id);
        if told != known {
            let (told, known) = (shown(told), shown(known));
            let text =
                format!("round {} begins with {told}; the last one is {known}", formed.round);
            report.breaks(at, Rule::Commits, text);
        }
        self.round = Some(formed);
        self.entered.clear();
        self.dealt.begin_round();
    }

    /// Applies a change of the tag of commits; returns whether it released a phase.
    fn apply_tag(&mut self, change: &Change) -> Option<()> {
        let round = self.keys.tag_round_of(&change.key).filter(|it| *it == self.number())?;
        match self.keys.tag_key_of(round, &change.key)? {
            TagKey::Released { tag } if tag == COMMIT_TAG => change.value.as_ref().map(drop),
            TagKey::Entry { tag, phase, node } if tag == COMMIT_TAG => {
                let value = change.value.clone()?;
                self.entered.entry(phase).or_default().insert(node, value);
                None
            }
            TagKey::Released { .. } | TagKey::Entry { .. } => None,
        }
    }

    fn apply_commit(
        &mut self,
        at: i64,
        change: &Change,
        released: Option<()>,
        report: &mut HistoryReport,
    ) {
        if change.value.is_none() {
            return report.breaks(at, Rule::Commits, "the last commit was deleted");
        }
        let Some(record) = read::<CommitRecord>(at, change, report) else { return };
        let found = [
            released.is_none().then(|| "no barrier was released".to_owned()),
            self.is_not_numbered(record.id),
            self.is_not_unanimous(&record),
            self.is_not_next(&record),
            self.is_not_held(&record),
        ];
        for text in found.into_iter().flatten() {
            report.breaks(at, Rule::Commits, format!("commit {}: {text}", record.id));
        }
        report.decided += 1;
        let first = *self.first.get_or_insert(record.position);
        let between = self.total(record.position).saturating_sub(self.total(first));
        let seen = record.position.seen.saturating_sub(first.seen);
        let left_out = u64::try_from(between.saturating_sub(seen.into())).unwrap_or(u64::MAX);
        let (records, position) = (self.records, record.position);
        report.data = Some(DataSeen { records, position, left_out });
        let DataPosition { pass, used, seen } = record.position;
        self.positions.insert((pass.0, used, seen));
        self.holders = self.members().map(|it| (it.node, it.incarnation)).collect();
        self.last = Some(record);
    }

    /// The commits of a round are numbered from 0 without gaps.
    fn is_not_numbered(&self, id: CommitId) -> Option<String> {
        let next = match self.last.as_ref().map(|last| last.id) {
            Some(last) if last.round == self.number() => Phase(last.phase.0.saturating_add(1)),
            Some(_) | None => Phase(0),
        };
        let due = CommitId { round: self.number(), phase: next };
        (id != due).then(|| format!("{due} is the next one"))
    }

    /// Each member has a state that has seen the same records.
    fn is_not_unanimous(&self, record: &CommitRecord) -> Option<String> {
        let empty = BTreeMap::new();
        let entered = self.entered.get(&record.id.phase).unwrap_or(&empty);
        let has_it = |member: &&MemberRecord| {
            let passed = entered.get(&member.node);
            passed.is_some_and(|passed| self.is_dynamic() || is_position(passed, record.position))
        };
        let (have, members) = (self.members().filter(has_it).count(), self.members().count());
        (have != members).then(|| format!("{have} of {members} members have this state"))
    }

    /// A commit follows the last one by records that were not used before; the first of a round is the last one, or an
    /// earlier one if none of those that had the last one is left.
    fn is_not_next(&self, record: &CommitRecord) -> Option<String> {
        let (last, next) = (self.last.as_ref()?, record.position);
        let records = self.records;
        if records < next.used {
            return Some(format!("{} of {records} records are used", next.used));
        }
        if record.id.phase == Phase(0) {
            let is_held = |it: &MemberRecord| self.holders.contains(&(it.node, it.incarnation));
            let is_last = (next, &record.ahead) == (last.position, &last.ahead);
            if !is_last && self.members().any(is_held) {
                return Some(format!("a member has commit {}, which is another state", last.id));
            }
            let is_known = self.positions.contains(&(next.pass.0, next.used, next.seen));
            return (!is_known && !self.is_dynamic())
                .then(|| "its state is that of no commit".to_owned());
        }
        if self.is_dynamic() {
            return None;
        }
        let (from, to) = (self.total(last.position), self.total(next));
        let added = next.seen.checked_sub(last.position.seen).map(u128::from);
        let is_same_pass = next.pass == last.position.pass;
        let is_right = from <= to
            && added.is_some_and(|added| {
                // A pass may end early, so that some of its records are left out.
                added == to - from
                    || !is_same_pass && added < to - from && u128::from(next.used) <= added
            });
        (!is_right).then(|| {
            let DataPosition { seen, .. } = last.position;
            format!("{} records are counted after {seen}, and others were used", next.seen)
        })
    }

    /// If the order is dynamic, the state has seen what the members have used of what they were given.
    fn is_not_held(&self, record: &CommitRecord) -> Option<String> {
        let empty = BTreeMap::new();
        let passed = self.entered.get(&record.id.phase).unwrap_or(&empty);
        let not_next = || self.dealt.is_not_next(record, self.last.as_ref(), passed, self.records);
        self.is_dynamic().then(not_next).flatten()
    }

    fn is_dynamic(&self) -> bool {
        let data = self.round.as_ref().and_then(|round| round.data);
        data.is_some_and(|data| data.order == RecordOrder::Dynamic)
    }

    /// Returns the records of all passes up to a position.
    fn total(&self, position: DataPosition) -> u128 {
        u128::from(position.pass.0) * u128::from(self.records) + u128::from(position.used)
    }

    fn members(&self) -> impl Iterator<Item = &MemberRecord> {
        self.round.iter().flat_map(|round| &round.members)
    }

    fn number(&self) -> Round {
        self.round.as_ref().map_or(Round(0), |round| round.round)
    }
}

fn is_position(passed: &str, position: DataPosition) -> bool {
    DataPosition::parse(passed.as_bytes()) == Some(position)
}

fn shown(id: Option<CommitId>) -> String {
    id.map_or_else(|| "no commit".to_owned(), |id| format!("commit {id}"))
}
