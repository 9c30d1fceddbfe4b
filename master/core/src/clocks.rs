//! The gate of bounded staleness (SSP, Ho et al. 2013): a trainer's clock counts its pushes, and
//! none may be more than the bound ahead of the slowest that is at work.
//!
//! Clocks count from when a trainer begins to work; one that holds no task holds nobody up. They
//! live in memory: each request carries its trainer's clock, so a new master learns them again.

use std::collections::BTreeMap;

use steadfast_common::ids::TrainerId;

/// Clocks of the trainers at work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clocks {
    of: BTreeMap<TrainerId, u64>,
    largest_lead: u64,
}

impl Clocks {
    /// Notes that `trainer` has pushed `clock` times.
    pub fn advance(&mut self, trainer: TrainerId, clock: u64) {
        let known = self.of.entry(trainer).or_insert(clock);
        *known = clock.max(*known);
    }

    /// Forgets a trainer that idles or is gone.
    pub fn remove(&mut self, trainer: TrainerId) {
        self.of.remove(&trainer);
    }

    /// How far `trainer` is ahead of the slowest.
    pub fn lead(&self, trainer: TrainerId) -> u64 {
        let own = self.of.get(&trainer).copied().unwrap_or(0);
        own - self.of.values().copied().min().unwrap_or(own).min(own)
    }

    /// Whether `trainer` may go on under `bound`.
    pub fn may_go(&mut self, trainer: TrainerId, bound: u32) -> bool {
        let lead = self.lead(trainer);
        let may = lead <= u64::from(bound);
        if may {
            self.largest_lead = self.largest_lead.max(lead);
        }
        may
    }

    /// The largest lead that was ever let through.
    pub fn largest_lead(&self) -> u64 {
        self.largest_lead
    }

    /// The clock at which a trainer that begins to work starts: that of the slowest.
    pub fn start(&self) -> u64 {
        self.of.values().copied().min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    /// I8: nobody is let through with a lead above the bound.
    #[test]
    fn a_fast_trainer_waits_for_the_slowest_and_not_for_one_that_is_gone() {
        let (fast, slow) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut clocks = Clocks::default();
        clocks.advance(slow, 0);
        for clock in 0..=2 {
            clocks.advance(fast, clock);
            assert!(clocks.may_go(fast, 2));
        }
        clocks.advance(fast, 3);
        assert!(!clocks.may_go(fast, 2));
        assert!(clocks.may_go(slow, 2));
        clocks.remove(slow);
        assert!(clocks.may_go(fast, 2));
        assert_eq!(clocks.largest_lead(), 2);
    }

    #[test]
    fn a_bound_of_zero_is_lock_step() {
        let (a, b) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut clocks = Clocks::default();
        clocks.advance(a, 1);
        clocks.advance(b, 0);
        assert!(!clocks.may_go(a, 0));
        clocks.advance(b, 1);
        assert!(clocks.may_go(a, 0) && clocks.may_go(b, 0));
    }
}
