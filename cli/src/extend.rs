//! `steadfast extend`: lets a job train further.

use std::process::ExitCode;

use clap::Args;
use steadfast_common::records::amendment::Amendment;
use steadfast_common::records::extension::More;
use steadfast_process::{Failure, print_line};

use crate::amend::{Wanted, amend};
use crate::job_args::JobArgs;
use crate::output::notice;

/// Let a job train further.
///
/// The job goes on from a checkpoint: at once, if it runs, else when its processes are started again, with the same job
/// file. After its last pass it has the parameters of a job that had this length from the beginning. The result of one
/// that has ended is deleted; a new one follows.
#[derive(Debug, Args)]
pub struct ExtendArgs {
    /// Passes to add to those of the job.
    #[arg(long, value_name = "N", required_unless_present = "steps", conflicts_with = "steps")]
    passes: Option<u32>,
    /// Steps to add, of a job that counts steps.
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    #[command(flatten)]
    job: JobArgs,
}

/// Extends the job; prints its new length to stdout.
pub async fn run(args: ExtendArgs) -> Result<ExitCode, Failure> {
    let more = match (args.passes, args.steps) {
        (Some(passes @ 1..), _) => More::Passes(passes),
        (None, Some(steps @ 1..)) => More::Steps(steps),
        _ => return Err(Failure::invalid("--passes or --steps must be at least 1")),
    };
    let job = args.job.find_stopped().await?;
    job.must_train("its program decides when it ends").await?;
    let wanted = Wanted { amendment: Amendment::Extend(more), job_file: String::new() };
    let (record, goes) = amend(&job, &wanted).await?;
    let (length, what) = match (record.spec.passes, record.spec.steps) {
        (Some(passes), _) => (u64::from(passes), "passes"),
        (None, steps) => (steps.unwrap_or_default(), "steps"),
    };
    notice(format_args!("steadfast: job {} has {length} {what} now; it {}", job.name, goes.when()));
    print_line(length);
    Ok(ExitCode::SUCCESS)
}
