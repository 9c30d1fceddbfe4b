//! The pure core of the store: revisions, transactions, leases, watches. It uses no clock and no files,
//! and never waits.
//!
//! A request is processed in two steps. A `&self` method reads the store and returns the reply with its
//! [`Fact`], or a [`Refusal`]; then [`Core::evolve`] applies the fact. The log holds the same facts, so a
//! restart folds the same facts as the running store.

mod compare;
mod fact;
mod history;
mod lease;
mod overlap;
mod range;
mod refusal;
mod reply;
mod span;
mod staged;
mod txn;
mod validate;
mod watch;
mod write;

#[cfg(test)]
mod tests;

pub use fact::{Change, Fact, LeaseId, Millis, Revision, Write};
pub use history::{History, HistoryImage, Retention};
pub use refusal::Refusal;
pub use reply::{MEMBER_ID, RAFT_TERM, header};
pub use span::Span;
pub use txn::is_read_only;
pub use validate::{Checked, Validate};
pub use watch::{WatchOptions, WatchUpdate, Watcher, size as event_bytes};

use etcd_client::proto::{
    PbCompactionResponse, PbDeleteRequest, PbDeleteResponse, PbLeaseGrantRequest,
    PbLeaseGrantResponse, PbLeaseKeepAliveResponse, PbLeaseLeasesResponse, PbLeaseRevokeResponse,
    PbLeaseStatus, PbLeaseTimeToLiveRequest, PbLeaseTimeToLiveResponse, PbPutRequest,
    PbPutResponse, PbRangeRequest, PbRangeResponse, PbTxnRequest, PbTxnResponse,
};
use lease::Leases;
use staged::Staged;

/// The whole store in memory.
#[derive(Debug, Default)]
pub struct Core {
    history: History,
    leases: Leases,
}

/// The reply to a request, and the fact that must be durable before the reply is sent.
#[derive(Debug)]
pub struct Decided<T> {
    pub reply: T,
    pub fact: Option<Fact>,
}

/// Everything that a [`Core`] is rebuilt from.
#[derive(Debug, PartialEq)]
pub struct Image {
    pub history: HistoryImage,
    /// Every lease with its TTL in seconds.
    pub leases: Vec<(LeaseId, i64)>,
}

impl Core {
    pub fn history(&self) -> &History {
        &self.history
    }

    pub fn revision(&self) -> Revision {
        self.history.revision()
    }

    pub fn range(&self, request: &Checked<PbRangeRequest>) -> Result<PbRangeResponse, Refusal> {
        range::check_revision(request, self.revision(), self.history.compacted())?;
        let mut reply = range::read(&Staged::new(&self.history), request);
        reply.header = Some(header(self.revision()));
        Ok(reply)
    }

    pub fn put(&self, request: &Checked<PbPutRequest>) -> Result<Decided<PbPutResponse>, Refusal> {
        self.check_lease(request.lease)?;
        let mut staged = Staged::new(&self.history);
        let mut reply = write::put(&mut staged, request)?;
        reply.header = Some(header(staged.revision()));
        Ok(Decided { reply, fact: staged.finish().map(Fact::Written) })
    }

    pub fn delete(
        &self,
        request: &Checked<PbDeleteRequest>,
    ) -> Result<Decided<PbDeleteResponse>, Refusal> {
        let mut staged = Staged::new(&self.history);
        let mut reply = write::delete(&mut staged, request);
        reply.header = Some(header(staged.revision()));
        Ok(Decided { reply, fact: staged.finish().map(Fact::Written) })
    }

    pub fn txn(&self, request: &Checked<PbTxnRequest>) -> Result<Decided<PbTxnResponse>, Refusal> {
        let plan = txn::plan(&self.history, request);
        for put in plan.puts() {
            if write::needs_previous(put) && self.history.get(&put.key, Revision::MAX).is_none() {
                return Err(Refusal::KeyNotFound);
            }
            self.check_lease(put.lease)?;
        }
        for read in plan.ranges() {
            range::check_revision_in_txn(read, self.revision(), self.history.compacted())?;
        }
        let mut staged = Staged::new(&self.history);
        let mut reply = plan.run(&mut staged)?;
        reply.header = Some(header(staged.revision()));
        Ok(Decided { reply, fact: staged.finish().map(Fact::Written) })
    }

    pub fn compact(&self, to: Revision) -> Result<Decided<PbCompactionResponse>, Refusal> {
        if to <= self.history.compacted() {
            return Err(Refusal::Compacted);
        }
        if to > self.revision() {
            return Err(Refusal::FutureRevision);
        }
        let reply = PbCompactionResponse { header: Some(header(self.revision())) };
        Ok(Decided { reply, fact: Some(Fact::Compacted { revision: to }) })
    }

    /// Returns the compaction that keeps the history within its limits, if one is due.
    pub fn overdue_compaction(&self, retention: Retention) -> Option<Fact> {
        self.history.overdue(retention).map(|revision| Fact::Compacted { revision })
    }

    /// Grants a lease; a request without an id gets `fresh_id`.
    pub fn grant(
        &self,
        request: &PbLeaseGrantRequest,
        fresh_id: LeaseId,
    ) -> Result<Decided<PbLeaseGrantResponse>, Refusal> {
        let ttl = lease::granted_ttl_s(request.ttl)?;
        let id = if request.id == 0 { fresh_id } else { request.id };
        if self.leases.contains(id) {
            return Err(Refusal::LeaseExists);
        }
        let header = Some(header(self.revision()));
        let reply = PbLeaseGrantResponse { header, id, ttl, error: String::new() };
        Ok(Decided { reply, fact: Some(Fact::LeaseGranted { id, ttl_s: ttl }) })
    }

    /// Revokes a lease and deletes its keys, at one revision.
    pub fn revoke(&self, id: LeaseId) -> Result<Decided<PbLeaseRevokeResponse>, Refusal> {
        self.check_lease(id)?;
        if id == 0 {
            return Err(Refusal::LeaseNotFound);
        }
        let mut staged = Staged::new(&self.history);
        for key in self.leases.keys(id) {
            staged.change(Change::Delete(key.clone()));
        }
        let reply = PbLeaseRevokeResponse { header: Some(header(staged.revision())) };
        Ok(Decided { reply, fact: Some(Fact::LeaseEnded { id, write: staged.finish() }) })
    }

    /// Renews a lease. This is not durable, because a restart renews all leases.
    pub fn keep_alive(&mut self, id: LeaseId, now: Millis) -> PbLeaseKeepAliveResponse {
        let ttl = self.leases.keep_alive(id, now).unwrap_or(0);
        PbLeaseKeepAliveResponse { header: Some(header(self.revision())), id, ttl }
    }

    pub fn time_to_live(
        &self,
        request: &PbLeaseTimeToLiveRequest,
        now: Millis,
    ) -> PbLeaseTimeToLiveResponse {
        let status = self.leases.status(request.id, now);
        let keys = self.leases.keys(request.id).filter(|_| request.keys).cloned().collect();
        PbLeaseTimeToLiveResponse {
            header: Some(header(self.revision())),
            id: request.id,
            ttl: status.as_ref().map_or(-1, |status| status.remaining_s),
            granted_ttl: status.as_ref().map_or(0, |status| status.ttl_s),
            keys,
        }
    }

    pub fn leases(&self) -> PbLeaseLeasesResponse {
        let leases = self.leases.iter().map(|(id, _)| PbLeaseStatus { id }).collect();
        PbLeaseLeasesResponse { header: Some(header(self.revision())), leases }
    }

    pub fn expired_leases(&self, now: Millis) -> Vec<LeaseId> {
        self.leases.expired(now)
    }

    pub fn evolve(&mut self, fact: Fact, now: Millis) {
        match fact {
            Fact::Written(write) => self.record(write),
            Fact::LeaseGranted { id, ttl_s } => self.leases.insert(id, ttl_s, now),
            Fact::LeaseEnded { id, write } => {
                write.into_iter().for_each(|write| self.record(write));
                self.leases.remove(id);
            }
            Fact::Compacted { revision } => self.history.compact(revision),
        }
    }

    /// Returns whether a fact can be the next one, as every fact in a valid log is.
    pub fn is_next(&self, fact: &Fact) -> bool {
        let in_order = fact.write().is_none_or(|w| w.revision == self.revision() + 1);
        let compactable = match fact {
            Fact::Compacted { revision } => {
                *revision > self.history.compacted() && *revision <= self.revision()
            }
            Fact::Written(_) | Fact::LeaseGranted { .. } | Fact::LeaseEnded { .. } => true,
        };
        in_order && compactable
    }

    pub fn image(&self) -> Image {
        Image { history: self.history.image(), leases: self.leases.iter().collect() }
    }

    /// Rebuilds a store; every lease has its full TTL again.
    pub fn restore(image: Image, now: Millis) -> Self {
        let history = History::restore(image.history);
        let mut leases = Leases::default();
        for (id, ttl_s) in image.leases {
            leases.insert(id, ttl_s, now);
        }
        let everything = span::Span::From(&[]);
        for kv in history.scan(everything, Revision::MAX) {
            leases.bind(&kv.key, kv.lease);
        }
        Core { history, leases }
    }

    fn record(&mut self, write: Write) {
        for change in &write.changes {
            self.leases.bind(change.key(), change.kv().map_or(0, |kv| kv.lease));
        }
        self.history.record(write);
    }

    fn check_lease(&self, id: LeaseId) -> Result<(), Refusal> {
        if id == 0 || self.leases.contains(id) { Ok(()) } else { Err(Refusal::LeaseNotFound) }
    }
}
