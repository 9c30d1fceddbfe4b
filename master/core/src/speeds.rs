//! Measures how many records the workers of a job use in a second, by the number of workers.
//!
//! A sample is what the same workers used between two moments that lie at least [`WINDOW`] apart: two commits of one round
//! of an elastic job. The time before the second moment of theirs does not count: workers load data and compile their
//! models then.

use std::collections::{BTreeMap, VecDeque};

use steadfast_common::ids::{Millis, NodeId};

/// The least time of a sample.
const WINDOW: Millis = Millis(20_000);

/// A sample is forgotten after this time: machines and data change.
const KEPT: Millis = Millis(30 * 60_000);

/// Samples of one number of workers of which the median is taken.
const SAMPLES: usize = 3;

/// The speed of a number of workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    pub workers: u32,
    pub records_per_second: f64,
}

/// Workers that work together: other ones have another number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerSet {
    pub number: u64,
    pub workers: u32,
}

/// The samples of one master. A new one measures anew.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speeds {
    /// The workers that are measured.
    set: WorkerSet,
    /// The records that were used when the present sample began, and when that was.
    window: Option<(u64, Millis)>,
    samples: BTreeMap<u32, VecDeque<(f64, Millis)>>,
    /// Counts the samples of the present workers.
    of_present: usize,
    /// Counts the records that each node has used since the present sample began.
    used: BTreeMap<NodeId, u64>,
    /// Holds what the present nodes used in a second, in the last sample.
    of_nodes: BTreeMap<NodeId, f64>,
}

impl Speeds {
    /// Notes how many records a job has used when the workers of `set` work, and how many each node has used since the
    /// last time, if that is known.
    pub fn note(&mut self, now: Millis, set: WorkerSet, records: u64, used: BTreeMap<NodeId, u64>) {
        if self.set != set {
            (self.set, self.window, self.of_present) = (set, None, 0);
            self.used.clear();
            self.of_nodes.clear();
            return;
        }
        let Some((begun, since)) = self.window else {
            self.window = Some((records, now));
            return;
        };
        for (node, used) in used {
            *self.used.entry(node).or_default() += used;
        }
        let time = now.0.saturating_sub(since.0);
        if time < WINDOW.0 {
            return;
        }
        let speed = records.saturating_sub(begun) as f64 / (time as f64 / 1000.0);
        let samples = self.samples.entry(set.workers).or_default();
        samples.push_back((speed, now));
        if SAMPLES < samples.len() {
            samples.pop_front();
        }
        self.window = Some((records, now));
        self.of_present += 1;
        let speed = |used: u64| used as f64 / (time as f64 / 1000.0);
        let used = std::mem::take(&mut self.used);
        self.of_nodes = used.into_iter().map(|(node, used)| (node, speed(used))).collect();
    }

    /// Returns how many records a node that works used in a second, in a job whose order is dynamic.
    pub fn of_node(&self, node: NodeId) -> Option<f64> {
        self.of_nodes.get(&node).copied()
    }

    /// Returns the speed of the present workers, once it has been measured so often that one sample does not decide it.
    pub fn of_present(&self, now: Millis) -> Option<f64> {
        let speeds = self.all(now).into_iter().filter(|_| SAMPLES <= self.of_present);
        let workers = self.set.workers;
        speeds.filter(|it| it.workers == workers).map(|it| it.records_per_second).next()
    }

    /// Returns who works, and how often they were measured.
    pub fn measured(&self) -> (WorkerSet, usize) {
        (self.set, self.of_present)
    }

    /// Returns the speeds that were measured lately, by the number of workers.
    pub fn all(&self, now: Millis) -> Vec<Speed> {
        let speeds = self.samples.iter().filter_map(|(workers, samples)| {
            let is_kept = |at: Millis| now.0.saturating_sub(at.0) <= KEPT.0;
            let kept = samples.iter().filter(|(_, at)| is_kept(*at)).map(|(speed, _)| *speed);
            let mut kept: Vec<f64> = kept.collect();
            kept.sort_by(f64::total_cmp);
            let records_per_second = *kept.get(kept.len() / 2)?;
            Some(Speed { workers: *workers, records_per_second })
        });
        speeds.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A master at whose commits the time passes.
    #[derive(Default)]
    struct Watch {
        speeds: Speeds,
        now: Millis,
        round: u64,
        seen: u64,
        /// Says what each node uses for a commit.
        used: BTreeMap<NodeId, u64>,
    }

    impl Watch {
        fn begin_round(&mut self, workers: u32) {
            self.round += 1;
            self.note(workers);
        }

        /// Some seconds later the workers have used more records.
        fn commit(&mut self, workers: u32, seconds: u64, records: u64) {
            self.now.0 += seconds * 1000;
            self.seen += records;
            self.note(workers);
        }

        fn note(&mut self, workers: u32) {
            let set = WorkerSet { number: self.round, workers };
            self.speeds.note(self.now, set, self.seen, self.used.clone());
        }

        fn shown(&self) -> Vec<(u32, f64)> {
            let speeds = self.speeds.all(self.now);
            speeds.iter().map(|it| (it.workers, it.records_per_second)).collect()
        }
    }

    /// S002-10: the speed by number of workers is that of whole windows within one round.
    #[test]
    fn a_speed_is_measured_within_a_round_without_its_start() {
        let mut watch = Watch::default();
        watch.begin_round(1);
        watch.commit(1, 60, 10);
        watch.commit(1, 10, 1000);
        assert_eq!(watch.shown(), []);
        watch.commit(1, 10, 1000);
        assert_eq!(watch.shown(), [(1, 100.0)]);
        // A round that ends within a window adds nothing.
        watch.commit(1, 10, 9000);
        watch.begin_round(2);
        watch.commit(2, 30, 10);
        watch.commit(2, 25, 5000);
        assert_eq!(watch.shown(), [(1, 100.0), (2, 200.0)]);
    }

    #[test]
    fn a_pause_does_not_change_the_median_of_the_last_samples() {
        let mut watch = Watch::default();
        watch.begin_round(1);
        watch.commit(1, 1, 0);
        for records in [2000, 2200, 20] {
            assert_eq!(watch.speeds.of_present(watch.now), None);
            watch.commit(1, 20, records);
        }
        assert_eq!(watch.shown(), [(1, 100.0)]);
        assert_eq!(watch.speeds.of_present(watch.now), Some(100.0));
        for _ in 0..3 {
            watch.commit(1, 20, 6000);
        }
        assert_eq!(watch.shown(), [(1, 300.0)]);
    }

    #[test]
    fn old_samples_are_forgotten() {
        let mut watch = Watch::default();
        watch.begin_round(1);
        watch.commit(1, 1, 0);
        watch.commit(1, 20, 2000);
        watch.begin_round(2);
        watch.commit(2, 1, 0);
        watch.commit(2, 31 * 60, 31 * 6000);
        assert_eq!(watch.shown(), [(2, 100.0)]);
    }

    /// S002-11: a slow node is told from the others by its figures, without the start of the round.
    #[test]
    fn the_speed_of_each_node_is_that_of_the_last_sample() {
        let node = |id: u32| NodeId::of_address(&format!("host-{id}:1"));
        let mut watch =
            Watch { used: BTreeMap::from([(node(1), 60), (node(2), 20)]), ..Watch::default() };
        watch.begin_round(2);
        watch.commit(2, 60, 80);
        assert_eq!(watch.speeds.of_node(node(1)), None);
        watch.commit(2, 10, 80);
        watch.commit(2, 10, 80);
        let speeds = [1, 2, 3].map(|it| watch.speeds.of_node(node(it)));
        assert_eq!(speeds, [Some(6.0), Some(2.0), None]);
        watch.begin_round(2);
        assert_eq!(watch.speeds.of_node(node(1)), None);
    }
}
