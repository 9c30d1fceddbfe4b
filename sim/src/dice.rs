//! Chance that a seed decides.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A generator of its own seed.
#[derive(Clone, Debug)]
pub struct Dice(ChaCha8Rng);

impl Dice {
    /// The same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        // The bias is far below anything that a simulation could notice.
        self.bits() % limit
    }

    /// A number from `from` to `to`, both included.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// From 0 to 1.
    pub fn share(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Whether something of this probability happens.
    pub fn happens(&mut self, probability: f64) -> bool {
        0.0 < probability && self.share() < probability
    }

    /// A time between two, the shorter ones much more often: evenly by their logarithm.
    pub fn time(&mut self, shortest: Duration, longest: Duration) -> Duration {
        let (shortest, longest) = (shortest.as_secs_f64().max(1e-6), longest.as_secs_f64());
        let ratio = (longest / shortest).max(1.0);
        Duration::from_secs_f64(shortest * ratio.powf(self.share()))
    }

    /// One of these, which are not none.
    pub fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len() as u64) as usize]
    }
}
