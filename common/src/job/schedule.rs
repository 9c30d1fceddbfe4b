//! The schedule of records: a pure function of the dataset manifest and the seed.
//!
//! The tasks of a pass have a seeded order (Fisher-Yates shuffle with ChaCha8). In synchronous mode each
//! task is assigned to the lane with the fewest records so far (list scheduling, Graham 1969; ties to the
//! lowest lane). The stream of a lane is the concatenation of its tasks, with the records of each task in
//! a seeded order. Micro-batches are consecutive records of the stream, so one may span two tasks. If the
//! records that are left at the end of a stream are fewer than the model takes (`model.min_records`), they are
//! part of the micro-batch before. With `sync.drop_last` a pass ends before the first step in which a lane has no full
//! micro-batch, as it follows from all tasks. A task that is given up is removed from the stream of its lane. It never
//! contributed, so the micro-batches before it do not change.

use std::collections::BTreeSet;
use std::ops::Range;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use sha2::{Digest, Sha256};

use crate::ids::{Lane, Pass, TaskId};
use crate::job::dataset::Manifest;
use crate::job::spec::JobSpec;

/// Returns the order of the training tasks in a pass.
pub fn task_order(manifest: &Manifest, seed: u64, pass: Pass) -> Vec<TaskId> {
    let mut tasks = manifest.training_tasks();
    shuffle(&mut tasks, seed, "tasks", u64::from(pass.0), 0);
    tasks
}

/// Returns the order of the tasks 0, 1, … in a pass of a stream.
pub fn stream_order(tasks: u32, seed: u64, pass: Pass) -> Vec<TaskId> {
    let mut tasks: Vec<TaskId> = (0..tasks).map(TaskId).collect();
    shuffle(&mut tasks, seed, "tasks", u64::from(pass.0), 0);
    tasks
}

/// Returns the order of a task's records in one pass.
pub fn record_order(records: u32, seed: u64, pass: Pass, task: TaskId) -> Vec<u32> {
    let mut order: Vec<u32> = (0..records).collect();
    shuffle(&mut order, seed, "records", u64::from(pass.0), u64::from(task.0));
    order
}

fn shuffle<T>(items: &mut [T], seed: u64, purpose: &str, a: u64, b: u64) {
    let key = Sha256::new()
        .chain_update(purpose)
        .chain_update(seed.to_le_bytes())
        .chain_update(a.to_le_bytes())
        .chain_update(b.to_le_bytes())
        .finalize();
    let mut random = ChaCha8Rng::from_seed(key.into());
    for end in (1..items.len()).rev() {
        // The high half of a 64 × 64 bit product maps to 0 ..= end; its bias is below 2⁻³².
        let pick = (u128::from(random.next_u64()) * (end as u128 + 1)) >> 64;
        items.swap(end, pick as usize);
    }
}

/// Returns the mini-batches of a task, as ranges of its records. The records that are left at the end of the task are
/// part of the mini-batch before, if they are fewer than `min`.
pub fn mini_batches(records: u32, size: u32, min: u32) -> Vec<Range<u32>> {
    let left = records % size;
    let is_joined = size <= records && 0 < left && left < min;
    let count = if is_joined { records / size } else { records.div_ceil(size) };
    let end_of = |index: u32| if index + 1 == count { records } else { (index + 1) * size };
    (0..count).map(|index| index * size..end_of(index)).collect()
}

/// The part of a micro-batch that belongs to one task: positions in the task's record order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPart {
    pub task: TaskId,
    pub positions: Range<u32>,
}

/// The lanes of one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneSchedule {
    lanes: Vec<Vec<(TaskId, u32)>>,
    /// By lane: the start of each task in the stream, including tasks that were given up, and the end of
    /// the stream.
    starts: Vec<Vec<u64>>,
    /// By task: its lane, and its index there.
    places: Vec<(Lane, u32)>,
    /// By lane: the micro-batch that also has the records which are too few for one of their own. It follows from all
    /// tasks of the lane: a task that is given up must not move the end of a micro-batch before it.
    last: Vec<Option<u64>>,
    /// The number of steps of the pass, if the smaller ones at its end are left out. It follows from all tasks, too.
    end: Option<u64>,
    micro_batch: u32,
}

impl LaneSchedule {
    /// Returns the schedule of `pass` of a job.
    pub fn of(spec: &JobSpec, manifest: &Manifest, pass: Pass) -> Self {
        let all = Self::new(manifest, spec.seed, pass, spec.sync.lanes, spec.sync.micro_batch);
        match spec.sync.drop_last {
            true => all.with_full_steps(),
            false => all.with_records_min(spec.model.min_records()),
        }
    }

    /// Assigns the tasks of `pass` to `lanes` lanes.
    pub fn new(manifest: &Manifest, seed: u64, pass: Pass, lanes: u32, micro_batch: u32) -> Self {
        let mut dealt = vec![Vec::new(); lanes as usize];
        let mut starts = vec![Vec::new(); lanes as usize];
        let order = task_order(manifest, seed, pass);
        let tasks = order.iter().map(|task| task.0 as usize + 1).max().unwrap_or(0);
        let mut places = vec![(Lane(lanes), 0); tasks];
        let mut load = BTreeSet::from_iter((0..lanes).map(|lane| (0_u64, lane)));
        for task in order {
            let records = manifest.records_of(task);
            let Some((held, lane)) = load.pop_first() else { break };
            let dealt: &mut Vec<_> = &mut dealt[lane as usize];
            places[task.0 as usize] = (Lane(lane), dealt.len() as u32);
            dealt.push((task, records as u32));
            starts[lane as usize].push(held);
            load.insert((held + records, lane));
        }
        for (end, lane) in load {
            starts[lane as usize].push(end);
        }
        let last = vec![None; lanes as usize];
        Self { lanes: dealt, starts, places, last, end: None, micro_batch }
    }

    /// Leaves no micro-batch with fewer records than `min`, except where a whole lane has fewer, or a task was given
    /// up.
    #[must_use]
    pub fn with_records_min(mut self, min: u32) -> Self {
        let micro_batch = u64::from(self.micro_batch);
        let ends = self.starts.iter().map(|starts| starts.last().copied().unwrap_or(0));
        let last = ends.map(|end| {
            let left = end % micro_batch;
            (micro_batch <= end && 0 < left && left < u64::from(min)).then(|| end / micro_batch - 1)
        });
        self.last = last.collect();
        self
    }

    /// Leaves out the steps at the end in which a lane has no full micro-batch. A task that is given up does not move the
    /// end, so steps before it may be smaller.
    #[must_use]
    pub fn with_full_steps(mut self) -> Self {
        let ends = self.starts.iter().map(|starts| starts.last().copied().unwrap_or(0));
        self.end = ends.map(|end| end / u64::from(self.micro_batch)).min();
        self
    }

    /// Returns the number of records that no step of the pass has, if no task is given up.
    pub fn records_left_out(&self) -> u64 {
        let Some(end) = self.end else { return 0 };
        let ends = self.starts.iter().map(|starts| starts.last().copied().unwrap_or(0));
        ends.map(|all| all - end * u64::from(self.micro_batch)).sum()
    }

    pub fn lanes(&self) -> u32 {
        self.lanes.len() as u32
    }

    /// Returns the number of micro-batches in a lane, without the tasks that were given up.
    pub fn steps_of(&self, lane: Lane, given_up: &BTreeSet<TaskId>) -> u64 {
        let steps = self.records_of(lane, given_up).div_ceil(u64::from(self.micro_batch));
        let steps = self.end.map_or(steps, |end| steps.min(end));
        self.last_of(lane).map_or(steps, |last| steps.min(last + 1))
    }

    /// Returns how many records of a lane's stream come before step `step`, if the stream has as many; for a step after
    /// the end of a pass, those before the end. Returns `u64::MAX` for a step after a micro-batch that also has the records which are too few for one of their own.
    pub fn records_before(&self, lane: Lane, step: u64) -> u64 {
        match self.last_of(lane) {
            Some(last) if last < step => u64::MAX,
            Some(_) | None => {
                let step = self.end.map_or(step, |end| step.min(end));
                step.saturating_mul(u64::from(self.micro_batch))
            }
        }
    }

    /// Returns the number of records of the smallest micro-batch, if no task is given up; `None` without records.
    pub fn records_min(&self) -> Option<u64> {
        let none = BTreeSet::new();
        let of_lane = |lane: Lane| {
            let steps = self.steps_of(lane, &none);
            let ends = self.records_of(lane, &none).min(self.records_before(lane, u64::MAX));
            (0 < steps).then(|| {
                let last = ends - self.records_before(lane, steps - 1);
                last.min(if 1 < steps { u64::from(self.micro_batch) } else { last })
            })
        };
        (0..self.lanes()).filter_map(|lane| of_lane(Lane(lane))).min()
    }

    fn last_of(&self, lane: Lane) -> Option<u64> {
        self.last.get(lane.0 as usize).copied().flatten()
    }

    /// Returns the number of steps in the pass: that of its longest lane, but at least 1, because one step has to
    /// report that all lanes are exhausted.
    pub fn steps(&self, given_up: &BTreeSet<TaskId>) -> u64 {
        let longest = (0..self.lanes()).map(|lane| self.steps_of(Lane(lane), given_up)).max();
        longest.unwrap_or(0).max(1)
    }

    fn records_of(&self, lane: Lane, given_up: &BTreeSet<TaskId>) -> u64 {
        let all = self.starts.get(lane.0 as usize).and_then(|starts| starts.last());
        let removed: u64 = self.gaps(lane, given_up).into_iter().map(|(_, records)| records).sum();
        all.map_or(0, |all| all - removed)
    }

    /// Returns the indices of a lane's tasks that were given up, in order, with their record counts.
    fn gaps(&self, lane: Lane, given_up: &BTreeSet<TaskId>) -> Vec<(usize, u64)> {
        let of_lane = given_up.iter().filter_map(|task| {
            let (its, place) = *self.places.get(task.0 as usize)?;
            let place = place as usize;
            let (_, records) = self.tasks_of(its).get(place)?;
            (its == lane).then_some((place, u64::from(*records)))
        });
        let mut gaps: Vec<_> = of_lane.collect();
        gaps.sort_unstable();
        gaps
    }

    /// Returns the tasks of a lane with their record counts, in order.
    pub fn tasks_of(&self, lane: Lane) -> &[(TaskId, u32)] {
        self.lanes.get(lane.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Returns the micro-batch of a lane at step `step` of the pass; empty once the lane is exhausted.
    pub fn micro_batch(
        &self,
        lane: Lane,
        step: u64,
        given_up: &BTreeSet<TaskId>,
    ) -> Vec<BatchPart> {
        let wanted_start = self.records_before(lane, step);
        let wanted_end = self.records_before(lane, step + 1);
        let mut parts = Vec::new();
        if wanted_start == u64::MAX {
            return parts;
        }
        let (first, mut start) = self.before(lane, wanted_start, given_up);
        for (task, records) in self.tasks_of(lane).iter().skip(first) {
            if given_up.contains(task) {
                continue;
            }
            let end = start + u64::from(*records);
            let (from, to) = (wanted_start.max(start), wanted_end.min(end));
            if from < to {
                let positions = (from - start) as u32..(to - start) as u32;
                parts.push(BatchPart { task: *task, positions });
            }
            if wanted_end <= end {
                break;
            }
            start = end;
        }
        parts
    }

    /// Returns the index of the task with the record at `wanted`, or the end of the lane, and its start
    /// without the tasks that were given up. Does not scan all tasks of the lane.
    fn before(&self, lane: Lane, wanted: u64, given_up: &BTreeSet<TaskId>) -> (usize, u64) {
        let Some(starts) = self.starts.get(lane.0 as usize) else { return (0, 0) };
        let mut removed = 0;
        for (place, records) in self.gaps(lane, given_up) {
            if wanted < starts[place] - removed {
                break;
            }
            removed += records;
        }
        let place = starts.partition_point(|start| *start <= wanted + removed) - 1;
        (place, starts[place] - removed)
    }

    /// Returns how many tasks of the pass are finished, and how many are started, after `steps` steps.
    pub fn progress(&self, steps: u64, given_up: &BTreeSet<TaskId>) -> (u32, u32) {
        let (mut done, mut begun) = (0, 0);
        for (number, lane) in self.lanes.iter().enumerate() {
            let reached = self.records_before(Lane(number as u32), steps);
            let mut start = 0;
            for (_, records) in lane.iter().filter(|(task, _)| !given_up.contains(task)) {
                let end = start + u64::from(*records);
                if end <= reached {
                    done += 1;
                } else if start <= reached {
                    begun += 1;
                }
                start = end;
            }
        }
        (done, begun)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::dataset::Chunk;

    fn manifest(sizes: &[u32]) -> Manifest {
        let chunk =
            |records: &u32| Chunk { file: 0, start: 0, end: 0, first_record: 0, records: *records };
        Manifest {
            chunks: sizes.iter().map(chunk).collect(),
            task_ends: (1..=sizes.len() as u32).collect(),
            ..Manifest::default()
        }
    }

    fn all_records(schedule: &LaneSchedule, given_up: &BTreeSet<TaskId>) -> Vec<(TaskId, u32)> {
        let mut seen = Vec::new();
        for lane in 0..schedule.lanes() {
            for step in 0..schedule.steps(given_up) {
                for part in schedule.micro_batch(Lane(lane), step, given_up) {
                    seen.extend(part.positions.map(|position| (part.task, position)));
                }
            }
        }
        seen.sort_unstable();
        seen
    }

    /// As `drop_last` of a PyTorch `DataLoader`: each step of a pass has all records. Those that are left out are counted,
    /// and are other ones in each pass.
    #[test]
    fn without_the_last_steps_each_step_is_full_and_the_rest_is_counted() {
        let (sizes, none) = ([7, 12, 30, 12, 5, 64, 3, 20], BTreeSet::new());
        let all: u32 = sizes.iter().sum();
        let mut left_out = BTreeSet::new();
        for lanes in [1, 2, 3] {
            for pass in [Pass(0), Pass(1)] {
                let whole = LaneSchedule::new(&manifest(&sizes), 3, pass, lanes, 4);
                let full = whole.clone().with_full_steps();
                let steps = full.steps(&none);
                let records = |lane: u32, step: u64| -> u64 {
                    let parts = full.micro_batch(Lane(lane), step, &none);
                    parts.iter().map(|it| u64::from(it.positions.end - it.positions.start)).sum()
                };
                for lane in 0..lanes {
                    assert!((0..steps).all(|step| records(lane, step) == 4));
                    assert_eq!(
                        (full.steps_of(Lane(lane), &none), records(lane, steps)),
                        (steps, 0)
                    );
                    assert_eq!(full.records_before(Lane(lane), u64::MAX), 4 * steps);
                    let (step, at) = (steps - 1, Lane(lane));
                    assert_eq!(
                        full.micro_batch(at, step, &none),
                        whole.micro_batch(at, step, &none)
                    );
                }
                let trained = all_records(&full, &none);
                assert_eq!(trained.len() as u64 + full.records_left_out(), u64::from(all));
                assert_eq!(full.records_min(), Some(4));
                left_out.insert((lanes, trained));
            }
        }
        assert_eq!(left_out.len(), 6);
        // The next step would not be full.
        let whole = LaneSchedule::new(&manifest(&sizes), 3, Pass(0), 3, 4);
        let steps = whole.clone().with_full_steps().steps(&none);
        let is_full = |lane| whole.records_of(Lane(lane), &none) >= 4 * (steps + 1);
        assert!(!(0..3).all(is_full) && whole.records_left_out() == 0);
    }

    /// A task that is given up late must not move the end of a pass, of which other lanes may have trained the last step.
    #[test]
    fn a_task_that_is_given_up_does_not_move_the_end_of_full_steps() {
        let none = BTreeSet::new();
        let schedule = LaneSchedule::new(&manifest(&[8; 12]), 1, Pass(0), 2, 5).with_full_steps();
        let steps = schedule.steps(&none);
        assert_eq!(steps, 9);
        let given_up = BTreeSet::from([schedule.tasks_of(Lane(0))[5].0]);
        assert_eq!(schedule.steps_of(Lane(1), &given_up), steps);
        assert_eq!(schedule.steps_of(Lane(0), &given_up), 8);
        assert_eq!(schedule.micro_batch(Lane(0), 8, &given_up), []);
    }

    /// I7: each record of each task is computed once in a pass, for any number of lanes.
    #[test]
    fn every_record_is_in_one_micro_batch() {
        let sizes = [7, 1, 30, 12, 5, 64, 3];
        let wanted: Vec<(TaskId, u32)> = sizes
            .iter()
            .enumerate()
            .flat_map(|(task, size)| (0..*size).map(move |it| (TaskId(task as u32), it)))
            .collect();
        for lanes in 1..10 {
            let schedule = LaneSchedule::new(&manifest(&sizes), 3, Pass(2), lanes, 4);
            assert_eq!(all_records(&schedule, &BTreeSet::new()), wanted);
        }
    }

    /// A task that is given up does not change the micro-batches before it in its lane.
    #[test]
    fn giving_up_a_task_keeps_the_micro_batches_before_it() {
        let schedule = LaneSchedule::new(&manifest(&[8; 12]), 1, Pass(0), 2, 4);
        let victim = schedule.tasks_of(Lane(0))[3].0;
        let given_up = BTreeSet::from([victim]);
        for step in 0..6 {
            assert_eq!(
                schedule.micro_batch(Lane(0), step, &given_up),
                schedule.micro_batch(Lane(0), step, &BTreeSet::new())
            );
        }
        assert!(all_records(&schedule, &given_up).iter().all(|(task, _)| *task != victim));
        assert_eq!(all_records(&schedule, &given_up).len(), 11 * 8);
    }

    /// For any tasks that are given up, a lane is the concatenation of the others.
    #[test]
    fn a_lane_holds_the_remaining_tasks_in_order() {
        let sizes = [7, 1, 30, 12, 5, 64, 3, 9];
        for lanes in 1..4 {
            let schedule = LaneSchedule::new(&manifest(&sizes), 3, Pass(0), lanes, 4);
            for bits in 0_u32..1 << sizes.len() {
                let tasks = (0..sizes.len() as u32).filter(|task| bits >> task & 1 == 1);
                let given_up: BTreeSet<TaskId> = tasks.map(TaskId).collect();
                for lane in (0..lanes).map(Lane) {
                    let left = schedule.tasks_of(lane).iter();
                    let left = left.filter(|(task, _)| !given_up.contains(task));
                    let wanted: Vec<(TaskId, u32)> = left
                        .flat_map(|(task, records)| (0..*records).map(|it| (*task, it)))
                        .collect();
                    let steps = schedule.steps_of(lane, &given_up);
                    assert_eq!(steps, wanted.len().div_ceil(4) as u64);
                    let parts = |step| schedule.micro_batch(lane, step, &given_up);
                    let found: Vec<(TaskId, u32)> = (0..steps + 2)
                        .flat_map(parts)
                        .flat_map(|part| part.positions.map(move |it| (part.task, it)))
                        .collect();
                    assert_eq!(found, wanted);
                }
            }
        }
    }

    /// I7: no micro-batch is smaller than the model takes, none lacks a record, and those before the last are as
    /// they were.
    #[test]
    fn records_that_are_too_few_for_a_micro_batch_are_part_of_the_one_before() {
        let none = BTreeSet::new();
        for records in 1..60_u32 {
            let sizes = [records, 9, 4, 13];
            for (lanes, min) in (1..5).flat_map(|lanes| (1..=4).map(move |min| (lanes, min))) {
                let plain = LaneSchedule::new(&manifest(&sizes), 3, Pass(0), lanes, 4);
                let joined = plain.clone().with_records_min(min);
                assert_eq!(all_records(&joined, &none), all_records(&plain, &none));
                for lane in (0..lanes).map(Lane) {
                    let steps = joined.steps_of(lane, &none);
                    let batches = |schedule: &LaneSchedule| -> Vec<Vec<BatchPart>> {
                        (0..steps).map(|step| schedule.micro_batch(lane, step, &none)).collect()
                    };
                    let (found, known) = (batches(&joined), batches(&plain));
                    assert!(joined.micro_batch(lane, steps, &none).is_empty());
                    let before = steps.saturating_sub(1) as usize;
                    assert_eq!(found[..before], known[..before]);
                    let held: u64 = plain.tasks_of(lane).iter().map(|it| u64::from(it.1)).sum();
                    let size = |parts: &Vec<BatchPart>| -> usize {
                        parts.iter().map(|part| part.positions.len()).sum()
                    };
                    let is_large_enough = |parts: &Vec<BatchPart>| min as usize <= size(parts);
                    assert!(held < u64::from(min) || found.iter().all(is_large_enough));
                }
                let smallest = joined.records_min().unwrap();
                assert!(plain.records_min().unwrap() <= smallest);
                assert_eq!(joined.progress(joined.steps(&none), &none).0, 4);
                assert!(min != 1 || joined == plain);
            }
        }
    }

    /// A task that is given up does not change the micro-batches before it, whatever their smallest size.
    #[test]
    fn giving_up_a_task_moves_no_end_of_a_micro_batch_before_it() {
        let sizes = [4, 3, 2, 4, 1, 4, 3];
        for bits in 0_u32..1 << sizes.len() {
            let schedule = LaneSchedule::new(&manifest(&sizes), 3, Pass(0), 1, 4);
            let schedule = schedule.with_records_min(3);
            let tasks = (0..sizes.len() as u32).filter(|task| bits >> task & 1 == 1).map(TaskId);
            let mut given_up: BTreeSet<TaskId> = tasks.collect();
            for (more, _) in schedule.tasks_of(Lane(0)) {
                let known = given_up.clone();
                if !given_up.insert(*more) {
                    continue;
                }
                for step in 0..9 {
                    let before = schedule.micro_batch(Lane(0), step, &known);
                    if before.iter().any(|part| part.task == *more) {
                        break;
                    }
                    assert_eq!(schedule.micro_batch(Lane(0), step, &given_up), before);
                }
                given_up = known;
            }
        }
    }

    #[test]
    fn a_task_has_no_mini_batch_that_is_smaller_than_the_model_takes() {
        for (records, size, min) in (0..40)
            .flat_map(|it| (1..6).flat_map(move |size| (1..=size).map(move |min| (it, size, min))))
        {
            let batches = mini_batches(records, size, min);
            let joined: Vec<u32> = batches.iter().cloned().flatten().collect();
            assert_eq!(joined, (0..records).collect::<Vec<_>>());
            assert!(records < min || batches.iter().all(|it| min <= it.end - it.start));
            let whole = batches.iter().rev().skip(1).all(|it| it.end - it.start == size);
            assert!(whole && (1 < min || batches.len() as u32 == records.div_ceil(size)));
        }
    }

    #[test]
    fn passes_differ_in_order_and_each_pass_is_reproducible() {
        let manifest = manifest(&[5; 40]);
        assert_eq!(task_order(&manifest, 1, Pass(0)), task_order(&manifest, 1, Pass(0)));
        assert_ne!(task_order(&manifest, 1, Pass(0)), task_order(&manifest, 1, Pass(1)));
        assert_ne!(task_order(&manifest, 1, Pass(0)), task_order(&manifest, 2, Pass(0)));
    }

    #[test]
    fn held_out_tasks_are_never_used_for_training() {
        let mut manifest = manifest(&[5; 10]);
        manifest.hold_out(0.2);
        assert_eq!(manifest.held_out, [TaskId(4), TaskId(9)]);
        assert!(!task_order(&manifest, 1, Pass(0)).contains(&TaskId(4)));
        assert_eq!(manifest.training_records(), 40);
    }

    #[test]
    fn progress_counts_finished_and_started_tasks() {
        let schedule = LaneSchedule::new(&manifest(&[8; 4]), 1, Pass(0), 2, 4);
        assert_eq!(schedule.progress(0, &BTreeSet::new()), (0, 2));
        assert_eq!(schedule.progress(2, &BTreeSet::new()), (2, 2));
        assert_eq!(schedule.progress(4, &BTreeSet::new()), (4, 0));
    }
}
