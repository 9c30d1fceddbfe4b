//! Deadlines of task attempts.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::{Attempt, Millis, TaskId};

use crate::ledger::{Ledger, Limits};

/// Deadlines of the pending attempts, on the clock of the acting master. A new master gives each attempt
/// its full time again.
#[derive(Clone, Debug, Default)]
pub struct Deadlines {
    due: BTreeSet<(Millis, Attempt, TaskId)>,
    of: BTreeMap<Attempt, Millis>,
}

impl Deadlines {
    /// Keeps deadlines for exactly the pending attempts; a new attempt gets its full time.
    pub fn follow(&mut self, ledger: &Ledger, now: Millis, limits: &Limits) {
        let pending: BTreeMap<Attempt, TaskId> =
            ledger.pending().map(|(task, attempt, _)| (attempt, task)).collect();
        self.due.retain(|(_, attempt, _)| pending.contains_key(attempt));
        self.of.retain(|attempt, _| pending.contains_key(attempt));
        for (attempt, task) in pending {
            self.of.entry(attempt).or_insert_with(|| {
                let at = Millis(now.0.saturating_add(limits.deadline_ms));
                self.due.insert((at, attempt, task));
                at
            });
        }
    }

    /// Returns the attempts whose deadline has passed.
    pub fn overdue(&self, now: Millis) -> Vec<(TaskId, Attempt)> {
        let past = self.due.iter().take_while(|(at, _, _)| *at <= now);
        past.map(|(_, attempt, task)| (*task, *attempt)).collect()
    }
}
