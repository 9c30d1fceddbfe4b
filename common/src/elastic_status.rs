//! The status of an elastic job. The command-line tool, `/status` and the page all render this structure.

use serde::{Deserialize, Serialize};

use crate::elastic::ElasticKind;
use crate::ids::{Incarnation, NodeId, Round};
use crate::launch::{HostRecord, Outcome};
use crate::records::ResultRecord;
use crate::status::{MasterStatus, TimelineEvent};

/// An elastic job at one point in time, as seen by its acting master or else read from etcd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ElasticStatus {
    pub kind: ElasticKind,
    pub job: String,
    pub state: ElasticPhase,
    /// What is blocked, by what, and why; empty if nothing is blocked.
    pub waiting: Vec<String>,
    /// The nodes that are waited for; only the first few.
    #[serde(default)]
    pub awaited: Vec<NodeId>,
    pub nodes_min: u32,
    pub nodes_max: u32,
    /// The round that was formed last; 0 before the first.
    pub round: Round,
    /// Number of workers of the round that was formed last.
    pub world_size: u32,
    /// All known nodes: the members of the last round by rank, then the others.
    pub nodes: Vec<NodeStatus>,
    /// The launcher, if the job has or had one.
    #[serde(default)]
    pub launcher: Option<LauncherStatus>,
    /// The acting master; absent if it does not answer: the rest is then what etcd holds.
    pub master: Option<MasterStatus>,
    /// Why no master answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Restarts after failures of nodes that are gone, as far as they have reported them to this master.
    #[serde(default)]
    pub restarts_of_gone: u64,
    /// The last failures of workers that agents reported to this master, the latest last.
    #[serde(default)]
    pub exits: Vec<TimelineEvent>,
    /// Timeline of this master's term, the latest event last.
    pub events: Vec<TimelineEvent>,
    pub result: Option<ResultRecord>,
}

/// Phases of an elastic job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElasticPhase {
    /// No round is intact: nodes gather.
    Gathering,
    /// The members of a round run their workers.
    Running,
    Finished,
    Failed,
}

impl ElasticPhase {
    /// Returns the name, for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gathering => "gathering",
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Failed => "failed",
        }
    }
}

/// A node, as the master knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub address: String,
    /// The host on which a launcher started its agent, under the launcher's name for that host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The admin port of its agent; absent for a node without one, or that is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin: Option<String>,
    pub slots: u32,
    pub state: NodePhase,
    /// What its workers do, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<WorkersPhase>,
    /// Since when it has been a member of each round, or since when the master acts, if that is later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_since_unix_ms: Option<u64>,
    /// Rank of the node in the last round, and rank of its first worker.
    pub rank: Option<u32>,
    pub first_rank: Option<u32>,
    /// What its agent reported last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<NodeReport>,
}

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodePhase {
    Starting,
    Waiting,
    Member,
    Late,
    /// A member of the last round that was lost, or left.
    Gone,
}

impl NodePhase {
    /// Returns the name, for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Waiting => "waiting",
            Self::Member => "member",
            Self::Late => "late",
            Self::Gone => "gone",
        }
    }
}

/// What the workers of a member do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkersPhase {
    /// The agent has not reported that they run in this round.
    Starting,
    Running,
    /// All have exited with 0; the node waits for the others.
    Succeeded,
}

impl WorkersPhase {
    /// Returns the name, for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
        }
    }
}

/// The state of a node's workers, as its agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// The round in which the agent reported.
    pub round: Round,
    /// Restarts after failures.
    pub restarts: u32,
    pub restarts_max: u32,
    /// Rounds that ended for the node because others came or went.
    pub changes: u64,
    pub state: String,
    /// Which worker failed last, in which round, and how; empty if none has.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub last_exit: String,
}

impl ElasticStatus {
    /// Returns the number of restarts after failures that agents have reported, including those of nodes that are gone.
    pub fn restarts(&self) -> u64 {
        let reports = self.nodes.iter().filter_map(|node| node.report.as_ref());
        self.restarts_of_gone + reports.map(|report| u64::from(report.restarts)).sum::<u64>()
    }
}

/// What a launcher has recorded in etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LauncherStatus {
    /// Agents that were started.
    pub launches: u64,
    /// How often the set of agents changed after it had settled.
    pub resets: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// The hosts that run an agent or have failed.
    pub hosts: Vec<HostStatus>,
}

impl LauncherStatus {
    pub fn blacklist(&self) -> impl Iterator<Item = &HostStatus> {
        self.hosts.iter().filter(|host| host.record.cooldown_ms.is_some())
    }
}

/// A host of a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    pub host: String,
    #[serde(flatten)]
    pub record: HostRecord,
    /// When the host leaves the blacklist, as the master computes; absent if the host is not on it, or no master
    /// answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blacklisted_until_unix_ms: Option<u64>,
}

impl HostStatus {
    /// Describes how long the host stays on the blacklist, for users: `12 s left`.
    pub fn time_left(&self, now_unix_ms: u64) -> String {
        let seconds = |ms: u64| ms.div_ceil(1000);
        match self.blacklisted_until_unix_ms {
            Some(until) => format!("{} s left", seconds(until.saturating_sub(now_unix_ms))),
            // Records hold no points in time.
            None => format!("at most {} s left", seconds(self.record.cooldown_ms.unwrap_or(0))),
        }
    }
}
