//! The shape of an elastic job, and the command that repeats its run.

use std::ops::Range;
use std::path::PathBuf;

use crate::faults::{Kind, Role, Schedule, Targets};

/// The processes of an elastic job, and its program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElasticShape {
    pub etcd: u32,
    pub masters: u32,
    /// Number of nodes at the start.
    pub agents: u32,
    /// Number of nodes that a schedule can add.
    pub spares: u32,
    /// Number of workers of each node.
    pub workers: u32,
    /// Lease TTL in seconds.
    pub lease_ttl_s: u32,
    /// Number of steps that the job trains.
    pub steps: u64,
    /// A Python that has PyTorch and the package `steadfast`.
    pub python: PathBuf,
}

impl ElasticShape {
    /// Returns the number of nodes that there can be at once.
    pub fn nodes_max(&self) -> u32 {
        self.agents + self.spares
    }

    /// Returns the command that repeats a schedule in a world of this shape.
    pub fn command(&self, seed: Option<u64>, schedule: &Schedule) -> String {
        format!(
            "target/release/chaos --mode elastic --seed {} --etcd {} --masters {} --agents {} --spares {} \
             --workers {} --lease-ttl {} --steps {} --python {} --schedule '{schedule}'",
            seed.unwrap_or_default(),
            self.etcd,
            self.masters,
            self.agents,
            self.spares,
            self.workers,
            self.lease_ttl_s,
            self.steps,
            self.python.display(),
        )
    }
}

impl Targets for ElasticShape {
    fn roles(&self, kind: Kind) -> &[Role] {
        match kind {
            Kind::Leave | Kind::Join => &[Role::Agent],
            // A worker has no connection to etcd.
            Kind::Cut => &[Role::Master, Role::Agent],
            _ => &Role::ELASTIC,
        }
    }

    fn indexes(&self, kind: Kind, role: Role) -> Range<u32> {
        match role {
            Role::Master => 0..self.masters,
            // A node that left comes back by itself.
            Role::Agent if kind == Kind::Join => self.agents..self.nodes_max().max(self.agents + 1),
            Role::Agent => 0..self.nodes_max(),
            Role::Worker => 0..self.nodes_max() * self.workers,
            Role::Pserver | Role::Trainer => 0..0,
        }
    }

    fn etcd(&self) -> u32 {
        self.etcd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_schedule_of_an_elastic_job_has_only_faults_that_are_possible() {
        let shape = ElasticShape {
            etcd: 3,
            masters: 2,
            agents: 3,
            spares: 1,
            workers: 2,
            lease_ttl_s: 2,
            steps: 100,
            python: PathBuf::new(),
        };
        let schedule = Schedule::random(5, 300, &Kind::ELASTIC, &shape);
        assert_eq!(schedule.to_string().parse::<Schedule>().as_ref(), Ok(&schedule));
        for event in schedule.events {
            let fault = event.fault;
            match (fault.kind, fault.role) {
                (Kind::Join, role) => assert_eq!((role, fault.index), (Some(Role::Agent), 3)),
                (_, Some(role)) => assert!(shape.indexes(fault.kind, role).contains(&fault.index)),
                (_, None) => assert!(fault.index < shape.etcd),
            }
        }
    }
}
