//! Choice of the saver, the trainer that evaluates and writes the final model.
//!
//! One trainer has the role. It keeps the role while it lives; after repeated failures the role passes
//! to another trainer. The role is a hint, like the owners of lanes: two trainers that write the model
//! write the same bytes. It is therefore kept in memory only, and a new master chooses anew.

use std::collections::BTreeSet;

use steadfast_common::ids::TrainerId;

/// Consecutive failures of one trainer after which another one is chosen.
const FAILURES_MAX: u32 = 3;

/// Refused requests of excluded trainers after which they may try again, if no other trainer asks.
const REFUSED_MAX: u32 = 5;

/// Progress of the trainer with the role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It computes the metrics on held-out records.
    Evaluating,
    /// It writes the model.
    Writing,
}

/// Whether the caller has the role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveReply {
    Save,
    Wait,
}

/// The trainer with the role, and the trainers that failed in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saver {
    holder: Option<(TrainerId, Stage)>,
    /// Consecutive failures of the holder.
    failures: u32,
    /// Failures of all trainers in this generation.
    failures_in_all: u32,
    /// Why the last attempt failed.
    error: Option<(TrainerId, String)>,
    /// Trainers that failed too often.
    excluded: BTreeSet<TrainerId>,
    /// Refused requests of excluded trainers since the role became free.
    refused: u32,
}

impl Saver {
    /// Handles a trainer's request for the role, or the holder's progress report. `error` is the reason
    /// why its last attempt failed.
    pub fn request(
        &mut self,
        trainer: TrainerId,
        stage: Stage,
        error: Option<String>,
        live: &BTreeSet<TrainerId>,
    ) -> SaveReply {
        self.holder = self.holder.filter(|(holder, _)| live.contains(holder));
        let is_holder = self.holder.is_some_and(|(holder, _)| holder == trainer);
        if let Some(error) = error.filter(|_| is_holder) {
            self.fail(trainer, error, live);
        }
        if self.holder.is_some_and(|(holder, _)| holder != trainer) {
            return SaveReply::Wait;
        }
        if self.holder.is_none() {
            if self.is_excluded(trainer, live) {
                return SaveReply::Wait;
            }
            (self.failures, self.refused) = (0, 0);
        }
        self.holder = Some((trainer, stage));
        SaveReply::Save
    }

    /// Returns the trainer with the role, and its stage.
    pub fn holder(&self) -> Option<(TrainerId, Stage)> {
        self.holder
    }

    /// Returns the trainer of the last failed attempt, its error, and the number of failed attempts.
    pub fn error(&self) -> Option<(TrainerId, &str, u32)> {
        let (trainer, error) = self.error.as_ref()?;
        Some((*trainer, error, self.failures_in_all))
    }

    /// Returns the trainers that failed too often.
    pub fn excluded(&self) -> &BTreeSet<TrainerId> {
        &self.excluded
    }

    fn fail(&mut self, trainer: TrainerId, error: String, live: &BTreeSet<TrainerId>) {
        self.failures += 1;
        self.failures_in_all = self.failures_in_all.saturating_add(1);
        self.error = Some((trainer, error));
        if FAILURES_MAX <= self.failures && 1 < live.len() {
            self.holder = None;
            self.excluded.insert(trainer);
        }
    }

    /// Returns whether the caller failed before and must leave the role to another trainer. When every
    /// live trainer has failed, or the others do not ask, all may try again.
    fn is_excluded(&mut self, trainer: TrainerId, live: &BTreeSet<TrainerId>) -> bool {
        if !self.excluded.contains(&trainer) {
            return false;
        }
        self.refused += 1;
        if live.is_subset(&self.excluded) || REFUSED_MAX <= self.refused {
            self.excluded.clear();
        }
        self.excluded.contains(&trainer)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn trainer(number: u128) -> TrainerId {
        TrainerId(Uuid::from_u128(number))
    }

    fn live(numbers: &[u128]) -> BTreeSet<TrainerId> {
        numbers.iter().map(|number| trainer(*number)).collect()
    }

    fn requests(saver: &mut Saver, number: u128, all: &[u128]) -> SaveReply {
        saver.request(trainer(number), Stage::Evaluating, None, &live(all))
    }

    fn fails(saver: &mut Saver, number: u128, all: &[u128]) -> SaveReply {
        let error = Some("no space".to_owned());
        saver.request(trainer(number), Stage::Evaluating, error, &live(all))
    }

    #[test]
    fn one_trainer_saves_until_it_dies() {
        let mut saver = Saver::default();
        assert_eq!(requests(&mut saver, 1, &[1, 2]), SaveReply::Save);
        assert_eq!(requests(&mut saver, 2, &[1, 2]), SaveReply::Wait);
        assert_eq!(requests(&mut saver, 1, &[1, 2]), SaveReply::Save);
        assert_eq!(requests(&mut saver, 2, &[2]), SaveReply::Save);
    }

    /// I12: a trainer that may not write to the store does not stay the saver while it lives.
    #[test]
    fn after_repeated_failures_another_trainer_saves() {
        let mut saver = Saver::default();
        requests(&mut saver, 1, &[1, 2]);
        assert_eq!(fails(&mut saver, 1, &[1, 2]), SaveReply::Save);
        assert_eq!(fails(&mut saver, 1, &[1, 2]), SaveReply::Save);
        assert_eq!(fails(&mut saver, 1, &[1, 2]), SaveReply::Wait);
        assert_eq!(saver.error(), Some((trainer(1), "no space", 3)));
        assert_eq!(requests(&mut saver, 1, &[1, 2]), SaveReply::Wait);
        assert_eq!(requests(&mut saver, 2, &[1, 2]), SaveReply::Save);
        assert_eq!(requests(&mut saver, 1, &[1, 2]), SaveReply::Wait);
    }

    #[test]
    fn a_trainer_that_is_alone_goes_on_trying() {
        let mut saver = Saver::default();
        requests(&mut saver, 1, &[1]);
        for _ in 0..20 {
            assert_eq!(fails(&mut saver, 1, &[1]), SaveReply::Save);
        }
    }

    #[test]
    fn when_all_have_failed_all_may_try_again() {
        let mut saver = Saver::default();
        requests(&mut saver, 1, &[1, 2]);
        for _ in 0..3 {
            fails(&mut saver, 1, &[1, 2]);
        }
        requests(&mut saver, 2, &[1, 2]);
        for _ in 0..2 {
            fails(&mut saver, 2, &[1, 2]);
        }
        assert_eq!(fails(&mut saver, 2, &[1, 2]), SaveReply::Save);
        assert_eq!(requests(&mut saver, 1, &[1, 2]), SaveReply::Wait);
    }

    #[test]
    fn a_trainer_that_failed_is_not_kept_waiting_for_others_that_never_ask() {
        let mut saver = Saver::default();
        requests(&mut saver, 1, &[1, 2]);
        for _ in 0..3 {
            fails(&mut saver, 1, &[1, 2]);
        }
        let granted = (0..REFUSED_MAX).any(|_| requests(&mut saver, 1, &[1, 2]) == SaveReply::Save);
        assert!(granted);
    }
}
