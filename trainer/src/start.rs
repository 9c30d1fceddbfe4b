//! The file that the parameters of a job start from.

use steadfast_checkpoint::{StartError, read_start, start_shapes};
use steadfast_common::job::start::StartPlan;
use steadfast_common::records::{JobRecord, StartRecord};
use steadfast_common::tensor::layout::{Layout, ParamSpec};
use steadfast_process::Failure;
use steadfast_store::Location;
use tracing::{info, warn};

/// The file, and which of its tensors each parameter starts from.
#[derive(Debug)]
pub struct Start {
    file: Location,
    record: StartRecord,
    plan: StartPlan,
}

impl Start {
    /// Compares the file with the parameters, before anything is computed. `None` if the job has no such file.
    ///
    /// # Errors
    /// If the file and the parameters do not fit together, or the file cannot be read.
    pub async fn open(job: &JobRecord, parameters: &[ParamSpec]) -> Result<Option<Self>, Failure> {
        let (Some(spec), Some(record)) = (&job.spec.start, &job.start) else { return Ok(None) };
        let file = steadfast_store::open(&record.url)
            .map_err(|error| Failure::invalid(format!("`start.file`: {error}")))?;
        let shapes = start_shapes(&file).await.map_err(failure)?;
        let plan = spec.plan(parameters, &shapes).map_err(Failure::invalid)?;
        let loaded = plan.tensors.iter().flatten().count();
        let new = plan.tensors.len() - loaded;
        info!(file = record.url, record.sha256, loaded, new, "parameters start from a file");
        if !plan.unused.is_empty() {
            warn!(tensors = plan.unused.join(", "), "the file has tensors that are not used");
        }
        Ok(Some(Self { file, record: record.clone(), plan }))
    }

    /// Overwrites the parameters that start from the file.
    ///
    /// # Errors
    /// If the file cannot be read, or is another one than when the job was created.
    pub async fn read(&self, layout: &Layout, values: &mut [f32]) -> Result<(), StartError> {
        read_start(&self.file, &self.record, &self.plan, layout, values).await
    }
}

fn failure(error: StartError) -> Failure {
    Failure::new(error.kind(), error.to_string())
}
