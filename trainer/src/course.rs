//! Follows what the evaluations of a job decided so far, as etcd shows it.

use std::collections::BTreeSet;

use steadfast_common::ids::{TaskId, Version};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::position::Position;
use steadfast_common::records::{EvaluationRecord, JobRecord};
use steadfast_coord::{CoordError, Etcd, Mirror, Range};

/// Follows the evaluations of a job.
#[derive(Debug)]
pub struct Evaluations {
    etcd: Etcd,
    keys: Keys,
    /// Absent if nothing depends on them.
    latest: Option<Mirror>,
}

impl Evaluations {
    /// Starts to follow the evaluations of a job, if they decide about its course.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn follow(job: &JobRecord, etcd: &Etcd, keys: &Keys) -> Result<Self, CoordError> {
        let latest = match job.has_decisive_evaluations() {
            true => Some(Mirror::start(etcd, Range::Key(keys.evaluation())).await?),
            false => None,
        };
        Ok(Self { etcd: etcd.clone(), keys: keys.clone(), latest })
    }

    /// Returns the tasks that are given up in some pass, or for evaluation.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn given_up(&self) -> Result<BTreeSet<TaskId>, CoordError> {
        let view = self.etcd.list(&self.keys.given_up_prefix()).await?;
        Ok(view.entries.keys().filter_map(|key| self.keys.given_up_of(key)).collect())
    }

    /// Returns the latest evaluation that decides about the course of the job, as far as it is known.
    pub fn latest(&self) -> Option<EvaluationRecord> {
        self.latest.as_ref()?.view().single().ok().flatten()
    }

    /// Reads the versions from which on the learning rate is reduced once more. They are complete for each position that
    /// the job has reached before, which what the mirror shows may not be.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn reductions(&self) -> Result<Vec<Version>, CoordError> {
        let latest = self.etcd.get_json(&self.keys.evaluation()).await?;
        Ok(reductions_of(latest))
    }

    /// Returns the versions from which on the learning rate is reduced once more, as far as they are known.
    pub fn known_reductions(&self) -> Vec<Version> {
        reductions_of(self.latest())
    }

    /// Returns whether training has ended at a position, as far as it is known.
    pub fn is_over(&self, position: &Position) -> bool {
        self.latest().and_then(|it| it.course).is_some_and(|course| course.is_over(position))
    }

    /// Returns whether the evaluation of a version, or a later one, is known.
    pub fn is_known(&self, version: Version) -> bool {
        self.latest().is_some_and(|it| version <= it.version)
    }

    /// Waits until the evaluation of a version, or a later one, is known.
    pub async fn known(&self, version: Version) {
        let Some(latest) = &self.latest else { return };
        let mut changes = latest.subscribe();
        loop {
            changes.mark_unchanged();
            if self.is_known(version) {
                return;
            }
            if changes.changed().await.is_err() {
                // The mirror ends with the process.
                return std::future::pending().await;
            }
        }
    }
}

fn reductions_of(latest: Option<EvaluationRecord>) -> Vec<Version> {
    let plateau = latest.and_then(|it| it.course?.plateau);
    plateau.map(|it| it.reductions).unwrap_or_default()
}
