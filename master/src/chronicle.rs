//! What happened to a job while this master acts, and how its figures went: for those who look.

use std::collections::{BTreeSet, VecDeque};

use steadfast_common::ids::{Slot, TrainerId};
use steadfast_common::status::{Happening, Point};

use crate::board::Facts;

/// Happenings that are remembered.
const HAPPENINGS_MAX: usize = 200;

/// Longest description of one.
const CHARS_MAX: usize = 300;

/// Points of a curve. When there are more, every second one goes, and the rest lie twice as far apart.
const POINTS_MAX: usize = 512;

/// Time between the first points.
const STEP_MS: u64 = 500;

/// Happenings and curves of one reign.
#[derive(Debug)]
pub(crate) struct Chronicle {
    happenings: VecDeque<Happening>,
    points: Vec<Point>,
    step_ms: u64,
    last: Option<Seen>,
}

/// What the next look is compared with.
#[derive(Debug)]
struct Seen {
    trainers: BTreeSet<TrainerId>,
    slots: Vec<(Slot, Option<String>)>,
    generation: u64,
    checkpoint: Option<String>,
    recoveries: u64,
    discarded: usize,
    is_over: bool,
}

impl Default for Chronicle {
    fn default() -> Self {
        Self { happenings: VecDeque::new(), points: Vec::new(), step_ms: STEP_MS, last: None }
    }
}

impl Chronicle {
    /// Looks at the facts, at `unix_ms` by the calendar.
    pub fn note(&mut self, facts: &Facts, unix_ms: u64) {
        let seen = Seen::of(facts);
        match self.last.take() {
            None => self.tell(unix_ms, format!("this master acts, as of epoch {}", facts.epoch)),
            Some(last) => last.compare(&seen, facts).for_each(|what| self.tell(unix_ms, what)),
        }
        self.last = Some(seen);
        self.draw(facts, unix_ms);
    }

    /// What happened, the latest last.
    pub fn happenings(&self) -> Vec<Happening> {
        self.happenings.iter().cloned().collect()
    }

    /// The curves.
    pub fn points(&self) -> Vec<Point> {
        self.points.clone()
    }

    fn tell(&mut self, unix_ms: u64, mut what: String) {
        // Addresses and reasons are what others said.
        if let Some((end, _)) = what.char_indices().nth(CHARS_MAX) {
            what.truncate(end);
        }
        self.happenings.push_back(Happening { unix_ms, what });
        if HAPPENINGS_MAX < self.happenings.len() {
            self.happenings.pop_front();
        }
    }

    fn draw(&mut self, facts: &Facts, unix_ms: u64) {
        // A calendar that is set back is no reason to wait.
        let is_due = self
            .points
            .last()
            .is_none_or(|last| unix_ms < last.unix_ms || last.unix_ms + self.step_ms <= unix_ms);
        if !is_due {
            return;
        }
        self.points.push(Point {
            unix_ms,
            version: facts.position.version,
            examples: facts.examples,
            loss: facts.loss.filter(|loss| loss.is_finite()),
            metric: facts.evaluation.as_ref().map(|it| it.metric).filter(|it| it.is_finite()),
        });
        if POINTS_MAX < self.points.len() {
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.step_ms *= 2;
        }
    }
}

impl Seen {
    fn of(facts: &Facts) -> Self {
        Self {
            trainers: facts.trainers.iter().map(|it| it.id).collect(),
            slots: facts.slots.iter().map(|it| (it.slot, it.address.clone())).collect(),
            generation: facts.generation.0,
            checkpoint: facts.checkpoint.clone(),
            recoveries: facts.recoveries_count,
            discarded: facts.discarded.len(),
            is_over: facts.result.is_some(),
        }
    }

    /// What became different.
    fn compare(self, now: &Self, facts: &Facts) -> impl Iterator<Item = String> {
        let mut told = Vec::new();
        let left = self.trainers.difference(&now.trainers);
        told.extend(left.map(|id| format!("trainer {id} left")));
        let joined = now.trainers.difference(&self.trainers);
        told.extend(joined.map(|id| format!("trainer {id} joined")));
        for (slot, address) in &now.slots {
            let before = self.slots.iter().find(|it| it.0 == *slot).and_then(|it| it.1.as_ref());
            if before == address.as_ref() {
                continue;
            }
            // A spare may be there before anybody looks.
            told.extend(before.map(|it| format!("slot {slot} lost its pserver {it}")));
            told.extend(address.iter().map(|it| format!("slot {slot} was taken by pserver {it}")));
        }
        if self.generation != now.generation {
            told.push(format!("generation {} began", now.generation));
        }
        if let Some(id) = now.checkpoint.as_ref().filter(|id| self.checkpoint.as_ref() != Some(id))
        {
            told.push(format!("checkpoint {id} is the latest"));
        }
        let new = now.recoveries.saturating_sub(self.recoveries) as usize;
        for it in facts.recoveries.iter().skip(facts.recoveries.len().saturating_sub(new)) {
            told.push(format!("{}; the next step came after {:.2} s", it.cause, it.seconds));
        }
        for task in facts.discarded.iter().skip(self.discarded) {
            told.push(format!("task {} was given up: {}", task.task, task.reason));
        }
        if let Some(result) = facts.result.as_ref().filter(|_| !self.is_over) {
            let reason = result.reason.as_deref().map_or_else(String::new, |it| format!(": {it}"));
            told.push(format!("the job is over{reason}"));
        }
        told.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use steadfast_common::ids::Incarnation;
    use steadfast_common::status::SlotStatus;

    use super::*;

    fn with_slot(address: Option<&str>) -> Facts {
        let address = address.map(str::to_owned);
        let slot = SlotStatus { slot: Slot(0), address, incarnation: Some(Incarnation(3)) };
        Facts { slots: vec![slot], ..Facts::default() }
    }

    fn told(chronicle: &Chronicle) -> Vec<String> {
        chronicle.happenings().into_iter().map(|it| it.what).collect()
    }

    #[test]
    fn who_leaves_and_who_takes_over_is_told_once() {
        let mut chronicle = Chronicle::default();
        let holders = [Some("a:1"), Some("a:1"), None, Some("b:1"), Some("c:1")];
        for (at, address) in (0..).zip(holders) {
            chronicle.note(&with_slot(address), at);
        }
        let expected = [
            "this master acts, as of epoch 0",
            "slot 0 lost its pserver a:1",
            "slot 0 was taken by pserver b:1",
            "slot 0 lost its pserver b:1",
            "slot 0 was taken by pserver c:1",
        ];
        assert_eq!(told(&chronicle), expected);
    }

    #[test]
    fn curves_go_on_when_the_calendar_is_set_back() {
        let mut chronicle = Chronicle::default();
        for unix_ms in [10_000_000, 10_001_000, 1_000, 1_100, 2_000] {
            chronicle.note(&Facts::default(), unix_ms);
        }
        let drawn: Vec<u64> = chronicle.points().iter().map(|it| it.unix_ms).collect();
        assert_eq!(drawn, [10_000_000, 10_001_000, 1_000, 2_000]);
    }

    #[test]
    fn a_long_job_keeps_a_bounded_curve_of_all_its_time() {
        let mut chronicle = Chronicle::default();
        for second in 0..100_000 {
            let checkpoint = Some(format!("c-{}", second / 100));
            let facts = Facts { checkpoint, ..Facts::default() };
            chronicle.note(&facts, second * 1000);
        }
        let points = chronicle.points();
        assert!(POINTS_MAX / 2 <= points.len() && points.len() <= POINTS_MAX, "{}", points.len());
        assert_eq!(points[0].unix_ms, 0);
        assert!(99_000_000 - 512_000 < points.last().unwrap().unix_ms);
        assert_eq!(chronicle.happenings().len(), HAPPENINGS_MAX);
    }
}
