//! Roles in a job, as used in certificates and access rules.

use std::fmt;

/// A kind of process, or an administrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    Master,
    Pserver,
    Trainer,
    /// An administrator of the job.
    Admin,
}

/// The DNS name that every certificate of a job has.
pub const ANY_ROLE: &str = "steadfast";

impl Role {
    pub const ALL: [Self; 4] = [Self::Master, Self::Pserver, Self::Trainer, Self::Admin];

    /// Returns the name of the role, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::Pserver => "pserver",
            Self::Trainer => "trainer",
            Self::Admin => "admin",
        }
    }

    /// Returns the DNS name in certificates of this role. It does not name a machine, because processes
    /// move between machines.
    pub fn dns_name(self) -> &'static str {
        match self {
            Self::Master => "master.steadfast",
            Self::Pserver => "pserver.steadfast",
            Self::Trainer => "trainer.steadfast",
            Self::Admin => "admin.steadfast",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
