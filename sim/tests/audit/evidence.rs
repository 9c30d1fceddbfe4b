//! Changes of the evidence, as the mutations of this test make them.

use steadfast_audit::{CheckpointEvidence, Evidence, RecordSet, Severity, Sum, What, audit};
use steadfast_common::ids::Slot;
use steadfast_common::records::applied_records::{AppliedPass, AppliedRecords};

/// Returns the checkpoint of evidence that has one.
pub fn checkpoint(evidence: &Evidence) -> &CheckpointEvidence {
    evidence.checkpoint.as_ref().expect("recorded evidence has a checkpoint")
}

pub fn checkpoint_mut(evidence: &mut Evidence) -> &mut CheckpointEvidence {
    evidence.checkpoint.as_mut().expect("recorded evidence has a checkpoint")
}

/// Returns the applied records of each group of blocks, with its slot. A slot without blocks has a group without any.
pub fn applied(evidence: &Evidence) -> impl Iterator<Item = (Slot, &AppliedRecords)> {
    let slots = checkpoint(evidence).slots.iter();
    let groups = slots.flat_map(|it| it.groups.iter().map(|group| (it.slot, group)));
    groups.filter(|(_, group)| 0 < group.blocks).map(|(slot, group)| (slot, &group.counted))
}

pub fn applied_mut(evidence: &mut Evidence) -> impl Iterator<Item = (Slot, &mut AppliedRecords)> {
    let slots = checkpoint_mut(evidence).slots.iter_mut();
    let groups = slots.flat_map(|it| it.groups.iter_mut().map(|group| (it.slot, group)));
    groups.filter(|(_, group)| 0 < group.blocks).map(|(slot, group)| (slot, &mut group.counted))
}

/// Returns the evidence with a change of the applied records of one group.
pub fn changed(
    evidence: &Evidence,
    group: usize,
    change: impl FnOnce(&mut AppliedRecords),
) -> Evidence {
    let mut evidence = evidence.clone();
    change(applied_mut(&mut evidence).nth(group).expect("the group was counted").1);
    evidence
}

pub fn add(to: &mut AppliedPass, sum: Sum) {
    to.records = to.records.wrapping_add(sum.records);
    to.checksum = to.checksum.wrapping_add(sum.checksum);
}

pub fn subtract(from: &mut AppliedPass, sum: Sum) {
    add(from, Sum::default().less(sum));
}

/// Returns whether a cause names these records. They may be a whole task.
pub fn is_named(named: &RecordSet, records: &RecordSet) -> bool {
    named == records || matches!(named, RecordSet::Task(_))
}

/// Audits evidence that was changed, and asserts that each violation is one of those that the change leads to, and that
/// there is one of which `is_meant` holds.
pub fn assert_finds(
    evidence: &Evidence,
    is_expected: impl Fn(&What) -> bool,
    is_meant: impl Fn(&What) -> bool,
) {
    let report = audit(evidence);
    for finding in report.of(Severity::Violation) {
        assert!(is_expected(&finding.what), "`{}` is not expected: {report}", finding.text);
    }
    assert!(report.of(Severity::Violation).any(|it| is_meant(&it.what)), "{report}");
}

/// Asserts that the audit finds wrong sums in one slot, and at most a wrong number of records beside them.
pub fn assert_mismatch(evidence: &Evidence, of: Slot, is_meant: impl Fn(&What) -> bool) {
    let is_expected = |what: &What| match what {
        What::CountMismatch { slot, .. } => *slot == of,
        _ => matches!(what, What::Examples { .. }),
    };
    assert_finds(evidence, is_expected, is_meant);
}
