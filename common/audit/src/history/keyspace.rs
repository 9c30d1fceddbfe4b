//! All keys but the task queues and the rendezvous: the lock, generations, checkpoints, and write-once records.

use std::collections::BTreeMap;

use steadfast_common::ids::Generation;
use steadfast_common::job::spec::EvaluationSpec;
use steadfast_common::records::key_table::Key;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{
    CheckpointRecord, EvaluationRecord, GenerationRecord, JobRecord, ROLLED_BACK_TO,
};

use super::records::read;
use super::{Change, HistoryReport, Revision, Rule};

/// The checked keys, as of the last revision.
pub(super) struct Keyspace<'a> {
    keys: &'a Keys,
    lock: Option<Lock>,
    /// The highest create-revision of a lock so far.
    youngest: i64,
    generation: Option<GenerationRecord>,
    checkpoints: BTreeMap<String, CheckpointRecord>,
    latest: Option<String>,
    job: Option<JobRecord>,
    evaluation: Option<EvaluationRecord>,
}

struct Lock {
    create_revision: i64,
    holder: String,
}

impl<'a> Keyspace<'a> {
    pub fn new(keys: &'a Keys, start: &[Change]) -> Self {
        let mut keyspace = Self {
            keys,
            lock: None,
            youngest: 0,
            generation: None,
            checkpoints: BTreeMap::new(),
            latest: None,
            job: None,
            evaluation: None,
        };
        // Violations within the initial state are not reported.
        let mut unseen = HistoryReport::default();
        start.iter().for_each(|change| keyspace.apply(0, change, &mut unseen));
        keyspace
    }

    /// Returns the records of all existing checkpoints, in the order of their ids.
    pub fn checkpoints(&self) -> impl Iterator<Item = (&String, &CheckpointRecord)> {
        self.checkpoints.iter()
    }

    pub fn checkpoint(&self, id: &str) -> Option<&CheckpointRecord> {
        self.checkpoints.get(id)
    }

    /// Checks one revision and applies it.
    pub fn check(&mut self, revision: &Revision, report: &mut HistoryReport) {
        let at = revision.revision;
        self.check_fence(revision, report);
        let before = self.latest.clone().and_then(|id| {
            let position = self.checkpoints.get(&id)?.position.version;
            Some((id, position))
        });
        let pointer = self.keys.checkpoint_latest();
        let mut moved = false;
        let extends = self.extends(revision);
        for change in &revision.changes {
            moved |= change.key == pointer;
            if !extends.contains(&change.key) {
                self.check_once(at, change, report);
            }
            if change.key == self.keys.evaluation() {
                self.check_course(revision, change, report);
            }
            self.apply(at, change, report);
        }
        self.check_rollback(revision, report);
        let Some(id) = &self.latest else { return };
        let Some(record) = self.checkpoints.get(id) else {
            let text = format!("the latest checkpoint is {id}, which does not exist");
            return report.breaks(at, Rule::Checkpoints, text);
        };
        let Some((id_before, version)) = before.filter(|_| moved) else { return };
        let is_whole = self.checkpoints.get(&id_before).is_some_and(|it| it.invalidated.is_none());
        if record.position.version < version && is_whole {
            let text = format!("the latest checkpoint moved back from {id_before} to {id}");
            report.breaks(at, Rule::Checkpoints, text);
        }
    }

    /// Checks that what is said to follow from the evaluations so far does follow from them.
    fn check_course(&self, revision: &Revision, change: &Change, report: &mut HistoryReport) {
        let at = revision.revision;
        let Some(job) = &self.job else { return };
        let changes_job = revision.changes.iter().any(|it| it.key == self.keys.job());
        let known = self.evaluation.as_ref();
        // A change of the job forgets evaluations from its step on.
        if changes_job {
            return;
        }
        let has_course = known.is_some_and(|it| it.course.is_some());
        if change.value.is_none() {
            if has_course && self.forgets(revision).is_none_or(|left| left.is_some()) {
                let text = "the course of the job was deleted without a rollback".to_owned();
                report.breaks(at, Rule::Course, text);
            }
            return;
        }
        let Some(record) = read::<EvaluationRecord>(at, change, report) else { return };
        let rules = job.evaluation_of(record.version);
        // As text: NaN is not equal to itself.
        let is_same = |it: &EvaluationRecord| {
            serde_json::to_string(it).ok() == serde_json::to_string(&record).ok()
        };
        let counts_once = rules.decides() || has_course;
        let is_later = !counts_once || known.is_none_or(|known| known.version < record.version);
        let undecided = EvaluationRecord { course: None, ..record.clone() };
        let follows = is_later && is_same(&rules.decided(known, undecided));
        let left = self.forgets(revision).flatten();
        if !follows && !left.is_some_and(|left| is_same(&left)) {
            let text = format!(
                "the course after the evaluation of step {} does not follow from the evaluations so far",
                record.version
            );
            report.breaks(at, Rule::Course, text);
        }
    }

    /// Returns what a requested rollback of a revision leaves of the latest evaluation; `None` if the revision begins no
    /// generation.
    fn forgets(&self, revision: &Revision) -> Option<Option<EvaluationRecord>> {
        let begun = revision.changes.iter().find(|it| it.key == self.keys.generation())?;
        let record: GenerationRecord = serde_json::from_str(begun.value.as_ref()?).ok()?;
        let stored = record.checkpoint.and_then(|id| self.checkpoints.get(&id));
        let from = record.handover.as_deref().or(stored);
        let position = from.map(|from| from.position).unwrap_or_default();
        let latest = self.evaluation.as_ref();
        Some(latest.and_then(|latest| EvaluationSpec::forgotten(latest, &position)))
    }

    /// Checks that checkpoints are abandoned no earlier than by the generation that begins from another one. If the
    /// master died in between, the job would lose them without a rollback.
    fn check_rollback(&self, revision: &Revision, report: &mut HistoryReport) {
        let begun = self.generation.as_ref().and_then(|it| it.checkpoint.as_deref());
        for change in &revision.changes {
            let id = change.key.strip_prefix(&self.keys.checkpoints_prefix());
            let record = id.and_then(|id| Some((id, self.checkpoints.get(id)?)));
            let Some((id, reason)) = record.and_then(|it| Some((it.0, it.1.invalidated.as_ref()?)))
            else {
                continue;
            };
            if reason.strip_prefix(ROLLED_BACK_TO).is_some_and(|to| Some(to) != begun) {
                let text = format!("checkpoint {id} was abandoned before the rollback");
                report.breaks(revision.revision, Rule::Checkpoints, text);
            }
        }
    }

    /// Returns whether only the acting master may have made a change. The deletion of a leased key is an exception,
    /// because the end of a lease also deletes its keys.
    fn is_governed(&self, change: &Change) -> bool {
        let row = self.keys.row_of(&change.key).filter(|row| row.is_fenced());
        row.is_some_and(|row| change.value.is_some() || !row.is_leased)
    }

    fn check_fence(&mut self, revision: &Revision, report: &mut HistoryReport) {
        let at = revision.revision;
        let lock = self.keys.master_lock();
        let governed = revision.changes.iter().find(|change| self.is_governed(change));
        let put = revision.changes.iter().find(|change| change.key == lock);
        if let Some(Change { value: Some(holder), create_revision, .. }) = put {
            if *create_revision < self.youngest {
                let text = "the master's lock is older than an earlier one";
                report.breaks(at, Rule::Fence, text);
            }
            let is_same =
                self.lock.as_ref().is_some_and(|it| it.create_revision == *create_revision);
            let is_other = self.lock.as_ref().is_some_and(|it| is_same && it.holder != *holder);
            if is_other {
                let text = "a process wrote that does not hold the present lock";
                report.breaks(at, Rule::Fence, text);
            }
            report.terms += u64::from(!is_same);
            let taken = *create_revision == at;
            if let Some(change) = governed.filter(|_| taken) {
                let text = format!("{} changed while the lock was not held", change.key);
                report.breaks(at, Rule::Fence, text);
            }
            self.youngest = self.youngest.max(*create_revision);
            report.commits += u64::from(governed.is_some());
        } else if let Some(change) = governed {
            let text = format!("{} changed in a transaction without the master's lock", change.key);
            report.breaks(at, Rule::Fence, text);
        }
    }

    /// Checks keys that are written once: the job, its result, the record of each generation.
    fn check_once(&self, at: i64, change: &Change, report: &mut HistoryReport) {
        let is_final = self.keys.row_of(&change.key).is_some_and(Key::is_final);
        if is_final && (change.value.is_none() || 1 < change.version) {
            report.breaks(at, Rule::Once, format!("{} changed after it was written", change.key));
        }
    }

    /// Returns the keys that a revision changes because it extends the job, or changes its settings: the job, and its
    /// result, which is deleted.
    fn extends(&self, revision: &Revision) -> Vec<String> {
        let (job, result) = (self.keys.job(), self.keys.result());
        let next =
            revision.changes.iter().find(|it| it.key == job).and_then(|it| it.value.as_ref());
        let next = next.and_then(|it| serde_json::from_str::<JobRecord>(it).ok());
        let lock = self.keys.master_lock();
        let is_fenced = revision.changes.iter().any(|it| it.key == lock && it.value.is_some());
        let latest = self.latest.as_ref().and_then(|id| self.checkpoints.get(id));
        let is_extended = |next: &JobRecord| {
            let known = self.job.as_ref()?;
            match known.is_extended_to(next) {
                true => Some(next.extensions.last()?.version),
                false => known.is_changed_to(next).then_some(next.changes.last()?.version),
            }
        };
        let is_extended = |next: &JobRecord| {
            let from = is_extended(next);
            is_fenced && from.is_some() && from == latest.map(|it| it.position.version)
        };
        match next.is_some_and(|next| is_extended(&next)) {
            false => Vec::new(),
            true => {
                let deletion = |it: &&Change| it.key == result && it.value.is_none();
                let deleted = revision.changes.iter().find(deletion).map(|it| it.key.clone());
                [job].into_iter().chain(deleted).collect()
            }
        }
    }

    fn apply(&mut self, at: i64, change: &Change, report: &mut HistoryReport) {
        let key = &change.key;
        if *key == self.keys.master_lock() {
            self.lock = change
                .value
                .clone()
                .map(|holder| Lock { create_revision: change.create_revision, holder });
        } else if *key == self.keys.job() {
            let record = change.value.as_ref();
            self.job = record.and_then(|it| serde_json::from_str(it).ok());
        } else if *key == self.keys.evaluation() {
            let record = change.value.as_ref();
            self.evaluation = record.and_then(|it| serde_json::from_str(it).ok());
        } else if *key == self.keys.generation() {
            self.apply_generation(at, change, report);
        } else if *key == self.keys.checkpoint_latest() {
            self.latest = change.value.is_some().then(|| read(at, change, report)).flatten();
        } else if let Some(id) = key.strip_prefix(&self.keys.checkpoints_prefix()) {
            self.apply_checkpoint(at, id, change, report);
        }
    }

    fn apply_generation(&mut self, at: i64, change: &Change, report: &mut HistoryReport) {
        let record = match &change.value {
            Some(_) => read::<GenerationRecord>(at, change, report),
            None => return report.breaks(at, Rule::Generations, "the generation was deleted"),
        };
        let Some(record) = record else { return };
        let before = self.generation.as_ref().map_or(Generation(0), |it| it.generation);
        if record.generation.0 != before.0 + 1 {
            let text = format!("generation {} follows generation {before}", record.generation);
            report.breaks(at, Rule::Generations, text);
        }
        report.generations += 1;
        self.generation = Some(record);
    }

    fn apply_checkpoint(&mut self, at: i64, id: &str, change: &Change, report: &mut HistoryReport) {
        if change.value.is_none() {
            self.checkpoints.remove(id);
            return;
        }
        let Some(record) = read::<CheckpointRecord>(at, change, report) else { return };
        match self.checkpoints.get(id) {
            // Invalidating a checkpoint, or undoing that, is the only change allowed.
            Some(known) => {
                let same =
                    CheckpointRecord { invalidated: known.invalidated.clone(), ..record.clone() };
                if same != *known {
                    report.breaks(at, Rule::Once, format!("checkpoint {id} was modified"));
                }
            }
            None => report.checkpoints += 1,
        }
        self.checkpoints.insert(id.to_owned(), record);
    }
}
