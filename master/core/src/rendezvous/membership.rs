//! Joins and losses of nodes, and what each node has to do.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use steadfast_common::ids::{Millis, NodeId, Phase, Round};
use steadfast_common::records::rendezvous::{
    AgentRecord, EXIT_TAG, NodeRecord, NodeState, RoundRecord, SLOTS_MAX,
};
use steadfast_common::status::format::plural;

use super::gathering::{GatheringState, Timers};
use super::state::{Fact, Rendezvous, Standing};
use super::{Caller, Refusal, Settings};

/// Maximum number of known nodes, in a round or not.
pub const KNOWN_MAX: usize = 4096;

/// How many nodes are listed by name; the others are counted.
const NAMES_MAX: usize = 8;

/// What a node states when it asks to join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinTerms {
    /// The last round that the node knows to be a member of, or 0. It makes a repeated request harmless: a
    /// member of a later round has been answered already.
    pub after: Round,
    pub nodes_min: u32,
    pub nodes_max: u32,
}

/// What a node does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Directive {
    /// Nothing: its round goes on.
    Continue { round: Round },
    /// Starts its workers: it is a member of this round, which it did not know.
    Start(Arc<RoundRecord>),
    /// Asks to join the next round: `added` nodes wait for a place in it, `surplus` members of its round will have none,
    /// and `lost` ones are gone.
    Join { added: usize, surplus: usize, lost: Names },
    /// Waits: for these nodes, for `missing` nodes below the minimum, and at most until this time.
    Wait { awaited: Names, missing: usize, until: Option<Millis> },
    /// Waits until the round, which has the maximum number of nodes, loses one.
    WaitForPlace { round: Round, limit: Limit },
    /// Gives up, or goes on waiting: too few nodes joined within the join timeout.
    TooFew { awaited: Names, waiting: usize, nodes_min: u32 },
}

/// Says what limits the nodes of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The job has no more nodes.
    Nodes(u32),
    /// The job is to have no more workers.
    Workers(u32),
    /// The job has a multiple of so many nodes, and too few wait for the next one.
    Unit(u32),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nodes(nodes) => write!(f, "has the maximum of {nodes} nodes"),
            Self::Unit(unit) => write!(f, "has a multiple of {unit} nodes, and waits for more"),
            Self::Workers(workers) => {
                write!(f, "is to have at most {}", plural(*workers as usize, "worker"))
            }
        }
    }
}

/// A node, as it is reported to users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub node: NodeId,
    pub address: String,
}

/// Some nodes. Only the first few are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    pub listed: Vec<Name>,
    pub count: usize,
}

impl Names {
    pub(super) fn of(state: &Rendezvous, nodes: &BTreeSet<NodeId>) -> Self {
        Self::first(state, nodes.iter().copied(), nodes.len())
    }

    /// Lists the first of `count` nodes.
    pub(super) fn first(
        state: &Rendezvous,
        nodes: impl Iterator<Item = NodeId>,
        count: usize,
    ) -> Self {
        let listed = nodes.take(NAMES_MAX).map(|node| Name::of(state, node)).collect::<Vec<_>>();
        Self { count: count.max(listed.len()), listed }
    }

    pub(super) fn and(mut self, others: Self) -> Self {
        self.listed.extend(others.listed);
        self.listed.truncate(NAMES_MAX);
        Self { listed: self.listed, count: self.count + others.count }
    }
}

impl Name {
    fn of(state: &Rendezvous, node: NodeId) -> Self {
        let known = state.nodes.get(&node).map(|record| &record.address);
        let address = known.or_else(|| Some(&state.member(node)?.1.address));
        Self { node, address: address.cloned().unwrap_or_default() }
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed: Vec<&str> = self.listed.iter().map(|name| name.address.as_str()).collect();
        f.write_str(&listed.join(", "))?;
        match self.count - self.listed.len() {
            0 => Ok(()),
            others => write!(f, " and {others} more"),
        }
    }
}

impl Rendezvous {
    /// Notes that a node is starting. Only its first request counts.
    ///
    /// # Errors
    /// If the incarnation is over, or the record is invalid.
    pub fn announce(&self, caller: Caller, agent: &AgentRecord) -> Result<Vec<Fact>, Refusal> {
        self.check_open()?;
        match self.standing_of(caller) {
            Ok(_) => Ok(Vec::new()),
            Err(_) => self.admit(caller, agent, NodeState::Starting),
        }
    }

    /// Notes that a node asks to be in a round later than `terms.after`. The answer is
    /// [`Rendezvous::ask`] with the same round.
    ///
    /// # Errors
    /// If the node expects another number of nodes than the job, the incarnation is over, or the record is
    /// invalid.
    pub fn join(
        &self,
        caller: Caller,
        agent: &AgentRecord,
        terms: &JoinTerms,
        settings: &Settings,
    ) -> Result<Vec<Fact>, Refusal> {
        self.check_open()?;
        let given = (terms.nodes_min, terms.nodes_max);
        let expected = (settings.nodes.min(), settings.nodes.max());
        if given != expected {
            return Err(Refusal::NodeRange { given, expected });
        }
        match self.standing_of(caller) {
            Ok(Standing::Waiting) => Ok(Vec::new()),
            Ok(Standing::InPlace) if terms.after < self.number() => Ok(Vec::new()),
            Ok(Standing::InPlace | Standing::Starting | Standing::Late) | Err(_) => {
                self.admit(caller, agent, NodeState::Asked { after: self.number() })
            }
        }
    }

    /// Removes a node whose lease ended, or that leaves; a later incarnation of it stays.
    pub fn remove(&self, caller: Caller) -> Vec<Fact> {
        match self.standing_of(caller) {
            Ok(_) => vec![Fact::Removed { node: caller.node }],
            Err(_) => Vec::new(),
        }
    }

    /// Returns what a node has to do. `known` is the last round that it knows to be a member of.
    ///
    /// # Errors
    /// If the incarnation is not known: the node registers again, and joins.
    pub fn ask(
        &self,
        caller: Caller,
        known: Round,
        settings: &Settings,
        timers: &Timers,
        now: Millis,
    ) -> Result<Directive, Refusal> {
        let gathering = self.gathering_state(settings, timers, now);
        Ok(match self.standing_of(caller)? {
            Standing::Waiting => self.waiting_directive(gathering, settings, now),
            Standing::InPlace => self.member_directive(known, gathering, settings),
            Standing::Starting => Directive::Join { added: 0, surplus: 0, lost: Names::default() },
            Standing::Late => {
                let lost = Names::of(self, &BTreeSet::from([caller.node]));
                Directive::Join { added: 0, surplus: 0, lost }
            }
        })
    }

    /// Returns how many nodes are to be added to the caller's round, or will have no place in the next one, or, negative
    /// and with priority, how many were removed from it. If it is not zero, the node joins again.
    ///
    /// # Errors
    /// If the incarnation is not known: the node registers again, and joins.
    pub fn waiting_nodes(
        &self,
        caller: Caller,
        settings: &Settings,
        timers: &Timers,
        now: Millis,
    ) -> Result<i64, Refusal> {
        Ok(match self.ask(caller, self.number(), settings, timers, now)? {
            Directive::Join { added, surplus, lost } if lost.count == 0 => (added + surplus) as i64,
            Directive::Join { lost, .. } => -(lost.count as i64),
            Directive::Continue { .. }
            | Directive::Start(_)
            | Directive::Wait { .. }
            | Directive::WaitForPlace { .. }
            | Directive::TooFew { .. } => 0,
        })
    }

    fn member_directive(
        &self,
        known: Round,
        gathering: GatheringState,
        settings: &Settings,
    ) -> Directive {
        let round = self.number();
        if known < round
            && let Some(record) = &self.round
        {
            return Directive::Start(Arc::clone(record));
        }
        let is_changing = matches!(gathering, GatheringState::Growing | GatheringState::Shrinking);
        if self.is_intact() && !is_changing {
            return Directive::Continue { round };
        }
        let added = self.grown(settings).saturating_sub(self.index.in_place.len());
        Directive::Join { added, surplus: self.surplus(settings), lost: self.lost_members() }
    }

    /// Returns what keeps waiting nodes out of the round.
    pub(super) fn limit(&self, settings: &Settings) -> Limit {
        if self.index.in_place.len() < self.places(settings) {
            return Limit::Unit(settings.nodes.unit());
        }
        let workers = self.scale.as_ref().and_then(|record| record.workers);
        match workers.filter(|_| self.places(settings) < settings.nodes.max() as usize) {
            Some(workers) => Limit::Workers(workers),
            None => Limit::Nodes(settings.nodes.max()),
        }
    }

    /// Returns the members that were lost before they succeeded.
    pub(super) fn lost_members(&self) -> Names {
        self.unfinished(&self.index.gone)
    }

    /// Returns the nodes among `members` that have not succeeded.
    pub(super) fn unfinished(&self, members: &BTreeSet<NodeId>) -> Names {
        if !self.is_closing() {
            return Names::of(self, members);
        }
        let unfinished = members.iter().copied().filter(|node| !self.has_succeeded(*node));
        let unfinished: Vec<NodeId> = unfinished.collect();
        Names::first(self, unfinished.iter().copied(), unfinished.len())
    }

    fn waiting_directive(
        &self,
        gathering: GatheringState,
        settings: &Settings,
        now: Millis,
    ) -> Directive {
        let (waiting, nodes) = (self.index.waiting.len(), settings.nodes);
        let wait = |awaited, until| {
            let missing = (nodes.min() as usize).saturating_sub(waiting);
            Directive::Wait { awaited, missing, until }
        };
        match gathering {
            GatheringState::Full => {
                Directive::WaitForPlace { round: self.number(), limit: self.limit(settings) }
            }
            GatheringState::Starting { until } => {
                wait(Names::of(self, &self.index.starting), Some(until))
            }
            GatheringState::Growing | GatheringState::Shrinking => {
                wait(Names::of(self, &self.index.in_place), None)
            }
            GatheringState::Gathering { until } => wait(self.nodes_awaited(settings), Some(until)),
            GatheringState::TooFew => {
                let awaited = self.nodes_awaited(settings);
                Directive::TooFew { awaited, waiting, nodes_min: nodes.min() }
            }
            GatheringState::LastCall { until } => wait(Names::default(), Some(until)),
            GatheringState::Closing => wait(self.missing(EXIT_TAG, Phase(0)), None),
            GatheringState::Overdue | GatheringState::Complete | GatheringState::Quiet => {
                wait(Names::default(), Some(now))
            }
        }
    }

    /// Returns the standing of a known incarnation.
    pub(super) fn standing_of(&self, caller: Caller) -> Result<Standing, Refusal> {
        let record = self.nodes.get(&caller.node);
        let record = record.filter(|record| record.incarnation == caller.incarnation);
        let record = record.ok_or(Refusal::Unknown(caller))?;
        Ok(self.standing(caller.node, record))
    }

    fn admit(
        &self,
        caller: Caller,
        agent: &AgentRecord,
        state: NodeState,
    ) -> Result<Vec<Fact>, Refusal> {
        let Caller { node, incarnation } = caller;
        let known = self.nodes.get(&node);
        let latest = known.map(|record| record.incarnation);
        // A member that was removed does not return: its barriers have ended.
        let was_member = self.member(node).map(|(_, member)| member.incarnation);
        let removed = was_member.filter(|_| self.index.gone.contains(&node));
        if latest.is_some_and(|it| incarnation < it) || removed.is_some_and(|it| incarnation <= it)
        {
            return Err(Refusal::Unknown(caller));
        }
        if known.is_none() && KNOWN_MAX <= self.nodes.len() {
            return Err(Refusal::TooManyNodes { limit: KNOWN_MAX });
        }
        if !agent.has_valid_address() {
            return Err(Refusal::Address { address: agent.address.clone() });
        }
        if agent.slots == 0 || SLOTS_MAX < agent.slots {
            return Err(Refusal::Slots { given: agent.slots, limit: SLOTS_MAX });
        }
        let (address, slots, order) = (agent.address.clone(), agent.slots, agent.order);
        let record = NodeRecord { incarnation, address, slots, order, state };
        Ok(vec![Fact::Node { node, record }])
    }
}
