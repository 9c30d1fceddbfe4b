//! What trainers spent their time on, as they tell; nothing depends on it.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::TrainerId;
use steadfast_common::status::Spent;

/// Sums of all trainers that were seen.
#[derive(Debug, Default)]
pub(crate) struct Spendings {
    live: BTreeMap<TrainerId, Spent>,
    gone: Spent,
}

impl Spendings {
    /// Notes what a live trainer spent since it started.
    pub fn note(&mut self, trainer: TrainerId, spent: Spent) {
        self.live.insert(trainer, spent);
    }

    /// Adds up those that are gone.
    pub fn follow(&mut self, live: &BTreeSet<TrainerId>) {
        let gone = &mut self.gone;
        self.live.retain(|trainer, spent| {
            let is_live = live.contains(trainer);
            if !is_live {
                *gone += *spent;
            }
            is_live
        });
    }

    /// What one of them spent.
    pub fn of(&self, trainer: TrainerId) -> Spent {
        self.live.get(&trainer).copied().unwrap_or_default()
    }

    /// What all of them spent together.
    pub fn total(&self) -> Spent {
        let mut total = self.gone;
        self.live.values().for_each(|spent| total += *spent);
        total
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_trainer_that_is_gone_counts_once() {
        let (first, second) = (TrainerId(Uuid::from_u128(1)), TrainerId(Uuid::from_u128(2)));
        let compute = |compute| Spent { compute, ..Spent::default() };
        let mut spendings = Spendings::default();
        spendings.note(first, compute(1.0));
        spendings.note(first, compute(2.0));
        spendings.note(second, compute(3.0));
        assert_eq!(spendings.total(), compute(5.0));
        for _ in 0..2 {
            spendings.follow(&BTreeSet::from([second]));
            assert_eq!(spendings.total(), compute(5.0));
        }
        assert_eq!((spendings.of(first), spendings.of(second)), (compute(0.0), compute(3.0)));
    }
}
