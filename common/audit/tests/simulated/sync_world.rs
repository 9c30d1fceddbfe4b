//! A synchronous job in one thread: lanes that arrive in any order and repeat themselves, tasks that
//! nobody can read, and pservers that go back to a checkpoint with more or fewer slots.

use std::collections::BTreeSet;

use steadfast_audit::{Evidence, Report, Sum, audit};
use steadfast_common::dataset::Manifest;
use steadfast_common::ids::{Generation, Incarnation, Lane, Pass, Slot, TaskId, Version};
use steadfast_common::records::{DiscardedTask, GenerationRecord};
use steadfast_common::schedule::LaneSchedule;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_pserver_core::contribution::{Contributed, LaneEnd, LaneShare};
use steadfast_pserver_core::shard::Shard;

use crate::world::{Dice, Saved, contribution, load_shards, manifest, new_shards, position_of};
use crate::world::{spec, tamper};

/// A guard that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A lane that comes again counts again.
    NoDeduplication,
    /// A step goes on without a lane.
    LaneSkipped,
    /// A slot goes back and keeps its counts.
    CountsNotRestored,
    /// A slot's memory is lost and nobody notices.
    SilentLoss,
    /// Other records counted than the schedule says.
    Exchanged,
}

#[derive(Debug)]
pub struct World {
    pub dice: Dice,
    pub spec: JobSpec,
    pub manifest: Manifest,
    shards: Vec<Shard>,
    saved: Option<Saved>,
    generations: Vec<GenerationRecord>,
    /// Tasks that nobody can read, by pass.
    bad: BTreeSet<(Pass, TaskId)>,
    /// Those that somebody came to.
    given_up: BTreeSet<(Pass, TaskId)>,
    pub mutation: Option<Mutation>,
    pub fired: bool,
}

/// What a lane contributes.
struct Given {
    lane: Lane,
    sum: Sum,
    end: LaneEnd,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let mut spec = spec(Mode::Sync, 3);
        spec.sync.lanes = 1 + dice.roll(5) as u32;
        spec.sync.micro_batch = 1 + dice.roll(9) as u32;
        let tasks = 5 + dice.roll(8);
        let manifest = manifest(&mut dice, tasks);
        let trained = manifest.training_tasks();
        let some = |_| Some((Pass(dice.roll(3) as u32), *dice.pick(&trained)?));
        let bad = (0..4).filter_map(some).collect();
        let shards = new_shards(&spec, 1 + dice.roll(3) as u32);
        let mut world = Self {
            shards,
            saved: None,
            generations: Vec::new(),
            given_up: BTreeSet::new(),
            mutation: None,
            fired: false,
            dice,
            spec,
            manifest,
            bad,
        };
        world.begin_generation();
        world
    }

    /// Lets the job run for some steps, or to its end; then takes a checkpoint.
    pub fn run(&mut self) {
        let steps = match self.dice.once_in(2) {
            true => usize::MAX,
            false => self.dice.roll(60),
        };
        for _ in 0..steps {
            if self.shards[0].position().pass == Pass(3) {
                break;
            }
            self.step();
            match self.dice.roll(12) {
                0 => self.save(),
                1 if self.dice.once_in(3) && !self.fired => self.go_back(),
                2 => self.forget_silently(),
                _ => {}
            }
        }
        self.save();
    }

    fn step(&mut self) {
        let position = self.shards[0].position().clone();
        let step = position.version.0 - position.pass_start.0;
        let given = self.lanes(position.pass, step);
        for slot in 0..self.shards.len() {
            self.step_of(slot, position.version, &given);
        }
    }

    /// What the lanes compute in a step. A task that cannot be read is given up, and the lane goes on
    /// without it.
    fn lanes(&mut self, pass: Pass, step: u64) -> Vec<Given> {
        let (lanes, micro_batch) = (self.spec.sync.lanes, self.spec.sync.micro_batch);
        let schedule = LaneSchedule::new(&self.manifest, self.spec.seed, pass, lanes, micro_batch);
        let ended = self.shards[0].cut().ended;
        let mut given = Vec::new();
        for lane in (0..lanes).map(Lane).filter(|lane| !ended.contains(lane)) {
            let (pieces, given_up) = loop {
                let given_up = self.given_up_in(pass);
                let pieces = schedule.micro_batch(lane, step, &given_up);
                let bad: Vec<(Pass, TaskId)> = pieces
                    .iter()
                    .map(|piece| (pass, piece.task))
                    .filter(|it| self.bad.contains(it))
                    .collect();
                if bad.is_empty() {
                    break (pieces, given_up);
                }
                self.given_up.extend(bad);
            };
            let sum = pieces.into_iter().fold(Sum::default(), |sum, piece| {
                sum.and(Sum::of_piece(pass, piece.task, piece.positions))
            });
            let is_last = schedule.steps_of(lane, &given_up) <= step + 1;
            let end = if is_last { LaneEnd::LastOfPass } else { LaneEnd::MoreToCome };
            given.push(Given { lane, sum, end });
        }
        self.dice.shuffle(&mut given);
        given
    }

    fn given_up_in(&self, pass: Pass) -> BTreeSet<TaskId> {
        self.given_up.iter().filter(|it| it.0 == pass).map(|it| it.1).collect()
    }

    /// One slot's step: lanes in any order, some of them again and again.
    fn step_of(&mut self, slot: usize, version: Version, given: &[Given]) {
        let shard = &mut self.shards[slot];
        let mut again = Sum::default();
        let (mut skipped, mut exchanged) = (false, false);
        for Given { lane, sum, end } in given {
            let mut sum = *sum;
            let may_fire = !self.fired && 0 < sum.records && self.dice.once_in(40);
            if may_fire && self.mutation == Some(Mutation::LaneSkipped) {
                (sum, skipped) = (Sum::default(), true);
            }
            if may_fire && self.mutation == Some(Mutation::Exchanged) {
                (sum.checksum, exchanged) = (sum.checksum.wrapping_add(1), true);
            }
            // A lane that goes on must hold records; one that was skipped holds none of its own.
            let records = if skipped { sum.records.max(1) } else { sum.records };
            let contribution = contribution(shard, records, sum.checksum);
            let share = [LaneShare { records, checksum: sum.checksum, end: *end }];
            let outcome = shard.contribute(version, *lane, &share, contribution.clone());
            let outcome = outcome.expect("honest lanes are taken");
            assert_ne!(outcome, Contributed::Duplicate);
            if self.dice.once_in(5) {
                let outcome = shard.contribute(version, *lane, &share, contribution);
                assert_eq!(outcome, Ok(Contributed::Duplicate));
                if may_fire && self.mutation == Some(Mutation::NoDeduplication) {
                    again = again.and(sum);
                }
            }
            self.fired |= skipped || exchanged;
        }
        assert!(shard.is_step_complete());
        let pass = shard.position().pass;
        shard.finish_step(None);
        self.fired |= 0 < again.records;
        tamper(&self.spec, shard, |cut| {
            for counted in &mut cut.counts {
                if 0 < again.records {
                    counted.count(pass, again.records, again.checksum);
                }
            }
        });
    }

    fn save(&mut self) {
        let cuts: Vec<_> = self.shards.iter().map(Shard::cut).collect();
        self.saved = Some(Saved {
            id: "checkpoint".to_owned(),
            generation: Generation(self.generations.len() as u64),
            position: position_of(&cuts[0]),
            cuts,
            queue: None,
        });
    }

    fn go_back(&mut self) {
        let before: Vec<_> = self.shards.iter().map(Shard::cut).collect();
        let slots = match self.mutation {
            Some(Mutation::CountsNotRestored) => before.len() as u32,
            Some(_) | None => 1 + self.dice.roll(3) as u32,
        };
        self.shards = match &self.saved {
            Some(saved) => load_shards(&self.spec, &saved.position, &saved.cuts, slots),
            None => new_shards(&self.spec, slots),
        };
        if self.mutation == Some(Mutation::CountsNotRestored) {
            let slot = self.dice.roll(before.len());
            let kept = before[slot].counts.clone();
            tamper(&self.spec, &mut self.shards[slot], |cut| {
                self.fired |= cut.counts[0].records() != kept[0].records();
                cut.counts = kept;
            });
        }
        self.begin_generation();
    }

    fn forget_silently(&mut self) {
        let Some(saved) = self.saved.as_ref().filter(|it| it.cuts.len() == self.shards.len())
        else {
            return;
        };
        if self.mutation != Some(Mutation::SilentLoss) || self.fired {
            return;
        }
        let slot = self.dice.roll(self.shards.len());
        let counts = saved.cuts[slot].counts.clone();
        tamper(&self.spec, &mut self.shards[slot], |cut| {
            self.fired = cut.counts[0].records() != counts[0].records();
            cut.counts = counts;
        });
    }

    fn begin_generation(&mut self) {
        self.generations.push(GenerationRecord {
            generation: Generation(self.generations.len() as u64 + 1),
            slots: (0..self.shards.len()).map(|it| Incarnation(it as i64)).collect(),
            checkpoint: self.saved.as_ref().map(|it| it.id.clone()),
            kept: Vec::<Slot>::new(),
            reason: "a pserver was lost".to_owned(),
        });
    }

    pub fn evidence(&self) -> Evidence {
        let listed = |(pass, task): &(Pass, TaskId)| DiscardedTask {
            pass: *pass,
            task: *task,
            reason: "cannot be read".to_owned(),
            records: Vec::new(),
        };
        Evidence {
            spec: self.spec.clone(),
            manifest: self.manifest.clone(),
            checkpoint: self.saved.as_ref().map(Saved::evidence),
            discarded: self.given_up.iter().map(listed).collect(),
            generations: self.generations.clone(),
            result: None,
        }
    }

    pub fn audit(&self) -> Report {
        audit(&self.evidence())
    }
}
