//! The event loop of the acting master of an elastic job: only it decides, commits and evolves.
//!
//! Requests that arrive during a commit are decided together and committed in one transaction; then they are
//! answered from the state. While a commit is in progress the state is not visible, and if it fails, the term ends
//! and the state is dropped; so memory is never ahead of etcd.

mod agents;
mod answers;
mod failed;
pub(crate) mod handle;
mod launch;
pub(crate) mod polled;
pub(crate) mod service;
mod status;
mod stored;
mod timings;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use steadfast_common::elastic::ElasticSpec;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Incarnation, Millis, NodeId};
use steadfast_common::keys::Keys;
use steadfast_common::records::ResultRecord;
use steadfast_common::status::{ElasticStatus, NodeReport};
use steadfast_coord::{Etcd, Leadership, OPS_MAX, now};
use steadfast_host::time::{interval, unix_ms};
use steadfast_master_core::rendezvous::{Fact, Rendezvous, Settings, Timers};
use steadfast_process::Failure;
use tokio::sync::{mpsc, watch};
use tracing::info;

use self::agents::Agents;
use self::answers::Answer;
use self::failed::Failed;
use self::handle::{ElasticHandle, Event};
use self::launch::Launch;
use self::status::{RestartsOfGone, Timeline};
pub use self::stored::stored_elastic_status;
use self::timings::Timings;
use crate::event_loop::committer::{Committer, Proposal};

/// Capacity of the event queue; callers wait while it is full.
const EVENTS_MAX: usize = 1024;

/// Most changes of one event: an entry of a barrier, its release, the deletion of the last phase, the end.
const CHANGES_OF_ONE: usize = 4;

/// Size of a transaction, less than etcd's limit of 1.5 MiB. One round of the largest size fits.
const COMMIT_BYTES_MAX: usize = 1280 * 1024;

/// Most bytes of one event, beside its data.
const BYTES_OF_ONE: usize = CHANGES_OF_ONE * 1024;

/// How often deadlines are checked and the status is updated without an event.
const TICK: Duration = Duration::from_millis(50);

/// How an elastic job's term ended.
#[derive(Debug)]
pub(crate) enum End {
    Over(Arc<ResultRecord>),
    /// The process shuts down.
    Left,
}

/// The event loop and the state that it owns.
pub(crate) struct ElasticLoop {
    job: String,
    settings: Settings,
    committer: Committer,
    /// The committed state.
    state: Rendezvous,
    timers: Timers,
    timings: Timings,
    /// The revision at which nodes last joined or were removed. A new master begins with a later one.
    revision: i64,
    agents: Agents,
    launch: Launch,
    /// Since when the members of the last round have been members. A new master begins anew.
    members_since: BTreeMap<(NodeId, Incarnation), u64>,
    inbox: mpsc::Receiver<Event>,
    /// An event for which the last transaction had no room.
    left_over: Option<Event>,
    /// What agents reported last; not durable.
    reports: BTreeMap<NodeId, NodeReport>,
    restarts_of_gone: RestartsOfGone,
    failed: Failed,
    view: View,
    rounds: watch::Sender<u64>,
    barriers: watch::Sender<u64>,
    status: watch::Sender<Arc<ElasticStatus>>,
    timeline: Timeline,
    address: String,
}

impl ElasticLoop {
    /// Recovers everything from etcd and prepares the loop.
    ///
    /// # Errors
    /// If etcd does not answer, or holds a value that cannot be parsed.
    pub async fn open(
        etcd: &Etcd,
        keys: &Keys,
        spec: &ElasticSpec,
        leadership: Leadership,
        own_address: &str,
    ) -> Result<(Self, ElasticHandle), Failure> {
        let settings = settings(spec, keys)?;
        let state = stored::read(etcd, keys).await?;
        let agents = Agents::follow(etcd, keys, own_address).await?;
        let launch = Launch::follow(etcd, keys).await?;
        let (events, inbox) = mpsc::channel(EVENTS_MAX);
        let (rounds, barriers) = (watch::Sender::new(0), watch::Sender::new(0));
        let committer = Committer::new(etcd.clone(), keys.clone(), leadership);
        let timeline = Timeline::begin(committer.epoch());
        let first = status::of(&spec.name, &settings, &state, &Timers::default());
        let mut event_loop = Self {
            job: spec.name.clone(),
            settings,
            committer,
            state,
            timers: Timers::default(),
            timings: Timings::default(),
            revision: agents.revision(),
            agents,
            launch,
            members_since: BTreeMap::new(),
            inbox,
            left_over: None,
            reports: BTreeMap::new(),
            restarts_of_gone: RestartsOfGone::default(),
            failed: Failed::default(),
            view: View::default(),
            rounds,
            barriers,
            status: watch::Sender::new(Arc::new(first)),
            timeline,
            address: own_address.to_owned(),
        };
        event_loop.timers.follow(now(), &event_loop.state, &settings);
        event_loop.timings.follow(&event_loop.state, now());
        event_loop.follow_members();
        event_loop.show();
        let handle = ElasticHandle {
            events,
            rounds: event_loop.rounds.subscribe(),
            barriers: event_loop.barriers.subscribe(),
            status: event_loop.status.subscribe(),
        };
        Ok((event_loop, handle))
    }

    /// Acts until the job is over or `leave` completes.
    ///
    /// # Errors
    /// When the term is lost, or etcd is unreachable for too long.
    pub async fn run(mut self, leave: impl Future<Output = ()>) -> Result<End, Failure> {
        let mut leave = std::pin::pin!(leave);
        let mut agents = self.agents.subscribe();
        let mut tick = interval(TICK);
        self.remove_lost().await?;
        loop {
            if let Some(result) = self.state.result().cloned() {
                self.show();
                return Ok(End::Over(result));
            }
            let mut first = self.left_over.take();
            tokio::select! {
                biased;
                // Requests come last: any number of them must not starve the other branches.
                () = &mut leave => return Ok(End::Left),
                _ = agents.changed() => self.remove_lost().await?,
                _ = tick.tick() => {
                    self.settle().await?;
                    self.show();
                }
                event = self.inbox.recv(), if first.is_none() => first = event,
                () = std::future::ready(()), if first.is_some() => {}
            }
            self.process(first).await?;
        }
    }

    /// Decides waiting events, as many as fit into one transaction, commits them and sends the answers.
    async fn process(&mut self, first: Option<Event>) -> Result<(), Failure> {
        let Some(first) = first else { return Ok(()) };
        let mut batch = Batch::of(self);
        let mut next = Some(first);
        while let Some(event) = next.take() {
            self.decide(event, &mut batch);
            let Ok(event) = self.inbox.try_recv() else { break };
            if batch.has_room(BYTES_OF_ONE + bytes_of(&event), CHANGES_OF_ONE) {
                next = Some(event);
            } else {
                self.left_over = Some(event);
            }
        }
        let answers = self.commit(batch).await?;
        self.settle().await?;
        answers.into_iter().for_each(|answer| self.answer(answer));
        Ok(())
    }

    /// Removes the nodes whose registrations are gone. Nothing changes after the end of the job.
    async fn remove_lost(&mut self) -> Result<(), Failure> {
        if self.state.result().is_some() {
            return Ok(());
        }
        let lost = self.agents.lost(&self.state);
        for lost in lost.chunks(OPS_MAX) {
            let mut batch = Batch::of(self);
            for caller in lost {
                let facts = batch.state.remove(*caller);
                batch.add(&self.committer.keys, facts);
                self.forget_report(caller.node);
            }
            self.commit(batch).await?;
        }
        self.settle().await
    }

    /// Commits the decisions for which the time has come.
    async fn settle(&mut self) -> Result<(), Failure> {
        loop {
            let facts = self.state.due(&self.settings, &self.timers, now());
            if facts.is_empty() {
                break;
            }
            let mut batch = Batch::of(self);
            batch.add(&self.committer.keys, facts);
            self.commit(batch).await?;
        }
        self.wake_if_changed();
        Ok(())
    }

    /// Commits a batch; then its state is the state. Wakes the requests that wait for the changes.
    async fn commit(&mut self, batch: Batch) -> Result<Vec<Answer>, Failure> {
        let Batch { state, proposal, answers, facts, .. } = batch;
        let revision = self.committer.commit(proposal).await.map_err(after_acting)?;
        self.state = state;
        self.timers.follow(now(), &self.state, &self.settings);
        self.timings.follow(&self.state, now());
        if let Some(revision) = revision.filter(|_| facts.iter().any(changes_nodes)) {
            self.revision = revision;
        }
        for fact in &facts {
            self.timeline.note(fact, &self.state);
            if let Fact::Formed(record) = fact {
                self.follow_members();
                let (members, workers) = (record.members.len(), record.world_size);
                info!(round = record.round.0, members, workers, "round formed");
            }
        }
        if facts.iter().any(|fact| matches!(fact, Fact::Released { .. })) {
            self.barriers.send_modify(|changes| *changes += 1);
        }
        if facts.iter().any(|fact| matches!(fact, Fact::Formed(_))) {
            // Members that are told of a round find it in the status.
            self.show();
        }
        self.wake_if_changed();
        Ok(answers)
    }

    /// Wakes the requests that wait, if their answers may have changed.
    fn wake_if_changed(&mut self) {
        let failed = self.failed.count(self.state.number());
        let view = View { failed, ..View::of(&self.state, &self.settings, &self.timers, now()) };
        if self.view != view {
            self.view = view;
            self.rounds.send_modify(|changes| *changes += 1);
            self.barriers.send_modify(|changes| *changes += 1);
        }
    }
}

fn settings(spec: &ElasticSpec, keys: &Keys) -> Result<Settings, Failure> {
    let nodes = spec.range().ok_or_else(|| {
        Failure::invalid(format!("{}: the numbers of nodes are invalid", keys.job()))
    })?;
    Ok(Settings {
        nodes,
        last_call_ms: spec.nodes.last_call.as_millis() as u64,
        join_timeout_ms: spec.nodes.join_timeout.as_millis() as u64,
    })
}

/// What waiting requests see of the state, beside their own node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct View {
    round: u64,
    is_intact: bool,
    is_growing: bool,
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
            has_given_up: state.has_given_up(settings, timers, now),
            is_over: state.result().is_some(),
            failed: 0,
        }
    }
}

/// The decisions of one commit. It owns the state until they are committed.
struct Batch {
    state: Rendezvous,
    proposal: Proposal,
    facts: Vec<Fact>,
    answers: Vec<Answer>,
    bytes: usize,
}

impl Batch {
    fn of(event_loop: &mut ElasticLoop) -> Self {
        Self {
            state: std::mem::take(&mut event_loop.state),
            proposal: Proposal::default(),
            facts: Vec::new(),
            answers: Vec::new(),
            bytes: 0,
        }
    }

    fn add(&mut self, keys: &Keys, facts: Vec<Fact>) {
        for fact in facts.into_iter().map(dated) {
            self.state.evolve(&fact);
            self.proposal.add_rendezvous_fact(keys, &fact);
            self.bytes += fact.bytes_max();
            self.facts.push(fact);
        }
    }

    fn has_room(&self, bytes: usize, changes: usize) -> bool {
        self.bytes + bytes <= COMMIT_BYTES_MAX && self.proposal.len() + changes <= OPS_MAX
    }
}

/// Adds the time to a result.
fn dated(fact: Fact) -> Fact {
    if let Fact::Ended(record) = &fact {
        let ended_unix_ms = Some(unix_ms());
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
        | Event::GiveUp { .. }
        | Event::Find { .. }
        | Event::NextPhase { .. }
        | Event::ShutDown { .. } => 0,
    }
}

/// Maps transient etcd errors to `Stale`: they end the term, and the master returns to standby.
fn after_acting(error: steadfast_coord::CoordError) -> Failure {
    let kind = if error.is_transient() { ErrorKind::Stale } else { error.kind() };
    Failure::new(kind, error.to_string())
}
