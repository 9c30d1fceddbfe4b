//! Simulates a synchronous job in one thread: lanes that arrive in any order and as duplicates, tasks
//! that cannot be read, and restores of a checkpoint with more or fewer slots.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_audit::{Evidence, Report, Sum, audit};
use steadfast_common::contribution::{LaneEnd, LaneShare};
use steadfast_common::dataset::Manifest;
use steadfast_common::given_up::GivenUpRecord;
use steadfast_common::ids::{Generation, Incarnation, Lane, Pass, Slot, TaskId, Version};
use steadfast_common::placement::PlacementRecord;
use steadfast_common::records::GenerationRecord;
use steadfast_common::schedule::LaneSchedule;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_pserver_core::contribution::Contributed;
use steadfast_pserver_core::shard::Shard;

use crate::world::{Rng, Saved, contribution, load_shards, manifest, new_shards};
use crate::world::{snapshot, spec, tamper};

/// A guard that the simulation leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A duplicate of a lane is applied again.
    NoDeduplication,
    /// A step completes without a lane.
    LaneSkipped,
    /// A restored slot keeps its applied records.
    CountsNotRestored,
    /// A slot's memory is lost without a new generation.
    SilentLoss,
    /// Other records are applied than the schedule says.
    Exchanged,
}

#[derive(Debug)]
pub struct SyncWorld {
    pub rng: Rng,
    pub spec: JobSpec,
    pub manifest: Manifest,
    shards: Vec<Shard>,
    saved: Option<Saved>,
    generations: Vec<GenerationRecord>,
    /// Tasks that cannot be read, by pass.
    bad: BTreeSet<(Pass, TaskId)>,
    /// The tasks of `bad` that a lane has reached.
    given_up: BTreeSet<(Pass, TaskId)>,
    pub mutation: Option<Mutation>,
    pub fired: bool,
}

/// The contribution of a lane.
struct Given {
    lane: Lane,
    sum: Sum,
    end: LaneEnd,
}

impl SyncWorld {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut spec = spec(Mode::Sync, 3);
        spec.sync.lanes = 1 + rng.below(5) as u32;
        spec.sync.micro_batch = 1 + rng.below(9) as u32;
        spec.model.min_records = Some(1 + rng.below(spec.sync.micro_batch as usize) as u32);
        let tasks = 5 + rng.below(8);
        let manifest = manifest(&mut rng, tasks);
        let trained = manifest.training_tasks();
        let some = |_| Some((Pass(rng.below(3) as u32), *rng.pick(&trained)?));
        let bad = (0..4).filter_map(some).collect();
        let shards = new_shards(&spec, 1 + rng.below(3) as u32);
        let mut world = Self {
            shards,
            saved: None,
            generations: Vec::new(),
            given_up: BTreeSet::new(),
            mutation: None,
            fired: false,
            rng,
            spec,
            manifest,
            bad,
        };
        world.begin_generation();
        world
    }

    /// Runs the job for some steps, or to its end; then takes a checkpoint.
    pub fn run(&mut self) {
        let steps = match self.rng.once_in(2) {
            true => usize::MAX,
            false => self.rng.below(60),
        };
        for _ in 0..steps {
            if self.shards[0].blocks().position().pass == Pass(3) {
                break;
            }
            self.step();
            match self.rng.below(12) {
                0 => self.save(),
                1 if self.rng.once_in(3) && !self.fired => self.restore(),
                2 => self.lose_memory(),
                _ => {}
            }
        }
        self.save();
    }

    fn step(&mut self) {
        let position = self.shards[0].blocks().position();
        let step = position.version.0 - position.pass_start.0;
        let given = self.lanes(position.pass, step);
        for slot in 0..self.shards.len() {
            self.step_of(slot, position.version, &given);
        }
    }

    /// The contributions of all lanes to a step. A task that cannot be read is given up, and the lane
    /// continues without it.
    fn lanes(&mut self, pass: Pass, step: u64) -> Vec<Given> {
        let lanes = self.spec.sync.lanes;
        let schedule = LaneSchedule::of(&self.spec, &self.manifest, pass);
        let ended = snapshot(&mut self.shards[0]).exhausted;
        let mut given = Vec::new();
        for lane in (0..lanes).map(Lane).filter(|lane| !ended.contains(lane)) {
            let (ranges, given_up) = loop {
                let given_up = self.given_up_in(pass);
                let ranges = schedule.micro_batch(lane, step, &given_up);
                let bad: Vec<(Pass, TaskId)> = ranges
                    .iter()
                    .map(|range| (pass, range.task))
                    .filter(|it| self.bad.contains(it))
                    .collect();
                if bad.is_empty() {
                    break (ranges, given_up);
                }
                self.given_up.extend(bad);
            };
            let sum = ranges.into_iter().fold(Sum::default(), |sum, range| {
                sum.and(Sum::of_range(pass, range.task, range.positions))
            });
            let is_last = schedule.steps_of(lane, &given_up) <= step + 1;
            let end = if is_last { LaneEnd::LastOfPass } else { LaneEnd::MoreToCome };
            given.push(Given { lane, sum, end });
        }
        self.rng.shuffle(&mut given);
        given
    }

    fn given_up_in(&self, pass: Pass) -> BTreeSet<TaskId> {
        self.given_up.iter().filter(|it| it.0 == pass).map(|it| it.1).collect()
    }

    /// One slot's step: lanes in any order, some of them sent twice.
    fn step_of(&mut self, slot: usize, version: Version, given: &[Given]) {
        let shard = self.shards[slot].as_sync_mut().expect("the job is synchronous");
        let mut again = Sum::default();
        let (mut skipped, mut exchanged) = (false, false);
        for Given { lane, sum, end } in given {
            let mut sum = *sum;
            let may_fire = !self.fired && 0 < sum.records && self.rng.once_in(40);
            if may_fire && self.mutation == Some(Mutation::LaneSkipped) {
                (sum, skipped) = (Sum::default(), true);
            }
            if may_fire && self.mutation == Some(Mutation::Exchanged) {
                (sum.checksum, exchanged) = (sum.checksum.wrapping_add(1), true);
            }
            // A lane that continues must hold records, also one whose own records are skipped.
            let records = if skipped { sum.records.max(1) } else { sum.records };
            let contribution = contribution(shard.blocks(), records, sum.checksum);
            let share = LaneShare { records: records as u32, checksum: sum.checksum, end: *end };
            let outcome = shard.contribute(version, *lane, &[share], contribution.clone());
            let outcome = outcome.expect("valid lanes are accepted");
            assert_ne!(outcome, Contributed::Duplicate);
            if self.rng.once_in(5) {
                let outcome = shard.contribute(version, *lane, &[share], contribution);
                assert_eq!(outcome, Ok(Contributed::Duplicate));
                if may_fire && self.mutation == Some(Mutation::NoDeduplication) {
                    again = again.and(sum);
                }
            }
            self.fired |= skipped || exchanged;
        }
        assert!(shard.is_step_complete());
        let pass = shard.blocks().position().pass;
        shard.finish_step(None).unwrap();
        self.fired |= 0 < again.records;
        tamper(&self.spec, &mut self.shards[slot], |snapshot| {
            for counted in &mut snapshot.applied {
                if 0 < again.records {
                    counted.count(pass, again.records, again.checksum);
                }
            }
        });
    }

    fn save(&mut self) {
        let snapshots: Vec<_> = self.shards.iter_mut().map(snapshot).collect();
        self.saved = Some(Saved {
            id: "checkpoint".to_owned(),
            generation: Generation(self.generations.len() as u64),
            position: snapshots[0].position,
            exhausted: snapshots[0].exhausted.iter().copied().collect(),
            snapshots,
            queue: None,
        });
    }

    fn restore(&mut self) {
        let before: Vec<_> = self.shards.iter_mut().map(snapshot).collect();
        let slots = match self.mutation {
            Some(Mutation::CountsNotRestored) => before.len() as u32,
            Some(_) | None => 1 + self.rng.below(3) as u32,
        };
        self.shards = match &self.saved {
            Some(saved) => load_shards(&self.spec, saved, slots),
            None => new_shards(&self.spec, slots),
        };
        if self.mutation == Some(Mutation::CountsNotRestored) {
            let slot = self.rng.below(before.len());
            let kept = before[slot].applied.clone();
            tamper(&self.spec, &mut self.shards[slot], |snapshot| {
                self.fired |= snapshot.applied[0].records() != kept[0].records();
                snapshot.applied = kept;
            });
        }
        self.begin_generation();
    }

    fn lose_memory(&mut self) {
        let Some(saved) = self.saved.as_ref().filter(|it| it.snapshots.len() == self.shards.len())
        else {
            return;
        };
        if self.mutation != Some(Mutation::SilentLoss) || self.fired {
            return;
        }
        let slot = self.rng.below(self.shards.len());
        let counts = saved.snapshots[slot].applied.clone();
        tamper(&self.spec, &mut self.shards[slot], |snapshot| {
            self.fired = snapshot.applied[0].records() != counts[0].records();
            snapshot.applied = counts;
        });
    }

    fn begin_generation(&mut self) {
        self.generations.push(GenerationRecord {
            generation: Generation(self.generations.len() as u64 + 1),
            slots: (0..self.shards.len()).map(|it| Incarnation(it as i64)).collect(),
            placement: PlacementRecord::LargestFirst { slots: self.shards.len() as u32 },
            checkpoint: self.saved.as_ref().map(|it| it.id.clone()),
            kept: Vec::<Slot>::new(),
            reason: "a pserver was lost".to_owned(),
        });
    }

    pub fn evidence(&self) -> Evidence {
        let mut discarded = BTreeMap::<TaskId, GivenUpRecord>::new();
        for (pass, task) in &self.given_up {
            let record = discarded.remove(task).unwrap_or_default();
            discarded.insert(*task, record.and(*pass, "cannot be read"));
        }
        Evidence {
            code_changes: Vec::new(),
            spec: self.spec.clone(),
            manifest: self.manifest.clone(),
            stream: None,
            checkpoint: self.saved.as_ref().map(Saved::evidence),
            discarded,
            generations: self.generations.clone(),
            result: None,
        }
    }

    pub fn audit(&self) -> Report {
        audit(&self.evidence())
    }
}
