//! Barriers of a round, and the values that its members exchange in them.
//!
//! A *phase* of a tag is released when all members have entered it. A member enters the next phase of a tag
//! only after it received the answer of the one before, so the entries of a phase are kept until the next
//! phase is released. Thus a tag can be used any number of times, and holds the data of two phases at most.
//! All tags of a round are deleted when the next round is formed.

use std::sync::Arc;

use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::records::commits::COMMIT_TAG;
use steadfast_common::records::rendezvous::EXIT_TAG;

use super::state::{Entries, Fact, Rendezvous};
use super::{Caller, Names, Refusal, Settings};

/// Maximum number of tags in one round.
pub const TAGS_MAX: usize = 64;

/// Maximum length of a tag.
pub const TAG_BYTES_MAX: usize = 128;

/// Maximum size of the data of one node in one phase.
pub const VALUE_BYTES_MAX: usize = 512 * 1024;

/// Maximum size of the data of all nodes in one phase.
pub const VALUES_BYTES_MAX: usize = 1024 * 1024;

/// Identifies a barrier: a phase of a tag in a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BarrierId {
    pub round: Round,
    pub tag: String,
    /// How often the caller passed the tag in this round before.
    pub phase: Phase,
}

/// The state of a barrier. The first three are final within a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome<'a> {
    /// All members have entered, with these data.
    Released(&'a Entries),
    /// All members have entered this phase and the next one; the data are deleted.
    Passed,
    /// The barrier will not be released.
    Ended(EndedBy),
    /// `entered` of `members` nodes have entered.
    Waiting { entered: usize, members: usize },
}

/// Why a barrier will not be released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndedBy {
    /// These members of the round were lost or left.
    Lost(Names),
    /// These members asked to join the next round.
    Rejoined(Names),
    /// This round was formed.
    NewRound(Round),
}

impl Rendezvous {
    /// Notes that a member enters a barrier with `data`, if it has not entered before. The last member
    /// releases it. The answer is [`Rendezvous::barrier`].
    ///
    /// # Errors
    /// If the caller is not a member, the tag is not valid, or a limit is exceeded.
    pub fn enter(
        &self,
        caller: Caller,
        barrier: &BarrierId,
        data: Arc<[u8]>,
        settings: &Settings,
    ) -> Result<Vec<Fact>, Refusal> {
        self.check_open()?;
        if barrier.tag == EXIT_TAG {
            return self.succeed(caller, barrier.round);
        }
        let Outcome::Waiting { members, .. } = self.barrier(caller, barrier)? else {
            return Ok(Vec::new());
        };
        let (tag, phase, round) = (&barrier.tag, barrier.phase, barrier.round);
        let empty = Entries::default();
        let entries = self.entries(tag, phase).unwrap_or(&empty);
        if entries.data().contains_key(&caller.node) {
            return Ok(Vec::new());
        }
        self.check_limits(tag, entries, data.len())?;
        let commit = match tag == COMMIT_TAG {
            true => Some(self.commit_of(caller, barrier, entries, &data, settings)?),
            false => None,
        };
        let entered = Fact::Entered { round, tag: tag.clone(), phase, node: caller.node, data };
        let mut facts = vec![entered];
        if entries.data().len() + 1 == members {
            facts.push(Fact::Released { round, tag: tag.clone(), phase });
            let passed = phase.0.checked_sub(1).map(Phase);
            let delete = |phase| Fact::EntriesDeleted { round, tag: tag.clone(), phase };
            facts.extend(passed.map(delete));
            facts.extend(commit.map(|commit| Fact::Committed(Arc::new(commit))));
        }
        Ok(facts)
    }

    /// Returns the state of a barrier.
    ///
    /// # Errors
    /// If the caller is not a member of the round, or the tag is not valid.
    pub fn barrier(&self, caller: Caller, barrier: &BarrierId) -> Result<Outcome<'_>, Refusal> {
        let BarrierId { round, tag, phase } = barrier;
        self.standing_of(caller)?;
        check_tag(tag)?;
        if *round < self.number() {
            return Ok(Outcome::Ended(EndedBy::NewRound(self.number())));
        }
        let is_member = self.rank_of(caller.node, caller.incarnation).is_some();
        if self.number() < *round || !is_member {
            return Err(Refusal::NotMember { node: caller.node, round: *round });
        }
        let released = self.tags.get(tag).and_then(|tag| tag.released);
        let is_over = tag == EXIT_TAG && self.has_each_succeeded();
        if is_over || Some(*phase) <= released {
            return Ok(self.entries(tag, *phase).map_or(Outcome::Passed, Outcome::Released));
        }
        if let Some(ended) = self.ended_by().or_else(|| self.never_entered(tag, *phase)) {
            return Ok(Outcome::Ended(ended));
        }
        let next = self.next_phase(tag);
        if next != *phase {
            return Err(Refusal::FuturePhase { tag: tag.clone(), given: *phase, next });
        }
        let entered = self.entries(tag, *phase).map_or(0, |entries| entries.data().len());
        Ok(Outcome::Waiting { entered, members: self.members().len() })
    }

    /// Returns the next phase of a tag in the last round.
    pub fn next_phase(&self, tag: &str) -> Phase {
        let released = self.tags.get(tag).and_then(|tag| tag.released);
        Phase(released.map_or(0, |phase| phase.0 + 1))
    }

    /// Returns the tags of the last round with their next phases.
    pub fn open_tags(&self) -> impl Iterator<Item = (&str, Phase)> {
        self.tags.keys().map(|tag| (tag.as_str(), self.next_phase(tag)))
    }

    /// Returns the members that have not entered a barrier of the last round.
    pub fn missing(&self, tag: &str, phase: Phase) -> Names {
        let (entries, members) = (self.entries(tag, phase), self.members());
        let has_entered = |node| entries.is_some_and(|it| it.data().contains_key(&node));
        let missing = members.iter().map(|member| member.node).filter(|node| !has_entered(*node));
        // Not counted one by one: this answers each member that waits.
        let count = members.len().saturating_sub(entries.map_or(0, |it| it.data().len()));
        Names::first(self, missing, count)
    }

    /// Returns the members that were lost after their success, and so cannot enter another tag than that of the end.
    fn never_entered(&self, tag: &str, phase: Phase) -> Option<EndedBy> {
        if tag == EXIT_TAG || self.index.gone.is_empty() {
            return None;
        }
        let entries = self.entries(tag, phase);
        let has_entered = |node: &NodeId| entries.is_some_and(|it| it.data().contains_key(node));
        let gone: Vec<NodeId> =
            self.index.gone.iter().copied().filter(|node| !has_entered(node)).collect();
        (!gone.is_empty())
            .then(|| EndedBy::Lost(Names::first(self, gone.iter().copied(), gone.len())))
    }

    fn ended_by(&self) -> Option<EndedBy> {
        if self.is_intact() {
            return None;
        }
        let lost = self.lost_members();
        Some(match lost.count {
            0 => EndedBy::Rejoined(self.unfinished(&self.index.returning)),
            _ => EndedBy::Lost(lost),
        })
    }

    pub(super) fn entries(&self, tag: &str, phase: Phase) -> Option<&Entries> {
        self.tags.get(tag)?.phases.get(&phase)
    }

    fn check_limits(&self, tag: &str, entries: &Entries, given: usize) -> Result<(), Refusal> {
        if !self.tags.contains_key(tag) && TAGS_MAX <= self.tags.len() {
            return Err(Refusal::TooManyTags { limit: TAGS_MAX });
        }
        if VALUE_BYTES_MAX < given {
            return Err(Refusal::ValueTooLarge { given, limit: VALUE_BYTES_MAX });
        }
        let given = entries.bytes() + given;
        if VALUES_BYTES_MAX < given {
            let (tag, limit) = (tag.to_owned(), VALUES_BYTES_MAX);
            return Err(Refusal::ValuesTooLarge { tag, given, limit });
        }
        Ok(())
    }
}

fn check_tag(tag: &str) -> Result<(), Refusal> {
    if tag.is_empty() || TAG_BYTES_MAX < tag.len() {
        return Err(Refusal::TagLength { given: tag.len(), limit: TAG_BYTES_MAX });
    }
    match tag.bytes().all(|it| it.is_ascii_graphic() && it != b'/') {
        true => Ok(()),
        false => Err(Refusal::TagCharacters { tag: tag.to_owned() }),
    }
}
