//! A simulated elastic job: the real rendezvous under random interleavings of nodes, masters and barriers.

use std::sync::Arc;

use steadfast_audit::history::{self, ElasticJob, HistoryReport};
use steadfast_common::ids::{Incarnation, Millis, NodeId, Round};
use steadfast_common::rendezvous::{
    AgentRecord, EXIT_TAG, NodeRange, ReleaseRecord, RoundRecord, Runner,
};
use steadfast_master_core::rendezvous::{
    BarrierId, Caller, Fact, JoinTerms, Refusal, Rendezvous, Settings, Timers,
};
use uuid::Uuid;

use crate::etcd::{Etcd, Op, put};
use crate::world::Rng;

const NODES: usize = 5;
const TAGS: [&str; 2] = ["data", "epoch"];

pub struct ElasticWorld {
    pub rng: Rng,
    pub etcd: Etcd,
    pub state: Rendezvous,
    settings: Settings,
    timers: Timers,
    now: Millis,
    /// The incarnation of each live agent.
    agents: Vec<Option<Incarnation>>,
    /// The acting master.
    pub holder: u128,
}

impl ElasticWorld {
    pub fn new(seed: u64) -> Self {
        let nodes = NodeRange::new(2, 4).expect("the range is valid");
        let mut etcd = Etcd::new();
        etcd.acquire(1);
        Self {
            rng: Rng::new(seed),
            etcd,
            state: Rendezvous::default(),
            settings: Settings { nodes, last_call_ms: 1_000, join_timeout_ms: 5_000 },
            timers: Timers::default(),
            now: Millis(0),
            agents: vec![None; NODES],
            holder: 1,
        }
    }

    /// A job whose nodes are the members of an intact round.
    pub fn with_round(seed: u64) -> Self {
        let mut world = Self::new(seed);
        while !world.state.is_intact() || world.round().members.len() < 3 {
            world.step();
        }
        world
    }

    /// Runs the job until it has ended.
    pub fn run(&mut self) {
        (0..300).for_each(|_| self.step());
        while self.state.result().is_none() {
            match self.state.is_intact() && !self.rng.once_in(8) {
                true => self.enter(EXIT_TAG),
                false => self.step(),
            }
        }
    }

    /// One random event.
    pub fn step(&mut self) {
        match self.rng.below(12) {
            0 => self.boot(),
            1 | 2 => self.join(),
            3..=6 => {
                let tag = TAGS[self.rng.below(TAGS.len())];
                self.enter(tag);
            }
            7 => self.die(),
            8 => self.take_over(),
            9..=11 => {
                self.now = Millis(self.now.0 + 500);
                self.settle();
            }
            _ => unreachable!("the number is below 12"),
        }
    }

    /// The round that was formed last.
    pub fn round(&self) -> RoundRecord {
        self.state.round().map_or_else(
            || RoundRecord { round: Round(0), world_size: 0, members: Vec::new() },
            |round| RoundRecord::clone(round),
        )
    }

    /// Checks the whole history.
    pub fn check(&self) -> HistoryReport {
        let job = ElasticJob { keys: &self.etcd.keys, nodes: self.settings.nodes };
        history::check_elastic(&job, &[], &self.etcd.revisions)
    }

    /// The acting master writes these values.
    pub fn write(&mut self, ops: Vec<Op>) {
        self.etcd.commit(self.holder, ops);
    }

    /// The acting master commits these facts.
    pub fn commit(&mut self, facts: &[Fact]) {
        let ops = facts.iter().flat_map(|fact| self.ops_of(fact)).collect();
        self.write(ops);
        facts.iter().for_each(|fact| self.state.evolve(fact));
        self.timers.follow(self.now, &self.state, &self.settings);
    }

    fn decide(&mut self, decided: Result<Vec<Fact>, Refusal>) {
        self.commit(&decided.unwrap_or_default());
        self.settle();
    }

    fn settle(&mut self) {
        loop {
            let facts = self.state.due(&self.settings, &self.timers, self.now);
            if facts.is_empty() {
                return;
            }
            self.commit(&facts);
        }
    }

    /// An agent registers, or registers again, and announces itself.
    fn boot(&mut self) {
        let node = self.rng.below(NODES);
        let (key, record) = (self.etcd.keys.agent(id(node)), agent(node));
        self.etcd.txn(vec![(key.clone(), None)]);
        self.etcd.txn(vec![put(&key, &record)]);
        let registered = self.etcd.revisions.last().expect("it was written").revision;
        self.agents[node] = Some(Incarnation(registered));
        if let Some(caller) = self.caller(node) {
            self.decide(self.state.announce(caller, &record));
        }
    }

    fn join(&mut self) {
        let node = self.rng.below(NODES);
        let Some(caller) = self.caller(node) else { return };
        let round = self.round();
        let is_member = round.members.iter().any(|it| it.node == caller.node);
        // Members of an intact round rarely ask for another one.
        if is_member && self.state.is_intact() && !self.rng.once_in(8) {
            return;
        }
        let (nodes_min, nodes_max) = (self.settings.nodes.min(), self.settings.nodes.max());
        let terms = JoinTerms { after: round.round, nodes_min, nodes_max };
        self.decide(self.state.join(caller, &agent(node), &terms, &self.settings));
    }

    fn enter(&mut self, tag: &str) {
        let node = self.rng.below(NODES);
        let Some(caller) = self.caller(node) else { return };
        let phase = self.state.next_phase(tag);
        let barrier = BarrierId { round: self.state.number(), tag: tag.to_owned(), phase };
        self.decide(self.state.enter(caller, &barrier, Arc::from([7])));
    }

    fn die(&mut self) {
        let node = self.rng.below(NODES);
        let Some(caller) = self.caller(node) else { return };
        self.agents[node] = None;
        self.etcd.txn(vec![(self.etcd.keys.agent(id(node)), None)]);
        self.decide(Ok(self.state.remove(caller)));
    }

    /// Another master acts.
    fn take_over(&mut self) {
        self.holder += 1;
        self.etcd.acquire(self.holder);
        self.timers = Timers::default();
        self.timers.follow(self.now, &self.state, &self.settings);
    }

    fn caller(&self, node: usize) -> Option<Caller> {
        Some(Caller { node: id(node), incarnation: self.agents[node]? })
    }

    /// Translates a fact to operations on keys, as the master writes them.
    fn ops_of(&self, fact: &Fact) -> Vec<Op> {
        let keys = &self.etcd.keys;
        match fact {
            Fact::Node { node, record } => vec![put(&keys.node(*node), record)],
            Fact::Removed { node } => vec![(keys.node(*node), None)],
            Fact::Formed(record) => vec![put(&keys.formed_round(), &**record)],
            Fact::TagsDeleted { round } => self.deletions(&keys.tags_prefix(*round)),
            Fact::Entered { round, tag, phase, node, .. } => {
                vec![(keys.entry(*round, tag, *phase, *node), Some("data".to_owned()))]
            }
            Fact::Released { round, tag, phase } => {
                vec![put(&keys.released(*round, tag), &ReleaseRecord { phase: *phase })]
            }
            Fact::EntriesDeleted { round, tag, phase } => {
                self.deletions(&keys.entries_prefix(*round, tag, *phase))
            }
            Fact::Shared(record) => vec![put(&keys.shared_state(), &**record)],
            Fact::Ended(record) => vec![put(&keys.result(), &**record)],
        }
    }

    fn deletions(&self, prefix: &str) -> Vec<Op> {
        self.etcd.keys_below(prefix).map(|key| (key.clone(), None)).collect()
    }
}

fn id(node: usize) -> NodeId {
    NodeId(Uuid::from_u128(node as u128 + 1))
}

fn agent(node: usize) -> AgentRecord {
    let record = AgentRecord::new(Runner::Agent, format!("host-{node}:29500"), node as u32 % 3 + 1);
    // Some nodes ask for an order, which is not that of their ages.
    AgentRecord { order: node.is_multiple_of(2).then_some(99 - node as u32), ..record }
}
