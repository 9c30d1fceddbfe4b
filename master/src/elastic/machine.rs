//! The state machine of an elastic job: the rendezvous, and what this master knows beside it.

use std::collections::BTreeMap;
use std::sync::Arc;

use steadfast_common::ids::{Incarnation, Millis, NodeId};
use steadfast_common::machine::{Decision, Machine, Moment, Size};
use steadfast_common::records::ResultRecord;
use steadfast_common::records::commits::COMMIT_TAG;
use steadfast_common::records::rendezvous::RoundRecord;
use steadfast_common::status::NodeReport;
use steadfast_coord::{OPS_MAX, View as EtcdView};
use steadfast_master_core::rendezvous::{Caller, Fact, Rendezvous, Settings, Timers};
use steadfast_master_core::speeds::{Speeds, WorkerSet};

use super::agents::Agents;
use super::answers::Answer;
use super::failed::Failed;
use super::handle::Event;
use super::status::{RestartsOfGone, Timeline};
use super::timings::Timings;
use crate::scaling::Scaling;

/// Most changes of one event: an entry of a barrier, its release, the deletion of the last phase, and the commit that
/// it decides, or the end.
const CHANGES_OF_ONE: usize = 4;

/// Most bytes of one event, beside its data.
const BYTES_OF_ONE: usize = CHANGES_OF_ONE * 1024;

/// The machine decides one input after the other.
#[derive(Debug)]
pub(crate) enum Input {
    Request(Event),
    /// The registrations of agents have changed.
    Agents(Arc<EtcdView>),
    Tick,
}

/// An effect is released after the commit of the facts that were decided with it.
pub(super) enum Effect {
    Answer(Answer),
    /// Wakes the requests that wait for a barrier.
    WakeBarriers,
    /// Wakes the requests that wait for a round or a barrier.
    WakeAll,
    /// Logs a new round.
    Formed(Arc<RoundRecord>),
    /// Publishes the status.
    Show,
}

/// An elastic job in one term.
pub(super) struct ElasticJob {
    pub name: String,
    pub settings: Settings,
    pub state: Rendezvous,
    pub timers: Timers,
    pub timings: Timings,
    pub speeds: Speeds,
    pub scaling: Scaling,
    /// The revision at which nodes last joined or were removed. A new master begins with a later one.
    pub revision: i64,
    pub agents: Agents,
    /// Nodes to be removed: their registrations are gone.
    lost: Vec<Caller>,
    /// Since when the members of the last round have been members. A new master begins anew.
    pub members_since: BTreeMap<(NodeId, Incarnation), u64>,
    /// What agents reported last; not durable.
    pub reports: BTreeMap<NodeId, NodeReport>,
    pub restarts_of_gone: RestartsOfGone,
    pub failed: Failed,
    pub timeline: Timeline,
    view: View,
    uncommitted: Uncommitted,
    /// Effects for when nothing is due any more: answers show what the requests led to.
    when_settled: Vec<Effect>,
}

/// What the facts that are being committed change beside the rendezvous.
#[derive(Debug, Default)]
struct Uncommitted {
    changes_nodes: bool,
    releases_barrier: bool,
    formed: Option<Arc<RoundRecord>>,
}

impl ElasticJob {
    /// Returns the machine of a new term.
    pub fn new(
        name: String,
        settings: Settings,
        state: Rendezvous,
        agents: Agents,
        timeline: Timeline,
        moment: Moment,
    ) -> Self {
        let mut job = Self {
            name,
            settings,
            lost: agents.lost(&state),
            state,
            timers: Timers::default(),
            timings: Timings::default(),
            speeds: Speeds::default(),
            scaling: Scaling::new("worker"),
            revision: agents.revision(),
            agents,
            members_since: BTreeMap::new(),
            reports: BTreeMap::new(),
            restarts_of_gone: RestartsOfGone::default(),
            failed: Failed::default(),
            timeline,
            view: View::default(),
            uncommitted: Uncommitted::default(),
            when_settled: Vec::new(),
        };
        job.scaling.follow(moment.now, job.state.scale());
        job.follow(moment.now);
        job.follow_members(moment.unix_ms);
        job
    }

    /// Applies facts.
    pub fn apply(&mut self, moment: Moment, facts: Vec<Fact>, decision: &mut Decision<Self>) {
        for fact in facts.into_iter().map(|fact| dated(fact, moment.unix_ms)) {
            self.state.evolve(&fact);
            self.timeline.note(moment.unix_ms, &fact, &self.state);
            self.uncommitted.changes_nodes |= changes_nodes(&fact);
            self.uncommitted.releases_barrier |= matches!(fact, Fact::Released { .. });
            if let Fact::Committed(commit) = &fact {
                let workers = self.state.round().map_or(0, |round| round.world_size);
                let set = WorkerSet { number: commit.id.round.0, workers };
                let used = self.state.used_for_last_commit();
                self.speeds.note(moment.now, set, commit.position.seen, used);
            }
            if let Fact::Scaled(record) = &fact {
                self.scaling.follow(moment.now, Some(record));
            }
            if let Fact::Formed(record) = &fact {
                self.uncommitted.formed = Some(record.clone());
                self.follow_members(moment.unix_ms);
            }
            decision.facts.push(fact);
        }
    }

    /// Answers a request when nothing is due any more.
    pub fn answer_later(&mut self, answer: Answer) {
        self.when_settled.push(Effect::Answer(answer));
    }

    /// Removes nodes whose registrations are gone, as many as fit into one transaction.
    fn remove_lost(&mut self, moment: Moment, decision: &mut Decision<Self>) {
        let rest = self.lost.split_off(self.lost.len().min(OPS_MAX));
        for caller in std::mem::replace(&mut self.lost, rest) {
            let facts = self.state.remove(caller);
            self.apply(moment, facts, decision);
            self.forget_report(caller.node);
        }
    }

    fn follow(&mut self, now: Millis) {
        self.timers.follow(now, &self.state, &self.settings);
        self.timings.follow(&self.state, now);
    }

    /// Wakes the requests that wait, if their answers may have changed.
    fn wake_if_changed(&mut self, now: Millis, effects: &mut Vec<Effect>) {
        let failed = self.failed.count(self.state.number());
        let view = View { failed, ..View::of(&self.state, &self.settings, &self.timers, now) };
        if self.view != view {
            self.view = view;
            effects.push(Effect::WakeAll);
        }
    }
}

impl Machine for ElasticJob {
    type Input = Input;
    type Fact = Fact;
    type Effect = Effect;

    fn handle(&mut self, moment: Moment, input: Input, decision: &mut Decision<Self>) {
        match input {
            Input::Request(event) => self.decide(moment, event, decision),
            Input::Agents(view) => {
                self.agents.follow(&view);
                self.lost = self.agents.lost(&self.state);
            }
            Input::Tick => self.when_settled.push(Effect::Show),
        }
    }

    fn committed(&mut self, moment: Moment, effects: &mut Vec<Effect>) {
        self.follow(moment.now);
        let Uncommitted { changes_nodes, releases_barrier, formed } =
            std::mem::take(&mut self.uncommitted);
        if changes_nodes {
            self.revision = moment.revision;
        }
        if releases_barrier {
            effects.push(Effect::WakeBarriers);
        }
        // Members that are told of a round find it in the status.
        effects.extend(formed.into_iter().flat_map(|round| [Effect::Formed(round), Effect::Show]));
        self.wake_if_changed(moment.now, effects);
    }

    fn due(&mut self, moment: Moment, decision: &mut Decision<Self>) {
        // Nothing changes after the end of the job.
        if self.state.result().is_none() {
            self.remove_lost(moment, decision);
            if !decision.facts.is_empty() {
                return;
            }
        }
        let facts = self.state.due(&self.settings, &self.timers, moment.now);
        if !facts.is_empty() {
            return self.apply(moment, facts, decision);
        }
        let facts = self.scale_by_speed(moment);
        if !facts.is_empty() {
            return self.apply(moment, facts, decision);
        }
        self.wake_if_changed(moment.now, &mut decision.effects);
        decision.effects.append(&mut self.when_settled);
    }

    fn size_max(&self, input: &Input) -> Size {
        let data = match input {
            Input::Request(Event::Deal { caller, .. }) => self.state.bytes_of_records(caller.node),
            Input::Request(Event::Enter { caller, barrier, data, .. })
                if barrier.tag == COMMIT_TAG =>
            {
                data.len() + self.state.bytes_of_records(caller.node)
            }
            Input::Request(event) => bytes_of(event),
            Input::Agents(_) | Input::Tick => 0,
        };
        Size { changes: CHANGES_OF_ONE, bytes: BYTES_OF_ONE + data }
    }

    fn is_over(&self) -> bool {
        self.state.result().is_some()
    }
}

/// What waiting requests see of the state, beside their own node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct View {
    round: u64,
    is_intact: bool,
    is_growing: bool,
    is_shrinking: bool,
    has_given_up: bool,
    is_over: bool,
    /// Members whose workers have failed.
    failed: usize,
}

impl View {
    fn of(state: &Rendezvous, settings: &Settings, timers: &Timers, now: Millis) -> Self {
        Self {
            round: state.number().0,
            is_intact: state.is_intact(),
            is_growing: state.is_growing(settings, timers, now),
            is_shrinking: state.is_shrinking(settings),
            has_given_up: state.has_given_up(settings, timers, now),
            is_over: state.result().is_some(),
            failed: 0,
        }
    }
}

/// Adds the time to a result.
fn dated(fact: Fact, unix_ms: u64) -> Fact {
    if let Fact::Ended(record) = &fact {
        let ended_unix_ms = Some(unix_ms);
        return Fact::Ended(Arc::new(ResultRecord { ended_unix_ms, ..(**record).clone() }));
    }
    fact
}

fn changes_nodes(fact: &Fact) -> bool {
    match fact {
        Fact::Node { .. } | Fact::Removed { .. } | Fact::Formed(_) => true,
        Fact::TagsDeleted { .. }
        | Fact::Entered { .. }
        | Fact::Released { .. }
        | Fact::EntriesDeleted { .. }
        | Fact::Dealt { .. }
        | Fact::DealtDeleted { .. }
        | Fact::Committed(_)
        | Fact::Scaled(_)
        | Fact::Shared(_)
        | Fact::Ended(_) => false,
    }
}

fn bytes_of(event: &Event) -> usize {
    match event {
        Event::Enter { data, .. } => data.len(),
        Event::Share { state, .. } => state.as_ref().map_or(0, |state| 2 * state.len()),
        Event::Announce { .. }
        | Event::Join { .. }
        | Event::Watch { .. }
        | Event::Look { .. }
        | Event::Deal { .. }
        | Event::GiveUp { .. }
        | Event::Scale { .. }
        | Event::Find { .. }
        | Event::NextPhase { .. }
        | Event::ShutDown { .. } => 0,
    }
}
