//! The life of an agent.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use steadfast_agent_core::round::Past;
use steadfast_common::ids::NodeId;
use steadfast_common::job::elastic::ElasticSpec;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{AgentRecord, Runner};
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_common::role::Role;
use steadfast_coord::{Etcd, EtcdOptions, backoff};
use steadfast_elastic_client::{Change, Membership, NodeError, NodeIdentity, Terms};
use steadfast_host::random;
use steadfast_host::task::spawn;
use steadfast_process::{
    Admin, AdminContent, AdminServer, Failure, LivenessPort, Readiness, Shutdown, address_towards,
    init_logging,
};
use steadfast_supervise::{Exit, GuardProgram, Input, Output, Signal, Supervisor, WorkerSpec};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::args::RunArgs;
use crate::coordinator::{Coordinator, CoordinatorSettings};
use crate::environment::{Fixed, NodeInfo, RoundPlacement};
use crate::interface;
use crate::job_end::{has_failed, was_over};
use crate::launcher_link;
use crate::metrics::Counts;
use crate::notices::pass_on;
use crate::ports::HeldPorts;
use crate::program::Program;
use crate::streams::targets;
use crate::worker_service::WorkerService;

/// Runs an agent until the job has succeeded, no restart is left, or a signal arrives.
///
/// # Errors
/// Every error that needs user action.
pub async fn run(args: RunArgs) -> Result<ExitCode, Failure> {
    let program = Program::find(&args)?;
    if args.standalone && 1 < args.nnodes.min() {
        return Err(Failure::invalid(format!(
            "--standalone is for a job of this node alone, and --nnodes asks for at least {}; \
             run etcd and a master (`steadfast rendezvous`), and use --rdzv-endpoint",
            args.nnodes.min()
        )));
    }
    let id = random::uuid();
    let job = args.rdzv_id.clone().unwrap_or_else(|| "standalone".to_owned());
    init_logging("agent", &job, id, &args.log)?;
    let shutdown = Shutdown::install()?;
    if args.launched_on.is_some() {
        spawn(launcher_link::follow(shutdown.clone()));
    }
    let mut coordinator = None;
    let mut endpoints: Vec<String> =
        args.rdzv_endpoint.iter().map(|it| args.auth.url(it)).collect();
    if args.standalone {
        let settings = CoordinatorSettings::of_one_node(ElasticSpec::new(&job, args.nnodes));
        let started = coordinator.insert(Coordinator::start(settings, &shutdown).await?);
        endpoints = vec![format!("http://{}", started.address)];
    }
    let living = async {
        let begun = Agent::begin(&args, program, NodeId(id), job, endpoints, &shutdown);
        let agent = tokio::select! {
            biased;
            () = shutdown.drain() => return Ok(shutdown.exit_code()),
            begun = begun => begun?,
        };
        agent.run(&shutdown).await
    };
    let ended = match &mut coordinator {
        None => living.await,
        Some(coordinator) => tokio::select! {
            biased;
            ended = living => ended,
            Err(failure) = coordinator.master_ended() => Err(failure),
        },
    };
    if let Some(coordinator) = coordinator {
        coordinator.end().await;
    }
    ended
}

pub(crate) struct Agent<'a> {
    pub args: &'a RunArgs,
    program: Program,
    etcd: Etcd,
    keys: Keys,
    pub membership: Membership,
    fixed: Fixed,
    pub host: String,
    pub base: Option<u16>,
    /// The directory for the output of this agent's workers, and of no other's.
    logs: Option<PathBuf>,
    pub supervisor: Supervisor,
    pub counts: Arc<Counts>,
    pub service: WorkerService,
    pub readiness: Readiness,
    _admin: AdminServer,
    /// Closes when this process dies.
    _liveness: LivenessPort,
}

impl<'a> Agent<'a> {
    async fn begin(
        args: &'a RunArgs,
        program: Program,
        node: NodeId,
        job: String,
        endpoints: Vec<String>,
        shutdown: &Shutdown,
    ) -> Result<Self, Failure> {
        let exposure = args.security.exposure(Role::Trainer)?;
        let tls = exposure.identity();
        let admin = Admin::bind(args.admin_listen, exposure).await?;
        let (host, base) = address(args, &endpoints)?;
        let counts = Arc::new(Counts::default());
        counts.restarts_max.store(args.max_restarts, Ordering::Relaxed);
        let readiness = Readiness::new("joins a round");
        let admin_address = admin.local_addr();
        let _admin = serve(admin, args, node, job.clone(), &counts, &readiness, shutdown)?;
        let shown = match admin_address.ip().is_unspecified() {
            true => format!("{host}:{}", admin_address.port()),
            false => admin_address.to_string(),
        };
        let liveness = LivenessPort::open(&host).await;
        let liveness = liveness.map_err(|error| Failure::io("no port is free", &error))?;
        let record = AgentRecord {
            runner: Runner::Agent,
            // Without a port of the user's, that of the admin port distinguishes the nodes of one host.
            address: format!("{host}:{}", base.unwrap_or(admin_address.port())),
            slots: args.nproc_per_node,
            admin: shown,
            liveness: Some(liveness.address.clone()),
            launched_on: args.launched_on.clone(),
            order: args.node_rank,
        };
        let options = args.auth.options(endpoints, &args.security.tls);
        let etcd = connect_to_etcd(&options, args.start_timeout).await?;
        let keys = Keys::of_job(&job);
        let identity = NodeIdentity { node, record, tls };
        let terms = Terms { nodes_min: args.nnodes.min(), nodes_max: args.nnodes.max() };
        let (ttl, of_job) = (args.lease_ttl, keys.clone());
        let limit = args.start_timeout;
        let membership = Membership::new(etcd.clone(), of_job, ttl, identity, terms, limit);
        let service = WorkerService::serve(membership.reason()).await?;
        let fixed = Fixed {
            job,
            node,
            workers_max: workers_max(args),
            restarts_max: args.max_restarts,
            role: args.role.clone(),
            agent_address: service.address.clone(),
        };
        let logs = args.log_dir.as_deref().map(|it| logs(it, &fixed)).transpose()?;
        let supervisor = Supervisor::new(GuardProgram::this_program()).map_err(start_failure)?;
        Ok(Self {
            args,
            program,
            etcd,
            keys,
            membership,
            fixed,
            host,
            base,
            logs,
            supervisor,
            counts,
            service,
            readiness,
            _admin,
            _liveness: liveness,
        })
    }

    async fn run(mut self, shutdown: &Shutdown) -> Result<ExitCode, Failure> {
        let passing_on = pass_on(self.supervisor.signaller(), shutdown);
        let ended = tokio::select! {
            biased;
            ended = self.rounds(shutdown) => ended,
            never = passing_on => match never {},
        };
        if let Err(still) = self.supervisor.close().await {
            warn!(processes = ?still.processes, "some processes of the workers could not be ended");
        }
        ended
    }

    /// Returns how the workers of a round are started, by local rank.
    pub fn specs(&self, placement: &RoundPlacement) -> Vec<WorkerSpec> {
        let restarts = self.counts.restarts.load(Ordering::Relaxed);
        let first_rank = placement.own().first_rank;
        let specs = (0..placement.own().slots).map(|local_rank| {
            let rank = first_rank + local_rank;
            let mut spec = WorkerSpec::new(format!("rank {rank}"), &self.program.path);
            spec.args.clone_from(&self.program.args);
            let variables = placement.environment(&self.fixed, local_rank, restarts);
            let variables = variables.into_iter().chain(self.defaults(placement.own().slots));
            spec.env = variables.map(|(name, value)| (name.into(), value.into())).collect();
            spec.input = self.input();
            spec.output = self.output(placement, local_rank);
            spec
        });
        specs.collect()
    }

    /// Returns settings that most programs want, without those that the user has set: one thread for each of several
    /// workers, as torchrun sets it, output that appears when it is printed, and the chosen network interface.
    fn defaults(&self, slots: u32) -> Vec<(String, String)> {
        let threads = (1 < slots).then_some(("OMP_NUM_THREADS", "1"));
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

    fn output(&self, placement: &RoundPlacement, local_rank: u32) -> Output {
        let rank = placement.own().first_rank + local_rank;
        let prefix = prefix(rank);
        // Without a directory, no stream goes to a file.
        let logs = self.logs.clone().unwrap_or_default();
        let directory = logs.join(placement.record.round.to_string()).join(rank.to_string());
        let (stdout, stderr) = targets(self.args, local_rank);
        Output::Separate { prefix, directory, stdout, stderr }
    }

    /// Returns the exit code after the end of the job.
    pub async fn job_ended(&self) -> Result<ExitCode, Failure> {
        let result: Option<ResultRecord> = self.etcd.get_json(&self.keys.result()).await?;
        match result {
            Some(result) if !self.membership.is_job_known() => {
                let (job, root) = (&self.fixed.job, self.keys.root());
                let remedy = format!(
                    "choose another --rdzv-id, or delete the job: etcdctl del --prefix {root}/"
                );
                Ok(was_over(job, &result, &remedy))
            }
            Some(result) if result.state == JobOutcome::Failed => Ok(has_failed(result)),
            Some(_) => {
                info!("the job has succeeded");
                Ok(ExitCode::SUCCESS)
            }
            None => Err(Failure::unavailable(format!(
                "this node is not part of the job any more, and {} does not exist; start the agent again",
                self.keys.result()
            ))),
        }
    }
}

/// Waits until this node is a member of another round. The ports of its workers are held until the caller
/// drops them.
///
/// # Errors
/// If too few nodes join, or the job rejects this node.
pub(crate) async fn join(
    membership: &mut Membership,
    args: &RunArgs,
    host: &str,
    base: Option<u16>,
    past: Past,
) -> Result<(RoundPlacement, HeldPorts), Failure> {
    let (workers, master) = (args.nproc_per_node, args.master_port);
    let take_ports = || {
        let held = HeldPorts::take(host, base, workers, master);
        let held =
            held.map_err(|Failure { kind, message }| NodeError::Rejected { kind, message })?;
        let info = NodeInfo { ports: held.ports.clone(), past };
        let data = serde_json::to_vec(&info).expect("ports and numbers are plain data");
        Ok((held, data.into()))
    };
    let joined = membership.join(take_ports).await.map_err(|error| failure(&error))?;
    let of_members = joined.record.members.iter().zip(&joined.data);
    let infos = of_members.map(|(member, data)| {
        serde_json::from_slice::<NodeInfo>(data).map_err(|_| {
            let node = member.node;
            let what = "runs another version of Steadfast: its ports cannot be read";
            Failure::invalid(format!("node {node} {what}"))
        })
    });
    let infos = infos.collect::<Result<Vec<_>, Failure>>()?;
    let past = infos.iter().fold(Past::default(), |past, info| past + info.past);
    let ports = infos.into_iter().map(|info| info.ports).collect();
    Ok((RoundPlacement { record: joined.record, ports, past, rank: joined.rank }, joined.prepared))
}

/// Returns the last lines of a worker's output, unless the output was printed.
pub(crate) fn unseen<'e>(args: &RunArgs, local_rank: usize, exit: &'e Exit) -> &'e [String] {
    match targets(args, local_rank as u32).1.is_printed() {
        true => &[],
        false => exit.reason_lines(),
    }
}

/// Returns the most workers that a round can have, as far as this node knows: a launcher knows all nodes.
fn workers_max(args: &RunArgs) -> Option<u32> {
    match args.launched_on {
        Some(_) => args.max_workers,
        None => Some(args.nnodes.max().saturating_mul(args.nproc_per_node)),
    }
}

/// Returns the signal that asks the workers to end. Ctrl-C does not count as an error of the program.
pub(crate) fn end_signal(shutdown: &Shutdown) -> Signal {
    match shutdown.signal() {
        Some(signal @ (Signal::SIGHUP | Signal::SIGQUIT)) => signal,
        Some(_) | None => Signal::SIGTERM,
    }
}

/// Creates the directory for the output of one agent's workers: a directory may be given to several runs.
fn logs(directory: &Path, fixed: &Fixed) -> Result<PathBuf, Failure> {
    let node = fixed.node.to_string();
    let start = node.split('-').next().unwrap_or_default();
    let logs = directory.join(format!("{}-{start}", fixed.job));
    std::fs::create_dir_all(&logs)
        .map_err(|error| Failure::io(format!("--log-dir {}", directory.display()), &error))?;
    info!(directory = %logs.display(), "the output of the workers goes to files");
    Ok(logs)
}

/// Returns what precedes the lines of a worker.
pub(crate) fn prefix(rank: u32) -> String {
    format!("[rank {rank}] ")
}

/// Connects to etcd. Nodes are started in any order, so it may not be up yet.
///
/// # Errors
/// If etcd does not answer within `limit`, or refuses the connection.
pub async fn connect_to_etcd(options: &EtcdOptions, limit: Duration) -> Result<Etcd, Failure> {
    let deadline = Instant::now() + limit;
    let mut pauses = backoff();
    let mut is_logged = false;
    loop {
        match Etcd::connect(options).await {
            Err(error) if error.is_transient() && Instant::now() < deadline => {
                if !is_logged {
                    info!(%error, "waiting for etcd");
                    is_logged = true;
                }
                sleep(pauses.next().unwrap_or(limit)).await;
            }
            connected => return Ok(connected?),
        }
    }
}

pub(crate) fn failure(error: &NodeError) -> Failure {
    Failure::new(error.kind(), error.to_string())
}

/// Describes a change of a round, for users.
pub(crate) fn describe(change: &Change) -> String {
    match change.nodes {
        0 => format!("a worker of {} has failed", change.failed),
        1.. => format!("{} more nodes are ready to join", change.nodes),
        _ if change.lost.is_empty() => format!("{} nodes were lost", -change.nodes),
        _ => format!("lost {}", change.lost),
    }
}

pub(crate) fn start_failure(error: steadfast_supervise::StartError) -> Failure {
    Failure::new(error.kind(), error.to_string())
}

/// Returns the host at which other nodes reach this one, and the port that the user chose.
fn address(args: &RunArgs, endpoints: &[String]) -> Result<(String, Option<u16>), Failure> {
    let own_host = || {
        let own = match &args.nic {
            Some(name) => Some(interface::address_of(name)?),
            None => endpoints.iter().find_map(|endpoint| address_towards(endpoint)),
        };
        Ok::<_, Failure>(match own {
            Some(std::net::IpAddr::V6(ip)) => format!("[{ip}]"),
            Some(ip) => ip.to_string(),
            None => "127.0.0.1".to_owned(),
        })
    };
    let Some(given) = args.address.as_deref() else { return Ok((own_host()?, None)) };
    if let Ok(port) = given.parse::<u16>() {
        return Ok((own_host()?, Some(port).filter(|port| *port != 0)));
    }
    if let Some(name) = &args.nic {
        let message =
            format!("--nic {name} and --address {given} both say where this node is reached");
        return Err(Failure::invalid(message));
    }
    let is_bare_v6 = given.parse::<std::net::Ipv6Addr>().is_ok();
    let (host, port) = match given.rsplit_once(':') {
        Some(_) if is_bare_v6 || given.ends_with(']') => (given, None),
        Some((host, port)) => {
            let port: u16 = port.parse().map_err(|_| {
                Failure::invalid(format!("--address {given}: `{port}` is not a port"))
            })?;
            (host, Some(port).filter(|port| *port != 0))
        }
        None => (given, None),
    };
    let host = if is_bare_v6 { format!("[{host}]") } else { host.to_owned() };
    let probe = AgentRecord::new(Runner::Agent, format!("{host}:1"), 1);
    match probe.has_valid_address() {
        true => Ok((host, port)),
        false => Err(Failure::invalid(format!("--address {given}: use `host:port`"))),
    }
}

fn serve(
    admin: Admin,
    args: &RunArgs,
    node: NodeId,
    job: String,
    counts: &Arc<Counts>,
    readiness: &Readiness,
    shutdown: &Shutdown,
) -> Result<AdminServer, Failure> {
    let mut metrics = prometheus_client::registry::Registry::default();
    Counts::register(counts, &mut metrics);
    let shown = counts.clone();
    Ok(admin.serve(AdminContent {
        role: "agent",
        job,
        id: Box::new(move || node.0),
        readiness: readiness.clone(),
        metrics,
        token: args.security.admin_token()?,
        shutdown: shutdown.clone(),
        status: Box::new(move || shown.status()),
        page: None,
    }))
}
