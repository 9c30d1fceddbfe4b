//! The durable state of a launcher, the facts that change it, and the actions that follow from them.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::records::launch::{
    HostRecord, LaunchedAgent, LauncherRecord, Outcome, Phase, StopReason,
};

use crate::hosts::HostName;

/// Maximum number of facts of one decision, besides one about the job. They must fit into one transaction.
pub const FACTS_MAX: usize = 64;

/// A durable change. Each changes the record of one host, or of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    Started {
        host: HostName,
        slots: u32,
        launch: u64,
    },
    StopRequested {
        host: HostName,
        launch: u64,
        reason: StopReason,
    },
    /// The agent has exited, and is started again with other slots.
    RestartPending {
        host: HostName,
    },
    /// The agent has exited, or is not started again.
    Stopped {
        host: HostName,
    },
    /// The agent has failed, and its host is on the blacklist.
    Failed {
        host: HostName,
        cooldown_ms: u64,
    },
    /// The host is not on the blacklist any more.
    CooledDown {
        host: HostName,
    },
    /// The failures of the host do not count any more.
    Forgotten {
        host: HostName,
    },
    /// The agents begin to change.
    Reset,
    /// The agents are as they should be.
    Settled,
    Ended(Outcome),
}

/// What the driver does after a commit. A start or stop of a launch may be repeated: it has no further
/// effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Start { host: HostName, slots: u32, launch: u64 },
    Stop { host: HostName, launch: u64, reason: StopReason },
}

/// A change of one key in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Launcher(LauncherRecord),
    /// Without a record, the key is deleted.
    Host {
        host: HostName,
        record: Option<HostRecord>,
    },
}

/// The durable state: the result of applying all facts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launcher {
    pub(crate) record: LauncherRecord,
    /// Hosts with something to remember; no record is empty.
    pub(crate) hosts: BTreeMap<HostName, HostRecord>,
}

impl Launcher {
    /// Restores the state from its records in etcd. Hosts with an empty record are left out.
    pub fn from_records(
        record: Option<LauncherRecord>,
        hosts: impl IntoIterator<Item = (HostName, HostRecord)>,
    ) -> Self {
        let hosts = hosts.into_iter().filter(|(_, record)| *record != HostRecord::default());
        Self { record: record.unwrap_or_default(), hosts: hosts.collect() }
    }

    pub fn record(&self) -> &LauncherRecord {
        &self.record
    }

    /// Returns the hosts that run an agent or have failed.
    pub fn hosts(&self) -> impl Iterator<Item = (&HostName, &HostRecord)> {
        self.hosts.iter()
    }

    /// Returns the agents that were started and have not ended.
    pub fn agents(&self) -> impl Iterator<Item = (&HostName, &LaunchedAgent)> {
        self.hosts.iter().filter_map(|(host, record)| Some((host, record.agent.as_ref()?)))
    }

    /// Returns whether the job has ended and no agent is left.
    pub fn is_over(&self) -> bool {
        self.record.outcome.is_some() && self.agents().next().is_none()
    }

    /// Returns the actions that lead to this state. A recovered launcher repeats them: the last one may have
    /// stopped between a commit and its actions.
    pub fn actions(&self) -> Vec<Action> {
        let action = |(host, agent): (&HostName, &LaunchedAgent)| {
            let (host, launch) = (host.clone(), agent.launch);
            match agent.phase {
                Phase::Running => Some(Action::Start { host, slots: agent.slots, launch }),
                Phase::Stopping { reason } => Some(Action::Stop { host, launch, reason }),
                Phase::Restarting => None,
            }
        };
        self.agents().filter_map(action).collect()
    }

    /// Returns the changes of keys that commit the facts.
    pub fn changes(&self, facts: &[Fact]) -> Vec<Change> {
        let mut after = self.clone();
        facts.iter().for_each(|fact| after.evolve(fact));
        let hosts: BTreeSet<&HostName> = facts.iter().filter_map(Fact::host).collect();
        let changed = hosts.into_iter().map(|host| {
            let record = after.hosts.get(host).cloned();
            Change::Host { host: host.clone(), record }
        });
        let launcher = (self.record != after.record).then(|| after.record.clone());
        launcher.map(Change::Launcher).into_iter().chain(changed).collect()
    }

    /// Applies one committed fact.
    pub fn evolve(&mut self, fact: &Fact) {
        match fact {
            Fact::Started { launch, .. } => self.record.launches = *launch,
            Fact::Reset => {
                self.record.resets = self.record.resets.saturating_add(1);
                self.record.settled = false;
            }
            Fact::Settled => self.record.settled = true,
            Fact::Ended(outcome) => self.record.outcome = Some(outcome.clone()),
            Fact::StopRequested { .. }
            | Fact::RestartPending { .. }
            | Fact::Stopped { .. }
            | Fact::Failed { .. }
            | Fact::CooledDown { .. }
            | Fact::Forgotten { .. } => {}
        }
        if let Some(host) = fact.host() {
            let record = after(self.hosts.remove(host).unwrap_or_default(), fact);
            if record != HostRecord::default() {
                self.hosts.insert(host.clone(), record);
            }
        }
    }
}

/// Returns the record of a host after a fact about it.
fn after(mut record: HostRecord, fact: &Fact) -> HostRecord {
    match fact {
        Fact::Started { slots, launch, .. } => {
            let (slots, launch) = (*slots, *launch);
            let place = record.agent.map_or(launch, |agent| agent.place);
            record.agent = Some(LaunchedAgent { launch, place, slots, phase: Phase::Running });
        }
        Fact::StopRequested { reason, .. } => {
            enter(&mut record, Phase::Stopping { reason: *reason });
        }
        Fact::RestartPending { .. } => enter(&mut record, Phase::Restarting),
        Fact::Stopped { .. } => record.agent = None,
        Fact::Failed { cooldown_ms, .. } => {
            record.agent = None;
            record.failures = record.failures.saturating_add(1);
            record.cooldown_ms = Some(*cooldown_ms);
        }
        Fact::CooledDown { .. } => record.cooldown_ms = None,
        Fact::Forgotten { .. } => (record.failures, record.cooldown_ms) = (0, None),
        Fact::Reset | Fact::Settled | Fact::Ended(_) => {}
    }
    record
}

fn enter(record: &mut HostRecord, phase: Phase) {
    if let Some(agent) = &mut record.agent {
        agent.phase = phase;
    }
}

impl Fact {
    /// Returns what the driver does once the fact is committed.
    pub fn action(&self) -> Option<Action> {
        match self.clone() {
            Self::Started { host, slots, launch } => Some(Action::Start { host, slots, launch }),
            Self::StopRequested { host, launch, reason } => {
                Some(Action::Stop { host, launch, reason })
            }
            Self::RestartPending { .. }
            | Self::Stopped { .. }
            | Self::Failed { .. }
            | Self::CooledDown { .. }
            | Self::Forgotten { .. }
            | Self::Reset
            | Self::Settled
            | Self::Ended(_) => None,
        }
    }

    /// Returns the host whose record changes.
    pub fn host(&self) -> Option<&HostName> {
        match self {
            Self::Started { host, .. }
            | Self::StopRequested { host, .. }
            | Self::RestartPending { host }
            | Self::Stopped { host }
            | Self::Failed { host, .. }
            | Self::CooledDown { host }
            | Self::Forgotten { host } => Some(host),
            Self::Reset | Self::Settled | Self::Ended(_) => None,
        }
    }
}
