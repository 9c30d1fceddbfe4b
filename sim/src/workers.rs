//! The worker processes of a simulated node, as its agent starts, watches and ends them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use steadfast_agent::{CommitBuffer, WorkerExit, WorkerProcesses, WorkerStart};
use steadfast_common::ids::NodeId;
use steadfast_host::random;
use steadfast_host::time::{Instant, sleep_until};
use steadfast_process::Failure;
use tokio::sync::watch;

use crate::checks::Observed;
use crate::host::{Addresses, Simulated, enter};
use crate::net::{Machine, Net};
use crate::node_memory::NodeMemory;
use crate::worker::Worker;
use crate::workload::ElasticJob;
use crate::world::{Clock, ProcessId, World};

/// The machine of an agent.
#[derive(Clone)]
pub struct Node {
    world: World,
    net: Net,
    machine: Machine,
    addresses: Addresses,
    clock: Clock,
    /// The name of the agent's process.
    name: String,
}

impl Node {
    /// Creates the machine of the process `name`.
    pub fn new(
        world: &World,
        net: &Net,
        machine: Machine,
        addresses: Addresses,
        clock: Clock,
        name: String,
    ) -> Self {
        Self { world: world.clone(), net: net.clone(), machine, addresses, clock, name }
    }

    /// Returns the host at which others reach this machine.
    pub fn host(&self) -> String {
        Simulated::address(self.addresses, self.machine, 0).ip().to_string()
    }
}

/// The workers of a node.
pub struct SimulatedWorkers {
    job: ElasticJob,
    id: NodeId,
    /// The address of etcd.
    etcd: String,
    memory: Arc<NodeMemory>,
    /// The last worker of each local rank, and whether its end was returned.
    workers: BTreeMap<u32, (ProcessId, bool)>,
    started: u32,
    ends: Ends,
}

impl SimulatedWorkers {
    /// Creates a node without workers. What they do is noted in `observed`.
    pub fn new(
        job: ElasticJob,
        node: Node,
        etcd: String,
        id: NodeId,
        observed: Arc<Mutex<Observed>>,
    ) -> Self {
        let memory = Arc::<NodeMemory>::default();
        let all = Arc::new(watch::Sender::default());
        let ends = Ends { node, memory: memory.clone(), observed, all };
        Self { job, id, etcd, memory, workers: BTreeMap::new(), started: 0, ends }
    }

    /// Notes a violation unless no worker of this machine takes part in a round.
    fn check_that_none_takes_part(&self) {
        let Node { machine, name, .. } = &self.ends.node;
        let mut observed = self.ends.observed.lock().expect("one thread");
        if let Some(round) = observed.workers.takes_part(*machine) {
            let broken = format!("{name} begins a round while a worker is in round {round}");
            observed.broken.push(broken);
        }
    }

    /// Returns the first end of a worker that was not returned yet.
    fn first_end(&self, ends: &[(ProcessId, WorkerExit)]) -> Option<(u32, WorkerExit)> {
        ends.iter().find_map(|(ended, exit)| {
            let mut waiting = self.workers.iter().filter(|(_, (_, is_returned))| !is_returned);
            let (local_rank, _) = waiting.find(|(_, (process, _))| process == ended)?;
            Some((*local_rank, exit.clone()))
        })
    }
}

impl WorkerProcesses for SimulatedWorkers {
    fn commit_buffers(&self) -> Result<[CommitBuffer; 2], Failure> {
        Ok(["one", "other"].map(|name| CommitBuffer::simulated(name.to_owned())))
    }

    async fn start(&mut self, workers: Vec<WorkerStart>) -> Result<(), Failure> {
        self.check_that_none_takes_part();
        let Node { world, net, machine, addresses, clock, name } = self.ends.node.clone();
        for start in workers {
            let local_rank = start.local_rank;
            if let Some((process, _)) = self.workers.get(&local_rank)
                && world.lives(*process)
            {
                let broken = format!("{name} starts worker {local_rank} a second time");
                self.ends.observed.lock().expect("one thread").broken.push(broken);
            }
            self.started += 1;
            let process = world.begin(format!("{name}/{local_rank}.{}", self.started), clock);
            net.place(process, machine);
            let host = Simulated::new(&world, &net, process, machine, addresses, 0);
            let host = Arc::new(host);
            world.settle(process, host.clone());
            self.workers.insert(local_rank, (process, false));
            let (job, etcd, memory) = (self.job.clone(), self.etcd.clone(), self.memory.clone());
            let observed = self.ends.observed.clone();
            let worker = Worker::new(job, self.id, process, machine, etcd, memory, observed);
            let program = enter(&host, || worker.run(start).boxed());
            let ends = self.ends.clone();
            let task = async move {
                let exit = program.await;
                let world = ends.node.world.clone();
                world.after(Duration::ZERO, move |_| ends.end(process, exit));
            };
            world.spawn(process, task.boxed());
        }
        Ok(())
    }

    fn rename(&mut self, local_rank: u32, _: u32) {
        self.check_that_none_takes_part();
        // A worker may have ended without the agent's knowledge, which then learns of it in the round.
        let is_known = self.workers.get(&local_rank).is_some_and(|(_, is_returned)| !is_returned);
        if !is_known {
            let broken =
                format!("worker {local_rank} stays in the next round, but is known to have ended");
            self.ends.observed.lock().expect("one thread").broken.push(broken);
        }
    }

    async fn next_exit(&mut self) -> Option<(u32, WorkerExit)> {
        let mut changes = self.ends.all.subscribe();
        loop {
            if self.workers.values().all(|(_, is_returned)| *is_returned) {
                return None;
            }
            let end = self.first_end(&changes.borrow_and_update());
            if let Some((local_rank, exit)) = end {
                self.workers.entry(local_rank).and_modify(|(_, is_returned)| *is_returned = true);
                return Some((local_rank, exit));
            }
            // Not an error: this holds the sender.
            let _ = changes.changed().await;
        }
    }

    fn kill(&mut self, local_rank: u32) {
        if let Some((process, _)) = self.workers.get(&local_rank) {
            self.ends.end(*process, failed("signal SIGKILL"));
        }
    }

    /// Stops the workers. Three of four end within the first half of the grace, and the others are killed; until then
    /// they go on.
    async fn stop(&mut self, grace: Duration) {
        let now = Instant::now();
        let mut ends: Vec<(Instant, ProcessId)> = Vec::new();
        for (process, _) in self.workers.values() {
            if self.ends.node.world.lives(*process) {
                let is_killed = random::seed().is_multiple_of(4);
                let share = (random::seed() % 500) as f64 / 1000.0;
                let time = if is_killed { grace } else { grace.mul_f64(share) };
                ends.push((now + time, *process));
            }
        }
        ends.sort_unstable();
        for (at, process) in ends {
            sleep_until(at).await;
            self.ends.end(process, failed("signal SIGTERM"));
        }
    }

    fn silence(&self) -> Option<Duration> {
        self.memory.last_output().map(Instant::elapsed)
    }

    async fn ask_for_stacks(&mut self) {}
}

/// The ends of the workers of a node, in their order.
#[derive(Clone)]
struct Ends {
    node: Node,
    memory: Arc<NodeMemory>,
    observed: Arc<Mutex<Observed>>,
    all: Arc<watch::Sender<Vec<(ProcessId, WorkerExit)>>>,
}

impl Ends {
    /// Ends a process, unless it has ended.
    fn end(&self, process: ProcessId, exit: WorkerExit) {
        let Node { world, net, .. } = &self.node;
        if !world.lives(process) {
            return;
        }
        tracing::info!(worker = world.name(process), ?exit, "worker ended");
        world.kill(process);
        net.remove_process(process, false);
        self.observed.lock().expect("one thread").workers.left(process);
        if exit != WorkerExit::Succeeded {
            self.memory.leave(process);
        }
        self.all.send_modify(|all| all.push((process, exit)));
    }
}

/// Returns the end of a worker that has failed.
pub fn failed(how: &str) -> WorkerExit {
    WorkerExit::Failed { how: how.to_owned(), last_lines: Vec::new() }
}
