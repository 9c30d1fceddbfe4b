//! The policy, with jobs whose speed by number of workers is known.

use proptest::prelude::*;
use steadfast_common::records::scale::ScaleMode;

use super::*;

/// Time between two decisions: that of three samples.
const WINDOW_MS: u64 = 60_000;

const HOUR_MS: u64 = 3_600_000;

/// A job whose workers have a known speed.
struct Plant<F> {
    speed: F,
    possible: Vec<u32>,
    record: ScaleRecord,
    now: u64,
    present: u32,
    /// The times of changes.
    changes: Vec<u64>,
    /// The workers of the nodes that are there, if more can be started.
    there: Option<u32>,
}

impl<F: FnMut(u32) -> f64> Plant<F> {
    fn new(possible: impl IntoIterator<Item = u32>, present: u32, speed: F) -> Self {
        let record = ScaleRecord { mode: ScaleMode::Auto, ..ScaleRecord::default() };
        let possible = possible.into_iter().collect();
        Self { speed, possible, record, now: 0, present, changes: Vec::new(), there: None }
    }

    fn decide(&self, speed: f64) -> Option<ScaleRecord> {
        let (ms, present, possible) = (self.now, self.present, &self.possible);
        let there = self.there.unwrap_or(possible.last().copied().unwrap_or(0));
        decide(&self.record, &Situation { ms, present, speed, possible, there })
    }

    /// Measures one window, and follows the decision.
    fn window(&mut self) {
        self.now += WINDOW_MS;
        let speed = (self.speed)(self.present);
        let Some(record) = self.decide(speed) else { return };
        let workers = record.workers.unwrap_or(self.present);
        let is_change = record.memory.changed_ms == self.now;
        self.record = record;
        if is_change {
            assert!(self.possible.contains(&workers), "{workers}");
            self.changes.push(self.now);
            self.present = self.there.map_or(workers, |there| workers.min(there));
        }
    }

    fn run(&mut self, ms: u64) {
        (0..ms / WINDOW_MS).for_each(|_| self.window());
    }

    /// Counts the changes of the last so many milliseconds.
    fn changes_of_last(&self, ms: u64) -> usize {
        self.changes.iter().filter(|it| self.now - ms < **it).count()
    }
}

/// Returns the speed of workers of which a part of the work is not shared, relative to one worker.
fn amdahl(alone: f64) -> impl Fn(u32) -> f64 {
    move |workers| 100.0 / (alone + (1.0 - alone) / f64::from(workers))
}

/// S002-10: each of eight workers brings as much as the first one: all of them are used.
#[test]
fn workers_are_added_while_they_pay() {
    let mut plant = Plant::new(1..=8, 1, |workers| 100.0 * f64::from(workers));
    plant.run(6 * WINDOW_MS);
    assert_eq!(plant.present, 8);
    assert_eq!(plant.record.reason, ScaleReason::MorePaid);
}

/// S002-10: a job that other things limit gives back the workers that add nothing.
#[test]
fn workers_that_add_nothing_are_given_back() {
    let mut plant = Plant::new(1..=8, 8, |workers| 100.0 * f64::from(workers.min(3)));
    plant.run(5 * WINDOW_MS);
    assert_eq!(plant.present, 3);
    plant.run(24 * HOUR_MS);
    assert_eq!(plant.present, 3);
    let tries = plant.changes.len() / 2;
    assert!(tries <= 14, "{tries} tries in a day");
}

/// S002-10: once it has settled, a job is disturbed at most twice in four hours: to a number that is tried, and back.
#[test]
fn pauses_grow_with_tries_in_vain() {
    let mut plant = Plant::new(1..=8, 1, amdahl(0.1));
    plant.run(12 * HOUR_MS);
    let settled = plant.present;
    plant.run(24 * HOUR_MS);
    assert_eq!(plant.present, settled);
    assert!(plant.changes_of_last(24 * HOUR_MS) <= 2 * 24 / 4, "{:?}", plant.changes);
    assert_eq!(plant.record.memory.pause_ms, PAUSE_MS.1);
}

/// A job that becomes another one is measured anew, however long the pause is.
#[test]
fn a_change_of_the_job_ends_the_pause() {
    let (limit, possible) = (std::cell::Cell::new(2), 1..=8);
    let mut plant = Plant::new(possible, 4, |workers| 100.0 * f64::from(workers.min(limit.get())));
    plant.run(24 * HOUR_MS);
    assert_eq!(plant.present, 2);
    let (each, records) = (std::cell::Cell::new(100.0), plant.record.clone());
    assert!(plant.now < records.memory.next_try_ms.max(plant.now + 1));
    limit.set(8);
    each.set(60.0);
    let mut plant = Plant {
        speed: |workers: u32| each.get() * f64::from(workers.min(limit.get())),
        possible: plant.possible,
        record: plant.record,
        now: plant.now,
        present: plant.present,
        changes: Vec::new(),
        there: None,
    };
    plant.run(45 * 60_000);
    assert_eq!(plant.present, 8);
}

/// The next try is known while the policy pauses.
#[test]
fn a_pause_does_not_hide_the_next_try() {
    let mut plant = Plant::new(1..=2, 1, |workers| 100.0 * f64::from(workers.min(1)));
    plant.run(3 * WINDOW_MS);
    assert_eq!((plant.present, plant.record.reason), (1, ScaleReason::MoreDidNotPay));
    plant.record.memory.next_try_ms = u64::MAX;
    let (ms, possible) = (plant.now + 2 * KEPT_MS, plant.possible.as_slice());
    let situation = Situation { ms, present: 1, speed: 100.0, possible, there: 2 };
    assert_eq!(decide(&plant.record, &situation), None);
    assert_eq!(next_try(&plant.record, &situation), Some((2, ScaleReason::TriesMore)));
}

/// A try that takes longer than measurements are kept, since commits are rare, is judged as well.
#[test]
fn a_try_that_takes_long_is_judged() {
    let mut plant = Plant::new(1..=4, 2, |workers| 100.0 * f64::from(workers));
    for workers in [3, 4] {
        plant.now += 10 * KEPT_MS;
        plant.window();
        assert_eq!((plant.present, plant.record.reason), (workers, ScaleReason::TriesMore));
    }
}

/// A number that a person has chosen, and one of nodes that are not there any more, is where the policy begins.
#[test]
fn a_try_to_which_nodes_were_lost_is_no_verdict() {
    let mut plant = Plant::new(1..=4, 2, |workers| 100.0 * f64::from(workers));
    plant.window();
    assert_eq!((plant.present, plant.record.reason), (3, ScaleReason::TriesMore));
    (plant.present, plant.possible) = (1, vec![1]);
    plant.window();
    assert_eq!((plant.present, plant.record.reason), (1, ScaleReason::TooFewNodes));
    assert_eq!(plant.record.workers, Some(3), "they may come back");
    plant.possible = vec![1, 2, 3, 4];
    plant.run(HOUR_MS);
    assert_eq!(plant.present, 4);
}

/// S002-10: nodes that are started for a try are waited for; if they do not come, that is no verdict about them.
#[test]
fn a_try_waits_for_the_nodes_that_are_started_for_it() {
    for comes in [true, false] {
        let mut plant = Plant::new(1..=4, 2, |workers| 100.0 * f64::from(workers));
        (plant.record.startable, plant.there) = (Some(4), Some(2));
        plant.window();
        assert_eq!((plant.present, plant.record.workers), (2, Some(3)));
        plant.run(START_MS - 2 * WINDOW_MS);
        assert_eq!((plant.record.reason, plant.changes.len()), (ScaleReason::TriesMore, 1));
        if comes {
            (plant.present, plant.there) = (3, Some(4));
            plant.run(2 * WINDOW_MS);
            assert_eq!((plant.present, plant.record.reason), (4, ScaleReason::MorePaid));
        } else {
            plant.run(3 * WINDOW_MS);
            assert_eq!(plant.record.reason, ScaleReason::TooFewNodes);
        }
    }
}

/// A new master decides as the one before it would have: all that the policy remembers is in the record.
#[test]
fn a_record_that_was_stored_decides_the_same() {
    let mut plant = Plant::new(1..=8, 8, amdahl(0.05));
    for _ in 0..200 {
        plant.window();
        let json = serde_json::to_vec(&plant.record).unwrap();
        assert!(json.len() < 1024, "{}", json.len());
        plant.record = serde_json::from_slice(&json).unwrap();
    }
    let mut other = Plant::new(1..=8, 8, amdahl(0.05));
    other.run(200 * WINDOW_MS);
    assert_eq!((plant.changes, plant.record), (other.changes, other.record));
}

/// A speed that is not one, and a job without workers, change nothing.
#[test]
fn nothing_is_decided_without_a_speed() {
    let plant = Plant::new([], 0, |_| 1.0);
    assert_eq!(plant.decide(1.0), None);
    let plant = Plant::new(1..=4, 2, |_| 1.0);
    for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(plant.decide(speed), None);
    }
}

#[test]
fn numbers_that_are_tried_lie_far_enough_from_each_other() {
    assert_eq!(rungs(&[1, 2, 3, 4]), [4, 3, 2, 1]);
    assert_eq!(rungs(&(1..=16).collect::<Vec<_>>()), [16, 12, 9, 6, 4, 3, 2, 1]);
    assert_eq!(rungs(&[8, 16, 24, 32]), [32, 24, 16, 8]);
    assert_eq!(rungs(&[7, 8]), [8, 7]);
    assert_eq!(rungs(&[]), [0; 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// S002-10: from any number of workers the policy comes within one step of the best one for its price, with few
    /// changes, and stays there.
    #[test]
    fn the_best_number_is_found(
        alone in 0.0..0.9,
        sizes in prop::collection::btree_set(1_u32..200, 1..20),
        start in any::<prop::sample::Index>(),
    ) {
        let sizes: Vec<u32> = sizes.into_iter().collect();
        let mut plant = Plant::new(sizes.iter().copied(), sizes[start.index(sizes.len())], amdahl(alone));
        let rungs = rungs(&sizes);
        let windows = 2 * rungs.len() as u64 + 2;
        plant.run(windows * WINDOW_MS + 20 * 60_000);
        // The largest number to which each step has paid.
        let speed = amdahl(alone);
        let gain = |fewer: u32, more: u32| {
            (speed(more) / speed(fewer) - 1.0) / (f64::from(more) / f64::from(fewer) - 1.0)
        };
        let ascending: Vec<u32> = rungs.iter().rev().copied().collect();
        let best = ascending.windows(2).take_while(|it| 0.5 <= gain(it[0], it[1])).count();
        let last = ascending.windows(2).take_while(|it| 0.35 <= gain(it[0], it[1])).count();
        let at = |workers: u32| ascending.iter().position(|it| workers <= *it).unwrap();
        let found = at(plant.present);
        prop_assert!(best <= found + 1 && found <= last + 1, "{} of {ascending:?}, best {best}", plant.present);
        prop_assert!(plant.changes.len() <= 2 * ascending.len() + 2, "{:?}", plant.changes);
    }

    /// Noise moves a job that has settled at most once in each pause.
    #[test]
    fn noise_moves_it_seldom(seed in any::<u64>(), start in 1_u32..=8) {
        let mut state = seed | 1;
        let mut noise = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            0.9 + 0.2 * (state % 1000) as f64 / 1000.0
        };
        let base = amdahl(0.08);
        let mut plant = Plant::new(1..=8, start, |workers| base(workers) * noise());
        plant.run(100 * HOUR_MS);
        prop_assert!(plant.changes_of_last(48 * HOUR_MS) <= 36, "{:?}", plant.changes);
    }
}
