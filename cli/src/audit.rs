//! `steadfast audit`: proves that each record counted once, or says which did not.

mod evidence;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use steadfast_audit::history::{self, HistoryReport, etcdctl};
use steadfast_audit::{Evidence, Report, Severity};
use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;

use crate::job_args::{Job, JobArgs};
use crate::job_master::{JobMaster, Taken};
use crate::output::{FormArgs, Output};

/// A master tries several times before it gives up.
const PATIENCE: Duration = Duration::from_secs(300);

/// Prove that each record of each pass counted once, or is listed as given up.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Id of the checkpoint whose counts to look at, or how it begins [default: the final one of a
    /// job that is over, else the latest].
    #[arg(long, value_name = "ID", conflicts_with = "now")]
    checkpoint: Option<String>,
    /// Have a checkpoint taken first, so that the counts are those of now.
    #[arg(long)]
    now: bool,
    /// Check what happened in etcd as well: the output of `etcdctl watch --prefix --rev=1 -w json`
    /// for the job's keys.
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// What goes to stdout, for programs.
#[derive(Serialize)]
struct Answer<'a> {
    clean: bool,
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<&'a HistoryReport>,
}

/// Audits a job; fails if anything is wrong.
pub async fn run(args: AuditArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find().await?;
    let wanted = match args.now {
        true => Some(take_checkpoint(&job).await?),
        false => args.checkpoint.clone(),
    };
    let evidence = evidence::read(&job, wanted.as_deref()).await?;
    let history = match &args.history {
        Some(path) => Some(check_history(&job, &evidence, path)?),
        None => None,
    };
    let report = tokio::task::block_in_place(|| steadfast_audit::audit(&evidence));
    let broken = history.as_ref().map_or(0, |it| it.broken.len());
    let clean = report.is_clean() && broken == 0;
    match args.form.output() {
        Output::Json => {
            let answer = Answer { clean, report: &report, history: history.as_ref() };
            println!("{}", serde_json::json!(answer));
        }
        Output::Text => {
            println!("{report}");
            if let Some(history) = &history {
                println!("{history}");
            }
        }
    }
    if clean {
        return Ok(ExitCode::SUCCESS);
    }
    let violations = report.of(Severity::Violation).count() + broken;
    let message = format!("the audit of job {} is not clean: {violations} violations", job.name);
    Err(Failure::internal(message))
}

/// Asks the acting master for a checkpoint.
async fn take_checkpoint(job: &Job) -> Result<String, Failure> {
    let mut master = JobMaster::new(job.etcd.clone(), job.keys.clone());
    match master.take_checkpoint(PATIENCE).await? {
        Taken { latest: Some(id), trouble: None } => Ok(id),
        Taken { trouble, .. } => {
            let why = trouble.unwrap_or_else(|| "there is nothing to save yet".to_owned());
            let message = format!("job {} took no checkpoint: {why}", job.name);
            Err(Failure::new(ErrorKind::Unavailable, message))
        }
    }
}

fn check_history(job: &Job, evidence: &Evidence, path: &PathBuf) -> Result<HistoryReport, Failure> {
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))?;
    let revisions = etcdctl::parse(&text)
        .map_err(|error| Failure::invalid(format!("{}: {error}", path.display())))?;
    let about =
        history::Job { keys: &job.keys, spec: &evidence.spec, manifest: &evidence.manifest };
    Ok(tokio::task::block_in_place(|| history::check(&about, &[], &revisions)))
}
