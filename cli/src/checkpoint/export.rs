//! `steadfast checkpoint export`: writes the parameters of a checkpoint as a model file.

use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use steadfast_checkpoint::{
    CheckpointError, ModelFile, WriteTablesError, encode_model, parameters, table_file_name,
    write_tables,
};
use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;
use steadfast_store::{Created, Location, ObjectWriter};

use super::explain;
use super::manifests::{self, store_failure};
use super::verify::was_deleted;
use crate::job_args::JobArgs;

/// Write the parameters of a checkpoint as one safetensors file.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Id of the checkpoint, or a unique prefix of it [default: latest].
    #[arg(value_name = "ID")]
    id: Vec<String>,
    /// File to write: a path, or a URL of an object store.
    #[arg(long, value_name = "PATH_OR_URL")]
    to: String,
    /// Overwrite an existing file.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// What to do if the file exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IfThere {
    Fail,
    Replace,
}

/// Exports the checkpoint; prints the SHA-256 of the parameters to stdout.
pub async fn run(args: ExportArgs) -> Result<ExitCode, Failure> {
    let target = open_target(&args.to)?;
    let if_there = match args.force {
        true => IfThere::Replace,
        false => IfThere::Fail,
    };
    if if_there == IfThere::Fail && target.size().await.map_err(store_failure)?.is_some() {
        return Err(already_exists(&target));
    }
    let job = args.job.find_with_checkpoints().await?;
    let record = manifests::record(&job).await?;
    let manifest = manifests::read_one(&job, &args.id).await?;
    let checkpoint = manifest.record()?;
    let store = manifests::open_store(&record).await?;
    let id = &manifest.id;
    let (layout, values, sha256) = match parameters(&store, checkpoint).await {
        Ok(found) => found,
        Err(CheckpointError::Missing { .. }) if was_deleted(&job, id).await? => {
            let message =
                format!("checkpoint {id} was deleted during the export; export a newer one");
            return Err(Failure::new(ErrorKind::Stale, message));
        }
        Err(error) => {
            let failure = explain(error, &store, &record).await;
            return Err(failure.context(format!("cannot export checkpoint {id}")));
        }
    };
    let (name, model) = (&record.spec.name, &record.spec.model.kind);
    let about = ModelFile { job: name, model, parameters_sha256: &sha256 };
    let bytes = encode_model(&layout, &values, about)
        .map_err(|error| Failure::invalid(format!("checkpoint {id}: {error}")))?;
    let about = [("job", &name[..]), ("parameters_sha256", &sha256)];
    let names = layout.tables().iter().map(|table| table_target(&args.to, &table.name));
    let targets = names.map(|name| open_target(&name)).collect::<Result<Vec<_>, _>>()?;
    let writers = targets.iter().cloned().map(ObjectWriter::new).collect();
    let written = write_tables(&store, checkpoint, &about, writers).await;
    let mut writers = written.map_err(|error| match error {
        WriteTablesError::Store(error) => store_failure(error),
        error => Failure::invalid(format!("checkpoint {id}: {error}")),
    })?;
    let mut last = ObjectWriter::new(target.clone());
    last.push(&bytes).await.map_err(store_failure)?;
    writers.push(last);
    for (target, writer) in targets.iter().chain([&target]).zip(writers) {
        finish(target, writer, if_there).await?;
    }
    let step = checkpoint.position.version;
    eprintln!("steadfast: wrote checkpoint {id} (step {step}) to {target}");
    println!("{sha256}");
    Ok(ExitCode::SUCCESS)
}

/// Returns the file of a table beside that of the model.
fn table_target(model: &str, table: &str) -> String {
    let name = table_file_name(table);
    let ending = name.strip_prefix("model").unwrap_or(&name);
    format!("{}{ending}", model.strip_suffix(".safetensors").unwrap_or(model))
}

fn open_target(text: &str) -> Result<Location, Failure> {
    if text.is_empty() || text.ends_with('/') || Path::new(text).is_dir() {
        let directory = text.trim_end_matches('/');
        return Err(Failure::invalid(format!(
            "--to {text} is a directory; name the file, such as {directory}/model.safetensors"
        )));
    }
    steadfast_store::open(text).map_err(store_failure)
}

async fn finish(target: &Location, writer: ObjectWriter, if_there: IfThere) -> Result<(), Failure> {
    match if_there {
        IfThere::Replace => writer.finish().await.map_err(store_failure),
        // Another process may have created the file since the check.
        IfThere::Fail => match writer.finish_new().await.map_err(store_failure)? {
            Created::Now => Ok(()),
            Created::Already => Err(already_exists(target)),
        },
    }
}

fn already_exists(target: &Location) -> Failure {
    let message =
        format!("{target} already exists; name another file, or overwrite it with --force");
    Failure::new(ErrorKind::Conflict, message)
}
