//! Proves, from the contents of etcd and the shard files, that each record of each pass was applied
//! exactly once or is listed as given up, and that the history of etcd obeys the rules of the protocol.
//!
//! All functions are pure: the caller reads the input. `docs/audit.md` describes what an audit proves
//! and what it does not.

mod asynchronous;
mod cause;
mod closures;
mod evidence;
mod finding;
mod generations;
pub mod history;
mod outcome;
mod report;
mod sum;
mod synchronous;
mod words;

pub use cause::{Cause, RecordSet};
pub use evidence::{BadValue, CheckpointEvidence, Evidence, Group, SlotCounts, StreamEvidence};
pub use finding::{Finding, Loss, Severity, What};
pub use report::{Coverage, GenerationReport, PassReport, PassState, Replay, Report, SlotFigures};
pub use sum::Sum;

use steadfast_common::job::spec::Mode;

/// Checks all evidence of a job, and reports what is proved and what is not.
pub fn audit(evidence: &Evidence) -> Report {
    let mut report = Report::new(evidence);
    generations::check(evidence, &mut report);
    outcome::check_listed(evidence, &mut report);
    outcome::check_stream(evidence, &mut report);
    outcome::note_code(evidence, &mut report);
    match &evidence.checkpoint {
        Some(checkpoint) => {
            outcome::check_slots(checkpoint, &mut report);
            outcome::note_first(evidence, checkpoint, &mut report);
            match evidence.spec.mode {
                Mode::Sync => synchronous::check(evidence, checkpoint, &mut report),
                Mode::Async if evidence.spec.model.has_closures() => {
                    closures::check(evidence, checkpoint, &mut report);
                }
                Mode::Async => asynchronous::check(evidence, checkpoint, &mut report),
            }
        }
        None => report.unproved.push(match evidence.result {
            Some(_) => "there is no checkpoint: the applied records are unknown".to_owned(),
            None => "there is no checkpoint yet: nothing can be proved".to_owned(),
        }),
    }
    outcome::check(evidence, &mut report);
    report.conclude(evidence);
    report
}
