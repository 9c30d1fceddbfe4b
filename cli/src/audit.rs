//! `steadfast audit`: proves that each record was applied exactly once, or lists the violations.

mod evidence;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use steadfast_audit::history::{self, HistoryReport, Revision, etcdctl};
use steadfast_audit::{Evidence, Report, Severity};
use steadfast_common::error::ErrorKind;
use steadfast_common::job::elastic::AnyJobRecord;
use steadfast_process::{Failure, print_line};

use crate::job_args::{Job, JobArgs};
use crate::job_master::CheckpointOutcome;
use crate::output::{FormArgs, Output, answered};
use steadfast_common::status::format::plural;

/// The master retries a failed checkpoint several times.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Prove that each record of each pass was applied exactly once or is listed as given up; of an elastic job, that
/// its history obeys the rules of rounds.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Checkpoint to audit: its id or a unique prefix of it [default: the final checkpoint of a job that has
    /// ended, else the latest].
    #[arg(long, value_name = "ID", conflicts_with = "now")]
    checkpoint: Option<String>,
    /// Take a checkpoint first, and audit it.
    #[arg(long)]
    now: bool,
    /// Also check the etcd history of the job: a file with the output of
    /// `etcdctl watch --prefix --rev=1 -w json` for the job's keys.
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// JSON output of the command.
#[derive(Serialize)]
struct AuditOutput<'a> {
    clean: bool,
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<&'a HistoryReport>,
}

/// Audits a job; fails if there is any violation.
pub async fn run(args: AuditArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find().await?;
    if job.is_elastic().await? {
        return run_elastic(&args, &job).await;
    }
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
            let answer = AuditOutput { clean, report: &report, history: history.as_ref() };
            print_line(serde_json::json!(answer));
        }
        Output::Text => {
            print_line(&report);
            if let Some(history) = &history {
                print_line(history);
            }
        }
    }
    if clean {
        return Ok(ExitCode::SUCCESS);
    }
    let violations = report.of(Severity::Violation).count() + broken;
    let violations = plural(violations, "violation");
    let message = format!("the audit of job {} found {violations}", job.name);
    Ok(answered(&Failure::internal(message)))
}

/// Audits the history of an elastic job.
async fn run_elastic(args: &AuditArgs, job: &Job) -> Result<ExitCode, Failure> {
    let name = &job.name;
    if args.now || args.checkpoint.is_some() {
        let message =
            format!("job {name} is elastic: it has no checkpoints to audit; pass --history");
        return Err(Failure::invalid(message));
    }
    let Some(path) = &args.history else {
        return Err(Failure::invalid(format!(
            "job {name} is elastic: its history is audited; record it with `etcdctl watch --prefix --rev=1 -w \
             json {}/ > history.json`, and pass --history history.json",
            job.keys.root()
        )));
    };
    let record: Option<AnyJobRecord> = job.etcd.get_json(&job.keys.job()).await?;
    let spec = match record {
        Some(AnyJobRecord::Elastic(record)) => Some(record.spec),
        Some(AnyJobRecord::Training(_)) | None => None,
    };
    let about = spec.and_then(|spec| {
        let (nodes, records) = (spec.range()?, spec.records);
        Some(history::ElasticJob { keys: &job.keys, nodes, records })
    });
    let about = about.ok_or_else(|| Failure::invalid("the job has no valid number of nodes"))?;
    let revisions = read_history(path)?;
    let history = tokio::task::block_in_place(|| history::check_elastic(&about, &[], &revisions));
    let clean = history.is_clean();
    match args.form.output() {
        Output::Json => print_line(serde_json::json!({ "clean": clean, "history": history })),
        Output::Text => print_line(&history),
    }
    if clean {
        return Ok(ExitCode::SUCCESS);
    }
    let violations = plural(history.broken.len(), "violation");
    Ok(answered(&Failure::internal(format!("the audit of job {name} found {violations}"))))
}

/// Asks the acting master for a checkpoint; returns its id.
async fn take_checkpoint(job: &Job) -> Result<String, Failure> {
    let mut master = job.master();
    match master.take_checkpoint(TIMEOUT).await? {
        CheckpointOutcome { latest: Some(id), error: None } => Ok(id),
        CheckpointOutcome { error, .. } => {
            let why = error.unwrap_or_else(|| "there is nothing to save yet".to_owned());
            let message = format!("job {} took no checkpoint: {why}", job.name);
            Err(Failure::new(ErrorKind::Unavailable, message))
        }
    }
}

fn read_history(path: &Path) -> Result<Vec<Revision>, Failure> {
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))?;
    etcdctl::parse(&text).map_err(|error| Failure::invalid(format!("{}: {error}", path.display())))
}

fn check_history(job: &Job, evidence: &Evidence, path: &Path) -> Result<HistoryReport, Failure> {
    let revisions = read_history(path)?;
    let about =
        history::Job { keys: &job.keys, spec: &evidence.spec, manifest: &evidence.manifest };
    Ok(tokio::task::block_in_place(|| history::check(&about, &[], &revisions)))
}
