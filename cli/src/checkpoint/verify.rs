//! `steadfast checkpoint verify`: reads every object of checkpoints and checks that they are sound.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use steadfast_checkpoint::{CheckpointError, Verified, verify};
use steadfast_common::error::ErrorKind;
use steadfast_common::records::JobRecord;
use steadfast_process::{Failure, print_line};
use steadfast_store::Location;

use super::choice::choose;
use super::explain;
use super::manifests::{self, Manifest};
use crate::job_args::{Job, JobArgs};
use crate::output::{FormArgs, Output, answered};
use steadfast_common::status::format::plural;

/// Read checkpoints completely and check that they are sound.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Ids of checkpoints, or unique prefixes of them [default: latest].
    #[arg(value_name = "ID", conflicts_with = "all")]
    ids: Vec<String>,
    /// Verify all checkpoints of the job.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    form: FormArgs,
}

/// Result of the verification of one checkpoint.
#[derive(Debug)]
enum Finding {
    Valid(Verified),
    Failed {
        kind: ErrorKind,
        message: String,
    },
    /// The job deleted it during the verification because it took newer ones.
    Deleted,
}

/// JSON output for one checkpoint.
#[derive(Debug, Serialize)]
struct Report<'a> {
    id: &'a str,
    ok: bool,
    parameters_sha256: Option<&'a str>,
    values: Option<usize>,
    /// The number of rows of each table, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    rows: BTreeMap<&'a str, u64>,
    states: Option<&'a [String]>,
    counted: Option<Vec<Value>>,
    error: Option<&'a str>,
    invalidated: Option<&'a str>,
}

/// Verifies the checkpoints one after another.
pub async fn run(args: VerifyArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find_with_checkpoints().await?;
    let record = manifests::record(&job).await?;
    let manifests = manifests::read(&job).await?;
    let chosen = match args.all {
        true => manifests.iter().collect(),
        false => choose(&job.name, &manifests, &args.ids)?,
    };
    let store = manifests::open_store(&record).await?;
    let (mut kinds, mut reports) = (Vec::new(), Vec::new());
    for manifest in &chosen {
        let finding = verify_one(&job, &record, &store, manifest).await?;
        match args.form.output() {
            Output::Text => print_line(line(manifest, &finding)),
            Output::Json => reports.push(json!(report(manifest, &finding))),
        }
        kinds.extend(match finding {
            Finding::Valid(_) => None,
            Finding::Failed { kind, .. } => Some(kind),
            Finding::Deleted if args.all => None,
            Finding::Deleted => Some(ErrorKind::Stale),
        });
    }
    if args.form.output() == Output::Json {
        print_line(Value::Array(reports));
    }
    let Some(kind) = kinds.iter().copied().min() else { return Ok(ExitCode::SUCCESS) };
    let (bad, all) = (kinds.len(), plural(chosen.len(), "checkpoint"));
    let message = format!("{bad} of {all} of job {} failed verification", job.name);
    Ok(answered(&Failure::new(kind, message)))
}

async fn verify_one(
    job: &Job,
    record: &JobRecord,
    store: &Location,
    manifest: &Manifest,
) -> Result<Finding, Failure> {
    let checkpoint = match &manifest.record {
        Ok(checkpoint) => checkpoint,
        Err(reason) => {
            let message = format!("cannot read the manifest: {reason}");
            return Ok(Finding::Failed { kind: ErrorKind::Invalid, message });
        }
    };
    let error = match verify(store, checkpoint).await {
        Ok(verified) => return Ok(Finding::Valid(verified)),
        Err(error) => error,
    };
    if matches!(error, CheckpointError::Missing { .. }) && was_deleted(job, &manifest.id).await? {
        return Ok(Finding::Deleted);
    }
    let Failure { kind, message } = explain(error, store, record).await;
    Ok(Finding::Failed { kind, message })
}

/// Returns whether a checkpoint was deleted since it was listed.
pub async fn was_deleted(job: &Job, id: &str) -> Result<bool, Failure> {
    Ok(job.etcd.get(&job.keys.checkpoint(id)).await?.is_none())
}

fn line(manifest: &Manifest, finding: &Finding) -> String {
    let id = &manifest.id;
    let line = match finding {
        Finding::Valid(verified) => {
            format!("OK {id} parameters_sha256 {}", verified.parameters_sha256)
        }
        Finding::Failed { message, .. } => format!("ERROR {id}: {message}"),
        Finding::Deleted => {
            return format!(
                "DELETED {id}: deleted during verification; the job took newer checkpoints"
            );
        }
    };
    match invalidated(manifest) {
        Some(reason) => format!("{line} (invalidated: {reason})"),
        None => line,
    }
}

fn invalidated(manifest: &Manifest) -> Option<&str> {
    manifest.record.as_ref().ok()?.invalidated.as_deref()
}

fn report<'a>(manifest: &'a Manifest, finding: &'a Finding) -> Report<'a> {
    let (sound, error) = match finding {
        Finding::Valid(verified) => (Some(verified), None),
        Finding::Failed { message, .. } => (None, Some(message.as_str())),
        Finding::Deleted => (None, Some("deleted during verification")),
    };
    let counted = |verified: &Verified| {
        let each = verified.counted.iter();
        each.map(|it| json!({ "blocks": it.blocks, "counted": it.counted })).collect()
    };
    Report {
        id: &manifest.id,
        ok: sound.is_some(),
        parameters_sha256: sound.map(|it| it.parameters_sha256.as_str()),
        values: sound.map(|it| it.values),
        rows: sound.iter().flat_map(|it| &it.rows).map(|(name, rows)| (&name[..], *rows)).collect(),
        states: sound.map(|it| it.states.as_slice()),
        counted: sound.map(counted),
        error,
        invalidated: invalidated(manifest),
    }
}
