//! Where the hosts of a job come from: a fixed list, or a script.

use steadfast_common::error::ErrorKind;

use crate::hosts::{Host, HostsError, parse_list};

/// The fewest hosts of a fixed list: with one, no agent is left when its host fails.
const FIXED_MIN: usize = 2;

/// Where the hosts come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A list of hosts that does not change.
    Fixed(Vec<Host>),
    /// A command whose output lists them.
    Script(String),
}

/// Why the hosts of a job are not known. The texts with a capital letter are those of `horovodrun`, which
/// scripts look for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    #[error("Cannot run in fault tolerance mode with fewer than 2 hosts.")]
    TooFewHosts,
    #[error("One of --host-discovery-script, --hosts, or --hostnames must be provided")]
    Missing,
    #[error("--hosts and --host-discovery-script exclude each other; give one of them")]
    Both,
    #[error(transparent)]
    Hosts(#[from] HostsError),
}

impl SourceError {
    /// Returns what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}

impl Source {
    /// Returns the source that `--hosts` and `--host-discovery-script` name.
    ///
    /// # Errors
    /// If none or both are given, or the list is invalid or has fewer than two hosts.
    pub fn of(
        hosts: Option<&str>,
        script: Option<&str>,
        default_slots: u32,
    ) -> Result<Self, SourceError> {
        match (hosts, script) {
            (None, None) => Err(SourceError::Missing),
            (Some(_), Some(_)) => Err(SourceError::Both),
            (None, Some(script)) => Ok(Self::Script(script.to_owned())),
            (Some(hosts), None) => match parse_list(hosts, default_slots)? {
                hosts if hosts.len() < FIXED_MIN => Err(SourceError::TooFewHosts),
                hosts => Ok(Self::Fixed(hosts)),
            },
        }
    }
}
