//! Limits the open connections of each address, so that one machine cannot use up a port's limit.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use steadfast_auth::{Refusal, refused};

/// Open connections by address.
#[derive(Clone, Debug)]
pub struct Peers {
    most: usize,
    /// Only addresses with open connections have an entry.
    open: Arc<Mutex<BTreeMap<IpAddr, usize>>>,
}

/// Counts a connection of an address until it is dropped.
#[derive(Debug)]
pub struct Admitted {
    address: IpAddr,
    peers: Peers,
}

impl Peers {
    /// Allows `most` open connections for each address.
    pub fn new(most: usize) -> Self {
        Self { most, open: Arc::default() }
    }

    /// Counts one more connection from `source`; returns `None` and records a refusal at the limit.
    pub fn admit(&self, source: SocketAddr) -> Option<Admitted> {
        let address = source.ip();
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.get(&address).copied().unwrap_or(0);
        if self.most <= count {
            let reason = "too many connections from this address".to_owned();
            refused(&Refusal::Connection { address: source, reason });
            return None;
        }
        open.insert(address, count + 1);
        Some(Admitted { address, peers: self.clone() })
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut open = self.peers.open.lock().unwrap_or_else(PoisonError::into_inner);
        match open.get_mut(&self.address) {
            Some(count) if 1 < *count => *count -= 1,
            _ => drop(open.remove(&self.address)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_has_more_than_a_share_and_what_is_closed_does_not_count() {
        let peers = Peers::new(2);
        let [one, another] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(|ip| SocketAddr::from((ip, 7000)));
        let first = peers.admit(one).unwrap();
        let second = peers.admit(one).unwrap();
        assert!(peers.admit(one).is_none());
        assert!(peers.admit(another).is_some());
        drop(first);
        let third = peers.admit(one).unwrap();
        assert!(peers.admit(one).is_none());
        drop((second, third));
        assert!(peers.open.lock().unwrap().is_empty());
    }
}
