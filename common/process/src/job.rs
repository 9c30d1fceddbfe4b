//! The job that a process takes part in, once a master has accepted it.

use steadfast_common::keys::Keys;
use steadfast_common::records::JobRecord;
use steadfast_coord::{Etcd, Mirror, Range};

use crate::Failure;

/// Waits until etcd holds the job.
///
/// # Errors
/// If etcd does not answer, or holds something else under the job's key.
pub async fn wait_for_job(etcd: &Etcd, keys: &Keys) -> Result<JobRecord, Failure> {
    let mirror = Mirror::start(etcd, Range::Key(keys.job())).await?;
    let mut changes = mirror.subscribe();
    loop {
        if let Some(job) = changes.borrow_and_update().single()? {
            return Ok(job);
        }
        changes.changed().await.map_err(|_| Failure::internal("the watch of the job ended"))?;
    }
}
