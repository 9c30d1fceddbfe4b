//! Checks what happened in etcd, revision by revision: who wrote, and whether queues, attempts,
//! generations and checkpoints kept their rules.
//!
//! The input is plain data, so that it can come from any watch. [`etcdctl::parse`] reads what
//! `etcdctl watch --prefix --rev=1 -w json` writes.

pub mod etcdctl;
mod keyspace;
mod queues;
mod records;

use std::fmt;

use serde::Serialize;
use steadfast_common::dataset::Manifest;
use steadfast_common::keys::Keys;
use steadfast_common::spec::JobSpec;

use keyspace::Keyspace;
use queues::Queues;

/// A key that was put (with its value) or deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: String,
    /// Absent when the key was deleted.
    pub value: Option<String>,
    /// The revision at which a key that was put came into being.
    pub create_revision: i64,
    /// How often it was put since then.
    pub version: i64,
}

/// All changes of one transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    pub revision: i64,
    pub changes: Vec<Change>,
}

/// What a history is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub keys: &'a Keys,
    pub spec: &'a JobSpec,
    pub manifest: &'a Manifest,
}

/// Rules that a history can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// What only the acting master may change is changed together with its lock, by the one who
    /// took the lock; locks only get younger.
    Fence,
    /// Each task is in exactly one queue, and is done only after it was pending.
    Queues,
    /// A pass ends when each of its tasks is done or given up.
    PassEnd,
    /// No attempt has the number of another, and none comes back.
    Attempts,
    /// Generations count up by one.
    Generations,
    /// The pointer names a checkpoint that exists, and does not go back behind a good one.
    Checkpoints,
    /// What is written once stays as it is.
    Once,
    /// A value is not what its key holds.
    Value,
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
    /// Revisions looked at.
    pub revisions: u64,
    /// Those in which the acting master wrote.
    pub commits: u64,
    /// How often the master's lock was taken.
    pub reigns: u64,
    /// Attempts that were handed out.
    pub attempts: u64,
    pub generations: u64,
    pub checkpoints: u64,
    pub broken: Vec<Broken>,
}

impl HistoryReport {
    /// Whether every rule was kept.
    pub fn is_clean(&self) -> bool {
        self.broken.is_empty()
    }

    fn breaks(&mut self, revision: i64, rule: Rule, text: impl Into<String>) {
        self.broken.push(Broken { revision, rule, text: text.into() });
    }
}

/// Checks `revisions`, ascending, that follow on a moment when etcd held `start` (nothing, for a
/// history from the beginning).
pub fn check(job: &Job<'_>, start: &[Change], revisions: &[Revision]) -> HistoryReport {
    let mut checker = Checker::new(job, start);
    revisions.iter().for_each(|revision| checker.check(revision));
    checker.report
}

/// Checks a history revision by revision, as it comes to be.
pub struct Checker<'a> {
    keyspace: Keyspace<'a>,
    queues: Queues<'a>,
    /// What was found so far.
    pub report: HistoryReport,
}

impl<'a> Checker<'a> {
    /// Begins at a moment when etcd held `start`.
    pub fn new(job: &Job<'a>, start: &[Change]) -> Self {
        let (keyspace, queues) = (Keyspace::new(job, start), Queues::new(job, start));
        Self { keyspace, queues, report: HistoryReport::default() }
    }

    /// Takes the next revision.
    pub fn check(&mut self, revision: &Revision) {
        self.report.revisions += 1;
        self.keyspace.check(revision, &mut self.report);
        self.queues.check(revision, &self.keyspace, &mut self.report);
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "revision {}: {}", self.revision, self.text)
    }
}

impl fmt::Display for HistoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "history: {} revisions, {} commits in {} reigns, {} attempts, {} generations, {} \
             checkpoints",
            self.revisions,
            self.commits,
            self.reigns,
            self.attempts,
            self.generations,
            self.checkpoints
        )?;
        self.broken.iter().try_for_each(|broken| writeln!(f, "  violation: {broken}"))?;
        match self.broken.len() {
            0 => write!(f, "history clean"),
            count => write!(f, "history not clean: {count} rules broken"),
        }
    }
}
