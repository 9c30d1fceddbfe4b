//! Election of the initializer, which sets the first values of the parameters of a generation.
//!
//! One trainer is elected. If its registration ends before it is done, another one is elected under a
//! higher attempt number. Pservers accept the highest attempt only, so a partial initialization is
//! repeated. A registered trainer is not replaced, however long it takes.

use std::collections::BTreeSet;

use steadfast_common::ids::{Generation, TrainerId};
use steadfast_common::records::InitRecord;

/// Reply to a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitReply {
    /// The candidate is elected. `record` must be committed first, unless it is already stored.
    Elected { record: InitRecord },
    /// Another trainer is initializing.
    Wait,
    /// The parameters are ready.
    Done,
}

/// Decides whether `candidate` is elected.
pub fn elect(
    stored: Option<&InitRecord>,
    generation: Generation,
    candidate: TrainerId,
    live: &BTreeSet<TrainerId>,
) -> InitReply {
    let attempt = match stored {
        Some(record) if record.generation == generation => {
            if record.done {
                return InitReply::Done;
            }
            if record.trainer == candidate {
                return InitReply::Elected { record: record.clone() };
            }
            if live.contains(&record.trainer) {
                return InitReply::Wait;
            }
            record.attempt + 1
        }
        Some(_) | None => 1,
    };
    let record = InitRecord { generation, attempt, trainer: candidate, done: false };
    InitReply::Elected { record }
}

/// Accepts the completion report of the elected trainer; returns `None` for any other trainer or attempt.
pub fn finish(
    stored: Option<&InitRecord>,
    generation: Generation,
    candidate: TrainerId,
    attempt: u64,
) -> Option<InitRecord> {
    let record = stored?;
    let is_elected =
        record.generation == generation && record.trainer == candidate && record.attempt == attempt;
    is_elected.then(|| InitRecord { done: true, ..record.clone() })
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn id(number: u128) -> TrainerId {
        TrainerId(Uuid::from_u128(number))
    }

    /// S004-35: one trainer initializes, the others wait.
    #[test]
    fn one_trainer_initializes_and_the_others_wait_until_it_is_done() {
        let live = BTreeSet::from([id(1), id(2)]);
        let InitReply::Elected { record } = elect(None, Generation(1), id(1), &live) else {
            panic!("no trainer was elected");
        };
        assert_eq!(elect(Some(&record), Generation(1), id(2), &live), InitReply::Wait);
        assert_eq!(finish(Some(&record), Generation(1), id(2), record.attempt), None);
        let done = finish(Some(&record), Generation(1), id(1), record.attempt).unwrap();
        assert_eq!(elect(Some(&done), Generation(1), id(2), &live), InitReply::Done);
    }

    /// D12: an initializer that dies midway is replaced, under a higher attempt.
    #[test]
    fn a_dead_initializer_is_succeeded_and_its_late_word_does_not_count() {
        let live = BTreeSet::from([id(2)]);
        let dead =
            InitRecord { generation: Generation(1), attempt: 1, trainer: id(1), done: false };
        let InitReply::Elected { record } = elect(Some(&dead), Generation(1), id(2), &live) else {
            panic!("no trainer was elected");
        };
        assert_eq!(record.attempt, 2);
        assert_eq!(finish(Some(&record), Generation(1), id(1), 1), None);
    }

    #[test]
    fn a_new_generation_is_initialized_anew() {
        let done = InitRecord { generation: Generation(1), attempt: 3, trainer: id(1), done: true };
        let reply = elect(Some(&done), Generation(2), id(1), &BTreeSet::from([id(1)]));
        assert!(matches!(reply, InitReply::Elected { record } if record.attempt == 1));
    }
}
