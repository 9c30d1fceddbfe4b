//! Members that come and go: lost trainers' tasks, the lanes, and new generations.

use steadfast_common::ids::{Generation, Incarnation, Slot, TrainerId};
use steadfast_common::records::{
    CheckpointRecord, GenerationRecord, PositionRecord, QueueSnapshot,
};
use steadfast_common::spec::Mode;
use steadfast_coord::{COMPARES_MAX, Condition, CoordError, OPS_MAX, Op};
use tracing::info;

use crate::desk::{Batch, CHANGES_OF_ONE, Desk};
use crate::office::Position;

impl Desk {
    /// Reacts to members that came or went: lost trainers' tasks, lanes, and a new generation once
    /// every slot has a holder and one of them is new.
    pub(crate) async fn look_after_members(&mut self) -> Result<(), CoordError> {
        let live = self.live();
        let lost: Vec<TrainerId> =
            self.state.ledger.known_trainers().difference(&live).copied().collect();
        for trainer in lost {
            info!(%trainer, "trainer lost; its tasks go to others");
            let facts = self.state.ledger.lose_trainer(trainer, &self.limits);
            self.clocks.remove(trainer);
            let mut batch = Batch::on(&self.state);
            self.adopt(&mut batch, &facts);
            self.commit(batch).await?;
        }
        self.lanes.rebalance(&live);
        match self.crew()? {
            Some(slots) if !self.is_present(&slots) => self.begin_generation(slots).await,
            Some(_) | None => Ok(()),
        }
    }

    /// The holders of all slots, if every slot is held.
    fn crew(&self) -> Result<Option<Vec<Incarnation>>, CoordError> {
        let Some(desired) = self.desired.view().single::<u32>()? else { return Ok(None) };
        let view = self.slots.view();
        let holder = |slot: u32| {
            let entry = view.entries.get(&self.keys.ps(Slot(slot)))?;
            Some(Incarnation(entry.create_revision))
        };
        let crew: Option<Vec<Incarnation>> = (0..desired).map(holder).collect();
        Ok(crew.filter(|crew| !crew.is_empty()))
    }

    fn is_present(&self, slots: &[Incarnation]) -> bool {
        self.state.generation.as_ref().is_some_and(|record| record.slots == slots)
    }

    /// Sends everybody back to the latest checkpoint, or to the start if there is none.
    async fn begin_generation(&mut self, slots: Vec<Incarnation>) -> Result<(), CoordError> {
        let before = self.state.generation.as_ref().map_or(0, |record| record.generation.0);
        let checkpoint = self.state.checkpoint.clone();
        let record = GenerationRecord { generation: Generation(before + 1), slots, checkpoint };
        info!(generation = record.generation.0, checkpoint = ?record.checkpoint, "generation begins");
        let mut batch = Batch::on(&self.state);
        let manifest = self.checkpoint_of(&record).await?;
        if self.job.record.spec.mode == Mode::Async && 0 < before {
            let to = manifest.as_ref().and_then(|it| it.queue.clone()).unwrap_or_default();
            self.rewind(&mut batch, &to).await?;
        }
        batch.conditions = (0..record.slots.len().min(COMPARES_MAX))
            .map(|slot| Condition::CreateRevision {
                key: self.keys.ps(Slot(slot as u32)),
                revision: record.slots[slot].0,
            })
            .collect();
        batch.changes.add(Op::put(&self.keys.generation(), &record));
        batch.state.generation = Some(record);
        let begun = batch.state.generation.clone();
        self.commit(batch).await?;
        if self.state.generation != begun {
            return Ok(());
        }
        let position = manifest.map(|it| it.position).unwrap_or_default();
        self.position = start_of(&position);
        self.saver = None;
        Ok(())
    }

    async fn checkpoint_of(
        &self,
        record: &GenerationRecord,
    ) -> Result<Option<CheckpointRecord>, CoordError> {
        match &record.checkpoint {
            Some(id) => self.etcd.get_json(&self.keys.checkpoint(id)).await,
            None => Ok(None),
        }
    }

    /// Puts the queues back. Task keys of the new round count for nothing until the head names the
    /// round, so what does not fit into the last transaction goes ahead of it.
    async fn rewind(&mut self, batch: &mut Batch, to: &QueueSnapshot) -> Result<(), CoordError> {
        let facts = batch.state.ledger.rewind(to);
        let round = batch.state.ledger.head().round + 1;
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
