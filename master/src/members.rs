//! Membership changes: tasks of lost trainers, lane assignment, and the start of a new generation.

use std::collections::BTreeSet;

use steadfast_common::ids::{Incarnation, Lane, Slot, TrainerId};
use steadfast_common::records::PserverRecord;
use steadfast_coord::{CoordError, now};
use steadfast_master_core::ledger::Attribution;
use tracing::{info, warn};

use crate::event_loop::{Batch, EventLoop};
use crate::generations::Start;

impl EventLoop {
    /// Handles joined and lost members: requeues the tasks of lost trainers, reassigns lanes, and begins a
    /// new generation once every slot has a holder and the pserver set differs from the present generation's.
    pub(crate) async fn look_after_members(&mut self) -> Result<(), CoordError> {
        self.failure_detector.follow(&[self.slots.view(), self.trainers.view()]);
        let live = self.live();
        self.limits.trainers = live.len() as u32;
        self.take_from_lost_trainers(&live).await?;
        // Lanes change only with the pass or the set of live trainers: a trainer that passed on lanes that it
        // cannot compute gets others at the next pass.
        let dealt = (self.position.pass, live);
        if self.dealt.as_ref() != Some(&dealt) {
            match self.dealt.as_ref() {
                Some((pass, _)) if *pass == dealt.0 => self.lanes.rebalance(&dealt.1),
                Some(_) | None => self.lanes.deal(&dealt.1),
            }
            self.dealt = Some(dealt);
        }
        let pserver_set = self.pserver_set()?;
        self.note_lost_slots();
        match pserver_set {
            Some(pserver_set) if !self.is_present(&pserver_set) => {
                let reason = self.why_another_generation(&pserver_set);
                self.begin_generation(&pserver_set, reason, Start::Latest).await
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
        for gone in self.seen_trainers.difference(live) {
            // `lanes` still holds the assignment from before the loss.
            self.lane_losses.note(self.position.version, &self.lanes.of(*gone));
        }
        if self.seen_trainers.difference(live).next().is_some() {
            for reason in self.lane_suspects() {
                warn!("{reason}");
            }
        }
        self.time_breakdowns.follow(live);
        let seen = std::mem::replace(&mut self.seen_trainers, live.clone());
        let lost: Vec<TrainerId> =
            self.state.ledger.known_trainers().difference(live).copied().collect();
        for trainer in lost {
            info!(%trainer, "trainer lost; its tasks go to others");
            // Trainers lost before this term may have been lost together in an etcd outage.
            let attribution =
                if seen.contains(&trainer) { Attribution::Task } else { Attribution::None };
            let facts = self.state.ledger.lose_trainer(trainer, attribution, &self.limits);
            let mut batch = Batch::on(self);
            self.adopt(&mut batch, &facts);
            self.commit(batch).await?;
        }
        Ok(())
    }

    /// Describes the lanes whose trainers were lost one after another.
    pub(crate) fn lane_suspects(&self) -> Vec<String> {
        let position = self.position;
        let suspects = self.lane_losses.suspects(position.version).into_iter();
        let in_words = suspects.map(|(lane, losses)| {
            let tasks = self.tasks_of_step(lane);
            format!(
                "{losses} trainers were lost one after the other while they had lane {lane} at step {}: \
                 a record of task {tasks} may crash them",
                position.version
            )
        });
        in_words.collect()
    }

    /// Returns the tasks that a lane computes in the current step.
    fn tasks_of_step(&self, lane: Lane) -> String {
        let position = self.position;
        let Some((_, schedule)) = self.schedule.as_ref().filter(|it| it.0 == position.pass) else {
            return "unknown".to_owned();
        };
        let step = position.version.0.saturating_sub(position.pass_start.0);
        let given_up = self.state.sync_tasks.given_up_in(position.pass);
        let pieces = schedule.micro_batch(lane, step, &given_up);
        let tasks: Vec<String> = pieces.iter().map(|piece| piece.task.to_string()).collect();
        tasks.join(" or ")
    }

    /// Returns the incarnation of each slot's holder, if every slot is held.
    pub(crate) fn pserver_set(&self) -> Result<Option<Vec<Incarnation>>, CoordError> {
        let Some(desired) = self.desired.view().single::<u32>()? else { return Ok(None) };
        let pserver_set: Option<Vec<Incarnation>> =
            (0..desired).map(|slot| self.holder(Slot(slot))).collect();
        Ok(pserver_set.filter(|pserver_set| !pserver_set.is_empty()))
    }

    /// Returns the incarnation of the pserver that holds `slot`, or `None` if the slot is free or its key
    /// cannot be parsed.
    pub(crate) fn holder(&self, slot: Slot) -> Option<Incarnation> {
        let view = self.slots.view();
        let entry = view.entries.get(&self.keys.ps(slot))?;
        Some(entry.json::<PserverRecord>().ok()?.incarnation(entry.create_revision))
    }

    fn is_present(&self, pserver_set: &[Incarnation]) -> bool {
        self.state.generation.as_ref().is_some_and(|record| record.slots == pserver_set)
    }

    /// Returns the slots that are no longer held by the incarnation that the current generation names.
    fn lost_slots(&self) -> Vec<Slot> {
        let named = self.state.generation.iter().flat_map(|record| record.slots.iter().enumerate());
        let lost = named.filter(|(slot, named)| self.holder(Slot(*slot as u32)) != Some(**named));
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

    fn why_another_generation(&self, pserver_set: &[Incarnation]) -> String {
        let Some(record) = &self.state.generation else { return "the job begins".to_owned() };
        if record.slots.len() != pserver_set.len() {
            return format!("{} slots became {}", record.slots.len(), pserver_set.len());
        }
        let lost: Vec<String> = self.lost_slots().iter().map(Slot::to_string).collect();
        format!("the memory of slot {} was lost", lost.join(", "))
    }
}
