//! Deals the records of a job whose order is dynamic.
//!
//! The records of all passes form one sequence. A member of a round asks for records while its workers use them up, and
//! gets the first ones that neither the last commit has seen nor a member holds. What a member holds it holds for the
//! round: in the next one all that no commit has seen can be dealt again, so what a lost member had goes to others, and
//! nothing else is stored than what each member holds.
//!
//! Shares shrink toward the end of the records: each is at most a part of what is left (guided self-scheduling,
//! Polychronopoulos and Kuck 1987), so that all workers come to the end at about the same time.

use std::collections::BTreeMap;
use std::sync::Arc;

use steadfast_common::ids::{NodeId, Round};
use steadfast_common::records::commits::{
    COMMIT_TAG, CommitId, CommitRecord, Progress, RecordOrder,
};
use steadfast_common::records::ranges::{NUMBER_MAX, Ranges};

use super::state::{Entries, Fact, Rendezvous};
use super::{BarrierId, Caller, Refusal, Settings};

/// The most records that are dealt at once.
const SHARE_MAX: u64 = 1 << 20;

/// The most ranges that one member may hold, or that a commit has seen ahead of its position: the record must fit into
/// one request to etcd.
pub const RANGES_MAX: usize = 16 * 1024;

/// The most ranges of one share.
const PARTS_MAX: usize = 64;

/// The most bytes of one range in a record: two numbers and four other characters.
const RANGE_BYTES: usize = 2 * 19 + 4;

/// A member's request for records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DealTerms {
    pub round: Round,
    /// It was given so many in the round, as far as it knows. That makes a repeated request harmless: a member that was
    /// given more has been answered already.
    pub total: u64,
    /// It asks for so many more.
    pub wanted: u64,
    /// It gets at least so many while there are some.
    pub least: u64,
    /// Only records with numbers below this are dealt.
    pub end: u64,
}

/// Tells what a member holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Counts the records that it was given in the round.
    pub total: u64,
    /// Holds those of them that no commit has seen.
    pub ranges: Ranges,
    /// Whether there is no more to deal to any member.
    pub is_end: bool,
}

impl Rendezvous {
    /// Gives records to a member that has used up what it was given. The answer is [`Rendezvous::held`].
    ///
    /// # Errors
    /// If the caller is not a member of the round, the workers of the round have no state yet, the order is fixed, or
    /// the member holds too many ranges.
    pub fn deal(
        &self,
        caller: Caller,
        terms: &DealTerms,
        settings: &Settings,
    ) -> Result<Vec<Fact>, Refusal> {
        self.check_open()?;
        let (commit, records) = self.begun(caller, terms.round, settings)?;
        let node = caller.node;
        let mut record = self.dealt.get(&node).map(|it| (**it).clone()).unwrap_or_default();
        if record.total != terms.total {
            return Ok(Vec::new());
        }
        let left = commit.first_unseen(records)..terms.end.min(NUMBER_MAX);
        let share = self.share_of(commit, records, terms);
        let given = self.taken.first_missing(left, share, PARTS_MAX);
        if given.is_empty() {
            return Ok(Vec::new());
        }
        record.ranges = unseen(&record.ranges, commit, records);
        record.ranges.add_all(&given);
        record.total += given.count();
        if RANGES_MAX < record.ranges.iter().count() {
            return Err(Refusal::TooManyRanges { limit: RANGES_MAX });
        }
        Ok(vec![Fact::Dealt { round: terms.round, node, record: Arc::new(record) }])
    }

    /// Returns what a member holds.
    ///
    /// # Errors
    /// See [`Rendezvous::deal`].
    pub fn held(
        &self,
        caller: Caller,
        terms: &DealTerms,
        settings: &Settings,
    ) -> Result<Held, Refusal> {
        let (commit, records) = self.begun(caller, terms.round, settings)?;
        let record = self.dealt.get(&caller.node).map(|it| (**it).clone()).unwrap_or_default();
        let left = commit.first_unseen(records)..terms.end.min(NUMBER_MAX);
        Ok(Held {
            total: record.total,
            ranges: unseen(&record.ranges, commit, records),
            is_end: self.taken.first_missing(left, 1, 1).is_empty(),
        })
    }

    /// Returns the last commit, and the number of records of a pass, once the workers of a round have begun.
    fn begun(
        &self,
        caller: Caller,
        round: Round,
        settings: &Settings,
    ) -> Result<(&CommitRecord, u64), Refusal> {
        self.standing_of(caller)?;
        if round != self.number() || self.rank_of(caller.node, caller.incarnation).is_none() {
            return Err(Refusal::NotMember { node: caller.node, round });
        }
        let records = settings.records.filter(|_| settings.order == RecordOrder::Dynamic);
        let records = records.ok_or(Refusal::NotDealt)?;
        let commit = self.commit.as_deref().filter(|commit| commit.id.round == round);
        Ok((commit.ok_or(Refusal::NotBegun { round })?, records))
    }

    /// Returns how many records a member gets.
    fn share_of(&self, commit: &CommitRecord, records: u64, terms: &DealTerms) -> u64 {
        let left = terms.end.min(NUMBER_MAX).saturating_sub(commit.first_unseen(records));
        let left = left.saturating_sub(self.taken.count());
        let workers = self.round.as_ref().map_or(1, |round| u64::from(round.world_size.max(1)));
        terms.wanted.min(left.div_ceil(2 * workers)).max(terms.least).clamp(1, SHARE_MAX)
    }

    /// Returns the commit that a member takes part in with this progress, if all do.
    pub(super) fn commit_of_progress(
        &self,
        caller: Caller,
        barrier: &BarrierId,
        entries: &Entries,
        data: &[u8],
        records: u64,
    ) -> Result<CommitRecord, Refusal> {
        let id = CommitId { round: barrier.round, phase: barrier.phase };
        let invalid = || {
            let what = String::from_utf8_lossy(data).into_owned();
            Refusal::Progress { what, id }
        };
        let own = Progress::parse(data).ok_or_else(invalid)?;
        let others = entries.data().values().filter_map(|other| Progress::parse(other));
        match (own, self.commit.as_deref()) {
            (Progress::State(state), last) if barrier.phase.0 == 0 => {
                let state_of = |other| match other {
                    Progress::State(other) => Some(other.number),
                    Progress::Used(_) => None,
                };
                if let Some(other) = others.filter_map(state_of).find(|it| *it != state.number) {
                    return Err(Refusal::OtherState { own: state.number, other });
                }
                let begun = state.begin(id, last, records);
                begun.ok_or(Refusal::OldState { state: state.number })
            }
            (Progress::Used(mut used), Some(last)) if 0 < barrier.phase.0 => {
                let held = self.dealt.get(&caller.node).map(|it| &it.ranges);
                let is_held = used.is_empty() || held.is_some_and(|it| it.contains_all(&used));
                if !is_held || unseen(&used, last, records) != used {
                    return Err(Refusal::NotHeld { node: caller.node });
                }
                for other in others {
                    if let Progress::Used(ranges) = other {
                        used.add_all(&ranges);
                    }
                }
                let commit = last.and(id, &used, records);
                match commit.ahead.iter().count() {
                    ..=RANGES_MAX => Ok(commit),
                    _ => Err(Refusal::TooManyRanges { limit: RANGES_MAX }),
                }
            }
            (Progress::State(_) | Progress::Used(_), _) => Err(invalid()),
        }
    }

    /// Returns how many records each member has used for the commit that was decided last; nothing if the order is fixed.
    pub fn used_for_last_commit(&self) -> BTreeMap<NodeId, u64> {
        let data = self.round.as_ref().and_then(|round| round.data);
        let is_dynamic = data.is_some_and(|data| data.order == RecordOrder::Dynamic);
        let last = self.commit.as_ref().map(|commit| commit.id);
        let last = last.filter(|last| is_dynamic && last.round == self.number());
        let entries = last.and_then(|last| self.entries(COMMIT_TAG, last.phase));
        let used = entries.into_iter().flat_map(|entries| entries.data().iter()).filter_map(
            |(node, data)| match Progress::parse(data)? {
                Progress::Used(ranges) => Some((*node, ranges.count())),
                Progress::State(_) => None,
            },
        );
        used.collect()
    }

    /// Returns the most bytes that the next record of a member, or the next commit, can have.
    pub fn bytes_of_records(&self, node: NodeId) -> usize {
        let held = self.dealt.get(&node).map_or(0, |record| record.ranges.iter().count());
        let ahead = self.commit.as_ref().map_or(0, |commit| commit.ahead.iter().count());
        let used = self.entries(COMMIT_TAG, self.next_phase(COMMIT_TAG)).map_or(0, Entries::bytes);
        (held + ahead + PARTS_MAX) * RANGE_BYTES + used
    }

    /// Notes again which records cannot be dealt: members hold them, or the last commit has seen them.
    pub(super) fn follow_taken(&mut self) {
        self.taken = self.commit.as_ref().map(|it| it.ahead.clone()).unwrap_or_default();
        self.dealt.values().for_each(|record| self.taken.add_all(&record.ranges));
        if let Some(first) = self.commit.as_ref().zip(self.records()) {
            self.taken.remove(0..first.0.first_unseen(first.1));
        }
    }

    fn records(&self) -> Option<u64> {
        Some(self.round.as_ref()?.data?.records)
    }
}

/// Returns those records that a commit has not seen.
fn unseen(ranges: &Ranges, commit: &CommitRecord, records: u64) -> Ranges {
    let mut unseen = ranges.clone();
    unseen.remove(0..commit.first_unseen(records));
    unseen.remove_all(&commit.ahead);
    unseen
}
