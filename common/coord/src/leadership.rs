//! The leader lock, and commits that only its holder can make.
//!
//! Every commit compares the lock's create-revision, which fences former holders, and its version,
//! and puts the lock again, which increments the version. The version thus counts the commits of
//! the term: when a reply is lost, the version shows whether the commit was applied, and a retry
//! cannot apply it twice.

use std::time::Duration;

use etcd_client::{Compare, CompareOp, Txn, TxnOp};
use steadfast_host::time::{Instant, sleep};
use tracing::{info, warn};

use crate::{CoordError, Entry, Etcd, Op, Session, op};

/// Operations of the caller in one commit: etcd's default limit, less the lock's own put.
pub const OPS_MAX: usize = 127;

/// Time during which a commit with an unknown outcome is retried before the holder ends its term.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Time between attempts to acquire a lock that another process holds.
const ACQUIRE_EVERY: Duration = Duration::from_millis(200);

/// Attempts to acquire the lock go on for this time beyond the time to live of a lease.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

/// A held lock.
#[derive(Debug)]
pub struct Leadership {
    key: String,
    value: Vec<u8>,
    lease: i64,
    create_revision: i64,
    version: i64,
    deadline: std::sync::Arc<crate::session::Deadline>,
}

impl Leadership {
    /// Tries once to acquire the lock; returns the current lock entry if another process holds it. If an earlier attempt
    /// under the same lease acquired the lock and its reply was lost, this attempt succeeds.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn acquire(
        etcd: &Etcd,
        session: &Session,
        key: &str,
        value: &[u8],
    ) -> Result<Result<Self, Entry>, CoordError> {
        let (create_revision, version) = match etcd.create(key, value, session.lease()).await? {
            Ok(revision) => (revision, 1),
            Err(held) if held.lease == session.lease() => (held.create_revision, held.version),
            Err(held) => return Ok(Err(held)),
        };
        Ok(Ok(Self {
            key: key.to_owned(),
            value: value.to_vec(),
            lease: session.lease(),
            create_revision,
            version,
            deadline: session.deadline(),
        }))
    }

    /// Opens a session of `lease_ttl`, and acquires the lock under it for `holder`, the value that other processes see.
    /// Waits for the end of the lease of a holder that was killed; returns the entry of one that keeps the lock.
    ///
    /// # Errors
    /// If etcd refuses the lease or does not answer. [`CoordError::LeaseLost`]: try again.
    pub async fn acquire_within_a_lease(
        etcd: &Etcd,
        lease_ttl: Duration,
        key: &str,
        holder: &str,
    ) -> Result<Result<(Session, Self), Entry>, CoordError> {
        let value = serde_json::json!({ "holder": holder }).to_string().into_bytes();
        let session = Session::open_with_retry(etcd, lease_ttl).await?;
        let begun = Instant::now();
        let mut is_logged = false;
        loop {
            let acquired = Self::acquire(etcd, &session, key, &value).await;
            if acquired.is_err() && !session.is_live() {
                return Err(CoordError::LeaseLost);
            }
            let held = match acquired? {
                Ok(leadership) => return Ok(Ok((session, leadership))),
                Err(held) => held,
            };
            if lease_ttl + ACQUIRE_TIMEOUT <= begun.elapsed() {
                session.close(etcd).await;
                return Ok(Err(held));
            }
            if !is_logged {
                info!(held = %held.text(), "waiting for the end of another holder of the lock");
                is_logged = true;
            }
            sleep(ACQUIRE_EVERY).await;
        }
    }

    /// Returns the lock's create-revision, which is the fencing token of this term.
    pub fn epoch(&self) -> i64 {
        self.create_revision
    }

    /// Returns whether the term certainly still lasts.
    pub fn is_live(&self) -> bool {
        self.deadline.is_ahead()
    }

    /// Commits `ops` in one transaction, if this process still holds the lock; returns the revision.
    ///
    /// No other conditions are needed: only the holder of the lock writes these keys, so its decisions are
    /// based on current values.
    ///
    /// # Errors
    /// [`CoordError::Fenced`] or [`CoordError::LeaseLost`]: the term is over. Other errors: the
    /// outcome is still unknown after the retries, so the caller must end its term and recover.
    pub async fn commit(&mut self, etcd: &Etcd, ops: &[Op]) -> Result<i64, CoordError> {
        if OPS_MAX < ops.len() {
            return Err(CoordError::TooManyOperations { operations: ops.len(), limit: OPS_MAX });
        }
        let started = Instant::now();
        loop {
            if !self.deadline.is_ahead() {
                return Err(CoordError::LeaseLost);
            }
            match self.attempt(etcd, ops).await {
                Ok(revision) => return Ok(revision),
                Err(error) if error.is_transient() && started.elapsed() < COMMIT_TIMEOUT => {
                    warn!(%error, "retrying a commit");
                    sleep(Duration::from_millis(100)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns whether the lock is the one that this term created. A manual put of the key detaches its lease and
    /// increments its version, which then no longer counts only commits.
    fn is_ours(&self, lock: &Entry) -> bool {
        lock.create_revision == self.create_revision && lock.lease == self.lease
    }

    async fn attempt(&mut self, etcd: &Etcd, ops: &[Op]) -> Result<i64, CoordError> {
        let compares = [
            Compare::create_revision(self.key.clone(), CompareOp::Equal, self.create_revision),
            Compare::version(self.key.clone(), CompareOp::Equal, self.version),
        ];
        let mut puts: Vec<TxnOp> = ops.iter().map(op::to_txn).collect();
        puts.push(op::to_txn(&Op::put_leased(&self.key, self.value.clone(), self.lease)));
        let txn = Txn::new()
            .when(compares)
            .and_then(puts)
            .or_else(vec![TxnOp::get(self.key.clone(), None)]);
        let outcome = etcd.txn("commit", txn).await?;
        if outcome.succeeded {
            self.version += 1;
            return Ok(outcome.revision);
        }
        let lock = outcome.gets.first().and_then(|found| found.first());
        match lock.filter(|lock| self.is_ours(lock)) {
            // Only this term increments the version, so an earlier attempt of this commit was applied
            // and its reply was lost.
            Some(lock) if lock.version == self.version + 1 => {
                self.version += 1;
                Ok(lock.mod_revision)
            }
            Some(_) | None => Err(CoordError::Fenced { key: self.key.clone() }),
        }
    }
}
