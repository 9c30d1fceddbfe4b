//! Since when the hosts and the job are in their state. Kept in memory only: a new launcher begins the waits
//! anew.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::Millis;
use steadfast_common::records::launch::{HostRecord, Phase};

use crate::hosts::{Host, HostName};
use crate::launcher::Launcher;
use crate::settings::Settings;

/// The times of the last changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timers {
    hosts: BTreeMap<HostName, (Standing, Millis)>,
    pub(crate) short_since: Option<Millis>,
    pub(crate) ended_since: Option<Millis>,
}

/// How a host with a record stands. A change begins its wait anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// On the blacklist.
    Cooling,
    /// Its agent runs.
    Running,
    /// Its agent stops, or is started again.
    Changing,
    /// Discovered, without an agent.
    Idle,
    /// Not discovered, without an agent.
    Absent,
}

impl Timers {
    /// Records since when the job and each host are in their present state. The caller calls this after each commit and
    /// each poll.
    pub fn follow(
        &mut self,
        now: Millis,
        launcher: &Launcher,
        settings: &Settings,
        discovered: Option<&[Host]>,
    ) {
        let known: Option<BTreeSet<&HostName>> =
            discovered.map(|hosts| hosts.iter().map(|host| &host.name).collect());
        let hosts = launcher.hosts.iter().map(|(host, record)| {
            let is_absent = known.as_ref().is_some_and(|known| !known.contains(host));
            let standing = match (standing(record), is_absent) {
                (Standing::Idle, true) => Standing::Absent,
                (standing, _) => standing,
            };
            let before = self.hosts.get(host).filter(|(before, _)| *before == standing);
            (host.clone(), (standing, before.map_or(now, |(_, since)| *since)))
        });
        self.hosts = hosts.collect();
        let is_short = launcher.shortage(settings, discovered).is_some();
        self.short_since = is_short.then(|| self.short_since.unwrap_or(now));
        let has_ended = launcher.record.outcome.is_some();
        self.ended_since = has_ended.then(|| self.ended_since.unwrap_or(now));
    }

    /// Returns how a host stands, and since when.
    pub(crate) fn of(&self, host: &HostName) -> Option<(Standing, Millis)> {
        self.hosts.get(host).copied()
    }
}

fn standing(record: &HostRecord) -> Standing {
    match (record.cooldown_ms, record.agent.as_ref().map(|agent| agent.phase)) {
        (Some(_), _) => Standing::Cooling,
        (None, Some(Phase::Running)) => Standing::Running,
        (None, Some(Phase::Stopping { .. } | Phase::Restarting)) => Standing::Changing,
        (None, None) => Standing::Idle,
    }
}
