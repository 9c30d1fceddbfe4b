//! Rules of the rendezvous: scenarios by name, every interleaving of a small world, and random walks in a
//! larger one.

mod barriers;
mod commits;
mod dealing;
mod ending;
mod interleavings;
mod large;
mod membership;
mod recovery;
mod rounds;
mod scaling;
mod shared;
mod world;

use std::sync::Arc;

use steadfast_common::ids::{Incarnation, Millis, NodeId, Phase, Round};
use steadfast_common::records::commits::RecordOrder;
use steadfast_common::records::rendezvous::{AgentRecord, NodeRange, RoundRecord, Runner};
use uuid::Uuid;

use super::*;

/// The longest wait for a starting or a surviving node.
const JOIN_TIMEOUT_MS: u64 = 600_000;
const LAST_CALL_MS: u64 = 30_000;

fn settings(min: u32, max: u32) -> Settings {
    let nodes = NodeRange::new(min, max).unwrap();
    let (last_call_ms, join_timeout_ms) = (LAST_CALL_MS, JOIN_TIMEOUT_MS);
    Settings { nodes, last_call_ms, join_timeout_ms, records: None, order: RecordOrder::Fixed }
}

fn id(node: usize) -> NodeId {
    NodeId(Uuid::from_u128(node as u128 + 1))
}

fn agent(node: usize) -> AgentRecord {
    AgentRecord::new(Runner::Agent, address(node), node as u32 % 3 + 1)
}

fn address(node: usize) -> String {
    format!("host-{node}:29500")
}

fn nodes_of(record: &RoundRecord) -> Vec<NodeId> {
    record.members.iter().map(|member| member.node).collect()
}

fn addresses(names: &Names) -> Vec<&str> {
    names.listed.iter().map(|name| name.address.as_str()).collect()
}

/// A master with its volatile timers, whose commits always succeed. Each node has one incarnation, equal to
/// its number, unless a test chooses another.
#[derive(Clone, Debug)]
struct Master {
    state: Rendezvous,
    timers: Timers,
    settings: Settings,
    now: Millis,
    /// Facts so far.
    facts: Vec<Fact>,
}

impl Master {
    fn new(min: u32, max: u32) -> Self {
        Self {
            state: Rendezvous::default(),
            timers: Timers::default(),
            settings: settings(min, max),
            now: Millis(1_000),
            facts: Vec::new(),
        }
    }

    /// A master whose nodes 0 … `nodes` − 1 are the members of round 1, and know it.
    fn with_round(nodes: usize, min: u32, max: u32) -> Self {
        let mut master = Self::new(min, max);
        (0..nodes).for_each(|node| master.announce(node));
        (0..nodes).for_each(|node| master.join(node, 0));
        master.pass(LAST_CALL_MS);
        assert_eq!(master.state.members().len(), nodes);
        master
    }

    fn caller(node: usize) -> Caller {
        Caller { node: id(node), incarnation: Incarnation(node as i64 + 1) }
    }

    fn terms(&self, after: u64) -> JoinTerms {
        let nodes = self.settings.nodes;
        JoinTerms { after: Round(after), nodes_min: nodes.min(), nodes_max: nodes.max() }
    }

    fn commit(&mut self, facts: Vec<Fact>) {
        facts.iter().for_each(|fact| self.state.evolve(fact));
        self.facts.extend(facts);
        self.timers.follow(self.now, &self.state, &self.settings);
    }

    fn settle(&mut self) {
        loop {
            let facts = self.state.due(&self.settings, &self.timers, self.now);
            if facts.is_empty() {
                return;
            }
            self.commit(facts);
        }
    }

    fn decide(&mut self, facts: Result<Vec<Fact>, Refusal>) {
        self.commit(facts.unwrap());
        self.settle();
    }

    fn announce(&mut self, node: usize) {
        self.decide(self.state.announce(Self::caller(node), &agent(node)));
    }

    fn join(&mut self, node: usize, after: u64) {
        self.join_as(node, &agent(node), after);
    }

    fn join_as(&mut self, node: usize, agent: &AgentRecord, after: u64) {
        let (caller, terms) = (Self::caller(node), self.terms(after));
        self.decide(self.state.join(caller, agent, &terms, &self.settings));
    }

    fn lose(&mut self, node: usize) {
        self.decide(Ok(self.state.remove(Self::caller(node))));
    }

    fn pass(&mut self, millis: u64) {
        let end = Millis(self.now.0 + millis);
        while let Some(next) = self.state.deadline(&self.settings, &self.timers, self.now)
            && next <= end
        {
            assert!(self.now < next, "a decision that is due was not taken");
            self.now = next;
            self.timers.follow(self.now, &self.state, &self.settings);
            self.settle();
        }
        self.now = end;
    }

    /// Another master takes over.
    fn fail_over(&mut self) {
        let mut state = Rendezvous::default();
        self.facts.iter().for_each(|fact| state.evolve(fact));
        self.state = state;
        self.timers = Timers::default();
        self.now = Millis(self.now.0 / 7);
        self.timers.follow(self.now, &self.state, &self.settings);
        self.settle();
    }

    fn ask(&self, node: usize, known: u64) -> Directive {
        let (caller, known) = (Self::caller(node), Round(known));
        self.state.ask(caller, known, &self.settings, &self.timers, self.now).unwrap()
    }

    fn waiting_nodes(&self, node: usize) -> i64 {
        let caller = Self::caller(node);
        self.state.waiting_nodes(caller, &self.settings, &self.timers, self.now).unwrap()
    }

    fn enter(&mut self, node: usize, barrier: &BarrierId, data: &[u8]) -> Result<(), Refusal> {
        let facts = self.state.enter(Self::caller(node), barrier, data.into(), &self.settings)?;
        self.decide(Ok(facts));
        Ok(())
    }

    fn barrier(&self, node: usize, barrier: &BarrierId) -> Outcome<'_> {
        self.state.barrier(Self::caller(node), barrier).unwrap()
    }

    fn members(&self) -> Vec<NodeId> {
        self.state.round().map(|it| nodes_of(it)).unwrap_or_default()
    }
}

fn barrier_id(round: u64, tag: &str, phase: u64) -> BarrierId {
    BarrierId { round: Round(round), tag: tag.to_owned(), phase: Phase(phase) }
}

fn data_of(outcome: &Outcome<'_>) -> Vec<(NodeId, Arc<[u8]>)> {
    let Outcome::Released(entries) = outcome else { panic!("not released: {outcome:?}") };
    entries.data().iter().map(|(node, data)| (*node, Arc::clone(data))).collect()
}
