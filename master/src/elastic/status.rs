//! The status of an elastic job, and its timeline in one term.

use std::collections::{BTreeMap, VecDeque};

use steadfast_common::ids::{NodeId, Phase};
use steadfast_common::job::elastic::ElasticKind;
use steadfast_common::records::JobOutcome;
use steadfast_common::records::commits::DataPosition;
use steadfast_common::records::rendezvous::AgentRecord;
use steadfast_common::records::scale::{ScaleMemory, ScaleRecord};
use steadfast_common::status::{
    DataStatus, ElasticPhase, ElasticStatus, NodePhase, NodeReport, NodeStatus, ScaleStatus,
    TimelineEvent, TimelineKind, WorkersPhase,
};
use steadfast_coord::now;
use steadfast_master_core::rendezvous::{Fact, KNOWN_MAX, Rendezvous, Settings, Timers};

use super::machine::ElasticJob;
use crate::scaling::speeds_status;

/// Maximum number of events that are kept.
const EVENTS_MAX: usize = 200;

/// Maximum number of failures of workers that are kept.
const EXITS_MAX: usize = 8;

/// The restarts that nodes had reported before they were gone; nodes without restarts are left out. Of nodes that went
/// long ago, only the sum is kept, so one that comes back counts twice.
#[derive(Debug, Default)]
pub(super) struct RestartsOfGone {
    nodes: BTreeMap<NodeId, u32>,
    order: VecDeque<NodeId>,
    of_others: u64,
}

impl RestartsOfGone {
    fn add(&mut self, node: NodeId, restarts: u32) {
        if self.nodes.insert(node, restarts).is_none() {
            self.order.push_back(node);
        }
        if KNOWN_MAX < self.order.len() {
            let oldest = self.order.pop_front().and_then(|oldest| self.nodes.remove(&oldest));
            self.of_others += u64::from(oldest.unwrap_or(0));
        }
    }

    fn remove(&mut self, node: NodeId) {
        if self.nodes.remove(&node).is_some() {
            self.order.retain(|other| *other != node);
        }
    }

    fn sum(&self) -> u64 {
        self.of_others + self.nodes.values().copied().map(u64::from).sum::<u64>()
    }
}

/// Events of one term.
#[derive(Debug)]
pub(super) struct Timeline {
    events: VecDeque<TimelineEvent>,
    /// Failures of workers, which are events, too.
    exits: VecDeque<TimelineEvent>,
}

impl Timeline {
    pub fn begin(epoch: i64, unix_ms: u64) -> Self {
        let mut timeline = Self { events: VecDeque::new(), exits: VecDeque::new() };
        timeline.add(unix_ms, TimelineKind::Other, format!("this master acts, epoch {epoch}"));
        timeline
    }

    /// Adds a fact that users want to know of.
    pub fn note(&mut self, unix_ms: u64, fact: &Fact, state: &Rendezvous) {
        match fact {
            Fact::Formed(record) => {
                let members: Vec<&str> =
                    record.members.iter().map(|member| member.address.as_str()).collect();
                let shown = members.iter().take(8).copied().collect::<Vec<_>>().join(", ");
                let more = members.len().saturating_sub(8);
                let more = if 0 < more { format!(" and {more} more") } else { String::new() };
                let workers = record.world_size;
                let round = record.round;
                let what = format!("round {round} formed, {workers} workers: {shown}{more}");
                self.add(unix_ms, TimelineKind::Generation, what);
            }
            Fact::Removed { node } => {
                let what = match state.address_of(*node) {
                    Some(address) => format!("{address} was lost, or left"),
                    None => format!("node {node} was lost, or left"),
                };
                self.add(unix_ms, TimelineKind::Failure, what);
            }
            Fact::Committed(record) if record.id.phase == Phase(0) => {
                let DataPosition { pass, used, .. } = record.position;
                let round = record.id.round;
                let what = format!("round {round} begins at record {used} of pass {pass}");
                self.add(unix_ms, TimelineKind::Other, what);
            }
            Fact::Scaled(record) => {
                self.add(unix_ms, TimelineKind::Other, format!("workers: {record}"));
            }
            Fact::Ended(result) => match result.state {
                JobOutcome::Finished => {
                    self.add(unix_ms, TimelineKind::Other, "the job finished".to_owned());
                }
                JobOutcome::Failed => {
                    let reason = result.reason.as_deref().unwrap_or("no reason");
                    self.add(unix_ms, TimelineKind::Other, format!("the job failed: {reason}"));
                }
            },
            Fact::Node { .. }
            | Fact::TagsDeleted { .. }
            | Fact::Dealt { .. }
            | Fact::DealtDeleted { .. }
            | Fact::Entered { .. }
            | Fact::Released { .. }
            | Fact::EntriesDeleted { .. }
            | Fact::Committed(_)
            | Fact::Shared(_) => {}
        }
    }

    fn note_exit(&mut self, unix_ms: u64, what: String) {
        let kind = TimelineKind::Failure;
        push(&mut self.exits, EXITS_MAX, TimelineEvent { unix_ms, what: what.clone(), kind });
        self.add(unix_ms, kind, what);
    }

    fn add(&mut self, unix_ms: u64, kind: TimelineKind, what: String) {
        push(&mut self.events, EVENTS_MAX, TimelineEvent { unix_ms, what, kind });
    }
}

fn push(events: &mut VecDeque<TimelineEvent>, events_max: usize, event: TimelineEvent) {
    if events.len() == events_max {
        events.pop_front();
    }
    events.push_back(event);
}

/// Returns the status as far as the state determines it, without what agents registered or reported.
pub(super) fn of(
    job: &str,
    settings: &Settings,
    state: &Rendezvous,
    timers: &Timers,
) -> ElasticStatus {
    let result = state.result().map(|result| (**result).clone());
    let phase = match result.as_ref().map(|result| result.state) {
        Some(JobOutcome::Finished) => ElasticPhase::Finished,
        Some(JobOutcome::Failed) => ElasticPhase::Failed,
        None => state.phase(),
    };
    let awaited: Vec<NodeId> =
        state.awaited(settings, timers, now()).listed.into_iter().map(|name| name.node).collect();
    let waiting = state.blocked(settings, timers, now());
    ElasticStatus {
        kind: ElasticKind::Elastic,
        job: job.to_owned(),
        state: phase,
        waits: ElasticStatus::waits_of(&waiting, &awaited),
        waiting,
        awaited,
        nodes_min: settings.nodes.min(),
        nodes_max: settings.nodes.max(),
        round: state.number(),
        world_size: state.round().map_or(0, |round| round.world_size),
        data: settings.records.map(|records| DataStatus {
            records,
            commit: state.commit().map(|commit| (**commit).clone()),
            speeds: Vec::new(),
        }),
        scale: state.scale().map(|record| ScaleStatus {
            record: ScaleRecord { memory: ScaleMemory::default(), ..(**record).clone() },
            advice: None,
            next_try_unix_ms: None,
        }),
        nodes: state.nodes_shown(),
        launcher: None,
        master: None,
        error: None,
        restarts_of_gone: 0,
        exits: Vec::new(),
        events: Vec::new(),
        result,
    }
}

/// Adds what a node's agent has registered.
pub(super) fn add_registration(node: &mut NodeStatus, record: &AgentRecord) {
    node.host.clone_from(&record.launched_on);
    // An agentless node has none.
    node.admin = Some(record.admin.clone()).filter(|admin| !admin.is_empty());
}

impl ElasticJob {
    /// Returns the status, without the master and the launcher.
    pub(super) fn status(&self) -> ElasticStatus {
        let mut status = of(&self.name, &self.settings, &self.state, &self.timers);
        if let Some(data) = &mut status.data {
            data.speeds = speeds_status(&self.speeds);
        }
        status.scale = self.scaling.status(self.state.scale());
        for node in &mut status.nodes {
            if let Some(record) = self.agents.record(node.node, node.incarnation) {
                add_registration(node, record);
            }
            node.report = self.reports.get(&node.node).cloned();
            node.records_per_second = self.speeds.of_node(node.node);
            node.member_since_unix_ms =
                self.members_since.get(&(node.node, node.incarnation)).copied();
            if node.state == NodePhase::Member && node.admin.is_some() {
                let reported = node.report.as_ref().map(|report| report.round);
                let is_running = reported == Some(status.round);
                let running =
                    if is_running { WorkersPhase::Running } else { WorkersPhase::Starting };
                node.workers.get_or_insert(running);
            }
        }
        status.restarts_of_gone = self.restarts_of_gone.sum();
        status.exits = self.timeline.exits.iter().cloned().collect();
        status.events = self.timeline.events.iter().cloned().collect();
        status
    }

    /// Follows the members of the last round.
    pub(super) fn follow_members(&mut self, unix_ms: u64) {
        let members = self.state.round().into_iter().flat_map(|round| &round.members);
        let since = members.map(|member| {
            let member = (member.node, member.incarnation);
            let known = self.members_since.get(&member).copied();
            (member, known.unwrap_or(unix_ms))
        });
        self.members_since = since.collect();
    }

    /// Forgets the last report of a node that is gone, except for the number of its restarts.
    pub(super) fn forget_report(&mut self, node: NodeId) {
        let restarts = self.reports.remove(&node).map(|report| report.restarts);
        if let Some(restarts) = restarts.filter(|restarts| 0 < *restarts) {
            self.restarts_of_gone.add(node, restarts);
        }
    }

    /// Notes what an agent reports.
    pub(super) fn note_report(&mut self, unix_ms: u64, node: NodeId, report: NodeReport) {
        let before = self.reports.get(&node).map_or("", |report| report.last_exit.as_str());
        if !report.last_exit.is_empty() && before != report.last_exit {
            let address = self.agents.address(node).unwrap_or("a node");
            self.timeline.note_exit(unix_ms, format!("{address}: {}", report.last_exit));
        }
        self.restarts_of_gone.remove(node);
        self.reports.insert(node, report);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The restarts of any number of nodes that come and go take a bounded memory, and none is forgotten.
    #[test]
    fn restarts_of_nodes_that_are_gone_are_summed_up() {
        let node = |index: usize| NodeId(uuid::Uuid::from_u128(index as u128));
        let mut gone = RestartsOfGone::default();
        (0..2 * KNOWN_MAX).for_each(|index| gone.add(node(index), 2));
        assert_eq!((gone.sum(), gone.nodes.len()), (4 * KNOWN_MAX as u64, KNOWN_MAX));
        gone.remove(node(2 * KNOWN_MAX - 1));
        assert_eq!((gone.sum(), gone.order.len()), (4 * KNOWN_MAX as u64 - 2, KNOWN_MAX - 1));
    }
}
