//! Proves, from what etcd and the shard files hold, that each record of each pass counted exactly
//! once or is listed as given up; and that etcd's history kept the rules of the protocol.
//!
//! Everything here is a pure function of what somebody else has read. `docs/audit.md` says what it
//! proves and what it does not.

mod asynchronous;
mod cause;
mod evidence;
mod finding;
mod generations;
pub mod history;
mod outcome;
mod report;
mod sum;
mod synchronous;
mod words;

pub use cause::{Cause, Which};
pub use evidence::{Cut, Evidence, Group, SlotCounts};
pub use finding::{Finding, Loss, Severity, What};
pub use report::{GenerationReport, PassReport, PassState, Replay, Report, SlotFigures, Verdict};
pub use sum::Sum;

use steadfast_common::spec::Mode;

/// Checks everything that was read.
pub fn audit(evidence: &Evidence) -> Report {
    let mut report = Report::new(evidence);
    generations::check(evidence, &mut report);
    outcome::check_listed(evidence, &mut report);
    match &evidence.checkpoint {
        Some(cut) => {
            outcome::check_slots(cut, &mut report);
            match evidence.spec.mode {
                Mode::Sync => synchronous::check(evidence, cut, &mut report),
                Mode::Async => asynchronous::check(evidence, cut, &mut report),
            }
        }
        None => report.unproved.push(match evidence.result {
            Some(_) => {
                "there is no checkpoint: nothing tells which records were counted".to_owned()
            }
            None => "there is no checkpoint yet: nothing can be proved".to_owned(),
        }),
    }
    outcome::check(evidence, &mut report);
    report.conclude(evidence);
    report
}
