//! A lease with keep-alives, and a deadline on the holder's own clock.
//!
//! The deadline is counted from the time at which the last answered keep-alive was *sent*, on a clock
//! that includes system sleep, less a margin. The holder therefore stops before etcd expires the lease
//! and another process can take its keys.
//!
//! A holder whose work stays right beside a successor need not stop: its lease lasts until etcd says that it does not
//! exist any more, see [`Session::outlast_etcd`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{LeaseKeepAliveStream, LeaseKeeper};
use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_host::task::{Task, spawn};
use steadfast_host::time::{boot_time, interval, sleep, timeout};
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::retry::backoff;
use crate::{CoordError, Etcd, error_counters};

/// Fraction of the TTL by which the deadline precedes the expiry in etcd.
const MARGIN: f64 = 0.1;

/// Keep-alives sent in one TTL.
const BEATS_PER_TTL: u32 = 4;

/// A lease of this process. [`Session::close`] ends it and tries to revoke it; dropping it stops the
/// keep-alives, and the lease expires.
#[derive(Debug)]
pub struct Session {
    lease: i64,
    deadline: Arc<Deadline>,
    lost: watch::Receiver<bool>,
    beat: Task<()>,
}

/// The deadline of a lease that has ended. It is later than all others, so that no late keep-alive replaces it.
const ENDED: u64 = u64::MAX;

/// The time after which the holder must not act on the lease.
#[derive(Debug)]
pub struct Deadline {
    at_ms: AtomicU64,
    /// Whether the holder goes on until etcd says that the lease has ended.
    outlasts: AtomicBool,
}

impl Deadline {
    /// Returns the deadline of a caller without a lease: it never passes.
    pub fn none() -> Self {
        Self::new(ENDED - 1)
    }

    fn new(at_ms: u64) -> Self {
        Self { at_ms: AtomicU64::new(at_ms), outlasts: AtomicBool::new(false) }
    }

    /// Returns whether the holder may still act: the lease has not ended, and the deadline has not passed or does not
    /// matter.
    pub fn is_ahead(&self) -> bool {
        self.at_ms.load(Ordering::Acquire) != ENDED
            && (self.outlasts.load(Ordering::Acquire) || !self.has_passed())
    }

    fn has_passed(&self) -> bool {
        self.at_ms.load(Ordering::Acquire) <= boot_time().as_millis() as u64
    }

    fn extend(&self, sent: Duration, ttl: Duration) {
        let at = sent + ttl.mul_f64(1.0 - MARGIN);
        self.at_ms.fetch_max(at.as_millis() as u64, Ordering::AcqRel);
    }

    fn end(&self) {
        self.at_ms.store(ENDED, Ordering::Release);
    }
}

impl Session {
    /// Grants a lease of `ttl` and keeps it alive in the background.
    ///
    /// # Errors
    /// If etcd does not grant it.
    pub fn open(etcd: &Etcd, ttl: Duration) -> BoxFuture<'_, Result<Self, CoordError>> {
        Self::grant(etcd, ttl).boxed()
    }

    async fn grant(etcd: &Etcd, ttl: Duration) -> Result<Self, CoordError> {
        let sent = boot_time();
        let (lease, granted) = etcd.grant(ttl).await?;
        let deadline = Arc::new(Deadline::new(0));
        deadline.extend(sent, granted);
        let (lost_tx, lost) = watch::channel(false);
        let beat = spawn(keep_alive(etcd.clone(), lease, granted, deadline.clone(), lost_tx));
        Ok(Self { lease, deadline, lost, beat })
    }

    /// Opens a session; retries until etcd grants a lease.
    ///
    /// # Errors
    /// If etcd fails with an error that is not transient.
    pub async fn open_with_retry(etcd: &Etcd, ttl: Duration) -> Result<Self, CoordError> {
        let mut backoff = backoff();
        loop {
            match Self::open(etcd, ttl).await {
                Ok(session) => return Ok(session),
                Err(error) if error.is_transient() => warn!(%error, "no lease yet"),
                Err(error) => return Err(error),
            }
            sleep(backoff.next().unwrap_or(ttl)).await;
        }
    }

    /// Returns the id of the lease, for the keys to attach to it.
    pub fn lease(&self) -> i64 {
        self.lease
    }

    /// Returns the deadline, to check before every reply that relies on the lease.
    pub fn deadline(&self) -> Arc<Deadline> {
        self.deadline.clone()
    }

    /// Lets the holder act past its deadline, until etcd answers that the lease does not exist any more. This is right
    /// only for work that stays right if another process takes the keys meanwhile: results that are functions of their
    /// names, or that the successor refuses.
    pub fn outlast_etcd(&self) {
        self.deadline.outlasts.store(true, Ordering::Release);
    }

    /// Returns whether the holder may still act, see [`Deadline::is_ahead`].
    pub fn is_live(&self) -> bool {
        self.deadline.is_ahead()
    }

    /// Completes when the lease is lost.
    pub async fn lost(&self) {
        let mut lost = self.lost.clone();
        // An error means that the keep-alive task has ended, and the lease expires.
        let _ = lost.wait_for(|lost| *lost).await;
    }

    /// Revokes the lease, so that etcd deletes its keys at once.
    pub async fn close(&self, etcd: &Etcd) {
        self.beat.abort();
        self.deadline.end();
        if let Err(error) = etcd.revoke(self.lease).await {
            debug!(%error, "lease not revoked; it will expire");
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.beat.abort();
    }
}

async fn keep_alive(
    etcd: Etcd,
    lease: i64,
    ttl: Duration,
    deadline: Arc<Deadline>,
    lost: watch::Sender<bool>,
) {
    let mut ticks = interval(ttl / BEATS_PER_TTL);
    let (mut stream, mut is_late) = (None, false);
    while deadline.is_ahead() {
        if deadline.has_passed() && !is_late {
            is_late = true;
            warn!(lease, "etcd did not renew the lease in time; what needs no commit goes on");
        }
        ticks.tick().await;
        let (sent, token) = (boot_time(), etcd.token());
        // After a member that hangs there is time for another one.
        match timeout(ttl / 3, beat(&etcd, lease, &mut stream)).await {
            Ok(Ok(granted)) if granted.is_zero() => {
                warn!(lease, "lease does not exist any more");
                break;
            }
            Ok(Ok(granted)) => {
                deadline.extend(sent, granted);
                if is_late {
                    is_late = false;
                    info!(lease, "etcd has renewed the lease");
                }
            }
            Ok(Err(error)) => {
                warn!(lease, %error, "lease not renewed");
                stream = None;
                match timeout(ttl / BEATS_PER_TTL, etcd.clears(&error, token)).await {
                    Ok(Ok(_)) => {}
                    Ok(Err(error)) => warn!(lease, %error, "no login to etcd"),
                    Err(_) => warn!(lease, "no answer to the login to etcd"),
                }
            }
            Err(_) => {
                warn!(lease, "lease not renewed: no answer");
                stream = None;
                etcd.reconnect();
            }
        }
    }
    deadline.end();
    error_counters::lease_lost();
    lost.send_replace(true);
}

type Beat = (LeaseKeeper, LeaseKeepAliveStream);

/// Renews the lease once; returns its time to live, zero if the lease does not exist any more.
async fn beat(
    etcd: &Etcd,
    lease: i64,
    stream: &mut Option<Beat>,
) -> Result<Duration, etcd_client::Error> {
    let (keeper, answers) = match stream {
        Some(open) => open,
        None => match etcd.client().lease_keep_alive(lease).await {
            // Opening the stream renews the lease; the client consumes the reply.
            Ok(open) => stream.insert(open),
            Err(etcd_client::Error::LeaseKeepAliveError(_)) => return Ok(Duration::ZERO),
            Err(error) => return Err(error),
        },
    };
    keeper.keep_alive().await?;
    match answers.message().await? {
        Some(answer) => Ok(Duration::from_secs(u64::try_from(answer.ttl()).unwrap_or(0))),
        None => Err(etcd_client::Error::LeaseKeepAliveError("stream ended".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I1: the keep-alive of a session may be answered while the session is closed.
    #[test]
    fn a_late_keep_alive_does_not_extend_a_lease_that_has_ended() {
        let deadline = Deadline::new(0);
        let ttl = Duration::from_secs(60);
        deadline.extend(boot_time(), ttl);
        assert!(deadline.is_ahead());
        deadline.end();
        deadline.extend(boot_time(), ttl);
        assert!(!deadline.is_ahead());
    }

    /// F16: only etcd ends the lease of a holder that outlasts it.
    #[test]
    fn a_lease_that_outlasts_etcd_lasts_past_its_deadline_and_not_past_its_end() {
        let deadline = Deadline::new(1);
        assert!(!deadline.is_ahead());
        deadline.outlasts.store(true, Ordering::Release);
        assert!(deadline.is_ahead());
        deadline.end();
        assert!(!deadline.is_ahead());
    }
}
