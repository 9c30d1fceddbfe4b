//! The live agents of a job, as a view of etcd shows them.

use std::collections::BTreeMap;

use steadfast_common::ids::{Incarnation, NodeId};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{AgentRecord, Runner};
use steadfast_coord::View;
use steadfast_master_core::rendezvous::{Caller, Rendezvous};
use tracing::warn;

use super::handle::ElasticError;

/// The live agents.
pub(super) struct Agents {
    keys: Keys,
    /// The revision of the view.
    revision: i64,
    live: BTreeMap<NodeId, LiveAgent>,
    /// The oldest node at each address.
    by_address: BTreeMap<String, NodeId>,
    /// What runs the oldest node, if there is one.
    runner: Option<Runner>,
}

struct LiveAgent {
    incarnation: Incarnation,
    mod_revision: i64,
    lease: i64,
    record: AgentRecord,
}

impl Agents {
    pub fn of(keys: &Keys, view: &View) -> Self {
        let mut agents = Self {
            keys: keys.clone(),
            revision: 0,
            live: BTreeMap::new(),
            by_address: BTreeMap::new(),
            runner: None,
        };
        agents.follow(view);
        agents
    }

    /// Returns the revision of the view.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// Returns the known nodes that are not registered any more.
    pub fn lost(&self, state: &Rendezvous) -> Vec<Caller> {
        let is_live = |node: &NodeId, incarnation: &Incarnation| {
            self.live.get(node).is_some_and(|agent| agent.incarnation == *incarnation)
        };
        let lost = state.known().filter(|(node, incarnation)| !is_live(node, incarnation));
        lost.map(|(node, incarnation)| Caller { node, incarnation }).collect()
    }

    /// Returns the registration of a caller.
    pub fn registration(&self, caller: Caller) -> Result<&AgentRecord, ElasticError> {
        let Caller { node, incarnation } = caller;
        let agent = self.live.get(&node).filter(|agent| agent.incarnation == incarnation);
        let agent = &agent.ok_or(ElasticError::NotRegistered(node))?.record;
        if let Some(others) = self.runner.filter(|others| *others != agent.runner) {
            // The barriers of one kind of node are unknown to the other.
            return Err(ElasticError::OtherRunner { own: agent.runner, others });
        }
        match self.by_address.get(&agent.address) {
            Some(holder) if *holder != node => {
                Err(ElasticError::AddressTaken { address: agent.address.clone(), holder: *holder })
            }
            Some(_) | None => Ok(agent),
        }
    }

    /// Returns the registration of a live node.
    pub fn record(&self, node: NodeId, incarnation: Incarnation) -> Option<&AgentRecord> {
        let agent = self.live.get(&node).filter(|agent| agent.incarnation == incarnation);
        agent.map(|agent| &agent.record)
    }

    /// Returns the address of a live node.
    pub fn address(&self, node: NodeId) -> Option<&str> {
        Some(&self.live.get(&node)?.record.address)
    }

    /// Returns the node at an address, and the lease of its registration.
    pub fn at(&self, address: &str) -> Option<(Caller, i64)> {
        let node = *self.by_address.get(address)?;
        let agent = self.live.get(&node)?;
        Some((Caller { node, incarnation: agent.incarnation }, agent.lease))
    }

    /// Follows a view. Parses only registrations that changed.
    pub fn follow(&mut self, view: &View) {
        self.revision = view.revision;
        let mut live = BTreeMap::new();
        let mut by_address: BTreeMap<String, (Incarnation, NodeId)> = BTreeMap::new();
        for (key, entry) in &view.entries {
            let Some(node) = self.keys.agent_of(key) else {
                warn!(key, "unknown key ignored");
                continue;
            };
            let known = self.live.remove(&node);
            let agent = match known.filter(|agent| agent.mod_revision == entry.mod_revision) {
                Some(agent) => agent,
                None => match entry.json() {
                    Ok(record) => LiveAgent {
                        incarnation: Incarnation(entry.create_revision),
                        mod_revision: entry.mod_revision,
                        lease: entry.lease,
                        record,
                    },
                    Err(error) => {
                        warn!(%error, "registration ignored");
                        continue;
                    }
                },
            };
            // A node without a port of its own shares the address with others of its host.
            if !agent.record.address.ends_with(":0") {
                let age = (agent.incarnation, node);
                let holder = by_address.entry(agent.record.address.clone()).or_insert(age);
                *holder = (*holder).min(age);
            }
            live.insert(node, agent);
        }
        let oldest = live.values().min_by_key(|agent| agent.incarnation);
        self.runner = oldest.map(|agent| agent.record.runner);
        self.live = live;
        self.by_address =
            by_address.into_iter().map(|(address, (_, node))| (address, node)).collect();
    }
}
