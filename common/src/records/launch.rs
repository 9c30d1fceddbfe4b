//! The records of the launcher of an elastic job in etcd. A launcher that is started again finds its agents by them.
//!
//! | key | record |
//! |---|---|
//! | `<root>/launch/state` | [`LauncherRecord`] |
//! | `<root>/launch/hosts/<host>` | [`HostRecord`] |
//!
//! The records hold lengths of time and no points in time: a new launcher, whose clock is another one, begins
//! each wait anew.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::ErrorKind;

/// What a launcher knows of the whole job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LauncherRecord {
    /// Number of agents that were started; the number of the last launch.
    pub launches: u64,
    /// How often the agents changed after they had settled.
    pub resets: u32,
    /// Whether the agents are those that the hosts and the limits ask for. The next change is a reset.
    pub settled: bool,
    /// How the job ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
}

/// What a launcher knows of a host that runs an agent or has failed. Other hosts have no record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// How often its agent failed since the last time that it ran well.
    #[serde(default)]
    pub failures: u32,
    /// The host is on the blacklist for so many milliseconds; `None` if it is not on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cooldown_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<LaunchedAgent>,
}

/// An agent that was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchedAgent {
    /// Which start of an agent this is. An exit of another launch is not the agent's.
    pub launch: u64,
    /// The first launch in a row on this host: the order of hosts, the oldest first.
    pub place: u64,
    /// How many workers the agent runs.
    pub slots: u32,
    #[serde(flatten)]
    pub phase: Phase,
}

/// The phase of an agent.
///
/// ```text
///             started           asked to stop             exited
///   (no agent) ────▶ running ─────────────────▶ stopping ─────────▶ (no agent)
///                    │  ▲                          │
///     exited ◀───────┘  └── started ── restarting ◀┘ exited, if the slots changed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "phase")]
pub enum Phase {
    Running,
    Stopping {
        reason: StopReason,
    },
    /// The agent has exited, and is started again as soon as there are slots for it.
    Restarting,
}

/// Why an agent is asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// Discovery does not list the host any more.
    Removed,
    /// The host has another number of slots: the agent is started again.
    SlotsChanged,
    /// Hosts before this one have all the workers that are allowed.
    Surplus,
    JobEnded,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Removed => "the host is not discovered any more",
            Self::SlotsChanged => "the number of slots has changed",
            Self::Surplus => "older hosts have as many workers as are allowed",
            Self::JobEnded => "the job has ended",
        })
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "result")]
pub enum Outcome {
    /// An agent exited with success.
    Succeeded,
    /// The last agent failed, and every host has failed: all are on the blacklist, or were.
    AllFailed {
        hosts: String,
    },
    TooFewSlots {
        waited_ms: u64,
        shortage: String,
    },
    ResetLimit {
        limit: u32,
    },
    DiscoveryFailed {
        reason: String,
    },
    /// The user ended the job.
    Interrupted,
}

impl Outcome {
    /// Returns the kind of error that the outcome is, which says what the user does next; `None` after a success.
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Succeeded => None,
            Self::AllFailed { .. } => Some(ErrorKind::Internal),
            Self::TooFewSlots { .. } => Some(ErrorKind::NotYet),
            Self::ResetLimit { .. } => Some(ErrorKind::TooLarge),
            Self::DiscoveryFailed { .. } => Some(ErrorKind::Invalid),
            Self::Interrupted => Some(ErrorKind::Unavailable),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Succeeded => f.write_str("the job succeeded"),
            Self::AllFailed { hosts } => write!(f, "the agents of all hosts failed: {hosts}"),
            Self::TooFewSlots { waited_ms, shortage } => {
                write!(f, "too few slots for {} s: {shortage}", waited_ms / 1000)
            }
            Self::ResetLimit { limit } => {
                write!(f, "the agents changed more than {limit} times, the reset limit")
            }
            Self::DiscoveryFailed { reason } => f.write_str(reason),
            Self::Interrupted => f.write_str("the job was interrupted"),
        }
    }
}
