//! `steadfast checkpoint verify`: reads every object of checkpoints and says whether they are sound.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use steadfast_checkpoint::{Fault, Verified, verify};
use steadfast_common::error::ErrorKind;
use steadfast_common::records::JobRecord;
use steadfast_process::Failure;
use steadfast_store::Location;

use super::choice::choose;
use super::explain;
use super::manifests::{self, Manifest};
use crate::format::plural;
use crate::job_args::{Job, JobArgs};
use crate::output::{FormArgs, Output};

/// Read checkpoints wholly and say whether they are sound.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Ids of checkpoints, or how they begin [default: latest].
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

/// What was found.
#[derive(Debug)]
enum Finding {
    Sound(Verified),
    Fault {
        kind: ErrorKind,
        message: String,
    },
    /// It was deleted while it was read, as the job took newer ones.
    Gone,
}

/// What goes to stdout about one checkpoint, for programs.
#[derive(Debug, Serialize)]
struct Report<'a> {
    id: &'a str,
    ok: bool,
    parameters_sha256: Option<&'a str>,
    values: Option<usize>,
    states: Option<&'a [String]>,
    counted: Option<Vec<Value>>,
    fault: Option<&'a str>,
    set_aside: Option<&'a str>,
}

/// Verifies them, one after another.
pub async fn run(args: VerifyArgs) -> Result<ExitCode, Failure> {
    let job = args.job.find().await?;
    let record = manifests::record(&job).await?;
    let manifests = manifests::read(&job).await?;
    let chosen = match args.all {
        true => manifests.iter().collect(),
        false => choose(&job.name, &manifests, &args.ids)?,
    };
    let store = manifests::open_store(&record).await?;
    let (mut kinds, mut reports) = (Vec::new(), Vec::new());
    for manifest in &chosen {
        let finding = look(&job, &record, &store, manifest).await?;
        match args.form.output() {
            Output::Text => println!("{}", line(manifest, &finding)),
            Output::Json => reports.push(json!(report(manifest, &finding))),
        }
        kinds.extend(match finding {
            Finding::Sound(_) => None,
            Finding::Fault { kind, .. } => Some(kind),
            Finding::Gone if args.all => None,
            Finding::Gone => Some(ErrorKind::Stale),
        });
    }
    if args.form.output() == Output::Json {
        println!("{}", Value::Array(reports));
    }
    let Some(kind) = kinds.iter().copied().min() else { return Ok(ExitCode::SUCCESS) };
    let (bad, all) = (kinds.len(), plural(chosen.len(), "checkpoint"));
    Err(Failure::new(kind, format!("{bad} of {all} of job {} failed verification", job.name)))
}

async fn look(
    job: &Job,
    record: &JobRecord,
    store: &Location,
    manifest: &Manifest,
) -> Result<Finding, Failure> {
    let checkpoint = match &manifest.record {
        Ok(checkpoint) => checkpoint,
        Err(reason) => {
            let message = format!("the manifest cannot be read: {reason}");
            return Ok(Finding::Fault { kind: ErrorKind::Invalid, message });
        }
    };
    let fault = match verify(store, checkpoint).await {
        Ok(verified) => return Ok(Finding::Sound(verified)),
        Err(fault) => fault,
    };
    if matches!(fault, Fault::Missing { .. }) && is_gone(job, &manifest.id).await? {
        return Ok(Finding::Gone);
    }
    let Failure { kind, message } = explain(fault, store, record).await;
    Ok(Finding::Fault { kind, message })
}

/// Whether a checkpoint was deleted since it was looked up.
pub async fn is_gone(job: &Job, id: &str) -> Result<bool, Failure> {
    Ok(job.etcd.get(&job.keys.checkpoint(id)).await?.is_none())
}

fn line(manifest: &Manifest, finding: &Finding) -> String {
    let id = &manifest.id;
    let line = match finding {
        Finding::Sound(verified) => {
            format!("OK {id} parameters_sha256 {}", verified.parameters_sha256)
        }
        Finding::Fault { message, .. } => format!("FAULT {id}: {message}"),
        Finding::Gone => {
            return format!("GONE {id}: deleted meanwhile, as the job took newer ones");
        }
    };
    match set_aside(manifest) {
        Some(reason) => format!("{line} (set aside: {reason})"),
        None => line,
    }
}

fn set_aside(manifest: &Manifest) -> Option<&str> {
    manifest.record.as_ref().ok()?.set_aside.as_deref()
}

fn report<'a>(manifest: &'a Manifest, finding: &'a Finding) -> Report<'a> {
    let (sound, fault) = match finding {
        Finding::Sound(verified) => (Some(verified), None),
        Finding::Fault { message, .. } => (None, Some(message.as_str())),
        Finding::Gone => (None, Some("deleted meanwhile")),
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
        states: sound.map(|it| it.states.as_slice()),
        counted: sound.map(counted),
        fault,
        set_aside: set_aside(manifest),
    }
}
