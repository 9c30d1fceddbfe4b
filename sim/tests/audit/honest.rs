//! The audit of what programs leave is clean, whatever faults have hit them.

use std::time::Duration;

use steadfast_audit::{Coverage, Evidence, PassState, Severity, audit};
use steadfast_common::job::spec;
use steadfast_common::records::JobOutcome;
use steadfast_common::records::rendezvous::RoundRecord;
use steadfast_sim::explore::small;
use steadfast_sim::{Fault, Job, Member, Mode, Role, Workload, record};

use crate::recorded::{ASYNC, ELASTIC, Run, SYNC, evidence};

/// I1 … I7, I9, I10, F4, F7, F25, F26, F37: no revision breaks a rule either. Trainers die and report late, calls arrive
/// twice, pservers lose their memory, tasks are given up, and the number of slots changes.
#[test]
fn an_honest_job_audits_clean_at_each_checkpoint() {
    for run in SYNC.iter().chain(&*ASYNC) {
        assert!(run.outcome.broken.is_empty(), "seed {}: {}", run.seed, run.outcome);
        assert_eq!(run.outcome.audits, run.recording.evidence.len() as u64);
        let report = run.check(&[], &run.recording.revisions);
        assert!(report.is_clean() && 0 < report.commits, "seed {}: {report}", run.seed);
        for evidence in &run.recording.evidence {
            let report = audit(evidence);
            assert!(report.is_clean(), "seed {}: {report}", run.seed);
        }
    }
}

/// I6, I7: the audit of a finished job proves each of its passes.
#[test]
fn each_pass_of_a_finished_job_is_proved() {
    let mut seen = 0;
    for evidence in evidence(&SYNC).chain(evidence(&ASYNC)) {
        let Some(result) = &evidence.result else { continue };
        let report = audit(evidence);
        let has_loss = report.of(Severity::AllowedLoss).next().is_some();
        // The final checkpoint of a job may fail; then the result names none.
        let is_whole = result.state == JobOutcome::Finished && result.checkpoint.is_some();
        // Evaluations may end the job after a pass, or in one.
        let course = evidence.evaluation.as_ref().and_then(|it| it.course.as_ref());
        let ends_in_pass = course.is_some_and(|course| course.end_version.is_some());
        if !is_whole || has_loss || evidence.stream.is_some() || ends_in_pass {
            continue;
        }
        assert!(report.unproved.is_empty(), "{report}");
        let end = course.and_then(|course| course.end).map(|end| end.0);
        let passes = end.or(evidence.spec.passes).unwrap_or(0);
        assert_eq!(report.passes.len() as u64, u64::from(passes));
        for pass in &report.passes {
            assert_eq!(pass.state, PassState::Finished, "{report}");
            assert!(pass.slots.iter().all(|it| it.verdict == Coverage::Exact), "{report}");
        }
        assert!(report.proved.iter().any(|it| it.contains("applied exactly once")), "{report}");
        seen += 1;
    }
    assert!(40 < seen, "{seen} jobs");
}

/// I6, F4: if the job lets the other slots continue, missing records are an allowed loss, and there are no violations.
#[test]
fn a_single_lost_slot_loses_no_more_than_the_job_allows() {
    let all = (0..48).map(|number| Job::numbered(spec::Mode::Async, number));
    let such = all.filter(|job| job.goes_on() && job.is_patient && !job.is_stream);
    let longest = such.max_by_key(|job| job.records as u32 * job.spec.passes.unwrap_or(1));
    let mut plan = small(Mode::Async);
    plan.job = Workload::Training(Box::new(longest.expect("the catalog has such a job")));
    let mut losses = 0;
    // One of them is a spare.
    for (at, number) in (200..600).step_by(20).zip((0..2).cycle()) {
        let at = Duration::from_millis(at);
        let lost = Fault::Kill(Member { role: Role::Pserver, number });
        plan.faults = vec![(at / 2, Fault::Checkpoint), (at, lost)];
        let (outcome, recording) = record(&plan);
        assert!(outcome.broken.is_empty(), "{plan}{outcome}");
        let reports = recording.evidence.iter().map(audit);
        losses += reports.filter(|it| it.of(Severity::AllowedLoss).next().is_some()).count();
    }
    assert!(0 < losses);
}

/// No revision breaks a rule.
#[test]
fn the_history_of_an_honest_rendezvous_is_clean() {
    for run in &*ELASTIC {
        assert!(run.outcome.broken.is_empty(), "seed {}: {}", run.seed, run.outcome);
        let report = run.check(&[], &run.recording.revisions);
        assert!(report.is_clean() && 0 < report.commits, "seed {}: {report}", run.seed);
        let changes = run.recording.revisions.iter().rev().flat_map(|it| &it.changes);
        let mut rounds = changes.filter(|it| it.key == run.keys.formed_round());
        let formed = rounds.find_map(|it| it.value.as_deref()).expect("a round was formed");
        let formed: RoundRecord = serde_json::from_str(formed).expect("it is valid");
        assert_eq!(report.rounds, formed.round.0);
    }
}

/// Without these, the other tests of this file prove less than they say.
#[test]
fn the_recorded_jobs_are_of_all_kinds() {
    let is_any = |is: fn(&Run) -> bool| SYNC.iter().any(is) && ASYNC.iter().any(is);
    assert!(is_any(|run| run.training().is_some_and(Job::has_tables)));
    assert!(is_any(|run| run.training().is_some_and(|job| job.is_stream)));
    assert!(is_any(|run| run.training().is_some_and(|job| !job.bad.is_empty())));
    assert!(is_any(|run| 2 < run.outcome.generations && 1 < run.outcome.terms));
    let any = |is: fn(&Evidence) -> bool| evidence(&SYNC).any(is) && evidence(&ASYNC).any(is);
    assert!(any(|it| it.checkpoint.as_ref().is_some_and(|it| 1 < it.slots.len())));
    assert!(any(|it| !it.discarded.is_empty()));
    assert!(ELASTIC.iter().any(|run| 1 < run.outcome.terms));
}
