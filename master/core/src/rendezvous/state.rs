//! The durable state of a rendezvous, and the facts that change it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::{Incarnation, NodeId, Phase, Round};
use steadfast_common::records::ResultRecord;
use steadfast_common::records::commits::{CommitRecord, DealtRecord};
use steadfast_common::records::ranges::Ranges;
use steadfast_common::records::rendezvous::{
    MemberRecord, NodeRecord, NodeState, RoundRecord, SharedRecord,
};
use steadfast_common::records::scale::ScaleRecord;

use super::scaling::Fitting;

/// A durable change. Each is one key in etcd, or the deletion of one key or prefix.
#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A node announced itself, asked to join, or was late.
    Node { node: NodeId, record: NodeRecord },
    /// A node was lost, or left.
    Removed { node: NodeId },
    /// A round was formed.
    Formed(Arc<RoundRecord>),
    /// The tags of a round that is over were deleted.
    TagsDeleted { round: Round },
    /// A member entered a phase of a tag.
    Entered { round: Round, tag: String, phase: Phase, node: NodeId, data: Arc<[u8]> },
    /// All members have entered a phase of a tag.
    Released { round: Round, tag: String, phase: Phase },
    /// The entries of a phase were deleted: all members have entered the next one.
    EntriesDeleted { round: Round, tag: String, phase: Phase },
    /// A member was given records.
    Dealt { round: Round, node: NodeId, record: Arc<DealtRecord> },
    /// All that the members of a round that is over were given was deleted.
    DealtDeleted { round: Round },
    /// All members have the same state, which has seen these records.
    Committed(Arc<CommitRecord>),
    /// The rounds are to have another number of workers.
    Scaled(Arc<ScaleRecord>),
    /// The shared state was replaced.
    Shared(Arc<SharedRecord>),
    /// The job is over.
    Ended(Arc<ResultRecord>),
}

/// The durable state: the result of applying all facts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rendezvous {
    pub(super) nodes: BTreeMap<NodeId, NodeRecord>,
    /// The round that was formed last.
    pub(super) round: Option<Arc<RoundRecord>>,
    /// The tags of that round.
    pub(super) tags: BTreeMap<String, Tag>,
    pub(super) index: Index,
    /// The last commit that was decided.
    pub(super) commit: Option<Arc<CommitRecord>>,
    /// Holds what the members of the last round were given.
    pub(super) dealt: BTreeMap<NodeId, Arc<DealtRecord>>,
    /// The records that cannot be dealt, behind the first one that the last commit has not seen. They follow from the
    /// other fields, once a commit of the last round has been decided.
    pub(super) taken: Ranges,
    pub(super) scale: Option<Arc<ScaleRecord>>,
    /// It follows from the other fields.
    pub(super) fitting: Fitting,
    pub(super) shared: Option<Arc<SharedRecord>>,
    ended: Option<Arc<ResultRecord>>,
}

/// Sets of nodes that follow from the other fields of [`Rendezvous`], so that no decision searches for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Index {
    /// The rank of each member of the last round.
    ranks: Arc<BTreeMap<NodeId, usize>>,
    pub starting: BTreeSet<NodeId>,
    /// Nodes that asked to be in the next round.
    pub waiting: BTreeSet<NodeId>,
    /// Members of the last round that have not asked for the next one and are not late.
    pub in_place: BTreeSet<NodeId>,
    /// Members of the last round that wait for the next one.
    pub returning: BTreeSet<NodeId>,
    /// Members of the last round that were lost, or left, or run as another incarnation.
    pub gone: BTreeSet<NodeId>,
}

/// A barrier, or a synchronized value. At most two phases have entries: the last one that was released, for
/// members that have not received the answer, and the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tag {
    pub released: Option<Phase>,
    pub phases: BTreeMap<Phase, Entries>,
}

/// The members that entered one phase of a tag, with their data.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entries {
    /// The data by node. They are shared with the answers to all members, so that no answer holds a copy.
    data: Arc<BTreeMap<NodeId, Arc<[u8]>>>,
    bytes: usize,
}

impl Entries {
    /// Returns the data of each member that entered.
    pub fn data(&self) -> &Arc<BTreeMap<NodeId, Arc<[u8]>>> {
        &self.data
    }

    /// Returns the total size of the data of all members.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// How a known node stands to the last round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Starting,
    Waiting,
    InPlace,
    Late,
}

impl Rendezvous {
    /// Applies one committed fact.
    pub fn evolve(&mut self, fact: &Fact) {
        match fact {
            Fact::Node { node, record } => {
                self.nodes.insert(*node, record.clone());
                self.reindex(*node);
                self.follow_fitting();
            }
            Fact::Removed { node } => {
                self.nodes.remove(node);
                self.reindex(*node);
                self.follow_fitting();
            }
            Fact::Formed(record) => {
                self.round = Some(Arc::clone(record));
                self.rebuild_index();
                self.follow_fitting();
            }
            Fact::TagsDeleted { .. } => self.tags.clear(),
            Fact::Dealt { node, record, .. } => {
                self.taken.add_all(&record.ranges);
                self.dealt.insert(*node, Arc::clone(record));
            }
            Fact::DealtDeleted { .. } => self.dealt.clear(),
            Fact::Entered { tag, phase, node, data, .. } => {
                let tag = self.tags.entry(tag.clone()).or_default();
                let entries = tag.phases.entry(*phase).or_default();
                entries.bytes += data.len();
                Arc::make_mut(&mut entries.data).insert(*node, Arc::clone(data));
            }
            Fact::Released { tag, phase, .. } => {
                self.tags.entry(tag.clone()).or_default().released = Some(*phase);
            }
            Fact::EntriesDeleted { tag, phase, .. } => {
                self.tags.entry(tag.clone()).or_default().phases.remove(phase);
            }
            Fact::Committed(record) => {
                self.commit = Some(Arc::clone(record));
                self.follow_taken();
            }
            Fact::Scaled(record) => {
                self.scale = Some(Arc::clone(record));
                self.follow_fitting();
            }
            Fact::Shared(record) => self.shared = Some(Arc::clone(record)),
            Fact::Ended(record) => self.ended = Some(Arc::clone(record)),
        }
    }

    /// Returns the round that was formed last, intact or not.
    pub fn round(&self) -> Option<&Arc<RoundRecord>> {
        self.round.as_ref()
    }

    /// Returns the number of the round that was formed last.
    pub fn number(&self) -> Round {
        self.round.as_ref().map_or(Round(0), |round| round.round)
    }

    /// Returns the last commit that was decided.
    pub fn commit(&self) -> Option<&Arc<CommitRecord>> {
        self.commit.as_ref()
    }

    /// Returns whether there is a round of which each member is alive and has not asked for the next one, or has
    /// succeeded.
    pub fn is_intact(&self) -> bool {
        let is_kept = |member: &MemberRecord| {
            self.index.in_place.contains(&member.node) || self.has_succeeded(member.node)
        };
        self.round.is_some()
            && (self.index.in_place.len() == self.members().len()
                || self.is_closing() && self.members().iter().all(is_kept))
    }

    /// Returns the result, if the job is over.
    pub fn result(&self) -> Option<&Arc<ResultRecord>> {
        self.ended.as_ref()
    }

    /// Returns all known nodes with their incarnations. After a recovery, the caller removes those that are
    /// not registered any more.
    pub fn known(&self) -> impl Iterator<Item = (NodeId, Incarnation)> + '_ {
        self.nodes.iter().map(|(node, record)| (*node, record.incarnation))
    }

    pub(super) fn members(&self) -> &[MemberRecord] {
        self.round.as_ref().map_or(&[], |round| &round.members)
    }

    /// Returns the rank of a node in the last round, in whichever incarnation, and its record there.
    pub(super) fn member(&self, node: NodeId) -> Option<(usize, &MemberRecord)> {
        let rank = *self.index.ranks.get(&node)?;
        Some((rank, &self.members()[rank]))
    }

    /// Returns the rank of an incarnation in the last round.
    pub(super) fn rank_of(&self, node: NodeId, incarnation: Incarnation) -> Option<usize> {
        let (rank, member) = self.member(node)?;
        (member.incarnation == incarnation).then_some(rank)
    }

    pub(super) fn standing(&self, node: NodeId, record: &NodeRecord) -> Standing {
        match record.state {
            NodeState::Starting => Standing::Starting,
            NodeState::Late => Standing::Late,
            NodeState::Asked { after } => {
                let is_member = self.rank_of(node, record.incarnation).is_some();
                let is_newer = after < self.number();
                if is_member && is_newer { Standing::InPlace } else { Standing::Waiting }
            }
        }
    }

    fn rebuild_index(&mut self) {
        let ranks = self.members().iter().enumerate().map(|(rank, member)| (member.node, rank));
        self.index = Index { ranks: Arc::new(ranks.collect()), ..Index::default() };
        let members = self.index.ranks.keys().copied();
        let all: BTreeSet<NodeId> = members.chain(self.nodes.keys().copied()).collect();
        all.into_iter().for_each(|node| self.reindex(node));
    }

    fn reindex(&mut self, node: NodeId) {
        let record = self.nodes.get(&node);
        let standing = record.map(|record| self.standing(node, record));
        let was_member = self.index.ranks.contains_key(&node);
        let is_same = record.is_some_and(|it| self.rank_of(node, it.incarnation).is_some());
        let is_waiting = standing == Some(Standing::Waiting);
        let index = &mut self.index;
        for (set, belongs) in [
            (&mut index.starting, standing == Some(Standing::Starting)),
            (&mut index.waiting, is_waiting),
            (&mut index.in_place, standing == Some(Standing::InPlace)),
            (&mut index.returning, is_waiting && is_same),
            (&mut index.gone, was_member && !is_same),
        ] {
            if belongs {
                set.insert(node)
            } else {
                set.remove(&node)
            };
        }
    }
}
