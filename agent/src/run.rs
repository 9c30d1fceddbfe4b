//! The life of an agent.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::sys::signal::Signal;
use steadfast_client::Terms;
use steadfast_common::elastic::ElasticSpec;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Round};
use steadfast_common::keys::Keys;
use steadfast_common::rendezvous::AgentRecord;
use steadfast_common::role::Role;
use steadfast_coord::{Etcd, EtcdOptions, backoff};
use steadfast_host::random;
use steadfast_host::task::spawn;
use steadfast_process::{
    Admin, AdminContent, AdminServer, Failure, Readiness, Shutdown, address_towards, init_logging,
};
use steadfast_proto::v1::NodeReport;
use steadfast_supervise::{Exit, GuardProgram, Output, Supervisor, WorkerSet, WorkerSpec};
use tokio::time::{Instant, interval, sleep};
use tracing::{info, warn};

use crate::args::RunArgs;
use crate::coordinator::{Coordinator, Settings};
use crate::environment::{Fixed, Place};
use crate::launch::leash;
use crate::membership::{Exited, Membership, failure};
use crate::metrics::Counts;
use crate::ports::HeldPorts;
use crate::watch::{RoundOver, describe, until_over};

/// How long workers may take to write their stacks.
const DUMP_TIME: Duration = Duration::from_secs(2);

/// How long etcd may take to start.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// Exit code when the workers failed and no restart is left.
const WORKERS_FAILED: u8 = 1;

/// How often the time of the last output is checked.
const HANG_CHECK: Duration = Duration::from_millis(200);

/// Runs an agent until the job has succeeded, no restart is left, or a signal arrives.
///
/// # Errors
/// Every error that needs user action.
pub async fn run(args: RunArgs) -> Result<ExitCode, Failure> {
    let program = find_program(&args.command[0])?;
    let id = random::uuid();
    let job = args.rdzv_id.clone().unwrap_or_else(|| "standalone".to_owned());
    init_logging("agent", &job, id, &args.log)?;
    let shutdown = Shutdown::install()?;
    if args.launched_on.is_some() {
        spawn(leash::follow(shutdown.clone()));
    }
    let mut coordinator = None;
    let mut endpoints: Vec<String> = args.rdzv_endpoint.iter().map(|it| url(it)).collect();
    if args.standalone {
        let settings = Settings::of_one_node(ElasticSpec::new(&job, args.nnodes));
        let started = coordinator.insert(Coordinator::start(settings).await?);
        endpoints = vec![format!("http://{}", started.address)];
    }
    let ended = Agent::begin(&args, program, NodeId(id), job, endpoints, &shutdown).await;
    let ended = match ended {
        Ok(agent) => agent.live(&shutdown).await,
        Err(failure) => Err(failure),
    };
    if let Some(coordinator) = coordinator {
        coordinator.end().await;
    }
    ended
}

/// How the workers of a round ended, all of them.
#[derive(Debug)]
enum RoundEnd {
    Succeeded,
    /// Nodes come or went.
    Changed(String),
    /// The registration was lost.
    Unregistered,
    /// A worker failed: which, how, and whether the round had changed by then.
    Failed {
        reason: String,
        last_lines: Vec<String>,
        change: Option<String>,
    },
    JobEnded,
    Refused(Failure),
    Interrupted,
}

struct Agent<'a> {
    args: &'a RunArgs,
    program: PathBuf,
    membership: Membership,
    fixed: Fixed,
    host: String,
    base: Option<u16>,
    supervisor: Supervisor,
    counts: Arc<Counts>,
    readiness: Readiness,
    _admin: AdminServer,
}

impl<'a> Agent<'a> {
    async fn begin(
        args: &'a RunArgs,
        program: PathBuf,
        node: NodeId,
        job: String,
        endpoints: Vec<String>,
        shutdown: &Shutdown,
    ) -> Result<Self, Failure> {
        let exposure = args.security.exposure(Role::Trainer)?;
        let tls = exposure.identity();
        let admin = Admin::bind(args.admin_listen, exposure).await?;
        let (host, base) = address(args.address.as_deref(), &endpoints)?;
        let counts = Arc::new(Counts::default());
        counts.restarts_max.store(args.max_restarts, Ordering::Relaxed);
        let readiness = Readiness::new("joins a round");
        let admin_address = admin.local_addr();
        let _admin = serve(admin, args, node, job.clone(), &counts, &readiness, shutdown)?;
        let shown = match admin_address.ip().is_unspecified() {
            true => format!("{host}:{}", admin_address.port()),
            false => admin_address.to_string(),
        };
        let record = AgentRecord {
            // Without a port of the user's, that of the admin port distinguishes the nodes of one host.
            address: format!("{host}:{}", base.unwrap_or(admin_address.port())),
            slots: args.nproc_per_node,
            admin: shown,
            launched_on: args.launched_on.clone(),
        };
        let options = args.auth.options(endpoints, &args.security.tls)?;
        let etcd = connect(&options).await?;
        let membership = Membership {
            etcd,
            keys: Keys::of_job(&job),
            lease_ttl: args.lease_ttl,
            node,
            record,
            tls,
            terms: Terms { nodes_min: args.nnodes.min(), nodes_max: args.nnodes.max() },
            session: None,
            last: Round(0),
        };
        let nodes_max = args.nnodes.max();
        let fixed = Fixed { job, node, nodes_max, restarts_max: args.max_restarts };
        let supervisor = Supervisor::new(GuardProgram::this_program()).map_err(start_failure)?;
        Ok(Self {
            args,
            program,
            membership,
            fixed,
            host,
            base,
            supervisor,
            counts,
            readiness,
            _admin,
        })
    }

    async fn live(mut self, shutdown: &Shutdown) -> Result<ExitCode, Failure> {
        let ended = self.rounds(shutdown).await;
        self.membership.leave().await;
        if let Err(still) = self.supervisor.close().await {
            warn!(processes = ?still.processes, "some processes of the workers could not be ended");
        }
        ended
    }

    /// Runs one round after the other.
    async fn rounds(&mut self, shutdown: &Shutdown) -> Result<ExitCode, Failure> {
        loop {
            self.readiness.set_not_ready("joins a round");
            let (host, base, workers) = (self.host.clone(), self.base, self.args.nproc_per_node);
            let take_ports = move || HeldPorts::take(&host, base, workers);
            let (place, held) = tokio::select! {
                biased;
                () = shutdown.drain() => return Ok(interrupted()),
                joined = self.membership.join(take_ports) => match joined {
                    Err(failure) if failure.kind == ErrorKind::Stale => return self.job_ended().await,
                    joined => joined?,
                },
            };
            self.counts.rounds.fetch_add(1, Ordering::Relaxed);
            self.counts.round.store(place.record.round.0, Ordering::Relaxed);
            info!(
                round = place.record.round.0,
                rank = place.rank,
                nodes = place.record.members.len(),
                workers = place.record.world_size,
                "round begins"
            );
            let specs = self.specs(&place)?;
            drop(held);
            let mut workers = self.supervisor.start_all(&specs).await.map_err(start_failure)?;
            self.counts.workers.store(workers.workers().len() as u32, Ordering::Relaxed);
            self.readiness.set_ready();
            let ended = self.watch(&place, &mut workers, shutdown).await;
            workers.stop(self.args.grace).await;
            self.counts.workers.store(0, Ordering::Relaxed);
            match ended {
                RoundEnd::Succeeded => {
                    let exit = self.membership.exit(self.args.exit_barrier_timeout);
                    let exited = tokio::select! {
                        biased;
                        () = shutdown.drain() => return Ok(interrupted()),
                        exited = exit => exited?,
                    };
                    match exited {
                        Exited::All => return self.job_ended().await,
                        Exited::Again => {}
                    }
                }
                RoundEnd::Changed(reason) => {
                    self.counts.changes.fetch_add(1, Ordering::Relaxed);
                    info!(round = place.record.round.0, "round ends: {reason}");
                }
                RoundEnd::Unregistered => {
                    self.counts.changes.fetch_add(1, Ordering::Relaxed);
                    warn!("the registration was lost; registering again");
                    self.membership.session = None;
                }
                RoundEnd::Failed { reason, change: Some(change), .. } => {
                    self.counts.changes.fetch_add(1, Ordering::Relaxed);
                    info!(round = place.record.round.0, "round ends: {change} ({reason})");
                }
                RoundEnd::Failed { reason, last_lines, change: None } => {
                    let restarts = self.counts.restarts.fetch_add(1, Ordering::Relaxed) + 1;
                    last_lines.iter().for_each(|line| warn!("  {line}"));
                    if self.args.max_restarts < restarts {
                        let restarts = self.args.max_restarts;
                        let message =
                            format!("{reason}; no restart is left (--max-restarts {restarts})");
                        eprintln!("steadfast: error: {message}");
                        return Ok(ExitCode::from(WORKERS_FAILED));
                    }
                    warn!(restarts, restarts_max = self.args.max_restarts, "restarting: {reason}");
                }
                RoundEnd::JobEnded => return self.job_ended().await,
                RoundEnd::Refused(failure) => return Err(failure),
                RoundEnd::Interrupted => return Ok(interrupted()),
            }
        }
    }

    /// Watches the workers of a round until all have succeeded, or have to be stopped.
    async fn watch(
        &mut self,
        place: &Place,
        workers: &mut WorkerSet,
        shutdown: &Shutdown,
    ) -> RoundEnd {
        let Some(session) = &self.membership.session else {
            return RoundEnd::Unregistered;
        };
        let (round, counts) = (place.record.round, &self.counts);
        let report = || NodeReport {
            restarts: counts.restarts.load(Ordering::Relaxed),
            restarts_max: counts.restarts_max.load(Ordering::Relaxed),
            state: "running".to_owned(),
        };
        let mut over =
            std::pin::pin!(until_over(session, round, report, self.args.monitor_interval));
        let mut check = interval(HANG_CHECK);
        loop {
            tokio::select! {
                biased;
                () = shutdown.drain() => return RoundEnd::Interrupted,
                exited = workers.next_exit() => {
                    let Some((local_rank, exit)) = exited else { return RoundEnd::Succeeded };
                    if !exit.is_success() {
                        let change = match session.change(round).await {
                            Ok((0, _)) => None,
                            Ok((change, lost)) => Some(describe(change, &lost)),
                            Err(error) => Some(failure(&error).message),
                        };
                        return failed(place, local_rank, exit, change);
                    }
                }
                over = &mut over => return match over {
                    RoundOver::Changed(reason) => RoundEnd::Changed(reason),
                    RoundOver::Unregistered => RoundEnd::Unregistered,
                    RoundOver::JobEnded => RoundEnd::JobEnded,
                    RoundOver::Failed(failure) => RoundEnd::Refused(failure),
                },
                _ = check.tick(), if self.args.hang_timeout.is_some() => {
                    if let Some(reason) = self.hang(workers).await {
                        return RoundEnd::Failed { reason, last_lines: Vec::new(), change: None };
                    }
                }
            }
        }
    }

    /// Returns a description if no worker has printed anything for the time that the user set.
    async fn hang(&self, workers: &WorkerSet) -> Option<String> {
        let limit = self.args.hang_timeout?;
        let last = workers.workers().iter().filter_map(|worker| worker.last_output()).max()?;
        if last.elapsed() < limit {
            return None;
        }
        warn!(seconds = limit.as_secs_f64(), "no output; asking the workers for their stacks");
        workers.dump_stacks();
        sleep(DUMP_TIME).await;
        Some(format!("the workers hang: no output for {limit:?} (--hang-timeout)"))
    }

    fn specs(&self, place: &Place) -> Result<Vec<WorkerSpec>, Failure> {
        let restarts = self.counts.restarts.load(Ordering::Relaxed);
        let first_rank = place.own().first_rank;
        let specs = (0..place.own().slots).map(|local_rank| {
            let rank = first_rank + local_rank;
            let mut spec = WorkerSpec::new(format!("rank {rank}"), self.program.clone());
            spec.args = self.args.command[1..].to_vec();
            let variables = place.environment(&self.fixed, local_rank, restarts);
            let variables = variables.into_iter().chain(defaults(place.own().slots));
            spec.env = variables.map(|(name, value)| (name.into(), value.into())).collect();
            spec.output = self.output(place, rank)?;
            Ok(spec)
        });
        specs.collect()
    }

    fn output(&self, place: &Place, rank: u32) -> Result<Output, Failure> {
        let prefix = format!("[rank {rank}] ");
        let Some(log_dir) = &self.args.log_dir else { return Ok(Output::Lines { prefix }) };
        let directory = log_dir.join(place.record.round.to_string()).join(rank.to_string());
        std::fs::create_dir_all(&directory)
            .map_err(|error| Failure::io(format!("--log-dir {}", directory.display()), &error))?;
        Ok(match self.args.quiet {
            true => Output::Files { directory },
            false => Output::LinesAndFiles { prefix, directory },
        })
    }

    /// Returns the exit code after the end of the job.
    async fn job_ended(&self) -> Result<ExitCode, Failure> {
        let keys = &self.membership.keys;
        let result = self.membership.etcd.get_json(&keys.result()).await?;
        let result: Option<steadfast_common::records::ResultRecord> = result;
        match result {
            Some(result) if result.state == steadfast_common::records::JobOutcome::Failed => {
                let reason = result.reason.unwrap_or_default();
                eprintln!("steadfast: error: the job was shut down: {reason}");
                Ok(ExitCode::from(WORKERS_FAILED))
            }
            Some(_) | None => {
                info!("the job has succeeded");
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

/// Connects to etcd. Nodes are started in any order, so it may not be up yet.
pub(crate) async fn connect(options: &EtcdOptions) -> Result<Etcd, Failure> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    let mut pauses = backoff();
    let mut is_logged = false;
    loop {
        match Etcd::connect(options).await {
            Err(error) if error.is_transient() && Instant::now() < deadline => {
                if !is_logged {
                    info!("waiting for etcd: {error}");
                    is_logged = true;
                }
                sleep(pauses.next().unwrap_or(CONNECT_TIMEOUT)).await;
            }
            connected => return Ok(connected?),
        }
    }
}

/// Settings that most programs want, unless the user has set them: one thread for each of several workers, as
/// torchrun sets it, and output that appears when it is printed.
fn defaults(slots: u32) -> Vec<(String, String)> {
    let threads = (1 < slots).then_some(("OMP_NUM_THREADS", "1"));
    let wanted = threads.into_iter().chain([("PYTHONUNBUFFERED", "1")]);
    let unset = wanted.filter(|(name, _)| std::env::var_os(name).is_none());
    unset.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn failed(place: &Place, local_rank: usize, exit: Exit, change: Option<String>) -> RoundEnd {
    let rank = place.own().first_rank + local_rank as u32;
    let reason = format!("the worker of rank {rank} ended with {exit}");
    RoundEnd::Failed { reason, last_lines: exit.last_lines, change }
}

fn interrupted() -> ExitCode {
    ExitCode::from(128 + Signal::SIGTERM as u8)
}

pub(crate) fn start_failure(error: steadfast_supervise::StartError) -> Failure {
    Failure::new(error.kind(), error.to_string())
}

pub(crate) fn url(endpoint: &str) -> String {
    match endpoint.contains("://") {
        true => endpoint.to_owned(),
        false => format!("http://{endpoint}"),
    }
}

/// Returns the host at which other nodes reach this one, and the port that the user chose.
fn address(given: Option<&str>, endpoints: &[String]) -> Result<(String, Option<u16>), Failure> {
    let own_host = || {
        let toward = endpoints.iter().find_map(|endpoint| address_towards(endpoint));
        match toward {
            Some(std::net::IpAddr::V6(ip)) => format!("[{ip}]"),
            Some(ip) => ip.to_string(),
            None => "127.0.0.1".to_owned(),
        }
    };
    let Some(given) = given else { return Ok((own_host(), None)) };
    if let Ok(port) = given.parse::<u16>() {
        return Ok((own_host(), Some(port).filter(|port| *port != 0)));
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
    let probe = AgentRecord {
        address: format!("{host}:1"),
        slots: 1,
        admin: String::new(),
        launched_on: None,
    };
    match probe.has_valid_address() {
        true => Ok((host, port)),
        false => Err(Failure::invalid(format!("--address {given}: use `host:port`"))),
    }
}

/// Returns the path of the user's program, as a shell would find it.
fn find_program(name: &OsString) -> Result<PathBuf, Failure> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return match path.exists() {
            true => Ok(path.to_owned()),
            false => Err(not_found(path)),
        };
    }
    let directories = std::env::var_os("PATH").unwrap_or_default();
    let mut candidates = std::env::split_paths(&directories).map(|directory| directory.join(path));
    candidates.find(|candidate| candidate.is_file()).ok_or_else(|| not_found(path))
}

fn not_found(path: &Path) -> Failure {
    Failure::new(
        ErrorKind::NotFound,
        format!("there is no program `{}` to run; check the command after `--`", path.display()),
    )
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
