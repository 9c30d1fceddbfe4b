//! Membership changes: tasks of lost trainers, lane assignment, and the start of a new generation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Deserialize;
use steadfast_common::ids::{Incarnation, Lane, Slot, TrainerId};
use steadfast_common::job::spec::Mode;
use steadfast_common::machine::{Decision, Moment};
use steadfast_common::records::code::CodeRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{FollowerRecord, PROTOCOL, PserverRecord};
use steadfast_coord::{Entry, View};
use steadfast_master_core::ledger::Attribution;
use tracing::{info, warn};

use crate::event_loop::effects::Effect;
use crate::event_loop::generations::Start;
use crate::event_loop::live_state::{Handover, HandoverAnswer};
use crate::event_loop::machine::{Progress, TrainingJob};
use crate::plan_warnings;

/// What etcd shows of the members of the job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Views {
    pub slots: Arc<View>,
    pub followers: Arc<View>,
    pub trainers: Arc<View>,
    /// The number of slots, if it is set.
    pub desired: Option<u32>,
    pub code: Option<CodeRecord>,
}

/// The members of the job, as etcd shows them.
#[derive(Debug, Default)]
pub(crate) struct Members {
    pub views: Views,
    /// The trainers in their view. The set is computed once for each change: a turn must not take longer with the
    /// number of members.
    pub live_trainers: Arc<BTreeSet<TrainerId>>,
    /// The live trainers in the order in which they joined.
    by_age: Vec<TrainerId>,
    /// The trainers that work: the first of these, as many as are desired.
    pub working: Arc<BTreeSet<TrainerId>>,
    /// The live trainers and the limit of which they were chosen.
    working_of: Option<(Arc<BTreeSet<TrainerId>>, Option<u32>)>,
    /// The pservers that hold slots. A slot whose key cannot be parsed has none.
    pub holders: BTreeMap<Slot, Incarnation>,
    /// The incarnations of the shards that pservers had a copy of when they took their slots over.
    pub followed: BTreeMap<Slot, Incarnation>,
    /// The spares that have a copy of a slot's shard.
    pub followers: BTreeMap<Slot, FollowerRecord>,
    /// Members whose programs have another protocol. They are left out.
    other_trainers: Vec<(TrainerId, u32)>,
    other_pservers: Vec<(Slot, u32)>,
}

/// Returns the protocol in the record of a member.
fn protocol_of(entry: &Entry) -> u32 {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Versioned {
        protocol: u32,
    }
    entry.json::<Versioned>().unwrap_or_default().protocol
}

impl Members {
    pub fn follow(&mut self, keys: &Keys, views: Views) {
        if !Arc::ptr_eq(&self.views.trainers, &views.trainers) {
            self.other_trainers.clear();
            let mut trainers: Vec<(i64, TrainerId)> = Vec::new();
            for (key, entry) in &views.trainers.entries {
                let Some(trainer) = keys.trainer_of(key) else { continue };
                match protocol_of(entry) {
                    PROTOCOL => trainers.push((entry.create_revision, trainer)),
                    other => self.other_trainers.push((trainer, other)),
                }
            }
            trainers.sort_unstable();
            self.by_age = trainers.into_iter().map(|(_, trainer)| trainer).collect();
            self.live_trainers = Arc::new(self.by_age.iter().copied().collect());
        }
        if !Arc::ptr_eq(&self.views.slots, &views.slots) {
            let records = views.slots.entries.iter().filter_map(|(key, entry)| {
                let slot = keys.slot_of(key).filter(|slot| keys.ps(*slot) == *key)?;
                Some((slot, entry.json::<PserverRecord>().ok()?, entry.create_revision))
            });
            (self.holders, self.followed) = (BTreeMap::new(), BTreeMap::new());
            self.other_pservers.clear();
            for (slot, record, create_revision) in records {
                if record.protocol != PROTOCOL {
                    self.other_pservers.push((slot, record.protocol));
                    continue;
                }
                self.holders.insert(slot, record.incarnation(create_revision));
                self.followed.extend(record.followed.map(|of| (slot, of)));
            }
        }
        if !Arc::ptr_eq(&self.views.followers, &views.followers) {
            let followers = views.followers.entries.iter();
            let followers = followers
                .filter_map(|(key, entry)| Some((keys.followed_slot_of(key)?, entry.json().ok()?)));
            self.followers = followers.collect();
        }
        self.views = views;
    }

    /// Describes the members that are left out because of their protocol.
    pub fn left_out(&self) -> Vec<String> {
        let pservers = self
            .other_pservers
            .iter()
            .map(|(slot, it)| (format!("the pserver of slot {slot}"), it));
        let trainers =
            self.other_trainers.iter().map(|(trainer, it)| (format!("trainer {trainer}"), it));
        let text = |(who, protocol): (String, &u32)| {
            format!(
                "{who} is left out: its program has protocol {protocol}, and that of the master has {PROTOCOL}; use \
                 programs of one version"
            )
        };
        pservers.chain(trainers).map(text).collect()
    }

    /// Lets at most `limit` trainers work.
    pub fn limit(&mut self, limit: Option<u32>) {
        let is_same =
            |(live, of): &(Arc<_>, _)| Arc::ptr_eq(live, &self.live_trainers) && *of == limit;
        if self.working_of.as_ref().is_some_and(is_same) {
            return;
        }
        self.working = match limit {
            Some(limit) if (limit as usize) < self.by_age.len() => {
                Arc::new(self.by_age[..limit as usize].iter().copied().collect())
            }
            Some(_) | None => self.live_trainers.clone(),
        };
        self.working_of = Some((self.live_trainers.clone(), limit));
    }
}

impl TrainingJob {
    /// Handles joined and lost members: requeues the tasks of lost trainers, reassigns lanes, and begins a
    /// new generation once every slot has a holder and the pserver set differs from the present generation's.
    pub(crate) fn follow_members(
        &mut self,
        moment: Moment,
        decision: &mut Decision<Self>,
    ) -> Progress {
        self.members.limit(self.state.trainers_max());
        let (live, working) = (self.members.live_trainers.clone(), self.members.working.clone());
        self.limits.trainers = working.len() as u32;
        self.note_most_trainers(working.len());
        let lost = self.state.ledger.lost_trainers(&live).into_iter().next();
        if let Some(lost) = lost {
            self.requeue_tasks_of(lost, decision);
            return Progress::Decided;
        }
        if self.live.note_trainers(moment, &live) {
            for suspect in self.lane_suspects() {
                warn!(suspect, "a record may crash trainers");
            }
        }
        self.live.assign_lanes(&working);
        let lost = self.lost_slots();
        self.live.note_lost_slots(moment, lost);
        let is_holder = |slot: &Slot, incarnation: &Incarnation| {
            self.members.holders.get(slot) == Some(incarnation)
        };
        self.live.note_followers(moment, &self.members.followers, is_holder);
        match self.pserver_set() {
            Some(pserver_set) if !self.is_present(&pserver_set) => {
                if self.waits_for_handover(&pserver_set, decision) {
                    return Progress::None;
                }
                let Some(stored) = self.stored(decision) else { return Progress::Decided };
                let reason = self.reason_for_generation(&pserver_set);
                let answer = self.live.handover.take().map(|it| it.answer);
                let start = match &answer {
                    Some(HandoverAnswer::State(state)) => Start::HandedOver(state),
                    Some(HandoverAnswer::NotYet | HandoverAnswer::No) | None => Start::Latest,
                };
                self.begin_generation(moment, stored, &pserver_set, reason, start, decision);
                Progress::Decided
            }
            Some(_) | None => Progress::None,
        }
    }

    /// Returns whether a generation with another number of slots waits for the states that the present ones hand over.
    fn waits_for_handover(
        &mut self,
        pserver_set: &[Incarnation],
        decision: &mut Decision<Self>,
    ) -> bool {
        let Some(record) =
            self.state.generation.as_ref().filter(|_| self.may_hand_over(pserver_set))
        else {
            self.live.handover = None;
            return false;
        };
        let of = record.generation;
        match self.live.handover.as_ref().filter(|it| it.of == of) {
            Some(Handover { answer, .. }) => matches!(answer, HandoverAnswer::NotYet),
            None => {
                self.live.handover = Some(Handover { of, answer: HandoverAnswer::NotYet });
                decision.effects.push(Effect::HandOver(of));
                true
            }
        }
    }

    /// Returns whether only the number of slots has changed, and all of the present ones are there. In asynchronous mode
    /// they have no common version.
    fn may_hand_over(&self, pserver_set: &[Incarnation]) -> bool {
        let Some(record) = &self.state.generation else { return false };
        self.job.record.spec.mode == Mode::Sync
            && record.slots.len() != pserver_set.len()
            && record.changes == self.job.record.changes.len() as u32
            && self.lost_slots().is_empty()
    }

    /// Warns once if the job has too few tasks for its trainers.
    fn note_most_trainers(&mut self, trainers: usize) {
        let most = self.live.trainers_most;
        if trainers <= most {
            return;
        }
        self.live.trainers_most = trainers;
        let was_known = plan_warnings::of_trainers(&self.job, most).is_some();
        if let Some(warning) =
            plan_warnings::of_trainers(&self.job, trainers).filter(|_| !was_known)
        {
            warn!(warning, "the job has more trainers than work");
        }
    }

    fn requeue_tasks_of(&mut self, trainer: TrainerId, decision: &mut Decision<Self>) {
        info!(%trainer, "trainer lost; its tasks return to todo");
        // Trainers lost before this term may have been lost together in an etcd outage.
        let attribution = match self.live.known_trainers.contains(&trainer) {
            true => Attribution::Task,
            false => Attribution::None,
        };
        self.draft(decision, |draft, limits| draft.lose_trainer(trainer, attribution, limits));
    }

    /// Describes the lanes whose trainers were lost one after another, in a synchronous job: in an asynchronous one,
    /// trainers compute tasks.
    pub(crate) fn lane_suspects(&self) -> Vec<String> {
        if self.job.record.spec.mode != Mode::Sync {
            return Vec::new();
        }
        let position = self.live.position;
        let suspects = self.live.lane_losses.suspects(position.version);
        let most = suspects.iter().map(|(_, losses)| *losses).max().unwrap_or(0);
        let suspects = suspects.into_iter().filter(|(_, losses)| *losses == most);
        let descriptions = suspects.map(|(lane, losses)| {
            let tasks = self.tasks_of_step(lane);
            format!(
                "{losses} trainers in a row were lost while they had lane {lane} at step {}: a record of \
                 task {tasks} may crash them",
                position.version
            )
        });
        descriptions.collect()
    }

    /// Returns the tasks that a lane computes in the current step.
    fn tasks_of_step(&self, lane: Lane) -> String {
        let position = self.live.position;
        let Some((_, schedule)) = self.live.schedule.as_ref().filter(|it| it.0 == position.pass)
        else {
            return "unknown".to_owned();
        };
        let step = position.version.0.saturating_sub(position.pass_start.0);
        let given_up = self.state.sync_tasks.given_up_in(position.pass);
        let pieces = schedule.micro_batch(lane, step, &given_up);
        let tasks: Vec<String> = pieces.iter().map(|piece| piece.task.to_string()).collect();
        tasks.join(" or ")
    }

    /// Returns the incarnation of each slot's holder, if every slot is held.
    pub(crate) fn pserver_set(&self) -> Option<Vec<Incarnation>> {
        let desired = self.members.views.desired?;
        let holders = &self.members.holders;
        let pserver_set: Option<Vec<Incarnation>> =
            (0..desired).map(|slot| holders.get(&Slot(slot)).copied()).collect();
        pserver_set.filter(|pserver_set| !pserver_set.is_empty())
    }

    /// Returns whether the present generation is that of a pserver set, with the present settings of the job.
    fn is_present(&self, pserver_set: &[Incarnation]) -> bool {
        let changes = self.job.record.changes.len() as u32;
        let present = self.state.generation.as_ref();
        present.is_some_and(|record| record.slots == pserver_set && record.changes == changes)
    }

    /// Returns the slots that are no longer held by the incarnation that the current generation names.
    fn lost_slots(&self) -> Vec<Slot> {
        let named = self.state.generation.iter().flat_map(|record| record.slots.iter().enumerate());
        let holders = &self.members.holders;
        let lost = named.filter(|(slot, named)| holders.get(&Slot(*slot as u32)) != Some(named));
        lost.map(|(slot, _)| Slot(slot as u32)).collect()
    }

    fn reason_for_generation(&self, pserver_set: &[Incarnation]) -> String {
        let Some(record) = &self.state.generation else { return "the job begins".to_owned() };
        if record.changes != self.job.record.changes.len() as u32 {
            return "the settings of the job were changed".to_owned();
        }
        if record.slots.len() != pserver_set.len() {
            return format!(
                "the number of slots changed from {} to {}",
                record.slots.len(),
                pserver_set.len()
            );
        }
        let named = |slots: &[Slot]| {
            let list: Vec<String> = slots.iter().map(Slot::to_string).collect();
            let slots = if slots.len() == 1 { "slot" } else { "slots" };
            format!("{slots} {}", list.join(", "))
        };
        let is_copied =
            |slot: &Slot| self.members.followed.get(slot) == record.slots.get(slot.0 as usize);
        let (copied, lost): (Vec<Slot>, Vec<Slot>) =
            self.lost_slots().into_iter().partition(is_copied);
        match (&copied[..], &lost[..]) {
            ([], lost) => format!("memory lost in {}", named(lost)),
            (copied, []) => format!("followers took over {}", named(copied)),
            (copied, lost) => {
                format!("memory lost in {}; followers took over {}", named(lost), named(copied))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;

    fn view(records: Vec<(String, Value)>) -> Arc<View> {
        let entry = |(key, value): (String, Value)| {
            let (value, revision) = (value.to_string().into_bytes(), 3);
            let entry = Entry {
                key: key.clone(),
                value,
                create_revision: revision,
                mod_revision: revision,
                version: 1,
                lease: 1,
            };
            (key, entry)
        };
        let entries: BTreeMap<String, Entry> = records.into_iter().map(entry).collect();
        Arc::new(View { revision: 3, entries })
    }

    /// F38: programs of two versions in one job: those that the master may not understand are left out, and named.
    #[test]
    fn members_of_another_protocol_are_left_out_and_named() {
        let keys = Keys::of_job("digits");
        let id = |number: u128| TrainerId(uuid::Uuid::from_u128(number));
        let pserver = |protocol: u32| {
            let id = uuid::Uuid::nil();
            json!({"id": id, "address": "a", "admin": "b", "protocol": protocol})
        };
        let trainer = |protocol: u32| json!({"admin": "", "numerics": "", "protocol": protocol});
        let mut without = pserver(0);
        without.as_object_mut().expect("it is one").remove("protocol");
        let views = Views {
            slots: view(vec![
                (keys.ps(Slot(0)), pserver(PROTOCOL)),
                (keys.ps(Slot(1)), pserver(PROTOCOL + 1)),
                (keys.ps(Slot(2)), without),
            ]),
            trainers: view(vec![
                (keys.trainer(id(1)), trainer(PROTOCOL)),
                (keys.trainer(id(2)), trainer(PROTOCOL - 1)),
            ]),
            ..Views::default()
        };
        let mut members = Members::default();
        members.follow(&keys, views);
        assert_eq!(members.holders.keys().collect::<Vec<_>>(), [&Slot(0)]);
        assert_eq!(*members.live_trainers, BTreeSet::from([id(1)]));
        let left_out = members.left_out().join("\n");
        for who in ["slot 1 is left out", "slot 2 is left out", "trainer 00000000"] {
            assert!(left_out.contains(who), "{left_out}");
        }
        assert_eq!(left_out.lines().count(), 3, "{left_out}");
    }
}
