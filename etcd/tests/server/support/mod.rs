//! Shared by the tests: an embedded server, a real etcd, clients for both, and a random number generator.

pub mod embedded;
pub mod raw;
pub mod real;

use etcd_client::Client;
use std::net::SocketAddr;

/// Connects a client of the library `etcd-client`.
pub async fn client(address: SocketAddr) -> Client {
    Client::connect([address.to_string()], None).await.unwrap()
}

/// A small random number generator (splitmix64): the same seed always yields the same sequence.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns a number from an inclusive range.
    pub fn between(&mut self, first: i64, last: i64) -> i64 {
        first + i64::try_from(self.below(u64::try_from(last - first + 1).unwrap())).unwrap()
    }

    /// Returns true with probability 1/`n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[usize::try_from(self.below(items.len() as u64)).unwrap()]
    }
}
