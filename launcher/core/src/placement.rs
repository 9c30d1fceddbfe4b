//! Decides which hosts run an agent, and with how many slots.
//!
//! The plan gives the slots up to `max_np` to the hosts in order: those with an agent by age, then the others
//! as discovery lists them. The last host of the plan may get fewer slots than it has. Agents that are not in
//! the plan are stopped; those with other slots are stopped and started again, at their place.
//!
//! While the plan has fewer than `min_np` slots, nothing is started and nothing is changed. Only agents on
//! hosts that discovery does not list any more are stopped.

use std::collections::BTreeMap;
use std::fmt;

use steadfast_common::records::launch::{LaunchedAgent, Outcome, Phase, StopReason};

use crate::hosts::{Host, HostName};
use crate::launcher::{FACTS_MAX, Fact, Launcher};
use crate::settings::{Context, Settings};

/// How many hosts a message lists by name; the others are counted.
const NAMES_MAX: usize = 8;

/// Why no agent is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    pub slots_found: u32,
    pub min_np: u32,
    /// The hosts that were found and can be used.
    pub usable: String,
    pub blacklisted: String,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slots_found, min_np, usable, blacklisted } = self;
        write!(f, "found {slots_found} of {min_np} slots")?;
        if !usable.is_empty() {
            write!(f, " on {usable}")?;
        }
        if !blacklisted.is_empty() {
            write!(f, "; on the blacklist: {blacklisted}")?;
        }
        Ok(())
    }
}

/// Which hosts should run agents.
struct Plan<'a> {
    /// Hosts in the order of placement. Those beyond `max_np` have 0 slots.
    hosts: Vec<(&'a HostName, u32)>,
    slots: u32,
}

impl Launcher {
    /// Returns what is missing while there are fewer than `min_np` slots. Returns `None` if enough are there, or if no
    /// poll has succeeded yet.
    pub fn shortage(&self, settings: &Settings, discovered: Option<&[Host]>) -> Option<Shortage> {
        let discovered = discovered?;
        let (slots, min_np) = (self.plan(settings, discovered).slots, settings.workers.min_np());
        let (blacklisted, usable): (Vec<&Host>, Vec<&Host>) =
            discovered.iter().partition(|host| self.is_blacklisted(&host.name));
        (slots < min_np).then(|| Shortage {
            slots_found: slots,
            min_np,
            usable: listed(usable),
            blacklisted: listed(blacklisted.iter().map(|host| &host.name)),
        })
    }

    /// Asks agents to stop that are not in the plan or have other slots.
    pub(crate) fn stops(&self, context: Context) -> Vec<Fact> {
        let Some(discovered) = context.discovered else {
            return Vec::new();
        };
        let plan = self.plan(context.settings, discovered);
        let is_short = plan.slots < context.settings.workers.min_np();
        let planned: BTreeMap<&HostName, u32> = plan.hosts.iter().copied().collect();
        let mut facts = Vec::new();
        for (host, agent) in self.agents() {
            let reason = match planned.get(host) {
                None => StopReason::Removed,
                Some(_) if is_short => continue,
                Some(0) => StopReason::Surplus,
                Some(slots) if *slots != agent.slots => StopReason::SlotsChanged,
                Some(_) => continue,
            };
            let (host, launch) = (host.clone(), agent.launch);
            match (agent.phase, reason) {
                (Phase::Running, _) => facts.push(Fact::StopRequested { host, launch, reason }),
                (Phase::Stopping { .. }, _) | (Phase::Restarting, StopReason::SlotsChanged) => {}
                (
                    Phase::Restarting,
                    StopReason::Removed | StopReason::Surplus | StopReason::JobEnded,
                ) => facts.push(Fact::Stopped { host }),
            }
        }
        facts.truncate(FACTS_MAX);
        self.with_reset(facts, context.settings)
    }

    /// Starts the agents of the plan that do not run, in order, as far as agents that are about to stop leave
    /// slots for them.
    pub(crate) fn starts(&self, context: Context) -> Vec<Fact> {
        let Some(discovered) = context.discovered else {
            return Vec::new();
        };
        let plan = self.plan(context.settings, discovered);
        if plan.slots < context.settings.workers.min_np() {
            return Vec::new();
        }
        let alive = self.agents().filter(|(_, agent)| agent.phase != Phase::Restarting);
        let used = alive.fold(0, |sum: u32, (_, agent)| sum.saturating_add(agent.slots));
        let mut free = context.settings.workers.max_np().saturating_sub(used);
        let mut launch = self.record.launches;
        let mut facts = Vec::new();
        let waiting = |host| self.agent(host).is_none_or(|it| it.phase == Phase::Restarting);
        for (host, slots) in plan.hosts.into_iter().filter(|(host, _)| waiting(host)) {
            if slots == 0 || free < slots || facts.len() == FACTS_MAX {
                break;
            }
            free -= slots;
            launch = launch.saturating_add(1);
            facts.push(Fact::Started { host: host.clone(), slots, launch });
        }
        self.with_reset(facts, context.settings)
    }

    /// Returns the fact that the agents are as the plan asks for, if that is so and not recorded yet. The caller calls
    /// this when no agent has to be stopped or started.
    pub(crate) fn settles(&self, context: Context) -> Vec<Fact> {
        let is_short = self.shortage(context.settings, context.discovered).is_some();
        let mut phases = self.agents().map(|(_, agent)| agent.phase).peekable();
        let has_agents = phases.peek().is_some() && phases.all(|it| it == Phase::Running);
        let is_new = context.discovered.is_some() && !is_short && !self.record.settled;
        Vec::from_iter((is_new && has_agents).then_some(Fact::Settled))
    }

    /// Returns the fact that goes with a change of agents: a reset begins, or the job ends because no further reset is
    /// allowed. Returns `None` while a reset is in progress.
    pub(crate) fn reset(&self, settings: &Settings) -> Option<Fact> {
        let resets = self.record.resets;
        self.record.settled.then(|| match settings.reset_limit.filter(|limit| *limit <= resets) {
            Some(limit) => Fact::Ended(Outcome::ResetLimit { limit }),
            None => Fact::Reset,
        })
    }

    fn with_reset(&self, mut facts: Vec<Fact>, settings: &Settings) -> Vec<Fact> {
        if facts.is_empty() {
            return facts;
        }
        match self.reset(settings) {
            Some(ended @ Fact::Ended(_)) => return vec![ended],
            reset => facts.extend(reset),
        }
        facts
    }

    pub(crate) fn agent(&self, host: &HostName) -> Option<&LaunchedAgent> {
        self.hosts.get(host)?.agent.as_ref()
    }

    fn is_blacklisted(&self, host: &HostName) -> bool {
        self.hosts.get(host).is_some_and(|record| record.cooldown_ms.is_some())
    }

    fn plan<'a>(&self, settings: &Settings, discovered: &'a [Host]) -> Plan<'a> {
        let mut hosts: Vec<&Host> = discovered.iter().filter(|it| self.is_usable(it)).collect();
        // The sort is stable: hosts without an agent stay in the order of discovery.
        hosts.sort_by_key(|host| self.agent(&host.name).map_or(u64::MAX, |agent| agent.place));
        let max_np = settings.workers.max_np();
        let mut slots = 0;
        let hosts = hosts.into_iter().map(|host| {
            let given = host.slots.min(max_np - slots);
            slots += given;
            (&host.name, given)
        });
        Plan { hosts: hosts.collect(), slots }
    }

    /// Returns whether a host may run an agent that is not about to stop for good.
    fn is_usable(&self, host: &Host) -> bool {
        let ends = self.agent(&host.name).is_some_and(|agent| match agent.phase {
            Phase::Running | Phase::Restarting => false,
            Phase::Stopping { reason } => reason != StopReason::SlotsChanged,
        });
        !ends && !self.is_blacklisted(&host.name)
    }
}

/// Lists the first few hosts by name, and counts the others.
pub(crate) fn listed<T: ToString>(hosts: impl IntoIterator<Item = T>) -> String {
    let names: Vec<String> = hosts.into_iter().map(|host| host.to_string()).collect();
    match names.split_at_checked(NAMES_MAX) {
        Some((first, others)) if !others.is_empty() => {
            format!("{} and {} more", first.join(", "), others.len())
        }
        Some(_) | None => names.join(", "),
    }
}
