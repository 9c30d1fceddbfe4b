//! What etcd holds of a rendezvous: a master that recovers from it decides, answers and reports.

#![no_main]

use std::collections::BTreeMap;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use serde::de::DeserializeOwned;
use serde_json::json;
use steadfast_common::ids::{Millis, NodeId, Phase, Round};
use steadfast_common::records::JobOutcome;
use steadfast_common::records::commits::{
    BegunState, COMMIT_TAG, CommitRecord, Progress, RecordOrder,
};
use steadfast_common::records::keys::{Keys, TagKey};
use steadfast_common::records::ranges::Ranges;
use steadfast_common::records::rendezvous::{
    AgentRecord, EXIT_TAG, NodeRange, NodeRecord, ReleaseRecord, RoundRecord, Runner,
};
use steadfast_fuzz::{seeds, within};
use steadfast_master_core::rendezvous::{
    BarrierId, Caller, DealTerms, Fact, Held, JoinTerms, Rendezvous, Settings, Timers,
};
use uuid::Uuid;

/// A key of a tag in two letters is a map of phases in memory.
const TIMES_MAX: usize = 1024;
/// Decisions of one moment, besides one for each node: some nodes are late, a round is formed, the job ends.
const DECISIONS_MAX: usize = 8;
const RECORDS: u64 = 1000;

fuzz_target!(init: seeds("rendezvous", well_formed()), |data: &[u8]| {
    let Some((sizes, lines)) = data.split_first() else { return };
    let min = 1 + u32::from(sizes % 4);
    let nodes = NodeRange::new(min, min + u32::from(sizes / 4 % 4)).expect("a valid range");
    let order = if sizes & 64 == 0 { RecordOrder::Fixed } else { RecordOrder::Dynamic };
    let (last_call_ms, join_timeout_ms, records) = (1000, 5000, Some(RECORDS));
    let settings = Settings { nodes, last_call_ms, join_timeout_ms, records, order };
    within(TIMES_MAX * lines.len() + (64 << 10), || {
        let facts = facts(&keys_of(lines)).unwrap_or_default();
        if let Ok(state) = Rendezvous::from_records(facts.iter().cloned()) {
            let reversed = Rendezvous::from_records(facts.into_iter().rev());
            assert_eq!(reversed, Ok(state.clone()), "the order of the records does not matter");
            Master { state, timers: Timers::default(), settings, now: Millis(0) }.play();
        }
    });
});

fn keys() -> Keys {
    Keys::of_job("fuzz")
}

/// The keys of a rendezvous, one on each line, with its value after a space.
fn keys_of(lines: &[u8]) -> BTreeMap<String, &[u8]> {
    let mut keys_found = BTreeMap::new();
    for line in lines.split(|it| *it == b'\n') {
        let mut parts = line.splitn(2, |it| *it == b' ');
        let key = String::from_utf8_lossy(parts.next().unwrap_or_default());
        let key = format!("{}{key}", keys().rendezvous_prefix());
        keys_found.insert(key, parts.next().unwrap_or_default());
    }
    keys_found
}

/// Reads the records like the master.
fn facts(found: &BTreeMap<String, &[u8]>) -> Option<Vec<Fact>> {
    let keys = keys();
    let mut facts = Vec::new();
    let round: Option<RoundRecord> = optional(found.get(&keys.formed_round()))?;
    let number = round.as_ref().map_or(Round(0), |record| record.round);
    facts.extend(round.map(|record| Fact::Formed(Arc::new(record))));
    let commit: Option<CommitRecord> = optional(found.get(&keys.commit()))?;
    facts.extend(commit.map(|record| Fact::Committed(Arc::new(record))));
    let scale = optional(found.get(&keys.workers_desired()))?;
    facts.extend(scale.map(|record| Fact::Scaled(Arc::new(record))));
    let shared = optional(found.get(&keys.shared_state()))?;
    facts.extend(shared.map(|record| Fact::Shared(Arc::new(record))));
    for (key, value) in found {
        // A number and an id have other forms, too, which no master writes.
        if let Some(node) = keys.node_of(key).filter(|it| keys.node(*it) == *key) {
            let record: NodeRecord = serde_json::from_slice(value).ok()?;
            facts.push(Fact::Node { node, record });
        }
        if let Some(node) = keys.dealt_to(number, key).filter(|it| keys.dealt(number, *it) == *key)
        {
            let record = Arc::new(serde_json::from_slice(value).ok()?);
            facts.push(Fact::Dealt { round: number, node, record });
        }
        facts.extend(match keys.tag_key_of(number, key) {
            Some(TagKey::Released { tag }) => {
                let ReleaseRecord { phase } = serde_json::from_slice(value).ok()?;
                Some(Fact::Released { round: number, tag, phase })
            }
            Some(TagKey::Entry { tag, phase, node })
                if keys.entry(number, &tag, phase, node) == *key =>
            {
                Some(Fact::Entered { round: number, tag, phase, node, data: (*value).into() })
            }
            Some(TagKey::Entry { .. }) | None => None,
        });
    }
    Some(facts)
}

/// Returns `None` if the value cannot be parsed.
fn optional<T: DeserializeOwned>(value: Option<&&[u8]>) -> Option<Option<T>> {
    value.map(|json| serde_json::from_slice(json)).transpose().ok()
}

struct Master {
    state: Rendezvous,
    timers: Timers,
    settings: Settings,
    now: Millis,
}

impl Master {
    fn play(mut self) {
        self.settle();
        for caller in self.callers() {
            self.enter_all(caller);
            self.ask(caller);
        }
        self.join_all();
        let until = self.state.deadline(&self.settings, &self.timers, self.now);
        self.now = until.unwrap_or(self.now).max(self.now);
        self.settle();
        for caller in self.callers() {
            self.enter_all(caller);
            self.ask(caller);
        }
        let lost = self.callers().into_iter().next();
        let removed = lost.map(|caller| self.state.remove(caller)).unwrap_or_default();
        self.commit(&removed);
        self.settle();
        self.share();
        let end = self.state.shut_down(JobOutcome::Failed, "end");
        self.commit(&end);
        assert!(self.state.result().is_some());
        self.settle();
    }

    fn callers(&self) -> Vec<Caller> {
        let known = self.state.known();
        known.map(|(node, incarnation)| Caller { node, incarnation }).collect()
    }

    fn commit(&mut self, facts: &[Fact]) {
        facts.iter().for_each(|fact| self.state.evolve(fact));
        self.timers.follow(self.now, &self.state, &self.settings);
        let Self { state, settings, timers, now } = self;
        drop(state.awaited(settings, timers, *now).to_string());
        assert!(state.blocked(settings, timers, *now).iter().all(|it| !it.is_empty()));
        let shown = state.nodes_shown();
        assert!(state.known().count() <= shown.len());
    }

    /// Commits what is due, until nothing is.
    fn settle(&mut self) {
        self.commit(&[]);
        for _ in 0..DECISIONS_MAX + self.state.known().count() {
            let facts = self.state.due(&self.settings, &self.timers, self.now);
            if facts.is_empty() {
                return;
            }
            self.commit(&facts);
        }
        panic!("there is always something due: {:?}", self.state);
    }

    fn ask(&self, caller: Caller) {
        let Self { state, settings, timers, now } = self;
        for known in [Round(0), state.number()] {
            state.ask(caller, known, settings, timers, *now).expect("a known incarnation");
        }
        state.waiting_nodes(caller, settings, timers, *now).expect("a known incarnation");
    }

    /// Lets all known nodes and another one ask to join.
    fn join_all(&mut self) {
        let (nodes_min, nodes_max) = (self.settings.nodes.min(), self.settings.nodes.max());
        let terms = JoinTerms { after: self.state.number(), nodes_min, nodes_max };
        let agent = AgentRecord::new(Runner::Agent, "n:1".to_owned(), 2);
        let (node, incarnation) = (NodeId(Uuid::from_u128(u128::MAX)), Default::default());
        for caller in self.callers().into_iter().chain([Caller { node, incarnation }]) {
            let facts = self.state.join(caller, &agent, &terms, &self.settings);
            self.commit(&facts.unwrap_or_default());
        }
    }

    /// Enters the next phase of each tag, of a new tag, and of the end.
    fn enter_all(&mut self, caller: Caller) {
        let open = self.state.open_tags().map(|(tag, _)| tag.to_owned());
        let own = ["new", COMMIT_TAG, EXIT_TAG].map(str::to_owned);
        let tags: Vec<String> = open.chain(own).collect();
        for tag in tags {
            let phase = self.state.next_phase(&tag);
            let barrier = BarrierId { round: self.state.number(), tag, phase };
            let data = Arc::from(self.state_of(caller, phase));
            let facts = self.state.enter(caller, &barrier, data, &self.settings);
            self.commit(&facts.unwrap_or_default());
            drop(self.state.barrier(caller, &barrier));
        }
    }

    /// Returns what a member passes to the barrier of a commit: the same records as the last, or all that it holds.
    fn state_of(&mut self, caller: Caller, phase: Phase) -> Vec<u8> {
        let last = self.state.commit().map(|commit| (**commit).clone());
        match (self.settings.order, phase) {
            (RecordOrder::Fixed, _) => last.map(|last| last.position).unwrap_or_default().to_json(),
            (RecordOrder::Dynamic, Phase(0)) => {
                let number = last.map_or(0, |last| last.id.number());
                Progress::State(BegunState { number, commit: None }).to_json()
            }
            (RecordOrder::Dynamic, _) => Progress::Used(self.deal(caller)).to_json(),
        }
    }

    /// Returns what a member holds after it was dealt more.
    fn deal(&mut self, caller: Caller) -> Ranges {
        let round = self.state.number();
        let terms = DealTerms { round, total: 0, wanted: 9, least: 1, end: 2 * RECORDS };
        let Ok(Held { total, .. }) = self.state.held(caller, &terms, &self.settings) else {
            return Ranges::default();
        };
        let terms = DealTerms { total, ..terms };
        let facts = self.state.deal(caller, &terms, &self.settings);
        self.commit(&facts.unwrap_or_default());
        let held = self.state.held(caller, &terms, &self.settings);
        held.map(|held| held.ranges).unwrap_or_default()
    }

    fn share(&mut self) {
        let token = self.state.shared().map_or(0, |record| record.token);
        if let Ok(facts) = self.state.share(token, b"state".to_vec()) {
            self.commit(&facts);
            assert_eq!(self.state.shared().map(|record| record.token), Some(token + 1));
        }
    }
}

fn well_formed() -> Vec<Vec<u8>> {
    let ids = [1, 2, 3].map(|it| Uuid::from_u128(it).to_string());
    let node = |number: usize, state: &str, after: Option<u64>| {
        let mut record = json!({
            "incarnation": number, "address": format!("a:{number}"), "slots": 2, "state": state,
        });
        if let Some(after) = after {
            record["after"] = json!(after);
        }
        format!("nodes/{} {record}", ids[number])
    };
    let member = |number: usize, first_rank: u32| {
        json!({
            "node": ids[number], "incarnation": number, "address": format!("a:{number}"), "slots": 2,
            "first_rank": first_rank,
        })
    };
    let members = [member(0, 0), member(1, 2)];
    let round = json!({ "round": 3, "world_size": 4, "members": members });
    let (first, second) = (node(0, "asked", Some(2)), node(1, "asked", Some(2)));
    let running = format!("round {round}\n{first}\n{second}");
    let barrier = format!(
        "{running}\ntags/000003/sync/released {{\"phase\":4}}\ntags/000003/sync/000005/{} data",
        ids[1],
    );
    let shared = format!("{running}\nshared {}", json!({ "token": 2, "state": "AQI=" }));
    let commit = json!({ "round": 2, "phase": 1, "pass": 0, "used": 4, "seen": 4 });
    let committed = format!("{running}\ncommit {commit}");
    let ahead =
        json!({ "round": 3, "phase": 1, "pass": 0, "used": 4, "seen": 6, "ahead": [[7, 9]] });
    let dealt = json!({ "total": 9, "ranges": [[4, 7], [9, 12]] });
    let dealing = format!("{running}\ncommit {ahead}\ndealt/000003/{} {dealt}", ids[0]);
    let closing = format!("{running}\ntags/000003/{EXIT_TAG}/000000/{} ", ids[0]);
    let lost = format!("round {round}\n{first}\n{}", node(2, "starting", None));
    let late = format!("round {round}\n{first}\n{}", node(1, "late", None));
    let new = [0, 1, 2].map(|it| node(it, "asked", Some(0))).join("\n");
    [
        (5, running),
        (5, barrier),
        (0, shared),
        (5, committed),
        (69, dealing),
        (9, closing),
        (5, lost),
        (4, late),
        (13, new),
    ]
    .map(|(sizes, lines): (u8, _)| [&[sizes], lines.as_bytes()].concat())
    .to_vec()
}
