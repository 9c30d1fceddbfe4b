//! The durable state of the launcher in etcd, and the lock that only one launcher of a job holds.

use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::launch::{HostRecord, LauncherRecord};
use steadfast_coord::{CoordError, Etcd, Leadership, Op, Session};
use steadfast_launcher_core::hosts::HostName;
use steadfast_launcher_core::launcher::{Change, Launcher};
use steadfast_process::Failure;
use tokio::time::{Instant, sleep};
use tracing::info;

/// Time between attempts to acquire the lock.
const RETRY: Duration = Duration::from_millis(200);

/// Attempts to acquire the lock go on for this time beyond the time to live of a lease.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

/// Where the state lies.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub etcd: Etcd,
    pub keys: Keys,
    pub lease_ttl: Duration,
    /// Identifies this launcher to others, in the value of the lock.
    pub holder: String,
}

impl Store {
    /// Acquires the lock; waits for the end of the lease of a launcher that was killed.
    ///
    /// # Errors
    /// If another launcher keeps the lock, or etcd refuses the lease. [`CoordError::LeaseLost`]: try again.
    pub async fn acquire(&self) -> Result<(Session, Leadership), Failure> {
        let value = serde_json::json!({ "holder": self.holder }).to_string().into_bytes();
        let key = self.keys.launch_lock();
        let session = Session::open_with_retry(&self.etcd, self.lease_ttl).await?;
        let deadline = Instant::now() + self.lease_ttl + ACQUIRE_TIMEOUT;
        let mut is_logged = false;
        loop {
            let acquired = Leadership::acquire(&self.etcd, &session, &key, &value).await;
            if acquired.is_err() && !session.is_live() {
                return Err(CoordError::LeaseLost.into());
            }
            let held = match acquired? {
                Ok(leadership) => return Ok((session, leadership)),
                Err(held) => String::from_utf8_lossy(&held.value).into_owned(),
            };
            if deadline <= Instant::now() {
                session.close(&self.etcd).await;
                let message = format!("another launcher runs this job: {held}");
                return Err(Failure::new(ErrorKind::Conflict, message));
            }
            if !is_logged {
                info!(held, "waiting for the end of another launcher");
                is_logged = true;
            }
            sleep(RETRY).await;
        }
    }

    /// Reads the state. Only the holder of the lock changes it.
    ///
    /// # Errors
    /// If etcd does not answer, or a record cannot be read.
    pub async fn load(&self) -> Result<Launcher, CoordError> {
        let record: Option<LauncherRecord> = self.etcd.get_json(&self.keys.launch_state()).await?;
        let view = self.etcd.list(&self.keys.launch_hosts_prefix()).await?;
        let mut hosts: Vec<(HostName, HostRecord)> = Vec::new();
        for (key, entry) in &view.entries {
            let host = self.keys.launch_host_of(key).unwrap_or_default();
            let host = host.parse().map_err(|error| CoordError::BadValue {
                key: key.clone(),
                reason: format!("{error}"),
            })?;
            hosts.push((host, entry.json()?));
        }
        Ok(Launcher::from_records(record, hosts))
    }

    /// Replaces the state of an earlier launch of the job, whose agents have all ended.
    ///
    /// # Errors
    /// Those of [`Leadership::commit`].
    pub async fn begin_again(
        &self,
        leadership: &mut Leadership,
        before: &Launcher,
    ) -> Result<Launcher, CoordError> {
        // The numbers of launches go on.
        let launches = before.record().launches;
        let record = LauncherRecord { launches, ..LauncherRecord::default() };
        let ops = [
            Op::put(&self.keys.launch_state(), &record),
            Op::delete_prefix(&self.keys.launch_hosts_prefix()),
        ];
        leadership.commit(&self.etcd, &ops).await?;
        Ok(Launcher::from_records(Some(record), []))
    }

    /// Returns the operation that makes a change.
    pub fn op(&self, change: &Change) -> Op {
        match change {
            Change::Launcher(record) => Op::put(&self.keys.launch_state(), record),
            Change::Host { host, record } => {
                let key = self.keys.launch_host(host.as_str());
                match record {
                    Some(record) => Op::put(&key, record),
                    None => Op::delete(&key),
                }
            }
        }
    }
}
