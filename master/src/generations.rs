//! How a generation begins: from which checkpoint, for whom, and what becomes of the task queues.

use steadfast_common::ids::{Generation, Slot};
use steadfast_common::records::{
    CheckpointRecord, GenerationRecord, PositionRecord, QueueSnapshot,
};
use steadfast_common::spec::{LostPserver, Mode};
use steadfast_coord::{COMPARES_MAX, Condition, CoordError, OPS_MAX, Op};
use steadfast_master_core::restore_point::{Candidate, RestorePoint, choose};
use tracing::{error, info, warn};

use crate::desk::{Batch, CHANGES_OF_ONE, Desk};
use crate::members::Holder;
use crate::office::{OfficeError, Position, Setback};

/// Manifests set aside in one transaction.
const SET_ASIDE_AT_ONCE: usize = 32;

/// Where a generation begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start<'a> {
    /// From the latest checkpoint; a slot that went on may keep its memory.
    Latest,
    /// The same, because the checkpoint of the present generation could not be loaded.
    AfterDamage,
    /// From the one that a person chose.
    Chosen(&'a str),
}

impl Desk {
    /// Sends everybody to the latest checkpoint that is whole (or to the chosen one), or to the start
    /// if there is none. Returns whether the generation began: a crew that has changed
    /// meanwhile comes back with its next change.
    pub(crate) async fn begin_generation(
        &mut self,
        crew: &[Holder],
        reason: String,
        start: Start<'_>,
    ) -> Result<bool, CoordError> {
        let point = self.restore_point(start).await?;
        for (id, reason) in &point.skipped {
            error!(checkpoint = id, reason, "checkpoint passed over");
        }
        let before = self.state.generation.as_ref().map_or(0, |record| record.generation.0);
        let record = GenerationRecord {
            generation: Generation(before + 1),
            slots: crew.iter().map(|holder| holder.incarnation).collect(),
            checkpoint: point.checkpoint.as_ref().map(|(id, _)| id.clone()),
            kept: self.kept(crew, &point, start),
            reason,
        };
        info!(
            generation = record.generation.0,
            checkpoint = record.checkpoint,
            reason = record.reason,
            "generation begins"
        );
        let manifest = point.checkpoint.as_ref().map(|(_, manifest)| manifest);
        let mut batch = Batch::on(&self.state);
        if self.job.record.spec.mode == Mode::Async && 0 < before {
            if record.kept.is_empty() {
                let to = manifest.and_then(|it| it.queue.clone()).unwrap_or_default();
                self.rewind(&mut batch, &to).await?;
            } else {
                self.recall().await?;
                batch = Batch::on(&self.state);
            }
        }
        self.point_at(&mut batch, &point, manifest.map(|_| &record)).await?;
        batch.conditions = conditions(&self.keys, crew);
        batch.changes.add(Op::put(&self.keys.generation(), &record));
        batch.changes.add(Op::put(&self.keys.generation_record(record.generation), &record));
        batch.state.generation = Some(record.clone());
        self.commit(batch).await?;
        if self.state.generation.as_ref() != Some(&record) {
            return Ok(false);
        }
        if record.kept.is_empty() {
            let position = manifest.map(|it| it.position.clone()).unwrap_or_default();
            self.position = start_of(&position);
        }
        self.recoveries.go_on_from(self.position.version);
        self.saver = None;
        Ok(true)
    }

    /// Looks through all manifests for the one to begin from.
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
        Ok(choose(from, candidates.collect(), CheckpointRecord::fault))
    }

    /// Slots that go on with their memory although another slot's was lost.
    fn kept(&self, crew: &[Holder], point: &RestorePoint, start: Start<'_>) -> Vec<Slot> {
        let spec = &self.job.record.spec;
        let Some(record) = &self.state.generation else { return Vec::new() };
        let goes_on = spec.mode == Mode::Async
            && spec.asynchronous.lost_pserver == LostPserver::Continue
            && record.slots.len() == crew.len()
            && point.checkpoint.is_some();
        let same = crew.iter().zip(&record.slots).enumerate();
        let same = same.filter(|(_, (holder, named))| goes_on && holder.incarnation == **named);
        let slots = same.map(|(slot, _)| Slot(slot as u32));
        match start {
            Start::Latest => slots.collect(),
            // Who began from the damaged checkpoint goes back with the others, even if its own shard was
            // sound.
            Start::AfterDamage => slots.filter(|slot| record.kept.contains(slot)).collect(),
            Start::Chosen(_) => Vec::new(),
        }
    }

    /// Moves the pointer to where the generation begins, if it is elsewhere, and notes why what was
    /// passed over is never to be restored.
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
        for (id, reason) in point.skipped.iter().take(SET_ASIDE_AT_ONCE) {
            let key = self.keys.checkpoint(id);
            // What cannot be read is passed over each time anew.
            if let Ok(Some(mut manifest)) = self.etcd.get_json::<CheckpointRecord>(&key).await
                && manifest.set_aside.is_none()
            {
                manifest.set_aside = Some(reason.clone());
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

    /// Takes all tasks back, in as many transactions as that needs: should no generation follow, they
    /// are done once more, which counts no record twice.
    async fn recall(&mut self) -> Result<(), CoordError> {
        let facts = self.state.ledger.recall(&self.limits);
        for facts in facts.chunks(OPS_MAX / 4) {
            let mut batch = Batch::on(&self.state);
            self.adopt(&mut batch, facts);
            self.commit(batch).await?;
        }
        Ok(())
    }

    /// Puts the queues back. Task keys of the new round count for nothing until the head names the
    /// round, so what does not fit into the last transaction goes ahead of it.
    async fn rewind(&mut self, batch: &mut Batch, to: &QueueSnapshot) -> Result<(), CoordError> {
        let facts = batch.state.ledger.rewind(to);
        let round = batch.state.ledger.head().round + 1;
        // A master that died in the middle of this left keys of another checkpoint's queues.
        let stale = self.etcd.list(&self.keys.round_prefix(round)).await?;
        let stale: Vec<Op> = stale.entries.keys().map(|key| Op::delete(key)).collect();
        for ops in stale.chunks(OPS_MAX) {
            self.reign.commit(&self.etcd, ops, &[]).await?;
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
            self.reign.commit(&self.etcd, ops, &[]).await?;
        }
        info!(round, keys = rest.len(), "queues put back");
        head.into_iter().for_each(|op| batch.changes.add(op));
        Ok(())
    }

    /// Does what an event asked for that takes a look at etcd: going back because a checkpoint is
    /// damaged, or because a person wants it.
    pub(crate) async fn work_off_setback(&mut self) -> Result<(), CoordError> {
        let Some(setback) = self.setback.take() else { return Ok(()) };
        if self.state.result.is_some() {
            // Nothing moves a job that is over.
            if let Setback::Wanted { reply, .. } = setback {
                let _ = reply.send(Err(OfficeError::Over));
            }
            return Ok(());
        }
        match setback {
            Setback::Damaged { checkpoint, reason } => {
                self.set_aside(&checkpoint, &reason).await?;
                let Some(crew) = self.crew()? else { return Ok(()) };
                let reason = format!("checkpoint {checkpoint} is damaged: {reason}");
                self.begin_generation(&crew, reason, Start::AfterDamage).await.map(|_| ())
            }
            Setback::Wanted { checkpoint, force, reply } => {
                let answer = self.set_back(&checkpoint, force).await?;
                let _ = reply.send(answer);
                Ok(())
            }
        }
    }

    async fn set_aside(&mut self, id: &str, reason: &str) -> Result<(), CoordError> {
        let key = self.keys.checkpoint(id);
        // What cannot be read is passed over each time anew.
        let Some(entry) = self.etcd.get(&key).await? else { return Ok(()) };
        let Ok(mut manifest) = entry.json::<CheckpointRecord>() else { return Ok(()) };
        manifest.set_aside = Some(reason.to_owned());
        let mut batch = Batch::on(&self.state);
        batch.changes.add(Op::put(&key, &manifest));
        self.commit(batch).await
    }

    /// Goes back to a checkpoint that a person chose. Those committed after it, or ahead of it, are set
    /// aside, so that nobody ever goes on from an abandoned future.
    async fn set_back(
        &mut self,
        id: &str,
        force: bool,
    ) -> Result<Result<Generation, OfficeError>, CoordError> {
        let key = self.keys.checkpoint(id);
        let Some(entry) = self.etcd.get(&key).await? else {
            return Ok(Err(OfficeError::NoSuchCheckpoint(id.to_owned())));
        };
        if key == self.keys.checkpoint_latest() {
            return Ok(Err(OfficeError::NoSuchCheckpoint(id.to_owned())));
        }
        let manifest: CheckpointRecord = match entry.json() {
            Ok(manifest) => manifest,
            Err(error) => {
                let (id, reason) = (id.to_owned(), error.to_string());
                return Ok(Err(OfficeError::NotRestorable { id, reason }));
            }
        };
        if let Some(fault) = manifest.fault() {
            let id = id.to_owned();
            return Ok(Err(OfficeError::NotRestorable { id, reason: fault }));
        }
        let lost = self.position.version.0.saturating_sub(manifest.position.version.0);
        if !force {
            return Ok(Err(OfficeError::NeedsForce { id: id.to_owned(), steps: lost }));
        }
        let Some(crew) = self.crew()? else { return Ok(Err(OfficeError::NotAllSlots)) };
        let prefix = self.keys.checkpoints_prefix();
        for (key, other) in &self.etcd.list(&prefix).await?.entries {
            // One that is ahead may be older: of a future that the job left, came back to, and leaves
            // again. The pointer is no manifest, and is never ahead.
            let is_ahead = other
                .json::<CheckpointRecord>()
                .is_ok_and(|it| manifest.position.version < it.position.version);
            let is_later = entry.create_revision < other.create_revision
                && *key != self.keys.checkpoint_latest();
            if is_later || is_ahead {
                let other_id = key.strip_prefix(&prefix).unwrap_or(key).to_owned();
                self.set_aside(&other_id, &format!("the job was set back to {id}")).await?;
            }
        }
        if manifest.set_aside.is_some() {
            let restored = CheckpointRecord { set_aside: None, ..manifest };
            let mut batch = Batch::on(&self.state);
            batch.changes.add(Op::put(&key, &restored));
            self.commit(batch).await?;
        }
        let reason = format!("set back to {id} by hand, {lost} steps");
        if !self.begin_generation(&crew, reason, Start::Chosen(id)).await? {
            return Ok(Err(OfficeError::NotAllSlots));
        }
        let begun = self.state.generation.as_ref().map_or(Generation(0), |it| it.generation);
        Ok(Ok(begun))
    }
}

fn conditions(keys: &steadfast_common::keys::Keys, crew: &[Holder]) -> Vec<Condition> {
    let of = |(slot, holder): (usize, &Holder)| Condition::CreateRevision {
        key: keys.ps(Slot(slot as u32)),
        revision: holder.create_revision,
    };
    crew.iter().enumerate().take(COMPARES_MAX).map(of).collect()
}

fn start_of(position: &PositionRecord) -> Position {
    Position {
        version: position.version,
        pass: position.pass,
        pass_start: position.pass_start,
        examples: position.examples,
        loss: None,
    }
}
