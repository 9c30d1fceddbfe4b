//! The blacklist: a host whose agent failed gets no agent for a while, which doubles with each failure.

use serde::{Deserialize, Serialize};
use steadfast_common::ids::Millis;
use steadfast_common::records::launch::HostRecord;

use crate::hosts::{HOSTS_MAX, HostName};
use crate::launcher::{FACTS_MAX, Fact, Launcher};
use crate::settings::{Context, Settings};
use crate::timers::{Standing, Timers};

/// Maximum number of hosts with a record. Beyond it, hosts that discovery does not list are forgotten early.
pub const KNOWN_MAX: usize = 2 * HOSTS_MAX;

/// How long a host stays on the blacklist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cooldown {
    lower_ms: u64,
    upper_ms: u64,
}

impl Default for Cooldown {
    fn default() -> Self {
        Self { lower_ms: 1_000, upper_ms: 3_600_000 }
    }
}

impl Cooldown {
    /// Returns the cool-down, if 1 ≤ `lower_ms` ≤ `upper_ms`.
    pub fn new(lower_ms: u64, upper_ms: u64) -> Option<Self> {
        (1 <= lower_ms && lower_ms <= upper_ms).then_some(Self { lower_ms, upper_ms })
    }

    /// Returns the length after a failure that follows `failures` others: `lower`·2^`failures` and a random
    /// part below `lower`, but at most `upper`.
    pub fn length_ms(self, failures: u32, random: u64) -> u64 {
        let factor = 1u64.checked_shl(failures).unwrap_or(u64::MAX);
        let jitter_ms = random % self.lower_ms;
        self.lower_ms.saturating_mul(factor).saturating_add(jitter_ms).min(self.upper_ms)
    }
}

/// A host on the blacklist, as it is reported to users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlacklistedHost {
    pub host: HostName,
    pub failures: u32,
    pub left_ms: u64,
}

impl Launcher {
    pub fn blacklist(&self, timers: &Timers, now: Millis) -> Vec<BlacklistedHost> {
        let entry = |(host, record): (&HostName, &HostRecord)| {
            let since = timers.of(host).map_or(now, |(_, since)| since);
            let passed_ms = now.0.saturating_sub(since.0);
            let left_ms = record.cooldown_ms?.saturating_sub(passed_ms);
            Some(BlacklistedHost { host: host.clone(), failures: record.failures, left_ms })
        };
        self.hosts.iter().filter_map(entry).collect()
    }

    /// Takes hosts whose cool-down has ended off the blacklist, and forgets failures that are long ago.
    pub(crate) fn waits_over(&self, context: Context) -> Vec<Fact> {
        let mut surplus = self.hosts.len().saturating_sub(KNOWN_MAX);
        let mut facts = Vec::new();
        for (host, record) in &self.hosts {
            let name = host.clone();
            let is_over = wait_end(host, record, context).is_some_and(|end| end <= context.now);
            if 0 < surplus && record.agent.is_none() && is_absent(host, context) {
                surplus -= 1;
                facts.push(Fact::Forgotten { host: name });
            } else if is_over && record.cooldown_ms.is_some() {
                facts.push(Fact::CooledDown { host: name });
            } else if is_over {
                facts.push(Fact::Forgotten { host: name });
            }
        }
        facts.truncate(FACTS_MAX);
        facts
    }
}

/// Returns when the cool-down of a host ends, or when its failures are forgotten.
pub(crate) fn wait_end(host: &HostName, record: &HostRecord, context: Context) -> Option<Millis> {
    let (standing, since) = context.timers.of(host)?;
    let length_ms = wait_ms(standing, record, context.settings)?;
    Some(Millis(since.0.saturating_add(length_ms)))
}

fn is_absent(host: &HostName, context: Context) -> bool {
    context.discovered.is_some_and(|found| found.iter().all(|it| it.name != *host))
}

fn wait_ms(standing: Standing, record: &HostRecord, settings: &Settings) -> Option<u64> {
    match standing {
        Standing::Cooling => record.cooldown_ms,
        Standing::Running | Standing::Absent if 0 < record.failures => {
            Some(settings.forget_after_ms)
        }
        Standing::Running | Standing::Absent | Standing::Changing | Standing::Idle => None,
    }
}
