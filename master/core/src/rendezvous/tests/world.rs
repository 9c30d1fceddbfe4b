//! A small world: agents, one master after another, and the keys in etcd. Checks the rules after each event.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use steadfast_common::records::keys::{Keys, TagKey};
use steadfast_common::records::rendezvous::{EXIT_TAG, MemberRecord, ReleaseRecord};
use steadfast_common::records::scale::ScaleWish;
use steadfast_common::records::{JobOutcome, ResultRecord};

use super::*;
use crate::rendezvous::state::Standing;

const TAG: &str = "sync";

/// An event. Nodes are given by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The agent starts, or restarts before its loss was noticed.
    Boots(usize),
    Announces(usize),
    Joins(usize, Fate),
    /// A duplicate of the agent's first request to join arrives late.
    JoinIsRepeated(usize),
    Polls(usize),
    /// The agent enters the barrier that is next for it, in the round that it believes to be a member of.
    Enters(usize, Fate),
    /// The workers of the agent have succeeded in the round that it believes to be a member of.
    Succeeds(usize, Fate),
    Dies(usize),
    /// The master learns that a node's lease has ended.
    Noticed(usize),
    /// A person chooses how many workers a round has at most.
    Scales(u32, Fate),
    /// Time passes until the next deadline.
    TimePasses,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Answered,
    /// The master dies after the commit, before it decides anything else or answers.
    MasterDies,
}

/// One agent, as it sees itself.
#[derive(Clone, Debug, Default, Hash)]
struct Agent {
    incarnation: Option<i64>,
    /// The last round that it knows to be a member of.
    known: u64,
    /// The phases that it passed in this round.
    phase: u64,
}

/// The world. `asked`, `entered`, `released` and `succeeded` are counted independently of the master.
#[derive(Clone, Debug)]
pub struct World {
    settings: Settings,
    etcd: BTreeMap<String, Vec<u8>>,
    pub state: Rendezvous,
    timers: Timers,
    now: Millis,
    agents: Vec<Agent>,
    next_incarnation: i64,
    /// The incarnation under which each node asked to be in the next round.
    asked: Vec<Option<i64>>,
    entered: BTreeSet<(u64, usize)>,
    released: BTreeSet<u64>,
    /// The members of the last round whose workers have succeeded in it.
    succeeded: BTreeSet<usize>,
    /// The number of workers that a person has chosen.
    workers_max: Option<u32>,
}

fn keys() -> Keys {
    Keys::of_job("world")
}

/// Applies a fact to the keys in etcd, as the committer does.
fn store(etcd: &mut BTreeMap<String, Vec<u8>>, fact: &Fact) {
    let keys = keys();
    let delete_prefix = |etcd: &mut BTreeMap<String, Vec<u8>>, prefix: &str| {
        etcd.retain(|key, _| !key.starts_with(prefix));
    };
    match fact {
        Fact::Node { node, record } => {
            etcd.insert(keys.node(*node), serde_json::to_vec(record).unwrap());
        }
        Fact::Removed { node } => drop(etcd.remove(&keys.node(*node))),
        Fact::Formed(record) => {
            etcd.insert(keys.formed_round(), serde_json::to_vec(&**record).unwrap());
        }
        Fact::TagsDeleted { round } => delete_prefix(etcd, &keys.tags_prefix(*round)),
        Fact::Entered { round, tag, phase, node, data } => {
            etcd.insert(keys.entry(*round, tag, *phase, *node), data.to_vec());
        }
        Fact::Released { round, tag, phase } => {
            let record = serde_json::to_vec(&ReleaseRecord { phase: *phase }).unwrap();
            etcd.insert(keys.released(*round, tag), record);
        }
        Fact::EntriesDeleted { round, tag, phase } => {
            delete_prefix(etcd, &keys.entries_prefix(*round, tag, *phase));
        }
        Fact::Dealt { round, node, record } => {
            etcd.insert(keys.dealt(*round, *node), serde_json::to_vec(&**record).unwrap());
        }
        Fact::DealtDeleted { round } => delete_prefix(etcd, &keys.dealt_prefix(*round)),
        Fact::Committed(record) => {
            etcd.insert(keys.commit(), serde_json::to_vec(&**record).unwrap());
        }
        Fact::Scaled(record) => {
            etcd.insert(keys.workers_desired(), serde_json::to_vec(&**record).unwrap());
        }
        Fact::Shared(record) => {
            etcd.insert(keys.shared_state(), serde_json::to_vec(&**record).unwrap());
        }
        Fact::Ended(record) => {
            etcd.insert(keys.result(), serde_json::to_vec(&**record).unwrap());
        }
    }
}

/// Reads the state from the keys, as a new master does.
fn recover(etcd: &BTreeMap<String, Vec<u8>>) -> Rendezvous {
    let keys = keys();
    let round: Option<RoundRecord> =
        etcd.get(&keys.formed_round()).map(|value| serde_json::from_slice(value).unwrap());
    let number = round.as_ref().map_or(Round(0), |it| it.round);
    let others = etcd.iter().filter(|(key, _)| **key != keys.formed_round());
    let others = others.map(|(key, value)| {
        if let Some(node) = keys.node_of(key) {
            return Fact::Node { node, record: serde_json::from_slice(value).unwrap() };
        }
        if *key == keys.commit() {
            return Fact::Committed(Arc::new(serde_json::from_slice(value).unwrap()));
        }
        if *key == keys.workers_desired() {
            return Fact::Scaled(Arc::new(serde_json::from_slice(value).unwrap()));
        }
        if *key == keys.result() {
            return Fact::Ended(Arc::new(serde_json::from_slice(value).unwrap()));
        }
        match keys.tag_key_of(number, key).expect("each key has a meaning") {
            TagKey::Released { tag } => {
                let ReleaseRecord { phase } = serde_json::from_slice(value).unwrap();
                Fact::Released { round: number, tag, phase }
            }
            TagKey::Entry { tag, phase, node } => {
                let data = value.as_slice().into();
                Fact::Entered { round: number, tag, phase, node, data }
            }
        }
    });
    // The record of the round comes last, which is not the order of the facts.
    let round = round.map(|it| Fact::Formed(Arc::new(it)));
    Rendezvous::from_records(others.chain(round)).expect("a master wrote the records")
}

impl World {
    pub fn new(nodes: usize, min: u32, max: u32) -> Self {
        Self {
            settings: settings(min, max),
            etcd: BTreeMap::new(),
            state: Rendezvous::default(),
            timers: Timers::default(),
            now: Millis(0),
            agents: vec![Agent::default(); nodes],
            next_incarnation: 1,
            asked: vec![None; nodes],
            entered: BTreeSet::new(),
            released: BTreeSet::new(),
            succeeded: BTreeSet::new(),
            workers_max: None,
        }
    }

    /// Applies an event; returns `None` if it is not possible or changes nothing.
    pub fn after(&self, event: Event) -> Option<Self> {
        let mut world = self.clone();
        let is_possible = match event {
            Event::Boots(node) => world.boot(node),
            Event::Announces(node) => world.announce(node),
            Event::Joins(node, fate) => world.join(node, world.agents[node].known, fate),
            Event::JoinIsRepeated(node) => {
                0 < world.agents[node].known && world.send_join(node, 0, Fate::Answered)
            }
            Event::Polls(node) => world.poll(node),
            Event::Enters(node, fate) => world.enter(node, fate),
            Event::Succeeds(node, fate) => world.succeed(node, fate),
            Event::Dies(node) => world.agents[node].incarnation.take().is_some(),
            Event::Noticed(node) => world.notice(node),
            Event::Scales(workers, fate) => world.scale(workers, fate),
            Event::TimePasses => world.pass(),
        };
        is_possible.then_some(world)
    }

    fn boot(&mut self, node: usize) -> bool {
        let incarnation = Some(self.next_incarnation);
        self.next_incarnation += 1;
        let is_down = self.agents[node].incarnation.is_none();
        self.agents[node] = Agent { incarnation, ..Agent::default() };
        is_down
    }

    fn announce(&mut self, node: usize) -> bool {
        let Some(caller) = self.caller(node) else { return false };
        let Ok(facts) = self.state.announce(caller, &agent(node)) else { return false };
        self.carry_out(facts, Fate::Answered)
    }

    fn join(&mut self, node: usize, after: u64, fate: Fate) -> bool {
        let has_changed = self.send_join(node, after, fate);
        let has_heard = fate == Fate::Answered && self.poll(node);
        has_changed || has_heard
    }

    fn send_join(&mut self, node: usize, after: u64, fate: Fate) -> bool {
        let Some(caller) = self.caller(node) else { return false };
        if self.state.result().is_some() {
            return false;
        }
        let in_round = self.is_member(node, caller.incarnation) && self.asked[node].is_none();
        let is_late = self.state.standing_of(caller) == Ok(Standing::Late);
        if !in_round || self.state.number().0 <= after || is_late {
            self.asked[node] = Some(caller.incarnation.0);
        }
        let (after, nodes) = (Round(after), self.settings.nodes);
        let terms = JoinTerms { after, nodes_min: nodes.min(), nodes_max: nodes.max() };
        let facts = self.state.join(caller, &agent(node), &terms, &self.settings).unwrap();
        self.carry_out(facts, fate)
    }

    /// The agent asks what to do; returns whether it learns of a round.
    fn poll(&mut self, node: usize) -> bool {
        let Some(caller) = self.caller(node) else { return false };
        let known = Round(self.agents[node].known);
        let answer = self.state.ask(caller, known, &self.settings, &self.timers, self.now);
        let Ok(Directive::Start(round)) = answer else { return false };
        let incarnation = Some(caller.incarnation.0);
        self.agents[node] = Agent { incarnation, known: round.round.0, phase: 0 };
        true
    }

    fn enter(&mut self, node: usize, fate: Fate) -> bool {
        let Some(caller) = self.caller(node) else { return false };
        let Agent { known, phase, .. } = self.agents[node];
        let barrier = barrier_id(known, TAG, phase);
        let entered = self.state.enter(caller, &barrier, data(node, phase), &self.settings);
        let Ok(facts) = entered else { return false };
        if facts.iter().any(|fact| matches!(fact, Fact::Entered { .. })) {
            self.entered.insert((phase, node));
        }
        let has_changed = self.carry_out(facts, fate);
        let answer = self.state.barrier(caller, &barrier).unwrap();
        let is_released = matches!(answer, Outcome::Released(_));
        let has_heard = fate == Fate::Answered && is_released;
        self.agents[node].phase += u64::from(has_heard);
        has_changed || has_heard
    }

    fn succeed(&mut self, node: usize, fate: Fate) -> bool {
        let Some(caller) = self.caller(node) else { return false };
        let barrier = barrier_id(self.agents[node].known, EXIT_TAG, 0);
        let entered = self.state.enter(caller, &barrier, Arc::default(), &self.settings);
        let Ok(facts) = entered else { return false };
        if !facts.is_empty() {
            self.succeeded.insert(node);
        }
        self.carry_out(facts, fate)
    }

    fn notice(&mut self, node: usize) -> bool {
        if self.state.result().is_some() {
            return false;
        }
        let known = self.state.known().find(|(known, _)| *known == id(node));
        let Some((node_id, incarnation)) = known else { return false };
        if self.agents[node].incarnation == Some(incarnation.0) {
            return false;
        }
        self.carry_out(self.state.remove(Caller { node: node_id, incarnation }), Fate::Answered)
    }

    fn scale(&mut self, workers: u32, fate: Fate) -> bool {
        let wish = ScaleWish { workers: Some(Some(workers)), ..ScaleWish::default() };
        let Ok(facts) = self.state.choose_scale(wish) else { return false };
        self.workers_max = Some(workers);
        self.carry_out(facts, fate)
    }

    /// Returns whether a round of these workers has no place for a node with so many more, or has the most nodes.
    fn is_full(&self, nodes: usize, workers: u32, more: u32) -> bool {
        let is_over = self.workers_max.is_some_and(|max| max < workers + more);
        self.settings.nodes.max() as usize <= nodes
            || is_over && self.settings.nodes.min() as usize <= nodes
    }

    fn pass(&mut self) -> bool {
        if self.state.result().is_some() {
            return false;
        }
        let deadline = self.state.deadline(&self.settings, &self.timers, self.now);
        let Some(deadline) = deadline else { return false };
        assert!(self.now < deadline, "an overdue decision was not taken: {self:?}");
        self.now = deadline;
        self.settle();
        true
    }

    fn caller(&self, node: usize) -> Option<Caller> {
        let incarnation = Incarnation(self.agents[node].incarnation?);
        Some(Caller { node: id(node), incarnation })
    }

    fn is_member(&self, node: usize, incarnation: Incarnation) -> bool {
        let members = &mut self.state.members().iter();
        members.any(|it| (it.node, it.incarnation) == (id(node), incarnation))
    }

    /// Commits the facts of a request, and what follows from them; returns whether there are any.
    fn carry_out(&mut self, facts: Vec<Fact>, fate: Fate) -> bool {
        let has_facts = !facts.is_empty();
        self.commit(&facts);
        match fate {
            Fate::Answered => {}
            Fate::MasterDies => {
                self.state = recover(&self.etcd);
                self.timers = Timers::default();
            }
        }
        self.settle();
        has_facts
    }

    fn settle(&mut self) {
        self.timers.follow(self.now, &self.state, &self.settings);
        for _ in 0..=self.agents.len() {
            let facts = self.state.due(&self.settings, &self.timers, self.now);
            if facts.is_empty() {
                return;
            }
            self.commit(&facts);
            self.timers.follow(self.now, &self.state, &self.settings);
        }
        panic!("decisions without end: {self:?}");
    }

    fn commit(&mut self, facts: &[Fact]) {
        for fact in facts {
            if let Fact::Formed(record) = fact {
                self.check_round(record);
            }
            if let Fact::Released { phase, .. } = fact {
                let members = self.state.members().len();
                let entered = self.entered.iter().filter(|(it, _)| *it == phase.0).count();
                assert_eq!(entered, members, "released early: {self:?}");
                self.released.insert(phase.0);
            }
            if let Fact::Ended(result) = fact {
                self.check_end(result);
            }
            store(&mut self.etcd, fact);
            self.state.evolve(fact);
        }
    }

    /// S001-11, S003-2: checks a round when it is formed, against the one before.
    fn check_round(&mut self, record: &RoundRecord) {
        let (min, max) = (self.settings.nodes.min() as usize, self.settings.nodes.max() as usize);
        assert!((min..=max).contains(&record.members.len()), "{record:?} {self:?}");
        assert_eq!(record.round.0, self.state.number().0 + 1);
        let mut world_size = 0;
        let mut last = (0, 0);
        for member in &record.members {
            assert_eq!(member.first_rank, world_size, "ranks have a gap: {record:?}");
            world_size += member.slots;
            let before = self.state.members().iter();
            let mut before = before.map(|it| (it.node, it.incarnation));
            let rank = before.position(|it| it == (member.node, member.incarnation));
            let seniority = (rank.unwrap_or(usize::MAX), member.incarnation.0);
            assert!(last < seniority, "wrong order: {record:?} after {self:?}");
            last = seniority;
            let node = (0..self.agents.len()).find(|node| id(*node) == member.node).unwrap();
            let asked = self.asked[node].take();
            assert_eq!(asked, Some(member.incarnation.0), "did not ask: {record:?} {self:?}");
        }
        assert_eq!(record.world_size, world_size);
        let is_least = record.members.len() == min;
        let fits = self.workers_max.is_none_or(|max| world_size <= max);
        assert!(is_least || fits, "too many workers: {record:?} {self:?}");
        self.entered.clear();
        self.released.clear();
        let is_unfinished = |member: &MemberRecord| {
            let node = (0..self.agents.len()).find(|node| id(*node) == member.node).unwrap();
            !self.succeeded.contains(&node)
        };
        let is_done = !self.state.members().iter().any(is_unfinished);
        assert!(self.state.members().is_empty() || !is_done, "runs again: {record:?} {self:?}");
        self.succeeded.clear();
    }

    /// S003-25: a job succeeds when each member of its last round has succeeded, and fails if one has not and too
    /// few nodes are there for another round.
    fn check_end(&self, result: &ResultRecord) {
        let members = self.state.members().len();
        match result.state {
            JobOutcome::Finished => assert_eq!(self.succeeded.len(), members, "{self:?}"),
            JobOutcome::Failed => {
                assert!((1..members).contains(&self.succeeded.len()), "{self:?}");
                let waiting = self.state.index.waiting.len();
                assert!(waiting < self.settings.nodes.min() as usize, "{self:?}");
                assert!(!self.state.is_intact(), "{self:?}");
            }
        }
    }

    /// Checks what holds at any time.
    pub fn check(&self) {
        assert_eq!(recover(&self.etcd), self.state, "recovery differs from the folded facts");
        let mut timers = self.timers;
        timers.follow(self.now, &self.state, &self.settings);
        assert_eq!(timers, self.timers);
        if self.state.result().is_some() {
            return;
        }
        for node in 0..self.agents.len() {
            let Some(caller) = self.caller(node) else { continue };
            self.check_barriers(caller);
            let known = Round(self.agents[node].known);
            let answer = self.state.ask(caller, known, &self.settings, &self.timers, self.now);
            let Ok(answer) = answer else { continue };
            if self.asked[node] == Some(caller.incarnation.0) {
                let standing = self.state.standing_of(caller);
                assert_eq!(standing, Ok(Standing::Waiting), "forgotten: {self:?}");
            }
            match answer {
                Directive::Wait { awaited, missing, until } => {
                    let is_known = |name: &Name| self.state.nodes.contains_key(&name.node);
                    assert!(awaited.listed.iter().all(is_known), "{awaited:?} {self:?}");
                    assert!(0 < awaited.count || until.is_some(), "waits for ever: {self:?}");
                    assert!(until.is_none_or(|until| self.now < until), "{self:?}");
                    assert!(0 < awaited.count + missing || until.is_some());
                }
                Directive::Continue { round } => assert_eq!(round, self.state.number()),
                Directive::Start(round) => assert_eq!(round.round, self.state.number()),
                Directive::WaitForPlace { .. } => {
                    assert!(self.state.is_intact(), "{self:?}");
                    let slots = |node: &NodeId| self.state.nodes.get(node).map(|it| it.slots);
                    let most = self.state.index.waiting.iter().filter_map(slots).max();
                    let workers = self.state.round().map_or(0, |round| round.world_size);
                    let members = self.state.members().len();
                    assert!(self.is_full(members, workers, most.unwrap_or(0)), "{self:?}");
                }
                Directive::TooFew { waiting, .. } => {
                    assert!(waiting < self.settings.nodes.min() as usize, "{self:?}");
                }
                Directive::Join { added, surplus, lost } => {
                    let is_member = self.is_member(node, caller.incarnation);
                    let is_done =
                        |name: &Name| self.succeeded.iter().any(|node| id(*node) == name.node);
                    assert!(!lost.listed.iter().any(is_done), "{lost:?} {self:?}");
                    let workers = self.state.round().map_or(0, |round| round.world_size);
                    let members = self.state.members().len();
                    let has_place = 0 < added && !self.is_full(members, workers, 1);
                    let is_over = self.settings.nodes.min() as usize <= members - surplus
                        && self.workers_max.is_some_and(|max| max < workers);
                    let is_disturbed =
                        !self.state.is_intact() || has_place || 0 < surplus && is_over;
                    assert!(!is_member || is_disturbed, "no reason: {lost:?} {self:?}");
                }
            }
        }
    }

    /// S003-5, S003-6: what was released stays released, with the data of every member.
    fn check_barriers(&self, caller: Caller) {
        let node = self.agents.iter().position(|it| it.incarnation == Some(caller.incarnation.0));
        let node = node.unwrap();
        let number = self.state.number();
        if !self.is_member(node, caller.incarnation) || self.state.standing_of(caller).is_err() {
            return;
        }
        for phase in self.released.iter().copied() {
            let outcome = self.state.barrier(caller, &barrier_id(number.0, TAG, phase)).unwrap();
            match outcome {
                Outcome::Released(entries) => {
                    assert_eq!(entries.data().len(), self.state.members().len(), "{self:?}");
                    for (node, given) in entries.data().iter() {
                        let node = (0..self.agents.len()).find(|it| id(*it) == *node).unwrap();
                        assert_eq!(*given, data(node, phase), "{self:?}");
                    }
                }
                Outcome::Passed => {
                    // The caller has received it, if it knows of the round.
                    assert!(self.agents[node].known != number.0 || phase < self.agents[node].phase);
                }
                Outcome::Ended(_) | Outcome::Waiting { .. } => panic!("un-released: {self:?}"),
            }
        }
        if !self.state.is_intact() {
            let next = self.released.last().map_or(0, |phase| phase + 1);
            let outcome = self.state.barrier(caller, &barrier_id(number.0, TAG, next)).unwrap();
            assert!(matches!(outcome, Outcome::Ended(_)), "{outcome:?} {self:?}");
            if let Outcome::Ended(EndedBy::Lost(names) | EndedBy::Rejoined(names)) = outcome {
                assert!(0 < names.count, "no name: {self:?}");
            }
        }
    }

    /// S002-5: if all agents behave from now on, those that are alive soon make one intact round.
    pub fn check_progress(&self) {
        let mut world = self.clone();
        for _ in 0..5 * self.agents.len() {
            for node in 0..world.agents.len() {
                world.notice(node);
                let Some(caller) = world.caller(node) else { continue };
                world.poll(node);
                let known = Round(world.agents[node].known);
                let (settings, now) = (&world.settings, world.now);
                let answer = world.state.ask(caller, known, settings, &world.timers, now);
                if matches!(answer, Err(_) | Ok(Directive::Join { .. })) {
                    world.join(node, known.0, Fate::Answered);
                }
                world.check();
            }
            world.pass();
        }
        let alive = world.agents.iter().filter(|it| it.incarnation.is_some()).count();
        let most = alive.min(self.settings.nodes.max() as usize);
        if world.state.is_closing() || world.state.result().is_some() {
            // Then it runs on, and nodes that arrive wait.
            let is_settled = world.state.is_intact() || world.state.result().is_some();
            assert!(alive == 0 || is_settled, "{self:?} became {world:?}");
        } else if self.settings.nodes.min() as usize <= most {
            assert!(world.state.is_intact(), "no round: {self:?} became {world:?}");
            let (members, workers) =
                world.state.round().map_or((0, 0), |it| (it.members.len(), it.world_size));
            let waiting = world.state.index.waiting.iter();
            let next = waiting.filter_map(|node| world.state.nodes.get(node));
            let next = next.min_by_key(|it| it.incarnation).map_or(0, |it| it.slots);
            let is_full = members == most || world.is_full(members, workers, next);
            assert!(is_full, "{self:?} became {world:?}");
        }
    }

    /// Returns a hash of all that the future depends on. Only differences of times matter.
    pub fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let age = |since: Millis| self.now.0.saturating_sub(since.0);
        (&self.etcd, &self.agents, &self.asked, &self.entered, &self.succeeded).hash(&mut hasher);
        (age(self.timers.stage_since), age(self.timers.last_arrival)).hash(&mut hasher);
        hasher.finish()
    }
}

fn data(node: usize, phase: u64) -> Arc<[u8]> {
    format!("{node} in {phase}").into_bytes().into()
}
