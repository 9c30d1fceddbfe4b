//! What there is to know of each key of a job: its value, who writes it, and under which condition. The audit of a
//! history, the permissions in etcd, and the tables of docs/protocol.md follow from this table or are checked against
//! it.

use crate::records::keys::Keys;

/// A key, or all keys whose paths differ only in numbers and names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The path below the root of the job; `<…>` stands for any one part of it.
    pub path: &'static str,
    /// The type of the value, which is JSON; `bytes` if it is not.
    pub record: &'static str,
    pub writers: &'static [Writer],
    pub condition: Condition,
    /// Whether the key has the lease of its writer, and is deleted when that writer is lost.
    pub is_leased: bool,
}

/// A process that writes keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    Master,
    Pserver,
    Trainer,
    Agent,
    Launcher,
    Coordinator,
    Operator,
}

/// What a transaction that writes a key compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The key does not exist, or what its writer has read has not changed.
    Compared,
    /// The key does not exist: it is never changed or deleted.
    Absent,
    /// The writer holds the lock of the acting master.
    Fenced,
    /// The writer holds the lock of the acting master; and the key is never changed or deleted.
    FencedOnce,
    /// The writer holds the lock of the launcher.
    FencedByLauncher,
    /// The writer holds the lock of the coordinator.
    FencedByCoordinator,
}

impl Key {
    const fn new(path: &'static str, record: &'static str, condition: Condition) -> Self {
        let writers = match condition {
            Condition::FencedByLauncher => &[Writer::Launcher],
            Condition::FencedByCoordinator => &[Writer::Coordinator],
            Condition::Compared | Condition::Absent | Condition::Fenced | Condition::FencedOnce => {
                [Writer::Master].as_slice()
            }
        };
        Self { path, record, writers, condition, is_leased: false }
    }

    const fn by(self, writers: &'static [Writer]) -> Self {
        Self { writers, ..self }
    }

    const fn leased(self) -> Self {
        Self { is_leased: true, ..self }
    }

    /// Returns whether only the acting master may write the key.
    pub fn is_fenced(&self) -> bool {
        match self.condition {
            Condition::Fenced | Condition::FencedOnce => true,
            Condition::Compared
            | Condition::Absent
            | Condition::FencedByLauncher
            | Condition::FencedByCoordinator => false,
        }
    }

    /// Returns whether the key is never changed or deleted once it exists.
    pub fn is_final(&self) -> bool {
        match self.condition {
            Condition::Absent | Condition::FencedOnce => true,
            Condition::Compared
            | Condition::Fenced
            | Condition::FencedByLauncher
            | Condition::FencedByCoordinator => false,
        }
    }

    fn matches(&self, path: &str) -> bool {
        let (mut ours, mut theirs) = (self.path.split('/'), path.split('/'));
        loop {
            match (ours.next(), theirs.next()) {
                (None, None) => return true,
                (Some(part), Some(found)) if part == found => {}
                (Some(part), Some(found)) if part.starts_with('<') && !found.is_empty() => {}
                _ => return false,
            }
        }
    }

    /// Returns the longest prefix, below `keys`, that all keys of this row have; the key itself if there is one only.
    pub fn prefix(&self, keys: &Keys) -> String {
        let fixed = self.path.split_once('<').map_or(self.path, |(fixed, _)| fixed);
        format!("{}/{fixed}", keys.root())
    }
}

/// All keys of a job. A row with names stands below those without.
pub const KEYS: &[Key] = {
    use Condition::{Absent, Compared, Fenced, FencedByCoordinator, FencedByLauncher, FencedOnce};
    use Writer::{Agent, Master, Operator, Pserver, Trainer};
    &[
        Key::new("job", "AnyJobRecord", Absent).by(&[Master, Operator]),
        Key::new("numerics", "String", Absent).by(&[Trainer]),
        Key::new("code", "CodeRecord", Compared).by(&[Trainer]),
        Key::new("fixed", "FixedRecord", Compared).by(&[Trainer]),
        Key::new("master/lock", "LockRecord", Compared).leased(),
        Key::new("master/addr", "MasterRecord", Fenced).leased(),
        Key::new("master/waits", "WaitsRecord", Fenced).leased(),
        Key::new("ps_desired", "u32", Compared).by(&[Master, Operator]),
        Key::new("trainers_desired", "ScaleRecord", Fenced),
        Key::new("ps/<index>", "PserverRecord", Compared).by(&[Pserver]).leased(),
        Key::new("followers/<index>", "FollowerRecord", Compared).by(&[Pserver]).leased(),
        Key::new("trainers/<uuid>", "TrainerRecord", Compared).by(&[Trainer]).leased(),
        Key::new("generation", "GenerationRecord", Fenced),
        Key::new("generations/<number>", "GenerationRecord", FencedOnce),
        Key::new("init", "InitRecord", Fenced),
        Key::new("tasks/queue", "QueueRecord", Fenced),
        Key::new("tasks/replies/<uuid>", "ReplyRecord", Fenced),
        Key::new("tasks/<round>/<task>", "TaskRecord", Fenced),
        Key::new("given_up/<task>", "GivenUpRecord", Fenced),
        Key::new("stream/head", "StreamRecord", Fenced),
        Key::new("stream/passes/<pass>", "StreamPassRecord", Fenced),
        Key::new("evaluation", "EvaluationRecord", Fenced).by(&[Master, Operator]),
        Key::new("checkpoints/latest", "String", Fenced),
        Key::new("checkpoints/<id>", "CheckpointRecord", Fenced),
        Key::new("agents/<id>", "AgentRecord", Compared).by(&[Agent, Master]).leased(),
        Key::new("rendezvous/workers_desired", "ScaleRecord", Fenced),
        Key::new("rendezvous/nodes/<id>", "NodeRecord", Fenced),
        Key::new("rendezvous/round", "RoundRecord", Fenced),
        Key::new("rendezvous/commit", "CommitRecord", Fenced),
        Key::new("rendezvous/dealt/<round>/<id>", "DealtRecord", Fenced),
        Key::new("rendezvous/shared", "SharedRecord", Fenced),
        Key::new("rendezvous/tags/<round>/<tag>/released", "ReleaseRecord", Fenced),
        Key::new("rendezvous/tags/<round>/<tag>/<phase>/<id>", "bytes", Fenced),
        Key::new("launch/lock", "LockRecord", Compared).by(&[Writer::Launcher]).leased(),
        Key::new("launch/state", "LauncherRecord", FencedByLauncher),
        Key::new("launch/hosts/<host>", "HostRecord", FencedByLauncher),
        Key::new("coordinator/lock", "LockRecord", Compared).by(&[Writer::Coordinator]).leased(),
        Key::new("coordinator/pushes", "PushesRecord", FencedByCoordinator),
        Key::new("coordinator/workers/<uuid>", "WorkerRecord", Compared).by(&[Trainer]).leased(),
        Key::new("coordinator/results/<name>", "ClosureRecord", FencedByCoordinator),
        Key::new("result", "ResultRecord", FencedOnce).by(&[Master, Operator]),
    ]
};

impl Keys {
    /// Returns the row of a key; `None` if it is not a key of this job.
    pub fn row_of(&self, key: &str) -> Option<&'static Key> {
        let path = key.strip_prefix(self.root())?.strip_prefix('/')?;
        KEYS.iter().find(|row| row.matches(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Generation, NodeId, Pass, Phase, Round, Slot, TaskId, TrainerId};

    #[test]
    fn each_key_has_its_row() {
        let keys = Keys::of_job("digits");
        let (trainer, node) = (TrainerId(uuid::Uuid::nil()), NodeId(uuid::Uuid::nil()));
        let all = [
            keys.job(),
            keys.numerics(),
            keys.code(),
            keys.fixed(),
            keys.master_lock(),
            keys.master_addr(),
            keys.master_waits(),
            keys.ps_desired(),
            keys.trainers_desired(),
            keys.ps(Slot(0)),
            keys.follower(Slot(0)),
            keys.trainer(trainer),
            keys.generation(),
            keys.generation_record(Generation(1)),
            keys.init(),
            keys.queue(),
            keys.reply(trainer),
            keys.task(1, TaskId(2)),
            keys.given_up(TaskId(2)),
            keys.stream(),
            keys.stream_pass(Pass(3)),
            keys.evaluation(),
            keys.checkpoint_latest(),
            keys.checkpoint("id"),
            keys.agent(node),
            keys.workers_desired(),
            keys.node(node),
            keys.formed_round(),
            keys.commit(),
            keys.dealt(Round(1), node),
            keys.shared_state(),
            keys.released(Round(1), "exit"),
            keys.entry(Round(1), "exit", Phase(1), node),
            keys.launch_lock(),
            keys.launch_state(),
            keys.launch_host("host"),
            keys.coordinator_lock(),
            keys.closure_pushes(),
            keys.closure_worker(node.0),
            keys.closure_result(&"epoch-3".parse().unwrap()),
            keys.result(),
        ];
        let rows: Vec<&Key> =
            all.iter().map(|key| keys.row_of(key).expect("it has a row")).collect();
        assert_eq!(rows, KEYS.iter().collect::<Vec<_>>());
        for (key, row) in all.iter().zip(rows) {
            assert!(key.starts_with(&row.prefix(&keys)), "{key}");
        }
    }

    #[test]
    fn a_key_of_another_job_has_no_row() {
        let keys = Keys::of_job("digits");
        for key in
            ["/jobs/other/job", "/jobs/digits2/job", "/jobs/digits/ps/", "/jobs/digits/ps/1/x"]
        {
            assert_eq!(keys.row_of(key), None, "{key}");
        }
        assert!(Keys::below("/").row_of("/ps/0").is_some());
    }
}
