//! Rules of the workers of an elastic job: who takes part in which round, and what a success needs.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{NodeId, Round};
use steadfast_common::records::rendezvous::{MemberRecord, RoundRecord};

use crate::net::Machine;
use crate::world::ProcessId;

/// What the workers and agents of a job have been seen to do.
#[derive(Debug, Default)]
pub struct WorkersSeen {
    /// The workers that take part in a round.
    taking_part: BTreeMap<ProcessId, (Machine, Round)>,
    /// The worker of each rank of each round.
    ranks: BTreeMap<(Round, u32), ProcessId>,
    /// The local ranks of the workers that have succeeded.
    successes: BTreeMap<(Round, NodeId), BTreeSet<u32>>,
    /// An agent has ended because the job has succeeded.
    pub has_agent_succeeded: bool,
    /// An agent has ended because no restart was left.
    pub has_agent_given_up: bool,
}

impl WorkersSeen {
    /// Notes that a worker takes part in a round; returns the rule that this violates.
    pub fn begin(
        &mut self,
        process: ProcessId,
        machine: Machine,
        round: Round,
        rank: u32,
    ) -> Option<String> {
        let on_machine = self.taking_part.values().filter(|(on, _)| *on == machine);
        let other = on_machine.map(|(_, other)| *other).find(|other| *other != round);
        self.taking_part.insert(process, (machine, round));
        let holder = *self.ranks.entry((round, rank)).or_insert(process);
        match other {
            Some(other) => {
                Some(format!("a worker begins round {round} beside one of round {other}"))
            }
            None if holder != process => Some(format!("two workers had rank {rank} in {round}")),
            None => None,
        }
    }

    /// Notes that a worker takes no part in a round any more.
    pub fn left(&mut self, process: ProcessId) {
        self.taking_part.remove(&process);
    }

    /// Returns the round in which a worker of a machine takes part.
    pub fn takes_part(&self, machine: Machine) -> Option<Round> {
        self.taking_part.values().find(|(on, _)| *on == machine).map(|(_, round)| *round)
    }

    /// Notes that a worker has succeeded.
    pub fn succeed(&mut self, process: ProcessId, round: Round, node: NodeId, local_rank: u32) {
        self.left(process);
        self.successes.entry((round, node)).or_default().insert(local_rank);
    }

    /// Returns the rule that the success of a member of a round violates.
    pub fn unfounded_success(&self, round: Round, member: &MemberRecord) -> Option<String> {
        let (node, slots) = (member.node, member.slots);
        let succeeded = self.successes.get(&(round, node)).map_or(0, BTreeSet::len);
        (succeeded != slots as usize).then(|| {
            format!("node {node} has succeeded in round {round}, but {succeeded} of its {slots} workers have")
        })
    }

    /// Returns the rule that the success of the job in a round violates.
    pub fn unfounded_end(&self, last: &RoundRecord) -> Option<String> {
        last.members.iter().find_map(|member| self.unfounded_success(last.round, member))
    }
}
