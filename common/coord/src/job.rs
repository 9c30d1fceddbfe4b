//! Waits for the record of a job.

use steadfast_common::records::JobRecord;
use steadfast_common::records::keys::Keys;
use tracing::info;

use crate::{CoordError, Etcd, Mirror, Range};

/// Waits until a master has accepted the job, which writes it to etcd.
///
/// # Errors
/// If etcd does not answer, or the value of the job's key cannot be parsed.
pub async fn wait_for_job(etcd: &Etcd, keys: &Keys) -> Result<JobRecord, CoordError> {
    let mirror = Mirror::start(etcd, Range::Key(keys.job())).await?;
    let mut changes = mirror.subscribe();
    let mut is_logged = false;
    loop {
        if let Some(job) = changes.borrow_and_update().single()? {
            return Ok(job);
        }
        if !is_logged {
            info!(key = keys.job(), "waiting for a master to accept the job");
            is_logged = true;
        }
        changes.changed().await.expect("the mirror outlives its subscriber");
    }
}
