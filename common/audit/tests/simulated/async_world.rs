//! Simulates an asynchronous job in one thread: real queues and shards; trainers that die, report late
//! and send duplicates; checkpoints taken slot by slot; and pservers that lose their memory.

mod mutants;

use std::collections::{BTreeMap, BTreeSet};

use steadfast_audit::{Evidence, Report, audit};
use steadfast_common::applied_records::{RecordRange, checksum};
use steadfast_common::dataset::Manifest;
use steadfast_common::given_up::Discarded;
use steadfast_common::ids::{Attempt, Generation, Incarnation, RequestId, Slot, TaskId, TrainerId};
use steadfast_common::placement::PlacementRecord;
use steadfast_common::records::{
    CheckpointRecord, DispatchRecord, GenerationRecord, JobOutcome, QueueSnapshot, ResultRecord,
};
use steadfast_common::schedule::task_order;
use steadfast_common::spec::{JobSpec, LostPserver, Mode};
use steadfast_common::stream::LeftOut;
use steadfast_master_core::draft::Draft;
use steadfast_master_core::given_up::GivenUp;
use steadfast_master_core::job_state::{Fact, JobState};
use steadfast_master_core::ledger::{
    Attribution, Limits, Next, QueueFact, Report as TaskReport, Request, TaskOrder, Wants,
};
use steadfast_pserver_core::block_store::ShardSnapshot;
use steadfast_pserver_core::contribution::{Contributed, Contribution, Refusal};
use steadfast_pserver_core::shard::Shard;
use uuid::Uuid;

use crate::etcd::{Etcd, put};
use crate::world::{Rng, Saved, contribution, load_shard, load_shards, manifest, new_shards};
use crate::world::{snapshot, spec, tamper};

/// A guard that the simulation leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A duplicate record range is applied again.
    NoDeduplication,
    /// A report is accepted whatever its attempt.
    NoAttemptCheck,
    /// A restored slot keeps its sums.
    AppliedRecordsNotRestored,
    /// Slots are restored, but the queues are not.
    QueueNotRestored,
    /// A slot's memory is lost without a new generation.
    SilentLoss,
    /// Other records are applied than the name says.
    Exchanged,
    /// A checkpoint is committed although a task was given up between the capture of its queues and
    /// its shard snapshots.
    GivenUpDuringCheckpoint,
}

#[derive(Clone, Debug)]
struct Held {
    dispatch: DispatchRecord,
    next: usize,
    acknowledged: BTreeSet<usize>,
    /// The record range at which the task fails, if it does.
    fails_at: Option<usize>,
}

#[derive(Debug)]
pub struct AsyncWorld {
    pub rng: Rng,
    pub spec: JobSpec,
    pub manifest: Manifest,
    pub etcd: Etcd,
    pub state: JobState,
    pub shards: Vec<Shard>,
    pub saved: Vec<Saved>,
    pub generations: Vec<GenerationRecord>,
    limits: Limits,
    holder: u128,
    trainers: BTreeMap<TrainerId, Option<Held>>,
    requests: u128,
    /// Record ranges sent in this generation, which may be duplicated.
    sent: Vec<RecordRange>,
    /// A checkpoint in progress: the queues, and the shard snapshots so far.
    in_progress: Option<(QueueSnapshot, BTreeMap<usize, ShardSnapshot>)>,
    /// Tasks that cannot be read.
    pub bad: BTreeSet<TaskId>,
    pub mutation: Option<Mutation>,
    /// Whether the missing guard had an effect.
    pub fired: bool,
    /// Dispatches of earlier generations, which may still be reported.
    late: Vec<DispatchRecord>,
    incarnations: i64,
    pub over: bool,
}

fn apply(
    shard: &mut Shard,
    range: &RecordRange,
    contribution: Contribution,
) -> Result<Contributed, Refusal> {
    let Shard::Async(shard) = shard else { unreachable!("the job is asynchronous") };
    shard.apply(range, contribution)
}

fn trainer(number: usize) -> TrainerId {
    TrainerId(Uuid::from_u128(number as u128 + 1))
}

impl AsyncWorld {
    pub fn new(seed: u64, policy: LostPserver) -> Self {
        let mut rng = Rng::new(seed);
        let mut spec = spec(Mode::Async, 3);
        spec.asynchronous.lost_pserver = policy;
        (spec.asynchronous.batch, spec.asynchronous.push_every) = (3, 2);
        let tasks = 6 + rng.below(6);
        let manifest = manifest(&mut rng, tasks);
        let trained = manifest.training_tasks();
        let bad = (0..rng.below(3)).filter_map(|_| rng.pick(&trained).copied()).collect();
        let slots = 1 + rng.below(3) as u32;
        let limits = Limits { passes: 3, failures_max: 1, trainers: 3, deadline_ms: 1 };
        let (of, seed) = (manifest.clone(), spec.seed);
        let order = TaskOrder::new(move |pass| task_order(&of, seed, pass));
        let state = JobState::new(Mode::Async, order, GivenUp::default(), GivenUp::default());
        let mut world = Self {
            shards: new_shards(&spec, slots),
            trainers: (0..3).map(|it| (trainer(it), None)).collect(),
            etcd: Etcd::new(),
            saved: Vec::new(),
            generations: Vec::new(),
            holder: 1,
            requests: 0,
            sent: Vec::new(),
            in_progress: None,
            mutation: None,
            fired: false,
            late: Vec::new(),
            incarnations: 0,
            over: false,
            rng,
            spec,
            manifest,
            state,
            limits,
            bad,
        };
        world.etcd.acquire(1);
        world.begin_generation(None, Vec::new(), Vec::new());
        world
    }

    /// Runs the job with faults for a while, then to its end without.
    pub fn run(&mut self) {
        for _ in 0..self.rng.below(900) {
            if self.over {
                break;
            }
            self.step();
        }
        let mut limit = 0;
        while !self.over {
            limit += 1;
            assert!(limit < 100_000, "the job does not end");
            self.work();
        }
        self.in_progress = None;
        self.begin_checkpoint();
        while self.in_progress.is_some() {
            self.snapshot_one();
        }
    }

    pub fn step(&mut self) {
        match self.rng.below(60) {
            0 => self.expire(),
            1 => self.lose_trainer(),
            2 => self.begin_checkpoint(),
            3 | 4 => self.snapshot_one(),
            5 if self.rng.once_in(3) => self.lose_pserver(),
            6 if self.rng.once_in(4) => self.change_master(),
            7..=12 => self.repeat_a_range(),
            13 => self.mutate(),
            _ => self.work(),
        }
    }

    pub fn commit(&mut self, facts: &[QueueFact]) {
        let ops = self.etcd.ops_of(facts);
        self.etcd.commit(self.holder, ops);
        self.evolve(facts);
    }

    fn evolve(&mut self, facts: &[QueueFact]) {
        facts.iter().for_each(|fact| self.state.ledger.evolve(fact));
    }

    /// Decides on a copy of the state, and commits the facts.
    fn decide<T>(&mut self, decide: impl FnOnce(&mut Draft, &Limits) -> T) -> T {
        let mut copy = self.state.clone();
        let mut draft = Draft::of(&mut copy);
        let decided = decide(&mut draft, &self.limits);
        let of_queue = |fact| match fact {
            Fact::Queue(fact) => fact,
            other => panic!("not a fact of the queues: {other:?}"),
        };
        let facts: Vec<QueueFact> = draft.take_facts().into_iter().map(of_queue).collect();
        self.commit(&facts);
        decided
    }

    fn ranges(&self, dispatch: &DispatchRecord) -> Vec<RecordRange> {
        let records = self.manifest.records_of(dispatch.task) as u32;
        let push = self.spec.asynchronous.batch * self.spec.asynchronous.push_every;
        let range = |from: u32| {
            let to = (from + push).min(records);
            let (pass, task) = (dispatch.pass, dispatch.task);
            RecordRange { pass, task, from, to, last: to == records }
        };
        (0..records).step_by(push as usize).map(range).collect()
    }

    /// A trainer requests a task, sends a record range to one slot, or reports.
    fn work(&mut self) {
        let who = trainer(self.rng.below(3));
        let Some(mut held) = self.trainers.get(&who).cloned().flatten() else {
            return self.ask(who, None);
        };
        let DispatchRecord { task, attempt, .. } = held.dispatch;
        if held.fails_at == Some(held.next) {
            let reason = "cannot be read".to_owned();
            return self.ask(who, Some(TaskReport::Failed { task, attempt, reason }));
        }
        let ranges = self.ranges(&held.dispatch);
        let Some(range) = ranges.get(held.next) else {
            return self.ask(who, Some(TaskReport::Finished { task, attempt }));
        };
        let open: Vec<usize> =
            (0..self.shards.len()).filter(|slot| !held.acknowledged.contains(slot)).collect();
        let slot = *self.rng.pick(&open).expect("a range is sent until all have it");
        if self.deliver(slot, range).is_err() {
            // The trainer stops without a report.
            self.trainers.insert(who, None);
            return self.decide(|draft, limits| draft.lose_trainer(who, Attribution::Task, limits));
        }
        self.sent.push(*range);
        held.acknowledged.insert(slot);
        if held.acknowledged.len() == self.shards.len() {
            held.next += 1;
            held.acknowledged.clear();
        }
        self.trainers.insert(who, Some(held));
    }

    /// Sends a record range to a slot. Only a slot that lost its memory finds a gap.
    fn deliver(&mut self, slot: usize, range: &RecordRange) -> Result<Contributed, Refusal> {
        let mut sum = checksum(range.pass, range.task, range.from..range.to);
        let exchanges = self.mutation == Some(Mutation::Exchanged) && !self.fired;
        if exchanges {
            sum = checksum(range.pass, TaskId(range.task.0 + 1), range.from..range.to);
        }
        let shard = &mut self.shards[slot];
        let given = contribution(shard.blocks(), u64::from(range.to - range.from), sum);
        let outcome = apply(shard, range, given.clone());
        assert!(outcome.is_ok() || self.mutation.is_some(), "{outcome:?}");
        self.fired |= exchanges && outcome == Ok(Contributed::Complete);
        outcome
    }

    fn repeat_a_range(&mut self) {
        let slot = self.rng.below(self.shards.len());
        let Some(range) = self.rng.pick(&self.sent).copied() else { return };
        let sum = checksum(range.pass, range.task, range.from..range.to);
        let given = contribution(self.shards[slot].blocks(), u64::from(range.to - range.from), sum);
        // A range that comes too early is refused; one that is still in transit is applied once.
        let outcome = apply(&mut self.shards[slot], &range, given.clone());
        let again = outcome == Ok(Contributed::Duplicate);
        if again && self.mutation == Some(Mutation::NoDeduplication) {
            tamper(&self.spec, &mut self.shards[slot], |snapshot| {
                let passes = snapshot.applied[0].passes.iter_mut();
                for applied_pass in passes.filter(|applied_pass| applied_pass.pass == range.pass) {
                    applied_pass.records += given.records;
                    applied_pass.checksum = applied_pass.checksum.wrapping_add(given.checksum);
                    self.fired = true;
                }
            });
        }
    }

    fn ask(&mut self, who: TrainerId, report: Option<TaskReport>) {
        self.requests += 1;
        let id = RequestId(Uuid::from_u128(self.requests));
        let request = Request { id, trainer: who, report, wants: Wants::Task, held: None };
        let late: Vec<(TaskId, Attempt)> = match self.rng.once_in(2) {
            true => self.state.ledger.pending().map(|(task, attempt, _)| (task, attempt)).collect(),
            false => Vec::new(),
        };
        let answer = self.decide(|draft, limits| draft.next_task(&request, &late, limits));
        let held = match answer.next {
            Next::Task(dispatch) => {
                let ranges = self.ranges(&dispatch).len();
                let fails_at = match self.bad.contains(&dispatch.task) {
                    true => Some(0),
                    false => self.rng.once_in(12).then(|| self.rng.below(ranges + 1)),
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

    /// A task's deadline expires; the trainer may continue and report late.
    fn expire(&mut self) {
        let pending: Vec<_> = self.state.ledger.pending().collect();
        let Some((task, attempt, _)) = self.rng.pick(&pending).copied() else { return };
        self.decide(|draft, limits| draft.expire(task, attempt, limits));
    }

    fn lose_trainer(&mut self) {
        let who = trainer(self.rng.below(3));
        self.decide(|draft, limits| draft.lose_trainer(who, Attribution::Task, limits));
        // A trainer whose lease expired may still be working.
        if self.rng.once_in(2) {
            self.trainers.insert(who, None);
        }
    }

    fn change_master(&mut self) {
        self.holder += 1;
        self.etcd.acquire(self.holder);
        self.in_progress = None;
    }

    pub fn begin_checkpoint(&mut self) {
        self.in_progress.get_or_insert_with(|| (self.state.ledger.snapshot(), BTreeMap::new()));
    }

    pub fn snapshot_one(&mut self) {
        let Some((_, snapshots)) = &mut self.in_progress else { return };
        let left: Vec<usize> =
            (0..self.shards.len()).filter(|slot| !snapshots.contains_key(slot)).collect();
        if let Some(slot) = self.rng.pick(&left).copied() {
            snapshots.insert(slot, snapshot(&mut self.shards[slot]));
            return;
        }
        let (queue, snapshots) = self.in_progress.take().expect("it was just there");
        let snapshots: Vec<ShardSnapshot> = snapshots.into_values().collect();
        // A shard may have left the pass without the task, which the queues would dispatch again.
        if self.state.ledger.gave_up_since(&queue)
            && self.mutation != Some(Mutation::GivenUpDuringCheckpoint)
        {
            return;
        }
        let least = snapshots
            .iter()
            .min_by_key(|snapshot| snapshot.position.version)
            .expect("there are slots");
        let saved = Saved {
            id: format!("checkpoint-{}", self.saved.len()),
            generation: self.generations.last().expect("there is one").generation,
            position: least.position,
            exhausted: least.exhausted.iter().copied().collect(),
            queue: Some(queue),
            snapshots,
        };
        let record = CheckpointRecord {
            generation: saved.generation,
            position: saved.position,
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

    /// One slot's memory is lost: all slots are restored, or only that one.
    pub fn lose_pserver(&mut self) {
        if self.fired {
            return;
        }
        let lost = self.rng.below(self.shards.len());
        let others: Vec<Slot> =
            (0..self.shards.len()).filter(|it| *it != lost).map(|it| Slot(it as u32)).collect();
        let continues = self.spec.asynchronous.lost_pserver == LostPserver::Continue;
        match self.saved.last().cloned() {
            Some(saved) if continues && !others.is_empty() => {
                let slots = self.shards.len() as u32;
                self.shards[lost] = load_shard(&self.spec, &saved, lost as u32, slots);
                let facts = self.state.ledger.recall(&self.limits);
                self.begin_generation(Some(saved.id), others, facts);
            }
            Some(saved) => {
                let slots = 1 + self.rng.below(3) as u32;
                let before: Vec<ShardSnapshot> = self.shards.iter_mut().map(snapshot).collect();
                self.shards = load_shards(&self.spec, &saved, slots);
                self.keep_applied_passes(&before);
                let facts = self.restore(&saved.queue.clone().unwrap_or_default());
                self.begin_generation(Some(saved.id), Vec::new(), facts);
            }
            None => {
                self.shards = new_shards(&self.spec, self.shards.len() as u32);
                let facts = self.state.ledger.rewind(&QueueSnapshot::default());
                self.begin_generation(None, Vec::new(), facts);
            }
        }
    }

    fn restore(&mut self, queue: &QueueSnapshot) -> Vec<QueueFact> {
        if self.mutation == Some(Mutation::QueueNotRestored) {
            self.fired |= (0..self.shards.len()).any(|slot| self.lacks_something(slot));
            return self.state.ledger.recall(&self.limits);
        }
        self.state.ledger.rewind(queue)
    }

    fn keep_applied_passes(&mut self, before: &[ShardSnapshot]) {
        if self.mutation != Some(Mutation::AppliedRecordsNotRestored)
            || before.len() != self.shards.len()
        {
            return;
        }
        for (shard, before) in self.shards.iter_mut().zip(before) {
            let (kept, fired) = (&before.applied[0].passes, &mut self.fired);
            tamper(&self.spec, shard, |snapshot| {
                // Records of a pass that the shard had left by then would be sent again.
                if snapshot.applied[0].passes.len() == kept.len()
                    && snapshot.applied[0].passes != *kept
                {
                    snapshot.applied[0].passes = kept.clone();
                    *fired = true;
                }
            });
        }
    }

    fn begin_generation(
        &mut self,
        checkpoint: Option<String>,
        kept: Vec<Slot>,
        facts: Vec<QueueFact>,
    ) {
        for held in self.trainers.values_mut() {
            self.late.extend(held.take().map(|it| it.dispatch));
        }
        self.sent.clear();
        self.in_progress = None;
        let mut slots = Vec::new();
        for _ in 0..self.shards.len() {
            self.incarnations += 1;
            slots.push(Incarnation(self.incarnations));
        }
        let generation = Generation(self.generations.len() as u64 + 1);
        let reason = "a pserver was lost".to_owned();
        let placement = PlacementRecord::LargestFirst { slots: slots.len() as u32 };
        let record = GenerationRecord { generation, slots, placement, checkpoint, kept, reason };
        let mut ops = self.etcd.ops_of(&facts);
        ops.push(put(&self.etcd.keys.generation(), &record));
        ops.push(put(&self.etcd.keys.generation_record(generation), &record));
        self.etcd.commit(self.holder, ops);
        self.evolve(&facts);
        self.generations.push(record);
    }

    /// Whether every task of a pass was given up.
    pub fn has_failed(&self) -> bool {
        self.over && self.state.ledger.head().pass.0 < self.limits.passes
    }

    /// The input of an audit of a checkpoint.
    pub fn evidence(&self, saved: Option<&Saved>) -> Evidence {
        let discarded = self.state.ledger.given_up().records().clone();
        let is_last = self.over && saved.map(|it| &it.id) == self.saved.last().map(|it| &it.id);
        let result =
            saved.filter(|_| is_last && self.limits.passes <= self.state.ledger.head().pass.0);
        Evidence {
            code_changes: Vec::new(),
            spec: self.spec.clone(),
            manifest: self.manifest.clone(),
            stream: None,
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
                discarded: Discarded {
                    tasks: discarded.len() as u64,
                    times: self.state.ledger.given_up().times(),
                    ..Discarded::default()
                },
                left_out: LeftOut::default(),
                ended_unix_ms: None,
            }),
            discarded,
        }
    }

    pub fn audit(&self) -> Report {
        audit(&self.evidence(self.saved.last()))
    }
}
