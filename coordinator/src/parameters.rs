//! The parameters of a coordinator's job: which pushes count on all parameter servers, and which a checkpoint covers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Generation;
use steadfast_common::records::GenerationRecord;
use steadfast_common::records::closures::PushesRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_coord::{CoordError, Etcd};
use steadfast_coordinator_core::{ClosureId, Counted, Input, Pushes};
use steadfast_host::time::sleep;
use steadfast_net::TlsIdentity;
use steadfast_process::Failure;
use steadfast_training_client::{ClientError, ParameterClient};
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

use crate::driver::send;
use crate::table::Shared;

/// Time between two looks at the newest checkpoint.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The pause after a call that the pservers rejected.
const RETRY: Duration = Duration::from_secs(1);

/// The parameters that the closures of a job train.
#[derive(Clone, Debug)]
pub struct Parameters {
    pub(crate) etcd: Etcd,
    pub(crate) keys: Keys,
    pub(crate) params: Vec<ParamSpec>,
    pub(crate) client: Arc<ParameterClient>,
}

impl Parameters {
    /// Waits for the job.
    ///
    /// # Errors
    /// `Conflict` if the gradients of the job do not come from closures, `Invalid` if the parameters are invalid, and
    /// errors of etcd.
    pub(crate) async fn join(
        etcd: &Etcd,
        keys: &Keys,
        tls: TlsIdentity,
        params: Vec<ParamSpec>,
    ) -> Result<Self, Failure> {
        let client = ParameterClient::join(etcd, keys, tls, params.clone()).await;
        let client = client.map_err(|error| Failure::new(error.kind(), error.to_string()))?;
        let model = &client.job().spec.model;
        if !model.has_closures() {
            let message = format!(
                "the job at {} trains a model of kind \"{}\"; parameters for closures need a job whose file has \
                 `model.kind` = \"closures\"",
                keys.root(),
                model.kind
            );
            return Err(Failure::new(ErrorKind::Conflict, message));
        }
        let (etcd, keys) = (etcd.clone(), keys.clone());
        Ok(Self { etcd, keys, params, client: Arc::new(client) })
    }

    /// Waits until the parameters have values; returns the state of pushes with which a term begins.
    pub(crate) async fn pushes(&self) -> Result<Pushes, Failure> {
        let counted = self.counted().await.map_err(failure)?;
        let record: Option<PushesRecord> = self.etcd.get_json(&self.keys.closure_pushes()).await?;
        Ok(Pushes::new(record.unwrap_or_default().next, counted))
    }

    async fn counted(&self) -> Result<Counted, ClientError> {
        let (generation, numbers) = self.client.counted().await?;
        Ok(Counted { generation, numbers })
    }

    /// Tells the machine of each generation, and of closures whose pushes are in a checkpoint.
    pub(crate) async fn follow(self, shared: Arc<Shared>, outbox: mpsc::UnboundedSender<Input>) {
        loop {
            let generation = match self.counted().await {
                Ok(counted) => {
                    let generation = counted.generation;
                    send(&outbox, Input::Counted(counted));
                    generation
                }
                Err(ClientError::JobEnded) => return,
                Err(error) => {
                    warn!(%error, "cannot read which pushes count");
                    sleep(RETRY).await;
                    continue;
                }
            };
            info!(%generation, "closures push to a generation of the parameter servers");
            loop {
                let cluster = self.client.cluster();
                tokio::select! {
                    biased;
                    () = cluster.job_ended() => return,
                    () = cluster.generation_after(generation) => break,
                    () = sleep(LOOK_EVERY) => {}
                }
                match self.look(generation, &shared).await {
                    Ok(covered) => covered.into_iter().for_each(|it| send(&outbox, it)),
                    Err(error) => debug!(%error, "cannot read the newest checkpoint"),
                }
            }
        }
    }

    /// Reads which checkpoint is the newest; returns what it covers.
    async fn look(&self, known: Generation, shared: &Shared) -> Result<Vec<Input>, CoordError> {
        // All that is pushed later may be missing in the checkpoint after the next.
        let pushed = shared.lock().coverage.pushed;
        let id: Option<String> = self.etcd.get_json(&self.keys.checkpoint_latest()).await?;
        if self.newest_generation().await? != known {
            // What it has undone is not known yet.
            return Ok(Vec::new());
        }
        Ok(shared.change(|table| table.covered(known, id, pushed)))
    }

    /// Returns the newest generation of the job.
    pub(crate) async fn newest_generation(&self) -> Result<Generation, CoordError> {
        let record: Option<GenerationRecord> = self.etcd.get_json(&self.keys.generation()).await?;
        Ok(record.map_or(Generation(0), |it| it.generation))
    }
}

fn failure(error: ClientError) -> Failure {
    match error {
        ClientError::JobEnded => Failure::new(
            ErrorKind::Conflict,
            "the job has ended, and its parameters with it; give a new job another name",
        ),
        error => Failure::new(error.kind(), error.to_string()),
    }
}

/// The checkpoints that are remembered: a rollback shows one of those that a job keeps again.
const SEEN_MAX: usize = 256;

/// Which of the closures that have pushed are in a checkpoint.
///
/// A checkpoint is taken while closures push, and the next begins after it was committed. So a push that was
/// acknowledged while one checkpoint was the newest may be missing in the next one, and is in the one after that.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    /// Counts the pushes so far.
    pub pushed: u64,
    /// Closures that no checkpoint covers, with the count at their push.
    open: VecDeque<(u64, ClosureId)>,
    /// Counts the checkpoints that were seen as the newest.
    checkpoints: u64,
    /// The last of these.
    seen: VecDeque<String>,
    /// The count of the pushes that were acknowledged while each of the last checkpoints was the newest.
    pushed_at: BTreeMap<u64, u64>,
}

impl Coverage {
    /// Adds a push; returns its place among all.
    pub(crate) fn add(&mut self, id: ClosureId) -> u64 {
        self.pushed += 1;
        self.open.push_back((self.pushed, id));
        self.pushed
    }

    /// Notes which checkpoint is the newest, after `pushed` pushes; returns the closures that it covers, with the
    /// places of their pushes.
    pub(crate) fn note(&mut self, newest: Option<String>, pushed: u64) -> Vec<(u64, ClosureId)> {
        if let Some(newest) = newest
            && !self.seen.contains(&newest)
        {
            self.checkpoints += 1;
            self.seen.push_back(newest);
            if SEEN_MAX < self.seen.len() {
                self.seen.pop_front();
            }
        }
        self.pushed_at.insert(self.checkpoints, pushed);
        let before = self.pushed_at.range(..=self.checkpoints.saturating_sub(2)).next_back();
        let Some((&checkpoint, &covered)) = before.filter(|_| 2 <= self.checkpoints) else {
            return Vec::new();
        };
        self.pushed_at = self.pushed_at.split_off(&checkpoint);
        let end = self.open.partition_point(|(count, _)| *count <= covered);
        self.open.drain(..end).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(range: std::ops::RangeInclusive<u64>) -> Vec<(u64, ClosureId)> {
        range.map(|it| (it, ClosureId(it))).collect()
    }

    #[test]
    fn the_second_checkpoint_after_a_push_covers_it() {
        let mut coverage = Coverage::default();
        let newest = |id: &str| Some(id.to_owned());
        coverage.add(ClosureId(1));
        assert!(coverage.note(None, coverage.pushed).is_empty());
        // The push of 2 may have been acknowledged after the snapshot of the first checkpoint.
        coverage.add(ClosureId(2));
        assert!(coverage.note(newest("a"), 1).is_empty());
        coverage.add(ClosureId(3));
        // It was read before the last push.
        assert_eq!(coverage.note(newest("b"), 2), ids(1..=1));
        assert!(coverage.note(newest("b"), 3).is_empty());
        assert!(coverage.note(newest("c"), 3).is_empty());
        assert_eq!(coverage.note(newest("d"), 3), ids(2..=3));
        // A rollback that shows a known checkpoint again covers nothing.
        coverage.add(ClosureId(4));
        assert!(coverage.note(newest("c"), 4).is_empty());
        assert!(coverage.note(newest("d"), 4).is_empty());
        assert!(coverage.note(newest("e"), 4).is_empty());
        assert_eq!(coverage.note(newest("f"), 4), ids(4..=4));
        assert!(coverage.open.is_empty() && coverage.pushed_at.len() < 4);
    }
}
