//! What a process is in a job, as certificates and access rules say it.

use std::fmt;

/// A kind of process, or a person who looks after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    Master,
    Pserver,
    Trainer,
    /// Whoever may change what a job does.
    Admin,
}

/// The DNS name that every certificate of a job has.
pub const ANY_ROLE: &str = "steadfast";

impl Role {
    pub const ALL: [Self; 4] = [Self::Master, Self::Pserver, Self::Trainer, Self::Admin];

    /// `master`, `pserver`, …
    pub fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::Pserver => "pserver",
            Self::Trainer => "trainer",
            Self::Admin => "admin",
        }
    }

    /// The DNS name that certificates of this role have. It is no name of a machine: processes move,
    /// and what matters is what they are.
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
