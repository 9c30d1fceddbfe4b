//! `steadfast change`: gives a job other settings.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use steadfast_common::job::job_file;
use steadfast_common::records::amendment::Amendment;
use steadfast_process::{Failure, print_line};

use crate::amend::{Wanted, amend};
use crate::job_args::JobArgs;
use crate::output::notice;

/// Give a job the settings of a job file.
///
/// The learning rate, the bounds of the gradient, evaluations and checkpoints may be others than before. The job goes on
/// with them from a checkpoint: at once, if it runs, else when its processes are started again, with this job file.
/// Steps before keep the settings that they were trained with, should the job go back to them.
#[derive(Debug, Args)]
pub struct ChangeArgs {
    /// The job file with the new settings.
    #[arg(value_name = "JOB.toml")]
    file: PathBuf,
    #[command(flatten)]
    job: JobArgs,
}

/// Changes the job; prints to stdout from which step on the new settings hold.
pub async fn run(args: ChangeArgs) -> Result<ExitCode, Failure> {
    let (name, wanted) = read(&args.file)?;
    let job = args.job.or_named(&name).find_stopped().await?;
    job.must_train("its program has its settings").await?;
    let (record, goes) = amend(&job, &wanted).await?;
    let from = record.changes.last().map(|change| change.version).unwrap_or_default();
    notice(format_args!(
        "steadfast: job {} has other settings from step {from} on; it {}",
        job.name,
        goes.when()
    ));
    print_line(from);
    Ok(ExitCode::SUCCESS)
}

/// Returns the name of the job in a file, and its settings.
fn read(file: &PathBuf) -> Result<(String, Wanted), Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        Failure::io(format!("cannot read the job file {}", file.display()), &error)
    })?;
    let spec = job_file::parse(&text).map_err(|error| {
        let errors = error.errors.iter().map(|error| format!("{}: {error}", file.display()));
        Failure::invalid(errors.collect::<Vec<_>>().join("\n"))
    })?;
    let name = spec.name.clone();
    Ok((name, Wanted { amendment: Amendment::Change(Box::new(spec)), job_file: text }))
}
