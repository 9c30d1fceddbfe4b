//! What follows from the results of polling for hosts: their order, what has changed, and when to give up.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::BitOr;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Millis;

use crate::hosts::{Host, HostName};

/// How much of a reason is kept: it ends up in a record in etcd.
const REASON_BYTES_MAX: usize = 1024;

/// How a list of hosts differs from the one before. The numbers are bits: added and removed is mixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Update {
    #[default]
    NoUpdate = 0,
    /// A host is gone, or has fewer slots.
    Removed = 1,
    /// A host is new, or has more slots.
    Added = 2,
    Mixed = 3,
}

impl Update {
    /// Returns the number that workers are notified with.
    pub fn bits(self) -> u8 {
        self as u8
    }

    pub fn between(before: &[Host], after: &[Host]) -> Self {
        let (before, after) = (slots_by_name(before), slots_by_name(after));
        let lost = |(host, slots): (_, &u32)| after.get(host).is_none_or(|now| now < slots);
        let gained = |(host, slots): (_, &u32)| before.get(host).is_none_or(|then| then < slots);
        let removed = if before.iter().any(lost) { Self::Removed } else { Self::NoUpdate };
        let added = if after.iter().any(gained) { Self::Added } else { Self::NoUpdate };
        removed | added
    }
}

impl BitOr for Update {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        match (self, other) {
            (Self::NoUpdate, it) | (it, Self::NoUpdate) => it,
            (Self::Removed, Self::Removed) => Self::Removed,
            (Self::Added, Self::Added) => Self::Added,
            (Self::Mixed, _) | (_, Self::Mixed) => Self::Mixed,
            (Self::Removed, Self::Added) | (Self::Added, Self::Removed) => Self::Mixed,
        }
    }
}

fn slots_by_name(hosts: &[Host]) -> BTreeMap<&HostName, u32> {
    hosts.iter().map(|host| (&host.name, host.slots)).collect()
}

/// A poll that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PollError {
    /// The first poll failed. The job ends: a retry would fail, too.
    #[error("misconfiguration: the first discovery of hosts failed: {reason}")]
    Misconfigured { reason: String },
    /// The last list stays valid.
    #[error("the discovery of hosts failed, and is retried for {left_ms} ms: {reason}")]
    Retried { reason: String, left_ms: u64 },
    /// Every poll failed for too long. The job ends.
    #[error("the discovery of hosts has failed for {failed_ms} ms: {reason}")]
    TimedOut { reason: String, failed_ms: u64 },
}

impl PollError {
    /// Returns what the caller does next: it logs a warning and polls again on
    /// [`ErrorKind::Unavailable`], and otherwise ends the job.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Misconfigured { .. } => ErrorKind::Invalid,
            Self::Retried { .. } => ErrorKind::Unavailable,
            Self::TimedOut { .. } => ErrorKind::NotYet,
        }
    }
}

/// The hosts that were found last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovery {
    /// The hosts that were found last, the oldest first. `None` before the first success: that no host is known does
    /// not mean that there is none, so no agent is stopped for it.
    hosts: Option<Vec<Host>>,
    last_success: Option<Millis>,
    timeout_ms: u64,
}

impl Discovery {
    /// Creates the state before the first poll.
    pub fn new(timeout_ms: u64) -> Self {
        Self { hosts: None, last_success: None, timeout_ms }
    }

    /// Creates the state before the first poll of a launcher that was started again. The configuration has
    /// worked before, so the first failure is retried like any other.
    pub fn resumed(timeout_ms: u64, now: Millis) -> Self {
        Self { hosts: None, last_success: Some(now), timeout_ms }
    }

    /// Returns the hosts that were found last, or `None` before the first successful poll.
    pub fn hosts(&self) -> Option<&[Host]> {
        self.hosts.as_deref()
    }

    /// Notes the result of a poll: hosts that were there before keep their order, new ones follow.
    pub fn succeeded(&mut self, now: Millis, found: &[Host]) -> Update {
        let before = self.hosts.take().unwrap_or_default();
        let update = Update::between(&before, found);
        self.hosts = Some(in_order(&before, found));
        self.last_success = Some(now);
        update
    }

    /// Returns what follows from a failed poll. The last hosts stay.
    pub fn failed(&self, now: Millis, reason: &str) -> PollError {
        let reason = shortened(reason);
        let Some(last) = self.last_success else {
            return PollError::Misconfigured { reason };
        };
        let failed_ms = now.0.saturating_sub(last.0);
        match self.timeout_ms.saturating_sub(failed_ms) {
            0 => PollError::TimedOut { reason, failed_ms },
            left_ms => PollError::Retried { reason, left_ms },
        }
    }
}

fn in_order(before: &[Host], found: &[Host]) -> Vec<Host> {
    let slots = slots_by_name(found);
    let kept = before.iter().filter_map(|host| {
        let slots = *slots.get(&host.name)?;
        Some(Host { name: host.name.clone(), slots })
    });
    let names: BTreeSet<&HostName> = before.iter().map(|host| &host.name).collect();
    let new = found.iter().filter(|host| !names.contains(&host.name)).cloned();
    kept.chain(new).collect()
}

fn shortened(reason: &str) -> String {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].to_owned()
}
