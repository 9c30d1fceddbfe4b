//! The lock, and commits that only its holder can make.
//!
//! Every commit compares the lock's create-revision, so a former holder changes nothing, and its
//! version, and puts the lock again, which raises the version. The version thereby counts our
//! commits: when the reply to one is lost, the version tells whether it happened, and a retry
//! cannot happen twice.

use std::time::Duration;

use etcd_client::{Compare, CompareOp, Txn, TxnOp};
use steadfast_host::time::{Instant, sleep};
use tracing::warn;

use crate::{CoordError, Entry, Etcd, Op, Session, op};

/// Operations of the caller in one commit: etcd's default limit, less the lock's own put.
pub const OPS_MAX: usize = 127;

/// Compares of the caller in one commit: etcd's default limit, less the lock's own two.
pub const COMPARES_MAX: usize = 126;

/// How long a commit with an unknown outcome is tried again before the holder gives up its reign.
const COMMIT_PATIENCE: Duration = Duration::from_secs(30);

/// A held lock.
#[derive(Debug)]
pub struct Reign {
    key: String,
    value: Vec<u8>,
    lease: i64,
    create_revision: i64,
    version: i64,
    deadline: std::sync::Arc<crate::session::Deadline>,
}

/// A condition on another key, beside the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The key has this create-revision; 0 means that it does not exist.
    CreateRevision { key: String, revision: i64 },
    /// The key was changed last at this revision; 0 means that it does not exist.
    ModRevision { key: String, revision: i64 },
}

impl Condition {
    pub(crate) fn compare(&self) -> Compare {
        match self {
            Self::CreateRevision { key, revision } => {
                Compare::create_revision(key.clone(), CompareOp::Equal, *revision)
            }
            Self::ModRevision { key, revision } => {
                Compare::mod_revision(key.clone(), CompareOp::Equal, *revision)
            }
        }
    }
}

/// What became of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    Done {
        revision: i64,
    },
    /// A [`Condition`] did not hold; nothing changed.
    ConditionFailed,
}

impl Reign {
    /// Tries once to take the lock.
    ///
    /// # Errors
    /// If etcd cannot be asked.
    pub async fn seize(
        etcd: &Etcd,
        session: &Session,
        key: &str,
        value: &[u8],
    ) -> Result<Result<Self, Entry>, CoordError> {
        match etcd.create(key, value, session.lease()).await? {
            Ok(revision) => Ok(Ok(Self {
                key: key.to_owned(),
                value: value.to_vec(),
                lease: session.lease(),
                create_revision: revision,
                version: 1,
                deadline: session.deadline(),
            })),
            Err(held) => Ok(Err(held)),
        }
    }

    /// The lock's create-revision: the fencing token of this reign.
    pub fn epoch(&self) -> i64 {
        self.create_revision
    }

    /// Whether the reign lasts beyond doubt.
    pub fn is_live(&self) -> bool {
        self.deadline.is_ahead()
    }

    /// Commits `ops` in one transaction, if the lock is still ours and all `conditions` hold.
    ///
    /// # Errors
    /// [`CoordError::Fenced`] or [`CoordError::LeaseLost`]: the reign is over. Other errors: the
    /// outcome stayed unknown too long, so the caller must end its reign and recover.
    pub async fn commit(
        &mut self,
        etcd: &Etcd,
        ops: &[Op],
        conditions: &[Condition],
    ) -> Result<Commit, CoordError> {
        if OPS_MAX < ops.len() || COMPARES_MAX < conditions.len() {
            let operations = ops.len().max(conditions.len());
            return Err(CoordError::TooManyOperations { operations, limit: OPS_MAX });
        }
        let started = Instant::now();
        loop {
            if !self.deadline.is_ahead() {
                return Err(CoordError::LeaseLost);
            }
            match self.attempt(etcd, ops, conditions).await {
                Ok(outcome) => return Ok(outcome),
                Err(error) if error.is_transient() && started.elapsed() < COMMIT_PATIENCE => {
                    warn!(%error, "commit is tried again");
                    sleep(Duration::from_millis(100)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// A lock that somebody put by hand has lost its lease, and its version counts more than commits.
    fn is_ours(&self, lock: &Entry) -> bool {
        lock.create_revision == self.create_revision && lock.lease == self.lease
    }

    async fn attempt(
        &mut self,
        etcd: &Etcd,
        ops: &[Op],
        conditions: &[Condition],
    ) -> Result<Commit, CoordError> {
        let mut compares = vec![
            Compare::create_revision(self.key.clone(), CompareOp::Equal, self.create_revision),
            Compare::version(self.key.clone(), CompareOp::Equal, self.version),
        ];
        compares.extend(conditions.iter().map(Condition::compare));
        let mut puts: Vec<TxnOp> = ops.iter().map(op::to_txn).collect();
        puts.push(op::to_txn(&Op::put_leased(&self.key, self.value.clone(), self.lease)));
        let txn = Txn::new()
            .when(compares)
            .and_then(puts)
            .or_else(vec![TxnOp::get(self.key.clone(), None)]);
        let outcome = etcd.txn("commit", txn).await?;
        if outcome.succeeded {
            self.version += 1;
            return Ok(Commit::Done { revision: outcome.revision });
        }
        let lock = outcome.gets.first().and_then(|found| found.first());
        match lock.filter(|lock| self.is_ours(lock)) {
            None => Err(CoordError::Fenced { key: self.key.clone() }),
            // Nobody else can have raised the version: an earlier attempt of this very commit,
            // whose reply was lost, had happened.
            Some(lock) if lock.version == self.version + 1 => {
                self.version += 1;
                Ok(Commit::Done { revision: lock.mod_revision })
            }
            Some(_) => Ok(Commit::ConditionFailed),
        }
    }
}
