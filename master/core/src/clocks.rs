//! The staleness gate (stale synchronous parallel, Ho et al. 2013): a trainer's clock counts its pushes,
//! and no active trainer may be more than the bound ahead of the slowest active trainer.
//!
//! A trainer is active while it holds a task. The queues decide this, not incoming requests: a delayed
//! request of a trainer without a task blocks no other trainer. Clocks start when a trainer becomes
//! active. They are kept in memory only: each request carries its trainer's clock, so a new master
//! rebuilds them.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::TrainerId;

/// Clocks of the active trainers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clocks {
    of: BTreeMap<TrainerId, Clock>,
    largest_lead: u64,
}

/// One trainer's clock. Trainers count from the start of their process. A trainer that joins late starts
/// at the clock of the slowest one; otherwise the others would wait until it has caught up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Clock {
    /// The count in the first request of the trainer; unknown before that request.
    from: Option<u64>,
    start: u64,
    now: u64,
}

/// Whether blocked trainers must be checked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    Yes,
    No,
}

impl Clocks {
    /// Sets the active trainers, which are those that hold a task. Returns whether one became inactive.
    pub fn follow(&mut self, at_work: &BTreeSet<TrainerId>) -> Moved {
        let before = self.of.len();
        self.of.retain(|trainer, _| at_work.contains(trainer));
        let moved = if self.of.len() < before { Moved::Yes } else { Moved::No };
        let start = self.of.values().map(|clock| clock.now).min().unwrap_or(0);
        for trainer in at_work {
            self.of.entry(*trainer).or_insert(Clock { from: None, start, now: start });
        }
        moved
    }

    /// Records that `trainer` has pushed `count` times by its own count, if it is active. Returns whether
    /// its clock changed.
    pub fn advance(&mut self, trainer: TrainerId, count: u64) -> Moved {
        let Some(clock) = self.of.get_mut(&trainer) else { return Moved::No };
        let from = *clock.from.get_or_insert(count);
        let before = clock.now;
        clock.now = clock.now.max(clock.start + count.saturating_sub(from));
        if clock.now == before { Moved::No } else { Moved::Yes }
    }

    /// Returns how far `trainer` is ahead of the slowest active trainer.
    pub fn lead(&self, trainer: TrainerId) -> u64 {
        let Some(own) = self.of.get(&trainer) else { return 0 };
        let slowest = self.of.values().map(|clock| clock.now).min().unwrap_or(own.now);
        own.now - slowest
    }

    /// Returns whether `trainer` may proceed under `bound`.
    pub fn may_go(&mut self, trainer: TrainerId, bound: u32) -> bool {
        let lead = self.lead(trainer);
        let may = lead <= u64::from(bound);
        if may {
            self.largest_lead = self.largest_lead.max(lead);
        }
        may
    }

    /// Returns the largest lead that was ever admitted.
    pub fn largest_lead(&self) -> u64 {
        self.largest_lead
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn at_work(trainers: &[TrainerId]) -> Clocks {
        let mut clocks = Clocks::default();
        clocks.follow(&trainers.iter().copied().collect());
        clocks
    }

    /// I8: no trainer is admitted with a lead above the bound.
    #[test]
    fn a_fast_trainer_waits_for_the_slowest_and_not_for_one_that_is_gone() {
        let (fast, slow) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut clocks = at_work(&[fast, slow]);
        clocks.advance(slow, 0);
        for clock in 0..=2 {
            clocks.advance(fast, clock);
            assert!(clocks.may_go(fast, 2));
        }
        clocks.advance(fast, 3);
        assert!(!clocks.may_go(fast, 2));
        assert!(clocks.may_go(slow, 2));
        clocks.follow(&BTreeSet::from([fast]));
        assert!(clocks.may_go(fast, 2));
        // A request that it sent before it became inactive may arrive later.
        clocks.advance(slow, 0);
        assert!(clocks.may_go(fast, 2));
        assert_eq!(clocks.largest_lead(), 2);
    }

    #[test]
    fn a_bound_of_zero_is_lock_step() {
        let (a, b) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut clocks = at_work(&[a, b]);
        clocks.advance(a, 0);
        clocks.advance(b, 0);
        clocks.advance(a, 1);
        assert!(!clocks.may_go(a, 0));
        clocks.advance(b, 1);
        assert!(clocks.may_go(a, 0) && clocks.may_go(b, 0));
    }

    /// A late joiner starts at the clock of the slowest trainer, whatever its own count is.
    #[test]
    fn a_late_joiner_does_not_hold_the_others_up() {
        let (old, young) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut clocks = at_work(&[old]);
        clocks.advance(old, 0);
        clocks.advance(old, 1000);
        clocks.follow(&BTreeSet::from([old, young]));
        assert!(clocks.may_go(old, 0));
        clocks.advance(young, 5);
        clocks.advance(old, 1001);
        assert!(!clocks.may_go(old, 0));
        clocks.advance(young, 6);
        assert!(clocks.may_go(old, 0));
    }

    /// A blocked trainer that asks again with the same count wakes no other one. Otherwise two blocked
    /// trainers would wake each other for ever.
    #[test]
    fn asking_again_is_no_news() {
        let (a, b) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut clocks = at_work(&[a, b]);
        clocks.advance(b, 0);
        clocks.advance(a, 0);
        assert_eq!(clocks.advance(a, 1), Moved::Yes);
        assert_eq!(clocks.advance(a, 1), Moved::No);
    }
}
