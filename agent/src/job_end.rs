//! What agents and coordinators tell users about a job that has ended, and their exit codes for it.

use std::io::Write;
use std::process::ExitCode;

use steadfast_common::records::ResultRecord;

/// Exit code when the workers failed and no restart is left, or the job failed.
pub(crate) const WORKERS_FAILED: u8 = 1;

/// Exit code when the job had ended before this process came.
const JOB_WAS_OVER: u8 = 9;

/// Says that a job had ended before this process came, and returns the exit code for that.
pub(crate) fn was_over(job: &str, result: &ResultRecord, remedy: &str) -> ExitCode {
    let how = result.describe();
    let what = format!("the job `{job}` is over: {how}; nothing was run; {remedy}");
    let _ = writeln!(std::io::stderr(), "steadfast: error: {what}");
    ExitCode::from(JOB_WAS_OVER)
}

/// Says that a job has failed, and returns the exit code for that.
pub(crate) fn has_failed(result: ResultRecord) -> ExitCode {
    let reason = result.reason.unwrap_or_default();
    let _ = writeln!(std::io::stderr(), "steadfast: error: the job failed: {reason}");
    ExitCode::from(WORKERS_FAILED)
}
