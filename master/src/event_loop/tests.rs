//! Small worlds of a training job: every sequence of a few changes, and a master that dies at every commit. The driver,
//! the machine, the recovery and the key changes are the real ones; etcd is a map.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::{pending, ready};
use std::sync::{Arc, Mutex};

use futures::executor::block_on;
use steadfast_common::ids::{
    Generation, Incarnation, Lane, Pass, RequestId, Slot, TaskId, TrainerId, Version,
};
use steadfast_common::job::dataset::{Chunk, Manifest};
use steadfast_common::job::job_file;
use steadfast_common::job::spec::Mode;
use steadfast_common::machine::{Decision, Machine, Moment};
use steadfast_common::records::amendment::Amendment;
use steadfast_common::records::extension::More;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::position::Position;
use steadfast_common::records::scale::ScaleWish;
use steadfast_common::records::{
    CheckpointRecord, GenerationRecord, JobRecord, PROTOCOL, PserverRecord, QueueRecord,
    ShardRecord, TrainerRecord,
};
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_common::tensor::placement::PlacementRecord;
use steadfast_coord::term::{Commit, Host, Term};
use steadfast_coord::{CoordError, Entry, Op, Transaction, View};
use steadfast_master_core::job_state::Fact;
use steadfast_master_core::lanes::Lanes;
use steadfast_master_core::ledger::{Request, Wants};
use steadfast_master_core::sync_tasks::{Cause, Failure};
use tokio::sync::oneshot;
use uuid::Uuid;

mod scaling;

use super::effects::{Answer, Effect};
use super::handle::{ControlError, Event, Reply};
use super::live_state::LiveState;
use super::machine::{Input, TrainingJob};
use super::members::Views;
use super::recoveries::Recoveries;
use super::stored_state::{self, Reader};
use crate::job::Job;

/// What happens to the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// Another pserver takes a slot.
    Pserver(u32),
    /// A trainer registers, or is lost.
    Trainer(u128),
    /// A trainer requests a task or, in a synchronous job, cannot compute one.
    Task(u128),
    Checkpoint,
    /// A user requests a rollback to the first checkpoint.
    RollBack,
    /// A user extends the job, or gives it another learning rate.
    Amend,
    /// A user wants one trainer, or all.
    Scale,
    /// The checkpoint that the generation began from is damaged.
    Damaged,
}

const CHANGES: [Change; 10] = [
    Change::Pserver(0),
    Change::Pserver(1),
    Change::Trainer(1),
    Change::Task(1),
    Change::Task(2),
    Change::Checkpoint,
    Change::RollBack,
    Change::Amend,
    Change::Scale,
    Change::Damaged,
];

/// What has happened before: the job trains, and has two checkpoints.
const BEFORE: [Change; 8] = [
    Change::Pserver(0),
    Change::Trainer(1),
    Change::Trainer(2),
    Change::Pserver(1),
    Change::Task(1),
    Change::Checkpoint,
    Change::Task(2),
    Change::Checkpoint,
];

/// When a master dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    Never,
    /// At this commit, which etcd never receives.
    Before(usize),
    /// At this commit, which etcd applies.
    After(usize),
}

/// The keys of the job in etcd.
#[derive(Debug)]
struct Store {
    keys: Keys,
    revision: i64,
    entries: BTreeMap<String, Entry>,
    commits: usize,
    death: Death,
    /// Checkpoints that a rollback has abandoned.
    abandoned: BTreeSet<String>,
}

impl Store {
    fn json<T: serde::de::DeserializeOwned>(&self, key: &str) -> Option<T> {
        self.entries.get(key).map(|entry| entry.json().unwrap())
    }

    fn manifests(&self) -> BTreeMap<String, (i64, CheckpointRecord)> {
        let prefix = self.keys.checkpoints_prefix();
        let pointer = self.keys.checkpoint_latest();
        let below = self.entries.iter().filter(|(key, _)| key.starts_with(&prefix));
        let manifests = below.filter(|(key, _)| **key != pointer).map(|(key, entry)| {
            let id = key.strip_prefix(&prefix).unwrap().to_owned();
            (id, (entry.create_revision, entry.json().unwrap()))
        });
        manifests.collect()
    }

    fn apply(&mut self, ops: &[Op]) {
        let generation: Option<GenerationRecord> = self.json(&self.keys.generation());
        let round = self.json(&self.keys.queue()).map_or(0, |head: QueueRecord| head.round);
        let manifests = self.manifests();
        let job: Option<JobRecord> = self.json(&self.keys.job());
        self.revision += 1;
        let revision = self.revision;
        let mut changed = BTreeSet::new();
        for op in ops {
            assert!(changed.insert(op.key().to_owned()), "etcd rejects two changes of a key");
            match op {
                Op::Put { key, value, lease } => {
                    let created = self.entries.get(key).map(|it| it.create_revision);
                    let entry = Entry {
                        key: key.clone(),
                        value: value.clone(),
                        create_revision: created.unwrap_or(revision),
                        mod_revision: revision,
                        version: 1,
                        lease: *lease,
                    };
                    self.entries.insert(key.clone(), entry);
                }
                Op::Delete { key } => drop(self.entries.remove(key)),
                Op::DeletePrefix { prefix } => {
                    self.entries.retain(|key, _| !key.starts_with(prefix));
                }
            }
        }
        let amended: Option<JobRecord> = self.json(&self.keys.job());
        if let Some(amended) = amended.filter(|it| job.as_ref() != Some(it)) {
            self.check_amended(&amended, generation.as_ref());
        }
        self.check(generation, round, manifests);
    }

    /// Checks a transaction that changes the job, given the generation before it.
    fn check_amended(&self, job: &JobRecord, before: Option<&GenerationRecord>) {
        let present: GenerationRecord = self.json(&self.keys.generation()).unwrap();
        assert_ne!(Some(present.generation), before.map(|it| it.generation));
        let (changes, extensions) = (job.changes.iter(), job.extensions.iter());
        let versions = changes.map(|it| it.version).chain(extensions.map(|it| it.version));
        assert_eq!((present.changes as usize, present.kept.len()), (job.changes.len(), 0));
        let from = self.manifests()[&present.checkpoint.unwrap()].1.position.version;
        assert!(versions.into_iter().any(|version| version == from));
    }

    /// Checks what holds for every transaction, given what was stored before it.
    fn check(
        &mut self,
        generation: Option<GenerationRecord>,
        round: u64,
        manifests: BTreeMap<String, (i64, CheckpointRecord)>,
    ) {
        let before = generation.map_or(0, |it| it.generation.0);
        let head: Option<QueueRecord> = self.json(&self.keys.queue());
        let present: Option<GenerationRecord> = self.json(&self.keys.generation());
        let begun = present.filter(|it| it.generation.0 != before);
        let now_at = head.map_or(0, |it| it.round);
        let Some(begun) = begun else {
            assert_eq!(now_at, round, "the queues are rolled back only with the parameters");
            return;
        };
        assert_eq!(begun.generation.0, before + 1);
        let pointer: Option<String> = self.json(&self.keys.checkpoint_latest());
        assert_eq!(pointer, begun.checkpoint, "the next generation would begin from another one");
        let stored = self.manifests();
        let is_rollback = begun.reason.starts_with("rolled back to");
        let start = begun.checkpoint.as_ref().map(|id| stored[id].clone());
        if let (Some((created, record)), Some(id)) = (&start, &begun.checkpoint) {
            assert_eq!(record.invalidated, None);
            if is_rollback {
                let later = manifests.iter().filter(|(_, (other, _))| created < other);
                self.abandoned.extend(later.map(|(id, _)| id.clone()));
                self.abandoned.remove(id);
            }
            assert!(!self.abandoned.contains(id), "{id} was abandoned");
        }
        if let Some(head) = head.filter(|_| begun.kept.is_empty() && 0 < before) {
            assert_eq!(now_at, round + 1, "the queues are rolled back with the parameters");
            let queue = start.and_then(|(_, record)| record.queue).unwrap_or_default();
            assert_eq!((head.pass, head.cursor), (queue.pass, queue.cursor));
            let tasks = self.entries.keys().filter(|key| self.keys.task_of(now_at, key).is_some());
            assert_eq!(tasks.count(), queue.open.len() + queue.discarded.len());
        }
    }
}

/// Etcd as one master after the other sees it.
#[derive(Clone, Debug)]
struct Memory(Arc<Mutex<Store>>);

impl Commit for Memory {
    async fn commit(&mut self, ops: &[Op]) -> Result<i64, CoordError> {
        let mut store = self.0.lock().unwrap();
        store.commits += 1;
        if store.death == Death::Before(store.commits) {
            return Err(CoordError::LeaseLost);
        }
        store.apply(ops);
        match store.death == Death::After(store.commits) {
            true => Err(CoordError::LeaseLost),
            false => Ok(store.revision),
        }
    }
}

impl Reader for Memory {
    fn list(&self, prefix: &str) -> impl Future<Output = Result<View, CoordError>> + Send {
        let store = self.0.lock().unwrap();
        let below = store.entries.iter().filter(|(key, _)| key.starts_with(prefix));
        let entries = below.map(|(key, entry)| (key.clone(), entry.clone())).collect();
        ready(Ok(View { revision: store.revision, entries }))
    }

    fn entry(&self, key: &str) -> impl Future<Output = Result<Option<Entry>, CoordError>> + Send {
        ready(Ok(self.0.lock().unwrap().entries.get(key).cloned()))
    }
}

/// Why a term ended.
#[derive(Debug)]
enum Stop {
    Died,
    /// All changes have happened.
    Done,
}

impl From<CoordError> for Stop {
    fn from(_: CoordError) -> Self {
        Self::Died
    }
}

/// The outside of all masters of a job.
struct Outside {
    job: Job,
    memory: Memory,
    keys: Keys,
    changes: VecDeque<Change>,
    /// Incarnations of pservers and requests so far.
    count: u32,
    slots: BTreeMap<u32, i64>,
    trainers: BTreeSet<u128>,
    checkpoints: u64,
}

impl Outside {
    fn entry<T: serde::Serialize>(key: &str, revision: i64, value: &T) -> (String, Entry) {
        let (key, value) = (key.to_owned(), serde_json::to_vec(value).unwrap());
        let (create_revision, mod_revision) = (revision, revision);
        (key.clone(), Entry { key, value, create_revision, mod_revision, version: 1, lease: 1 })
    }

    fn views(&self) -> Views {
        let pserver = |(slot, revision): (&u32, &i64)| {
            let record = PserverRecord {
                id: Uuid::nil(),
                address: String::new(),
                unix: None,
                admin: String::new(),
                memory_of: None,
                followed: None,
                protocol: PROTOCOL,
            };
            Self::entry(&self.keys.ps(Slot(*slot)), *revision, &record)
        };
        let trainer = |id: &u128| {
            let (admin, numerics) = (String::new(), String::new());
            let record = TrainerRecord { admin, numerics, protocol: PROTOCOL };
            Self::entry(&self.keys.trainer(trainer(*id)), 1, &record)
        };
        let view = |entries| Arc::new(View { revision: 1, entries });
        Views {
            slots: view(self.slots.iter().map(pserver).collect()),
            followers: Arc::default(),
            trainers: view(self.trainers.iter().map(trainer).collect()),
            desired: Some(2),
            code: None,
        }
    }

    /// Makes a change; returns what the master learns of it.
    fn happens(&mut self, change: Change, job: &TrainingJob) -> Input {
        self.count += 1;
        let generation = job.state.generation.as_ref();
        let number = generation.map_or_else(Default::default, |it| it.generation);
        let event = match change {
            Change::Pserver(slot) => {
                self.slots.insert(slot, i64::from(self.count));
                return Input::Members(self.views());
            }
            Change::Trainer(id) => {
                if !self.trainers.remove(&id) {
                    self.trainers.insert(id);
                }
                return Input::Members(self.views());
            }
            Change::Task(id) => {
                let (id, trainer) = (RequestId(Uuid::from_u128(self.count.into())), trainer(id));
                let generation = number;
                match self.job.record.spec.mode {
                    Mode::Async => {
                        let (report, wants, held) = (None, Wants::Task, None);
                        let request = Request { id, trainer, report, wants, held };
                        let (done, time_breakdown, reply) = (None, None, reply());
                        Event::NextTask { generation, request, done, time_breakdown, reply }
                    }
                    Mode::Sync => {
                        let (pass, task, lane) = (Pass(0), TaskId(0), Lane(0));
                        let (cause, reason) = (Cause::Data, "bad".to_owned());
                        let failure = Failure { id, trainer, pass, task, lane, cause, reason };
                        Event::FailTask { generation, failure, reply: reply() }
                    }
                }
            }
            Change::Checkpoint => {
                self.checkpoints += 1;
                let version = Version(10 * self.checkpoints);
                let is_async = self.job.record.spec.mode == Mode::Async;
                let record = CheckpointRecord {
                    generation: number,
                    queue: is_async.then(|| job.state.ledger.snapshot()),
                    ..manifest(version)
                };
                let (id, record) = (format!("c{}", self.checkpoints), Box::new(record));
                Event::CommitCheckpoint { id, record, reply: reply() }
            }
            Change::RollBack => {
                Event::RollBack { checkpoint: "c1".to_owned(), force: true, reply: reply() }
            }
            Change::Amend => {
                let amendment = match self.count % 2 {
                    0 => Amendment::Extend(More::Passes(1)),
                    _ => {
                        let mut spec = self.job.record.spec.clone();
                        spec.learning_rate.base = 1.0 / self.count as f32;
                        Amendment::Change(Box::new(spec))
                    }
                };
                Event::Amend { amendment: Box::new(amendment), reply: reply() }
            }
            Change::Scale => {
                let workers = Some(Some(1).filter(|_| job.state.scale.is_none()));
                let wish = ScaleWish { workers, ..ScaleWish::default() };
                Event::Scale { wish, reply: reply() }
            }
            Change::Damaged => {
                let checkpoint = generation.and_then(|it| it.checkpoint.clone());
                let (checkpoint, reason) = (checkpoint.unwrap_or_default(), "bad".to_owned());
                Event::Damaged { generation: number, checkpoint, reason, reply: reply() }
            }
        };
        Input::Request(event)
    }

    /// Checks what holds when a master waits.
    async fn check(&self, job: &TrainingJob) {
        let stored = stored_state::read(&self.memory, &self.keys, &self.job).await;
        let mut stored = stored.unwrap();
        // The pass that it follows is not durable.
        stored.sync_tasks.follow(job.live.position.pass);
        assert_eq!(job.state, stored, "another master would continue with another state");
        let held: Vec<Incarnation> = self.slots.values().map(|it| Incarnation(*it)).collect();
        if held.len() == 2 {
            assert_eq!(job.state.generation.as_ref().unwrap().slots, held);
        }
        let alive: BTreeSet<TrainerId> = self.trainers.iter().map(|id| trainer(*id)).collect();
        let holders = job.state.ledger.pending().map(|(_, _, holder)| holder);
        assert!(holders.into_iter().all(|holder| alive.contains(&holder)));
    }
}

impl Host for Outside {
    type Machine = TrainingJob;
    type Error = Stop;

    async fn next(&mut self, job: &TrainingJob) -> Result<Input, Stop> {
        self.check(job).await;
        let change = self.changes.pop_front().ok_or(Stop::Done)?;
        Ok(self.happens(change, job))
    }

    fn write(&self, fact: &Fact, transaction: &mut Transaction) {
        stored_state::write(&self.keys, fact, transaction);
    }

    async fn perform(&mut self, job: &TrainingJob, effect: Effect) -> Result<Option<Input>, Stop> {
        match effect {
            Effect::Read { round } => {
                let stored = stored_state::read_stored(&self.memory, &self.keys, round).await?;
                return Ok(Some(Input::Stored(stored)));
            }
            Effect::Answer(Answer::Generation(_, Ok(_))) => {
                let begun = job.state.generation.as_ref().unwrap();
                if !begun.reason.starts_with("rolled back to") {
                    return Ok(None);
                }
                let manifests = self.memory.0.lock().unwrap().manifests();
                let created = manifests["c1"].0;
                let later = manifests.iter().filter(|(_, (other, _))| created < *other);
                for (id, (_, record)) in later {
                    assert!(record.invalidated.is_some(), "{id} is valid after the answer");
                }
            }
            Effect::Answer(_)
            | Effect::Active(_)
            | Effect::Assign(_)
            | Effect::Checkpoints(_)
            | Effect::HandOver(_)
            | Effect::Show => {}
        }
        Ok(None)
    }
}

fn trainer(id: u128) -> TrainerId {
    TrainerId(Uuid::from_u128(id))
}

fn reply<T>() -> Reply<T> {
    oneshot::channel().0
}

/// A manifest that can be restored.
fn manifest(version: Version) -> CheckpointRecord {
    let shard = |slot| ShardRecord {
        slot: Slot(slot),
        incarnation: Incarnation(1),
        object: format!("shard-{slot}"),
        sha256: "a".repeat(64),
        size_bytes: 8,
        version,
        rows: Vec::new(),
    };
    CheckpointRecord {
        params: vec![ParamSpec::new("w", &[1])],
        placement: PlacementRecord::LargestFirst { slots: 2 },
        position: Position { version, ..Position::default() },
        shards: vec![shard(0), shard(1)],
        ..CheckpointRecord::default()
    }
}

fn job(mode: &str, tasks: u32) -> Job {
    let text = format!(
        "name = 'x'\npasses = 2\n{mode}\n[dataset]\nsource = ['x']\nformat = 'csv'\nfeatures = ['x']\n\
         label = 'y'\n[model]\nkind = 'linear'"
    );
    let spec = job_file::parse(&text).unwrap();
    let chunk = Chunk { file: 0, start: 0, end: 0, first_record: 0, records: 1 };
    let (chunks, task_ends) = (vec![chunk; tasks as usize], (1..=tasks).collect());
    let manifest = Manifest { chunks, task_ends, ..Manifest::default() };
    Job::new(JobRecord::new(spec, "memory:///x".to_owned(), manifest.digest()), manifest)
}

/// Returns a job to which `changes` will happen.
fn world(job: &Job, changes: &[Change], death: Death) -> Outside {
    let keys = Keys::of_job("x");
    let store = Store {
        keys: keys.clone(),
        revision: 0,
        entries: BTreeMap::new(),
        commits: 0,
        death,
        abandoned: BTreeSet::new(),
    };
    Outside {
        job: job.clone(),
        memory: Memory(Arc::new(Mutex::new(store))),
        keys,
        changes: changes.iter().copied().collect(),
        count: 0,
        slots: BTreeMap::new(),
        trainers: BTreeSet::new(),
        checkpoints: 0,
    }
}

/// Returns the machine of a new master.
fn machine(outside: &Outside, epoch: i64) -> TrainingJob {
    let Outside { job, memory, keys, .. } = outside;
    let state = block_on(stored_state::read(memory, keys, job)).unwrap();
    let mut job = job.clone();
    if let Some(amended) = memory.0.lock().unwrap().json(&keys.job()) {
        job.record = amended;
    }
    let lanes = Lanes::new(job.record.spec.sync.lanes, 0);
    let live = LiveState::new(lanes, Position::default(), Recoveries::default());
    let (gate, views) = (Arc::default(), outside.views());
    TrainingJob::new(job, keys.clone(), epoch, state, live, views, gate)
}

/// Runs one master after the other until all changes have happened; returns the number of commits.
fn run(job: &Job, changes: &[Change], death: Death) -> usize {
    let mut outside = world(job, changes, death);
    let memory = outside.memory.clone();
    for epoch in 1.. {
        let (term, _requests) = Term::new(machine(&outside, epoch), memory.clone());
        match block_on(term.run(&mut outside, pending())) {
            Err(Stop::Died) => {}
            Err(Stop::Done) | Ok(_) => break,
        }
    }
    memory.0.lock().unwrap().commits
}

/// Every sequence of three changes, with a master that dies at every commit after the job has begun to train.
fn explore(mode: &str) {
    let job = job(mode, 3);
    let before = run(&job, &BEFORE, Death::Never);
    let mut runs = 0;
    for one in CHANGES {
        for two in CHANGES {
            for three in CHANGES {
                let changes = [&BEFORE[..], &[one, two, three]].concat();
                let commits = run(&job, &changes, Death::Never);
                runs += 1;
                for at in before + 1..=commits {
                    for death in [Death::Before(at), Death::After(at)] {
                        run(&job, &changes, death);
                        runs += 1;
                    }
                }
            }
        }
    }
    assert!(CHANGES.len().pow(3) * 3 < runs, "{runs} runs");
}

/// A trainer of another job, or a bug in one, must not leave queues that no one reads.
#[test]
fn a_synchronous_job_dispatches_no_task() {
    let mut outside = world(&job("", 3), &[], Death::Never);
    outside.trainers.insert(1);
    let (mut job, mut decision) = (machine(&outside, 1), Decision::default());
    let (id, report, wants, held) = (RequestId(Uuid::nil()), None, Wants::Task, None);
    let request = Request { id, trainer: trainer(1), report, wants, held };
    let (done, time_breakdown, reply) = (None, None, reply());
    let generation = Generation(0);
    let event = Event::NextTask { generation, request, done, time_breakdown, reply };
    job.handle(Moment::default(), Input::Request(event), &mut decision);
    assert!(decision.facts.is_empty(), "{:?}", decision.facts);
    let [Effect::Answer(Answer::Task(_, Err(error)))] = &decision.effects[..] else {
        panic!("{:?}", decision.effects)
    };
    assert_eq!(*error, ControlError::NoQueue);
}

/// The first masters die, too.
#[test]
fn a_job_begins_whenever_its_masters_die() {
    for mode in ["", "mode = 'async'"] {
        let job = job(mode, 3);
        let commits = run(&job, &BEFORE, Death::Never);
        for at in 1..=commits {
            run(&job, &BEFORE, Death::Before(at));
            run(&job, &BEFORE, Death::After(at));
        }
    }
}

#[test]
fn every_short_history_of_a_synchronous_job_is_sound() {
    explore("");
}

#[test]
fn every_short_history_of_an_asynchronous_job_is_sound() {
    explore("mode = 'async'");
}

#[test]
fn every_short_history_of_a_job_whose_pservers_keep_their_memory_is_sound() {
    explore("mode = 'async'\nasync.lost_pserver = 'continue'");
}

/// A rewind of more keys than fit into one transaction leaves the queues of one checkpoint, and no key of another.
#[test]
fn a_large_rewind_is_complete_whenever_its_master_dies() {
    let job = job("mode = 'async'", 400);
    let mut changes = BEFORE[..4].to_vec();
    changes.extend([Change::Task(1); 150]);
    changes.push(Change::Checkpoint);
    changes.extend([Change::Task(2); 20]);
    changes.push(Change::Checkpoint);
    let before = run(&job, &changes, Death::Never);
    changes.extend([Change::Pserver(0), Change::Damaged, Change::Pserver(1)]);
    let commits = run(&job, &changes, Death::Never);
    assert!(before + 6 < commits, "{commits} commits, and {before} before");
    for at in before + 1..=commits {
        run(&job, &changes, Death::Before(at));
        run(&job, &changes, Death::After(at));
    }
}

/// I10: a pserver that kept its shard through an outage has the settings of the job as they were, and may be ahead of the
/// checkpoint from which the others hold.
#[test]
fn a_changed_job_begins_a_generation_although_its_pservers_have_not_changed() {
    for mode in ["", "mode = 'async'\nasync.lost_pserver = 'continue'"] {
        let mut outside = world(&job(mode, 3), &BEFORE, Death::Never);
        let memory = outside.memory.clone();
        let lead = |outside: &mut Outside, epoch| {
            let (term, _requests) = Term::new(machine(outside, epoch), memory.clone());
            drop(block_on(term.run(outside, pending())));
            let store = memory.0.lock().unwrap();
            store.json::<GenerationRecord>(&store.keys.generation()).unwrap()
        };
        let before = lead(&mut outside, 1);
        assert_eq!(lead(&mut outside, 2), before);
        let record = &mut outside.job.record;
        let mut spec = record.spec.clone();
        spec.learning_rate.base = 0.5;
        *record = record.changed(&spec, Version(20), 0).unwrap();
        let after = lead(&mut outside, 3);
        assert_eq!((after.generation.0, after.changes), (before.generation.0 + 1, 1));
        assert_eq!((&after.slots, after.kept.len()), (&before.slots, 0));
        assert_eq!(lead(&mut outside, 4), after);
    }
}
