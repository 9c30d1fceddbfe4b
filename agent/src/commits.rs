//! The last commit of the workers of a node, in the memory of the agent: it outlives a worker that is killed.
//!
//! There are two buffers. A worker overwrites the one that does not hold the last commit, and reports the end;
//! so a worker that dies while it writes leaves the last commit as it is.
//!
//! In a job whose records are counted, a state that was written is a *candidate* until the master has decided on it: it
//! replaces the last commit when the agent knows that it counts.

use std::os::fd::{AsRawFd, OwnedFd};

use bytes::Bytes;
use rustix::fs::{MemfdFlags, memfd_create};
use steadfast_process::Failure;

/// Two buffers, of which one holds the last commit.
#[derive(Debug)]
pub(crate) struct Commits {
    buffers: [CommitBuffer; 2],
    last: Option<Commit>,
    candidate: Option<Commit>,
}

/// Memory for one commit. It is freed when this is dropped.
#[derive(Debug)]
pub struct CommitBuffer {
    /// The path at which workers open it.
    path: String,
    _memory: Option<OwnedFd>,
}

/// A commit, and the buffer that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Commit {
    pub path: String,
    pub number: u64,
    pub bytes: u64,
    /// The record of the commit as JSON, if the order of records is dynamic and it is known.
    pub record: Bytes,
}

impl CommitBuffer {
    /// Allocates anonymous memory, which other processes of the same user can open.
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub(crate) fn allocate() -> Result<Self, Failure> {
        let memory = memfd_create("steadfast-commit", MemfdFlags::CLOEXEC)
            .map_err(|error| Failure::io("cannot allocate memory for commits", &error.into()))?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        Ok(Self { path, _memory: Some(memory) })
    }

    /// Returns the buffer at a path of a simulated machine.
    pub fn simulated(path: String) -> Self {
        Self { path, _memory: None }
    }
}

impl Commits {
    /// Starts with two empty buffers.
    pub fn new(buffers: [CommitBuffer; 2]) -> Self {
        Self { buffers, last: None, candidate: None }
    }

    /// Returns the path at which a worker writes its next commit. A candidate there is lost.
    pub fn begin(&mut self) -> String {
        self.candidate = None;
        let paths = self.buffers.each_ref().map(|buffer| buffer.path.clone());
        let is_free = |path: &&String| self.last.as_ref().is_none_or(|last| last.path != **path);
        paths.iter().find(is_free).cloned().unwrap_or_default()
    }

    /// Keeps a commit that was written. One of another buffer, or an older one, does not count.
    pub fn end(&mut self, commit: Commit) {
        if self.may_keep(&commit) {
            self.last = Some(commit);
        }
    }

    /// Keeps a state that was written beside the last commit, until it is known whether it is one.
    pub fn propose(&mut self, candidate: Commit) {
        if self.may_keep(&candidate) {
            self.candidate = Some(candidate);
        }
    }

    /// Makes the candidate the last commit if it has the number of a commit that was decided; otherwise drops it.
    pub fn settle(&mut self, decided: u64, record: Bytes) {
        if let Some(candidate) = self.candidate.take_if(|it| it.number == decided) {
            self.last = Some(Commit { record, ..candidate });
        }
        self.candidate = None;
    }

    fn may_keep(&self, commit: &Commit) -> bool {
        let is_known = self.buffers.iter().any(|buffer| buffer.path == commit.path);
        is_known && self.last.as_ref().is_none_or(|last| last.number <= commit.number)
    }

    pub fn last(&self) -> Option<&Commit> {
        self.last.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commits() -> Commits {
        Commits::new([CommitBuffer::allocate().unwrap(), CommitBuffer::allocate().unwrap()])
    }

    /// S001-38: a worker that dies while it writes a commit leaves the one before.
    #[test]
    fn the_last_commit_is_never_overwritten() {
        let mut commits = commits();
        let first = commits.begin();
        std::fs::write(&first, "one").unwrap();
        commits.end(Commit { path: first.clone(), number: 1, bytes: 3, record: Bytes::new() });
        let second = commits.begin();
        assert_ne!(first, second);
        std::fs::write(&second, "tw").unwrap();
        let last = commits.last().unwrap().clone();
        assert_eq!((last.number, std::fs::read(last.path).unwrap()), (1, b"one".to_vec()));
        commits.end(Commit { path: second, number: 2, bytes: 2, record: Bytes::new() });
        assert_eq!(commits.begin(), first);
    }

    /// S003-9: a state is the last commit once it is decided, and the one before is kept until then.
    #[test]
    fn a_candidate_counts_when_it_is_decided() {
        let mut commits = commits();
        let written = |commits: &mut Commits, number| {
            let path = commits.begin();
            commits.propose(Commit { path, number, bytes: 3, record: Bytes::new() });
        };
        let last = |commits: &Commits| commits.last().map(|it| it.number);
        written(&mut commits, 1);
        assert_eq!(last(&commits), None);
        commits.settle(1, Bytes::new());
        assert_eq!(last(&commits), Some(1));
        // The workers of another node died before they had this one.
        written(&mut commits, 2);
        commits.settle(1, Bytes::new());
        assert_eq!(last(&commits), Some(1));
        commits.settle(2, Bytes::new());
        assert_eq!(last(&commits), Some(1), "its buffer may be overwritten already");
    }

    #[test]
    fn a_commit_of_another_file_or_an_older_one_does_not_count() {
        let mut commits = commits();
        let path = commits.begin();
        commits.end(Commit {
            path: "/etc/passwd".to_owned(),
            number: 9,
            bytes: 3,
            record: Bytes::new(),
        });
        assert_eq!(commits.last(), None);
        commits.end(Commit { path: path.clone(), number: 2, bytes: 3, record: Bytes::new() });
        let path = commits.begin();
        commits.end(Commit { path, number: 1, bytes: 3, record: Bytes::new() });
        assert_eq!(commits.last().map(|it| it.number), Some(2));
    }
}
