//! Deadlines of task attempts.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use steadfast_common::ids::{Attempt, Millis, TaskId};

use crate::ledger::{Ledger, Limits};

/// Number of attempts from whose durations the usual one is known, and the fewest for that.
const DURATIONS_MAX: usize = 64;
const DURATIONS_MIN: usize = 4;

/// An attempt is late after so many times the usual duration, and no earlier than this.
const LATE_TIMES: u64 = 2;
const LATE_MIN_MS: u64 = 1000;

/// Deadlines of the pending attempts, on the clock of the acting master. A new master gives each attempt
/// its full time again.
#[derive(Clone, Debug, Default)]
pub struct Deadlines {
    due: BTreeSet<(Millis, Attempt, TaskId)>,
    /// When each attempt began.
    began: BTreeMap<Attempt, Millis>,
    /// Durations of the attempts that ended last, in milliseconds.
    durations: VecDeque<u64>,
}

impl Deadlines {
    /// Keeps deadlines for exactly the pending attempts; a new attempt gets its full time.
    pub fn follow(&mut self, ledger: &Ledger, now: Millis, limits: &Limits) {
        let pending: BTreeMap<Attempt, TaskId> =
            ledger.pending().map(|(task, attempt, _)| (attempt, task)).collect();
        self.due.retain(|(_, attempt, _)| pending.contains_key(attempt));
        let Self { began, durations, .. } = self;
        began.retain(|attempt, began| {
            let is_pending = pending.contains_key(attempt);
            if !is_pending {
                durations.push_back(now.0.saturating_sub(began.0));
            }
            is_pending
        });
        self.durations.drain(..self.durations.len().saturating_sub(DURATIONS_MAX));
        for (attempt, task) in pending {
            self.began.entry(attempt).or_insert_with(|| {
                let at = Millis(now.0.saturating_add(limits.deadline_ms));
                self.due.insert((at, attempt, task));
                now
            });
        }
    }

    /// Returns the attempts that last much longer than usual, the oldest first: another trainer may be faster. The
    /// usual duration is the median of the attempts that ended last, so slow trainers, which end few, do not raise it.
    pub fn late(&self, now: Millis) -> Vec<(TaskId, Attempt)> {
        if self.durations.len() < DURATIONS_MIN {
            return Vec::new();
        }
        let mut durations: Vec<u64> = self.durations.iter().copied().collect();
        durations.sort_unstable();
        let late = (LATE_TIMES * durations[durations.len() / 2]).max(LATE_MIN_MS);
        let is_late = |attempt: &Attempt| {
            self.began.get(attempt).is_some_and(|began| late < now.0.saturating_sub(began.0))
        };
        // The first to be due began first.
        let late = self.due.iter().take_while(|(_, attempt, _)| is_late(attempt));
        late.map(|(_, attempt, task)| (*task, *attempt)).collect()
    }

    /// Returns the attempts whose deadline has passed.
    pub fn overdue(&self, now: Millis) -> Vec<(TaskId, Attempt)> {
        let past = self.due.iter().take_while(|(at, _, _)| *at <= now);
        past.map(|(_, attempt, task)| (*task, *attempt)).collect()
    }
}
