//! How large a world is, and the one command that repeats what happened in it.

use steadfast_common::spec::Mode;

use super::{Role, Schedule};
use crate::Job;

/// The processes of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    pub mode: Mode,
    pub etcd: u32,
    pub masters: u32,
    /// Slots.
    pub pservers: u32,
    /// Pservers beyond the slots.
    pub spares: u32,
    pub trainers: u32,
    /// Seconds.
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
    /// How many processes of a role it has.
    pub fn count(&self, role: Role) -> u32 {
        match role {
            Role::Master => self.masters,
            Role::Pserver => self.pservers + self.spares,
            Role::Trainer => self.trainers,
        }
    }

    /// The job that a world of this mode runs: the example, with checkpoints often enough that
    /// going back to one does not undo what the faults let through.
    pub fn job(&self) -> Job {
        match self.mode {
            Mode::Sync => Job::example("digits").with("every = \"10s\"", "every_steps = 40"),
            Mode::Async => Job::asynchronous().with("every = \"10s\"", "every = \"1s\""),
        }
    }

    /// The command that repeats a schedule in such a world.
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
