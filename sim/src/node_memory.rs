//! The memory that the workers of a simulated node share: their commits, and the group that they form in a round.

use std::collections::BTreeMap;

use bytes::Bytes;
use steadfast_common::ids::Round;
use steadfast_host::time::Instant;
use tokio::sync::watch;

use crate::world::ProcessId;

/// The group of the workers of a node has broken up: one has left it, or it is that of another round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BrokenUp;

/// A commit that a node keeps. Later ones have larger numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LastCommit {
    pub number: u64,
    /// The state: how many steps it has seen.
    pub steps: u64,
}

/// A commit that a node can begin a round with. Later ones are larger.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct KnownCommit {
    pub commit: LastCommit,
    /// The record of the commit as JSON, if the order of records is dynamic and the node knows it.
    pub record: String,
}

impl From<LastCommit> for KnownCommit {
    fn from(commit: LastCommit) -> Self {
        Self { commit, record: String::new() }
    }
}

impl KnownCommit {
    /// Reads what another node has passed to a barrier.
    pub fn parse(data: &Bytes) -> Option<Self> {
        let mut parts = std::str::from_utf8(data).ok()?.splitn(3, ' ');
        let mut number = || parts.next()?.parse().ok();
        let commit = LastCommit { number: number()?, steps: number()? };
        Some(Self { commit, record: parts.next()?.to_owned() })
    }
}

impl std::fmt::Display for KnownCommit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} {} {}", self.commit.number, self.commit.steps, self.record)
    }
}

/// The memory of a node. It ends with the agent.
#[derive(Default)]
pub struct NodeMemory(watch::Sender<Memory>);

#[derive(Default)]
struct Memory {
    /// The commits in the buffers, by path; a buffer that is being written is not listed.
    buffers: BTreeMap<String, LastCommit>,
    /// The last commit of workers that do not use the service of the agent.
    file: u64,
    last_output: Option<Instant>,
    group: Group,
}

/// The workers of a node in a round.
#[derive(Default)]
struct Group {
    round: Round,
    /// How many steps each worker has come to.
    come: BTreeMap<ProcessId, u64>,
    /// The steps that the workers of all nodes have passed; absent until they have formed a group.
    passed: Option<u64>,
    /// The commit that they began with.
    begun: LastCommit,
    is_broken_up: bool,
}

impl NodeMemory {
    /// Makes a worker a member of the group of a round.
    pub fn join(&self, round: Round, process: ProcessId) {
        self.0.send_modify(|memory| {
            memory.last_output = Some(Instant::now());
            if memory.group.round < round {
                memory.group = Group { round, ..Group::default() };
            }
            if memory.group.round == round {
                memory.group.come.insert(process, 0);
            }
        });
    }

    /// Breaks up the group of a worker that leaves it.
    pub fn leave(&self, process: ProcessId) {
        self.0.send_if_modified(|memory| {
            let breaks_up = memory.group.come.contains_key(&process);
            memory.group.is_broken_up |= breaks_up;
            breaks_up
        });
    }

    /// Notes that a worker has come to a step.
    pub fn come(&self, process: ProcessId, step: u64) {
        self.0.send_modify(|memory| {
            memory.last_output = Some(Instant::now());
            memory.group.come.entry(process).and_modify(|come| *come = step);
        });
    }

    /// Waits until this many workers have come to a step.
    pub async fn until_come(&self, round: Round, count: u32, step: u64) -> Result<(), BrokenUp> {
        let have_come = |group: &Group| {
            let come = group.come.values().filter(|come| step <= **come).count();
            (count as usize <= come).then_some(())
        };
        self.until(round, have_come).await
    }

    /// Notes that the workers of all nodes have formed a group, which begins with a commit.
    pub fn begin(&self, round: Round, begun: LastCommit) {
        self.0.send_modify(|memory| {
            if memory.group.round == round {
                (memory.group.begun, memory.group.passed) = (begun, Some(begun.steps));
            }
        });
    }

    /// Waits until the workers of all nodes have formed a group; returns the commit that they begin with.
    pub async fn until_begun(&self, round: Round) -> Result<LastCommit, BrokenUp> {
        self.until(round, |group| group.passed.map(|_| group.begun)).await
    }

    /// Notes how many steps the workers of all nodes have passed.
    pub fn pass(&self, round: Round, steps: u64) {
        self.0.send_modify(|memory| {
            if memory.group.round == round {
                memory.group.passed = Some(steps);
            }
        });
    }

    /// Waits until the workers of all nodes have passed this many steps.
    pub async fn until_passed(&self, round: Round, steps: u64) -> Result<(), BrokenUp> {
        self.until(round, |group| group.passed.filter(|passed| steps <= *passed).map(drop)).await
    }

    async fn until<T>(
        &self,
        round: Round,
        found: impl Fn(&Group) -> Option<T>,
    ) -> Result<T, BrokenUp> {
        let mut changes = self.0.subscribe();
        loop {
            {
                let group = &changes.borrow_and_update().group;
                if group.round != round {
                    return Err(BrokenUp);
                }
                if let Some(found) = found(group) {
                    return Ok(found);
                }
                if group.is_broken_up {
                    return Err(BrokenUp);
                }
            }
            // Not an error: `self` has the sender.
            let _ = changes.changed().await;
        }
    }

    /// Begins to write a buffer.
    pub fn begin_write(&self, path: &str) {
        self.0.send_modify(|memory| {
            memory.buffers.remove(path);
        });
    }

    /// Ends to write a buffer.
    pub fn end_write(&self, path: &str, commit: LastCommit) {
        self.0.send_modify(|memory| {
            memory.buffers.insert(path.to_owned(), commit);
        });
    }

    /// Returns what a buffer holds, if it was written to its end.
    pub fn read(&self, path: &str) -> Option<LastCommit> {
        self.0.borrow().buffers.get(path).copied()
    }

    /// Writes the commit of workers that do not use the service of the agent.
    pub fn write_file(&self, number: u64) {
        self.0.send_modify(|memory| memory.file = number);
    }

    pub fn read_file(&self) -> u64 {
        self.0.borrow().file
    }

    pub fn last_output(&self) -> Option<Instant> {
        self.0.borrow().last_output
    }
}
