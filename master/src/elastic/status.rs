//! The status of an elastic job, and its timeline in one term.

use std::collections::VecDeque;
use std::sync::Arc;

use steadfast_common::elastic::{ElasticKind, ElasticSpec};
use steadfast_common::elastic_status::{ElasticPhase, ElasticStatus};
use steadfast_common::ids::Round;
use steadfast_common::records::JobOutcome;
use steadfast_common::status::{MasterStatus, TimelineEvent};
use steadfast_coord::now;
use steadfast_host::time::unix_ms;
use steadfast_master_core::rendezvous::Fact;

use super::ElasticLoop;

/// Maximum number of events that are kept.
const EVENTS_MAX: usize = 200;

/// Events of one term.
#[derive(Debug)]
pub(super) struct Timeline {
    epoch: i64,
    events: VecDeque<TimelineEvent>,
}

impl Timeline {
    pub fn begin(epoch: i64) -> Self {
        let mut timeline = Self { epoch, events: VecDeque::new() };
        timeline.add(format!("this master acts, epoch {epoch}"));
        timeline
    }

    /// Adds a committed fact that users want to know of.
    pub fn note(&mut self, fact: &Fact) {
        match fact {
            Fact::Formed(record) => {
                let members: Vec<&str> =
                    record.members.iter().map(|member| member.address.as_str()).collect();
                let shown = members.iter().take(8).copied().collect::<Vec<_>>().join(", ");
                let more = members.len().saturating_sub(8);
                let more = if 0 < more { format!(" and {more} more") } else { String::new() };
                let workers = record.world_size;
                self.add(format!(
                    "round {} formed, {workers} workers: {shown}{more}",
                    record.round
                ));
            }
            Fact::Removed { node } => self.add(format!("node {node} was lost, or left")),
            Fact::Ended(result) => match result.state {
                JobOutcome::Finished => self.add("the job finished".to_owned()),
                JobOutcome::Failed => {
                    let reason = result.reason.as_deref().unwrap_or("no reason");
                    self.add(format!("the job was shut down: {reason}"));
                }
            },
            Fact::Node { .. }
            | Fact::TagsDeleted { .. }
            | Fact::Entered { .. }
            | Fact::Released { .. }
            | Fact::EntriesDeleted { .. }
            | Fact::Shared(_) => {}
        }
    }

    fn add(&mut self, what: String) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(TimelineEvent { unix_ms: unix_ms(), what });
    }
}

/// Returns the status of a job before its first event.
pub(super) fn empty(spec: &ElasticSpec, address: &str, epoch: i64) -> ElasticStatus {
    ElasticStatus {
        kind: ElasticKind::Elastic,
        job: spec.name.clone(),
        state: ElasticPhase::Gathering,
        waiting: Vec::new(),
        nodes_min: spec.nodes.min,
        nodes_max: spec.nodes.max,
        round: Round(0),
        world_size: 0,
        nodes: Vec::new(),
        master: MasterStatus { address: address.to_owned(), epoch },
        events: Vec::new(),
        result: None,
    }
}

impl ElasticLoop {
    /// Publishes a new status.
    pub(super) fn show(&self) {
        let state = &self.state;
        let result = state.result().map(|result| (**result).clone());
        let phase = match &result {
            Some(result) => match result.state {
                JobOutcome::Finished => ElasticPhase::Finished,
                JobOutcome::Failed => ElasticPhase::Failed,
            },
            None => state.phase(),
        };
        let mut nodes = state.nodes_shown();
        for node in &mut nodes {
            node.report = self.reports.get(&node.node).cloned();
        }
        self.status.send_replace(Arc::new(ElasticStatus {
            kind: ElasticKind::Elastic,
            job: self.job.clone(),
            state: phase,
            waiting: state.blocked(&self.settings, &self.timers, now()),
            nodes_min: self.settings.nodes.min(),
            nodes_max: self.settings.nodes.max(),
            round: state.number(),
            world_size: state.round().map_or(0, |round| round.world_size),
            nodes,
            master: MasterStatus { address: self.address.clone(), epoch: self.timeline.epoch },
            events: self.timeline.events.iter().cloned().collect(),
            result,
        }));
    }
}
