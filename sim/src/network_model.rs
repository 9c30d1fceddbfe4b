//! The network model: latency, and the probability of each call outcome.

use std::time::Duration;

use crate::rng::Rng;

/// The number of calls of a process to each method that are early.
pub const EARLY_CALLS: u64 = 4;

/// Early calls fail so much more often. A process elects a leader, initializes a slot, or saves a model with few calls
/// among thousands, so that at the same rate for all calls hardly any of these would fail.
const EARLY_FACTOR: f64 = 5.0;

/// Outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    Whole,
    /// The connection breaks before the request is sent.
    BrokenBefore,
    /// The connection breaks after this many thousandths of the request have arrived.
    CutOff(u64),
    /// The call is executed, and the connection breaks before the response is sent.
    AnswerLost,
    /// The caller sees a broken connection, and the request arrives this much later.
    DelayedDuplicate(Duration),
}

/// Latency and failure probabilities of the network.
#[derive(Clone, Debug)]
pub struct NetworkModel {
    /// Minimum and maximum latency of a message.
    pub latency: (Duration, Duration),
    pub broken_before: f64,
    pub cut_off: f64,
    pub answer_lost: f64,
    pub delayed_duplicate: f64,
    /// Maximum delay of a delayed duplicate.
    pub delay_max: Duration,
}

impl NetworkModel {
    /// Returns a model without failures.
    pub fn fair(latency: (Duration, Duration)) -> Self {
        let delay_max = Duration::from_secs(1);
        let (broken_before, cut_off, answer_lost, delayed_duplicate) = (0.0, 0.0, 0.0, 0.0);
        Self { latency, broken_before, cut_off, answer_lost, delayed_duplicate, delay_max }
    }

    /// Draws the outcome of a call. Failures are [`EARLY_FACTOR`] times as frequent if it `is_early`: one of the first
    /// of a process to a method.
    pub fn outcome(&self, rng: &mut Rng, is_early: bool) -> CallOutcome {
        let drawn = rng.share() / if is_early { EARLY_FACTOR } else { 1.0 };
        let mut limit = self.broken_before;
        if drawn < limit {
            return CallOutcome::BrokenBefore;
        }
        limit += self.cut_off;
        if drawn < limit {
            return CallOutcome::CutOff(rng.below(1000));
        }
        limit += self.answer_lost;
        if drawn < limit {
            return CallOutcome::AnswerLost;
        }
        limit += self.delayed_duplicate;
        if drawn < limit {
            return CallOutcome::DelayedDuplicate(
                rng.time(Duration::from_millis(1), self.delay_max),
            );
        }
        CallOutcome::Whole
    }
}
