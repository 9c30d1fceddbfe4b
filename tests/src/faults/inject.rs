//! Injects faults, and heals them when their time is over.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::driver::{World, WorldJob};
use super::{Fault, Kind};
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
            | Kind::KillAll
            | Kind::Scale
            | Kind::Slots
            | Kind::Clock => return None,
            Kind::Reset => RESET,
            Kind::EtcdKill | Kind::EtcdKillLeader => LEADERLESS_MAX,
            Kind::Pause
            | Kind::Cut
            | Kind::Isolate
            | Kind::Deafen
            | Kind::Slow
            | Kind::Shut
            | Kind::Mute
            | Kind::EtcdPause
            | Kind::EtcdStall
            | Kind::EtcdFull
            | Kind::StoreFull
            | Kind::StoreAway
            | Kind::SyncFail => lease,
        };
        let with_leader = fault.kind == Kind::EtcdKillLeader;
        Some(Self { fault, due: Instant::now() + lasts, with_leader })
    }

    /// Returns whether the fault is to be healed now.
    pub fn is_due(&self, etcd: &EtcdCluster<'_>) -> bool {
        self.due <= Instant::now() || self.with_leader && etcd.leader().is_some()
    }
}

impl<J: WorldJob> World<'_, J> {
    pub fn inject(&mut self, fault: Fault) {
        self.log(&format!("fault: {fault}"));
        let index = fault.index as usize;
        match (fault.role, fault.kind) {
            (Some(role), kind) => J::inject_into(self, role, fault.index, kind),
            (None, Kind::EtcdKillLeader) => {
                let leader = self.until("etcd has a leader", |world| world.etcd.leader());
                self.log(&format!("etcd {leader} leads"));
                self.etcd.kill(leader);
            }
            (None, Kind::EtcdKill) => self.etcd.kill(index),
            (None, Kind::EtcdPause) => self.etcd.signal(index, Signal::SIGSTOP),
            (None, Kind::EtcdStall) => self.etcd.signal_all(Signal::SIGSTOP),
            (None, Kind::EtcdMoveLeader) => drop(self.etcd.move_leader()),
            (None, other) => J::inject_elsewhere(self, other),
        }
        self.heals.extend(Heal::of(fault, self.job.lease_ttl_s()));
    }

    /// Injects a fault that lasts until [`World::heal_all`].
    pub fn inject_for_long(&mut self, fault: Fault) {
        self.inject(fault);
        if let Some(heal) = self.heals.iter_mut().rev().find(|it| it.fault == fault) {
            heal.due += Duration::from_secs(3600);
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

    pub fn heal_all(&mut self) {
        for heal in std::mem::take(&mut self.heals) {
            if !self.heal(heal.fault) {
                self.heals.push(heal);
            }
        }
    }

    /// Heals a fault; returns whether it succeeded.
    fn heal(&mut self, fault: Fault) -> bool {
        match (fault.role, fault.kind) {
            (Some(role), kind) => J::heal_one(self, role, fault.index, kind),
            (None, Kind::EtcdPause) => self.etcd.signal(fault.index as usize, Signal::SIGCONT),
            (None, Kind::EtcdStall) => self.etcd.signal_all(Signal::SIGCONT),
            (None, Kind::EtcdKill | Kind::EtcdKillLeader) => self.etcd.start_missing(),
            (None, other) => {
                if !J::heal_elsewhere(self, other) {
                    return false;
                }
            }
        }
        self.log(&format!("healed: {fault}"));
        true
    }
}
