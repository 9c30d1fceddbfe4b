//! Calls to the acting master of a job. The clients of training jobs and of elastic jobs repeat them until one
//! answers.

use std::sync::Mutex;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::records::MasterRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::role::Role;
use steadfast_coord::{CoordError, Etcd, Mirror, Range, backoff};
use steadfast_host::time::{sleep, timeout};
use steadfast_net::{Channel, TlsIdentity};
use tonic::{Response, Status};
use tracing::{debug, info, warn};

/// Timeout of a call, in addition to the time that the request asks the master to wait.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Failed tries of one call after which the user is told. A failover takes fewer.
const TRIES_SILENT: u32 = 8;

/// The acting master of a job; follows failovers.
#[derive(Debug)]
pub struct ActingMaster {
    tls: TlsIdentity,
    master: Mirror,
    result: Mirror,
    /// The address of the last connection; the mutex guards only its replacement.
    connection: Mutex<Option<(String, Channel)>>,
}

/// Why a call got no reply.
#[derive(Debug)]
pub enum CallError {
    JobEnded,
    /// The master rejected the call, and would reject it again.
    Rejected(Status),
}

impl ActingMaster {
    /// Starts to mirror the keys that tell where the master is, and whether the job has ended.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn follow(etcd: &Etcd, keys: &Keys, tls: TlsIdentity) -> Result<Self, CoordError> {
        Ok(Self {
            tls,
            master: Mirror::start(etcd, Range::Key(keys.master_addr())).await?,
            result: Mirror::start(etcd, Range::Key(keys.result())).await?,
            connection: Mutex::default(),
        })
    }

    pub fn tls(&self) -> &TlsIdentity {
        &self.tls
    }

    pub fn has_job_ended(&self) -> bool {
        !self.result.view().entries.is_empty()
    }

    /// Completes when the job has ended.
    pub async fn job_ended(&self) {
        let mut changes = self.result.subscribe();
        let _ = changes.wait_for(|view| !view.entries.is_empty()).await;
    }

    /// Repeats a call until a master answers. `wait` is the time that the request asks it to wait.
    ///
    /// # Errors
    /// See [`CallError`].
    pub async fn call<T, F>(
        &self,
        wait: Duration,
        attempt: impl Fn(Channel) -> F,
    ) -> Result<T, CallError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let (mut pauses, mut tries) = (backoff(), 0);
        let mut changes = self.master.subscribe();
        loop {
            let record = changes.borrow_and_update().single::<MasterRecord>();
            let record = record.unwrap_or_else(|error| {
                warn!(%error, "cannot read a key");
                None
            });
            if let Some(channel) = record.and_then(|record| self.channel(&record.address)) {
                match timeout(wait + TIMEOUT, attempt(channel)).await {
                    Ok(Ok(reply)) => return Ok(reply.into_inner()),
                    Ok(Err(status)) if is_retryable(&status) => {
                        debug!(message = status.message(), "the master is not ready");
                    }
                    Ok(Err(status)) => return Err(CallError::Rejected(status)),
                    Err(_) => debug!("call to the master timed out"),
                }
                // Drops a failed connection: it may lead to a former master.
                self.connection.lock().expect("no holder panics").take();
            }
            tries += 1;
            if tries == TRIES_SILENT {
                info!("no master of the job answers; trying until one does");
            }
            tokio::select! {
                biased;
                () = sleep(pauses.next().unwrap_or(TIMEOUT)) => {}
                _ = changes.changed() => {}
                () = self.job_ended() => return Err(CallError::JobEnded),
            }
        }
    }

    fn channel(&self, address: &str) -> Option<Channel> {
        let mut connection = self.connection.lock().expect("no holder panics");
        if let Some((known, channel)) = &*connection
            && known == address
        {
            return Some(channel.clone());
        }
        let channel = self.tls.dial(address, Role::Master).ok()?;
        info!(address, "following the acting master");
        *connection = Some((address.to_owned(), channel.clone()));
        Some(channel)
    }
}

fn is_retryable(status: &Status) -> bool {
    matches!(steadfast_proto::kind(status), ErrorKind::Unavailable | ErrorKind::NotYet)
}
