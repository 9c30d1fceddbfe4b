//! The rendezvous of an elastic job, reconstructed from its keys.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{Incarnation, NodeId, Phase, Round};
use steadfast_common::records::keys::{Keys, TagKey};
use steadfast_common::records::rendezvous::{
    EXIT_TAG, MemberRecord, NodeRange, NodeRecord, NodeState, ReleaseRecord, RoundRecord,
};
use steadfast_common::records::scale::ScaleRecord;
use steadfast_common::records::{JobOutcome, ResultRecord};

use super::records::read;
use super::{Change, ElasticJob, HistoryReport, Revision, Rule};

/// The rendezvous as of the last revision.
pub(super) struct Rounds<'a> {
    keys: &'a Keys,
    allowed: NodeRange,
    nodes: BTreeMap<NodeId, NodeRecord>,
    /// The round that was formed last.
    round: Option<RoundRecord>,
    /// The nodes that have entries in each phase of each tag of the last round.
    entered: BTreeMap<(String, Phase), BTreeSet<NodeId>>,
    /// The most workers that a round is to have.
    workers_desired: Option<u32>,
    is_over: bool,
}

/// The most workers that a round is to have, before a revision and after it. A round that is formed in the revision
/// was decided by one of them.
struct Desired {
    before: Option<u32>,
    after: Option<u32>,
}

impl Desired {
    /// Returns the larger number; `None` if one of them is no limit.
    fn most(&self) -> Option<u32> {
        self.before.zip(self.after).map(|(before, after)| before.max(after))
    }

    /// Returns the smaller number; `None` if neither is a limit.
    fn least(&self) -> Option<u32> {
        self.before.into_iter().chain(self.after).min()
    }
}

impl<'a> Rounds<'a> {
    pub fn new(job: &ElasticJob<'a>, start: &[Change]) -> Self {
        let mut rounds = Self {
            keys: job.keys,
            allowed: job.nodes,
            nodes: BTreeMap::new(),
            round: None,
            entered: BTreeMap::new(),
            workers_desired: None,
            is_over: false,
        };
        // Violations within the initial state are not reported.
        let start = Revision { revision: 0, changes: start.to_vec() };
        rounds.check(&start, &mut HistoryReport::default());
        rounds
    }

    /// Checks one revision and applies it.
    pub fn check(&mut self, revision: &Revision, report: &mut HistoryReport) {
        let (at, changes) = (revision.revision, &revision.changes);
        self.check_after_end(at, changes, report);
        changes.iter().for_each(|change| self.apply_node(at, change, report));
        let before = self.workers_desired;
        changes.iter().for_each(|change| self.apply_desired(at, change, report));
        let desired = Desired { before, after: self.workers_desired };
        changes.iter().for_each(|change| self.apply_round(at, change, &desired, report));
        let mut released = Vec::new();
        for change in changes {
            released.extend(self.apply_tag(at, change, report));
        }
        released.iter().for_each(|phase| self.check_released(at, phase, report));
        changes.iter().for_each(|change| self.check_result(at, change, report));
    }

    /// Checks that nothing of the rendezvous changes after the result.
    fn check_after_end(&mut self, at: i64, changes: &[Change], report: &mut HistoryReport) {
        let prefix = self.keys.rendezvous_prefix();
        let changed = changes.iter().find(|change| change.key.starts_with(&prefix));
        if let Some(change) = changed.filter(|_| self.is_over) {
            report.breaks(at, Rule::End, format!("{} changed after the result", change.key));
        }
        self.is_over |= changes.iter().any(|change| change.key == self.keys.result());
    }

    /// Checks that a job succeeds only when each member of its last round has succeeded. A result with a reason is not
    /// checked: a node has shut the job down.
    fn check_result(&self, at: i64, change: &Change, report: &mut HistoryReport) {
        if change.key != self.keys.result() || change.value.is_none() {
            return;
        }
        let Some(result) = read::<ResultRecord>(at, change, report) else { return };
        if result.state != JobOutcome::Finished || result.reason.is_some() {
            return;
        }
        for member in self.unfinished() {
            let text = format!("the job succeeded, and node {} had not", member.node);
            report.breaks(at, Rule::End, text);
        }
    }

    /// Checks that a round follows a success only if another member failed or was lost.
    fn check_broken(&self, at: i64, formed: &RoundRecord, report: &mut HistoryReport) {
        let has_success = self.entered.contains_key(&(EXIT_TAG.to_owned(), Phase(0)));
        if has_success && self.unfinished().all(|member| self.is_in_place(member)) {
            let text = format!(
                "round {} was formed after members had succeeded, and none had failed",
                formed.round
            );
            report.breaks(at, Rule::End, text);
        }
    }

    /// Returns the members of the last round that have not succeeded.
    fn unfinished(&self) -> impl Iterator<Item = &MemberRecord> {
        let succeeded = self.entered.get(&(EXIT_TAG.to_owned(), Phase(0)));
        let has_succeeded =
            move |it: &MemberRecord| succeeded.is_some_and(|all| all.contains(&it.node));
        let members = self.round.iter().flat_map(|round| &round.members);
        members.filter(move |member| !has_succeeded(member))
    }

    /// Returns whether a member is alive and has asked for no round after the last one.
    fn is_in_place(&self, member: &MemberRecord) -> bool {
        let known = self.nodes.get(&member.node);
        match known.filter(|known| known.incarnation == member.incarnation).map(|it| it.state) {
            Some(NodeState::Asked { after }) => after < self.number(),
            Some(NodeState::Starting | NodeState::Late) | None => false,
        }
    }

    fn apply_node(&mut self, at: i64, change: &Change, report: &mut HistoryReport) {
        let Some(node) = self.keys.node_of(&change.key) else { return };
        match &change.value {
            Some(_) => {
                let record = read(at, change, report);
                self.nodes.extend(record.map(|record| (node, record)));
            }
            None => drop(self.nodes.remove(&node)),
        }
    }

    fn apply_desired(&mut self, at: i64, change: &Change, report: &mut HistoryReport) {
        if change.key == self.keys.workers_desired() {
            let record =
                change.value.as_ref().and_then(|_| read::<ScaleRecord>(at, change, report));
            self.workers_desired = record.and_then(|record| record.workers);
        }
    }

    /// Checks that a round has no more workers than were desired before its revision or after it.
    fn check_desired(
        &self,
        at: i64,
        formed: &RoundRecord,
        desired: &Desired,
        report: &mut HistoryReport,
    ) {
        let is_least = formed.members.len() == self.allowed.min() as usize;
        if !is_least && desired.most().is_some_and(|most| most < formed.world_size) {
            let (round, workers) = (formed.round, formed.world_size);
            let text = format!("round {round} has {workers} workers, more than were desired");
            report.breaks(at, Rule::Rounds, text);
        }
    }

    fn apply_round(
        &mut self,
        at: i64,
        change: &Change,
        desired: &Desired,
        report: &mut HistoryReport,
    ) {
        if change.key != self.keys.formed_round() {
            return;
        }
        if change.value.is_none() {
            return report.breaks(at, Rule::Rounds, "the last round was deleted");
        }
        let Some(formed) = read::<RoundRecord>(at, change, report) else { return };
        self.check_number(at, &formed, report);
        self.check_ranks(at, &formed, report);
        self.check_order(at, &formed, report);
        self.check_desired(at, &formed, desired, report);
        for member in formed.members.iter().filter(|member| !self.has_asked(member)) {
            let text = format!(
                "node {} is in round {}, and has not asked for it",
                member.node, formed.round
            );
            report.breaks(at, Rule::Asked, text);
        }
        self.check_forgotten(at, &formed, desired, report);
        self.check_broken(at, &formed, report);
        report.rounds += 1;
        self.round = Some(formed);
        self.entered.clear();
    }

    fn check_number(&self, at: i64, formed: &RoundRecord, report: &mut HistoryReport) {
        let last = self.number();
        if Some(formed.round.0) != last.0.checked_add(1) {
            let text = format!("round {} follows round {last}", formed.round);
            report.breaks(at, Rule::Rounds, text);
        }
        let (count, allowed) = (formed.members.len(), self.allowed);
        if !(allowed.min() as usize..=allowed.max() as usize).contains(&count) {
            let text = format!(
                "round {} has {count} members; {} to {} are allowed",
                formed.round,
                allowed.min(),
                allowed.max()
            );
            report.breaks(at, Rule::Rounds, text);
        }
        if allowed.whole(count) != count {
            let (round, unit) = (formed.round, allowed.unit());
            let text = format!("round {round} has {count} members, no multiple of {unit}");
            report.breaks(at, Rule::Rounds, text);
        }
    }

    /// Checks that the ranks of the workers are 0 … n − 1, in the order of the members.
    fn check_ranks(&self, at: i64, formed: &RoundRecord, report: &mut HistoryReport) {
        let mut next: u64 = 0;
        let mut seen = BTreeSet::new();
        for member in &formed.members {
            if u64::from(member.first_rank) != next || !seen.insert(member.node) {
                let text = format!(
                    "round {}: node {} has the ranks from {}; {next} is the next one",
                    formed.round, member.node, member.first_rank
                );
                return report.breaks(at, Rule::Rounds, text);
            }
            next += u64::from(member.slots);
        }
        if u64::from(formed.world_size) != next {
            let text = format!(
                "round {} has {} workers, and {next} ranks",
                formed.round, formed.world_size
            );
            report.breaks(at, Rule::Rounds, text);
        }
    }

    /// Checks that members of the last round come first, in the order of that round, and that the others follow by the
    /// order that they asked for, and then by age, the oldest first.
    fn check_order(&self, at: i64, formed: &RoundRecord, report: &mut HistoryReport) {
        let seniority = |member: &MemberRecord| {
            let rank = self.last_rank(member.node, member.incarnation).unwrap_or(usize::MAX);
            let known =
                self.nodes.get(&member.node).filter(|it| it.incarnation == member.incarnation);
            let seniority = known.map(NodeRecord::seniority);
            (rank, seniority.unwrap_or((u32::MAX, member.incarnation)), member.node)
        };
        if !formed.members.is_sorted_by_key(seniority) {
            let text = format!("round {} does not keep the order of its members", formed.round);
            report.breaks(at, Rule::Rounds, text);
        }
    }

    /// Returns whether a member asked for a round after the last one that it was in.
    fn has_asked(&self, member: &MemberRecord) -> bool {
        let known = self.nodes.get(&member.node);
        match known.filter(|known| known.incarnation == member.incarnation).map(|it| it.state) {
            Some(NodeState::Asked { after }) => {
                let was_member = self.last_rank(member.node, member.incarnation).is_some();
                after <= self.number() && (!was_member || after == self.number())
            }
            Some(NodeState::Starting | NodeState::Late) | None => false,
        }
    }

    /// Checks that each node that has asked for a round is a member of it, unless others fill the round. The first one
    /// that is left out would have had too many workers for those that are desired.
    fn check_forgotten(
        &self,
        at: i64,
        formed: &RoundRecord,
        desired: &Desired,
        report: &mut HistoryReport,
    ) {
        let members: BTreeSet<NodeId> = formed.members.iter().map(|member| member.node).collect();
        let is_due = |record: &NodeRecord| matches!(record.state, NodeState::Asked { .. });
        let left_out = self.nodes.iter().filter(|(node, it)| !members.contains(node) && is_due(it));
        let all = members.len() + left_out.clone().count();
        if self.allowed.whole(all.min(self.allowed.max() as usize)) <= members.len() {
            return;
        }
        let first = left_out.min_by_key(|(node, record)| {
            let rank = self.last_rank(**node, record.incarnation).unwrap_or(usize::MAX);
            (rank, record.incarnation, **node)
        });
        let Some((node, record)) = first else { return };
        let workers = formed.world_size.saturating_add(record.slots);
        let is_least = formed.members.len() < self.allowed.min() as usize;
        if is_least || desired.least().is_none_or(|least| workers <= least) {
            let text = format!("round {} has room, and does not have node {node}", formed.round);
            report.breaks(at, Rule::Asked, text);
        }
    }

    /// Applies a change of a tag; returns the phase that it released, if any.
    fn apply_tag(
        &mut self,
        at: i64,
        change: &Change,
        report: &mut HistoryReport,
    ) -> Option<(String, Phase)> {
        let key = &change.key;
        if !key.starts_with(&self.keys.all_tags_prefix()) {
            return None;
        }
        let round = self.keys.tag_round_of(key);
        let Some(tag_key) = round.and_then(|round| self.keys.tag_key_of(round, key)) else {
            report.breaks(at, Rule::Value, format!("{key} is not the key of a tag"));
            return None;
        };
        let is_put = change.value.is_some();
        if round != Some(self.number()) {
            if is_put {
                let text = format!("{key} was written in round {}", self.number());
                report.breaks(at, Rule::Barriers, text);
            }
            return None;
        }
        match tag_key {
            TagKey::Released { tag } if is_put => {
                let ReleaseRecord { phase } = read(at, change, report)?;
                return Some((tag, phase));
            }
            TagKey::Released { .. } => {}
            TagKey::Entry { tag, phase, node } if is_put => {
                self.entered.entry((tag, phase)).or_default().insert(node);
            }
            TagKey::Entry { tag, phase, node } => {
                let place = (tag, phase);
                let nodes = self.entered.entry(place.clone()).or_default();
                nodes.remove(&node);
                if nodes.is_empty() {
                    self.entered.remove(&place);
                }
            }
        }
        None
    }

    /// Checks that a phase is released only when each member of the round has entered it.
    fn check_released(&self, at: i64, phase: &(String, Phase), report: &mut HistoryReport) {
        let members = self.round.iter().flat_map(|round| &round.members).map(|it| it.node);
        let (members, empty) = (members.collect::<BTreeSet<_>>(), BTreeSet::new());
        let entered = self.entered.get(phase).unwrap_or(&empty);
        if *entered != members {
            let (tag, phase) = phase;
            let text = format!(
                "phase {phase} of tag {tag} was released with {} entries; the round has {} members",
                entered.len(),
                members.len()
            );
            report.breaks(at, Rule::Barriers, text);
        }
    }

    fn last_rank(&self, node: NodeId, incarnation: Incarnation) -> Option<usize> {
        let is_same = |it: &MemberRecord| it.node == node && it.incarnation == incarnation;
        self.round.as_ref()?.members.iter().position(is_same)
    }

    fn number(&self) -> Round {
        self.round.as_ref().map_or(Round(0), |round| round.round)
    }
}
