//! The seeded random number generator.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng};

/// A random number generator with its own seed.
#[derive(Clone, Debug)]
pub struct Rng(ChaCha8Rng);

impl Rng {
    /// Creates a generator; the same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        // The modulo bias is negligible for a simulation.
        self.bits() % limit
    }

    /// Returns a number from `from` to `to`, both included.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// Returns a number between 0 and 1.
    pub fn share(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns true with this probability.
    pub fn happens(&mut self, probability: f64) -> bool {
        0.0 < probability && self.share() < probability
    }

    /// Returns a duration between the two limits, drawn log-uniformly.
    pub fn time(&mut self, shortest: Duration, longest: Duration) -> Duration {
        let (shortest, longest) = (shortest.as_secs_f64().max(1e-6), longest.as_secs_f64());
        let ratio = (longest / shortest).max(1.0);
        Duration::from_secs_f64(shortest * ratio.powf(self.share()))
    }

    /// Returns one of the elements of `all`, which must not be empty.
    pub fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len() as u64) as usize]
    }
}
