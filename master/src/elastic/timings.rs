//! Measures the time that the rounds of a job took to form, and the time that they ran.

use std::collections::VecDeque;

use steadfast_common::ids::{Millis, Round};
use steadfast_master_core::rendezvous::Rendezvous;

/// Maximum number of rounds that are kept.
const ROUNDS_MAX: usize = 64;

/// The times of one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundTimes {
    pub round: Round,
    /// From the end of the round before, or from the first node, until the round was formed.
    pub rendezvous: Millis,
    /// From the formation of the round until a member was lost or asked for another round.
    pub running: Millis,
}

/// The times of the last rounds, as this master saw them: a new one begins in the middle of a round.
#[derive(Debug, Default)]
pub(super) struct Timings {
    ended: VecDeque<RoundTimes>,
    /// Since when nodes gather.
    gathering_since: Option<Millis>,
    current: Option<Current>,
}

/// The round that runs.
#[derive(Clone, Copy, Debug)]
struct Current {
    round: Round,
    rendezvous: Millis,
    since: Millis,
}

impl Timings {
    /// Updates the times of the rounds. The caller calls this after each change of the state.
    pub fn follow(&mut self, state: &Rendezvous, now: Millis) {
        let running = state.is_intact().then(|| state.number());
        if let Some(ended) = self.current.take_if(|it| Some(it.round) != running) {
            self.keep(ended.until(now));
            self.gathering_since = Some(now);
        }
        match running {
            Some(round) if self.current.is_none() => {
                let rendezvous = Millis(now.0 - self.gathering_since.take().unwrap_or(now).0);
                self.current = Some(Current { round, rendezvous, since: now });
            }
            None if state.known().next().is_some() => {
                self.gathering_since.get_or_insert(now);
            }
            Some(_) | None => {}
        }
    }

    /// Returns the times of the last rounds, the oldest first; the one that runs counts until now.
    pub fn rounds(&self, now: Millis) -> Vec<RoundTimes> {
        let current = self.current.map(|current| current.until(now));
        self.ended.iter().copied().chain(current).collect()
    }

    fn keep(&mut self, times: RoundTimes) {
        if self.ended.len() == ROUNDS_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back(times);
    }
}

impl Current {
    fn until(self, now: Millis) -> RoundTimes {
        let running = Millis(now.0 - self.since.0);
        RoundTimes { round: self.round, rendezvous: self.rendezvous, running }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_the_latest_rounds_are_kept() {
        let mut timings = Timings::default();
        for number in 1..=100 {
            let (rendezvous, since) = (Millis(10), Millis(0));
            timings.keep(Current { round: Round(number), rendezvous, since }.until(Millis(number)));
        }
        let kept = timings.rounds(Millis(1000));
        assert_eq!(kept.len(), ROUNDS_MAX);
        let last = RoundTimes { round: Round(100), rendezvous: Millis(10), running: Millis(100) };
        assert_eq!(kept.last(), Some(&last));
        assert_eq!(kept[0].round, Round(37));
    }
}
