//! The processes of a job on their machines, and the supervisor that restarts them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::NodeId;
use steadfast_common::records::keys::Keys;
use steadfast_master::{ElasticRequest, JobRequest, Request};
use steadfast_process::{
    CommonArgs, EtcdArgs, EtcdAuthArgs, Failure, LogArgs, LogFormat, LogIdentity, SecurityArgs,
    Shutdown,
};
use steadfast_pserver_storage::{LosableDisks, MemoryStores, RowStores, TieredStores};
use steadfast_trainer::Registry;
use steadfast_trainer::record_search::{Outcome, TrialStandIn};

use uuid::Uuid;

use crate::agent;
use crate::checks::Observed;
use crate::etcd::EtcdServer;
use crate::host::{Addresses, Simulated, enter};
use crate::job::{Crashes, STORE, registry};
use crate::net::{Machine, Net};
use crate::workers::Node;
use crate::workload::Workload;
use crate::world::{Clock, ProcessId, World, crash};

/// Role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    Master,
    Pserver,
    Trainer,
    /// The agent of a node of an elastic job.
    Agent,
}

/// A member of the job: a role and a number within the role. Each member has its own machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    pub role: Role,
    pub number: u16,
}

impl std::fmt::Display for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let role = match self.role {
            Role::Master => "master",
            Role::Pserver => "pserver",
            Role::Trainer => "trainer",
            Role::Agent => "agent",
        };
        write!(f, "{role}-{}", self.number)
    }
}

impl Member {
    pub fn machine(self) -> Machine {
        let first = match self.role {
            Role::Master => 10,
            Role::Pserver => 30,
            Role::Trainer => 60,
            Role::Agent => 90,
        };
        // The members of a large cluster that would share numbers with other roles.
        let apart = if self.number < 30 { 0 } else { 10_000 * (1 + self.role as u16) };
        Machine(first + apart + self.number)
    }
}

/// The machine of the operator, who queries the job and sends commands.
pub const PERSON: Machine = Machine(2);

/// The machine that etcd runs on.
pub const ETCD: Machine = Machine(1);

/// Size and settings of a cluster.
#[derive(Clone, Debug)]
pub struct Shape {
    pub addresses: Addresses,
    pub masters: u16,
    /// Slots at the beginning.
    pub slots: u32,
    /// Pservers, spares included.
    pub pservers: u16,
    pub trainers: u16,
    /// Agents of an elastic job.
    pub agents: u16,
    pub lease_ttl: Duration,
    /// Minimum and maximum duration of a disk write of etcd.
    pub sync: (Duration, Duration),
    /// Maximum clock drift.
    pub drift: f64,
}

/// The cluster. Cheap to clone.
#[derive(Clone)]
pub struct Cluster(Arc<Shared>);

struct Shared {
    world: World,
    net: Net,
    job: Workload,
    shape: Shape,
    observed: Arc<Mutex<Observed>>,
    etcd: EtcdServer,
    state: Mutex<State>,
}

struct State {
    members: BTreeMap<Member, MemberState>,
    /// Exits that no injected fault explains.
    strange: Vec<String>,
    /// Whether processes are restarted after they exit.
    is_watched: bool,
}

struct MemberState {
    /// The running process, if any.
    process: Option<(ProcessId, Shutdown)>,
    lives: u16,
    clock: Clock,
    /// Whether the process should run.
    is_wanted: bool,
    /// Whether it received SIGTERM and will be restarted.
    is_leaving: bool,
}

/// Each simulated master has the job, so none waits for it.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How long draining pservers wait for a checkpoint.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Memory of a pserver for rows of tables: enough for a few of them.
const ROWS_BYTES: usize = 250;

const LOCK: &str = "single thread; no holder panics";

/// Returns the settings of a process of a job, given the address of etcd.
pub fn settings(job: &str, etcd: &str, lease_ttl: Duration) -> CommonArgs {
    let any = "127.0.0.1:0".parse().expect("an address");
    let filter = "info".to_owned();
    CommonArgs {
        etcd: EtcdArgs {
            etcd_endpoints: vec![format!("http://{etcd}")],
            auth: EtcdAuthArgs::default(),
        },
        job: job.to_owned(),
        root: None,
        listen: any,
        advertise: None,
        admin_listen: any,
        lease_ttl,
        // Some starts wait for etcd, and some fail and are repeated.
        etcd_start_timeout: lease_ttl,
        security: SecurityArgs::default(),
        wait_after_completion: false,
        log: LogArgs { filter, format: LogFormat::Text, otlp_endpoint: None },
        config: None,
        check_config: false,
    }
}

impl Cluster {
    /// Creates the machines of all members, without running processes. Programs of elastic jobs report to
    /// `observed`.
    pub fn new(
        world: &World,
        net: &Net,
        etcd: &EtcdServer,
        job: &Workload,
        shape: &Shape,
        observed: Arc<Mutex<Observed>>,
    ) -> Self {
        let state = State { members: BTreeMap::new(), strange: Vec::new(), is_watched: true };
        Self(Arc::new(Shared {
            world: world.clone(),
            net: net.clone(),
            job: job.clone(),
            shape: shape.clone(),
            observed,
            etcd: etcd.clone(),
            state: Mutex::new(state),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect(LOCK)
    }

    pub fn keys(&self) -> Keys {
        Keys::of_job(self.0.job.name())
    }

    pub fn is_elastic(&self) -> bool {
        matches!(self.0.job, Workload::Elastic(_))
    }

    /// Returns the directory of the job's shards in the store, if it has any.
    pub fn shards_directory(&self) -> Option<String> {
        match &self.0.job {
            Workload::Training(job) => Some(job.spec.shards_directory()),
            Workload::Elastic(_) => None,
        }
    }

    /// Returns the job file of a training job, with another number of kept checkpoints.
    pub fn job_file(&self, keep: u32) -> Option<String> {
        match &self.0.job {
            Workload::Training(job) => Some(job.file_with_kept(keep)),
            Workload::Elastic(_) => None,
        }
    }

    /// Returns all members, including former ones.
    pub fn members(&self) -> Vec<Member> {
        self.state().members.keys().copied().collect()
    }

    /// Returns the running process of a member.
    pub fn process(&self, member: Member) -> Option<ProcessId> {
        self.state().members.get(&member)?.process.as_ref().map(|(process, _)| *process)
    }

    /// Returns the exits that no injected fault explains.
    pub fn strange(&self) -> Vec<String> {
        self.state().strange.clone()
    }

    /// Returns whether no process of the job runs.
    pub fn is_empty(&self) -> bool {
        self.state().members.values().all(|member_state| member_state.process.is_none())
    }

    /// Starts a member on its machine, unless it is running.
    pub fn start(&self, member: Member) {
        let (world, drift) = (&self.0.world, self.0.shape.drift);
        let clock = world.roll(|rng| Clock {
            ahead: Duration::from_secs(rng.between(1, 100_000)),
            rate: 1.0 + drift * (2.0 * rng.share() - 1.0),
        });
        let mut state = self.state();
        let member_state = state.members.entry(member).or_insert(MemberState {
            process: None,
            lives: 0,
            clock,
            is_wanted: true,
            is_leaving: false,
        });
        member_state.is_wanted = true;
        if member_state.process.is_some() {
            return;
        }
        let (life, clock) = (member_state.lives, member_state.clock);
        member_state.lives += 1;
        let name = format!("{member}.{life}");
        let process = world.begin(name.clone(), clock);
        let shutdown = Shutdown::manual();
        member_state.process = Some((process, shutdown.clone()));
        drop(state);
        self.0.net.place(process, member.machine());
        let addresses = self.0.shape.addresses;
        let host = Simulated::new(world, &self.0.net, process, member.machine(), addresses, life);
        let host = Arc::new(host);
        world.settle(process, host.clone());
        let node = Node::new(world, &self.0.net, member.machine(), addresses, clock, name);
        let life = enter(&host, || self.program(member, node, shutdown));
        let cluster = self.clone();
        let task = async move {
            let ending = life.await;
            cluster
                .0
                .world
                .clone()
                .after(Duration::ZERO, move |_| cluster.ended(member, process, ending));
        };
        world.spawn(process, task.boxed());
    }

    fn program(
        &self,
        member: Member,
        node: Node,
        shutdown: Shutdown,
    ) -> BoxFuture<'static, Result<(), Failure>> {
        let (job, shape) = (&self.0.job, &self.0.shape);
        let (id, common) = (steadfast_host::random::uuid(), self.settings());
        let identity = |role| LogIdentity::new(role, job.name(), id);
        match member.role {
            Role::Master => {
                let request = match job {
                    Workload::Training(job) => Request::Training(Box::new(JobRequest {
                        spec: job.spec.clone(),
                        base: None,
                        store: STORE.to_owned(),
                    })),
                    Workload::Elastic(job) => {
                        Request::Elastic(ElasticRequest { spec: job.spec.clone() })
                    }
                };
                let args = steadfast_master::Args {
                    common,
                    job_file: None,
                    store: None,
                    pservers: shape.slots,
                    tensorboard: None,
                    start_timeout: START_TIMEOUT,
                };
                steadfast_master::run_process(args, Some(request), id, identity("master"), shutdown)
                    .boxed()
            }
            Role::Pserver => {
                let args = steadfast_pserver::Args {
                    common,
                    drain_timeout: DRAIN_TIMEOUT,
                    table_memory: None,
                    table_directory: None,
                };
                let stores = self.stores();
                steadfast_pserver::run_process(args, stores, id, identity("pserver"), shutdown)
                    .boxed()
            }
            Role::Trainer => {
                let args = steadfast_trainer::Args { common, accept_code_change: false };
                let registry = self.registry(member);
                let identity = identity("trainer");
                async move {
                    let current = steadfast_trainer::Current::default();
                    steadfast_trainer::run_process(args, registry, id, identity, shutdown, &current)
                        .await
                }
                .boxed()
            }
            Role::Agent => self.agent(node, id, shutdown),
        }
    }

    /// Returns the models of a trainer, which ends on the record of the job that crashes it.
    fn registry(&self, member: Member) -> Registry {
        let crashes = match &self.0.job {
            Workload::Training(job) => job.crashes,
            Workload::Elastic(_) => None,
        };
        let Some(record) = crashes else { return registry(None) };
        let cluster = self.clone();
        let crash = Arc::new(move || {
            let cluster = cluster.clone();
            crash(move |_| cluster.kill(member, false));
        });
        let world = self.0.world.clone();
        let trial: TrialStandIn = Arc::new(move |names| {
            // Random kills hit these processes as well.
            if world.roll(|rng| rng.happens(0.1)) {
                return Outcome::Unknown("killed".to_owned());
            }
            match names.contains(&record.name) {
                true => Outcome::Died("crashed".to_owned()),
                false => Outcome::Survived,
            }
        });
        registry(Some(Crashes { record, crash, trial }))
    }

    /// Returns stores with memory for a few rows, above a disk that is lost with its process, and is full early now and
    /// then. A job without tables gets stores in memory only.
    fn stores(&self) -> Arc<dyn RowStores> {
        match &self.0.job {
            Workload::Training(job) if job.has_tables() => {
                let fails_after = self.0.world.roll(|rng| rng.happens(0.1).then(|| rng.below(40)));
                Arc::new(TieredStores::new(ROWS_BYTES, Arc::new(LosableDisks { fails_after })))
            }
            Workload::Training(_) | Workload::Elastic(_) => Arc::new(MemoryStores),
        }
    }

    fn agent(
        &self,
        node: Node,
        id: Uuid,
        shutdown: Shutdown,
    ) -> BoxFuture<'static, Result<(), Failure>> {
        let job = match &self.0.job {
            Workload::Elastic(job) => job.clone(),
            Workload::Training(_) => unreachable!("no plan of a training job has agents"),
        };
        let (endpoint, ttl) = (self.0.etcd.address().to_string(), self.0.shape.lease_ttl);
        agent::run(job, node, endpoint, ttl, NodeId(id), shutdown, self.0.observed.clone()).boxed()
    }

    fn settings(&self) -> CommonArgs {
        let etcd = self.0.etcd.address().to_string();
        settings(self.0.job.name(), &etcd, self.0.shape.lease_ttl)
    }

    /// Handles a process that ended by itself.
    fn ended(&self, member: Member, process: ProcessId, ending: Result<(), Failure>) {
        if !self.0.world.lives(process) {
            return;
        }
        self.0.world.kill(process);
        self.0.net.remove_process(process, false);
        tracing::info!(member = %member, ending = ?ending, "process ended");
        let has_left_workers = self.end_workers(member, false);
        let mut state = self.state();
        if has_left_workers {
            state.strange.push(format!("{member} ended before its workers"));
        }
        let may_fail = self.0.job.may_fail();
        if let Err(failure) = &ending
            && (matches!(failure.kind, ErrorKind::Internal | ErrorKind::Denied)
                || failure.kind == ErrorKind::Invalid && !may_fail)
        {
            state.strange.push(format!("{member} ended with {failure:?}"));
        }
        let Some(member_state) = state.members.get_mut(&member) else { return };
        member_state.process = None;
        // A process that ended without an error is finished, unless a SIGTERM ended it.
        let comes_back = std::mem::take(&mut member_state.is_leaving);
        if ending.is_ok() && !comes_back {
            member_state.is_wanted = false;
        }
        drop(state);
        self.start_again(member);
    }

    /// Restarts a member after a random pause, as a supervisor does.
    fn start_again(&self, member: Member) {
        let pause =
            self.0.world.roll(|rng| rng.time(Duration::from_millis(20), Duration::from_secs(3)));
        let cluster = self.clone();
        self.0.world.after(pause, move |_| {
            let is_wanted = {
                let state = cluster.state();
                state.is_watched && state.members.get(&member).is_some_and(|it| it.is_wanted)
            };
            if is_wanted {
                cluster.start(member);
            }
        });
    }

    /// Kills a member's process at once. With `silent`, its connections are not closed, as after a power
    /// failure.
    pub fn kill(&self, member: Member, silent: bool) {
        let process = {
            let mut state = self.state();
            state.members.get_mut(&member).and_then(|member_state| member_state.process.take())
        };
        if let Some((process, _)) = process {
            self.0.world.kill(process);
            self.0.net.remove_process(process, silent);
            self.end_workers(member, silent);
            self.start_again(member);
        }
    }

    /// Kills the workers that an agent has left behind, as its guard does; returns whether there were some.
    fn end_workers(&self, member: Member, silent: bool) -> bool {
        let left = self.0.net.processes_on(member.machine()).into_iter();
        let left: Vec<ProcessId> = left.filter(|it| self.0.world.lives(*it)).collect();
        for process in &left {
            self.0.world.kill(*process);
            self.0.net.remove_process(*process, silent);
            self.0.observed.lock().expect(LOCK).workers.left(*process);
        }
        !left.is_empty()
    }

    /// Stops a member's process, as SIGSTOP does.
    pub fn stop(&self, member: Member) {
        if let Some(process) = self.process(member) {
            self.0.world.stop(process);
        }
    }

    /// Resumes the stopped process of a member.
    pub fn resume(&self, member: Member) {
        if let Some(process) = self.process(member) {
            self.0.world.resume(process);
        }
    }

    /// Asks a member to leave, as SIGTERM does; with `for_good` it is not restarted.
    pub fn terminate(&self, member: Member, for_good: bool) {
        let process = {
            let mut state = self.state();
            let Some(member_state) = state.members.get_mut(&member) else { return };
            member_state.is_wanted &= !for_good;
            member_state.is_leaving = !for_good;
            member_state.process.clone()
        };
        if let Some((process, shutdown)) = process {
            self.0.world.after(Duration::ZERO, move |world| {
                if world.lives(process) {
                    shutdown.trigger();
                }
            });
        }
    }

    /// Resumes or starts every member that should run.
    pub fn revive(&self) {
        for member in self.members() {
            self.resume(member);
            let is_wanted = self.state().members.get(&member).is_some_and(|it| it.is_wanted);
            if is_wanted {
                self.start(member);
            }
        }
    }
}
