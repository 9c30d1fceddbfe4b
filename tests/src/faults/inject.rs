//! Injects faults, and heals them when their time is over.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{Fault, FaultTarget, Kind};
use crate::EtcdCluster;

/// How much longer than a lease a fault lasts that must make leases expire. etcd checks its leases twice
/// a second.
const BEYOND_LEASE: Duration = Duration::from_millis(1000);

/// Duration of a reset fault.
const RESET: Duration = Duration::from_millis(50);

/// A killed member of etcd is restarted after this time, even without another leader.
const LEADERLESS_MAX: Duration = Duration::from_secs(4);

/// A fault to be healed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heal {
    pub fault: Fault,
    /// When to heal it. Leases are measured in time, so these faults are, too.
    pub due: Instant,
    /// Whether to heal it earlier, as soon as etcd has a leader.
    with_leader: bool,
}

impl Heal {
    /// Returns the healing of a fault that begins now; `None` if there is nothing to heal.
    pub fn of(fault: Fault, lease_ttl_s: u32) -> Option<Self> {
        let lease = Duration::from_secs(u64::from(lease_ttl_s)) + BEYOND_LEASE;
        let lasts = match fault.kind {
            Kind::Kill
            | Kind::Leave
            | Kind::Join
            | Kind::EtcdCompact
            | Kind::EtcdMoveLeader
            | Kind::KillAll => return None,
            Kind::Reset => RESET,
            Kind::EtcdKill | Kind::EtcdKillLeader => LEADERLESS_MAX,
            Kind::Pause
            | Kind::Cut
            | Kind::Isolate
            | Kind::Deafen
            | Kind::Slow
            | Kind::Shut
            | Kind::EtcdPause
            | Kind::EtcdStall
            | Kind::EtcdFull
            | Kind::StoreFull
            | Kind::StoreAway => lease,
        };
        let with_leader = fault.kind == Kind::EtcdKillLeader;
        Some(Self { fault, due: Instant::now() + lasts, with_leader })
    }

    /// Returns whether the time has come.
    pub fn is_due(&self, etcd: &EtcdCluster<'_>) -> bool {
        self.due <= Instant::now() || self.with_leader && etcd.leader().is_some()
    }
}

impl FaultTarget<'_> {
    /// Injects a fault.
    pub fn inject(&mut self, fault: Fault) {
        self.log(&format!("fault: {fault}"));
        if let Some(role) = fault.role {
            self.member_mut(role, fault.index).inject(fault.kind);
        } else {
            self.inject_elsewhere(fault.kind, fault.index as usize);
        }
        self.heals.extend(Heal::of(fault, self.shape.lease_ttl_s));
    }

    /// Injects a fault that lasts until [`FaultTarget::heal_all`].
    pub fn inject_for_long(&mut self, fault: Fault) {
        self.inject(fault);
        if let Some(heal) = self.heals.iter_mut().rev().find(|it| it.fault == fault) {
            heal.due += Duration::from_secs(3600);
        }
    }

    fn inject_elsewhere(&mut self, kind: Kind, index: usize) {
        match kind {
            Kind::EtcdKillLeader => {
                let leader = self.until("etcd has a leader", |world| world.etcd.leader());
                self.log(&format!("etcd {leader} leads"));
                self.etcd.kill(leader);
            }
            Kind::EtcdKill => self.etcd.kill(index),
            Kind::EtcdPause => self.etcd.signal(index, Signal::SIGSTOP),
            Kind::EtcdStall => self.etcd.signal_all(Signal::SIGSTOP),
            // Keep revisions that the recorder has not read yet.
            Kind::EtcdCompact => drop(self.etcd.compact(self.recorder.last())),
            Kind::EtcdMoveLeader => drop(self.etcd.move_leader()),
            Kind::EtcdFull => {
                let is_full = self.etcd.fill(&self.filler_mark());
                self.log(if is_full { "etcd is full" } else { "etcd could not be filled" });
            }
            Kind::StoreFull if self.store.can_be_full() => self.store.fill(),
            Kind::StoreFull => self.log("skipped: this process may not mount a file system"),
            Kind::StoreAway => self.store.take_away(),
            Kind::KillAll => {
                self.heal_all();
                self.members.iter_mut().for_each(|it| it.signal(Signal::SIGKILL));
                self.etcd.kill_all();
                self.etcd.start_missing();
            }
            other => unreachable!("{} hits one of many", other.name()),
        }
    }

    /// Returns a key that only the recorder reads.
    fn filler_mark(&self) -> String {
        format!("{}/filler", self.keys.root())
    }

    /// Frees the space of etcd; returns whether it succeeded. The history is compacted only after the
    /// recorder has read it.
    fn give_space_back(&self) -> bool {
        let mark = self.filler_mark();
        self.etcd.empty(&mark)
            && match self.recorder.last_of(&mark) {
                Some((revision, change)) if change.value.is_none() => self.etcd.reclaim(revision),
                Some(_) | None => false,
            }
    }

    /// Heals the faults that are due.
    pub(super) fn heal_due(&mut self) {
        for heal in std::mem::take(&mut self.heals) {
            if !heal.is_due(&self.etcd) || !self.heal(heal.fault) {
                self.heals.push(heal);
            }
        }
    }

    /// Heals all faults.
    pub fn heal_all(&mut self) {
        for heal in std::mem::take(&mut self.heals) {
            if !self.heal(heal.fault) {
                self.heals.push(heal);
            }
        }
    }

    /// Heals a fault; returns whether it succeeded.
    fn heal(&mut self, fault: Fault) -> bool {
        let index = fault.index as usize;
        match (fault.kind, fault.role) {
            (kind, Some(role)) => self.member_mut(role, fault.index).heal(kind),
            (Kind::EtcdPause, None) => self.etcd.signal(index, Signal::SIGCONT),
            (Kind::EtcdStall, None) => self.etcd.signal_all(Signal::SIGCONT),
            (Kind::EtcdFull, None) => {
                if !self.give_space_back() {
                    return false;
                }
            }
            (Kind::StoreFull | Kind::StoreAway, None) => self.store.heal(),
            (_, None) => self.etcd.start_missing(),
        }
        self.log(&format!("healed: {fault}"));
        true
    }
}
