//! A rendezvous, as the status shows it.

use steadfast_common::ids::{Millis, NodeId, Phase};
use steadfast_common::records::rendezvous::{EXIT_TAG, NodeRecord};
use steadfast_common::status::{ElasticPhase, NodePhase, NodeStatus, WorkersPhase};

use super::gathering::{GatheringState, Timers};
use super::state::{Rendezvous, Standing};
use super::{Names, Settings};

impl Rendezvous {
    /// Returns the phase of the job, if it is not over.
    pub fn phase(&self) -> ElasticPhase {
        if self.is_intact() { ElasticPhase::Running } else { ElasticPhase::Gathering }
    }

    /// Returns all nodes: the members of the last round by rank, then the others.
    pub fn nodes_shown(&self) -> Vec<NodeStatus> {
        let members = self.members().iter().map(|member| {
            let known = self.nodes.get(&member.node);
            let known = known.filter(|record| record.incarnation == member.incarnation);
            let state = known.map_or(NodePhase::Gone, |record| self.phase_of(member.node, record));
            let rank = self.member(member.node).map(|(rank, _)| rank as u32);
            NodeStatus {
                node: member.node,
                incarnation: member.incarnation,
                address: member.address.clone(),
                host: None,
                admin: None,
                slots: member.slots,
                state,
                workers: self.has_succeeded(member.node).then_some(WorkersPhase::Succeeded),
                member_since_unix_ms: None,
                records_per_second: None,
                rank,
                first_rank: Some(member.first_rank),
                report: None,
            }
        });
        let is_member =
            |node: &NodeId, record: &NodeRecord| self.rank_of(*node, record.incarnation).is_some();
        let others = self.nodes.iter().filter(|(node, record)| !is_member(node, record));
        let others = others.map(|(node, record)| NodeStatus {
            node: *node,
            incarnation: record.incarnation,
            address: record.address.clone(),
            host: None,
            admin: None,
            slots: record.slots,
            state: self.phase_of(*node, record),
            workers: None,
            member_since_unix_ms: None,
            records_per_second: None,
            rank: None,
            first_rank: None,
            report: None,
        });
        members.chain(others).collect()
    }

    /// Returns what waits for what, and why.
    pub fn blocked(&self, settings: &Settings, timers: &Timers, now: Millis) -> Vec<String> {
        if self.result().is_some() {
            return Vec::new();
        }
        let waiting = Names::of(self, &self.index.waiting);
        let mut reasons = match self.gathering_state(settings, timers, now) {
            GatheringState::Closing => {
                let missing = self.missing(EXIT_TAG, Phase(0));
                vec![format!("the end of the job waits for {missing}; others have succeeded")]
            }
            GatheringState::Quiet if self.round().is_none() => {
                vec!["no node has joined".to_owned()]
            }
            GatheringState::Quiet if self.is_intact() => Vec::new(),
            GatheringState::Quiet if self.nodes.is_empty() => {
                vec![format!("all nodes of round {} were lost, or left", self.number())]
            }
            GatheringState::Quiet => {
                let gone = self.lost_members();
                vec![format!(
                    "the members of round {} lost {gone} and have to join again",
                    self.number()
                )]
            }
            GatheringState::Full => vec![format!(
                "{waiting} waits for a place: round {} {}",
                self.number(),
                self.limit(settings)
            )],
            GatheringState::Shrinking => {
                let surplus = self.surplus(settings);
                let what = if surplus == 1 { "node has" } else { "nodes have" };
                let limit = self.limit(settings);
                vec![format!("{surplus} {what} to leave: round {} {limit}", self.number())]
            }
            GatheringState::Starting { .. }
            | GatheringState::Growing
            | GatheringState::Gathering { .. } => {
                vec![format!("{waiting} {}", self.wait_reason(settings, timers, now))]
            }
            GatheringState::TooFew => vec![format!(
                "{waiting} waited longer than the join timeout for at least {} nodes",
                settings.nodes.min()
            )],
            GatheringState::LastCall { until } => vec![format!(
                "{waiting} waits {} s for more nodes (last call)",
                until.0.saturating_sub(now.0).div_ceil(1000)
            )],
            GatheringState::Overdue | GatheringState::Complete => Vec::new(),
        };
        for (tag, missing) in self.open_barriers() {
            reasons.push(format!("barrier `{tag}` waits for {missing}"));
        }
        reasons
    }

    /// Returns the nodes that the reasons of [`Rendezvous::blocked`] name as waited for.
    pub fn awaited(&self, settings: &Settings, timers: &Timers, now: Millis) -> Names {
        if self.result().is_some() {
            return Names::default();
        }
        let awaited = match self.gathering_state(settings, timers, now) {
            GatheringState::Closing => self.missing(EXIT_TAG, Phase(0)),
            GatheringState::Quiet if self.is_intact() => Names::default(),
            GatheringState::Quiet | GatheringState::Growing | GatheringState::Shrinking => {
                Names::of(self, &self.index.in_place)
            }
            GatheringState::Starting { .. } => Names::of(self, &self.index.starting),
            GatheringState::Gathering { .. } | GatheringState::TooFew => {
                self.nodes_awaited(settings)
            }
            GatheringState::Full
            | GatheringState::LastCall { .. }
            | GatheringState::Overdue
            | GatheringState::Complete => Names::default(),
        };
        self.open_barriers().fold(awaited, |awaited, (_, missing)| awaited.and(missing))
    }

    /// Returns the address of a node, if it is known or is a member of the last round.
    pub fn address_of(&self, node: NodeId) -> Option<&str> {
        let known = self.nodes.get(&node).map(|record| record.address.as_str());
        known.or_else(|| Some(self.member(node)?.1.address.as_str()))
    }

    /// Returns the barriers of an intact round that some members have entered, and the others.
    fn open_barriers(&self) -> impl Iterator<Item = (&str, Names)> {
        let tags = self.open_tags().filter(|(tag, _)| self.is_intact() && *tag != EXIT_TAG);
        let missing = tags.map(|(tag, phase)| (tag, self.missing(tag, phase)));
        missing.filter(|(_, missing)| missing.count < self.members().len())
    }

    /// Returns what a waiting node waits for.
    pub(super) fn wait_reason(&self, settings: &Settings, timers: &Timers, now: Millis) -> String {
        let gathering = self.gathering_state(settings, timers, now);
        let waiting = self.index.waiting.len();
        let missing = (settings.nodes.min() as usize).saturating_sub(waiting);
        let awaited = match gathering {
            GatheringState::Starting { .. } => Names::of(self, &self.index.starting),
            GatheringState::Growing | GatheringState::Shrinking => {
                Names::of(self, &self.index.in_place)
            }
            GatheringState::Closing => self.missing(EXIT_TAG, Phase(0)),
            GatheringState::Quiet
            | GatheringState::Full
            | GatheringState::Gathering { .. }
            | GatheringState::TooFew
            | GatheringState::Overdue
            | GatheringState::LastCall { .. }
            | GatheringState::Complete => self.nodes_awaited(settings),
        };
        super::describe_wait(&awaited, missing)
    }

    fn phase_of(&self, node: NodeId, record: &NodeRecord) -> NodePhase {
        match self.standing(node, record) {
            Standing::Starting => NodePhase::Starting,
            Standing::Waiting => NodePhase::Waiting,
            Standing::InPlace => NodePhase::Member,
            Standing::Late => NodePhase::Late,
        }
    }
}
