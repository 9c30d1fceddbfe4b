//! The durable state of a job: the result of applying all committed facts.

use std::collections::BTreeSet;
use std::sync::Arc;

use steadfast_common::ids::{Pass, TaskId};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::given_up::GivenUpRecord;
use steadfast_common::records::scale::ScaleRecord;
use steadfast_common::records::stream::{StreamPassRecord, StreamRecord};
use steadfast_common::records::{
    CheckpointRecord, Course, EvaluationRecord, GenerationRecord, InitRecord, JobRecord,
    ResultRecord,
};

use crate::given_up::GivenUp;
use crate::ledger::{Ledger, QueueFact, TaskOrder};
use crate::stream::Stream;
use crate::sync_tasks::{FailureFact, SyncTasks};

/// A durable change.
#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A user extended the job, or changed its settings.
    Job(Box<JobRecord>),
    /// The queues of an asynchronous job changed.
    Queue(QueueFact),
    /// Failures of a synchronous job's tasks changed.
    Failure(FailureFact),
    /// A held-out task was given up.
    HeldOutGivenUp { task: TaskId, record: GivenUpRecord },
    /// A generation began.
    Generation(GenerationRecord),
    /// A trainer was elected to initialize the parameters, or finished.
    Init(InitRecord),
    /// The parameters were evaluated, or those that were evaluated are discarded.
    Evaluation(Option<Box<EvaluationRecord>>),
    /// The manifest of a checkpoint was written or, without a record, deleted.
    Manifest { id: String, record: Option<Box<CheckpointRecord>> },
    /// Another checkpoint is the latest.
    Latest(Option<String>),
    /// The keys of a round that is over were deleted.
    RoundDeleted { round: u64 },
    /// The files of a stream were divided further, or it ends.
    Stream(StreamRecord),
    /// A pass of a stream was added or, without a record, forgotten.
    StreamPass { pass: Pass, record: Option<Arc<StreamPassRecord>> },
    /// Another number of trainers works, or may.
    Scaled(Arc<ScaleRecord>),
    /// The job is over.
    Result(Box<ResultRecord>),
}

/// The durable state of a job. Manifests are only in etcd.
#[derive(Clone, Debug, PartialEq)]
pub struct JobState {
    /// The queues of an asynchronous job.
    pub ledger: Ledger,
    /// The failed tasks of a synchronous job.
    pub sync_tasks: SyncTasks,
    /// Held-out tasks that were given up.
    pub held_out: GivenUp,
    /// Rounds of the task queues that are over and may still have keys.
    pub stale_rounds: BTreeSet<u64>,
    pub generation: Option<GenerationRecord>,
    pub init: Option<InitRecord>,
    pub evaluation: Option<EvaluationRecord>,
    pub checkpoint: Option<String>,
    pub result: Option<ResultRecord>,
    /// The passes of a dataset that is followed.
    pub stream: Stream,
    /// Says how many trainers work, if that was chosen.
    pub scale: Option<Arc<ScaleRecord>>,
}

impl JobState {
    /// Returns the state of a job of which only the given-up tasks are known: training tasks, then held-out
    /// tasks.
    pub fn new(mode: Mode, order: TaskOrder, given_up: GivenUp, held_out: GivenUp) -> Self {
        let (of_sync, of_async) = match mode {
            Mode::Sync => (given_up, GivenUp::default()),
            Mode::Async => (GivenUp::default(), given_up),
        };
        Self {
            ledger: Ledger::new(order, of_async),
            sync_tasks: SyncTasks::new(of_sync),
            held_out,
            stale_rounds: BTreeSet::new(),
            generation: None,
            init: None,
            evaluation: None,
            checkpoint: None,
            result: None,
            stream: Stream::default(),
            scale: None,
        }
    }

    /// Applies one committed fact.
    pub fn evolve(&mut self, fact: &Fact) {
        match fact {
            Fact::Job(_) | Fact::Manifest { .. } => {}
            Fact::Queue(fact) => {
                let round = self.ledger.head().round;
                self.ledger.evolve(fact);
                if round < self.ledger.head().round {
                    self.stale_rounds.insert(round);
                }
            }
            Fact::Failure(fact) => self.sync_tasks.evolve(fact),
            Fact::HeldOutGivenUp { task, record } => self.held_out.set(*task, Some(record.clone())),
            Fact::Generation(record) => self.generation = Some(record.clone()),
            Fact::Init(record) => self.init = Some(record.clone()),
            Fact::Evaluation(record) => self.evaluation = record.as_deref().cloned(),
            Fact::Latest(id) => self.checkpoint = id.clone(),
            Fact::RoundDeleted { round } => {
                self.stale_rounds.remove(round);
            }
            Fact::Stream(record) => self.stream.record = record.clone(),
            Fact::StreamPass { pass, record } => {
                self.stream.set_pass(*pass, record.clone());
                self.ledger.set_pass(*pass, record.as_ref().map(|it| it.tasks));
            }
            Fact::Scaled(record) => self.scale = Some(record.clone()),
            Fact::Result(result) => self.result = Some(ResultRecord::clone(result)),
        }
    }

    /// Returns how many trainers work at most; `None` if all do.
    pub fn trainers_max(&self) -> Option<u32> {
        self.scale.as_ref()?.workers
    }

    /// Returns what follows from the evaluations, if they decide about the course of the job.
    pub fn course(&self) -> Option<&Course> {
        self.evaluation.as_ref()?.course.as_ref()
    }

    /// Returns the given-up tasks of a synchronous job, those of an asynchronous one, and held-out ones.
    pub fn given_up(&self) -> [&GivenUp; 3] {
        [self.sync_tasks.given_up(), self.ledger.given_up(), &self.held_out]
    }
}
