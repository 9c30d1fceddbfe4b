//! The durable state of the launcher in etcd, and the lock that only one launcher of a job holds.

use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::launch::{HostRecord, LauncherRecord};
use steadfast_coord::{CoordError, Etcd, Leadership, Op, Session};
use steadfast_launcher_core::hosts::HostName;
use steadfast_launcher_core::launcher::{Change, Launcher};
use steadfast_process::Failure;

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
        let (key, holder) = (self.keys.launch_lock(), self.holder.as_str());
        let acquired =
            Leadership::acquire_within_a_lease(&self.etcd, self.lease_ttl, &key, holder).await?;
        acquired.map_err(|held| {
            let message = format!("another launcher runs this job: {}", held.text());
            Failure::new(ErrorKind::Conflict, message)
        })
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
