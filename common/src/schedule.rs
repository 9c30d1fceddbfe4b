//! Which records are computed when: a pure function of the dataset manifest and the seed.
//!
//! The tasks of a pass come in a seeded order (Fisher-Yates shuffle over ChaCha8). In synchronous
//! mode each task goes to the lane that has the fewest records so far (list scheduling, Graham
//! 1969; ties to the lowest lane). A lane's stream is its tasks one after the other, the records of
//! a task in a seeded order of their own; micro-batches are cut from the stream, so one may span
//! two tasks. A task that is given up drops out of its lane's stream. It never contributed, so what
//! was computed before it stays as it was.

use std::collections::BTreeSet;
use std::ops::Range;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use sha2::{Digest, Sha256};

use crate::dataset::Manifest;
use crate::ids::{Lane, Pass, TaskId};

/// The order in which a pass goes through the training tasks.
pub fn task_order(manifest: &Manifest, seed: u64, pass: Pass) -> Vec<TaskId> {
    let mut tasks = manifest.training_tasks();
    shuffle(&mut tasks, seed, "tasks", u64::from(pass.0), 0);
    tasks
}

/// The order of a task's records in one pass.
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

/// A part of one task that belongs to a micro-batch: positions in the task's record order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub task: TaskId,
    pub positions: Range<u32>,
}

/// The lanes of one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneSchedule {
    lanes: Vec<Vec<(TaskId, u32)>>,
    /// Where each task of a lane starts in the lane's stream, while none is given up.
    starts: Vec<Vec<u64>>,
    micro_batch: u32,
}

impl LaneSchedule {
    /// Deals the tasks of `pass` to `lanes` lanes.
    pub fn new(manifest: &Manifest, seed: u64, pass: Pass, lanes: u32, micro_batch: u32) -> Self {
        let mut dealt = vec![Vec::new(); lanes as usize];
        let mut starts = vec![Vec::new(); lanes as usize];
        let mut load = BTreeSet::from_iter((0..lanes).map(|lane| (0_u64, lane)));
        for task in task_order(manifest, seed, pass) {
            let records = manifest.records_of(task);
            let Some((held, lane)) = load.pop_first() else { break };
            dealt[lane as usize].push((task, records as u32));
            starts[lane as usize].push(held);
            load.insert((held + records, lane));
        }
        Self { lanes: dealt, starts, micro_batch }
    }

    /// Number of lanes.
    pub fn lanes(&self) -> u32 {
        self.lanes.len() as u32
    }

    /// Micro-batches in a lane, without the tasks that were given up.
    pub fn steps_of(&self, lane: Lane, given_up: &BTreeSet<TaskId>) -> u64 {
        self.records_of(lane, given_up).div_ceil(u64::from(self.micro_batch))
    }

    /// Steps in the pass: those of its longest lane, and at least the one that says that all
    /// lanes are dry.
    pub fn steps(&self, given_up: &BTreeSet<TaskId>) -> u64 {
        let longest = (0..self.lanes()).map(|lane| self.steps_of(Lane(lane), given_up)).max();
        longest.unwrap_or(0).max(1)
    }

    fn records_of(&self, lane: Lane, given_up: &BTreeSet<TaskId>) -> u64 {
        self.tasks_of(lane)
            .iter()
            .filter(|(task, _)| !given_up.contains(task))
            .map(|(_, records)| u64::from(*records))
            .sum()
    }

    /// Tasks of a lane with their record counts, in order.
    pub fn tasks_of(&self, lane: Lane) -> &[(TaskId, u32)] {
        self.lanes.get(lane.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// What lane `lane` computes at step `step` of the pass; empty once the lane is dry.
    pub fn micro_batch(&self, lane: Lane, step: u64, given_up: &BTreeSet<TaskId>) -> Vec<Piece> {
        let wanted_start = step * u64::from(self.micro_batch);
        let wanted_end = wanted_start + u64::from(self.micro_batch);
        let mut pieces = Vec::new();
        let (first, mut start) = self.before(lane, wanted_start, given_up);
        for (task, records) in self.tasks_of(lane).iter().skip(first) {
            if given_up.contains(task) {
                continue;
            }
            let end = start + u64::from(*records);
            let (from, to) = (wanted_start.max(start), wanted_end.min(end));
            if from < to {
                let positions = (from - start) as u32..(to - start) as u32;
                pieces.push(Piece { task: *task, positions });
            }
            if wanted_end <= end {
                break;
            }
            start = end;
        }
        pieces
    }

    /// A task of the lane from which on to look for the record at `wanted`, and where it starts.
    /// While no task is given up the starts are known, and a lane of many tasks costs no more.
    fn before(&self, lane: Lane, wanted: u64, given_up: &BTreeSet<TaskId>) -> (usize, u64) {
        match self.starts.get(lane.0 as usize) {
            Some(starts) if given_up.is_empty() => {
                let first = starts.partition_point(|start| *start <= wanted).saturating_sub(1);
                (first, starts.get(first).copied().unwrap_or(0))
            }
            Some(_) | None => (0, 0),
        }
    }

    /// How many of the pass's tasks are wholly computed, and how many begun, after `steps` steps.
    pub fn progress(&self, steps: u64, given_up: &BTreeSet<TaskId>) -> (u32, u32) {
        let reached = steps * u64::from(self.micro_batch);
        let (mut done, mut begun) = (0, 0);
        for lane in &self.lanes {
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
    use crate::dataset::Chunk;

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
                for piece in schedule.micro_batch(Lane(lane), step, given_up) {
                    seen.extend(piece.positions.map(|position| (piece.task, position)));
                }
            }
        }
        seen.sort_unstable();
        seen
    }

    /// I7: each record of each task is computed once a pass, for any number of lanes.
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

    /// A task that is given up changes nothing of what came before it in its lane.
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

    #[test]
    fn passes_differ_in_order_and_a_pass_repeats_itself() {
        let manifest = manifest(&[5; 40]);
        assert_eq!(task_order(&manifest, 1, Pass(0)), task_order(&manifest, 1, Pass(0)));
        assert_ne!(task_order(&manifest, 1, Pass(0)), task_order(&manifest, 1, Pass(1)));
        assert_ne!(task_order(&manifest, 1, Pass(0)), task_order(&manifest, 2, Pass(0)));
    }

    #[test]
    fn held_out_tasks_are_never_trained_on() {
        let mut manifest = manifest(&[5; 10]);
        manifest.hold_out(0.2);
        assert_eq!(manifest.held_out, [TaskId(4), TaskId(9)]);
        assert!(!task_order(&manifest, 1, Pass(0)).contains(&TaskId(4)));
        assert_eq!(manifest.training_records(), 40);
    }

    #[test]
    fn progress_counts_finished_and_begun_tasks() {
        let schedule = LaneSchedule::new(&manifest(&[8; 4]), 1, Pass(0), 2, 4);
        assert_eq!(schedule.progress(0, &BTreeSet::new()), (0, 2));
        assert_eq!(schedule.progress(2, &BTreeSet::new()), (2, 2));
        assert_eq!(schedule.progress(4, &BTreeSet::new()), (4, 0));
    }
}
