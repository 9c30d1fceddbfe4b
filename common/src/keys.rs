//! Every key of a job in etcd. No other file spells one.

use crate::ids::{Generation, Pass, Slot, TaskId, TrainerId};

/// The root under which the keys of one job lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    root: String,
}

impl Keys {
    /// Keys below `/jobs/<name>`.
    pub fn of_job(name: &str) -> Self {
        Self { root: format!("/jobs/{name}") }
    }

    /// Keys below `root`; the empty root gives the bare layout (`/ps_desired`, `/ps/0`, …).
    pub fn below(root: &str) -> Self {
        Self { root: root.trim_end_matches('/').to_owned() }
    }

    /// What all keys of the job begin with.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// The accepted job: spec, digest, store. Never changes.
    pub fn job(&self) -> String {
        format!("{}/job", self.root)
    }

    /// The numerics fingerprint that all trainers must have.
    pub fn numerics(&self) -> String {
        format!("{}/numerics", self.root)
    }

    /// Held by the acting master; its create-revision fences every write.
    pub fn master_lock(&self) -> String {
        format!("{}/master/lock", self.root)
    }

    /// Where the acting master listens.
    pub fn master_addr(&self) -> String {
        format!("{}/master/addr", self.root)
    }

    /// Number of pserver slots.
    pub fn ps_desired(&self) -> String {
        format!("{}/ps_desired", self.root)
    }

    /// What all slot keys begin with.
    pub fn ps_prefix(&self) -> String {
        format!("{}/ps/", self.root)
    }

    /// One pserver slot.
    pub fn ps(&self, slot: Slot) -> String {
        format!("{}/ps/{slot}", self.root)
    }

    /// The slot that a key below [`Keys::ps_prefix`] names.
    pub fn slot_of(&self, key: &str) -> Option<Slot> {
        key.strip_prefix(&self.ps_prefix())?.parse().ok().map(Slot)
    }

    /// What all trainer keys begin with.
    pub fn trainers_prefix(&self) -> String {
        format!("{}/trainers/", self.root)
    }

    /// One live trainer.
    pub fn trainer(&self, id: TrainerId) -> String {
        format!("{}/trainers/{id}", self.root)
    }

    /// The trainer that a key below [`Keys::trainers_prefix`] names.
    pub fn trainer_of(&self, key: &str) -> Option<TrainerId> {
        key.strip_prefix(&self.trainers_prefix())?.parse().ok().map(TrainerId)
    }

    /// The current generation, its slots and its starting point.
    pub fn generation(&self) -> String {
        format!("{}/generation", self.root)
    }

    /// What the keys of all generations begin with.
    pub fn generations_prefix(&self) -> String {
        format!("{}/generations/", self.root)
    }

    /// One generation, kept for the record.
    pub fn generation_record(&self, generation: Generation) -> String {
        format!("{}{:06}", self.generations_prefix(), generation.0)
    }

    /// Who gives the parameters their first values, and whether that is done.
    pub fn init(&self) -> String {
        format!("{}/init", self.root)
    }

    /// What all task keys begin with.
    pub fn tasks_prefix(&self) -> String {
        format!("{}/tasks/", self.root)
    }

    /// Head of the task queues: round, pass, cursor.
    pub fn queue(&self) -> String {
        format!("{}/tasks/queue", self.root)
    }

    /// What the task keys of one round begin with. A round is one pass over the queue; going back
    /// to a checkpoint begins another, so that keys of the abandoned one cannot be mistaken.
    pub fn round_prefix(&self, round: u64) -> String {
        format!("{}/tasks/{round:06}/", self.root)
    }

    /// One task that is not simply waiting or done.
    pub fn task(&self, round: u64, task: TaskId) -> String {
        format!("{}{:08}", self.round_prefix(round), task.0)
    }

    /// The task that a key below [`Keys::round_prefix`] names.
    pub fn task_of(&self, round: u64, key: &str) -> Option<TaskId> {
        key.strip_prefix(&self.round_prefix(round))?.parse().ok().map(TaskId)
    }

    /// What the keys of all tasks that were given up begin with (asynchronous mode).
    pub fn given_up_prefix(&self) -> String {
        format!("{}/given_up/", self.root)
    }

    /// A task that was given up in a pass, and why.
    pub fn given_up(&self, pass: Pass, task: TaskId) -> String {
        format!("{}{:06}/{:08}", self.given_up_prefix(), pass.0, task.0)
    }

    /// The pass and the task that a key below [`Keys::given_up_prefix`] names.
    pub fn given_up_of(&self, key: &str) -> Option<(Pass, TaskId)> {
        let (pass, task) = key.strip_prefix(&self.given_up_prefix())?.split_once('/')?;
        Some((Pass(pass.parse().ok()?), TaskId(task.parse().ok()?)))
    }

    /// What all remembered replies begin with.
    pub fn replies_prefix(&self) -> String {
        format!("{}/tasks/replies/", self.root)
    }

    /// The last reply to one trainer, for its retries.
    pub fn reply(&self, trainer: TrainerId) -> String {
        format!("{}{trainer}", self.replies_prefix())
    }

    /// The latest evaluation on held-out data.
    pub fn evaluation(&self) -> String {
        format!("{}/evaluation", self.root)
    }

    /// What all checkpoint manifests begin with.
    pub fn checkpoints_prefix(&self) -> String {
        format!("{}/checkpoints/", self.root)
    }

    /// One checkpoint's manifest.
    pub fn checkpoint(&self, id: &str) -> String {
        format!("{}/checkpoints/{id}", self.root)
    }

    /// The id of the newest committed checkpoint.
    pub fn checkpoint_latest(&self) -> String {
        format!("{}/checkpoints/latest", self.root)
    }

    /// How the job ended. Once it exists, every process of the job exits.
    pub fn result(&self) -> String {
        format!("{}/result", self.root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S004-3: the bare layout of the source document stays available.
    #[test]
    fn the_empty_root_gives_the_bare_layout() {
        let keys = Keys::below("/");
        assert_eq!(keys.ps_desired(), "/ps_desired");
        assert_eq!(keys.ps(Slot(0)), "/ps/0");
        assert_eq!(keys.master_addr(), "/master/addr");
        assert_eq!(keys.master_lock(), "/master/lock");
    }

    #[test]
    fn a_key_that_names_no_number_names_no_slot() {
        let keys = Keys::of_job("digits");
        assert_eq!(keys.slot_of("/jobs/digits/ps/7"), Some(Slot(7)));
        assert_eq!(keys.slot_of("/jobs/digits/ps/x"), None);
        assert_eq!(keys.slot_of("/jobs/other/ps/7"), None);
        assert_eq!(keys.task_of(3, &keys.task(3, TaskId(41))), Some(TaskId(41)));
        assert_eq!(keys.task_of(4, &keys.task(3, TaskId(41))), None);
        let given_up = keys.given_up(Pass(2), TaskId(41));
        assert_eq!(keys.given_up_of(&given_up), Some((Pass(2), TaskId(41))));
    }
}
