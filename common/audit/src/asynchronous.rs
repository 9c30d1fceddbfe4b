//! Asynchronous jobs: every block must have applied each task that the queues mark as done, and the
//! applied records of each pass must be the sum of the tasks that they consist of.
//!
//! The queues are captured before the shard snapshots. A slot may therefore have applied more than
//! the queues mark as done, and be in a later pass; it may never have applied less.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{Pass, Slot, TaskId};
use steadfast_common::job::schedule::task_order;
use steadfast_common::records::QueueSnapshot;
use steadfast_common::records::applied_records::{AppliedPass, AppliedRecords};

use crate::cause::{RecordSet, explain};
use crate::generations::losses;
use crate::sum::{PassSums, records_of};
use crate::{
    CheckpointEvidence, Coverage, Evidence, Group, Loss, PassReport, PassState, Replay, Report,
    Severity, SlotFigures, Sum, What,
};

/// The most tasks of one pass that [`subset`] searches.
const SUBSET_MAX: usize = 32;

/// Checks every pass that the queues or any slot have reached.
pub(crate) fn check(evidence: &Evidence, checkpoint: &CheckpointEvidence, report: &mut Report) {
    let Some(queue) = &checkpoint.queue else {
        let reason = "the checkpoint of an asynchronous job has no queues".to_owned();
        return report.violation(What::Position { reason });
    };
    check_groups(evidence, checkpoint, report);
    let last = checkpoint.groups().filter_map(|(_, group)| present(&group.counted)).max();
    let last = last.unwrap_or_default().max(queue.pass);
    // `check_groups` reports passes beyond the job's last one; their content is not checked.
    let passes = evidence.passes().unwrap_or(u32::MAX).min(last.0.saturating_add(1));
    for pass in (evidence.first_pass(checkpoint).0..passes).map(Pass) {
        let checker = PassChecker::new(evidence, checkpoint, queue, pass);
        let Some(first) = checkpoint.groups().next() else { return };
        let is_over = checkpoint.groups().all(|(_, group)| checker.is_over_for(group));
        let mut figures = Vec::new();
        for (slot, group) in checkpoint.groups() {
            let found = found(&group.counted, pass);
            let verdict = checker.check(slot, group, report);
            figures.push(SlotFigures { slot, blocks: group.blocks, found, verdict });
        }
        let nothing = first.1.counted.passes.is_empty() && queue.cursor == 0 && last == Pass(0);
        if !nothing {
            report.passes.push(checker.report(is_over, figures));
        }
    }
    report.replay = Some(replay(evidence, checkpoint, queue));
}

/// Checks what spans passes: their order, and the number of records that the checkpoint reports.
fn check_groups(evidence: &Evidence, checkpoint: &CheckpointEvidence, report: &mut Report) {
    let passes = evidence.passes().unwrap_or(u32::MAX);
    for (slot, group) in checkpoint.groups() {
        let mut next = Pass(0);
        for applied_pass in &group.counted.passes {
            if applied_pass.pass < next || passes <= applied_pass.pass.0 {
                report.violation(What::PassOutOfOrder { pass: applied_pass.pass, slot });
            }
            next = Pass(applied_pass.pass.0.saturating_add(1));
        }
    }
    // The position is that of the slot with the fewest updates: it may lag behind, but never lead.
    let counted = checkpoint.groups().map(|(_, group)| group.counted.records()).max().unwrap_or(0);
    if counted < checkpoint.position.examples {
        let source = "the checkpoint".to_owned();
        report.violation(What::Examples {
            source,
            reported: checkpoint.position.examples,
            counted,
        });
    }
}

/// Returns the pass that a slot is in: the last one of its applied records.
fn present(counted: &AppliedRecords) -> Option<Pass> {
    counted.passes.last().map(|applied_pass| applied_pass.pass)
}

fn applied_pass(counted: &AppliedRecords, pass: Pass) -> Option<&AppliedPass> {
    counted.passes.iter().find(|applied_pass| applied_pass.pass == pass)
}

fn found(counted: &AppliedRecords, pass: Pass) -> Sum {
    applied_pass(counted, pass).map_or_else(Sum::default, Sum::from)
}

/// The records that one pass should have applied.
struct PassChecker<'a> {
    evidence: &'a Evidence,
    checkpoint: &'a CheckpointEvidence,
    queue: &'a QueueSnapshot,
    sums: PassSums,
    discarded: BTreeSet<TaskId>,
    /// Tasks that the queues mark as done: a pass that is not over must have applied them.
    acknowledged: BTreeSet<TaskId>,
}

impl<'a> PassChecker<'a> {
    fn new(
        evidence: &'a Evidence,
        checkpoint: &'a CheckpointEvidence,
        queue: &'a QueueSnapshot,
        pass: Pass,
    ) -> Self {
        let acknowledged = match queue.pass == pass {
            true => done(evidence, queue),
            false => BTreeSet::new(),
        };
        let sums = PassSums::new(evidence, pass);
        Self {
            evidence,
            checkpoint,
            queue,
            sums,
            discarded: evidence.discarded_in(pass),
            acknowledged,
        }
    }

    /// Returns whether the pass is over for the blocks of `group`: the queues or these blocks are in a later pass.
    fn is_over_for(&self, group: &Group) -> bool {
        let next = present(&group.counted).is_some_and(|present| self.sums.pass < present);
        next || self.sums.pass < self.queue.pass
    }

    /// Returns the tasks that a slot must have applied completely.
    fn wanted(&self, is_over: bool) -> BTreeSet<TaskId> {
        match is_over {
            true => {
                let all = self.sums.tasks.iter().filter(|(_, sum)| 0 < sum.records);
                all.map(|(task, _)| *task).filter(|task| !self.discarded.contains(task)).collect()
            }
            false => self.acknowledged.clone(),
        }
    }

    /// Checks the applied records of one group.
    fn check(&self, slot: Slot, group: &Group, report: &mut Report) -> Coverage {
        let wanted = self.wanted(self.is_over_for(group));
        let before = report.findings.len();
        match present(&group.counted) == Some(self.sums.pass) {
            true => self.check_present(slot, group, &wanted, report),
            false => self.check_left(slot, group, &wanted, report),
        }
        let worst = report.findings[before..].iter().map(|it| it.severity).min();
        match worst {
            Some(Severity::Violation) => Coverage::Wrong,
            Some(Severity::AllowedLoss) => Coverage::AllowedLoss,
            Some(Severity::Note) | None => Coverage::Exact,
        }
    }

    /// Checks the pass that the slot is in: its tasks are still listed individually.
    fn check_present(
        &self,
        slot: Slot,
        group: &Group,
        wanted: &BTreeSet<TaskId>,
        report: &mut Report,
    ) {
        let (pass, counted) = (self.sums.pass, &group.counted);
        let is_over = self.is_over_for(group);
        let mut expected = Sum::default();
        for task in counted.done.iter() {
            if !self.sums.tasks.contains_key(&task) {
                report.violation(What::NotOfThePass { pass, slot, task });
            }
            if self.evidence.manifest_of(pass).task_count() <= task.0 {
                break;
            }
            expected = expected.and(self.sums.of(task));
            if self.discarded.contains(&task) {
                report.find(Severity::Note, What::FullyApplied { pass, slot, task });
            }
        }
        for (task, to) in &counted.open {
            expected = expected.and(self.prefix(slot, *task, *to, report));
            if counted.done.contains(*task) {
                report.violation(What::NotOfThePass { pass, slot, task: *task });
            }
            if is_over || self.discarded.contains(task) {
                self.note_prefix(slot, *task, *to, report);
            }
        }
        let found = found(counted, pass);
        if found != expected {
            self.count_mismatch(slot, expected, found, report);
        }
        let lost: Vec<TaskId> =
            wanted.iter().filter(|task| !counted.done.contains(**task)).copied().collect();
        if !lost.is_empty() {
            let whole: u64 = lost.iter().map(|task| self.sums.of(*task).records).sum();
            let begun = lost.iter().filter_map(|task| counted.open.get(task));
            let records = whole.saturating_sub(begun.map(|it| u64::from(*it)).sum());
            self.lost(slot, records, true, lost, report);
        }
    }

    /// Checks a pass that the slot has left, or never reached: only the sum and the unfinished tasks
    /// are known.
    fn check_left(
        &self,
        slot: Slot,
        group: &Group,
        wanted: &BTreeSet<TaskId>,
        report: &mut Report,
    ) {
        let none = BTreeMap::new();
        let partial = applied_pass(&group.counted, self.sums.pass).map_or(&none, |it| &it.partial);
        let mut expected =
            wanted.iter().fold(Sum::default(), |sum, task| sum.and(self.sums.of(*task)));
        let (mut unfinished, mut tails) = (Vec::new(), 0);
        for (task, to) in partial {
            expected = expected.and(self.prefix(slot, *task, *to, report));
            if wanted.contains(task) {
                expected = expected.less(self.sums.of(*task));
                let pass = self.sums.pass;
                let records = records_of(self.evidence.manifest_of(pass), *task);
                tails += self.evidence.sum_of(pass, *task, *to..records.max(*to)).records;
                unfinished.push(*task);
            } else {
                self.note_prefix(slot, *task, *to, report);
            }
        }
        let found = found(&group.counted, self.sums.pass);
        let extra = found.less(expected);
        let without_prefix = |task: &&TaskId| !partial.contains_key(task);
        let free: Vec<(TaskId, Sum)> = self
            .discarded
            .iter()
            .filter(without_prefix)
            .map(|task| (*task, self.sums.of(*task)))
            .collect();
        if let Some(whole) = subset(&free, extra) {
            self.note_whole(slot, whole, report);
            if !unfinished.is_empty() {
                self.lost(slot, tails, true, unfinished, report);
            }
            return;
        }
        if self.losses(slot).is_empty() {
            return self.count_mismatch(slot, expected, found, report);
        }
        let less = |task: &TaskId| (*task, Sum::default().less(self.sums.of(*task)));
        let maybe: Vec<(TaskId, Sum)> = wanted.iter().filter(without_prefix).map(less).collect();
        let both = [free.as_slice(), &maybe].concat();
        match subset(&both, extra) {
            // With few tasks, those that make up the loss can be identified.
            Some(named) => {
                let (lost, whole): (Vec<_>, Vec<_>) =
                    named.into_iter().partition(|task| wanted.contains(task));
                let records: u64 = lost.iter().map(|task| self.sums.of(*task).records).sum();
                self.note_whole(slot, whole, report);
                self.lost(slot, records + tails, true, [unfinished, lost].concat(), report);
            }
            None => {
                let counted_most: u64 = free.iter().map(|(_, sum)| sum.records).sum();
                let may_be = SUBSET_MAX < both.len()
                    && found.records <= expected.records.saturating_add(counted_most);
                if !may_be {
                    return self.count_mismatch(slot, expected, found, report);
                }
                let missing = expected.records.saturating_sub(found.records);
                self.lost(slot, missing + tails, free.is_empty(), unfinished, report);
            }
        }
    }

    fn note_whole(&self, slot: Slot, tasks: Vec<TaskId>, report: &mut Report) {
        let pass = self.sums.pass;
        for task in tasks {
            report.find(Severity::Note, What::FullyApplied { pass, slot, task });
        }
    }

    /// Returns the sum of the first `to` records of a task. Reports a violation unless the task has more records than
    /// that.
    fn prefix(&self, slot: Slot, task: TaskId, to: u32, report: &mut Report) -> Sum {
        let pass = self.sums.pass;
        let records = records_of(self.evidence.manifest_of(pass), task);
        if records <= to || !self.sums.tasks.contains_key(&task) {
            report.violation(What::NotOfThePass { pass, slot, task });
        }
        // Records that do not exist are not summed: a malicious file must not cost hours.
        self.evidence.sum_of(pass, task, 0..to.min(records))
    }

    fn note_prefix(&self, slot: Slot, task: TaskId, counted: u32, report: &mut Report) {
        if self.discarded.contains(&task) {
            let (pass, records) = (self.sums.pass, self.sums.of(task).records);
            let what = What::Prefix { pass, slot, task, counted, records };
            report.find(Severity::Note, what);
        }
    }

    fn losses(&self, slot: Slot) -> Vec<Loss> {
        losses(self.evidence, self.checkpoint.generation, slot)
    }

    fn lost(&self, slot: Slot, records: u64, exact: bool, tasks: Vec<TaskId>, report: &mut Report) {
        let losses = self.losses(slot);
        let severity = match losses.is_empty() {
            true => Severity::Violation,
            false => Severity::AllowedLoss,
        };
        let pass = self.sums.pass;
        report.find(severity, What::Lost { pass, slot, records, exact, tasks, losses });
    }

    fn count_mismatch(&self, slot: Slot, expected: Sum, found: Sum, report: &mut Report) {
        let cause = explain(expected, found, self.candidates());
        let pass = self.sums.pass;
        report.violation(What::CountMismatch { pass, slot, expected, found, cause });
    }

    /// Returns the candidates for a missing or duplicate contribution: each task, and the records of each push.
    fn candidates(&self) -> impl Iterator<Item = (RecordSet, Sum)> {
        let settings = &self.evidence.spec.asynchronous;
        let push = settings.batch.saturating_mul(settings.push_every).max(1);
        let whole = self.sums.tasks.iter().map(|(task, sum)| (RecordSet::Task(*task), *sum));
        let ranges = self.sums.tasks.iter().flat_map(move |(task, sum)| {
            let records = u32::try_from(sum.records).unwrap_or(u32::MAX);
            (0..records).step_by(push as usize).map(move |from| {
                let to = from.saturating_add(push).min(records);
                let sum = self.evidence.sum_of(self.sums.pass, *task, from..to);
                (RecordSet::Range { task: *task, from, to }, sum)
            })
        });
        whole.chain(ranges)
    }

    fn report(&self, is_over: bool, slots: Vec<SlotFigures>) -> PassReport {
        let wanted = self.wanted(is_over);
        PassReport {
            pass: self.sums.pass,
            state: if is_over { PassState::Finished } else { PassState::InProgress },
            expected: wanted.iter().fold(Sum::default(), |sum, it| sum.and(self.sums.of(*it))),
            discarded: self.discarded.iter().copied().collect(),
            discarded_records: self.discarded.iter().map(|it| self.sums.of(*it).records).sum(),
            slots,
        }
    }
}

/// Returns the tasks that the queues mark as done: dispatched, and neither open nor given up.
fn done(evidence: &Evidence, queue: &QueueSnapshot) -> BTreeSet<TaskId> {
    let order = task_order(evidence.manifest_of(queue.pass), evidence.spec.seed, queue.pass);
    let handed_out = order.into_iter().take(queue.cursor as usize);
    let is_done =
        |task: &TaskId| !queue.open.contains_key(task) && !queue.discarded.contains_key(task);
    handed_out.filter(is_done).collect()
}

/// Finds tasks whose sums add up to `wanted`, by a meet-in-the-middle search over all subsets of the
/// first [`SUBSET_MAX`] tasks.
fn subset(tasks: &[(TaskId, Sum)], wanted: Sum) -> Option<Vec<TaskId>> {
    if wanted == Sum::default() {
        return Some(Vec::new());
    }
    let tasks = tasks.get(..SUBSET_MAX).unwrap_or(tasks);
    let (left, right) = tasks.split_at(tasks.len() / 2);
    let known: BTreeMap<Sum, u32> = subsets(left).collect();
    subsets(right).find_map(|(sum, of_right)| {
        let of_left = *known.get(&wanted.less(sum))?;
        let pick = |tasks: &[(TaskId, Sum)], bits: u32| -> Vec<TaskId> {
            let picked = tasks.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1);
            picked.map(|(_, (task, _))| *task).collect()
        };
        Some([pick(left, of_left), pick(right, of_right)].concat())
    })
}

fn subsets(tasks: &[(TaskId, Sum)]) -> impl Iterator<Item = (Sum, u32)> {
    (0..1_u32 << tasks.len()).map(move |bits| {
        let picked = tasks.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1);
        (picked.fold(Sum::default(), |sum, (_, (_, of))| sum.and(*of)), bits)
    })
}

/// Returns the work that a restore of the checkpoint repeats, and how much of it each slot has already applied.
fn replay(evidence: &Evidence, checkpoint: &CheckpointEvidence, queue: &QueueSnapshot) -> Replay {
    let done = done(evidence, queue);
    let is_left = |task: &TaskId| !done.contains(task) && !queue.discarded.contains_key(task);
    let is_over = evidence.passes().is_some_and(|passes| passes <= queue.pass.0);
    let manifest = evidence.manifest_of(queue.pass);
    let left: BTreeSet<TaskId> = match is_over {
        true => BTreeSet::new(),
        false => manifest.training_tasks().into_iter().filter(is_left).collect(),
    };
    let records = |tasks: &BTreeSet<TaskId>| -> u64 {
        tasks.iter().map(|task| manifest.records_of(*task)).sum()
    };
    let acknowledged = records(&done);
    let mut counted: BTreeMap<Slot, u64> = BTreeMap::new();
    for (slot, group) in checkpoint.groups() {
        let later =
            group.counted.passes.iter().filter(|applied_pass| queue.pass <= applied_pass.pass);
        let later = later.map(|applied_pass| applied_pass.records).fold(0, u64::saturating_add);
        let most = counted.entry(slot).or_default();
        *most = later.saturating_sub(acknowledged).max(*most);
    }
    Replay {
        pass: queue.pass,
        tasks: left.len() as u32,
        records: records(&left),
        counted: counted.into_iter().collect(),
    }
}
