//! The etcd keys of a job. No other file contains their names.

use uuid::Uuid;

use crate::ids::{Generation, NodeId, Pass, Phase, Round, Slot, TaskId, TrainerId};
use crate::records::closures::ClosureName;

/// The prefix of the keys of all jobs, unless they are given other ones.
pub const JOBS: &str = "/jobs/";

/// What a key below [`Keys::tags_prefix`] holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TagKey {
    /// The last phase of the tag that was released.
    Released { tag: String },
    /// The data of a node that entered a phase of the tag.
    Entry { tag: String, phase: Phase, node: NodeId },
}

/// The prefix of the keys of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    root: String,
}

impl Keys {
    /// Creates the keys below `/jobs/<name>`.
    pub fn of_job(name: &str) -> Self {
        Self { root: format!("{JOBS}{name}") }
    }

    /// Creates the keys below `root`; the empty root gives keys without a prefix (`/ps_desired`, `/ps/0`, …).
    pub fn below(root: &str) -> Self {
        Self { root: root.trim_end_matches('/').to_owned() }
    }

    /// Returns the prefix of all keys of the job, without a slash at the end.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// Returns the key of the accepted job: spec, digest, store. The key never changes.
    pub fn job(&self) -> String {
        format!("{}/job", self.root)
    }

    /// Returns the key of the numerics fingerprint that all trainers must have.
    pub fn numerics(&self) -> String {
        format!("{}/numerics", self.root)
    }

    /// Returns the key of the source of the model, with the changes of it that were accepted.
    pub fn code(&self) -> String {
        format!("{}/code", self.root)
    }

    /// Returns the key of the tensors that the model has beside its parameters.
    pub fn fixed(&self) -> String {
        format!("{}/fixed", self.root)
    }

    /// Returns the key that the acting master holds; its create-revision fences the writes of the master.
    pub fn master_lock(&self) -> String {
        format!("{}/master/lock", self.root)
    }

    /// Returns the key of the addresses at which the acting master listens.
    pub fn master_addr(&self) -> String {
        format!("{}/master/addr", self.root)
    }

    /// Returns the key that says what the acting master waits for before it listens.
    pub fn master_waits(&self) -> String {
        format!("{}/master/waits", self.root)
    }

    /// Returns the key of the number of pserver slots.
    pub fn ps_desired(&self) -> String {
        format!("{}/ps_desired", self.root)
    }

    pub fn trainers_desired(&self) -> String {
        format!("{}/trainers_desired", self.root)
    }

    /// Returns the prefix of all slot keys.
    pub fn ps_prefix(&self) -> String {
        format!("{}/ps/", self.root)
    }

    /// Returns the key of one pserver slot.
    pub fn ps(&self, slot: Slot) -> String {
        format!("{}/ps/{slot}", self.root)
    }

    /// Returns the slot that a key below [`Keys::ps_prefix`] names; `None` if it is not such a key.
    pub fn slot_of(&self, key: &str) -> Option<Slot> {
        key.strip_prefix(&self.ps_prefix())?.parse().ok().map(Slot)
    }

    /// Returns the prefix of the followers of all slots.
    pub fn followers_prefix(&self) -> String {
        format!("{}/followers/", self.root)
    }

    /// Returns the key of the spare that follows one slot.
    pub fn follower(&self, slot: Slot) -> String {
        format!("{}/followers/{slot}", self.root)
    }

    /// Returns the slot that a key below [`Keys::followers_prefix`] names; `None` if it is not such a key.
    pub fn followed_slot_of(&self, key: &str) -> Option<Slot> {
        key.strip_prefix(&self.followers_prefix())?.parse().ok().map(Slot)
    }

    /// Returns the prefix of all trainer keys.
    pub fn trainers_prefix(&self) -> String {
        format!("{}/trainers/", self.root)
    }

    /// Returns the key of one live trainer.
    pub fn trainer(&self, id: TrainerId) -> String {
        format!("{}/trainers/{id}", self.root)
    }

    /// Returns the trainer that a key below [`Keys::trainers_prefix`] names; `None` if it is not such a key.
    pub fn trainer_of(&self, key: &str) -> Option<TrainerId> {
        key.strip_prefix(&self.trainers_prefix())?.parse().ok().map(TrainerId)
    }

    /// Returns the prefix of the registrations of all agents.
    pub fn agents_prefix(&self) -> String {
        format!("{}/agents/", self.root)
    }

    /// Returns the key of the registration of one live agent. Its create-revision is the incarnation of the node.
    pub fn agent(&self, node: NodeId) -> String {
        format!("{}{node}", self.agents_prefix())
    }

    /// Returns the node that a key below [`Keys::agents_prefix`] names; `None` if it is not such a key.
    pub fn agent_of(&self, key: &str) -> Option<NodeId> {
        key.strip_prefix(&self.agents_prefix())?.parse().ok().map(NodeId)
    }

    /// Returns the prefix of all keys of a rendezvous.
    pub fn rendezvous_prefix(&self) -> String {
        format!("{}/rendezvous/", self.root)
    }

    /// Returns the prefix of the keys under which the master records what it knows of each node.
    pub fn nodes_prefix(&self) -> String {
        format!("{}/rendezvous/nodes/", self.root)
    }

    /// Returns the key of what the master knows of one node: that it is starting, or asked to be in a round.
    pub fn node(&self, node: NodeId) -> String {
        format!("{}{node}", self.nodes_prefix())
    }

    /// Returns the node that a key below [`Keys::nodes_prefix`] names; `None` if it is not such a key.
    pub fn node_of(&self, key: &str) -> Option<NodeId> {
        key.strip_prefix(&self.nodes_prefix())?.parse().ok().map(NodeId)
    }

    /// Returns the key of the round that was formed last. The key is never deleted, so that numbers of rounds only
    /// increase.
    pub fn formed_round(&self) -> String {
        format!("{}/rendezvous/round", self.root)
    }

    /// Returns the key of the last commit that was decided.
    pub fn commit(&self) -> String {
        format!("{}/rendezvous/commit", self.root)
    }

    /// Returns the key of the number of workers that the rounds of an elastic job are to have.
    pub fn workers_desired(&self) -> String {
        format!("{}/rendezvous/workers_desired", self.root)
    }

    /// Returns the prefix of the records that the members of a round were given.
    pub fn dealt_prefix(&self, round: Round) -> String {
        format!("{}/rendezvous/dealt/{:06}/", self.root, round.0)
    }

    /// Returns the key of the records that one member of a round was given.
    pub fn dealt(&self, round: Round, node: NodeId) -> String {
        format!("{}{node}", self.dealt_prefix(round))
    }

    /// Returns the member that a key below [`Keys::dealt_prefix`] of `round` names; `None` if it is not such a key.
    pub fn dealt_to(&self, round: Round, key: &str) -> Option<NodeId> {
        key.strip_prefix(&self.dealt_prefix(round))?.parse().ok().map(NodeId)
    }

    /// Returns the key of the state that the members of a rendezvous in a protocol of their own share.
    pub fn shared_state(&self) -> String {
        format!("{}/rendezvous/shared", self.root)
    }

    /// Returns the prefix of the tags of all rounds.
    pub fn all_tags_prefix(&self) -> String {
        format!("{}/rendezvous/tags/", self.root)
    }

    /// Returns the round that a key below [`Keys::all_tags_prefix`] belongs to; `None` if it is not such a key.
    pub fn tag_round_of(&self, key: &str) -> Option<Round> {
        let (round, _) = key.strip_prefix(&self.all_tags_prefix())?.split_once('/')?;
        round.parse().ok().map(Round)
    }

    /// Returns the prefix of the tags of one round: its barriers and synchronized values.
    pub fn tags_prefix(&self, round: Round) -> String {
        format!("{}/rendezvous/tags/{:06}/", self.root, round.0)
    }

    /// Returns the key of the last phase of a tag that was released.
    pub fn released(&self, round: Round, tag: &str) -> String {
        format!("{}{tag}/released", self.tags_prefix(round))
    }

    /// Returns the prefix of the entries of one phase of a tag.
    pub fn entries_prefix(&self, round: Round, tag: &str, phase: Phase) -> String {
        format!("{}{tag}/{:06}/", self.tags_prefix(round), phase.0)
    }

    /// Returns the key of the data of one node in one phase of a tag. The value is the bytes themselves, not JSON.
    pub fn entry(&self, round: Round, tag: &str, phase: Phase, node: NodeId) -> String {
        format!("{}{node}", self.entries_prefix(round, tag, phase))
    }

    /// Returns what a key below [`Keys::tags_prefix`] of `round` holds; `None` if it is not such a key. A tag contains
    /// no `/`.
    pub fn tag_key_of(&self, round: Round, key: &str) -> Option<TagKey> {
        let (tag, rest) = key.strip_prefix(&self.tags_prefix(round))?.split_once('/')?;
        let tag = tag.to_owned();
        if rest == "released" {
            return Some(TagKey::Released { tag });
        }
        let (phase, node) = rest.split_once('/')?;
        let (phase, node) = (Phase(phase.parse().ok()?), NodeId(node.parse().ok()?));
        Some(TagKey::Entry { tag, phase, node })
    }

    /// Returns the prefix of all keys of the launcher of an elastic job.
    pub fn launch_prefix(&self) -> String {
        format!("{}/launch/", self.root)
    }

    /// Returns the key that the launcher of an elastic job holds; its create-revision fences every write below
    /// [`Keys::launch_prefix`].
    pub fn launch_lock(&self) -> String {
        format!("{}/launch/lock", self.root)
    }

    /// Returns the key of what the launcher knows of the whole job.
    pub fn launch_state(&self) -> String {
        format!("{}/launch/state", self.root)
    }

    /// Returns the prefix of the keys under which the launcher records what it knows of each host.
    pub fn launch_hosts_prefix(&self) -> String {
        format!("{}/launch/hosts/", self.root)
    }

    /// Returns the key of what the launcher knows of one host: its agent, its failures. A name of a host contains no
    /// `/`.
    pub fn launch_host(&self, host: &str) -> String {
        format!("{}{host}", self.launch_hosts_prefix())
    }

    /// Returns the host that a key below [`Keys::launch_hosts_prefix`] names; `None` if it is not such a key.
    pub fn launch_host_of<'a>(&self, key: &'a str) -> Option<&'a str> {
        key.strip_prefix(&self.launch_hosts_prefix())
    }

    /// Returns the key that the coordinator of closures holds; its create-revision fences every write below
    /// [`Keys::closure_results_prefix`].
    pub fn coordinator_lock(&self) -> String {
        format!("{}/coordinator/lock", self.root)
    }

    /// Returns the prefix of the workers that announce themselves to the coordinator.
    pub fn closure_workers_prefix(&self) -> String {
        format!("{}/coordinator/workers/", self.root)
    }

    /// Returns the key of one such worker.
    pub fn closure_worker(&self, id: Uuid) -> String {
        format!("{}{id}", self.closure_workers_prefix())
    }

    /// Returns the key of the numbers of pushes that the closures of the job may have.
    pub fn closure_pushes(&self) -> String {
        format!("{}/coordinator/pushes", self.root)
    }

    /// Returns the prefix of the results of all closures with a name.
    pub fn closure_results_prefix(&self) -> String {
        format!("{}/coordinator/results/", self.root)
    }

    /// Returns the key of the result of one closure.
    pub fn closure_result(&self, name: &ClosureName) -> String {
        format!("{}{name}", self.closure_results_prefix())
    }

    /// Returns the closure that a key below [`Keys::closure_results_prefix`] names; `None` if it is not such a key.
    pub fn closure_of(&self, key: &str) -> Option<ClosureName> {
        key.strip_prefix(&self.closure_results_prefix())?.parse().ok()
    }

    /// Returns the key of the current generation, its slots and its checkpoint.
    pub fn generation(&self) -> String {
        format!("{}/generation", self.root)
    }

    /// Returns the prefix of the keys of all generations.
    pub fn generations_prefix(&self) -> String {
        format!("{}/generations/", self.root)
    }

    /// Returns the key of one generation, which is kept as history.
    pub fn generation_record(&self, generation: Generation) -> String {
        format!("{}{:06}", self.generations_prefix(), generation.0)
    }

    /// Returns the key that names the trainer that initializes the parameters, and says whether it is done.
    pub fn init(&self) -> String {
        format!("{}/init", self.root)
    }

    /// Returns the prefix of all task keys.
    pub fn tasks_prefix(&self) -> String {
        format!("{}/tasks/", self.root)
    }

    /// Returns the key of the head of the task queues: round, pass, cursor.
    pub fn queue(&self) -> String {
        format!("{}/tasks/queue", self.root)
    }

    /// Returns the prefix of the task keys of one round. A round is one pass over the queue; a rollback to a checkpoint
    /// begins another, which keeps the keys of both apart.
    pub fn round_prefix(&self, round: u64) -> String {
        format!("{}/tasks/{round:06}/", self.root)
    }

    /// Returns the key of one task whose state the queue record does not imply.
    pub fn task(&self, round: u64, task: TaskId) -> String {
        format!("{}{:08}", self.round_prefix(round), task.0)
    }

    /// Returns the round that a key below [`Keys::tasks_prefix`] belongs to; `None` if it is not a key of a round.
    pub fn round_of(&self, key: &str) -> Option<u64> {
        key.strip_prefix(&self.tasks_prefix())?.split_once('/')?.0.parse().ok()
    }

    /// Returns the task that a key below [`Keys::round_prefix`] names; `None` if it is not such a key.
    pub fn task_of(&self, round: u64, key: &str) -> Option<TaskId> {
        key.strip_prefix(&self.round_prefix(round))?.parse().ok().map(TaskId)
    }

    /// Returns the prefix of the keys of all tasks that were given up.
    pub fn given_up_prefix(&self) -> String {
        format!("{}/given_up/", self.root)
    }

    /// Returns the key of one task that was given up: the passes and the reason.
    pub fn given_up(&self, task: TaskId) -> String {
        format!("{}{:08}", self.given_up_prefix(), task.0)
    }

    /// Returns the task that a key below [`Keys::given_up_prefix`] names; `None` if it is not such a key.
    pub fn given_up_of(&self, key: &str) -> Option<TaskId> {
        key.strip_prefix(&self.given_up_prefix())?.parse().ok().map(TaskId)
    }

    /// Returns the prefix of all stored replies.
    pub fn replies_prefix(&self) -> String {
        format!("{}/tasks/replies/", self.root)
    }

    /// Returns the key of the last reply to one trainer, which its retries get again.
    pub fn reply(&self, trainer: TrainerId) -> String {
        format!("{}{trainer}", self.replies_prefix())
    }

    /// Returns the key that says how far the files of a stream were divided into passes.
    pub fn stream(&self) -> String {
        format!("{}/stream/head", self.root)
    }

    /// Returns the prefix of the passes of a stream.
    pub fn stream_passes_prefix(&self) -> String {
        format!("{}/stream/passes/", self.root)
    }

    /// Returns the key of one pass of a stream: its files and its manifest.
    pub fn stream_pass(&self, pass: Pass) -> String {
        format!("{}{:09}", self.stream_passes_prefix(), pass.0)
    }

    /// Returns the pass that a key below [`Keys::stream_passes_prefix`] names; `None` if it is not such a key.
    pub fn stream_pass_of(&self, key: &str) -> Option<Pass> {
        key.strip_prefix(&self.stream_passes_prefix())?.parse().ok().map(Pass)
    }

    /// Returns the key of the latest evaluation on held-out data.
    pub fn evaluation(&self) -> String {
        format!("{}/evaluation", self.root)
    }

    /// Returns the prefix of all checkpoint manifests, and of [`Keys::checkpoint_latest`].
    pub fn checkpoints_prefix(&self) -> String {
        format!("{}/checkpoints/", self.root)
    }

    /// Returns the key of one checkpoint's manifest.
    pub fn checkpoint(&self, id: &str) -> String {
        format!("{}/checkpoints/{id}", self.root)
    }

    /// Returns the key of the id of the newest committed checkpoint.
    pub fn checkpoint_latest(&self) -> String {
        format!("{}/checkpoints/latest", self.root)
    }

    /// Returns the key of the result of the job. Once it exists, every process of the job exits.
    pub fn result(&self) -> String {
        format!("{}/result", self.root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S004-3: the source document's layout without a prefix stays available.
    #[test]
    fn the_empty_root_gives_the_bare_layout() {
        let keys = Keys::below("/");
        assert_eq!(keys.ps_desired(), "/ps_desired");
        assert_eq!(keys.ps(Slot(0)), "/ps/0");
        assert_eq!(keys.master_addr(), "/master/addr");
        assert_eq!(keys.master_waits(), "/master/waits");
        assert_eq!(keys.master_lock(), "/master/lock");
    }

    #[test]
    fn a_key_without_a_number_names_no_slot() {
        let keys = Keys::of_job("digits");
        assert_eq!(keys.slot_of("/jobs/digits/ps/7"), Some(Slot(7)));
        assert_eq!(keys.slot_of("/jobs/digits/ps/x"), None);
        assert_eq!(keys.slot_of("/jobs/other/ps/7"), None);
        assert_eq!(keys.launch_host_of(&keys.launch_host("fd00::1")), Some("fd00::1"));
        assert_eq!(keys.launch_host_of(&keys.launch_state()), None);
        assert_eq!(keys.task_of(3, &keys.task(3, TaskId(41))), Some(TaskId(41)));
        assert_eq!(keys.task_of(4, &keys.task(3, TaskId(41))), None);
        assert_eq!(keys.given_up_of(&keys.given_up(TaskId(41))), Some(TaskId(41)));
        assert_eq!(keys.round_of(&keys.task(3, TaskId(41))), Some(3));
        assert_eq!(keys.round_of(&keys.queue()), None);
        assert_eq!(keys.round_of(&keys.replies_prefix()), None);
    }

    #[test]
    fn a_key_of_a_rendezvous_names_what_it_holds() {
        let keys = Keys::of_job("ddp");
        let (node, round) = (NodeId(uuid::Uuid::from_u128(7)), Round(3));
        assert_eq!(keys.agent_of(&keys.agent(node)), Some(node));
        assert_eq!(keys.node_of(&keys.node(node)), Some(node));
        assert_eq!(keys.node_of(&keys.agent(node)), None);
        let (tag, phase) = ("exit".to_owned(), Phase(12));
        let released = keys.released(round, &tag);
        assert_eq!(released, "/jobs/ddp/rendezvous/tags/000003/exit/released");
        assert_eq!(keys.tag_key_of(round, &released), Some(TagKey::Released { tag: tag.clone() }));
        let entry = keys.entry(round, &tag, phase, node);
        assert_eq!(keys.tag_key_of(Round(4), &entry), None);
        assert_eq!(keys.tag_round_of(&entry), Some(round));
        assert_eq!(keys.tag_round_of(&keys.node(node)), None);
        assert!(entry.starts_with(&keys.rendezvous_prefix()));
        assert_eq!(keys.tag_key_of(round, &entry), Some(TagKey::Entry { tag, phase, node }));
    }
}
