//! Begins generations: selects the checkpoint and the pserver set, and resets the task queues.

use steadfast_common::ids::{Generation, Incarnation, Slot, Version};
use steadfast_common::records::{CheckpointRecord, GenerationRecord, QueueSnapshot};
use steadfast_common::spec::{LostPserver, Mode};
use steadfast_coord::{CoordError, OPS_MAX, Op};
use steadfast_master_core::restore_point::{Candidate, RestorePoint, choose};
use steadfast_master_core::saver::Saver;
use tracing::{error, info, warn};

use crate::event_loop::{Batch, CHANGES_OF_ONE, EventLoop};
use crate::handle::{ControlError, Position, Rollback};

/// Manifests invalidated in one transaction.
const INVALIDATED_AT_ONCE: usize = 32;

/// Where a generation begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start<'a> {
    /// From the latest checkpoint; a surviving slot may keep its memory.
    Latest,
    /// The same, after the checkpoint of the present generation could not be loaded.
    AfterDamage,
    /// From the checkpoint that a user chose.
    Chosen(&'a str),
}

impl EventLoop {
    /// Begins a generation from the latest valid checkpoint (or the chosen one), or from the start if
    /// there is none. A slot may have lost its holder since `pserver_set` was read: the next change of the
    /// slots' keys then begins another generation, and until then no process serves the slot.
    pub(crate) async fn begin_generation(
        &mut self,
        pserver_set: &[Incarnation],
        reason: String,
        start: Start<'_>,
    ) -> Result<(), CoordError> {
        let point = self.restore_point(start).await?;
        for (id, reason) in &point.skipped {
            error!(checkpoint = id, reason, "checkpoint passed over");
        }
        let before = self.state.generation.as_ref().map_or(0, |record| record.generation.0);
        let record = GenerationRecord {
            generation: Generation(before + 1),
            slots: pserver_set.to_vec(),
            checkpoint: point.checkpoint.as_ref().map(|(id, _)| id.clone()),
            kept: self.kept(pserver_set, &point, start),
            reason,
        };
        info!(
            generation = record.generation.0,
            checkpoint = record.checkpoint,
            reason = record.reason,
            "generation begins"
        );
        let manifest = point.checkpoint.as_ref().map(|(_, manifest)| manifest);
        let mut batch = Batch::on(self);
        if self.job.record.spec.mode == Mode::Async && 0 < before {
            if record.kept.is_empty() {
                let to = manifest.and_then(|it| it.queue.clone()).unwrap_or_default();
                self.rewind(&mut batch, &to).await?;
            } else {
                self.recall().await?;
                batch = Batch::on(self);
            }
        }
        self.point_at(&mut batch, &point, manifest.map(|_| &record)).await?;
        if record.kept.is_empty() {
            self.forget_evaluation_after(&mut batch, manifest);
        }
        batch.changes.add(Op::put(&self.keys.generation(), &record));
        batch.changes.add(Op::put(&self.keys.generation_record(record.generation), &record));
        batch.state.generation = Some(record.clone());
        self.commit(batch).await?;
        if record.kept.is_empty() {
            let position = manifest.map(|it| it.position.clone()).unwrap_or_default();
            self.position = Position::of(&position);
        }
        self.recoveries.go_on_from(self.position.version);
        self.saver = Saver::default();
        Ok(())
    }

    /// Deletes the evaluation of parameters that the rollback discards.
    fn forget_evaluation_after(&self, batch: &mut Batch, start: Option<&CheckpointRecord>) {
        let version = start.map_or(Version(0), |it| it.position.version);
        if batch.state.evaluation.as_ref().is_some_and(|it| version < it.version) {
            batch.changes.add(Op::delete(&self.keys.evaluation()));
            batch.state.evaluation = None;
        }
    }

    /// Selects the manifest to begin from.
    async fn restore_point(&self, start: Start<'_>) -> Result<RestorePoint, CoordError> {
        let prefix = self.keys.checkpoints_prefix();
        let view = self.etcd.list(&prefix).await?;
        let pointer = self.keys.checkpoint_latest();
        let manifests = view.entries.iter().filter(|(key, _)| **key != pointer);
        let candidates = manifests.map(|(key, entry)| Candidate {
            id: key.strip_prefix(&prefix).unwrap_or(key).to_owned(),
            create_revision: entry.create_revision,
            record: entry.json().map_err(|error| error.to_string()),
        });
        let from = match start {
            Start::Latest | Start::AfterDamage => self.state.checkpoint.as_deref(),
            Start::Chosen(id) => Some(id),
        };
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
        let goes_on = spec.mode == Mode::Async
            && spec.asynchronous.lost_pserver == LostPserver::Continue
            && record.slots.len() == pserver_set.len()
            && point.checkpoint.is_some();
        let same = pserver_set.iter().zip(&record.slots).enumerate();
        let same = same.filter(|(_, (holder, named))| goes_on && holder == named);
        let slots = same.map(|(slot, _)| Slot(slot as u32));
        match start {
            Start::Latest => slots.collect(),
            // A slot that began from the damaged checkpoint is rolled back with the others, even if its own
            // shard was intact.
            Start::AfterDamage => slots.filter(|slot| record.kept.contains(slot)).collect(),
            Start::Chosen(_) => Vec::new(),
        }
    }

    /// Moves the pointer to the checkpoint that the generation begins from, and invalidates the skipped
    /// checkpoints with their reasons.
    async fn point_at(
        &mut self,
        batch: &mut Batch,
        point: &RestorePoint,
        record: Option<&GenerationRecord>,
    ) -> Result<(), CoordError> {
        let chosen = record.and_then(|record| record.checkpoint.clone());
        if chosen == self.state.checkpoint {
            return Ok(());
        }
        warn!(from = self.state.checkpoint, to = chosen, "the latest checkpoint is another now");
        for (id, reason) in point.skipped.iter().take(INVALIDATED_AT_ONCE) {
            let key = self.keys.checkpoint(id);
            // A manifest that cannot be read is skipped again each time.
            if let Ok(Some(mut manifest)) = self.etcd.get_json::<CheckpointRecord>(&key).await
                && manifest.invalidated.is_none()
            {
                manifest.invalidated = Some(reason.clone());
                batch.changes.add(Op::put(&key, &manifest));
            }
        }
        batch.changes.add(match &chosen {
            Some(id) => Op::put(&self.keys.checkpoint_latest(), id),
            None => Op::delete(&self.keys.checkpoint_latest()),
        });
        batch.state.checkpoint = chosen;
        Ok(())
    }

    /// Takes all tasks back, in as many transactions as needed. If no generation follows, the tasks are
    /// repeated, which applies no record twice.
    async fn recall(&mut self) -> Result<(), CoordError> {
        let facts = self.state.ledger.recall(&self.limits);
        for facts in facts.chunks(OPS_MAX / 4) {
            let mut batch = Batch::on(self);
            self.adopt(&mut batch, facts);
            self.commit(batch).await?;
        }
        Ok(())
    }

    /// Rolls the queues back. Task keys of the new round have no effect until the head names the round, so
    /// the keys that do not fit into the last transaction are written before it.
    async fn rewind(&mut self, batch: &mut Batch, to: &QueueSnapshot) -> Result<(), CoordError> {
        let facts = batch.state.ledger.rewind(to);
        let round = batch.state.ledger.head().round + 1;
        // A master that died during a rewind may have left keys of another checkpoint's queues.
        let stale = self.etcd.list(&self.keys.round_prefix(round)).await?;
        let stale: Vec<Op> = stale.entries.keys().map(|key| Op::delete(key)).collect();
        for ops in stale.chunks(OPS_MAX) {
            self.leadership.commit(&self.etcd, ops).await?;
        }
        self.adopt(batch, &facts);
        if batch.changes.len() + CHANGES_OF_ONE <= OPS_MAX {
            return Ok(());
        }
        let (head, rest): (Vec<Op>, Vec<Op>) = std::mem::take(&mut batch.changes)
            .into_ops()
            .into_iter()
            .partition(|op| op.key() == self.keys.queue());
        for ops in rest.chunks(OPS_MAX) {
            self.leadership.commit(&self.etcd, ops).await?;
        }
        info!(round, keys = rest.len(), "queues put back");
        head.into_iter().for_each(|op| batch.changes.add(op));
        Ok(())
    }

    /// Runs the rollback that an event requested, which needs reads from etcd.
    pub(crate) async fn run_rollback(&mut self) -> Result<(), CoordError> {
        let Some(rollback) = self.rollback.take() else { return Ok(()) };
        if self.state.result.is_some() {
            // A job that is over is not rolled back.
            if let Rollback::Wanted { reply, .. } = rollback {
                let _ = reply.send(Err(ControlError::Over));
            }
            return Ok(());
        }
        match rollback {
            Rollback::Damaged { checkpoint, reason } => {
                self.invalidated(&checkpoint, &reason).await?;
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

    async fn invalidated(&mut self, id: &str, reason: &str) -> Result<(), CoordError> {
        let key = self.keys.checkpoint(id);
        // A manifest that cannot be read is skipped again each time.
        let Some(entry) = self.etcd.get(&key).await? else { return Ok(()) };
        let Ok(mut manifest) = entry.json::<CheckpointRecord>() else { return Ok(()) };
        manifest.invalidated = Some(reason.to_owned());
        let mut batch = Batch::on(self);
        batch.changes.add(Op::put(&key, &manifest));
        self.commit(batch).await
    }

    /// Rolls back to a checkpoint that a user chose. Invalidates checkpoints that were committed after it
    /// or are ahead of it, so that no generation begins from an abandoned branch of training.
    async fn roll_back(
        &mut self,
        id: &str,
        force: bool,
    ) -> Result<Result<Generation, ControlError>, CoordError> {
        let key = self.keys.checkpoint(id);
        let Some(entry) = self.etcd.get(&key).await? else {
            return Ok(Err(ControlError::NoSuchCheckpoint(id.to_owned())));
        };
        if key == self.keys.checkpoint_latest() {
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
        let lost = self.position.version.0.saturating_sub(manifest.position.version.0);
        if !force {
            return Ok(Err(ControlError::NeedsForce { id: id.to_owned(), steps: lost }));
        }
        let Some(pserver_set) = self.pserver_set()? else {
            return Ok(Err(ControlError::NotAllSlots));
        };
        let prefix = self.keys.checkpoints_prefix();
        for (key, other) in &self.etcd.list(&prefix).await?.entries {
            // A checkpoint that is ahead may be older, if the job abandoned its branch, returned to it and
            // abandons it again. The pointer is not a manifest and is never ahead.
            let is_ahead = other
                .json::<CheckpointRecord>()
                .is_ok_and(|it| manifest.position.version < it.position.version);
            let is_later = entry.create_revision < other.create_revision
                && *key != self.keys.checkpoint_latest();
            if is_later || is_ahead {
                let other_id = key.strip_prefix(&prefix).unwrap_or(key).to_owned();
                self.invalidated(&other_id, &format!("the job was rolled back to {id}")).await?;
            }
        }
        if manifest.invalidated.is_some() {
            let restored = CheckpointRecord { invalidated: None, ..manifest };
            let mut batch = Batch::on(self);
            batch.changes.add(Op::put(&key, &restored));
            self.commit(batch).await?;
        }
        let reason = format!("rolled back to {id} by hand, {lost} steps");
        self.begin_generation(&pserver_set, reason, Start::Chosen(id)).await?;
        let begun = self.state.generation.as_ref().map_or(Generation(0), |it| it.generation);
        Ok(Ok(begun))
    }
}
