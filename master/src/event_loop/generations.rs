//! Begins generations: selects the checkpoint and the pserver set, and resets the task queues.

use steadfast_common::ids::{Generation, Incarnation, Slot};
use steadfast_common::placement::PlacementRecord;
use steadfast_common::records::{
    CheckpointRecord, GenerationRecord, QueueSnapshot, ROLLED_BACK_TO,
};
use steadfast_common::spec::{LostPserver, Mode};
use steadfast_coord::{CoordError, OPS_MAX, Op};
use steadfast_master_core::job_state::Fact;
use steadfast_master_core::restore_point::{Candidate, RestorePoint, choose};
use steadfast_master_core::saver::Saver;
use tracing::{error, info, warn};

use crate::event_loop::batch::Batch;
use crate::event_loop::handle::{ControlError, Rollback};
use crate::event_loop::{CHANGES_OF_ONE, EventLoop};

/// Manifests invalidated in one transaction.
const INVALIDATED_AT_ONCE: usize = 32;

/// Manifests invalidated in the transaction that begins a generation after a requested rollback; fewer, as manifests
/// may be large.
const INVALIDATED_WITH_GENERATION: usize = 8;

/// Where a generation begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start<'a> {
    /// From the latest checkpoint; a surviving slot may keep its memory.
    Latest,
    /// From the latest checkpoint, after the checkpoint of the present generation could not be loaded.
    AfterDamage,
    /// From the checkpoint that a user chose; in the same transaction, manifests change.
    Chosen { id: &'a str, manifests: &'a [Fact] },
}

impl EventLoop {
    /// Begins a generation from the latest valid checkpoint (or the chosen one), or from the start if
    /// there is none. A slot may have lost its holder since `pserver_set` was read: the next change of the
    /// slots' keys then begins another generation, and until then no process serves the slot.
    pub(crate) async fn begin_generation(
        &mut self,
        pserver_set: &[Incarnation],
        reason: String,
        from: Start<'_>,
    ) -> Result<(), CoordError> {
        let point = self.restore_point(from).await?;
        for (id, reason) in &point.skipped {
            error!(checkpoint = id, reason, "checkpoint skipped");
        }
        let before = self.state.generation.as_ref().map_or(0, |record| record.generation.0);
        let record = GenerationRecord {
            generation: Generation(before + 1),
            slots: pserver_set.to_vec(),
            placement: PlacementRecord::LargestFirst { slots: pserver_set.len() as u32 },
            checkpoint: point.checkpoint.as_ref().map(|(id, _)| id.clone()),
            kept: self.kept(pserver_set, &point, from),
            reason,
        };
        let start = point.checkpoint.as_ref().map(|(_, manifest)| manifest.first_pass());
        let first = self.state.stream.record.first;
        if record.kept.is_empty() && start.unwrap_or_default() < first {
            let mut batch = self.batch();
            let reason = format!(
                "no checkpoint is left of pass {} of the stream or later, and the files before may be gone",
                first.0 + 1
            );
            self.fail_job(&mut batch, reason);
            return self.commit(batch).await;
        }
        info!(
            generation = record.generation.0,
            checkpoint = record.checkpoint,
            reason = record.reason,
            "generation begins"
        );
        let manifest = point.checkpoint.as_ref().map(|(_, manifest)| manifest);
        let mut batch = self.batch();
        if let Start::Chosen { manifests, .. } = from {
            manifests.iter().for_each(|fact| batch.add(fact.clone()));
        }
        if self.job.record.spec.mode == Mode::Async && 0 < before {
            if record.kept.is_empty() {
                let to = manifest.and_then(|it| it.queue.clone()).unwrap_or_default();
                self.rewind(&mut batch, &to).await?;
            } else {
                self.recall().await?;
                batch = self.batch();
            }
        }
        self.point_at(&mut batch, &point, manifest.map(|_| &record)).await?;
        if record.kept.is_empty() {
            let start = manifest.map(|it| it.position).unwrap_or_default();
            let evaluated = batch.state().evaluation.as_ref();
            if evaluated.is_some_and(|it| start.version < it.version) {
                // Its parameters are discarded.
                batch.add(Fact::Evaluation(None));
            }
            batch.after(move |live| live.position = start);
        }
        batch.add(Fact::Generation(record));
        batch.after(|live| {
            live.recoveries.resume_from(live.position.version);
            live.saver = Saver::default();
        });
        self.commit(batch).await
    }

    /// Selects the manifest to begin from.
    async fn restore_point(&self, start: Start<'_>) -> Result<RestorePoint, CoordError> {
        let prefix = self.committer.keys.checkpoints_prefix();
        let view = self.committer.etcd.list(&prefix).await?;
        let pointer = self.committer.keys.checkpoint_latest();
        let manifests = view.entries.iter().filter(|(key, _)| **key != pointer);
        let (from, chosen) = match start {
            Start::Latest | Start::AfterDamage => (self.state.checkpoint.as_deref(), None),
            Start::Chosen { id, .. } => (Some(id), Some(id)),
        };
        let candidates = manifests.map(|(key, entry)| {
            let id = key.strip_prefix(&prefix).unwrap_or(key).to_owned();
            let record = entry.json().map_err(|error| error.to_string());
            // The rollback to a checkpoint makes it valid again.
            let record = record.map(|record: CheckpointRecord| match chosen == Some(&id) {
                true => CheckpointRecord { invalidated: None, ..record },
                false => record,
            });
            Candidate { id, create_revision: entry.create_revision, record }
        });
        Ok(choose(from, candidates.collect(), CheckpointRecord::invalid_reason))
    }

    /// Returns the slots that keep their memory although another slot lost its own.
    fn kept(
        &self,
        pserver_set: &[Incarnation],
        point: &RestorePoint,
        start: Start<'_>,
    ) -> Vec<Slot> {
        let spec = &self.job.record.spec;
        let Some(record) = &self.state.generation else { return Vec::new() };
        let keeps_memory = spec.mode == Mode::Async
            && spec.asynchronous.lost_pserver == LostPserver::Continue
            && record.slots.len() == pserver_set.len()
            && point.checkpoint.is_some();
        let same = pserver_set.iter().zip(&record.slots).enumerate();
        let same = same.filter(|(_, (holder, named))| keeps_memory && holder == named);
        let slots = same.map(|(slot, _)| Slot(slot as u32));
        match start {
            Start::Latest => slots.collect(),
            // A slot that began from the damaged checkpoint is rolled back with the others, even if its own
            // shard was intact.
            Start::AfterDamage => slots.filter(|slot| record.kept.contains(slot)).collect(),
            Start::Chosen { .. } => Vec::new(),
        }
    }

    /// Moves the pointer to the checkpoint that the generation begins from, and invalidates the skipped
    /// checkpoints with their reasons.
    async fn point_at(
        &self,
        batch: &mut Batch,
        point: &RestorePoint,
        record: Option<&GenerationRecord>,
    ) -> Result<(), CoordError> {
        let chosen = record.and_then(|record| record.checkpoint.clone());
        if chosen == self.state.checkpoint {
            return Ok(());
        }
        warn!(
            from = self.state.checkpoint,
            to = chosen,
            "the pointer to the latest checkpoint was moved"
        );
        for (id, reason) in point.skipped.iter().take(INVALIDATED_AT_ONCE) {
            let key = self.committer.keys.checkpoint(id);
            // A manifest that cannot be read is skipped again each time.
            if let Ok(Some(manifest)) = self.committer.etcd.get_json::<CheckpointRecord>(&key).await
                && manifest.invalidated.is_none()
            {
                batch.add(invalidated(id, manifest, reason));
            }
        }
        batch.add(Fact::Latest(chosen));
        Ok(())
    }

    /// Takes all tasks back, in as many transactions as needed. If no generation follows, the tasks are
    /// repeated, which applies no record twice.
    async fn recall(&mut self) -> Result<(), CoordError> {
        let facts = self.state.ledger.recall(&self.limits);
        for facts in facts.chunks(OPS_MAX / 4) {
            let mut batch = self.batch();
            batch.decide(|draft| draft.add_queue_facts(facts.iter().cloned()));
            self.commit(batch).await?;
        }
        Ok(())
    }

    /// Rolls the queues back. Changes that do not fit into the last transaction are written before it. The first of
    /// them are those that have no effect without the last transaction: task keys of a round that the head does not
    /// name yet, then replies to trainers of the generation that ends.
    async fn rewind(&mut self, batch: &mut Batch, to: &QueueSnapshot) -> Result<(), CoordError> {
        let facts = batch.state().ledger.rewind(to);
        let keys = &self.committer.keys;
        let round = keys.round_prefix(batch.state().ledger.head().round + 1);
        let prefixes = [round.clone(), keys.replies_prefix(), keys.given_up_prefix()];
        // A master that died during a rewind may have left keys of another checkpoint's queues.
        let stale = self.committer.etcd.list(&round).await?;
        let stale: Vec<Op> = stale.entries.keys().map(|key| Op::delete(key)).collect();
        self.committer.commit_ahead(&stale).await?;
        batch.decide(|draft| draft.add_queue_facts(facts));
        for prefix in prefixes {
            if batch.proposal.len() + CHANGES_OF_ONE <= OPS_MAX {
                break;
            }
            let ahead = batch.proposal.split_off(&prefix);
            self.committer.commit_ahead(&ahead).await?;
            info!(prefix, keys = ahead.len(), "task queues rolled back");
        }
        Ok(())
    }

    /// Runs the rollback that an event requested, which needs reads from etcd.
    pub(crate) async fn run_rollback(&mut self) -> Result<(), CoordError> {
        let Some(rollback) = self.live.rollback.take() else { return Ok(()) };
        if self.state.result.is_some() {
            // A job that is over is not rolled back.
            if let Rollback::Wanted { reply, .. } = rollback {
                let _ = reply.send(Err(ControlError::Over));
            }
            return Ok(());
        }
        match rollback {
            Rollback::Damaged { checkpoint, reason } => {
                self.invalidate(&checkpoint, &reason).await?;
                let Some(pserver_set) = self.pserver_set()? else { return Ok(()) };
                let reason = format!("checkpoint {checkpoint} is damaged: {reason}");
                self.begin_generation(&pserver_set, reason, Start::AfterDamage).await
            }
            Rollback::Inconsistent { reason } => {
                let Some(pserver_set) = self.pserver_set()? else { return Ok(()) };
                self.begin_generation(&pserver_set, reason, Start::Latest).await
            }
            Rollback::Wanted { checkpoint, force, reply } => {
                let answer = self.roll_back(&checkpoint, force).await?;
                let _ = reply.send(answer);
                Ok(())
            }
        }
    }

    async fn invalidate(&mut self, id: &str, reason: &str) -> Result<(), CoordError> {
        let key = self.committer.keys.checkpoint(id);
        // A manifest that cannot be read is skipped again each time.
        let Some(entry) = self.committer.etcd.get(&key).await? else { return Ok(()) };
        let Ok(manifest) = entry.json::<CheckpointRecord>() else { return Ok(()) };
        let mut batch = self.batch();
        batch.add(invalidated(id, manifest, reason));
        self.commit(batch).await
    }

    /// Rolls back to a checkpoint that a user chose. Invalidates checkpoints that were committed after it
    /// or are ahead of it, so that no generation begins from an abandoned branch of training.
    async fn roll_back(
        &mut self,
        id: &str,
        force: bool,
    ) -> Result<Result<Generation, ControlError>, CoordError> {
        let key = self.committer.keys.checkpoint(id);
        let Some(entry) = self.committer.etcd.get(&key).await? else {
            return Ok(Err(ControlError::NoSuchCheckpoint(id.to_owned())));
        };
        if key == self.committer.keys.checkpoint_latest() {
            return Ok(Err(ControlError::NoSuchCheckpoint(id.to_owned())));
        }
        let manifest: CheckpointRecord = match entry.json() {
            Ok(manifest) => manifest,
            Err(error) => {
                let (id, reason) = (id.to_owned(), error.to_string());
                return Ok(Err(ControlError::NotRestorable { id, reason }));
            }
        };
        if let Some(reason) = manifest.invalid_reason() {
            let id = id.to_owned();
            return Ok(Err(ControlError::NotRestorable { id, reason }));
        }
        let lost = self.live.position.version.0.saturating_sub(manifest.position.version.0);
        if !force {
            return Ok(Err(ControlError::NeedsForce { id: id.to_owned(), steps: lost }));
        }
        let Some(pserver_set) = self.pserver_set()? else {
            return Ok(Err(ControlError::NotAllSlots));
        };
        let mut manifests: Vec<Fact> = self.abandoned(id, &manifest, entry.create_revision).await?;
        let later = manifests.split_off(manifests.len().min(INVALIDATED_WITH_GENERATION));
        if manifest.invalidated.is_some() {
            let record = Some(Box::new(CheckpointRecord { invalidated: None, ..manifest }));
            manifests.push(Fact::Manifest { id: id.to_owned(), record });
        }
        let reason = format!("rolled back to {id} on request, {lost} steps");
        let start = Start::Chosen { id, manifests: &manifests };
        self.begin_generation(&pserver_set, reason, start).await?;
        for fact in later {
            let mut batch = self.batch();
            batch.add(fact);
            self.commit(batch).await?;
        }
        let begun = self.state.generation.as_ref().map_or(Generation(0), |it| it.generation);
        Ok(Ok(begun))
    }
}

impl EventLoop {
    /// Returns the invalidations of the checkpoints that a rollback to `manifest` abandons.
    async fn abandoned(
        &self,
        id: &str,
        manifest: &CheckpointRecord,
        create_revision: i64,
    ) -> Result<Vec<Fact>, CoordError> {
        let (prefix, pointer) =
            (self.committer.keys.checkpoints_prefix(), self.committer.keys.checkpoint_latest());
        let mut facts = Vec::new();
        for (key, entry) in &self.committer.etcd.list(&prefix).await?.entries {
            // A manifest that cannot be read is skipped by each generation.
            let Ok(other) = entry.json::<CheckpointRecord>() else { continue };
            // A checkpoint that is ahead may be older, if the job abandoned its branch, returned to it and
            // abandons it again.
            let is_abandoned = create_revision < entry.create_revision
                || manifest.position.version < other.position.version;
            if is_abandoned && *key != pointer {
                let other_id = key.strip_prefix(&prefix).unwrap_or(key);
                let reason = format!("{ROLLED_BACK_TO}{id}");
                facts.push(invalidated(other_id, other, &reason));
            }
        }
        Ok(facts)
    }
}

fn invalidated(id: &str, manifest: CheckpointRecord, reason: &str) -> Fact {
    let record = CheckpointRecord { invalidated: Some(reason.to_owned()), ..manifest };
    Fact::Manifest { id: id.to_owned(), record: Some(Box::new(record)) }
}
