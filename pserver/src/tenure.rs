//! Whether the slot is ours, and how it is taken again with the memory that we have after etcd was
//! away for longer than our lease.
//!
//! A memory keeps its incarnation (the create-revision under which it first held the slot) through
//! any number of leases. So when nobody else held the slot meanwhile and no other generation began,
//! everybody goes on as if nothing had happened.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Incarnation, Slot};
use steadfast_common::keys::Keys;
use steadfast_common::records::{GenerationRecord, PserverRecord};
use steadfast_coord::{Condition, CoordError, Deadline, Etcd, Op, Session, pauses};
use steadfast_host::time::sleep;
use steadfast_process::Failure;
use tokio::sync::watch;
use tracing::{info, warn};

/// Whether the slot is ours, as everybody in the process sees it.
#[derive(Clone, Debug)]
pub struct Tenure {
    lease: watch::Receiver<Option<Arc<Deadline>>>,
}

/// Tells the process whether the slot is ours.
#[derive(Debug)]
pub struct Holder {
    lease: watch::Sender<Option<Arc<Deadline>>>,
}

impl Tenure {
    /// Whether the slot is ours beyond doubt.
    pub fn is_ours(&self) -> bool {
        self.lease.borrow().as_ref().is_some_and(|deadline| deadline.is_ahead())
    }
}

impl Holder {
    /// The slot is ours under `session`.
    pub fn new(session: &Session) -> Self {
        Self { lease: watch::Sender::new(Some(session.deadline())) }
    }

    /// For those who answer on behalf of the slot.
    pub fn tenure(&self) -> Tenure {
        Tenure { lease: self.lease.subscribe() }
    }

    /// The slot may be another's.
    pub fn suspend(&self) {
        self.lease.send_replace(None);
    }

    /// The slot is ours again.
    pub fn resume(&self, session: &Session) {
        self.lease.send_replace(Some(session.deadline()));
    }
}

/// A pserver that had a slot.
#[derive(Debug)]
pub struct Claim<'a> {
    pub etcd: &'a Etcd,
    pub keys: &'a Keys,
    pub record: &'a PserverRecord,
    pub slot: Slot,
    /// Of our memory.
    pub incarnation: Incarnation,
    pub lease_ttl: Duration,
}

impl Claim<'_> {
    /// Takes the slot again, for as long as it takes etcd to come back.
    ///
    /// # Errors
    /// If the slot or the generation has gone on without us: our memory is of no use then.
    pub async fn renew(&self) -> Result<Session, Failure> {
        let mut pauses = pauses();
        let mut session = Session::open_patiently(self.etcd, self.lease_ttl).await?;
        loop {
            match self.attempt(&session).await {
                Ok(Some(())) => {
                    info!(slot = %self.slot, "slot taken again with its memory");
                    return Ok(session);
                }
                // Somebody was faster than we; the next look shows who.
                Ok(None) => {}
                Err(Refusal::Gone(reason)) => {
                    let slot = self.slot;
                    let message = format!("slot {slot} was lost with its lease: {reason}");
                    session.close(self.etcd).await;
                    return Err(Failure::new(ErrorKind::Unavailable, message));
                }
                Err(Refusal::Coord(error)) if error.is_transient() || !session.is_live() => {
                    warn!(%error, "slot not taken again yet");
                }
                Err(Refusal::Coord(error)) => return Err(error.into()),
            }
            sleep(pauses.next().unwrap_or(self.lease_ttl)).await;
            // The lease stays the same as long as it lives: the last attempt may have taken the slot
            // although its answer was lost, and the next look shows it.
            if !session.is_live() {
                session = Session::open_patiently(self.etcd, self.lease_ttl).await?;
            }
        }
    }

    /// Looks, and takes the slot in one transaction if nothing has changed since the look.
    async fn attempt(&self, session: &Session) -> Result<Option<()>, Refusal> {
        let generation = self.etcd.get(&self.keys.generation()).await?;
        let known =
            generation.as_ref().map(|entry| entry.json::<GenerationRecord>()).transpose()?;
        let is_named = known
            .is_none_or(|record| record.slots.get(self.slot.0 as usize) == Some(&self.incarnation));
        if !is_named {
            return Err(Refusal::Gone("the job began a generation without it"));
        }
        let key = self.keys.ps(self.slot);
        let holder = self.etcd.get(&key).await?;
        if let Some(entry) = &holder {
            let record: PserverRecord = entry.json()?;
            if record.id != self.record.id {
                return Err(Refusal::Gone("another pserver took it"));
            }
            if entry.lease == session.lease() {
                return Ok(Some(()));
            }
        }
        // A key that outlived our own deadline keeps its create-revision.
        let first = holder.as_ref().map_or(0, |entry| entry.create_revision);
        let memory_of = (first != self.incarnation.0).then_some(self.incarnation);
        let record = PserverRecord { memory_of, ..self.record.clone() };
        let value = serde_json::to_vec(&record).expect("records are plain data");
        let unchanged = [
            Condition::ModRevision {
                key: key.clone(),
                revision: holder.as_ref().map_or(0, |entry| entry.mod_revision),
            },
            Condition::ModRevision {
                key: self.keys.generation(),
                revision: generation.as_ref().map_or(0, |entry| entry.mod_revision),
            },
        ];
        let put = Op::put_leased(&key, value, session.lease());
        Ok(self.etcd.put_if(&put, &unchanged).await?.map(|_| ()))
    }
}

enum Refusal {
    Gone(&'static str),
    Coord(CoordError),
}

impl From<CoordError> for Refusal {
    fn from(error: CoordError) -> Self {
        Self::Coord(error)
    }
}
