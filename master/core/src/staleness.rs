//! The staleness gate (stale synchronous parallel, Ho et al. 2013): no active trainer
//! may be more pushes than the bound ahead of the slowest active trainer.
//!
//! A trainer is active while it holds a task. The queues decide this, not incoming requests: a delayed
//! request of a trainer without a task blocks no other trainer. Counting starts when a trainer
//! becomes active. The counts are kept in memory only: each request carries its trainer's count, so a new
//! master rebuilds them.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::TrainerId;

/// The staleness of the active trainers: their push counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Staleness {
    counts: BTreeMap<TrainerId, PushCount>,
    largest_lead: u64,
}

/// One trainer's push count. Trainers count from the start of their process. A trainer that joins late starts
/// at the count of the slowest one; otherwise the others would wait until it has caught up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PushCount {
    /// The count in the first request of the trainer; unknown before that request.
    first: Option<u64>,
    start: u64,
    current: u64,
}

/// Whether blocked trainers must be checked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Yes,
    No,
}

impl Staleness {
    /// Sets the active trainers, which are the trainers that hold a task. Returns whether one became inactive.
    pub fn set_active(&mut self, active: &BTreeSet<TrainerId>) -> Change {
        let before = self.counts.len();
        self.counts.retain(|trainer, _| active.contains(trainer));
        let change = if self.counts.len() < before { Change::Yes } else { Change::No };
        let start = self.counts.values().map(|pushes| pushes.current).min().unwrap_or(0);
        for trainer in active {
            self.counts.entry(*trainer).or_insert(PushCount { first: None, start, current: start });
        }
        change
    }

    /// Records that `trainer` has pushed `count` times by its own count, if it is active. Returns whether
    /// its count changed.
    pub fn advance(&mut self, trainer: TrainerId, count: u64) -> Change {
        let Some(pushes) = self.counts.get_mut(&trainer) else { return Change::No };
        let first = *pushes.first.get_or_insert(count);
        let before = pushes.current;
        pushes.current = pushes.current.max(pushes.start + count.saturating_sub(first));
        if pushes.current == before { Change::No } else { Change::Yes }
    }

    /// Returns how far `trainer` is ahead of the slowest active trainer.
    pub fn lead(&self, trainer: TrainerId) -> u64 {
        let Some(own) = self.counts.get(&trainer) else { return 0 };
        let slowest =
            self.counts.values().map(|pushes| pushes.current).min().unwrap_or(own.current);
        own.current - slowest
    }

    /// Returns whether `trainer` may proceed under `bound`, and records its lead if so.
    pub fn admit(&mut self, trainer: TrainerId, bound: u32) -> bool {
        let lead = self.lead(trainer);
        let is_admitted = lead <= u64::from(bound);
        if is_admitted {
            self.largest_lead = self.largest_lead.max(lead);
        }
        is_admitted
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

    fn active(trainers: &[TrainerId]) -> Staleness {
        let mut staleness = Staleness::default();
        staleness.set_active(&trainers.iter().copied().collect());
        staleness
    }

    /// I8: no trainer is admitted with a lead above the bound.
    #[test]
    fn a_fast_trainer_waits_for_the_slowest_and_not_for_an_inactive_one() {
        let (fast, slow) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut staleness = active(&[fast, slow]);
        staleness.advance(slow, 0);
        for count in 0..=2 {
            staleness.advance(fast, count);
            assert!(staleness.admit(fast, 2));
        }
        staleness.advance(fast, 3);
        assert!(!staleness.admit(fast, 2));
        assert!(staleness.admit(slow, 2));
        staleness.set_active(&BTreeSet::from([fast]));
        assert!(staleness.admit(fast, 2));
        // A request that it sent before it became inactive may arrive later.
        staleness.advance(slow, 0);
        assert!(staleness.admit(fast, 2));
        assert_eq!(staleness.largest_lead(), 2);
    }

    #[test]
    fn a_bound_of_zero_is_lock_step() {
        let (a, b) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut staleness = active(&[a, b]);
        staleness.advance(a, 0);
        staleness.advance(b, 0);
        staleness.advance(a, 1);
        assert!(!staleness.admit(a, 0));
        staleness.advance(b, 1);
        assert!(staleness.admit(a, 0) && staleness.admit(b, 0));
    }

    /// A late joiner starts at the count of the slowest trainer, whatever its own count is.
    #[test]
    fn a_late_joiner_does_not_delay_the_others() {
        let (old, young) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut staleness = active(&[old]);
        staleness.advance(old, 0);
        staleness.advance(old, 1000);
        staleness.set_active(&BTreeSet::from([old, young]));
        assert!(staleness.admit(old, 0));
        staleness.advance(young, 5);
        staleness.advance(old, 1001);
        assert!(!staleness.admit(old, 0));
        staleness.advance(young, 6);
        assert!(staleness.admit(old, 0));
    }

    /// A repeated request of a blocked trainer wakes no other one. Otherwise two blocked
    /// trainers would wake each other for ever.
    #[test]
    fn a_repeated_request_is_not_a_change() {
        let (a, b) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let mut staleness = active(&[a, b]);
        staleness.advance(b, 0);
        staleness.advance(a, 0);
        assert_eq!(staleness.advance(a, 1), Change::Yes);
        assert_eq!(staleness.advance(a, 1), Change::No);
    }
}
