//! Members that come and go: lost trainers' tasks, the lanes, and when a generation begins.

use std::collections::BTreeSet;

use steadfast_common::ids::{Incarnation, Slot, TrainerId};
use steadfast_common::records::PserverRecord;
use steadfast_coord::{CoordError, now};
use steadfast_master_core::ledger::Blame;
use tracing::info;

use crate::desk::{Batch, Desk};
use crate::generations::Start;

/// Whoever holds a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holder {
    /// Of its memory.
    pub incarnation: Incarnation,
    /// Of the slot's key.
    pub create_revision: i64,
}

impl Desk {
    /// Reacts to members that came or went: lost trainers' tasks, lanes, and a new generation once
    /// every slot has a holder and one of them has another memory.
    pub(crate) async fn look_after_members(&mut self) -> Result<(), CoordError> {
        self.vigils.follow(&[self.slots.view(), self.trainers.view()]);
        let live = self.live();
        self.limits.trainers = live.len() as u32;
        self.take_from_lost_trainers(&live).await?;
        // Trainers pass lanes on that they cannot compute; they get others at the next pass.
        let dealt = (self.position.pass, live);
        if self.dealt.as_ref() != Some(&dealt) {
            match self.dealt.as_ref() {
                Some((pass, _)) if *pass == dealt.0 => self.lanes.rebalance(&dealt.1),
                Some(_) | None => self.lanes.deal(&dealt.1),
            }
            self.dealt = Some(dealt);
        }
        let crew = self.crew()?;
        self.note_lost_slots();
        match crew {
            Some(crew) if !self.is_present(&crew) => {
                let reason = self.why_another_generation(&crew);
                self.begin_generation(&crew, reason, Start::Latest).await.map(|_| ())
            }
            Some(_) | None => Ok(()),
        }
    }

    async fn take_from_lost_trainers(
        &mut self,
        live: &BTreeSet<TrainerId>,
    ) -> Result<(), CoordError> {
        if let Some(gone) = self.seen_trainers.difference(live).next() {
            let version = self.position.version;
            self.recoveries.notice(format!("trainer {gone} left"), now(), Some(version));
        }
        self.spendings.follow(live);
        let seen = std::mem::replace(&mut self.seen_trainers, live.clone());
        let lost: Vec<TrainerId> =
            self.state.ledger.known_trainers().difference(live).copied().collect();
        for trainer in lost {
            info!(%trainer, "trainer lost; its tasks go to others");
            // Whoever went before we acted may have gone with etcd, together with all others.
            let blame = if seen.contains(&trainer) { Blame::Task } else { Blame::Nobody };
            let facts = self.state.ledger.lose_trainer(trainer, blame, &self.limits);
            let mut batch = Batch::on(&self.state);
            self.adopt(&mut batch, &facts);
            self.commit(batch).await?;
        }
        Ok(())
    }

    /// The holders of all slots, if every slot is held.
    pub(crate) fn crew(&self) -> Result<Option<Vec<Holder>>, CoordError> {
        let Some(desired) = self.desired.view().single::<u32>()? else { return Ok(None) };
        let crew: Option<Vec<Holder>> = (0..desired).map(|slot| self.holder(Slot(slot))).collect();
        Ok(crew.filter(|crew| !crew.is_empty()))
    }

    /// Whoever holds `slot`. A key that cannot be read names nobody.
    pub(crate) fn holder(&self, slot: Slot) -> Option<Holder> {
        let view = self.slots.view();
        let entry = view.entries.get(&self.keys.ps(slot))?;
        let create_revision = entry.create_revision;
        let incarnation = entry.json::<PserverRecord>().ok()?.incarnation(create_revision);
        Some(Holder { incarnation, create_revision })
    }

    fn is_present(&self, crew: &[Holder]) -> bool {
        self.state.generation.as_ref().is_some_and(|record| {
            record.slots.iter().eq(crew.iter().map(|holder| &holder.incarnation))
        })
    }

    /// Slots whose memory the present generation names and nobody has.
    fn lost_slots(&self) -> Vec<Slot> {
        let named = self.state.generation.iter().flat_map(|record| record.slots.iter().enumerate());
        let lost = named.filter(|(slot, named)| {
            self.holder(Slot(*slot as u32)).is_none_or(|holder| holder.incarnation != **named)
        });
        lost.map(|(slot, _)| Slot(slot as u32)).collect()
    }

    fn note_lost_slots(&mut self) {
        let lost = self.lost_slots();
        if let Some(slot) = lost.iter().find(|slot| !self.slots_seen_lost.contains(slot)) {
            let version = self.position.version;
            let cause = format!("the pserver of slot {slot} was lost");
            info!(cause);
            self.recoveries.notice(cause, now(), Some(version));
        }
        self.slots_seen_lost = lost;
    }

    fn why_another_generation(&self, crew: &[Holder]) -> String {
        let Some(record) = &self.state.generation else { return "the job begins".to_owned() };
        if record.slots.len() != crew.len() {
            return format!("{} slots became {}", record.slots.len(), crew.len());
        }
        let lost: Vec<String> = self.lost_slots().iter().map(Slot::to_string).collect();
        format!("the memory of slot {} was lost", lost.join(", "))
    }
}
