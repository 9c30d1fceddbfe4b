//! How often the network does what to a call.

use std::time::Duration;

use crate::dice::Dice;

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Whole,
    /// The connection breaks before the request is under way.
    BrokenBefore,
    /// The connection breaks when so many thousandths of the request have arrived.
    CutOff(u64),
    /// It is carried out, and the connection breaks before the answer is under way.
    AnswerLost,
    /// The caller is told that the connection broke, and the request arrives that much later.
    Ghost(Duration),
}

/// How the network behaves.
#[derive(Clone, Debug)]
pub struct Weather {
    /// The least and the most that a message takes.
    pub latency: (Duration, Duration),
    pub broken_before: f64,
    pub cut_off: f64,
    pub answer_lost: f64,
    pub ghost: f64,
    /// The most that a ghost is late.
    pub ghost_late: Duration,
}

impl Weather {
    /// Nothing happens to calls.
    pub fn fair(latency: (Duration, Duration)) -> Self {
        let ghost_late = Duration::from_secs(1);
        let (broken_before, cut_off, answer_lost, ghost) = (0.0, 0.0, 0.0, 0.0);
        Self { latency, broken_before, cut_off, answer_lost, ghost, ghost_late }
    }

    /// Draws what becomes of a call.
    pub fn fate(&self, dice: &mut Dice) -> Fate {
        let drawn = dice.share();
        let mut limit = self.broken_before;
        if drawn < limit {
            return Fate::BrokenBefore;
        }
        limit += self.cut_off;
        if drawn < limit {
            return Fate::CutOff(dice.below(1000));
        }
        limit += self.answer_lost;
        if drawn < limit {
            return Fate::AnswerLost;
        }
        limit += self.ghost;
        if drawn < limit {
            return Fate::Ghost(dice.time(Duration::from_millis(1), self.ghost_late));
        }
        Fate::Whole
    }
}
