//! Begins generations: selects the checkpoint and the pserver set, and resets the task queues.

use std::collections::VecDeque;

use steadfast_common::ids::{Generation, Incarnation, Slot, TaskId, Version};
use steadfast_common::job::spec::{EvaluationSpec, LostPserver, Mode};
use steadfast_common::machine::Moment;
use steadfast_common::records::amendment::{Amended, Amendment};
use steadfast_common::records::discarded_records::{DISCARDED_RECORDS_MAX, DiscardedRecord};
use steadfast_common::records::{
    CheckpointRecord, EvaluationRecord, GenerationRecord, QueueSnapshot, ROLLED_BACK_TO,
};
use steadfast_common::tensor::placement::PlacementRecord;
use steadfast_coord::OPS_MAX;
use steadfast_master_core::job_state::Fact;
use steadfast_master_core::ledger::QueueFact;
use steadfast_master_core::restore_point::{Candidate, RestorePoint, choose};
use steadfast_master_core::saver::Saver;
use tracing::{error, info, warn};

use crate::event_loop::effects::{Answer, Effect};
use crate::event_loop::handle::{ControlError, Reply, Rollback};
use crate::event_loop::machine::{CHANGES_OF_ONE, Progress, TrainingJob};

/// Manifests invalidated in one transaction.
const INVALIDATED_AT_ONCE: usize = 32;

/// Manifests invalidated in the transaction that begins a generation after a requested rollback; fewer, as manifests
/// may be large.
const INVALIDATED_WITH_GENERATION: usize = 8;

type Decision = steadfast_common::machine::Decision<TrainingJob>;

/// Where a generation begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start<'a> {
    /// From the latest checkpoint; a surviving slot may keep its memory.
    Latest,
    /// From what the slots of the present generation hand over, because their number changes.
    HandedOver(&'a CheckpointRecord),
    /// From the latest checkpoint, after the checkpoint of the present generation could not be loaded.
    AfterDamage,
    /// From the checkpoint that a user chose; in the same transaction, manifests change.
    Chosen { id: &'a str, manifests: &'a [Fact] },
    /// From the latest checkpoint, with all its slots, because a user has changed the job.
    Amended,
    /// From the latest checkpoint, with all its slots, without a record: contributions to the step in progress may have
    /// it.
    Without(&'a DiscardedRecord),
}

/// What a generation needs of etcd beside the state.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    /// All manifests by id.
    pub manifests: Vec<Candidate>,
    /// The round after the present one, if queues may be rolled back to it.
    pub round: Option<u64>,
    /// Tasks of that round: a master that died during a rollback may have left keys of another checkpoint's queues.
    pub stale: Vec<TaskId>,
}

impl Stored {
    /// Returns a manifest that can be read, unless it is invalid for this reason already.
    fn still_valid(&mut self, id: &str, reason: &str) -> Option<&mut CheckpointRecord> {
        let manifest = self.manifests.iter_mut().find(|it| it.id == id)?.record.as_mut().ok()?;
        Some(manifest).filter(|it| it.invalidated.as_deref() != Some(reason))
    }
}

/// The end of a rollback that a user requested: the rest of the manifests are invalidated, then the user is answered.
#[derive(Debug)]
pub(crate) struct RolledBack {
    later: VecDeque<Fact>,
    reply: Reply<Generation>,
}

impl TrainingJob {
    /// Returns what was read from etcd; asks for it if nothing was.
    pub(crate) fn stored(&mut self, decision: &mut Decision) -> Option<Stored> {
        let is_rewound =
            self.job.record.spec.mode == Mode::Async && self.state.generation.is_some();
        let round = is_rewound.then(|| self.state.ledger.head().round + 1);
        // A pass may have ended since it was read.
        let stored = self.stored.take().filter(|stored| stored.round == round);
        if stored.is_none() {
            decision.effects.push(Effect::Read { round });
        }
        stored
    }

    /// Begins a generation from the latest valid checkpoint (or the chosen one), or from the start if
    /// there is none. A slot may have lost its holder since `pserver_set` was read: the next change of the
    /// slots' keys then begins another generation, and until then no process serves the slot.
    ///
    /// If slots keep their memory, the tasks are taken back before, in as many transactions as needed. Then the caller
    /// calls this again after each.
    pub(crate) fn begin_generation(
        &mut self,
        moment: Moment,
        stored: Stored,
        pserver_set: &[Incarnation],
        reason: String,
        from: Start<'_>,
        decision: &mut Decision,
    ) -> Begun {
        let point = self.restore_point(&stored, from);
        let kept = self.kept(pserver_set, &point, from);
        let is_async = self.job.record.spec.mode == Mode::Async;
        if is_async && !kept.is_empty() && self.recall(decision) == Progress::Decided {
            self.stored = Some(stored);
            return Begun::NotYet;
        }
        for (id, reason) in &point.skipped {
            error!(checkpoint = id, reason, "checkpoint skipped");
        }
        let before = self.state.generation.as_ref().map_or(0, |record| record.generation.0);
        let handover = if let Start::HandedOver(state) = from { Some(state) } else { None };
        let record = GenerationRecord {
            generation: Generation(before + 1),
            slots: pserver_set.to_vec(),
            placement: match self.job.record.spec.optimizer.needs_whole_parameters() {
                true => PlacementRecord::WholeParameters { slots: pserver_set.len() as u32 },
                false => PlacementRecord::LargestFirst { slots: pserver_set.len() as u32 },
            },
            checkpoint: point.checkpoint.as_ref().map(|(id, _)| id.clone()),
            kept,
            reason,
            changes: self.job.record.changes.len() as u32,
            discarded_records: self.discarded_with(from),
            handover: handover.cloned().map(Box::new),
        };
        let manifest = point.checkpoint.as_ref().map(|(_, manifest)| manifest);
        let begins_with = handover.or(manifest);
        let start = begins_with.map(CheckpointRecord::first_pass);
        let first = self.state.stream.record.first;
        if record.kept.is_empty() && start.unwrap_or_default() < first {
            let reason = format!(
                "no checkpoint is left of pass {} of the stream or later, and the files before may be gone",
                first.0 + 1
            );
            self.fail_job(moment, reason, decision);
            return Begun::Yes;
        }
        info!(
            generation = record.generation.0,
            checkpoint = record.checkpoint,
            reason = record.reason,
            "generation begins"
        );
        if let Start::Chosen { manifests, .. } = from {
            manifests.iter().for_each(|fact| self.add(fact.clone(), decision));
        }
        if is_async && 0 < before && record.kept.is_empty() {
            let to = manifest.and_then(|it| it.queue.clone()).unwrap_or_default();
            self.rewind(&to, &stored.stale, decision);
        }
        self.point_at(&point, &stored, decision);
        if record.kept.is_empty() {
            let start = begins_with.map(|it| it.position).unwrap_or_default();
            let evaluated = self.state.evaluation.as_ref();
            // Decisions about the course stay, since training comes to the same parameters again, unless a user
            // abandons them.
            let is_chosen = matches!(from, Start::Chosen { .. });
            let stays = |it: &EvaluationRecord| it.course.is_some() && !is_chosen;
            if evaluated.is_some_and(|it| start.version < it.version && !stays(it)) {
                // Its parameters are discarded. Those of the checkpoint were trained with a reduced learning rate, and
                // go on with it.
                let left = evaluated.and_then(|it| EvaluationSpec::forgotten(it, &start));
                self.add(Fact::Evaluation(left.map(Box::new)), decision);
            }
            self.live.position = start;
        }
        self.add(Fact::Generation(record), decision);
        self.live.recoveries.resume_from(self.live.position.version);
        self.live.saver = Saver::default();
        Begun::Yes
    }

    /// Selects the manifest to begin from.
    fn restore_point(&self, stored: &Stored, start: Start<'_>) -> RestorePoint {
        let (from, chosen) = match start {
            Start::Latest
            | Start::HandedOver(_)
            | Start::AfterDamage
            | Start::Amended
            | Start::Without(_) => (self.state.checkpoint.as_deref(), None),
            Start::Chosen { id, .. } => (Some(id), Some(id)),
        };
        let mut candidates = stored.manifests.clone();
        // The rollback to a checkpoint makes it valid again.
        let chosen = candidates.iter_mut().filter(|it| chosen == Some(&it.id));
        chosen.filter_map(|it| it.record.as_mut().ok()).for_each(|it| it.invalidated = None);
        choose(from, candidates, CheckpointRecord::invalid_reason)
    }

    /// Returns the slots that keep their memory: all, if each pserver that was lost had a follower; otherwise, those that
    /// continue although another slot has lost its memory.
    fn kept(
        &self,
        pserver_set: &[Incarnation],
        point: &RestorePoint,
        start: Start<'_>,
    ) -> Vec<Slot> {
        let spec = &self.job.record.spec;
        let Some(record) = &self.state.generation else { return Vec::new() };
        let keeps_memory = record.slots.len() == pserver_set.len()
            && record.changes == self.job.record.changes.len() as u32;
        if !keeps_memory {
            return Vec::new();
        }
        let all = || (0..pserver_set.len() as u32).map(Slot);
        let named = |slot: &Slot| &record.slots[slot.0 as usize];
        let is_same = |slot: &Slot| pserver_set[slot.0 as usize] == *named(slot);
        let is_copied = |slot: &Slot| self.members.followed.get(slot) == Some(named(slot));
        let is_moved = !all().all(|slot| is_same(&slot));
        if matches!(start, Start::Latest)
            && is_moved
            && all().all(|slot| is_same(&slot) || is_copied(&slot))
        {
            return all().collect();
        }
        let goes_on = spec.mode == Mode::Async
            && spec.asynchronous.lost_pserver == LostPserver::Continue
            && point.checkpoint.is_some();
        let slots = all().filter(|slot| goes_on && is_same(slot));
        match start {
            Start::Latest => slots.collect(),
            // A slot that began from the damaged checkpoint is rolled back with the others, even if its own
            // shard was intact.
            Start::AfterDamage => slots.filter(|slot| record.kept.contains(slot)).collect(),
            Start::HandedOver(_) | Start::Chosen { .. } | Start::Amended | Start::Without(_) => {
                Vec::new()
            }
        }
    }

    /// Returns the records that a generation leaves out: those of the present one, and that without which it begins.
    fn discarded_with(&self, start: Start<'_>) -> Vec<DiscardedRecord> {
        let mut records =
            self.state.generation.as_ref().map_or_else(Vec::new, |it| it.discarded_records.clone());
        if let Start::Without(record) = start {
            records.push(record.clone());
        }
        records
    }

    /// Begins a generation without a record that ends the processes which compute it. If the latest checkpoint reflects
    /// the step from `version`, a process has computed the record, and it stays.
    fn discard(
        &mut self,
        moment: Moment,
        stored: Stored,
        record: &DiscardedRecord,
        version: Version,
        decision: &mut Decision,
    ) -> Progress {
        let Some(pserver_set) = self.pserver_set() else { return Progress::None };
        let point = self.restore_point(&stored, Start::Without(record));
        let begins = point.checkpoint.as_ref().map_or(Version(0), |(_, it)| it.position.version);
        if self.job.record.spec.mode == Mode::Sync && !record.held_out && version < begins {
            warn!(reason = record.reason, "the record was computed after all; it stays");
            return Progress::None;
        }
        let known = self.discarded_with(Start::Latest);
        if DISCARDED_RECORDS_MAX <= known.len() {
            let reason = format!(
                "the model ends its process on more than {DISCARDED_RECORDS_MAX} records, such as {}",
                record.reason
            );
            self.fail_job(moment, reason, decision);
            return Progress::Decided;
        }
        let named = self.job.manifest.record_named(record.task, record.record.into());
        let named = named.map(|it| format!("record {} of {}: ", it.first + 1, it.file));
        let why = format!("a record is left out, {}{}", named.unwrap_or_default(), record.reason);
        error!(task = %record.task, reason = why, "a record is left out");
        self.begin_generation(moment, stored, &pserver_set, why, Start::Without(record), decision);
        Progress::Decided
    }

    /// Moves the pointer to the checkpoint that the generation begins from, and invalidates the skipped
    /// checkpoints with their reasons.
    fn point_at(&mut self, point: &RestorePoint, stored: &Stored, decision: &mut Decision) {
        let chosen = point.checkpoint.as_ref().map(|(id, _)| id.clone());
        if chosen == self.state.checkpoint {
            return;
        }
        warn!(
            from = self.state.checkpoint,
            to = chosen,
            "the pointer to the latest checkpoint was moved"
        );
        for (id, reason) in point.skipped.iter().take(INVALIDATED_AT_ONCE) {
            let manifest = stored.manifests.iter().find(|it| it.id == *id);
            // A manifest that cannot be read is skipped again each time.
            if let Some(Ok(manifest)) = manifest.map(|it| &it.record)
                && manifest.invalidated.is_none()
            {
                self.add(invalidated(id, manifest.clone(), reason), decision);
            }
        }
        self.add(Fact::Latest(chosen), decision);
    }

    /// Takes tasks back, as many as fit into one transaction. If no generation follows, the tasks are
    /// repeated, which applies no record twice.
    fn recall(&mut self, decision: &mut Decision) -> Progress {
        let mut facts = self.state.ledger.recall(&self.limits);
        if facts.is_empty() {
            return Progress::None;
        }
        facts.truncate(OPS_MAX / 4);
        self.draft(decision, |draft, _| draft.add_queue_facts(facts));
        Progress::Decided
    }

    /// Rolls the queues back. Changes that do not fit into the last transaction are committed before it. The first of
    /// them are those that have no effect without the last transaction: task keys of a round that the head does not
    /// name yet, then replies to trainers of the generation that ends.
    fn rewind(&mut self, to: &QueueSnapshot, stale: &[TaskId], decision: &mut Decision) {
        let round = self.state.ledger.head().round + 1;
        let mut queue_facts = self.state.ledger.rewind(to);
        queue_facts.iter().for_each(|fact| self.state.evolve(&Fact::Queue(fact.clone())));
        let stale = stale.iter().map(|task| Fact::Queue(QueueFact::Done { round, task: *task }));
        decision.ahead.push(stale.collect());
        for (group, prefix) in [
            (Group::Tasks, self.keys.round_prefix(round)),
            (Group::Replies, self.keys.replies_prefix()),
            (Group::GivenUp, self.keys.given_up_prefix()),
        ] {
            if decision.facts.len() + queue_facts.len() + CHANGES_OF_ONE <= OPS_MAX {
                break;
            }
            let (ahead, kept): (Vec<QueueFact>, Vec<QueueFact>) =
                queue_facts.into_iter().partition(|fact| Group::of(fact) == Some(group));
            queue_facts = kept;
            info!(prefix, keys = ahead.len(), "task queues rolled back");
            decision.ahead.push(ahead.into_iter().map(Fact::Queue).collect());
        }
        decision.facts.extend(queue_facts.into_iter().map(Fact::Queue));
    }

    /// Decides the rollback that an event requested.
    pub(crate) fn run_rollback(&mut self, moment: Moment, decision: &mut Decision) -> Progress {
        if self.live.rollback.is_none() {
            return Progress::None;
        }
        let Some(mut stored) = self.stored(decision) else { return Progress::Decided };
        let Some(rollback) = self.live.rollback.take() else { return Progress::None };
        match rollback {
            Rollback::Damaged { checkpoint, reason } => {
                if let Some(manifest) = stored.still_valid(&checkpoint, &reason) {
                    manifest.invalidated = Some(reason.clone());
                    let fact = invalidated(&checkpoint, manifest.clone(), &reason);
                    self.add(fact, decision);
                    // It goes on after the commit.
                    self.stored = Some(stored);
                    self.live.rollback = Some(Rollback::Damaged { checkpoint, reason });
                    return Progress::Decided;
                }
                let Some(pserver_set) = self.pserver_set() else { return Progress::None };
                let why = format!("checkpoint {checkpoint} is damaged: {reason}");
                let start = Start::AfterDamage;
                let begun =
                    self.begin_generation(moment, stored, &pserver_set, why, start, decision);
                if begun == Begun::NotYet {
                    self.live.rollback = Some(Rollback::Damaged { checkpoint, reason });
                }
            }
            Rollback::Inconsistent { reason } => {
                let Some(pserver_set) = self.pserver_set() else { return Progress::None };
                let (why, start) = (reason.clone(), Start::Latest);
                let begun =
                    self.begin_generation(moment, stored, &pserver_set, why, start, decision);
                if begun == Begun::NotYet {
                    self.live.rollback = Some(Rollback::Inconsistent { reason });
                }
            }
            Rollback::Discarded { record, version } => {
                return self.discard(moment, stored, &record, version, decision);
            }
            Rollback::Wanted { checkpoint, force, reply } => {
                match self.roll_back(moment, &checkpoint, force, stored, decision) {
                    Ok(later) => self.rolled_back = Some(RolledBack { later, reply }),
                    Err(error) => {
                        let answer = Answer::Generation(reply, Err(error));
                        decision.effects.push(Effect::Answer(answer));
                        return Progress::None;
                    }
                }
            }
            Rollback::Amended { amendment, reply } => {
                match self.amend(moment, &amendment, stored, decision) {
                    Ok(()) => {
                        self.rolled_back = Some(RolledBack { later: VecDeque::new(), reply });
                    }
                    Err(error) => {
                        let answer = Answer::Generation(reply, Err(error));
                        decision.effects.push(Effect::Answer(answer));
                        return Progress::None;
                    }
                }
            }
        }
        Progress::Decided
    }

    /// Begins a generation from the latest checkpoint, from which the job goes on with an amendment.
    fn amend(
        &mut self,
        moment: Moment,
        amendment: &Amendment,
        stored: Stored,
        decision: &mut Decision,
    ) -> Result<(), ControlError> {
        let not_amended = |reason: &str| ControlError::NotAmended(reason.to_owned());
        let point = self.restore_point(&stored, Start::Amended);
        let Some((id, manifest)) = &point.checkpoint else {
            return Err(not_amended("it has no checkpoint to go on from"));
        };
        if self.state.checkpoint.as_ref() != Some(id) {
            return Err(not_amended("its latest checkpoint is damaged"));
        }
        let pserver_set = self.pserver_set().ok_or(ControlError::NotAllSlots)?;
        let (job, evaluation) = (&self.job.record, self.state.evaluation.as_ref());
        let amended = job.amended(amendment, manifest, evaluation, moment.unix_ms);
        let Amended { mut record, evaluation } = amended.map_err(ControlError::NotAmended)?;
        let reason = match amendment {
            Amendment::Extend(_) => "the job was extended",
            Amendment::Change(_) => {
                record = record.changed_while_running();
                "the settings of the job were changed"
            }
        };
        let rules = Box::new(record.spec.checkpoint.clone());
        self.add(Fact::Job(Box::new(record)), decision);
        if evaluation != self.state.evaluation {
            self.add(Fact::Evaluation(evaluation.map(Box::new)), decision);
        }
        // No slot keeps its memory, so it begins at once.
        let (reason, start) = (reason.to_owned(), Start::Amended);
        self.begin_generation(moment, stored, &pserver_set, reason, start, decision);
        decision.effects.push(Effect::Checkpoints(rules));
        Ok(())
    }

    /// Rolls back to a checkpoint that a user chose. Invalidates checkpoints that were committed after it
    /// or are ahead of it, so that no generation begins from an abandoned branch of training. Returns the invalidations
    /// that did not fit into the transaction.
    fn roll_back(
        &mut self,
        moment: Moment,
        id: &str,
        force: bool,
        stored: Stored,
        decision: &mut Decision,
    ) -> Result<VecDeque<Fact>, ControlError> {
        let found = stored.manifests.iter().find(|it| it.id == id);
        let found = found.ok_or_else(|| ControlError::NoSuchCheckpoint(id.to_owned()))?;
        let not_restorable = |reason| ControlError::NotRestorable { id: id.to_owned(), reason };
        let manifest = found.record.clone().map_err(not_restorable)?;
        if let Some(reason) = manifest.invalid_reason() {
            return Err(not_restorable(reason));
        }
        let lost = self.live.position.version.0.saturating_sub(manifest.position.version.0);
        if !force {
            return Err(ControlError::NeedsForce { id: id.to_owned(), steps: lost });
        }
        let pserver_set = self.pserver_set().ok_or(ControlError::NotAllSlots)?;
        let mut manifests = abandoned(id, &manifest, found.create_revision, &stored.manifests);
        let later = manifests.split_off(manifests.len().min(INVALIDATED_WITH_GENERATION));
        if manifest.invalidated.is_some() {
            let record = Some(Box::new(CheckpointRecord { invalidated: None, ..manifest }));
            manifests.push(Fact::Manifest { id: id.to_owned(), record });
        }
        let reason = format!("rolled back to {id} on request, {lost} steps");
        let start = Start::Chosen { id, manifests: &manifests };
        // No slot keeps its memory, so it begins at once.
        self.begin_generation(moment, stored, &pserver_set, reason, start, decision);
        Ok(later.into())
    }

    /// Decides what is left of a rollback after its generation has begun.
    pub(crate) fn finish_rollback(&mut self, decision: &mut Decision) -> Progress {
        let Some(mut rolled_back) = self.rolled_back.take() else { return Progress::None };
        if let Some(fact) = rolled_back.later.pop_front() {
            self.add(fact, decision);
            self.rolled_back = Some(rolled_back);
            return Progress::Decided;
        }
        let begun = self.state.generation.as_ref().map_or(Generation(0), |it| it.generation);
        let answer = Answer::Generation(rolled_back.reply, Ok(begun));
        decision.effects.push(Effect::Answer(answer));
        Progress::None
    }

    /// Rejects a rollback that a user wants.
    pub(crate) fn reject_rollback(&mut self, error: ControlError, decision: &mut Decision) {
        let wanted = self.live.rollback.take();
        if let Some(Rollback::Wanted { reply, .. } | Rollback::Amended { reply, .. }) = wanted {
            let answer = Answer::Generation(reply, Err(error));
            decision.effects.push(Effect::Answer(answer));
        }
    }
}

/// Whether a generation has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    Yes,
    /// Tasks are taken back first.
    NotYet,
}

/// Changes of the queues by the keys that they are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    Tasks,
    Replies,
    GivenUp,
}

impl Group {
    /// Returns the group of a fact; `None` if others have no effect without it.
    fn of(fact: &QueueFact) -> Option<Self> {
        match fact {
            QueueFact::Head(_) => None,
            QueueFact::Task { .. } | QueueFact::Done { .. } => Some(Self::Tasks),
            QueueFact::Replied { .. } | QueueFact::Forgotten { .. } => Some(Self::Replies),
            QueueFact::GivenUp { .. } => Some(Self::GivenUp),
        }
    }
}

/// Returns the invalidations of the checkpoints that a rollback to `manifest` abandons.
fn abandoned(
    id: &str,
    manifest: &CheckpointRecord,
    create_revision: i64,
    manifests: &[Candidate],
) -> Vec<Fact> {
    let mut facts = Vec::new();
    for candidate in manifests {
        // A manifest that cannot be read is skipped by each generation.
        let Ok(other) = &candidate.record else { continue };
        // A checkpoint that is ahead may be older, if the job abandoned its branch, returned to it and
        // abandons it again.
        let is_abandoned = create_revision < candidate.create_revision
            || manifest.position.version < other.position.version;
        if is_abandoned {
            let reason = format!("{ROLLED_BACK_TO}{id}");
            facts.push(invalidated(&candidate.id, other.clone(), &reason));
        }
    }
    facts
}

fn invalidated(id: &str, manifest: CheckpointRecord, reason: &str) -> Fact {
    let record = CheckpointRecord { invalidated: Some(reason.to_owned()), ..manifest };
    Fact::Manifest { id: id.to_owned(), record: Some(Box::new(record)) }
}
