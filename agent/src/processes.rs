//! The processes of a node's workers, as its agent sees them.

use std::time::Duration;

use steadfast_agent_core::round::WorkerExit;
use steadfast_common::ids::Round;
use steadfast_process::Failure;

use crate::commits::CommitBuffer;

/// A worker to start in a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerStart {
    pub round: Round,
    pub rank: u32,
    /// The number among the workers of the node, which names the worker from one round to the next.
    pub local_rank: u32,
    /// The environment variables of the worker.
    pub variables: Vec<(String, String)>,
}

/// The workers of a node, which its agent starts, watches and ends: processes of this machine, or of a simulated one.
pub trait WorkerProcesses: Send {
    /// Allocates the memory for the commits of the workers.
    ///
    /// # Errors
    /// If the system refuses the memory.
    fn commit_buffers(&self) -> Result<[CommitBuffer; 2], Failure>;

    /// Starts workers, none of which runs. If one cannot be started, the others may run or not.
    ///
    /// # Errors
    /// If one cannot be started.
    fn start(
        &mut self,
        workers: Vec<WorkerStart>,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Shows what a worker prints from now on under another rank.
    fn rename(&mut self, local_rank: u32, rank: u32);

    /// Waits until a worker ends, and returns each one once; `None` after all have ended. Can be cancelled and repeated.
    fn next_exit(&mut self) -> impl Future<Output = Option<(u32, WorkerExit)>> + Send;

    /// Kills one worker; [`Self::next_exit`] returns it.
    fn kill(&mut self, local_rank: u32);

    /// Asks all workers to end, and kills those that run after `grace`. Completes when none runs.
    fn stop(&mut self, grace: Duration) -> impl Future<Output = ()> + Send;

    /// Returns for how long no worker has printed anything, if that is known.
    fn silence(&self) -> Option<Duration>;

    /// Asks the workers to print their stacks.
    fn ask_for_stacks(&mut self) -> impl Future<Output = ()> + Send;
}
