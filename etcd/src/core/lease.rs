//! Leases: their deadlines and the keys attached to them.

use super::fact::{Key, LeaseId, Millis};
use super::refusal::Refusal;
use std::collections::{BTreeMap, BTreeSet};

/// Real etcd raises shorter TTLs to this, because of its election timeout.
pub const TTL_MIN_S: i64 = 2;
/// Real etcd's limit, about 285 years.
const TTL_MAX_S: i64 = 9_000_000_000;

/// Deadlines are not durable: a restart gives every lease its full TTL again, so that no process loses
/// its lease because the server was down.
#[derive(Debug, Default, PartialEq)]
pub struct Leases {
    leases: BTreeMap<LeaseId, Lease>,
    deadlines: BTreeSet<(Millis, LeaseId)>,
    /// The lease of each attached key.
    bound: BTreeMap<Key, LeaseId>,
}

#[derive(Debug, PartialEq)]
struct Lease {
    ttl_s: i64,
    deadline: Millis,
    keys: BTreeSet<Key>,
}

/// The reply to a time-to-live request.
#[derive(Debug, PartialEq)]
pub struct LeaseStatus {
    pub ttl_s: i64,
    pub remaining_s: i64,
}

/// Returns the TTL that is granted to a request for `ttl_s`.
pub fn granted_ttl_s(ttl_s: i64) -> Result<i64, Refusal> {
    if ttl_s > TTL_MAX_S { Err(Refusal::LeaseTtlTooLarge) } else { Ok(ttl_s.max(TTL_MIN_S)) }
}

impl Leases {
    pub fn contains(&self, id: LeaseId) -> bool {
        self.leases.contains_key(&id)
    }

    pub fn insert(&mut self, id: LeaseId, ttl_s: i64, now: Millis) {
        self.remove(id);
        let deadline = deadline(ttl_s, now);
        self.deadlines.insert((deadline, id));
        self.leases.insert(id, Lease { ttl_s, deadline, keys: BTreeSet::new() });
    }

    pub fn remove(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.remove(&id) else { return };
        self.deadlines.remove(&(lease.deadline, id));
        for key in lease.keys {
            self.bound.remove(&key);
        }
    }

    /// Renews a lease and returns its TTL. An expired lease cannot be renewed, even before it is
    /// removed.
    pub fn keep_alive(&mut self, id: LeaseId, now: Millis) -> Option<i64> {
        let lease = self.leases.get_mut(&id).filter(|lease| lease.deadline > now)?;
        self.deadlines.remove(&(lease.deadline, id));
        lease.deadline = deadline(lease.ttl_s, now);
        self.deadlines.insert((lease.deadline, id));
        Some(lease.ttl_s)
    }

    /// Attaches a key to a lease, or to none (zero), and detaches it from its previous lease.
    pub fn bind(&mut self, key: &[u8], id: LeaseId) {
        if let Some(old) = self.bound.remove(key)
            && let Some(lease) = self.leases.get_mut(&old)
        {
            lease.keys.remove(key);
        }
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.keys.insert(key.to_vec());
            self.bound.insert(key.to_vec(), id);
        }
    }

    /// Returns the expired leases, earliest deadline first.
    pub fn expired(&self, now: Millis) -> Vec<LeaseId> {
        self.deadlines.iter().take_while(|(at, _)| *at <= now).map(|(_, id)| *id).collect()
    }

    /// Returns the keys attached to a lease, in order.
    pub fn keys(&self, id: LeaseId) -> impl Iterator<Item = &Key> {
        self.leases.get(&id).into_iter().flat_map(|lease| &lease.keys)
    }

    pub fn status(&self, id: LeaseId, now: Millis) -> Option<LeaseStatus> {
        let lease = self.leases.get(&id)?;
        let remaining_ms = lease.deadline.saturating_sub(now);
        let remaining_s = i64::try_from(remaining_ms / 1_000).unwrap_or(i64::MAX);
        Some(LeaseStatus { ttl_s: lease.ttl_s, remaining_s })
    }

    /// Returns every lease with its TTL in seconds.
    pub fn iter(&self) -> impl Iterator<Item = (LeaseId, i64)> {
        self.leases.iter().map(|(id, lease)| (*id, lease.ttl_s))
    }
}

fn deadline(ttl_s: i64, now: Millis) -> Millis {
    let ttl_s = u64::try_from(ttl_s).unwrap_or(0);
    now.saturating_add(ttl_s.saturating_mul(1_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A keep-alive extends the deadline; a missed deadline is final.
    #[test]
    fn a_lease_expires_its_ttl_after_the_last_keep_alive() {
        let mut leases = Leases::default();
        leases.insert(7, 2, 0);
        assert_eq!(leases.keep_alive(7, 1_500), Some(2));
        assert_eq!(leases.expired(3_499), Vec::<LeaseId>::new());
        assert_eq!(leases.expired(3_500), vec![7]);
        assert_eq!(leases.keep_alive(7, 3_500), None, "too late");
    }

    /// A key is attached to at most one lease.
    #[test]
    fn a_key_moves_from_lease_to_lease() {
        let mut leases = Leases::default();
        leases.insert(1, 10, 0);
        leases.insert(2, 10, 0);
        leases.bind(b"k", 1);
        leases.bind(b"k", 2);
        assert_eq!(leases.keys(1).count(), 0);
        assert_eq!(leases.keys(2).collect::<Vec<_>>(), [b"k"]);
        leases.bind(b"k", 0);
        assert_eq!(leases.keys(2).count(), 0);
    }

    /// Values from the wire do not overflow.
    #[test]
    fn out_of_range_ttls_are_rejected_or_raised() {
        assert_eq!(granted_ttl_s(i64::MAX), Err(Refusal::LeaseTtlTooLarge));
        assert_eq!(granted_ttl_s(i64::MIN), Ok(TTL_MIN_S));
        let mut leases = Leases::default();
        leases.insert(1, i64::MAX, u64::MAX);
        assert_eq!(leases.expired(u64::MAX - 1), Vec::<LeaseId>::new());
    }
}
