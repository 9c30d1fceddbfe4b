//! `steadfast checkpoint export`: writes the parameters of a checkpoint as a model file, and the optimizer's state.

use std::path::Path;
use std::process::ExitCode;

use bytes::Bytes;
use clap::Args;
use futures::future::join_all;
use steadfast_checkpoint::{
    CheckpointError, Contents, FixedError, ModelFile, OptimizerFile, Wanted, WriteTablesError,
    contents, encode_model, encode_optimizer, read_fixed, table_file_name, write_tables,
};
use steadfast_common::error::ErrorKind;
use steadfast_common::job::average::AVERAGE;
use steadfast_common::job::dataset::sha256;
use steadfast_common::job::optimizer_errors::name_of;
use steadfast_common::job::spec::Keep;
use steadfast_common::records::{Best, EvaluationRecord, FixedRecord, KeptModel, MODEL};
use steadfast_process::{Failure, print_line};
use steadfast_store::{Created, Location, ObjectWriter, StoreError};

use super::explain;
use super::manifests::{self, store_failure};
use super::verify::was_deleted;
use crate::job_args::{Job, JobArgs};
use crate::output::notice;

/// Write the parameters of a checkpoint as one safetensors file.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Id of the checkpoint, or a unique prefix of it, or `latest` [default: latest; of a job that has ended with its
    /// best parameters, these].
    #[arg(value_name = "ID")]
    id: Vec<String>,
    /// File to write: a path, or a URL of an object store.
    #[arg(long, value_name = "PATH_OR_URL")]
    to: String,
    /// Also write the state of the optimizer to this file.
    #[arg(long, value_name = "PATH_OR_URL")]
    optimizer: Option<String>,
    /// Write the averages of the parameters, which a job with `[average]` has, in place of the parameters.
    #[arg(long)]
    average: bool,
    /// Overwrite existing files.
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
    check_free(&target, if_there).await?;
    let of_optimizer = args.optimizer.as_deref().map(open_target).transpose()?;
    if let Some(optimizer) = &of_optimizer {
        if optimizer.url() == target.url() {
            return Err(Failure::invalid("--to and --optimizer name one file; name another"));
        }
        check_free(optimizer, if_there).await?;
    }
    let job = args.job.find_with_checkpoints().await?;
    let record = manifests::record(&job).await?;
    if args.average && record.spec.average.is_none() {
        return Err(Failure::invalid(
            "--average: the job has no averages of its parameters, which `[average]` in the job file would keep",
        ));
    }
    if args.id.is_empty()
        && record.spec.evaluation.keep == Keep::Best
        && let Some((best, kept)) = best_of_ended(&job).await?
    {
        if of_optimizer.is_some() {
            return Err(Failure::invalid(
                "the best parameters are kept without the state of the optimizer; `latest` in place of an id exports \
                 the last parameters with theirs",
            ));
        }
        return copy_best(&best, &kept, &manifests::open_store(&record).await?, &target, if_there)
            .await;
    }
    let manifest = manifests::read_one(&job, &args.id).await?;
    let checkpoint = manifest.record()?;
    let store = manifests::open_store(&record).await?;
    let id = &manifest.id;
    let failed = async |error: CheckpointError| match error {
        CheckpointError::Missing { .. } if was_deleted(&job, id).await? => {
            let message =
                format!("checkpoint {id} was deleted during the export; export a newer one");
            Err(Failure::new(ErrorKind::Stale, message))
        }
        error => {
            let failure = explain(error, &store, &record).await;
            Err(failure.context(format!("cannot export checkpoint {id}")))
        }
    };
    let wanted = match of_optimizer.is_some() || args.average {
        true => Wanted::WithOptimizer,
        false => Wanted::Parameters,
    };
    let found = match contents(&store, checkpoint, wanted).await {
        Ok(found) => found,
        Err(error) => return failed(error).await,
    };
    let Contents { layout, mut values, parameters_sha256: mut sha256, mut optimizer } = found;
    if args.average {
        let states = optimizer.as_mut().map(|state| &mut state.states);
        values = states.and_then(|it| it.remove(AVERAGE)).ok_or_else(|| {
            Failure::invalid(format!("checkpoint {id} has no averages of the parameters"))
        })?;
        sha256 = layout.digest(&values, &[]);
    }
    let (name, model) = (&record.spec.name, &record.spec.model.kind);
    let about = ModelFile { job: name, model, parameters_sha256: &sha256 };
    let fixed = fixed_of(&job, &store).await?;
    let bytes = encode_model(&layout, &values, about, fixed.as_deref())
        .map_err(|error| Failure::invalid(format!("checkpoint {id}: {error}")))?;
    let state = optimizer.filter(|_| of_optimizer.is_some()).map(|mut state| {
        state.updates += record.updates_before();
        let kind = name_of(record.spec.optimizer.kind);
        let about = OptimizerFile { job: name, optimizer: &kind, parameters_sha256: &sha256 };
        encode_optimizer(&layout, &state, about)
    });
    let state =
        state.transpose().map_err(|error| Failure::invalid(format!("checkpoint {id}: {error}")))?;
    let mut writers = Vec::new();
    for table in layout.tables() {
        let target = open_target(&table_target(&args.to, &table.name))?;
        check_free(&target, if_there).await?;
        writers.push(ObjectWriter::new(target));
    }
    let about = [("job", &name[..]), ("parameters_sha256", &sha256)];
    let written = write_tables(&store, checkpoint, &about, &mut writers).await;
    if let Err(error) = written {
        join_all(writers.into_iter().map(ObjectWriter::abort)).await;
        return match error {
            WriteTablesError::Checkpoint(error) => failed(error).await,
            WriteTablesError::Store(error) => Err(store_failure(error)),
            error @ WriteTablesError::File { .. } => {
                Err(Failure::invalid(format!("checkpoint {id}: {error}")))
            }
        };
    }
    for writer in writers {
        let table = writer.place().clone();
        check(
            &table,
            match if_there {
                IfThere::Replace => writer.finish().await.map(|()| Created::Now),
                IfThere::Fail => writer.finish_new().await,
            },
        )?;
    }
    if let Some((place, state)) = of_optimizer.iter().zip(state).next() {
        write(place, state, if_there).await?;
    }
    write(&target, bytes, if_there).await?;
    let step = checkpoint.position.version;
    notice(format_args!("steadfast: wrote checkpoint {id} (step {step}) to {target}"));
    print_line(sha256);
    Ok(ExitCode::SUCCESS)
}

/// Returns the tensors that the model has beside its parameters. If they are lost, the parameters are exported without
/// them: they cannot be had elsewhere.
async fn fixed_of(job: &Job, store: &Location) -> Result<Option<Bytes>, Failure> {
    let record: Option<FixedRecord> = job.etcd.get_json(&job.keys.fixed()).await?;
    let Some(record) = record else { return Ok(None) };
    match read_fixed(store, &record).await {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error @ (FixedError::Missing { .. } | FixedError::Damaged { .. })) => {
            notice(format_args!(
                "steadfast: the file lacks the tensors that training does not change: {error}"
            ));
            Ok(None)
        }
        Err(FixedError::Store(error)) => Err(store_failure(error)),
    }
}

/// Returns the best evaluation of a job that has ended, with its parameters, which no checkpoint may hold any more.
async fn best_of_ended(job: &Job) -> Result<Option<(Best, KeptModel)>, Failure> {
    if job.etcd.get(&job.keys.result()).await?.is_none() {
        return Ok(None);
    }
    let evaluation: Option<EvaluationRecord> = job.etcd.get_json(&job.keys.evaluation()).await?;
    let best = evaluation.and_then(|it| it.course).map(|course| course.best);
    Ok(best.and_then(|best| best.model.clone().map(|model| (best, model))))
}

/// Copies the model of a job that kept its best parameters.
async fn copy_best(
    best: &Best,
    kept: &KeptModel,
    store: &Location,
    target: &Location,
    if_there: IfThere,
) -> Result<ExitCode, Failure> {
    let model = store.child(MODEL).map_err(store_failure)?;
    let remedy = "`latest` in place of an id exports the last parameters";
    let bytes = match model.read().await {
        Ok(bytes) => bytes,
        Err(StoreError::NotFound { url }) => {
            let message =
                format!("the model with the best parameters, {url}, does not exist; {remedy}");
            return Err(Failure::new(ErrorKind::NotFound, message));
        }
        Err(error) => return Err(store_failure(error)),
    };
    if sha256(&bytes) != kept.file_sha256 {
        return Err(Failure::invalid(format!(
            "{model} is not the model with the best parameters any more; {remedy}"
        )));
    }
    write(target, bytes, if_there).await?;
    let step = best.version;
    notice(format_args!("steadfast: wrote the best parameters (step {step}) to {target}"));
    print_line(&kept.parameters_sha256);
    Ok(ExitCode::SUCCESS)
}

/// Checks that a file does not exist, unless it may be replaced.
async fn check_free(target: &Location, if_there: IfThere) -> Result<(), Failure> {
    match if_there {
        IfThere::Replace => Ok(()),
        IfThere::Fail if target.size().await.map_err(store_failure)?.is_none() => Ok(()),
        IfThere::Fail => Err(already_exists(target)),
    }
}

async fn write(target: &Location, bytes: Bytes, if_there: IfThere) -> Result<(), Failure> {
    let written = match if_there {
        IfThere::Replace => target.write(bytes).await.map(|()| Created::Now),
        IfThere::Fail => target.create(bytes).await,
    };
    check(target, written)
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

/// Checks that this command created the file. Another process may have created it since this one looked for it.
fn check(target: &Location, created: Result<Created, StoreError>) -> Result<(), Failure> {
    match created.map_err(store_failure)? {
        Created::Now => Ok(()),
        Created::Already => Err(already_exists(target)),
    }
}

fn already_exists(target: &Location) -> Failure {
    let message =
        format!("{target} already exists; name another file, or overwrite it with --force");
    Failure::new(ErrorKind::Conflict, message)
}
