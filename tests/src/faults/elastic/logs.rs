//! The logs of workers: what each of them did, as `tests/programs/elastic_digits.py` writes it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The state of a worker when it wrote a line.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Moment {
    pub round: u64,
    pub rank: u32,
    /// Commits so far, along the history of this state.
    pub commit: u64,
    pub step: u64,
    /// SHA-256 of the weights.
    pub sha: String,
}

/// One line of a log.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Entry {
    /// A worker was started, by the agent process `node` (`<index>.<life>`).
    Start { node: String, local_rank: u32, pid: i32 },
    /// The workers of a round have the same state, and begin to train.
    Begin(Moment),
    /// A step was done.
    Step {
        #[serde(flatten)]
        moment: Moment,
        loss: f64,
    },
    /// A commit is about to be saved.
    Commit(Moment),
    /// The worker went back to its last commit.
    Restore(Moment),
    /// The worker has trained to the end.
    End {
        #[serde(flatten)]
        moment: Moment,
        accuracy: f64,
    },
}

/// Follows the logs in a directory.
#[derive(Debug)]
pub struct Logs {
    directory: PathBuf,
    /// Bytes that were read of each log.
    read: BTreeMap<PathBuf, u64>,
    /// The lines of each worker, by log.
    entries: BTreeMap<PathBuf, Vec<Entry>>,
}

impl Logs {
    pub fn new(directory: &Path) -> Self {
        fs::create_dir_all(directory).expect("the directory of the test is writable");
        Self { directory: directory.to_owned(), read: BTreeMap::new(), entries: BTreeMap::new() }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Reads what was written since the last call.
    pub fn follow(&mut self) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let from = self.read.entry(path.clone()).or_default();
            let mut text = String::new();
            let mut file = File::open(&path).expect("workers delete no logs");
            file.seek(SeekFrom::Start(*from)).expect("a file can be read from anywhere");
            file.read_to_string(&mut text).expect("workers write text");
            let whole = text.rfind('\n').map_or(0, |end| end + 1);
            *from += whole as u64;
            let entries = self.entries.entry(path.clone()).or_default();
            for line in text[..whole].lines() {
                let entry = serde_json::from_str(line);
                entries.push(entry.unwrap_or_else(|error| panic!("{}: {error}", path.display())));
            }
        }
    }

    /// Returns all lines; those of one worker are in order.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values().flatten()
    }

    /// Returns the largest step that was done.
    pub fn steps(&self) -> u64 {
        let steps = self.entries().map(|entry| match entry {
            Entry::Step { moment, .. } => moment.step,
            _ => 0,
        });
        steps.max().unwrap_or_default()
    }

    /// Returns the agent processes whose workers have begun the newest round.
    pub fn newest_members(&self) -> Vec<&str> {
        let last_of = |entries: &Vec<Entry>| {
            entries.iter().rev().find_map(|entry| match entry {
                Entry::Begin(moment) => Some(moment.round),
                _ => None,
            })
        };
        let newest = self.entries.values().filter_map(last_of).max();
        let of_newest =
            self.entries.values().filter(|it| newest.is_some() && last_of(it) == newest);
        of_newest.filter_map(|it| Some(start_of(it)?.0)).collect()
    }

    /// Returns the process id of the worker that an agent process started last as its `local_rank`.
    pub fn worker(&self, node: &str, local_rank: u32) -> Vec<i32> {
        let starts = self.entries.values().filter_map(|it| start_of(it));
        starts.filter(|it| (it.0, it.1) == (node, local_rank)).map(|it| it.2).collect()
    }
}

fn start_of(entries: &[Entry]) -> Option<(&str, u32, i32)> {
    match entries.first()? {
        Entry::Start { node, local_rank, pid } => Some((node, *local_rank, *pid)),
        _ => None,
    }
}
