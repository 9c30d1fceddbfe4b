//! The life of an agent.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use steadfast_agent_core::round::Past;
use steadfast_common::ids::NodeId;
use steadfast_common::job::elastic::ElasticSpec;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{AgentRecord, Runner};
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_common::role::Role;
use steadfast_common::status::format::plural;
use steadfast_coord::{CoordError, Etcd};
use steadfast_elastic_client::{Change, Membership, NodeError, NodeIdentity, Terms};
use steadfast_host::random;
use steadfast_host::task::spawn;
use steadfast_process::{
    Admin, AdminContent, AdminServer, Failure, LivenessPort, Readiness, Shutdown, address_towards,
    init_logging,
};
use tracing::info;

use crate::args::RunArgs;
use crate::commits::CommitBuffer;
use crate::environment::{Fixed, NodeInfo, RoundPlacement};
use crate::interface;
use crate::job_end::Ended;
use crate::launcher_link;
use crate::metrics::Counts;
use crate::notices::pass_on;
use crate::own_rendezvous::{OwnRendezvous, OwnRendezvousSettings};
use crate::ports::HeldPorts;
use crate::processes::{WorkerProcesses, WorkerStart};
use crate::program::Program;
use crate::supervised::Supervised;
use crate::warm::WarmWorkers;
use crate::worker_service::WorkerService;

/// Runs an agent until the job has succeeded, no restart is left, or a signal arrives.
///
/// # Errors
/// Every error that needs user action.
pub async fn run(mut args: RunArgs) -> Result<ExitCode, Failure> {
    let program = Program::find(&args)?;
    let warm = WarmWorkers::new(&args, &program)?;
    if args.standalone && 1 < args.nnodes.min() {
        return Err(Failure::invalid(format!(
            "--standalone is for a job of this node alone, and --nnodes asks for at least {}; \
             run etcd and a master (`steadfast rendezvous`), and use --rdzv-endpoint",
            args.nnodes.min()
        )));
    }
    if !args.standalone && args.data.records.is_some() {
        return Err(Failure::invalid(
            "--records belongs to the job: pass it to `steadfast rendezvous`, or write it into the job file; here it \
             is for --standalone",
        ));
    }
    let id = random::uuid();
    init_logging("agent", args.job(), id, &args.log)?;
    let shutdown = Shutdown::install()?;
    if args.launched_on.is_some() {
        spawn(launcher_link::follow(shutdown.clone()));
    }
    let mut rendezvous = None;
    if args.standalone {
        let mut spec = ElasticSpec::new(args.job(), args.nnodes);
        args.data.describe(&mut spec);
        let settings = OwnRendezvousSettings::of_one_node(spec);
        let started = rendezvous.insert(OwnRendezvous::start(settings, &shutdown).await?);
        args.rdzv_endpoint = vec![format!("http://{}", started.address)];
    }
    let living = supervise(&args, program, warm, NodeId(id), &shutdown);
    let ended = match &mut rendezvous {
        None => living.await,
        Some(rendezvous) => tokio::select! {
            biased;
            ended = living => ended,
            Err(failure) = rendezvous.master_ended() => Err(failure),
        },
    };
    if let Some(rendezvous) = rendezvous {
        rendezvous.end().await;
    }
    ended.map(|ended| ended.exit_code(args.job(), &shutdown))
}

/// Runs an agent whose workers are processes of this machine, and passes signals on to them.
async fn supervise(
    args: &RunArgs,
    program: Program,
    warm: WarmWorkers,
    node: NodeId,
    shutdown: &Shutdown,
) -> Result<Ended, Failure> {
    let mut workers = Supervised::new(args, program, warm, node, shutdown)?;
    let passing_on = pass_on(workers.signaller(), shutdown);
    let ended = tokio::select! {
        biased;
        ended = run_process(args, node, &mut workers, shutdown) => ended,
        never = passing_on => match never {},
    };
    workers.close().await;
    ended
}

/// Runs an agent until the job has ended, no restart is left, or `shutdown` is triggered. A simulation runs it with
/// workers of its own.
///
/// # Errors
/// Every error that needs user action.
pub async fn run_process<P: WorkerProcesses>(
    args: &RunArgs,
    node: NodeId,
    workers: &mut P,
    shutdown: &Shutdown,
) -> Result<Ended, Failure> {
    let buffers = workers.commit_buffers()?;
    let begun = Agent::begin(args, node, buffers, shutdown);
    let mut agent = tokio::select! {
        biased;
        () = shutdown.drain() => return Ok(Ended::Interrupted),
        begun = begun => begun?,
    };
    agent.rounds(workers, shutdown).await
}

pub(crate) struct Agent<'a> {
    pub args: &'a RunArgs,
    etcd: Etcd,
    keys: Keys,
    pub membership: Membership,
    fixed: Fixed,
    pub host: String,
    pub base: Option<u16>,
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
        node: NodeId,
        buffers: [CommitBuffer; 2],
        shutdown: &Shutdown,
    ) -> Result<Self, Failure> {
        let job = args.job().to_owned();
        let endpoints: Vec<String> =
            args.rdzv_endpoint.iter().map(|it| args.auth.url(it)).collect();
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
        let waits = |error: &CoordError| info!(%error, "waiting for etcd");
        let etcd = Etcd::connect_within(&options, args.start_timeout, waits).await?;
        let keys = Keys::of_job(&job);
        let identity = NodeIdentity { node, record, tls };
        let terms = Terms { nodes_min: args.nnodes.min(), nodes_max: args.nnodes.max() };
        let (ttl, of_job) = (args.lease_ttl, keys.clone());
        let limit = args.start_timeout;
        let membership = Membership::new(etcd.clone(), of_job, ttl, identity, terms, limit);
        let service = WorkerService::serve(buffers, membership.reason()).await?;
        let fixed = Fixed {
            job,
            node,
            workers_max: workers_max(args),
            restarts_max: args.max_restarts,
            role: args.role.clone(),
            agent_address: service.address.clone(),
        };
        Ok(Self {
            args,
            etcd,
            keys,
            membership,
            fixed,
            host,
            base,
            counts,
            service,
            readiness,
            _admin,
            _liveness: liveness,
        })
    }

    /// Returns what is needed to start a worker of a round.
    pub fn worker(&self, placement: &RoundPlacement, local_rank: u32) -> WorkerStart {
        let restarts = self.counts.restarts.load(Ordering::Relaxed);
        WorkerStart {
            round: placement.record.round,
            rank: placement.own().first_rank + local_rank,
            local_rank,
            variables: placement.environment(&self.fixed, local_rank, restarts),
        }
    }

    /// Returns how the job has ended.
    pub async fn job_ended(&self) -> Result<Ended, Failure> {
        let result: Option<ResultRecord> = self.etcd.get_json(&self.keys.result()).await?;
        match result {
            Some(result) if !self.membership.is_job_known() => {
                let root = self.keys.root();
                let remedy = format!(
                    "choose another --rdzv-id, or delete the job: etcdctl del --prefix {root}/"
                );
                Ok(Ended::JobWasOver { result, remedy })
            }
            Some(result) if result.state == JobOutcome::Failed => Ok(Ended::JobFailed(result)),
            Some(_) => {
                info!("the job has succeeded");
                Ok(Ended::Succeeded)
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

/// Returns the most workers that a round can have, as far as this node knows: a launcher knows all nodes.
fn workers_max(args: &RunArgs) -> Option<u32> {
    match args.launched_on {
        Some(_) => args.max_workers,
        None => Some(args.nnodes.max().saturating_mul(args.nproc_per_node)),
    }
}

pub(crate) fn failure(error: &NodeError) -> Failure {
    Failure::new(error.kind(), error.to_string())
}

/// Describes a change of a round, for users.
pub(crate) fn describe(change: &Change) -> String {
    match change.nodes {
        0 => format!("a worker of {} has failed", change.failed),
        1.. if 0 < change.surplus => {
            let nodes = plural(change.surplus as usize, "node");
            format!("the job is to have fewer workers: {nodes} to leave the round")
        }
        1.. => format!("{} more nodes are ready to join", change.nodes),
        _ if change.lost.is_empty() => format!("{} nodes were lost", -change.nodes),
        _ => format!("lost {}", change.lost),
    }
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
        shutdown: Some(shutdown.clone()),
        status: Box::new(move || shown.status()),
        page: None,
    }))
}
