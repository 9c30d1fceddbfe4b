//! What the processes of a simulated cluster run: a training job, or an elastic job.

use std::time::Duration;

use steadfast_agent::HangTimeout;
use steadfast_common::ids::Pass;
use steadfast_common::job::elastic::ElasticSpec;
use steadfast_common::job::spec;
use steadfast_common::records::commits::{DataPosition, RecordOrder};
use steadfast_common::records::rendezvous::NodeRange;

use crate::job::Job;
use crate::rng::Rng;

/// The kind of a simulated job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Synchronous training.
    Sync,
    /// Asynchronous training.
    Async,
    /// Programs with a loop of their own.
    Elastic,
}

impl Mode {
    /// Returns the mode of a training job.
    pub(crate) fn of_training(self) -> Option<spec::Mode> {
        match self {
            Self::Sync => Some(spec::Mode::Sync),
            Self::Async => Some(spec::Mode::Async),
            Self::Elastic => None,
        }
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Async => "async",
            Self::Elastic => "elastic",
        }
    }
}

/// A simulated job.
#[derive(Clone, Debug)]
pub enum Workload {
    Training(Box<Job>),
    Elastic(ElasticJob),
}

/// An elastic job of the catalog: its workers take steps together.
#[derive(Clone, Debug)]
pub struct ElasticJob {
    pub number: u64,
    pub spec: ElasticSpec,
    pub nodes: NodeRange,
    /// Number of steps after which a worker has succeeded.
    pub steps: u64,
    /// One of this many steps of the first rounds fails.
    pub failures: u64,
    /// Failures of the workers of a node after which they are started again.
    pub restarts_max: u32,
    /// Whether the workers use the service of their agent, as `steadfast.elastic` does.
    pub uses_agent: bool,
    /// Records of one step, of a job whose records are counted.
    pub records_of_step: u64,
    /// A state is committed after this many steps.
    pub commit_every: u64,
    /// Time for workers to leave a round.
    pub reset_timeout: Duration,
    pub hang_timeout: HangTimeout,
}

/// Restarts that are enough for each job.
pub(crate) const RESTARTS_ENOUGH: u32 = 1000;

impl Workload {
    /// Returns the job with this number.
    ///
    /// # Panics
    /// If the catalog contains an invalid job.
    pub fn numbered(mode: Mode, number: u64) -> Self {
        match mode.of_training() {
            Some(mode) => Self::Training(Box::new(Job::numbered(mode, number))),
            None => Self::Elastic(ElasticJob::numbered(number)),
        }
    }

    /// Returns whether evaluations decide about the course of the job.
    pub fn decides(&self) -> bool {
        match self {
            Self::Training(job) => job.spec.evaluation.decides(),
            Self::Elastic(_) => false,
        }
    }

    /// Returns a job with few steps.
    pub fn smallest(mode: Mode) -> Self {
        match mode.of_training() {
            Some(mode) => Self::Training(Box::new(Job::smallest(mode))),
            None => Self::Elastic(ElasticJob::smallest()),
        }
    }

    pub fn name(&self) -> &str {
        match self {
            Self::Training(job) => &job.spec.name,
            Self::Elastic(job) => &job.spec.name,
        }
    }

    /// Returns the number in the catalog.
    pub fn number(&self) -> u64 {
        match self {
            Self::Training(job) => job.number,
            Self::Elastic(job) => job.number,
        }
    }

    pub fn mode(&self) -> Mode {
        match self {
            Self::Training(job) => match job.spec.mode {
                spec::Mode::Sync => Mode::Sync,
                spec::Mode::Async => Mode::Async,
            },
            Self::Elastic(_) => Mode::Elastic,
        }
    }

    pub fn may_fail(&self) -> bool {
        match self {
            // A job that gives up tasks may give up all of them; its processes then fail.
            Self::Training(job) => !job.is_patient,
            Self::Elastic(_) => false,
        }
    }
}

impl ElasticJob {
    /// Returns the job with this number.
    ///
    /// # Panics
    /// Never; the catalog is valid.
    pub fn numbered(number: u64) -> Self {
        let mut rng = Rng::new(number ^ 0x6e6f_6465);
        let min = rng.between(1, 3) as u32;
        let nodes = NodeRange::new(min, min + rng.between(0, 3) as u32).expect("min is the least");
        let mut spec = ElasticSpec::new("trial", nodes);
        spec.nodes.last_call = Duration::from_secs(rng.between(0, 3));
        spec.nodes.join_timeout = Duration::from_secs(rng.between(5, 20));
        let (steps, failures) = (rng.between(3, 15), *rng.one_of(&[10, 40, 1000]));
        let restarts_max = if rng.happens(0.2) { rng.below(4) as u32 } else { RESTARTS_ENOUGH };
        let uses_agent = rng.happens(0.8);
        let reset_timeout = Duration::from_secs(*rng.one_of(&[1, 5, 20]));
        let hang_timeout = match rng.happens(0.2) {
            true => HangTimeout::Silence(Duration::from_secs(rng.between(8, 20))),
            false => HangTimeout::Progress,
        };
        // Other programs have no commits that are decided.
        spec.records = (uses_agent && rng.happens(0.6)).then(|| rng.between(1, 40));
        let (records_of_step, commit_every) = (rng.between(1, 12), rng.between(1, 3));
        if spec.records.is_some() && rng.happens(0.5) {
            spec.order = RecordOrder::Dynamic;
        }
        Self {
            number,
            spec,
            nodes,
            steps,
            failures,
            restarts_max,
            uses_agent,
            records_of_step,
            commit_every,
            reset_timeout,
            hang_timeout,
        }
    }

    /// Returns a job of two to three nodes with few steps, of which none fails.
    pub fn smallest() -> Self {
        let mut job = Self::numbered(0);
        job.nodes = NodeRange::new(2, 3).expect("2 is less than 3");
        (job.spec.nodes.min, job.spec.nodes.max) = (job.nodes.min(), job.nodes.max());
        (job.steps, job.failures) = (3, u64::MAX);
        (job.restarts_max, job.uses_agent) = (RESTARTS_ENOUGH, true);
        (job.spec.records, job.spec.order) = (None, RecordOrder::Fixed);
        job
    }

    /// Returns the position in the data of a state after so many steps, in a job whose records are counted.
    pub fn position(&self, steps: u64) -> Option<DataPosition> {
        let records = self.spec.records?;
        let of_pass = records.div_ceil(self.records_of_step);
        let (pass, in_pass) = (steps / of_pass, steps % of_pass);
        let used = (in_pass * self.records_of_step).min(records);
        Some(DataPosition { pass: Pass(pass as u32), used, seen: pass * records + used })
    }

    /// Returns the number of the first record that is not dealt, if the order is dynamic.
    pub fn end(&self) -> u64 {
        self.steps * self.records_of_step
    }

    /// Returns the position in the data of the final state, in a job whose records are counted.
    pub fn last_position(&self) -> Option<DataPosition> {
        match (self.spec.order, self.spec.records) {
            (RecordOrder::Dynamic, Some(records)) => {
                let (pass, used) = (self.end() / records, self.end() % records);
                Some(DataPosition { pass: Pass(pass as u32), used, seen: self.end() })
            }
            (RecordOrder::Fixed | RecordOrder::Dynamic, _) => self.position(self.steps),
        }
    }

    /// Returns whether the state after so many steps is committed.
    pub fn commits(&self, steps: u64) -> bool {
        let is_due = steps.is_multiple_of(self.commit_every);
        self.spec.records.is_none() || is_due || steps == self.steps
    }
}
