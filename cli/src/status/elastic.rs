//! Reads the status of an elastic job.

use steadfast_common::elastic_status::ElasticStatus;
use steadfast_master::stored_elastic_status;
use steadfast_process::Failure;

use crate::format::plural;
use crate::job_args::Job;
use crate::job_master::JobMaster;

/// Returns the status from the acting master, or else what etcd holds; `None` if the job is not elastic.
///
/// # Errors
/// If etcd does not answer or holds a value that cannot be parsed, or no master has accepted the job yet.
pub async fn read(job: &Job, master: &mut JobMaster) -> Result<Option<ElasticStatus>, Failure> {
    if !job.is_elastic().await? {
        return Ok(None);
    }
    match master.elastic_status().await {
        Ok(status) => Ok(Some(status)),
        Err(failure) => stored_elastic_status(&job.etcd, &job.keys, failure.message).await,
    }
}

/// Describes the last round.
pub fn round(status: &ElasticStatus) -> String {
    match status.round.0 {
        0 => "none yet".to_owned(),
        number => format!("{number}, {}", plural(status.world_size as usize, "worker")),
    }
}
