//! Checks the history of etcd, revision by revision: which process wrote, and whether queues, attempts,
//! generations and checkpoints, or the rounds of an elastic job, obeyed their rules.
//!
//! The input is plain data and can come from any watch. [`etcdctl::parse`] reads the output of
//! `etcdctl watch --prefix --rev=1 -w json`.

mod commits;
mod dealt;
pub mod etcdctl;
mod keyspace;
mod queues;
mod records;
mod rounds;
mod stream;

use std::fmt;

use serde::Serialize;
use steadfast_common::job::dataset::Manifest;
use steadfast_common::job::spec::JobSpec;
use steadfast_common::records::commits::DataPosition;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::NodeRange;

use commits::Commits;
use keyspace::Keyspace;
use queues::Queues;
use rounds::Rounds;
use stream::StreamKeys;

/// A key that was put (with its value) or deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: String,
    /// Absent when the key was deleted.
    pub value: Option<String>,
    /// The revision that created the key, if it was put.
    pub create_revision: i64,
    /// The number of puts since the key was created.
    pub version: i64,
}

/// All changes of one transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    pub revision: i64,
    pub changes: Vec<Change>,
}

/// The job that a history belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub keys: &'a Keys,
    pub spec: &'a JobSpec,
    pub manifest: &'a Manifest,
}

/// The elastic job that a history belongs to.
#[derive(Clone, Copy, Debug)]
pub struct ElasticJob<'a> {
    pub keys: &'a Keys,
    /// The numbers of nodes that a round may have.
    pub nodes: NodeRange,
    /// The number of records of a pass, if commits count them.
    pub records: Option<u64>,
}

/// Rules that a history can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Keys that only the acting master may change are written in one transaction with its lock, by the
    /// process that acquired the lock; a later lock has a higher create-revision.
    Fence,
    /// Each task is in exactly one queue, and becomes done only after it was pending.
    Queues,
    /// A pass ends when each of its tasks is done or given up.
    PassEnd,
    /// Attempt numbers are unique, and no attempt that is over becomes pending again.
    Attempts,
    /// Generation numbers increase by one.
    Generations,
    /// The pointer names an existing checkpoint, and does not move back past a valid one.
    Checkpoints,
    /// Records that are written once do not change.
    Once,
    /// What decides about the course of a job follows from its evaluations, each of which counts once.
    Course,
    /// Each value has the format that its key requires.
    Value,
    /// Round numbers increase by one. The number of members is allowed, ranks have no gaps, members of the last
    /// round keep their order, and the others follow by age.
    Rounds,
    /// Each member of a round asked for it, in the incarnation that is a member; and each node that asked is a
    /// member, if there is room.
    Asked,
    /// A phase of a tag is released when each member of the round has an entry in it.
    Barriers,
    /// Each member of a round has the state of a commit, which follows the last one by records that were not used
    /// before. A round begins with the last commit, or with an earlier one if no member has it.
    Commits,
    /// The passes of a stream are numbered without gaps, and do not change. Each file is in one of them, none is
    /// added after the end, and none is deleted that a checkpoint needs.
    Stream,
    /// Nothing of a rendezvous changes after the result. A job succeeds when each member of its last round has. No
    /// round is formed after a member has succeeded, unless another one failed or was lost.
    End,
}

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Broken {
    pub revision: i64,
    pub rule: Rule,
    pub text: String,
}

/// The outcome of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HistoryReport {
    /// Revisions checked.
    pub revisions: u64,
    /// Revisions that the acting master committed.
    pub commits: u64,
    /// How often the master's lock was acquired.
    pub terms: u64,
    /// Attempts dispatched.
    pub attempts: u64,
    pub generations: u64,
    pub checkpoints: u64,
    /// Rounds formed by an elastic job.
    pub rounds: u64,
    /// Commits of an elastic job that all members of a round have decided.
    pub decided: u64,
    /// The records that the last of these commits has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<DataSeen>,
    pub broken: Vec<Broken>,
}

/// The records that the state of an elastic job has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DataSeen {
    /// The number of records of a pass.
    pub records: u64,
    #[serde(flatten)]
    pub position: DataPosition,
    /// Records of passes that ended early, which no update has used. Those before the first commit are not known.
    pub left_out: u64,
}

impl HistoryReport {
    /// Returns whether no rule was broken.
    pub fn is_clean(&self) -> bool {
        self.broken.is_empty()
    }

    fn breaks(&mut self, revision: i64, rule: Rule, text: impl Into<String>) {
        self.broken.push(Broken { revision, rule, text: text.into() });
    }
}

/// Checks `revisions`, ascending, which follow the state `start` of etcd (empty for a history from the
/// beginning).
pub fn check(job: &Job<'_>, start: &[Change], revisions: &[Revision]) -> HistoryReport {
    let mut checker = Checker::new(job, start);
    revisions.iter().for_each(|revision| checker.check(revision));
    checker.report
}

/// Checks the history of an elastic job: `revisions`, ascending, which follow the state `start` of etcd (empty for a
/// history from the beginning).
pub fn check_elastic(
    job: &ElasticJob<'_>,
    start: &[Change],
    revisions: &[Revision],
) -> HistoryReport {
    let mut checker = Checker::of_elastic(job, start);
    revisions.iter().for_each(|revision| checker.check(revision));
    checker.report
}

/// The rules that apply in addition to those of [`Keyspace`].
enum Rules<'a> {
    Training(Box<(Queues<'a>, StreamKeys<'a>)>),
    Elastic(Box<(Rounds<'a>, Option<Commits<'a>>)>),
}

/// Checks a history incrementally, revision by revision.
pub struct Checker<'a> {
    keyspace: Keyspace<'a>,
    rules: Rules<'a>,
    /// The findings so far.
    pub report: HistoryReport,
}

impl<'a> Checker<'a> {
    /// Creates a checker for the history of a training job, from the state `start` of etcd.
    pub fn new(job: &Job<'a>, start: &[Change]) -> Self {
        let rules = (Queues::new(job, start), StreamKeys::new(job.keys, start));
        let rules = Rules::Training(Box::new(rules));
        Self { keyspace: Keyspace::new(job.keys, start), rules, report: HistoryReport::default() }
    }

    /// Creates a checker for the history of an elastic job, from the state `start` of etcd.
    pub fn of_elastic(job: &ElasticJob<'a>, start: &[Change]) -> Self {
        let commits = job.records.map(|records| Commits::new(job.keys, records, start));
        let rules = Rules::Elastic(Box::new((Rounds::new(job, start), commits)));
        Self { keyspace: Keyspace::new(job.keys, start), rules, report: HistoryReport::default() }
    }

    /// Checks the next revision.
    pub fn check(&mut self, revision: &Revision) {
        self.report.revisions += 1;
        self.keyspace.check(revision, &mut self.report);
        match &mut self.rules {
            Rules::Training(rules) => {
                let (queues, stream) = &mut **rules;
                queues.check(revision, &self.keyspace, &mut self.report);
                stream.check(revision, &self.keyspace, &mut self.report);
            }
            Rules::Elastic(rules) => {
                let (rounds, commits) = &mut **rules;
                rounds.check(revision, &mut self.report);
                if let Some(commits) = commits {
                    commits.check(revision, &mut self.report);
                }
            }
        }
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "revision {}: {}", self.revision, self.text)
    }
}

impl fmt::Display for DataSeen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DataPosition { pass, used, seen } = self.position;
        write!(
            f,
            "the last one has seen {seen} records, each once in its pass, and is at record {used}"
        )?;
        write!(f, " of {} of pass {pass}; {} were left out", self.records, self.left_out)
    }
}

impl fmt::Display for HistoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (revisions, commits, terms) = (self.revisions, self.commits, self.terms);
        write!(f, "history: {revisions} revisions, {commits} commits in {terms} terms, ")?;
        match self.rounds {
            0 => writeln!(
                f,
                "{} attempts, {} generations, {} checkpoints",
                self.attempts, self.generations, self.checkpoints
            )?,
            rounds => writeln!(f, "{rounds} rounds")?,
        }
        if let Some(data) = &self.data {
            writeln!(f, "data: {} commits; {data}", self.decided)?;
        }
        self.broken.iter().try_for_each(|broken| writeln!(f, "  violation: {broken}"))?;
        match self.broken.len() {
            0 => write!(f, "history clean"),
            count => write!(f, "history not clean: {count} rules broken"),
        }
    }
}
