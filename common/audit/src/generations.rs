//! Generations: which checkpoint each began from, and which records that may have lost.

use steadfast_common::ids::{Generation, Slot};
use steadfast_common::job::spec::{LostPserver, Mode};
use steadfast_common::records::GenerationRecord;

use crate::{Evidence, Finding, GenerationReport, Loss, Report, Severity, What};

/// Checks the sequence of generations and adds each to the report.
pub(crate) fn check(evidence: &Evidence, report: &mut Report) {
    let mut expected = 1;
    for record in &evidence.generations {
        if record.generation.0 != expected {
            let reason = format!("expected generation {expected}");
            report.generation(record.generation, reason);
        }
        expected = record.generation.0 + 1;
        check_one(evidence, record, report);
        report.generations.push(GenerationReport {
            generation: record.generation,
            checkpoint: record.checkpoint.clone(),
            handover: record.handover.as_ref().map(|it| it.position.version),
            kept: record.kept.clone(),
            lost: lost(record),
            reason: record.reason.clone(),
        });
    }
    if let Some(checkpoint) = &evidence.checkpoint {
        let is_known = evidence.generations.iter().any(|it| it.generation == checkpoint.generation);
        if !is_known {
            let reason = "the checkpoint was taken in it, but it is not recorded".to_owned();
            report.generation(checkpoint.generation, reason);
        }
    }
}

fn check_one(evidence: &Evidence, record: &GenerationRecord, report: &mut Report) {
    if record.kept.is_empty() {
        return;
    }
    let had_followers = record.keeps_all() && 0 < evidence.spec.warm_spares;
    if !may_continue(evidence) && !had_followers {
        let reason = "some slots kept their memory, but the job requires all slots to be restored";
        report.generation(record.generation, reason.to_owned());
    }
    let is_slot = |slot: &&Slot| (slot.0 as usize) < record.slots.len();
    if let Some(slot) = record.kept.iter().find(|slot| !is_slot(slot)) {
        report.generation(record.generation, format!("it keeps slot {slot}, which does not exist"));
    }
}

/// Returns whether the job lets other slots continue when one loses its memory.
fn may_continue(evidence: &Evidence) -> bool {
    evidence.spec.mode == Mode::Async
        && evidence.spec.asynchronous.lost_pserver == LostPserver::Continue
}

/// Returns the slots that restarted while others kept their memory.
fn lost(record: &GenerationRecord) -> Vec<Slot> {
    if record.kept.is_empty() {
        return Vec::new();
    }
    let slots = (0..record.slots.len() as u32).map(Slot);
    slots.filter(|slot| !record.kept.contains(slot)).collect()
}

/// Returns the generations up to `last` in which `slot` lost records, as the job's policy allows. Blocks move when the
/// number of slots changes; after that, any slot may hold blocks that another had lost.
pub(crate) fn losses(evidence: &Evidence, last: Generation, slot: Slot) -> Vec<Loss> {
    if !may_continue(evidence) {
        return Vec::new();
    }
    let before: Vec<_> = evidence.generations.iter().filter(|it| it.generation <= last).collect();
    let moved_after =
        |at: usize| before[at..].windows(2).any(|it| it[0].slots.len() != it[1].slots.len());
    let of_slot = before.iter().enumerate().filter(|(at, record)| {
        let lost = lost(record);
        lost.contains(&slot) || !lost.is_empty() && moved_after(*at)
    });
    let loss = |record: &GenerationRecord| Loss {
        generation: record.generation,
        checkpoint: record.checkpoint.clone(),
    };
    of_slot.map(|(_, record)| loss(record)).collect()
}

impl Report {
    fn generation(&mut self, generation: Generation, reason: String) {
        let what = What::Generation { generation, reason };
        self.findings.push(Finding::new(Severity::Violation, what));
    }
}
