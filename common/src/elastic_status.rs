//! The status of an elastic job. The command-line tool, `/status` and the page all render this structure.

use serde::{Deserialize, Serialize};

use crate::elastic::ElasticKind;
use crate::ids::{Incarnation, NodeId, Round};
use crate::records::ResultRecord;
use crate::status::{MasterStatus, TimelineEvent};

/// An elastic job at one point in time, as seen by its acting master.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ElasticStatus {
    pub kind: ElasticKind,
    pub job: String,
    pub state: ElasticPhase,
    /// What is blocked, by what, and why; empty if nothing is blocked.
    pub waiting: Vec<String>,
    pub nodes_min: u32,
    pub nodes_max: u32,
    /// The round that was formed last; 0 before the first.
    pub round: Round,
    /// Number of workers of that round.
    pub world_size: u32,
    /// All known nodes: the members of the last round by rank, then the others.
    pub nodes: Vec<NodeStatus>,
    pub master: MasterStatus,
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

/// A node, as the master knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub address: String,
    pub slots: u32,
    pub state: NodePhase,
    /// Its rank in the last round, and that of its first worker.
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

/// The state of a node's workers, as its agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    pub restarts: u32,
    pub restarts_max: u32,
    pub state: String,
}
