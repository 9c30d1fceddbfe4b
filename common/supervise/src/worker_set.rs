//! Workers that run and stop together.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use nix::sys::signal::Signal;

use crate::stop::stop;
use crate::{Exit, StackDump, Worker};

/// Workers that run and stop together. They are identified by their index.
#[derive(Debug, Default)]
pub struct WorkerSet {
    workers: Vec<Worker>,
    /// Those that [`Self::next_exit`] has returned.
    returned: BTreeSet<usize>,
}

impl WorkerSet {
    pub(crate) fn push(&mut self, worker: Worker) {
        self.workers.push(worker);
    }

    /// Puts a new worker in the place of one that has ended and was returned by [`Self::next_exit`].
    pub fn replace(&mut self, index: usize, worker: Worker) {
        self.workers[index] = worker;
        self.returned.remove(&index);
    }

    /// Returns the workers, in the order of their specs.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// Waits for the first worker to end that was not returned yet: its index and exit. Returns `None` after all
    /// have ended. Can be cancelled and repeated.
    pub async fn next_exit(&mut self) -> Option<(usize, Exit)> {
        let index = self.next_ended().await?;
        let exit = self.workers[index].wait().await;
        self.returned.insert(index);
        Some((index, exit))
    }

    /// Stops all workers and their descendants: SIGTERM, and SIGKILL after `grace`. Returns all exits, including
    /// those of workers that had ended before.
    pub async fn stop(&mut self, grace: Duration) -> Vec<Exit> {
        stop(&mut self.workers.iter_mut().collect::<Vec<_>>(), grace).await;
        join_all(self.workers.iter_mut().map(Worker::finish)).await
    }

    /// Kills one worker and its descendants; [`Self::next_exit`] returns it.
    pub fn kill(&self, index: usize) {
        self.workers[index].signal(Signal::SIGKILL);
    }

    /// Sends a signal to the process groups of all workers.
    pub fn signal(&self, signal: Signal) {
        for worker in &self.workers {
            worker.signal(signal);
        }
    }

    /// Asks all workers to print their stacks; see [`Worker::dump_stacks`].
    pub fn dump_stacks(&self) -> Vec<StackDump> {
        self.workers.iter().map(Worker::dump_stacks).collect()
    }

    /// Waits for the process of a worker to end. The cause of a failure ends before the workers that fail because
    /// of it, even if its output ends later.
    async fn next_ended(&mut self) -> Option<usize> {
        let returned = &self.returned;
        let waiting = || (0..self.workers.len()).filter(|index| !returned.contains(index));
        let ended = waiting().filter_map(|it| Some((self.workers[it].ended_at()?, it))).min();
        if let Some((_, index)) = ended {
            return Some(index);
        }
        let workers = self.workers.iter_mut().enumerate();
        let mut ends: FuturesUnordered<_> = workers
            .filter(|(index, _)| !returned.contains(index))
            .map(|(index, worker)| async move {
                worker.ended().await;
                index
            })
            .collect();
        ends.next().await
    }
}
