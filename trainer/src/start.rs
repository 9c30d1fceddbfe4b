//! The files that the parameters of a job, and the state of its optimizer, start from.

use steadfast_checkpoint::{
    StartError, check_fixed, read_start, read_start_optimizer, start_shapes,
};
use steadfast_common::job::optimizer_errors::name_of;
use steadfast_common::job::spec::OptimizerKind;
use steadfast_common::job::start::StartPlan;
use steadfast_common::records::JobRecord;
use steadfast_common::tensor::layout::{Layout, UpdateRule};
use steadfast_training_client::InitialState;
use tracing::{info, warn};

/// Overwrites the parameters that start from the file of a job, and returns the state of the optimizer that they begin
/// with, if that is in a file too. Does nothing if the job has no file. `fixed` are the tensors that the model has beside
/// its parameters.
///
/// # Errors
/// If the files and the parameters do not fit together, or a file cannot be read, or is another one than when the job
/// was created.
pub async fn overwrite(
    job: &JobRecord,
    layout: &Layout,
    values: &mut [f32],
    fixed: Option<&[u8]>,
) -> Result<InitialState, StartError> {
    let (Some(spec), Some(record)) = (&job.spec.start, &job.start) else {
        return Ok(InitialState::default());
    };
    let file = steadfast_store::open(&record.url)?;
    let plan =
        spec.plan(layout.params(), &start_shapes(&file).await?).map_err(StartError::Unfit)?;
    read_start(&file, record, &plan, layout, values).await?;
    let unused = match fixed.filter(|_| !plan.unused.is_empty()) {
        Some(fixed) => check_fixed(&file, &plan, fixed).await?,
        None => plan.unused.clone(),
    };
    let loaded = plan.tensors.iter().flatten().count();
    let new = plan.tensors.len() - loaded;
    info!(file = record.url, record.sha256, loaded, new, "parameters start from a file");
    if !unused.is_empty() {
        warn!(tensors = unused.join(", "), "the file has tensors that are not used");
    }
    let Some(optimizer) = &record.optimizer else { return Ok(InitialState::default()) };
    let vectors = read_start_optimizer(optimizer, &plan, layout).await?;
    let kind = job.spec.optimizer.kind;
    if vectors.is_empty() && kind != OptimizerKind::Sgd {
        return Err(StartError::Unfit(format!(
            "the file of `start.optimizer` has no state of `{}` for these parameters; leave out `start.optimizer`",
            name_of(kind)
        )));
    }
    let names: Vec<&str> = vectors.keys().map(String::as_str).collect();
    let (names, updates) = (names.join(", "), optimizer.updates);
    info!(
        file = optimizer.url,
        optimizer.sha256, names, updates, "the optimizer starts from a file"
    );
    Ok(InitialState { vectors, params: with_state(&plan, layout) })
}

/// Returns the parameters that begin with a state from the file.
fn with_state(plan: &StartPlan, layout: &Layout) -> Vec<bool> {
    let of_file = plan.tensors.iter().map(Option::is_some);
    let updated = layout.params().iter().map(|it| it.update == UpdateRule::Optimizer);
    of_file.zip(updated).map(|(of_file, updated)| of_file && updated).collect()
}
