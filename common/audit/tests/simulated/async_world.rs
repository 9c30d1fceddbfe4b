//! An asynchronous job in one thread: real queues, real shards, trainers that die, come too late and
//! repeat themselves, checkpoints cut slot by slot, and pservers that lose their memory.

mod mutants;

use std::collections::{BTreeMap, BTreeSet};

use steadfast_audit::{Evidence, Report, audit};
use steadfast_common::dataset::Manifest;
use steadfast_common::ids::{Generation, Incarnation, Pass, RequestId, Slot, TaskId, TrainerId};
use steadfast_common::records::{
    CheckpointRecord, DispatchRecord, GenerationRecord, JobOutcome, QueueSnapshot, ResultRecord,
};
use steadfast_common::schedule::task_order;
use steadfast_common::spec::{JobSpec, LostPserver, Mode};
use steadfast_common::tally::{TaskPiece, checksum};
use steadfast_master_core::ledger::{
    Blame, Fact, Ledger, Limits, Next, Report as Told, Request, Wants,
};
use steadfast_pserver_core::contribution::{Contributed, Refusal};
use steadfast_pserver_core::shard::{self, Shard};
use uuid::Uuid;

use crate::etcd::{Etcd, put};
use crate::world::{Dice, Saved, contribution, load_shard, load_shards, manifest, new_shards};
use crate::world::{position_of, spec, tamper};

/// A guard that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A piece that comes again counts again.
    NoDeduplication,
    /// A report counts under whatever attempt it comes.
    NoAttemptCheck,
    /// A slot that goes back keeps its sums.
    TalliesNotRestored,
    /// Slots go back, and the queues do not.
    QueueNotRestored,
    /// A slot's memory is lost and nobody notices.
    SilentLoss,
    /// Other records counted than the name says.
    Exchanged,
    /// A checkpoint is committed although a task was given up between its queues and its shards.
    GivenUpWhileCut,
}

#[derive(Clone, Debug)]
struct Held {
    dispatch: DispatchRecord,
    next: usize,
    acknowledged: BTreeSet<usize>,
    /// After how many pieces it fails, if it does.
    fails_at: Option<usize>,
}

#[derive(Debug)]
pub struct World {
    pub dice: Dice,
    pub spec: JobSpec,
    pub manifest: Manifest,
    pub etcd: Etcd,
    pub ledger: Ledger,
    pub shards: Vec<Shard>,
    pub saved: Vec<Saved>,
    pub generations: Vec<GenerationRecord>,
    limits: Limits,
    holder: u128,
    trainers: BTreeMap<TrainerId, Option<Held>>,
    requests: u128,
    /// Pieces that were sent in this generation, and may come again.
    sent: Vec<TaskPiece>,
    /// A checkpoint on its way: the queues, and what was cut so far.
    cutting: Option<(QueueSnapshot, BTreeMap<usize, shard::Cut>)>,
    /// Tasks that nobody can read.
    pub bad: BTreeSet<TaskId>,
    pub mutation: Option<Mutation>,
    /// Whether the missing guard mattered.
    pub fired: bool,
    /// Reports of trainers of a generation that is over.
    late: Vec<DispatchRecord>,
    incarnations: i64,
    pub over: bool,
}

fn trainer(number: usize) -> TrainerId {
    TrainerId(Uuid::from_u128(number as u128 + 1))
}

impl World {
    pub fn new(seed: u64, policy: LostPserver) -> Self {
        let mut dice = Dice::new(seed);
        let mut spec = spec(Mode::Async, 3);
        spec.asynchronous.lost_pserver = policy;
        (spec.asynchronous.batch, spec.asynchronous.push_every) = (3, 2);
        let tasks = 6 + dice.roll(6);
        let manifest = manifest(&mut dice, tasks);
        let trained = manifest.training_tasks();
        let bad = (0..dice.roll(3)).filter_map(|_| dice.pick(&trained).copied()).collect();
        let slots = 1 + dice.roll(3) as u32;
        let limits = Limits { passes: 3, failures_max: 1, trainers: 3, deadline_ms: 1 };
        let ledger = Ledger::new(&|pass| task_order(&manifest, spec.seed, pass));
        let mut world = Self {
            shards: new_shards(&spec, slots),
            trainers: (0..3).map(|it| (trainer(it), None)).collect(),
            etcd: Etcd::new(),
            saved: Vec::new(),
            generations: Vec::new(),
            holder: 1,
            requests: 0,
            sent: Vec::new(),
            cutting: None,
            mutation: None,
            fired: false,
            late: Vec::new(),
            incarnations: 0,
            over: false,
            dice,
            spec,
            manifest,
            ledger,
            limits,
            bad,
        };
        world.etcd.seize(1);
        world.begin_generation(None, Vec::new(), Vec::new());
        world
    }

    /// Lets the job run with faults, then to its end without.
    pub fn run(&mut self) {
        for _ in 0..self.dice.roll(900) {
            if self.over {
                break;
            }
            self.step();
        }
        let mut patience = 0;
        while !self.over {
            patience += 1;
            assert!(patience < 100_000, "the job does not end");
            self.work();
        }
        self.cutting = None;
        self.begin_checkpoint();
        while self.cutting.is_some() {
            self.cut_one();
        }
    }

    pub fn step(&mut self) {
        match self.dice.roll(60) {
            0 => self.expire(),
            1 => self.lose_trainer(),
            2 => self.begin_checkpoint(),
            3 | 4 => self.cut_one(),
            5 if self.dice.once_in(3) => self.lose_pserver(),
            6 if self.dice.once_in(4) => self.change_master(),
            7..=12 => self.repeat_a_piece(),
            13 => self.mutate(),
            _ => self.work(),
        }
    }

    pub fn commit(&mut self, facts: &[Fact]) {
        let ops = self.etcd.ops_of(self.ledger.head().round, facts);
        self.etcd.commit(self.holder, ops);
        self.evolve(facts);
    }

    fn evolve(&mut self, facts: &[Fact]) {
        let (manifest, seed) = (&self.manifest, self.spec.seed);
        let order_of = |pass: Pass| task_order(manifest, seed, pass);
        facts.iter().for_each(|fact| self.ledger.evolve(fact, &order_of));
    }

    fn pieces(&self, dispatch: &DispatchRecord) -> Vec<TaskPiece> {
        let records = self.manifest.records_of(dispatch.task) as u32;
        let push = self.spec.asynchronous.batch * self.spec.asynchronous.push_every;
        let piece = |from: u32| {
            let to = (from + push).min(records);
            let (pass, task) = (dispatch.pass, dispatch.task);
            TaskPiece { pass, task, from, to, last: to == records }
        };
        (0..records).step_by(push as usize).map(piece).collect()
    }

    /// A trainer asks, or sends a piece to one slot, or reports.
    fn work(&mut self) {
        let who = trainer(self.dice.roll(3));
        let Some(mut held) = self.trainers.get(&who).cloned().flatten() else {
            return self.ask(who, None);
        };
        let DispatchRecord { task, attempt, .. } = held.dispatch;
        if held.fails_at == Some(held.next) {
            let reason = "cannot be read".to_owned();
            return self.ask(who, Some(Told::Failed { task, attempt, reason }));
        }
        let pieces = self.pieces(&held.dispatch);
        let Some(piece) = pieces.get(held.next) else {
            return self.ask(who, Some(Told::Finished { task, attempt }));
        };
        let open: Vec<usize> =
            (0..self.shards.len()).filter(|slot| !held.acknowledged.contains(slot)).collect();
        let slot = *self.dice.pick(&open).expect("a piece is sent until all have it");
        if self.deliver(slot, piece).is_err() {
            // The trainer cannot go on; nobody reports for it.
            self.trainers.insert(who, None);
            let facts = self.ledger.lose_trainer(who, Blame::Task, &self.limits);
            return self.commit(&facts);
        }
        self.sent.push(*piece);
        held.acknowledged.insert(slot);
        if held.acknowledged.len() == self.shards.len() {
            held.next += 1;
            held.acknowledged.clear();
        }
        self.trainers.insert(who, Some(held));
    }

    /// What a slot makes of a piece. Only one that lost its memory finds a gap.
    fn deliver(&mut self, slot: usize, piece: &TaskPiece) -> Result<Contributed, Refusal> {
        let mut sum = checksum(piece.pass, piece.task, piece.from..piece.to);
        let exchanges = self.mutation == Some(Mutation::Exchanged) && !self.fired;
        if exchanges {
            sum = checksum(piece.pass, TaskId(piece.task.0 + 1), piece.from..piece.to);
        }
        let shard = &mut self.shards[slot];
        let given = contribution(shard, u64::from(piece.to - piece.from), sum);
        let outcome = shard.apply(piece, given.clone());
        assert!(outcome.is_ok() || self.mutation.is_some(), "{outcome:?}");
        self.fired |= exchanges && outcome == Ok(Contributed::Complete);
        outcome
    }

    fn repeat_a_piece(&mut self) {
        let slot = self.dice.roll(self.shards.len());
        let Some(piece) = self.dice.pick(&self.sent).copied() else { return };
        let sum = checksum(piece.pass, piece.task, piece.from..piece.to);
        let given = contribution(&self.shards[slot], u64::from(piece.to - piece.from), sum);
        // A piece that comes too early is refused; one that is on its way still counts once.
        let outcome = self.shards[slot].apply(&piece, given.clone());
        let again = outcome == Ok(Contributed::Duplicate);
        if again && self.mutation == Some(Mutation::NoDeduplication) {
            tamper(&self.spec, &mut self.shards[slot], |cut| {
                let tallies = cut.counts[0].passes.iter_mut();
                for tally in tallies.filter(|tally| tally.pass == piece.pass) {
                    tally.records += given.records;
                    tally.checksum = tally.checksum.wrapping_add(given.checksum);
                    self.fired = true;
                }
            });
        }
    }

    fn ask(&mut self, who: TrainerId, report: Option<Told>) {
        self.requests += 1;
        let id = RequestId(Uuid::from_u128(self.requests));
        let request = Request { id, trainer: who, report, wants: Wants::Task, held: None };
        let (facts, answer) = self.ledger.next_task(&request, &self.limits);
        self.commit(&facts);
        let held = match answer.next {
            Next::Task(dispatch) => {
                let pieces = self.pieces(&dispatch).len();
                let fails_at = match self.bad.contains(&dispatch.task) {
                    true => Some(0),
                    false => self.dice.once_in(12).then(|| self.dice.roll(pieces + 1)),
                };
                let acknowledged = BTreeSet::new();
                Some(Held { dispatch, next: 0, acknowledged, fails_at })
            }
            Next::NotYet => None,
            Next::AllDone | Next::AllFailed { .. } => {
                self.over = true;
                None
            }
        };
        self.trainers.insert(who, held);
    }

    /// A deadline passes; the trainer may go on and come too late.
    fn expire(&mut self) {
        let pending: Vec<_> = self.ledger.pending().collect();
        let Some((task, attempt, _)) = self.dice.pick(&pending).copied() else { return };
        let facts = self.ledger.expire(task, attempt, &self.limits);
        self.commit(&facts);
    }

    fn lose_trainer(&mut self) {
        let who = trainer(self.dice.roll(3));
        let facts = self.ledger.lose_trainer(who, Blame::Task, &self.limits);
        self.commit(&facts);
        // A trainer whose lease ended may still be at work.
        if self.dice.once_in(2) {
            self.trainers.insert(who, None);
        }
    }

    fn change_master(&mut self) {
        self.holder += 1;
        self.etcd.seize(self.holder);
        self.cutting = None;
    }

    pub fn begin_checkpoint(&mut self) {
        self.cutting.get_or_insert_with(|| (self.ledger.snapshot(), BTreeMap::new()));
    }

    pub fn cut_one(&mut self) {
        let Some((_, cuts)) = &mut self.cutting else { return };
        let left: Vec<usize> =
            (0..self.shards.len()).filter(|slot| !cuts.contains_key(slot)).collect();
        if let Some(slot) = self.dice.pick(&left).copied() {
            cuts.insert(slot, self.shards[slot].cut());
            return;
        }
        let (queue, cuts) = self.cutting.take().expect("it was just there");
        let cuts: Vec<shard::Cut> = cuts.into_values().collect();
        // A shard may have left the pass without the task, and the queues would bring it back.
        let since = self.ledger.discarded().into_iter().any(|it| {
            queue.pass < it.pass || queue.pass == it.pass && !queue.discarded.contains_key(&it.task)
        });
        if since && self.mutation != Some(Mutation::GivenUpWhileCut) {
            return;
        }
        let least = cuts.iter().min_by_key(|cut| cut.position.version).expect("there are slots");
        let saved = Saved {
            id: format!("checkpoint-{}", self.saved.len()),
            generation: self.generations.last().expect("there is one").generation,
            position: position_of(least),
            queue: Some(queue),
            cuts,
        };
        let record = CheckpointRecord {
            generation: saved.generation,
            position: saved.position.clone(),
            queue: saved.queue.clone(),
            ..CheckpointRecord::default()
        };
        let keys = &self.etcd.keys;
        let ops = vec![
            put(&keys.checkpoint(&saved.id), &record),
            put(&keys.checkpoint_latest(), &saved.id),
        ];
        self.etcd.commit(self.holder, ops);
        self.saved.push(saved);
    }

    /// One slot's memory is lost: all go back, or that one alone.
    pub fn lose_pserver(&mut self) {
        if self.fired {
            return;
        }
        let lost = self.dice.roll(self.shards.len());
        let others: Vec<Slot> =
            (0..self.shards.len()).filter(|it| *it != lost).map(|it| Slot(it as u32)).collect();
        let goes_on = self.spec.asynchronous.lost_pserver == LostPserver::Continue;
        match self.saved.last().cloned() {
            Some(saved) if goes_on && !others.is_empty() => {
                let slots = self.shards.len() as u32;
                self.shards[lost] =
                    load_shard(&self.spec, &saved.position, &saved.cuts, lost as u32, slots);
                let facts = self.ledger.recall(&self.limits);
                self.begin_generation(Some(saved.id), others, facts);
            }
            Some(saved) => {
                let slots = 1 + self.dice.roll(3) as u32;
                let before: Vec<shard::Cut> = self.shards.iter().map(Shard::cut).collect();
                self.shards = load_shards(&self.spec, &saved.position, &saved.cuts, slots);
                self.keep_tallies(&before);
                let facts = self.go_back(&saved.queue.clone().unwrap_or_default());
                self.begin_generation(Some(saved.id), Vec::new(), facts);
            }
            None => {
                self.shards = new_shards(&self.spec, self.shards.len() as u32);
                let facts = self.ledger.rewind(&QueueSnapshot::default());
                self.begin_generation(None, Vec::new(), facts);
            }
        }
    }

    fn go_back(&mut self, queue: &QueueSnapshot) -> Vec<Fact> {
        if self.mutation == Some(Mutation::QueueNotRestored) {
            self.fired |= (0..self.shards.len()).any(|slot| self.lacks_something(slot));
            return self.ledger.recall(&self.limits);
        }
        self.ledger.rewind(queue)
    }

    fn keep_tallies(&mut self, before: &[shard::Cut]) {
        if self.mutation != Some(Mutation::TalliesNotRestored) || before.len() != self.shards.len()
        {
            return;
        }
        for (shard, before) in self.shards.iter_mut().zip(before) {
            let (kept, fired) = (&before.counts[0].passes, &mut self.fired);
            tamper(&self.spec, shard, |cut| {
                // What it forgot of a pass that it had left by then would come again.
                if cut.counts[0].passes.len() == kept.len() && cut.counts[0].passes != *kept {
                    cut.counts[0].passes = kept.clone();
                    *fired = true;
                }
            });
        }
    }

    fn begin_generation(&mut self, checkpoint: Option<String>, kept: Vec<Slot>, facts: Vec<Fact>) {
        for held in self.trainers.values_mut() {
            self.late.extend(held.take().map(|it| it.dispatch));
        }
        self.sent.clear();
        self.cutting = None;
        let mut slots = Vec::new();
        for _ in 0..self.shards.len() {
            self.incarnations += 1;
            slots.push(Incarnation(self.incarnations));
        }
        let generation = Generation(self.generations.len() as u64 + 1);
        let reason = "a pserver was lost".to_owned();
        let record = GenerationRecord { generation, slots, checkpoint, kept, reason };
        let mut ops = self.etcd.ops_of(self.ledger.head().round, &facts);
        ops.push(put(&self.etcd.keys.generation(), &record));
        ops.push(put(&self.etcd.keys.generation_record(generation), &record));
        self.etcd.commit(self.holder, ops);
        self.evolve(&facts);
        self.generations.push(record);
    }

    /// Whether every task of a pass was given up.
    pub fn has_failed(&self) -> bool {
        self.over && self.ledger.head().pass.0 < self.limits.passes
    }

    /// What somebody reads who looks at the last checkpoint.
    pub fn evidence(&self, saved: Option<&Saved>) -> Evidence {
        let discarded = self.ledger.discarded();
        let is_last = self.over && saved.map(|it| &it.id) == self.saved.last().map(|it| &it.id);
        let result = saved.filter(|_| is_last && self.limits.passes <= self.ledger.head().pass.0);
        Evidence {
            spec: self.spec.clone(),
            manifest: self.manifest.clone(),
            checkpoint: saved.map(Saved::evidence),
            generations: self.generations.clone(),
            result: result.map(|saved| ResultRecord {
                state: JobOutcome::Finished,
                reason: None,
                passes: 3,
                steps: saved.position.version.0,
                examples: saved.position.examples,
                loss: None,
                metric: None,
                metric_name: None,
                parameters_sha256: None,
                model: None,
                checkpoint: Some(saved.id.clone()),
                discarded: discarded.clone(),
            }),
            discarded,
        }
    }

    pub fn audit(&self) -> Report {
        audit(&self.evidence(self.saved.last()))
    }
}
