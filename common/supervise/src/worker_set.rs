//! Workers that run and stop together.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::join_all;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use nix::sys::signal::Signal;
use tokio::task::JoinHandle;

use crate::processes::{Scope, Swept};
use crate::stop::{stop, sweep};
use crate::{Exit, Worker};

/// Workers that run and stop together. They are identified by their index.
#[derive(Debug, Default)]
pub struct WorkerSet {
    workers: Vec<Worker>,
    /// The workers that [`Self::next_exit`] has returned.
    returned: BTreeSet<usize>,
    /// Ended workers, and the search for what is left of them; it goes on if [`Self::next_exit`] is cancelled.
    sweep: Option<(Vec<usize>, JoinHandle<Swept>)>,
}

impl FromIterator<Worker> for WorkerSet {
    fn from_iter<I: IntoIterator<Item = Worker>>(workers: I) -> Self {
        Self { workers: workers.into_iter().collect(), ..Self::default() }
    }
}

impl WorkerSet {
    /// Puts a new worker in the place of one that has ended and was returned by [`Self::next_exit`].
    pub fn replace(&mut self, index: usize, worker: Worker) {
        self.workers[index] = worker;
        self.returned.remove(&index);
    }

    /// Returns the workers, in the order of their specs.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// Waits for the first worker to end that was not returned yet, and returns its index and exit. Returns `None`
    /// after all have ended. Can be cancelled and repeated.
    pub async fn next_exit(&mut self) -> Option<(usize, Exit)> {
        let index = loop {
            if let Some(index) = self.first_finished() {
                break index;
            }
            self.some_ended().await?;
            self.finish_ended().await;
        };
        self.returned.insert(index);
        Some((index, self.workers[index].finish().await))
    }

    /// Stops all workers: asks them to end by SIGTERM; after `grace`, they and all their descendants get SIGKILL.
    /// Returns all exits, including those of workers that had ended before.
    pub async fn stop(&mut self, grace: Duration) -> Vec<Exit> {
        self.stop_by(Signal::SIGTERM, grace).await
    }

    /// Stops all workers as [`Self::stop`] does, with another signal for those that handle it.
    pub async fn stop_by(&mut self, signal: Signal, grace: Duration) -> Vec<Exit> {
        stop(&mut self.workers.iter_mut().collect::<Vec<_>>(), signal, grace).await;
        join_all(self.workers.iter_mut().map(Worker::finish)).await
    }

    /// Kills one worker and its descendants; [`Self::next_exit`] returns it.
    pub fn kill(&self, index: usize) {
        self.workers[index].signal(Signal::SIGKILL);
    }

    /// Returns the first worker to end of those that are finished, and were not returned yet. The cause of a failure
    /// ends before the workers that fail because of it, even if its output ends later.
    fn first_finished(&self) -> Option<usize> {
        let waiting = self.workers.iter().enumerate().filter(|(it, _)| !self.returned.contains(it));
        let finished = waiting.filter(|(_, worker)| worker.is_finished());
        finished
            .filter_map(|(index, worker)| Some((worker.ended_at()?, index)))
            .min()
            .map(|it| it.1)
    }

    /// Waits for the process of a worker to end that was not returned yet; notes all that have ended.
    async fn some_ended(&mut self) -> Option<()> {
        let returned = &self.returned;
        let waiting = self.workers.iter_mut().enumerate().filter(|(it, _)| !returned.contains(it));
        let mut ends: FuturesUnordered<_> = waiting.map(|(_, worker)| worker.ended()).collect();
        ends.next().await?;
        while let Some(Some(_)) = ends.next().now_or_never() {}
        Some(())
    }

    /// Kills what is left of all workers whose processes have ended: one search serves them all. Those that end
    /// meanwhile are the next ones.
    async fn finish_ended(&mut self) {
        if self.sweep.is_none() {
            let ended = self.workers.iter_mut().enumerate();
            let ended = ended.filter(|(_, it)| it.ended_at().is_some() && !it.is_finished());
            let mut ended: Vec<(usize, &mut Worker)> = ended.collect();
            join_all(ended.iter_mut().map(|(_, worker)| worker.drained())).await;
            let mut scope = Scope::default();
            ended.iter().for_each(|(_, worker)| scope.extend(&worker.scope));
            let indexes = ended.into_iter().map(|(index, _)| index).collect();
            self.sweep = Some((indexes, tokio::spawn(sweep(scope))));
        }
        let Some((_, task)) = &mut self.sweep else { return };
        // It fails only if the runtime is shutting down.
        let swept = task.await.unwrap_or_default();
        let Some((indexes, _)) = self.sweep.take() else { return };
        let swept_now = self.workers.iter_mut().enumerate().filter(|(it, _)| indexes.contains(it));
        join_all(swept_now.map(|(_, worker)| {
            worker.swept(&swept);
            worker.finish()
        }))
        .await;
    }
}
