//! Chooses how many workers an elastic job has: as many as pay.
//!
//! One more worker pays if it adds at least [`ScaleRecord::worth_percent`] of what a worker brings on average. The policy
//! goes from one possible number of workers to the next while that holds, and turns back if a number that it has tried
//! is not better. Each time that it turns it pauses twice as long as the last time. Between "pays" and "does not pay"
//! lies a gap, in which it stays where it is, so that noise does not move it.
//!
//! All that a decision depends on is its input. What the policy remembers is in the record, so that a new master goes on.

use steadfast_common::records::scale::{MeasuredSpeed, ScaleMemory, ScaleReason, ScaleRecord};

/// The gain below which a number of workers is left lies so far below the one for which it is kept, as a part of what a
/// worker brings on average.
const GAP: f64 = 0.15;

/// The first pause after a try that did not pay, and the longest one, in milliseconds.
const PAUSE_MS: (u64, u64) = (15 * 60_000, 4 * 3_600_000);

/// A measurement at another number of workers is forgotten after this time.
const KEPT_MS: u64 = 30 * 60_000;

/// A speed that differs so much from what it was says that the job, or its machines, are not what they were.
const DRIFT: f64 = 0.25;

/// Limits the wait for nodes that are started for a try.
const START_MS: u64 = 10 * 60_000;

/// Each number of workers that is tried is at least so many times the next smaller one: a smaller step would gain less
/// than the speed varies by itself.
const STEP: f64 = 1.3;

/// Holds what the policy decides by, beside its record.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// The time in milliseconds, by the clock of [`ScaleMemory`].
    pub ms: u64,
    /// The workers of the present round.
    pub present: u32,
    /// The records that they use in a second.
    pub speed: f64,
    /// The numbers of workers that rounds can have, in ascending order.
    pub possible: &'a [u32],
    /// The workers of the nodes that are there; more may be started.
    pub there: u32,
}

/// Tells how a larger number of workers compares to a smaller one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gain {
    Pays,
    /// It pays too little to go there, and too much to leave.
    Unclear,
    DoesNotPay,
    /// One of the two has not been measured lately.
    Unknown,
}

/// Returns the record that follows from what was measured; `None` if nothing changes.
pub fn decide(record: &ScaleRecord, situation: &Situation<'_>) -> Option<ScaleRecord> {
    let mut policy = Policy::new(record, situation)?;
    let next = policy.next();
    let Policy { memory, reason, is_noteworthy, .. } = policy;
    let memory = ScaleMemory { at_ms: situation.ms, ..memory };
    match next {
        Some((workers, reason)) => {
            let (before, changed_ms) = (Some(situation.present), situation.ms);
            let memory = ScaleMemory { before, changed_ms, ..memory };
            Some(ScaleRecord { workers: Some(workers), reason, memory, ..record.clone() })
        }
        None if is_noteworthy => Some(ScaleRecord { reason, memory, ..record.clone() }),
        None => None,
    }
}

/// Returns which number would be tried next if no pause were left, and why.
pub fn next_try(record: &ScaleRecord, situation: &Situation<'_>) -> Option<(u32, ScaleReason)> {
    let mut policy = Policy::new(record, situation)?;
    policy.pauses = false;
    policy.next()
}

struct Policy<'a> {
    situation: &'a Situation<'a>,
    worth: f64,
    memory: ScaleMemory,
    reason: ScaleReason,
    /// The possible numbers next to the present one.
    less: Option<u32>,
    more: Option<u32>,
    /// Whether the reason or the memory has to be kept even if the number stays.
    is_noteworthy: bool,
    /// Whether pauses are kept.
    pauses: bool,
    /// Whether nodes that a try needs are still being started.
    waits: bool,
}

impl<'a> Policy<'a> {
    /// Returns what follows from what was measured, before the next decision.
    fn new(record: &ScaleRecord, situation: &'a Situation<'a>) -> Option<Self> {
        let Situation { ms, present, speed, possible, there } = *situation;
        if present == 0 || !speed.is_finite() || speed <= 0.0 {
            return None;
        }
        let rungs = rungs(possible);
        let mut policy = Self {
            situation,
            worth: f64::from(record.worth_percent) / 100.0,
            memory: record.memory.clone(),
            reason: record.reason,
            less: rungs.iter().find(|it| **it < present).copied(),
            more: rungs.iter().rev().find(|it| present < **it).copied(),
            is_noteworthy: false,
            pauses: true,
            waits: record.reason == ScaleReason::TriesMore
                && record.workers.is_some_and(|desired| there < desired)
                && record.startable.is_some()
                && ms.saturating_sub(record.memory.changed_ms) < START_MS,
        };
        policy.forget_drifted();
        let is_fresh = |it: &MeasuredSpeed| ms.saturating_sub(it.ms) <= KEPT_MS;
        // A try is judged however long it has taken.
        let before = policy.memory.before.filter(|_| record.reason.is_try());
        policy.memory.measured.retain(|workers, it| is_fresh(it) || before == Some(*workers));
        let measured = MeasuredSpeed { records_per_second: speed, ms };
        policy.memory.measured.insert(present, measured);
        policy.end_try();
        Some(policy)
    }

    /// Begins anew if the same workers have another speed than at the last decision.
    fn forget_drifted(&mut self) {
        let Situation { present, speed, .. } = *self.situation;
        let known = self.memory.measured.get(&present).filter(|_| !self.reason.is_try());
        if known.is_some_and(|it| DRIFT < (speed / it.records_per_second - 1.0).abs()) {
            self.memory = ScaleMemory::default();
            self.is_noteworthy = true;
        }
    }

    /// Ends a try that was not in vain, or to which nodes were lost.
    fn end_try(&mut self) {
        let present = self.situation.present;
        if self.waits {
            return;
        }
        let Some(before) = self.memory.before.filter(|_| self.reason.is_try()) else { return };
        let gain = self.gain(before.min(present), before.max(present));
        let is_there = match self.reason {
            ScaleReason::TriesMore => before < present,
            _ => present < before,
        };
        let (reason, pause_ms) = match (self.reason, gain) {
            _ if !is_there => (ScaleReason::TooFewNodes, PAUSE_MS.0),
            (ScaleReason::TriesMore, Gain::Pays) => (ScaleReason::MorePaid, 0),
            (ScaleReason::TriesMore, Gain::Unclear) => (ScaleReason::MorePaid, PAUSE_MS.0),
            (ScaleReason::TriesFewer, Gain::DoesNotPay) => (ScaleReason::FewerSuffice, 0),
            (ScaleReason::TriesFewer, Gain::Unclear) => (ScaleReason::FewerSuffice, PAUSE_MS.0),
            (_, Gain::Unknown) => (ScaleReason::Chosen, PAUSE_MS.0),
            // It goes back.
            _ => return,
        };
        (self.reason, self.is_noteworthy) = (reason, true);
        self.memory.next_try_ms = self.situation.ms.saturating_add(pause_ms);
    }

    /// Returns another number of workers, and why.
    fn next(&mut self) -> Option<(u32, ScaleReason)> {
        let present = self.situation.present;
        if self.waits {
            return None;
        }
        if let Some(before) = self.memory.before.filter(|_| self.reason.is_try()) {
            self.pause_longer();
            return Some((before, self.reason.of_return()));
        }
        let with_less = self.less.map(|less| self.gain(less, present));
        let with_more = self.more.map(|more| self.gain(present, more));
        let more = (self.more, ScaleReason::TriesMore);
        let (workers, reason) = match (with_less, with_more) {
            (Some(Gain::DoesNotPay), _) => (self.less, ScaleReason::TriesFewer),
            (_, Some(Gain::Pays)) => more,
            (Some(Gain::Pays | Gain::Unknown) | None, Some(Gain::Unknown)) => more,
            (Some(Gain::Unknown), _) => (self.less, ScaleReason::TriesFewer),
            (Some(Gain::Pays | Gain::Unclear) | None, _) => return None,
        };
        let (workers, memory) = (workers?, &self.memory);
        let turns = memory.before.is_some_and(|before| (before < present) == (workers < present));
        let pause = if turns { memory.pause_ms.max(PAUSE_MS.0) } else { 0 };
        let begins = memory.changed_ms.saturating_add(pause).max(memory.next_try_ms);
        if self.pauses && self.situation.ms < begins {
            return None;
        }
        if turns {
            self.pause_longer();
            self.memory.next_try_ms = 0;
        }
        Some((workers, reason))
    }

    fn pause_longer(&mut self) {
        let memory = &mut self.memory;
        memory.pause_ms = memory.pause_ms.saturating_mul(2).clamp(PAUSE_MS.0, PAUSE_MS.1);
        memory.next_try_ms = self.situation.ms.saturating_add(memory.pause_ms);
    }

    /// Returns whether the workers that a larger number has more add enough.
    fn gain(&self, fewer: u32, more: u32) -> Gain {
        let speed = |workers| self.memory.measured.get(&workers).map(|it| it.records_per_second);
        let (Some(slower), Some(faster)) = (speed(fewer), speed(more)) else {
            return Gain::Unknown;
        };
        let added = (faster / slower - 1.0) / (f64::from(more) / f64::from(fewer) - 1.0);
        match added {
            _ if self.worth <= added => Gain::Pays,
            _ if added < self.worth - GAP => Gain::DoesNotPay,
            _ => Gain::Unclear,
        }
    }
}

/// Returns the numbers of workers that are tried, in descending order: the largest one, and those that are far enough
/// from each other. The smallest one is always among them.
fn rungs(possible: &[u32]) -> Vec<u32> {
    let mut rungs: Vec<u32> = Vec::new();
    for (index, count) in possible.iter().enumerate().rev() {
        let is_far = rungs.last().is_none_or(|last| STEP * f64::from(*count) <= f64::from(*last));
        if is_far || index == 0 {
            rungs.push(*count);
        }
    }
    rungs
}

#[cfg(test)]
mod tests;
