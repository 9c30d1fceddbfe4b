//! Messages and exit codes of agents, and of the process that serves their rendezvous, for a job that has ended.

use std::io::Write;
use std::process::ExitCode;

use steadfast_common::records::ResultRecord;
use steadfast_process::Shutdown;

/// Exit code when the workers failed and no restart is left, or the job failed.
const WORKERS_FAILED: u8 = 1;

/// Exit code when the job had ended before this process came.
const JOB_WAS_OVER: u8 = 9;

/// How an agent has ended, if not with an error.
#[derive(Clone, Debug, PartialEq)]
pub enum Ended {
    /// The job has succeeded.
    Succeeded,
    JobFailed(ResultRecord),
    /// The job had ended before this agent came; the remedy is for users.
    JobWasOver {
        result: ResultRecord,
        remedy: String,
    },
    /// The workers failed, and no restart is left.
    Exhausted,
    /// The agent was asked to leave.
    Interrupted,
}

impl Ended {
    /// Says how the job `job` has ended, and returns the exit code for that.
    pub(crate) fn exit_code(self, job: &str, shutdown: &Shutdown) -> ExitCode {
        match self {
            Self::Succeeded => ExitCode::SUCCESS,
            Self::JobFailed(result) => has_failed(result),
            Self::JobWasOver { result, remedy } => was_over(job, &result, &remedy),
            Self::Exhausted => ExitCode::from(WORKERS_FAILED),
            Self::Interrupted => shutdown.exit_code(),
        }
    }
}

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
