//! The environment variables of workers: those of torchrun, of TensorFlow, and our own.

use serde::{Deserialize, Serialize};
use serde_json::json;
use steadfast_agent_core::round::Past;
use steadfast_common::ids::NodeId;
use steadfast_common::records::rendezvous::{MemberRecord, RoundRecord};

use crate::ports::NodePorts;

/// What the nodes of a round tell each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeInfo {
    #[serde(flatten)]
    pub ports: NodePorts,
    #[serde(flatten)]
    pub past: Past,
}

/// A round, as one of its members sees it.
#[derive(Clone, Debug)]
pub(crate) struct RoundPlacement {
    pub record: RoundRecord,
    /// The ports of each member, by rank.
    pub ports: Vec<NodePorts>,
    /// Tells how earlier rounds ended for all members.
    pub past: Past,
    /// The rank of this node.
    pub rank: usize,
}

/// What stays the same in all rounds.
#[derive(Clone, Debug)]
pub(crate) struct Fixed {
    pub job: String,
    pub node: NodeId,
    /// The most workers of a round, if there is a limit.
    pub workers_max: Option<u32>,
    pub restarts_max: u32,
    /// The role of the workers, for their own use.
    pub role: String,
    /// Where workers reach their agent.
    pub agent_address: String,
}

impl RoundPlacement {
    pub fn own(&self) -> &MemberRecord {
        &self.record.members[self.rank]
    }

    /// Returns the host and port of the round's first worker, at which the others meet.
    pub fn master(&self) -> (&str, u16) {
        let first = &self.ports[0];
        (first.host.trim_start_matches('[').trim_end_matches(']'), first.master)
    }

    /// Returns the environment of one worker of this node.
    pub fn environment(
        &self,
        fixed: &Fixed,
        local_rank: u32,
        restarts: u32,
    ) -> Vec<(String, String)> {
        let (record, own) = (&self.record, self.own());
        let (master, port) = self.master();
        let rank = own.first_rank + local_rank;
        let mut variables: Vec<(String, String)> = Vec::new();
        let mut set = |name: &str, value: String| variables.push((name.to_owned(), value));
        for (name, value) in [
            ("RANK", rank),
            ("LOCAL_RANK", local_rank),
            ("WORLD_SIZE", record.world_size),
            ("LOCAL_WORLD_SIZE", own.slots),
            ("GROUP_RANK", self.rank as u32),
            ("GROUP_WORLD_SIZE", record.members.len() as u32),
            ("ROLE_RANK", rank),
            ("ROLE_WORLD_SIZE", record.world_size),
            ("TORCHELASTIC_RESTART_COUNT", restarts),
            ("TORCHELASTIC_MAX_RESTARTS", fixed.restarts_max),
            ("WORKER_NUM", record.world_size),
        ] {
            set(name, value.to_string());
        }
        if let Some(workers_max) = fixed.workers_max {
            set("MAX_WORKER_NUM", workers_max.to_string());
        }
        set("ROLE_NAME", fixed.role.clone());
        set("TORCHELASTIC_RUN_ID", fixed.job.clone());
        // Workers make their own store at the address above: the agent has none.
        set("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned());
        set("MASTER_ADDR", master.to_owned());
        set("MASTER_PORT", port.to_string());
        set("TF_CONFIG", self.tf_config(rank));
        set("STEADFAST_AGENT", fixed.agent_address.clone());
        set("STEADFAST_JOB", fixed.job.clone());
        set("STEADFAST_NODE", fixed.node.to_string());
        set("STEADFAST_ROUND", record.round.to_string());
        variables
    }

    /// Returns the cluster as TensorFlow's `TF_CONFIG` describes it, with one server for each worker.
    fn tf_config(&self, rank: u32) -> String {
        let servers = self
            .ports
            .iter()
            .flat_map(|node| node.workers.iter().map(|port| format!("{}:{port}", node.host)));
        let servers: Vec<String> = servers.collect();
        let task = json!({ "type": "worker", "index": rank });
        json!({ "cluster": { "worker": servers }, "task": task }).to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use steadfast_common::ids::{Incarnation, Round};

    use super::*;

    fn placement() -> RoundPlacement {
        let node = |id: u128| NodeId(uuid(id));
        let member = |id: u128, slots, first_rank| MemberRecord {
            node: node(id),
            incarnation: Incarnation(1),
            address: format!("host{id}:1"),
            slots,
            first_rank,
        };
        let ports = |host: &str, workers: &[u16], master| NodePorts {
            host: host.to_owned(),
            workers: workers.to_vec(),
            master,
        };
        let members = vec![member(1, 2, 0), member(2, 1, 2)];
        RoundPlacement {
            record: RoundRecord { round: Round(7), world_size: 3, members, data: None },
            ports: vec![ports("[fd00::1]", &[5, 6], 9), ports("b", &[8], 10)],
            past: Past::default(),
            rank: 1,
        }
    }

    fn uuid(id: u128) -> uuid::Uuid {
        uuid::Uuid::from_u128(id)
    }

    /// S003-22: a worker finds its rank, the group, and where to meet the others, in the variables of torchrun
    /// and of TensorFlow.
    #[test]
    fn a_worker_gets_the_variables_of_torchrun_and_of_tensorflow() {
        let job = "ddp".to_owned();
        let agent_address = String::new();
        let (role, workers_max) = ("trainer".to_owned(), Some(4));
        let fixed =
            Fixed { job, node: NodeId(uuid(2)), workers_max, restarts_max: 3, role, agent_address };
        let variables = placement().environment(&fixed, 0, 1);
        let variables: BTreeMap<&str, &str> =
            variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        for (name, expected) in [
            ("RANK", "2"),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "1"),
            ("GROUP_RANK", "1"),
            ("MASTER_ADDR", "fd00::1"),
            ("MASTER_PORT", "9"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("ROLE_NAME", "trainer"),
            ("MAX_WORKER_NUM", "4"),
            ("STEADFAST_ROUND", "7"),
        ] {
            assert_eq!(variables[name], expected, "{name}");
        }
        let config: serde_json::Value = serde_json::from_str(variables["TF_CONFIG"]).unwrap();
        let workers = json!(["[fd00::1]:5", "[fd00::1]:6", "b:8"]);
        let task = json!({ "type": "worker", "index": 2 });
        assert_eq!(config, json!({ "cluster": { "worker": workers }, "task": task }));
    }
}
