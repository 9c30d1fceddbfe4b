//! Decides when a round is formed, and of which nodes.

use std::sync::Arc;

use steadfast_common::ids::{Incarnation, Millis, NodeId, Round};
use steadfast_common::records::rendezvous::{
    MemberRecord, NodeRecord, NodeState, RoundData, RoundRecord,
};

use super::state::{Fact, Rendezvous};
use super::{Names, Settings};

/// Maximum number of facts of one decision; they must fit into one transaction.
pub const FACTS_MAX: usize = 64;

/// Since when nodes wait. Kept in memory only: a new master starts the waits anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timers {
    /// `None` while no node waits.
    stage: Option<Stage>,
    pub(super) stage_since: Millis,
    waiting: usize,
    pub(super) last_arrival: Millis,
}

/// A change of any field restarts the join timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stage {
    round: Round,
    is_intact: bool,
    can_form: bool,
}

impl Timers {
    /// Records since when nodes wait. The caller calls this after each commit.
    pub fn follow(&mut self, now: Millis, state: &Rendezvous, settings: &Settings) {
        let waiting = state.index.waiting.len();
        let stage = (0 < waiting).then(|| Stage {
            round: state.number(),
            is_intact: state.is_intact(),
            can_form: !state.is_intact() && settings.nodes.min() as usize <= waiting,
        });
        if self.stage != stage {
            self.stage = stage;
            self.stage_since = now;
        }
        if self.waiting < waiting {
            self.last_arrival = now;
        }
        self.waiting = waiting;
    }
}

/// What the waiting nodes wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GatheringState {
    /// No node waits.
    Quiet,
    /// Some members of an intact round have succeeded: it goes on, whichever nodes wait.
    Closing,
    /// The round is intact and has as many nodes as are allowed.
    Full,
    /// The round is intact. It goes on until the nodes that are starting have joined, too.
    Starting { until: Millis },
    /// The round is intact, and its members are asked to join the next one.
    Growing,
    /// The round is intact and has more workers than are desired: its members are asked to join the next one.
    Shrinking,
    /// Members of the last round, starting nodes, or any nodes at all have to join.
    Gathering { until: Millis },
    /// There are too few nodes, and have been for longer than the join timeout.
    TooFew,
    /// Awaited nodes did not join in time.
    Overdue,
    /// More nodes may arrive.
    LastCall { until: Millis },
    /// The next round can be formed.
    Complete,
}

impl Rendezvous {
    /// Returns the facts for which the time has come: a round is formed, awaited nodes are late, or the job has ended.
    /// The caller calls this after each commit, and at the [`Rendezvous::deadline`], until it returns none.
    pub fn due(&self, settings: &Settings, timers: &Timers, now: Millis) -> Vec<Fact> {
        if self.result().is_some() {
            return Vec::new();
        }
        if self.has_each_succeeded() {
            return self.finish();
        }
        match self.gathering_state(settings, timers, now) {
            GatheringState::Complete => self.form(settings),
            GatheringState::Overdue => self.late_nodes(settings),
            GatheringState::TooFew if self.is_closing() => self.fail_to_close(settings),
            GatheringState::Quiet
            | GatheringState::Closing
            | GatheringState::Full
            | GatheringState::Starting { .. }
            | GatheringState::Growing
            | GatheringState::Shrinking
            | GatheringState::Gathering { .. }
            | GatheringState::TooFew
            | GatheringState::LastCall { .. } => Vec::new(),
        }
    }

    /// Returns the next time at which a decision or an answer can change without another fact.
    pub fn deadline(&self, settings: &Settings, timers: &Timers, now: Millis) -> Option<Millis> {
        match self.gathering_state(settings, timers, now) {
            GatheringState::Starting { until }
            | GatheringState::Gathering { until }
            | GatheringState::LastCall { until } => Some(until),
            GatheringState::Complete | GatheringState::Overdue => Some(now),
            GatheringState::Quiet
            | GatheringState::Closing
            | GatheringState::Full
            | GatheringState::Growing
            | GatheringState::Shrinking
            | GatheringState::TooFew => None,
        }
    }

    /// Returns whether the members of an intact round are asked to join the next one.
    pub fn is_growing(&self, settings: &Settings, timers: &Timers, now: Millis) -> bool {
        self.gathering_state(settings, timers, now) == GatheringState::Growing
    }

    /// Returns whether the members of an intact round are asked to join a smaller one.
    pub fn is_shrinking(&self, settings: &Settings) -> bool {
        self.is_intact() && !self.is_closing() && 0 < self.surplus(settings)
    }

    /// Returns whether too few nodes joined within the join timeout.
    pub fn has_given_up(&self, settings: &Settings, timers: &Timers, now: Millis) -> bool {
        self.gathering_state(settings, timers, now) == GatheringState::TooFew
    }

    pub(super) fn gathering_state(
        &self,
        settings: &Settings,
        timers: &Timers,
        now: Millis,
    ) -> GatheringState {
        let mut timers = *timers;
        timers.follow(now, self, settings);
        let (min, max) = (settings.nodes.min() as usize, self.places(settings));
        let (waiting, in_place) = (self.index.waiting.len(), self.index.in_place.len());
        let until = Millis(timers.stage_since.0.saturating_add(settings.join_timeout_ms));
        let (is_overdue, awaits_starting) = (until <= now, self.waits_for_starting(settings));
        if self.is_closing() && self.is_intact() {
            return GatheringState::Closing;
        }
        if self.is_shrinking(settings) {
            return GatheringState::Shrinking;
        }
        if waiting == 0 {
            return GatheringState::Quiet;
        }
        if self.is_intact() {
            return match (self.grown(settings) <= in_place, awaits_starting) {
                (true, _) => GatheringState::Full,
                (false, true) if is_overdue => GatheringState::Overdue,
                (false, true) => GatheringState::Starting { until },
                (false, false) => GatheringState::Growing,
            };
        }
        if waiting < min {
            return if is_overdue {
                GatheringState::TooFew
            } else {
                GatheringState::Gathering { until }
            };
        }
        if 0 < in_place || awaits_starting {
            return if is_overdue {
                GatheringState::Overdue
            } else {
                GatheringState::Gathering { until }
            };
        }
        let until = Millis(timers.last_arrival.0.saturating_add(settings.last_call_ms));
        let is_first = self.index.returning.is_empty();
        match waiting < max && is_first && now < until {
            true => GatheringState::LastCall { until },
            false => GatheringState::Complete,
        }
    }

    /// Returns whether a node that is starting would get a place in the next round.
    fn waits_for_starting(&self, settings: &Settings) -> bool {
        let places_taken = self.index.waiting.len() + self.index.in_place.len();
        !self.index.starting.is_empty() && places_taken < self.places_with_starting(settings)
    }

    /// Returns the nodes that have to join before the next round is formed.
    pub(super) fn nodes_awaited(&self, settings: &Settings) -> Names {
        let starting = match self.waits_for_starting(settings) {
            true => Names::of(self, &self.index.starting),
            false => Names::default(),
        };
        Names::of(self, &self.index.in_place).and(starting)
    }

    /// Gives up waiting for some of the awaited nodes. An intact round is not broken up by this.
    fn late_nodes(&self, settings: &Settings) -> Vec<Fact> {
        let members = self.index.in_place.iter().filter(|_| !self.is_intact());
        let starting = self.index.starting.iter().filter(|_| self.waits_for_starting(settings));
        let late = members.chain(starting).take(FACTS_MAX).filter_map(|node| {
            let record = NodeRecord { state: NodeState::Late, ..self.nodes.get(node)?.clone() };
            Some(Fact::Node { node: *node, record })
        });
        late.collect()
    }

    /// Forms the next round of waiting nodes, as many as are allowed: members of the last round, then the oldest others.
    /// The age of a node is its incarnation, a revision of etcd. Members of the last round keep its order; the
    /// others follow by the order that they ask for, and then by age.
    fn form(&self, settings: &Settings) -> Vec<Fact> {
        let waiting = self.index.waiting.iter();
        let mut chosen: Vec<(NodeId, &NodeRecord)> =
            waiting.filter_map(|node| Some((*node, self.nodes.get(node)?))).collect();
        chosen.sort_by_cached_key(|(node, it)| self.precedence(*node, it));
        let places = self.places_of(chosen.iter().map(|(_, it)| *it), settings);
        chosen.truncate(settings.nodes.whole(places.min(chosen.len())));
        chosen.sort_by_cached_key(|(node, it)| (self.old_rank(*node, it), it.seniority(), *node));
        let mut world_size = 0;
        let members = chosen.into_iter().map(|(node, record)| {
            let NodeRecord { incarnation, address, slots, .. } = record.clone();
            let first_rank = world_size;
            world_size += slots;
            MemberRecord { node, incarnation, address, slots, first_rank }
        });
        let (last, members) = (self.number(), members.collect());
        let commit = self.commit.as_ref().map(|commit| commit.id);
        let order = settings.order;
        let data = settings.records.map(|records| RoundData { records, order, commit });
        let record = RoundRecord { round: Round(last.0 + 1), members, world_size, data };
        let formed = Fact::Formed(Arc::new(record));
        let mut facts = match last {
            Round(0) => Vec::new(),
            round => vec![Fact::TagsDeleted { round }],
        };
        if !self.dealt.is_empty() {
            facts.push(Fact::DealtDeleted { round: last });
        }
        facts.push(formed);
        facts
    }

    /// Returns the key by which nodes are taken into the next round: members of the last one, then the oldest others.
    pub(super) fn precedence(
        &self,
        node: NodeId,
        record: &NodeRecord,
    ) -> (usize, Incarnation, NodeId) {
        (self.old_rank(node, record), record.incarnation, node)
    }

    /// Returns the rank in the last round; the highest number for others.
    fn old_rank(&self, node: NodeId, record: &NodeRecord) -> usize {
        self.rank_of(node, record.incarnation).unwrap_or(usize::MAX)
    }
}
