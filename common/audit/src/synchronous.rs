//! Synchronous jobs: a step applies all its lanes at once, so the applied records of a checkpoint
//! follow from its position, the schedule, and the given-up tasks.

use std::collections::BTreeSet;

use steadfast_common::ids::{Lane, Pass, Slot, TaskId};
use steadfast_common::job::dataset::Manifest;
use steadfast_common::job::schedule::LaneSchedule;
use steadfast_common::records::applied_records::AppliedRecords;

use crate::cause::{RecordSet, explain};
use crate::sum::PassSums;
use crate::{
    CheckpointEvidence, Coverage, Evidence, PassReport, PassState, Report, SlotFigures, Sum, What,
};

/// Checks every pass up to the checkpoint's.
pub(crate) fn check(evidence: &Evidence, checkpoint: &CheckpointEvidence, report: &mut Report) {
    let position = &checkpoint.position;
    let steps_done = position.version.0.checked_sub(position.pass_start.0);
    let Some(steps_done) = steps_done else {
        let reason = "the pass of the checkpoint began after its version".to_owned();
        return report.violation(What::Position { reason });
    };
    let is_beyond = evidence.passes().is_some_and(|passes| passes < position.pass.0)
        || evidence.steps().is_some_and(|steps| steps < position.version.0)
        || position.version.0 < u64::from(position.pass.0);
    if is_beyond {
        let reason = "the checkpoint is beyond the end of the job".to_owned();
        return report.violation(What::Position { reason });
    }
    let (mut fewest, mut most) = (0_u64, 0_u64);
    let first = evidence.first_pass(checkpoint);
    for pass in (first.0..position.pass.0).map(Pass) {
        let plan = Plan::new(evidence, pass);
        let steps = plan.schedule.steps(&plan.discarded);
        // A lane whose last tasks are given up only when it reaches them ends one step later.
        (fewest, most) = (fewest + steps, most + steps + u64::from(!plan.discarded.is_empty()));
        plan.check(checkpoint, None, report);
    }
    if first == Pass(0) && !(fewest..=most).contains(&position.pass_start.0) {
        let reason = format!(
            "the checkpoint reports {} steps in completed passes, which have {fewest} to {most}",
            position.pass_start
        );
        report.violation(What::Position { reason });
    }
    let present = Plan::new(evidence, position.pass);
    present.check_exhausted(checkpoint, steps_done, report);
    if 0 < steps_done {
        present.check(checkpoint, Some(steps_done), report);
    }
    check_groups(checkpoint, report);
}

/// Checks what spans passes: their order, and the number of records that the checkpoint reports.
fn check_groups(checkpoint: &CheckpointEvidence, report: &mut Report) {
    for (slot, group) in checkpoint.groups() {
        let counted = &group.counted;
        let mut next = Pass(0);
        for applied_pass in &counted.passes {
            if applied_pass.pass < next || checkpoint.position.pass < applied_pass.pass {
                report.violation(What::PassOutOfOrder { pass: applied_pass.pass, slot });
            }
            next = Pass(applied_pass.pass.0.saturating_add(1));
        }
        if counted.records() != checkpoint.position.examples {
            report.violation(What::Examples {
                source: "the checkpoint".to_owned(),
                reported: checkpoint.position.examples,
                counted: counted.records(),
            });
        }
    }
}

/// The records that one pass should have applied.
struct Plan<'a> {
    evidence: &'a Evidence,
    manifest: &'a Manifest,
    pass: Pass,
    schedule: LaneSchedule,
    discarded: BTreeSet<TaskId>,
}

impl<'a> Plan<'a> {
    fn new(evidence: &'a Evidence, pass: Pass) -> Self {
        let manifest = evidence.manifest_of(pass);
        let schedule = LaneSchedule::of(&evidence.spec, manifest, pass);
        Self { evidence, manifest, pass, schedule, discarded: evidence.discarded_in(pass) }
    }

    /// Checks the applied records of each group for the pass, or for its first `steps` steps.
    fn check(&self, checkpoint: &CheckpointEvidence, steps: Option<u64>, report: &mut Report) {
        let expected = self.expected(steps);
        let mut figures = Vec::new();
        for (slot, group) in checkpoint.groups() {
            let found = found(&group.counted, self.pass);
            let verdict = match found == expected {
                true => Coverage::Exact,
                false => Coverage::Wrong,
            };
            figures.push(SlotFigures { slot, blocks: group.blocks, found, verdict });
            if verdict == Coverage::Wrong {
                self.report_mismatch(slot, expected, found, report);
            }
        }
        report.passes.push(PassReport {
            pass: self.pass,
            state: if steps.is_some() { PassState::InProgress } else { PassState::Finished },
            expected,
            discarded: self.discarded.iter().copied().collect(),
            discarded_records: self.discarded.iter().map(|it| self.manifest.records_of(*it)).sum(),
            slots: figures,
        });
    }

    fn report_mismatch(&self, slot: Slot, expected: Sum, found: Sum, report: &mut Report) {
        let cause = explain(expected, found, self.candidates(expected, found));
        let pass = self.pass;
        report.violation(What::CountMismatch { pass, slot, expected, found, cause });
    }

    /// Returns the sum of the records of the whole pass, or of its first `steps` steps. Those of the first steps are
    /// the beginning of each lane's stream, and so are those of a pass that leaves out the records at its end.
    fn expected(&self, steps: Option<u64>) -> Sum {
        let mut sum = Sum::default();
        for lane in (0..self.schedule.lanes()).map(Lane) {
            let mut left = self.schedule.records_before(lane, steps.unwrap_or(u64::MAX));
            for (task, records) in self.schedule.tasks_of(lane) {
                if self.discarded.contains(task) {
                    continue;
                }
                let to = u64::from(*records).min(left) as u32;
                sum = sum.and(self.evidence.sum_of(self.pass, *task, 0..to));
                left -= u64::from(to);
            }
        }
        sum
    }

    /// Returns the candidates for a missing or duplicate contribution: each task, micro-batch and step, and the first
    /// records of each given-up task.
    fn candidates(&self, expected: Sum, found: Sum) -> Vec<(RecordSet, Sum)> {
        let sums = PassSums::new(self.evidence, self.pass);
        let mut all: Vec<_> =
            sums.tasks.iter().map(|(task, sum)| (RecordSet::Task(*task), *sum)).collect();
        // A given-up task may have contributed its first records before.
        let extra = found.records.wrapping_sub(expected.records);
        for task in &self.discarded {
            if let Some(to) =
                u32::try_from(extra).ok().filter(|to| sums.of(*task).records > u64::from(*to))
            {
                let which = RecordSet::Range { task: *task, from: 0, to };
                all.push((which, self.evidence.sum_of(self.pass, *task, 0..to)));
            }
        }
        for step in 0..self.schedule.steps(&self.discarded) {
            let mut of_step = Sum::default();
            for lane in (0..self.schedule.lanes()).map(Lane) {
                let ranges = self.schedule.micro_batch(lane, step, &self.discarded);
                let of_lane = ranges.into_iter().fold(Sum::default(), |sum, range| {
                    sum.and(self.evidence.sum_of(self.pass, range.task, range.positions))
                });
                of_step = of_step.and(of_lane);
                all.push((RecordSet::MicroBatch { lane, step }, of_lane));
            }
            all.push((RecordSet::Step(step), of_step));
        }
        all
    }

    /// Checks that a lane is exhausted after its last micro-batch was applied, and not before. If the pass has given-up
    /// tasks, the lane may still be active after its last micro-batch.
    fn check_exhausted(&self, checkpoint: &CheckpointEvidence, steps: u64, report: &mut Report) {
        let reported: BTreeSet<Lane> = checkpoint.exhausted.iter().copied().collect();
        for lane in (0..self.schedule.lanes()).map(Lane) {
            let ends = self.schedule.steps_of(lane, &self.discarded).max(1);
            let is_over = ends <= steps;
            let may_continue = ends == steps && !self.discarded.is_empty();
            if reported.contains(&lane) != is_over && !may_continue {
                let reason = format!(
                    "lane {lane} is {}marked as exhausted after {steps} steps of the pass; it has \
                     {ends}",
                    if is_over { "not " } else { "" }
                );
                report.violation(What::Position { reason });
            }
        }
    }
}

fn found(counted: &AppliedRecords, pass: Pass) -> Sum {
    let of_pass = counted.passes.iter().filter(|applied_pass| applied_pass.pass == pass);
    of_pass.fold(Sum::default(), |sum, applied_pass| sum.and(Sum::from(applied_pass)))
}
