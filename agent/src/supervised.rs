//! The worker processes of this machine: the program of the user, its environment, its input and its output.

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::future::join_all;
use steadfast_agent_core::round::WorkerExit;
use steadfast_common::ids::NodeId;
use steadfast_process::{Failure, Shutdown};
use steadfast_supervise::{
    Exit, GuardProgram, Input, Output, Signal, Signaller, StartError, Supervisor, Worker,
    WorkerSet, WorkerSpec,
};
use tracing::{info, warn};

use crate::args::RunArgs;
use crate::commits::CommitBuffer;
use crate::interface;
use crate::processes::{WorkerProcesses, WorkerStart};
use crate::program::Program;
use crate::streams::targets;
use crate::warm::{WarmWorker, WarmWorkers};

/// The workers of this machine, under supervision.
pub(crate) struct Supervised {
    args: RunArgs,
    program: Program,
    /// The directory for the output of this agent's workers, and of no other's.
    logs: Option<PathBuf>,
    supervisor: Supervisor,
    set: WorkerSet,
    warm: WarmWorkers,
    shutdown: Shutdown,
}

impl Supervised {
    /// Starts the supervision of workers that run `program`.
    ///
    /// # Errors
    /// If the directory of the logs cannot be created, or the guard cannot be started.
    pub fn new(
        args: &RunArgs,
        program: Program,
        warm: WarmWorkers,
        node: NodeId,
        shutdown: &Shutdown,
    ) -> Result<Self, Failure> {
        let logs = args.log_dir.as_deref().map(|it| logs(it, args.job(), node)).transpose()?;
        let supervisor = Supervisor::new(GuardProgram::this_program()).map_err(start_failure)?;
        let (args, shutdown) = (args.clone(), shutdown.clone());
        let set = WorkerSet::default();
        Ok(Self { args, program, logs, supervisor, set, warm, shutdown })
    }

    /// Returns a handle that sends signals to the workers that run.
    pub fn signaller(&self) -> Signaller {
        self.supervisor.signaller()
    }

    /// Ends the supervision, and kills what is left of the workers.
    pub async fn close(self) {
        // Before the search, so that the processes that are dropped here are not found.
        drop((self.set, self.warm));
        if let Err(still) = self.supervisor.close().await {
            warn!(processes = ?still.processes, "some processes of the workers could not be ended");
        }
    }

    /// Starts a worker: a new process, unless there is a warm one that answers.
    async fn start_one(
        &self,
        start: &WorkerStart,
        warm: Option<WarmWorker>,
    ) -> Result<Worker, StartError> {
        let spec = self.spec(start);
        if let Some(warm) = warm
            && let Some(worker) = warm.become_worker(&spec, &start.variables).await?
        {
            return Ok(worker);
        }
        self.supervisor.start(&spec)
    }

    fn spec(&self, start: &WorkerStart) -> WorkerSpec {
        let mut spec = self.model();
        spec.name = format!("rank {}", start.rank);
        spec.env.extend(start.variables.iter().map(|(name, value)| (name.into(), value.into())));
        spec.output = self.output(start);
        spec
    }

    /// Returns what all workers have in common.
    fn model(&self) -> WorkerSpec {
        let mut spec = WorkerSpec::new("worker", &self.program.path);
        spec.args.clone_from(&self.program.args);
        let variables = self.defaults().into_iter();
        spec.env = variables.map(|(name, value)| (name.into(), value.into())).collect();
        spec.input = self.input();
        spec
    }

    /// Returns settings that most programs want, without those that the user has set: one thread for each of several
    /// workers, as torchrun sets it, output that appears when it is printed, and the chosen network interface.
    fn defaults(&self) -> Vec<(String, String)> {
        let threads = (1 < self.args.nproc_per_node).then_some(("OMP_NUM_THREADS", "1"));
        let nic = self.args.nic.iter().flat_map(|nic| interface::VARIABLES.map(|it| (it, &**nic)));
        let wanted = threads.into_iter().chain([("PYTHONUNBUFFERED", "1")]).chain(nic);
        let unset = wanted.filter(|(name, _)| std::env::var_os(name).is_none());
        unset.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// Returns what workers read as standard input. The only worker of an agent inherits the agent's, so that it can be
    /// debugged; an agent that a launcher has started needs the input itself.
    fn input(&self) -> Input {
        match (self.args.nproc_per_node, &self.args.launched_on) {
            (1, None) => Input::Inherit,
            (_, _) => Input::Empty,
        }
    }

    fn output(&self, start: &WorkerStart) -> Output {
        let WorkerStart { round, rank, local_rank, .. } = start;
        // Without a directory, no stream goes to a file.
        let logs = self.logs.clone().unwrap_or_default();
        let directory = logs.join(round.to_string()).join(rank.to_string());
        let (stdout, stderr) = targets(&self.args, *local_rank);
        Output::Separate { prefix: prefix(*rank), directory, stdout, stderr }
    }

    /// Returns the last lines of a worker's output, unless the output was printed.
    fn unseen<'e>(&self, local_rank: u32, exit: &'e Exit) -> &'e [String] {
        match targets(&self.args, local_rank).1.is_printed() {
            true => &[],
            false => exit.reason_lines(),
        }
    }
}

impl WorkerProcesses for Supervised {
    fn commit_buffers(&self) -> Result<[CommitBuffer; 2], Failure> {
        Ok([CommitBuffer::allocate()?, CommitBuffer::allocate()?])
    }

    async fn start(&mut self, workers: Vec<WorkerStart>) -> Result<(), Failure> {
        let model = self.model();
        let warm = self.warm.take(model, workers.len()).into_iter().map(Some);
        let warm = warm.chain(std::iter::repeat_with(|| None));
        let starting = workers.iter().zip(warm).map(|(start, warm)| self.start_one(start, warm));
        let started = join_all(starting).await.into_iter().collect::<Result<Vec<Worker>, _>>();
        let started = started.map_err(start_failure)?;
        if started.len() == self.args.nproc_per_node as usize {
            self.set = started.into_iter().collect();
            return Ok(());
        }
        for (start, worker) in workers.iter().zip(started) {
            self.set.replace(start.local_rank as usize, worker);
        }
        Ok(())
    }

    fn rename(&mut self, local_rank: u32, rank: u32) {
        self.set.workers()[local_rank as usize].set_prefix(&prefix(rank));
    }

    async fn next_exit(&mut self) -> Option<(u32, WorkerExit)> {
        let (index, exit) = tokio::select! {
            biased;
            ended = self.set.next_exit() => ended?,
            never = self.warm.keep(&self.supervisor) => match never {},
        };
        let local_rank = index as u32;
        let exit = match exit.is_success() {
            true => WorkerExit::Succeeded,
            false => WorkerExit::Failed {
                how: exit.to_string(),
                last_lines: self.unseen(local_rank, &exit).to_vec(),
            },
        };
        Some((local_rank, exit))
    }

    fn kill(&mut self, local_rank: u32) {
        self.set.kill(local_rank as usize);
    }

    async fn stop(&mut self, grace: Duration) {
        self.set.stop_by(end_signal(&self.shutdown), grace).await;
    }

    fn silence(&self) -> Option<Duration> {
        let last = self.set.workers().iter().filter_map(|worker| worker.last_output()).max();
        last.map(|last| last.elapsed())
    }

    async fn ask_for_stacks(&mut self) {
        self.supervisor.signaller().notify(Signal::SIGUSR1).await;
    }
}

/// Returns the signal that asks the workers to end. Ctrl-C does not count as an error of the program.
fn end_signal(shutdown: &Shutdown) -> Signal {
    match shutdown.signal() {
        Some(signal @ (Signal::SIGHUP | Signal::SIGQUIT)) => signal,
        Some(_) | None => Signal::SIGTERM,
    }
}

/// Creates the directory for the output of one agent's workers: a directory may be given to several runs.
fn logs(directory: &Path, job: &str, node: NodeId) -> Result<PathBuf, Failure> {
    let node = node.to_string();
    let start = node.split('-').next().unwrap_or_default();
    let logs = directory.join(format!("{job}-{start}"));
    std::fs::create_dir_all(&logs)
        .map_err(|error| Failure::io(format!("--log-dir {}", directory.display()), &error))?;
    info!(directory = %logs.display(), "the output of the workers goes to files");
    Ok(logs)
}

/// Returns what precedes the lines of a worker.
fn prefix(rank: u32) -> String {
    format!("[rank {rank}] ")
}

fn start_failure(error: StartError) -> Failure {
    Failure::new(error.kind(), error.to_string())
}
