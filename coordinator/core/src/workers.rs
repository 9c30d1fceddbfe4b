//! The workers of a coordinator, and the closures that each of them runs.

use std::collections::{BTreeMap, BTreeSet};

use crate::call::{ClosureId, WorkerIndex};

/// Indicates whether a worker takes closures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// It takes closures.
    Running,
    /// It takes none. The closures that it runs may end.
    Stopped,
}

/// The state of the connection to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Lost,
    Open,
    /// The worker ends after the closures that it runs.
    Leaves,
}

#[derive(Clone, Debug)]
struct Worker {
    state: Use,
    link: Link,
    /// Limits the closures that it runs at once.
    threads: usize,
    /// By attempt. A closure that was given back or cancelled is absent: the worker still computes it.
    running: BTreeMap<u64, Option<ClosureId>>,
    /// Closures that only this worker may run, and that it does not run yet.
    pinned: BTreeSet<ClosureId>,
    /// The number of the last attempt on this worker. Of several idle workers, the one with the lowest is next.
    last_attempt: u64,
}

impl Worker {
    fn can_take(&self) -> bool {
        self.state == Use::Running && self.link == Link::Open && self.running.len() < self.threads
    }

    fn is_idle(&self) -> bool {
        self.running.values().all(Option::is_none)
    }
}

/// All workers that were ever added, by index.
#[derive(Clone, Debug, Default)]
pub(crate) struct Workers {
    by_index: BTreeMap<WorkerIndex, Worker>,
    attempts: u64,
}

impl Workers {
    /// Creates the workers of a coordinator that has made so many attempts before.
    pub fn new(attempts: u64) -> Self {
        Self { attempts, ..Self::default() }
    }

    /// Adds a worker, or lets it take closures again.
    pub fn start(&mut self, index: WorkerIndex) {
        let new = || Worker {
            state: Use::Running,
            link: Link::Lost,
            threads: 0,
            running: BTreeMap::new(),
            pinned: BTreeSet::new(),
            last_attempt: 0,
        };
        self.by_index.entry(index).or_insert_with(new).state = Use::Running;
    }

    /// Stops a worker; returns the closures that only it may run.
    pub fn stop(&mut self, index: WorkerIndex) -> BTreeSet<ClosureId> {
        let Some(worker) = self.by_index.get_mut(&index) else { return BTreeSet::new() };
        worker.state = Use::Stopped;
        std::mem::take(&mut worker.pinned)
    }

    pub fn connected(&mut self, index: WorkerIndex, threads: usize) {
        if let Some(worker) = self.by_index.get_mut(&index) {
            (worker.link, worker.threads) = (Link::Open, threads);
        }
    }

    pub fn leaves(&mut self, index: WorkerIndex) {
        if let Some(worker) = self.by_index.get_mut(&index) {
            worker.link = Link::Leaves;
        }
    }

    /// Notes that the connection has ended. Each closure that the worker runs ends with its own call.
    pub fn lost(&mut self, index: WorkerIndex) {
        if let Some(worker) = self.by_index.get_mut(&index) {
            worker.link = Link::Lost;
        }
    }

    /// Notes that a worker runs a closure; returns whether there is such a worker.
    pub fn resume(&mut self, index: WorkerIndex, attempt: u64, id: ClosureId) -> bool {
        let Some(worker) = self.by_index.get_mut(&index) else { return false };
        worker.running.insert(attempt, Some(id));
        true
    }

    /// Returns the closures that a worker runs, with their attempts.
    pub fn runs(&self, index: WorkerIndex) -> Vec<(u64, ClosureId)> {
        let running = self.by_index.get(&index).map(|it| &it.running);
        let counted = running.into_iter().flatten().filter_map(|(&it, id)| Some((it, (*id)?)));
        counted.collect()
    }

    /// Notes the reply to an attempt; returns its closure if the reply counts.
    pub fn finished(&mut self, index: WorkerIndex, attempt: u64) -> Option<ClosureId> {
        self.by_index.get_mut(&index)?.running.remove(&attempt).flatten()
    }

    /// Makes the reply of an attempt not count. The worker goes on to compute it. Returns whether it runs.
    pub fn disown(&mut self, index: WorkerIndex, attempt: u64) -> bool {
        let worker = self.by_index.get_mut(&index);
        worker.and_then(|it| it.running.get_mut(&attempt)).is_some_and(|it| it.take().is_some())
    }

    /// Keeps a closure for a worker; returns whether that worker is in use.
    pub fn pin(&mut self, index: WorkerIndex, id: ClosureId) -> bool {
        match self.by_index.get_mut(&index) {
            Some(worker) if worker.state == Use::Running => worker.pinned.insert(id),
            Some(_) | None => false,
        }
    }

    pub fn unpin(&mut self, index: WorkerIndex, id: ClosureId) {
        if let Some(worker) = self.by_index.get_mut(&index) {
            worker.pinned.remove(&id);
        }
    }

    /// Returns whether a worker is stopped and runs nothing that counts.
    pub fn is_at_rest(&self, index: WorkerIndex) -> bool {
        self.by_index.get(&index).is_some_and(|it| it.state == Use::Stopped && it.is_idle())
    }

    /// Takes the next closure for the worker that has the fewest: one that only it may run, else the first of `ready`.
    /// Returns the number of the attempt with it.
    pub fn assign(
        &mut self,
        ready: &mut BTreeSet<ClosureId>,
    ) -> Option<(WorkerIndex, u64, ClosureId)> {
        let has_work = |it: &Worker| !it.pinned.is_empty() || !ready.is_empty();
        let able = self.by_index.iter_mut().filter(|(_, it)| it.can_take() && has_work(it));
        let next = able.min_by_key(|(index, it)| (it.running.len(), it.last_attempt, **index));
        let (&index, worker) = next?;
        let id = worker.pinned.pop_first().or_else(|| ready.pop_first())?;
        self.attempts += 1;
        worker.last_attempt = self.attempts;
        worker.running.insert(self.attempts, Some(id));
        Some((index, self.attempts, id))
    }
}

#[cfg(test)]
impl Workers {
    /// Returns the closures that run, with worker and attempt, after checking what always holds.
    pub fn running(&self) -> Vec<(WorkerIndex, u64, ClosureId)> {
        let all = self.by_index.iter().flat_map(|(&index, worker)| {
            assert!(worker.state == Use::Running || worker.pinned.is_empty(), "{worker:?}");
            worker.running.iter().filter_map(move |(&attempt, id)| Some((index, attempt, (*id)?)))
        });
        all.collect()
    }

    pub fn attempts_of(&self, index: WorkerIndex) -> Vec<u64> {
        self.by_index.get(&index).map_or_else(Vec::new, |it| it.running.keys().copied().collect())
    }

    pub fn can_take(&self) -> Vec<WorkerIndex> {
        let able = self.by_index.iter().filter(|(_, worker)| worker.can_take());
        able.map(|(&index, _)| index).collect()
    }

    pub fn threads_exceeded(&self) -> bool {
        self.by_index.values().any(|it| 0 < it.threads && it.threads < it.running.len())
    }
}
