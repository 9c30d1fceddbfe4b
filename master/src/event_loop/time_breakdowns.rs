//! Time breakdowns as reported by the trainers; for display only.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::TrainerId;
use steadfast_common::status::TimeBreakdown;

/// Time breakdowns of all trainers seen in this term.
#[derive(Debug, Default)]
pub(crate) struct TimeBreakdowns {
    live: BTreeMap<TrainerId, TimeBreakdown>,
    /// Sum over lost trainers.
    lost: TimeBreakdown,
}

impl TimeBreakdowns {
    /// Records a live trainer's time breakdown since its start.
    pub fn note(&mut self, trainer: TrainerId, time_breakdown: TimeBreakdown) {
        self.live.insert(trainer, time_breakdown);
    }

    /// Moves trainers that are not in `live` to the sum of lost trainers.
    pub fn follow(&mut self, live: &BTreeSet<TrainerId>) {
        let lost = &mut self.lost;
        self.live.retain(|trainer, time_breakdown| {
            let is_live = live.contains(trainer);
            if !is_live {
                *lost += *time_breakdown;
            }
            is_live
        });
    }

    /// Returns the time breakdown of one live trainer; all zero if it has not reported any.
    pub fn of(&self, trainer: TrainerId) -> TimeBreakdown {
        self.live.get(&trainer).copied().unwrap_or_default()
    }

    /// Returns the sum over all trainers.
    pub fn total(&self) -> TimeBreakdown {
        let mut total = self.lost;
        self.live.values().for_each(|time_breakdown| total += *time_breakdown);
        total
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_lost_trainer_counts_once() {
        let (first, second) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let compute = |compute| TimeBreakdown { compute, ..TimeBreakdown::default() };
        let mut time_breakdowns = TimeBreakdowns::default();
        time_breakdowns.note(first, compute(1.0));
        time_breakdowns.note(first, compute(2.0));
        time_breakdowns.note(second, compute(3.0));
        assert_eq!(time_breakdowns.total(), compute(5.0));
        for _ in 0..2 {
            time_breakdowns.follow(&BTreeSet::from([second]));
            assert_eq!(time_breakdowns.total(), compute(5.0));
        }
        assert_eq!(
            (time_breakdowns.of(first), time_breakdowns.of(second)),
            (compute(0.0), compute(3.0))
        );
    }
}
