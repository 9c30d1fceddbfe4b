//! Measures how many records the workers of an elastic job use in a second, by the number of workers.
//!
//! A sample is what was used between two commits of one round that lie at least [`WINDOW`] apart. The time before the
//! first commit of a round does not count: workers load data and compile their models then.

use std::collections::{BTreeMap, VecDeque};

use steadfast_common::ids::{Millis, NodeId, Phase};
use steadfast_common::records::commits::CommitRecord;

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

/// The samples of one master. A new one measures anew.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speeds {
    /// The commit at which the present sample began, and when it was decided.
    window: Option<(CommitRecord, Millis)>,
    samples: BTreeMap<u32, VecDeque<(f64, Millis)>>,
    /// Counts the samples of the present round.
    of_round: usize,
    /// Counts the records that each node has used since the present sample began.
    used: BTreeMap<NodeId, u64>,
    /// Holds what the nodes of the present round used in a second, in the last sample.
    of_nodes: BTreeMap<NodeId, f64>,
}

impl Speeds {
    /// Notes a commit of a round of so many workers, and how many records each node has used for it, if that is known.
    pub fn note(
        &mut self,
        now: Millis,
        commit: &CommitRecord,
        workers: u32,
        used: BTreeMap<NodeId, u64>,
    ) {
        let is_first = commit.id.phase == Phase(0);
        let begun = self.window.as_ref().filter(|(begun, _)| begun.id.round == commit.id.round);
        let Some((begun, since)) = begun else {
            self.window = (!is_first).then(|| (commit.clone(), now));
            self.of_round = 0;
            self.used.clear();
            self.of_nodes.clear();
            return;
        };
        for (node, used) in used {
            *self.used.entry(node).or_default() += used;
        }
        let time = now.0.saturating_sub(since.0);
        if time < WINDOW.0 {
            return;
        }
        let records = commit.position.seen.saturating_sub(begun.position.seen);
        let speed = records as f64 / (time as f64 / 1000.0);
        let samples = self.samples.entry(workers).or_default();
        samples.push_back((speed, now));
        if SAMPLES < samples.len() {
            samples.pop_front();
        }
        self.window = Some((commit.clone(), now));
        self.of_round += 1;
        let speed = |used: u64| used as f64 / (time as f64 / 1000.0);
        let used = std::mem::take(&mut self.used);
        self.of_nodes = used.into_iter().map(|(node, used)| (node, speed(used))).collect();
    }

    /// Returns how many records a node of the present round used in a second, in a job whose order is dynamic.
    pub fn of_node(&self, node: NodeId) -> Option<f64> {
        self.of_nodes.get(&node).copied()
    }

    /// Returns the speed of the present round, once it has been measured so often that one sample does not decide it.
    pub fn of_round(&self, now: Millis, workers: u32) -> Option<f64> {
        let speeds = self.all(now).into_iter().filter(|_| SAMPLES <= self.of_round);
        speeds.filter(|it| it.workers == workers).map(|it| it.records_per_second).next()
    }

    /// Returns how often the present round was measured.
    pub fn samples_of_round(&self) -> usize {
        self.of_round
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
    use steadfast_common::ids::Round;
    use steadfast_common::records::commits::{CommitId, DataPosition};

    use super::*;

    /// A master at whose commits the time passes.
    #[derive(Default)]
    struct Watch {
        speeds: Speeds,
        now: Millis,
        id: CommitId,
        seen: u64,
        /// Says what each node uses for a commit.
        used: BTreeMap<NodeId, u64>,
    }

    impl Watch {
        fn begin_round(&mut self, workers: u32) {
            self.id = CommitId { round: Round(self.id.round.0 + 1), phase: Phase(0) };
            self.note(workers);
        }

        /// Some seconds later the workers have used more records.
        fn commit(&mut self, workers: u32, seconds: u64, records: u64) {
            self.now.0 += seconds * 1000;
            self.seen += records;
            self.id.phase.0 += 1;
            self.note(workers);
        }

        fn note(&mut self, workers: u32) {
            let position = DataPosition { seen: self.seen, ..DataPosition::default() };
            let commit = CommitRecord::new(self.id, position);
            self.speeds.note(self.now, &commit, workers, self.used.clone());
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
            assert_eq!(watch.speeds.of_round(watch.now, 1), None);
            watch.commit(1, 20, records);
        }
        assert_eq!(watch.shown(), [(1, 100.0)]);
        assert_eq!(watch.speeds.of_round(watch.now, 1), Some(100.0));
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
