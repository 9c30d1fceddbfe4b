//! The lease of the slot, and how a pserver reacquires the slot for its shard after an etcd outage longer
//! than the lease.
//!
//! A shard keeps its incarnation (the create-revision under which its pserver first held the slot)
//! through any number of leases. If no other pserver held the slot meanwhile and no other generation
//! began, training continues without a rollback.
//!
//! In synchronous mode the pserver even goes on serving its generation until etcd says that the lease has ended: what
//! it sends is a function of the generation and the version, and none of it counts once another generation has begun.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Incarnation, Slot};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{GenerationRecord, PserverRecord};
use steadfast_coord::{CoordError, Deadline, Etcd, Op, Session, Unchanged, backoff};
use steadfast_host::time::sleep;
use steadfast_process::Failure;
use tokio::sync::watch;
use tracing::{info, warn};

/// A view of the slot lease, shared by all tasks of the process.
#[derive(Clone, Debug)]
pub struct SlotLease {
    lease: watch::Receiver<Option<Arc<Deadline>>>,
}

/// The writing side of [`SlotLease`].
#[derive(Debug)]
pub struct Holder {
    lease: watch::Sender<Option<Arc<Deadline>>>,
    mode: Mode,
}

impl SlotLease {
    /// Returns whether this process certainly still holds the slot.
    pub fn is_ours(&self) -> bool {
        self.lease.borrow().as_ref().is_some_and(|deadline| deadline.is_ahead())
    }
}

impl Holder {
    /// Creates a holder of a slot of a job in `mode`, whose lease is that of `session`.
    pub fn new(session: &Session, mode: Mode) -> Self {
        let holder = Self { lease: watch::Sender::new(None), mode };
        holder.resume(session);
        holder
    }

    /// Returns a view for the services of the slot.
    pub fn slot_lease(&self) -> SlotLease {
        SlotLease { lease: self.lease.subscribe() }
    }

    /// Marks the slot as possibly lost.
    pub fn suspend(&self) {
        self.lease.send_replace(None);
    }

    /// Marks the slot as held under `session`.
    pub fn resume(&self, session: &Session) {
        if self.mode == Mode::Sync {
            session.outlast_etcd();
        }
        self.lease.send_replace(Some(session.deadline()));
    }
}

/// A claim to the slot that a pserver held before.
#[derive(Debug)]
pub struct Claim<'a> {
    pub etcd: &'a Etcd,
    pub keys: &'a Keys,
    pub record: &'a PserverRecord,
    pub slot: Slot,
    /// The incarnation of the shard.
    pub incarnation: Incarnation,
    pub lease_ttl: Duration,
}

impl Claim<'_> {
    /// Reacquires the slot, retrying until etcd is available again.
    ///
    /// # Errors
    /// If the slot or the generation has changed meanwhile: the shard is obsolete then.
    pub async fn renew(&self) -> Result<Session, Failure> {
        let mut pauses = backoff();
        let mut session = Session::open_with_retry(self.etcd, self.lease_ttl).await?;
        loop {
            match self.attempt(&session).await {
                Ok(Some(())) => {
                    info!(slot = %self.slot, "slot reacquired with its shard");
                    return Ok(session);
                }
                // A key has changed since it was read; the next attempt reads it again.
                Ok(None) => {}
                Err(ClaimError::SlotLost(reason)) => {
                    let slot = self.slot;
                    let message = format!("slot {slot} is lost with its lease: {reason}");
                    session.close(self.etcd).await;
                    return Err(Failure::new(ErrorKind::Unavailable, message));
                }
                Err(ClaimError::Coord(error)) if error.is_transient() || !session.is_live() => {
                    warn!(%error, "slot not reacquired yet");
                }
                Err(ClaimError::Coord(error)) => return Err(error.into()),
            }
            sleep(pauses.next().unwrap_or(self.lease_ttl)).await;
            // Keeps a lease that is still live: the last attempt may have claimed the slot although its
            // reply was lost, and the next attempt shows it.
            if !session.is_live() {
                session = Session::open_with_retry(self.etcd, self.lease_ttl).await?;
            }
        }
    }

    /// Reads the keys, and claims the slot in one transaction unless they have changed since.
    async fn attempt(&self, session: &Session) -> Result<Option<()>, ClaimError> {
        let generation = self.etcd.get(&self.keys.generation()).await?;
        let known =
            generation.as_ref().map(|entry| entry.json::<GenerationRecord>()).transpose()?;
        // Of a slot that was taken over, the generation may still name the holder before.
        let is_ours = |named: &Incarnation| {
            *named == self.incarnation || Some(*named) == self.record.followed
        };
        let is_named =
            known.is_none_or(|record| record.slots.get(self.slot.0 as usize).is_some_and(is_ours));
        if !is_named {
            return Err(ClaimError::SlotLost("the job began a generation without this pserver"));
        }
        let key = self.keys.ps(self.slot);
        let holder = self.etcd.get(&key).await?;
        if let Some(entry) = &holder {
            let record: PserverRecord = entry.json()?;
            if record.id != self.record.id {
                return Err(ClaimError::SlotLost("another pserver claimed it"));
            }
            if entry.lease == session.lease() {
                return Ok(Some(()));
            }
        }
        // A key that outlived the local deadline keeps its create-revision.
        let first = holder.as_ref().map_or(0, |entry| entry.create_revision);
        let memory_of = (first != self.incarnation.0).then_some(self.incarnation);
        let record = PserverRecord { memory_of, ..self.record.clone() };
        let value = serde_json::to_vec(&record).expect("records are plain data");
        let unchanged = [
            Unchanged {
                key: key.clone(),
                mod_revision: holder.as_ref().map_or(0, |entry| entry.mod_revision),
            },
            Unchanged {
                key: self.keys.generation(),
                mod_revision: generation.as_ref().map_or(0, |entry| entry.mod_revision),
            },
        ];
        let put = Op::put_leased(&key, value, session.lease());
        Ok(self.etcd.put_if(&put, &unchanged).await?.map(|_| ()))
    }
}

enum ClaimError {
    /// The slot or the generation has changed: the shard is obsolete.
    SlotLost(&'static str),
    Coord(CoordError),
}

impl From<CoordError> for ClaimError {
    fn from(error: CoordError) -> Self {
        Self::Coord(error)
    }
}
