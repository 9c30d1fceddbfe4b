//! The file that the parameters of a job start from.

use steadfast_checkpoint::{StartError, check_fixed, read_start, start_shapes};
use steadfast_common::records::JobRecord;
use steadfast_common::tensor::layout::Layout;
use tracing::{info, warn};

/// Overwrites the parameters that start from the file of a job. Does nothing if it has none. `fixed` are the tensors that
/// the model has beside its parameters.
///
/// # Errors
/// If the file and the parameters do not fit together, or the file cannot be read, or is another one than when the job
/// was created.
pub async fn overwrite(
    job: &JobRecord,
    layout: &Layout,
    values: &mut [f32],
    fixed: Option<&[u8]>,
) -> Result<(), StartError> {
    let (Some(spec), Some(record)) = (&job.spec.start, &job.start) else { return Ok(()) };
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
    Ok(())
}
