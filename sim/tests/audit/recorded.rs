//! Recorded runs, and histories that follow one of them up to a revision and then go on differently.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Serialize;
use serde::de::DeserializeOwned;
use steadfast_audit::Evidence;
use steadfast_audit::history::{
    Change, ElasticJob, HistoryReport, Job, Revision, Rule, check, check_elastic,
};
use steadfast_common::ids::Pass;
use steadfast_common::job::dataset::Manifest;
use steadfast_common::job::spec::JobSpec;
use steadfast_common::records::keys::Keys;
use steadfast_sim::{Mode, Outcome, Plan, Recording, Workload, record};

/// Seeds of each mode that are recorded.
const SEEDS: u64 = 40;

/// The most seeds of a mode in which a test looks for what it needs.
const SEEDS_MAX: u64 = 1000;

/// The most histories of one test.
const CASES: usize = 60;

/// A run of a seed, with the faults of the seed.
pub struct Run {
    pub mode: Mode,
    pub seed: u64,
    pub job: Workload,
    pub keys: Keys,
    pub outcome: Outcome,
    pub recording: Recording,
}

/// Runs of synchronous training.
pub static SYNC: LazyLock<Vec<Run>> = LazyLock::new(|| runs(Mode::Sync));
/// Runs of asynchronous training.
pub static ASYNC: LazyLock<Vec<Run>> = LazyLock::new(|| runs(Mode::Async));
/// Runs of elastic jobs.
pub static ELASTIC: LazyLock<Vec<Run>> = LazyLock::new(|| runs(Mode::Elastic));

/// Runs of synchronous training whose course depends on evaluations.
pub static DECIDING: LazyLock<Vec<Run>> = LazyLock::new(|| {
    let decides = |plan: &Plan| match &plan.job {
        Workload::Training(job) => job.spec.evaluation.decides(),
        Workload::Elastic(_) => false,
    };
    let seeds = (1..).filter(|seed| decides(&Plan::of_seed(Mode::Sync, *seed)));
    seeds.take(SEEDS as usize / 2).map(|seed| run(Mode::Sync, seed)).collect()
});

fn runs(mode: Mode) -> Vec<Run> {
    (1..=SEEDS).map(|seed| run(mode, seed)).collect()
}

fn run(mode: Mode, seed: u64) -> Run {
    let plan = Plan::of_seed(mode, seed);
    let (outcome, recording) = record(&plan);
    let (keys, job) = (Keys::of_job(plan.job.name()), plan.job);
    Run { mode, seed, job, keys, outcome, recording }
}

impl Run {
    /// Returns the job, if it is one of training.
    pub fn training(&self) -> Option<&steadfast_sim::Job> {
        match &self.job {
            Workload::Training(job) => Some(job),
            Workload::Elastic(_) => None,
        }
    }

    pub fn spec(&self) -> &JobSpec {
        &self.training().expect("the job is one of training").spec
    }

    /// Returns each pair of evidence, the earlier first.
    pub fn pairs(&self) -> impl Iterator<Item = (&Evidence, &Evidence)> {
        let all = &self.recording.evidence;
        all.iter().enumerate().flat_map(|(at, one)| all[at + 1..].iter().map(move |it| (one, it)))
    }

    /// Checks revisions that follow the state `start`.
    pub fn check(&self, start: &[Change], revisions: &[Revision]) -> HistoryReport {
        let (keys, manifest) = (&self.keys, &self.recording.manifest);
        match &self.job {
            Workload::Training(job) => {
                check(&Job { keys, spec: &job.spec, manifest }, start, revisions)
            }
            Workload::Elastic(job) => check_elastic(
                &ElasticJob { keys, nodes: job.nodes, records: job.spec.records },
                start,
                revisions,
            ),
        }
    }
}

/// Records the runs of the seeds that follow those of `runs`.
pub fn later_runs(runs: &[Run]) -> impl Iterator<Item = Run> {
    let mode = runs.first().map_or(Mode::Sync, |it| it.mode);
    (SEEDS + 1..=SEEDS_MAX).map(move |seed| run(mode, seed))
}

/// Returns the evidence of all checkpoints of some runs.
pub fn evidence(runs: &[Run]) -> impl Iterator<Item = &Evidence> {
    runs.iter().flat_map(|run| &run.recording.evidence)
}

/// Returns the manifest of a pass, if it is known.
pub fn manifest_of(evidence: &Evidence, pass: Pass) -> Option<&Manifest> {
    match &evidence.stream {
        Some(stream) => stream.passes.get(&pass).map(|(_, manifest)| manifest),
        None => Some(&evidence.manifest),
    }
}

/// A put, or a deletion if there is no value.
pub type Op = (String, Option<String>);

pub fn put<T: Serialize + ?Sized>(key: impl Into<String>, value: &T) -> Op {
    (key.into(), Some(serde_json::to_string(value).expect("records are plain data")))
}

/// The first revisions of a run, followed by others.
#[derive(Clone)]
pub struct History {
    pub run: &'static Run,
    recorded: usize,
    added: Vec<Revision>,
    held: BTreeMap<String, Change>,
}

/// Cuts the histories of `runs` after some of the revisions at which a master acts and `is_wanted` holds.
///
/// # Panics
/// If there are too few for a test.
pub fn cuts(runs: &'static [Run], is_wanted: impl Fn(&History) -> bool) -> Vec<History> {
    let mut all = Vec::new();
    for run in runs {
        let mut history = History { run, recorded: 0, added: Vec::new(), held: BTreeMap::new() };
        for revision in &run.recording.revisions {
            history.recorded += 1;
            history.apply(revision);
            if history.held.contains_key(&run.keys.master_lock()) && is_wanted(&history) {
                all.push(history.clone());
            }
        }
    }
    assert!(CASES <= all.len(), "{} cases", all.len());
    let stride = all.len().div_ceil(CASES);
    all.into_iter().step_by(stride).collect()
}

impl History {
    /// Returns the history of a whole run. No master need act at its end.
    pub fn whole(run: &'static Run) -> Self {
        let revisions = &run.recording.revisions;
        let (recorded, added, held) = (revisions.len(), Vec::new(), BTreeMap::new());
        let mut history = Self { run, recorded, added, held };
        revisions.iter().for_each(|revision| history.apply(revision));
        history
    }

    fn apply(&mut self, revision: &Revision) {
        for change in &revision.changes {
            match change.value {
                Some(_) => drop(self.held.insert(change.key.clone(), change.clone())),
                None => drop(self.held.remove(&change.key)),
            }
        }
    }

    /// Returns what etcd holds.
    pub fn held(&self) -> Vec<Change> {
        self.held.values().cloned().collect()
    }

    /// Returns the revisions of the run that are not in this history.
    pub fn rest(&self) -> &'static [Revision] {
        &self.run.recording.revisions[self.recorded..]
    }

    /// Returns the number of the last revision.
    pub fn last(&self) -> i64 {
        let recorded = || self.run.recording.revisions[..self.recorded].last();
        self.added.last().or_else(recorded).map_or(0, |it| it.revision)
    }

    /// Returns the value of a key that exists.
    pub fn value<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let value = self.held.get(key)?.value.as_deref()?;
        Some(serde_json::from_str(value).expect("programs write valid records"))
    }

    pub fn holds(&self, key: &str) -> bool {
        self.held.contains_key(key)
    }

    /// Returns the keys that begin with `prefix`.
    pub fn keys_below(&self, prefix: &str) -> Vec<String> {
        self.held.keys().filter(|key| key.starts_with(prefix)).cloned().collect()
    }

    /// Adds a transaction.
    pub fn txn(&mut self, ops: Vec<Op>) {
        let at = self.last() + 1;
        let mut changes = Vec::new();
        for (key, value) in ops.into_iter().collect::<BTreeMap<String, Option<String>>>() {
            let before = self.held.get(&key);
            let (create_revision, version) = match value {
                Some(_) => before.map_or((at, 1), |it| (it.create_revision, it.version + 1)),
                None => (0, 0),
            };
            changes.push(Change { key, value, create_revision, version });
        }
        let revision = Revision { revision: at, changes };
        self.apply(&revision);
        self.added.push(revision);
    }

    /// Adds a commit of the acting master.
    pub fn commit(&mut self, mut ops: Vec<Op>) {
        let lock = self.run.keys.master_lock();
        ops.push((lock.clone(), self.held[&lock].value.clone()));
        self.txn(ops);
    }

    /// Checks the whole history.
    pub fn check(&self) -> HistoryReport {
        let recorded = &self.run.recording.revisions[..self.recorded];
        self.run.check(&[], &[recorded, &self.added].concat())
    }

    /// Asserts that the last revision breaks this rule with this text, and that no other revision breaks any.
    pub fn assert_reports(&self, rule: Rule, text: &str) {
        let report = self.check();
        let is_last = report.broken.iter().all(|it| it.revision == self.last());
        assert!(is_last, "seed {}: {report}", self.run.seed);
        let found = report.broken.iter().any(|it| it.rule == rule && it.text.contains(text));
        assert!(found, "seed {}: {rule:?}, `{text}`: {report}", self.run.seed);
    }

    pub fn assert_clean(&self) {
        let report = self.check();
        assert!(report.is_clean(), "seed {}: {report}", self.run.seed);
    }
}
