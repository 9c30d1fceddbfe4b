//! The records of an elastic job's rendezvous: agents, nodes, and the rounds that the master forms of them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{Incarnation, NodeId, Phase, Round};
use crate::records::commits::{CommitId, RecordOrder};

/// Maximum number of nodes in a round. Its record must fit into one request to etcd.
pub const NODES_MAX: u32 = 2048;

/// Maximum number of workers of one node.
pub const SLOTS_MAX: u32 = 4096;

/// Maximum length of a node's address.
pub const ADDRESS_BYTES_MAX: usize = 255;

/// The tag of the barrier that members enter when all of their workers have succeeded. When it is released,
/// the job has succeeded.
pub const EXIT_TAG: &str = "steadfast.exit";

/// The tag at which the agents of a round tell each other the ports of their workers.
pub const PORTS_TAG: &str = "steadfast.ports";

/// Says how many nodes a round may have; both ends included. It has a multiple of `unit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRange {
    min: u32,
    max: u32,
    unit: u32,
}

impl NodeRange {
    /// Returns the range, if 1 ≤ `min` ≤ `max` ≤ [`NODES_MAX`].
    pub fn new(min: u32, max: u32) -> Option<Self> {
        let is_range = 1 <= min && min <= max && max <= NODES_MAX;
        is_range.then_some(Self { min, max, unit: 1 })
    }

    /// Returns the range of the multiples of `unit`, if both ends are some.
    pub fn in_units_of(self, unit: u32) -> Option<Self> {
        let is_multiple = |nodes: u32| nodes.checked_rem(unit) == Some(0);
        (is_multiple(self.min) && is_multiple(self.max)).then_some(Self { unit, ..self })
    }

    /// Parses `MIN:MAX`, one number for both, or `MIN:MAX:UNIT` for multiples of a number.
    ///
    /// # Errors
    /// A message that says what to use.
    pub fn parse(text: &str) -> Result<Self, String> {
        let form = "as `MIN:MAX`, `MIN:MAX:UNIT` or one number";
        let (min, rest) = text.split_once(':').unwrap_or((text, text));
        let (max, unit) = rest.split_once(':').unwrap_or((rest, "1"));
        let parse = |text: &str| text.parse::<u32>().ok();
        match (parse(min), parse(max), parse(unit)) {
            (Some(min), Some(max), _) if max < min => Err(format!("{min} is more than {max}")),
            (Some(min), Some(max), Some(unit)) => {
                let range = Self::new(min, max);
                let range = range.ok_or_else(|| format!("use numbers from 1 to 2048, {form}"))?;
                range
                    .in_units_of(unit)
                    .ok_or_else(|| format!("{min} and {max} must be multiples of {unit}"))
            }
            _ => Err(format!("use numbers, {form}")),
        }
    }

    /// Returns the fewest nodes of a round.
    pub fn min(self) -> u32 {
        self.min
    }

    /// Returns the most nodes of a round.
    pub fn max(self) -> u32 {
        self.max
    }

    /// Returns the number of which rounds have a multiple of nodes.
    pub fn unit(self) -> u32 {
        self.unit
    }

    /// Returns the largest number of nodes of a round that has no more than `nodes`; 0 if that is too few.
    pub fn whole(self, nodes: usize) -> usize {
        nodes - nodes % self.unit as usize
    }
}

impl fmt::Display for NodeRange {
    /// Writes what [`NodeRange::parse`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { min, max, unit } = self;
        match unit {
            1 => write!(f, "{min}:{max}"),
            unit => write!(f, "{min}:{max}:{unit}"),
        }
    }
}

/// `agents/<uuid>`: a live agent, bound to its lease. The create-revision of the key is the incarnation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRecord {
    /// Names what runs the node's workers, which is the same for all nodes of a job.
    #[serde(default)]
    pub runner: Runner,
    /// `host:port`, at which the other nodes of a round reach this one.
    pub address: String,
    /// Number of workers that the node can run.
    pub slots: u32,
    /// Address of its admin port; empty if it has none.
    #[serde(default)]
    pub admin: String,
    /// `host:port`, which closes when the agent dies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub liveness: Option<String>,
    /// The host on which a launcher started it, under the launcher's name for that host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launched_on: Option<String>,
    /// Ranks the nodes that a round takes in together: lower numbers first, and nodes without one last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<u32>,
}

/// What runs the workers of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Runner {
    /// `steadfast run`.
    #[default]
    Agent,
    Torchrun,
    /// A program that calls the master by itself.
    Program,
}

impl fmt::Display for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Agent => "`steadfast run`",
            Self::Torchrun => "torchrun",
            Self::Program => "programs that call GetClusterSpec",
        })
    }
}

impl AgentRecord {
    /// Creates the registration of a node that has no admin port, no liveness port, no launcher and no order.
    pub fn new(runner: Runner, address: String, slots: u32) -> Self {
        let admin = String::new();
        Self { runner, address, slots, admin, liveness: None, launched_on: None, order: None }
    }

    /// Returns whether the address is `host:port` in visible characters, and not too long.
    pub fn has_valid_address(&self) -> bool {
        let is_plain = |it: u8| it.is_ascii_graphic() && it != b'"' && it != b'\\';
        let parts = self.address.rsplit_once(':');
        parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
            && self.address.len() <= ADDRESS_BYTES_MAX
            && self.address.bytes().all(is_plain)
    }
}

/// `rendezvous/nodes/<uuid>`: what the master knows of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    pub incarnation: Incarnation,
    pub address: String,
    pub slots: u32,
    /// The [`AgentRecord::order`] of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<u32>,
    #[serde(flatten)]
    pub state: NodeState,
}

impl NodeRecord {
    /// Returns the key by which nodes are ranked that were not in the last round together.
    pub fn seniority(&self) -> (u32, Incarnation) {
        (self.order.unwrap_or(u32::MAX), self.incarnation)
    }
}

/// What a node asked for last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "state")]
pub enum NodeState {
    /// It announced that it is starting.
    Starting,
    /// It asked to be in a round later than `after`: it waits, or is a member of such a round.
    Asked { after: Round },
    /// Others waited for it, and it did not ask in time.
    Late,
}

/// `rendezvous/round`: the round that was formed last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundRecord {
    pub round: Round,
    /// Number of workers of all members.
    pub world_size: u32,
    /// The members, by rank.
    pub members: Vec<MemberRecord>,
    /// The state that its workers begin with; absent unless the job counts records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<RoundData>,
}

/// The state that the workers of a round begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundData {
    /// The number of records of a pass.
    pub records: u64,
    /// Says how they are dealt to workers.
    #[serde(default, skip_serializing_if = "RecordOrder::is_fixed")]
    pub order: RecordOrder,
    /// The last commit that was decided before the round, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<CommitId>,
}

impl RoundRecord {
    /// Returns the cluster as TensorFlow's `TF_CONFIG` describes it, without the index of a task.
    pub fn cluster_spec(&self) -> String {
        let workers: Vec<&str> = self.members.iter().map(|it| it.address.as_str()).collect();
        serde_json::json!({ "cluster": { "worker": workers } }).to_string()
    }
}

/// A node of a round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    pub node: NodeId,
    pub incarnation: Incarnation,
    pub address: String,
    pub slots: u32,
    /// The rank of its first worker; the others follow.
    pub first_rank: u32,
}

/// `rendezvous/tags/<round>/<tag>/released`: the last phase of a tag that was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseRecord {
    pub phase: Phase,
}

/// `rendezvous/shared`: what the members of a rendezvous in a protocol of their own share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedRecord {
    /// Counts the changes.
    pub token: u64,
    #[serde(with = "super::base64_text")]
    pub state: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn round(members: u32, address: &str) -> RoundRecord {
        let member = |rank: u32| MemberRecord {
            node: NodeId(Uuid::from_u128(u128::from(rank))),
            incarnation: Incarnation(i64::MAX),
            address: address.to_owned(),
            slots: SLOTS_MAX,
            first_rank: rank * SLOTS_MAX,
        };
        RoundRecord {
            round: Round(u64::MAX),
            world_size: members * SLOTS_MAX,
            members: (0..members).map(member).collect(),
            data: Some(RoundData {
                records: u64::MAX,
                order: RecordOrder::Dynamic,
                commit: Some(CommitId { round: Round(u64::MAX), phase: Phase(u64::MAX) }),
            }),
        }
    }

    /// S004-26: the largest round fits into one request to etcd, of 1.5 MiB.
    #[test]
    fn the_largest_round_is_one_value() {
        let largest = round(NODES_MAX, &"a".repeat(ADDRESS_BYTES_MAX));
        let bytes = serde_json::to_vec(&largest).unwrap().len();
        assert!(bytes < 1024 * 1024, "{bytes} bytes");
    }

    /// S003-1: the cluster is a string, without the index of a task.
    #[test]
    fn the_cluster_spec_lists_the_addresses_by_rank() {
        let mut record = round(2, "a:1");
        record.members[1].address = "b:2".to_owned();
        assert_eq!(record.cluster_spec(), r#"{"cluster":{"worker":["a:1","b:2"]}}"#);
    }

    #[test]
    fn the_record_of_a_node_reads_well_in_etcdctl() {
        let state = NodeState::Asked { after: Round(4) };
        let (incarnation, address, order) = (Incarnation(9), "a:1".to_owned(), None);
        let record = NodeRecord { incarnation, address, slots: 8, order, state };
        let text = r#"{"incarnation":9,"address":"a:1","slots":8,"state":"asked","after":4}"#;
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        assert_eq!(serde_json::from_str::<NodeRecord>(text).unwrap(), record);
    }

    #[test]
    fn an_address_has_a_host_and_a_port() {
        let is_valid = |address: &str| {
            let address = address.to_owned();
            AgentRecord::new(Runner::Agent, address, 1).has_valid_address()
        };
        assert!(is_valid("host:1") && is_valid("[fd00::1]:65535"));
        let long = format!("{}:1", "a".repeat(ADDRESS_BYTES_MAX));
        for address in ["", "host", ":1", "host:", "host:65536", "a b:1", "a\"b:1", &long] {
            assert!(!is_valid(address), "{address}");
        }
    }

    #[test]
    fn a_range_of_nodes_is_neither_empty_nor_too_large() {
        assert!(NodeRange::new(1, NODES_MAX).is_some());
        for (min, max) in [(0, 1), (2, 1), (1, NODES_MAX + 1)] {
            assert_eq!(NodeRange::new(min, max), None);
        }
    }

    #[test]
    fn numbers_of_nodes_are_a_range_or_one_number() {
        let range = |min, max| Ok(NodeRange::new(min, max).unwrap());
        assert_eq!(NodeRange::parse("1:4"), range(1, 4));
        assert_eq!(NodeRange::parse("2"), range(2, 2));
        let pairs = NodeRange::parse("2:6:2").unwrap();
        assert_eq!((pairs.unit(), pairs.whole(5), pairs.whole(1)), (2, 4, 0));
        assert_eq!(
            (pairs.to_string(), range(1, 4).unwrap().to_string()),
            ("2:6:2".into(), "1:4".into())
        );
        for text in ["", "4:1", "0:1", "a", "1:", "1:2:3", "2:5:2", "2:4:0", "2:4:", "1:9999"] {
            assert!(NodeRange::parse(text).is_err(), "{text}");
        }
    }
}
