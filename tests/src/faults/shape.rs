//! The shape of a world, and the command that repeats its run.

use steadfast_common::spec::Mode;

use super::{Role, Schedule};
use crate::Job;

/// The processes of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    pub mode: Mode,
    pub etcd: u32,
    pub masters: u32,
    /// Number of slots.
    pub pservers: u32,
    /// Number of spare pservers.
    pub spares: u32,
    pub trainers: u32,
    /// Lease TTL in seconds.
    pub lease_ttl_s: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            mode: Mode::Sync,
            etcd: 1,
            masters: 2,
            pservers: 2,
            spares: 1,
            trainers: 3,
            lease_ttl_s: 2,
        }
    }
}

impl Shape {
    /// Returns the number of processes of a role.
    pub fn count(&self, role: Role) -> u32 {
        match role {
            Role::Master => self.masters,
            Role::Pserver => self.pservers + self.spares,
            Role::Trainer => self.trainers,
            Role::Agent | Role::Worker => 0,
        }
    }

    /// Returns the example job of this mode, with checkpoints frequent enough for progress between
    /// rollbacks.
    pub fn job(&self) -> Job {
        match self.mode {
            Mode::Sync => Job::example("digits").with("every = \"10s\"", "every_steps = 40"),
            Mode::Async => Job::asynchronous().with("every = \"10s\"", "every = \"1s\""),
        }
    }

    /// Returns the command that repeats a schedule in a world of this shape.
    pub fn command(&self, seed: Option<u64>, schedule: &Schedule) -> String {
        let mode = match self.mode {
            Mode::Sync => "sync",
            Mode::Async => "async",
        };
        format!(
            "cargo run --release -p steadfast-tests --bin chaos -- --seed {} --mode {mode} --etcd {} \
             --masters {} --pservers {} --spares {} --trainers {} --lease-ttl {} --schedule '{schedule}'",
            seed.unwrap_or_default(),
            self.etcd,
            self.masters,
            self.pservers,
            self.spares,
            self.trainers,
            self.lease_ttl_s,
        )
    }
}
