//! etcd and the master of an elastic job inside of one process: for `steadfast run --standalone`, and for
//! `steadfast rendezvous`.

use std::error::Error as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser};
use steadfast_common::error::ErrorKind;
use steadfast_common::job::durations;
use steadfast_common::job::elastic::ElasticSpec;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::NodeRange;
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_coord::{CoordError, Etcd, EtcdOptions};
use steadfast_etcd::{Config, Server};
use steadfast_host::random;
use steadfast_host::task::{Task, spawn};
use steadfast_host::time::{sleep, timeout};
use steadfast_master::{ElasticRequest, Request};
use steadfast_process::{
    Failure, LogArgs, LogIdentity, Shutdown, advertised_host, host_of, init_logging, job_name,
    own_host,
};
use tempfile::TempDir;
use tracing::{error, info, warn};

use crate::args::DataArgs;
use crate::job_end::{has_failed, was_over};

/// How long agents may take to hear that the job is over, and to leave.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(15);

/// Time between looks whether they have left.
const LEAVE_CHECK: Duration = Duration::from_millis(50);

/// How long the master may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Serve the rendezvous of one elastic job: etcd and a master in one process, for jobs whose nodes need no more
/// than that.
///
/// The agents of the nodes (`steadfast run`, torchrun) get its address as --rdzv-endpoint. It ends with the
/// job. A job that must survive the loss of this machine runs an etcd cluster and two masters instead.
#[derive(Clone, Debug, Args)]
#[command(mut_arg("filter", |arg| arg.default_value("warn,steadfast_agent=info,steadfast_master=info")))]
pub struct RendezvousArgs {
    /// Name of the job.
    #[arg(long, value_name = "NAME", value_parser = job_name)]
    rdzv_id: String,
    /// Number of nodes of the job.
    #[arg(long, value_name = "MIN:MAX", value_parser = NodeRange::parse)]
    nnodes: NodeRange,
    /// How long the first round is kept open after each arrival, if no node is known to be starting.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = durations::parse)]
    last_call: Duration,
    /// How long nodes wait for those that are starting, and for members of the last round.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = durations::parse)]
    join_timeout: Duration,
    /// Address at which etcd is served: the --rdzv-endpoint of agents.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:2379")]
    listen: SocketAddr,
    /// Address at which the master is served: for programs that call its gRPC service.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    master_listen: SocketAddr,
    /// Host at which other machines reach the master, or host and port [default: with a --master-listen on all addresses, the
    /// address of this machine on the default route].
    #[arg(long, value_name = "HOST[:PORT]", value_parser = advertised_host)]
    advertise: Option<String>,
    /// Address of the master's admin port: health, metrics, status.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    admin_listen: SocketAddr,
    /// Directory of etcd's data; a job goes on with the same directory [default: a temporary one].
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Allow addresses other than loopback: every client that reaches them can read and change everything.
    #[arg(long)]
    insecure_allow_plaintext: bool,
    #[command(flatten)]
    data: DataArgs,
    #[command(flatten)]
    log: LogArgs,
}

/// Serves until the job is over, or a signal arrives.
///
/// # Errors
/// If an address or a directory cannot be used, or the job exists with other settings.
pub async fn rendezvous(args: RendezvousArgs) -> Result<ExitCode, Failure> {
    init_logging("rendezvous", &args.rdzv_id, std::process::id(), &args.log)?;
    for (flag, address) in [
        ("--listen", args.listen),
        ("--master-listen", args.master_listen),
        ("--admin-listen", args.admin_listen),
    ] {
        if !address.ip().is_loopback() && !args.insecure_allow_plaintext {
            return Err(Failure::invalid(format!(
                "{flag} {address} is not a loopback address, and the embedded etcd has neither TLS nor users; \
                 run etcd and steadfast-master instead, or pass --insecure-allow-plaintext"
            )));
        }
    }
    let advertise = match (&args.advertise, args.master_listen.ip().is_unspecified()) {
        (Some(given), _) => Some(given.clone()),
        (None, true) => Some(own_host()?),
        (None, false) => None,
    };
    let shutdown = Shutdown::install()?;
    let mut spec = ElasticSpec::new(&args.rdzv_id, args.nnodes);
    spec.nodes.last_call = args.last_call;
    spec.nodes.join_timeout = args.join_timeout;
    args.data.describe(&mut spec);
    let settings = OwnRendezvousSettings {
        spec,
        listen: args.listen,
        master_listen: args.master_listen,
        advertise: advertise.clone(),
        admin_listen: args.admin_listen,
        data_dir: args.data_dir,
    };
    let mut rendezvous = OwnRendezvous::start(settings, &shutdown).await?;
    let endpoint = match (&advertise, rendezvous.address.ip().is_unspecified()) {
        (Some(address), true) => format!("{}:{}", host_of(address), rendezvous.address.port()),
        (Some(_), false) | (None, _) => rendezvous.address.to_string(),
    };
    if let Some(result) = rendezvous.result(&args.rdzv_id).await? {
        rendezvous.end().await;
        let remedy = "choose another --rdzv-id or --data-dir";
        return Ok(was_over(&args.rdzv_id, &result, remedy));
    }
    let flags = format!("--rdzv-endpoint {endpoint} --rdzv-id {}", args.rdzv_id);
    info!(%flags, "agents join");
    let ended = tokio::select! {
        biased;
        ended = rendezvous.master_ended() => {
            let result = rendezvous.result(&args.rdzv_id).await;
            rendezvous.all_have_left(&args.rdzv_id).await;
            ended.and(result)
        }
        () = shutdown.drain() => Ok(None),
    };
    rendezvous.end().await;
    Ok(exit_code(ended?))
}

/// Returns the exit code of the process that serves a rendezvous, whose job may have ended.
fn exit_code(result: Option<ResultRecord>) -> ExitCode {
    match result {
        Some(result) if result.state == JobOutcome::Failed => has_failed(result),
        Some(_) | None => ExitCode::SUCCESS,
    }
}

/// Selects the job of a rendezvous, and the addresses that it listens on.
#[derive(Debug)]
pub struct OwnRendezvousSettings {
    pub spec: ElasticSpec,
    pub listen: SocketAddr,
    pub master_listen: SocketAddr,
    /// Where agents reach the master, if it is not the address at which that listens.
    pub advertise: Option<String>,
    pub admin_listen: SocketAddr,
    pub data_dir: Option<PathBuf>,
}

impl OwnRendezvousSettings {
    /// Returns the settings for a job that only this process takes part in.
    pub fn of_one_node(spec: ElasticSpec) -> Self {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self {
            spec,
            listen: any,
            master_listen: any,
            advertise: None,
            admin_listen: any,
            data_dir: None,
        }
    }
}

/// A running etcd and master. They end with this process.
#[derive(Debug)]
pub struct OwnRendezvous {
    /// Where etcd is served.
    pub address: SocketAddr,
    shutdown: Shutdown,
    /// `None` once it has ended.
    master: Option<Task<Result<(), Failure>>>,
    etcd: Task<()>,
    _data: Option<TempDir>,
}

impl OwnRendezvous {
    /// Starts etcd and the master of a job. A process that exits at once leaves no temporary directory.
    ///
    /// # Errors
    /// If no port is free, or the directory cannot be created.
    pub async fn start(
        settings: OwnRendezvousSettings,
        of_process: &Shutdown,
    ) -> Result<Self, Failure> {
        let (data_dir, _data) = match settings.data_dir {
            Some(directory) => (directory, None),
            None => {
                let data = tempfile::tempdir()
                    .map_err(|error| Failure::io("cannot create a temporary directory", &error))?;
                of_process.remove_at_exit(data.path());
                (data.path().to_owned(), Some(data))
            }
        };
        let server = Server::bind(Config::new(settings.listen, data_dir)).await;
        let server = server.map_err(|error| {
            let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
            Failure::new(ErrorKind::Conflict, format!("etcd: {error}{cause}"))
        })?;
        let address = server.local_addr();
        let etcd = spawn(async move {
            if let Err(error) = server.serve(std::future::pending()).await {
                error!(%error, "etcd ended");
            }
        });
        let job = settings.spec.name.clone();
        let mut flags = vec![
            "steadfast-master".to_owned(),
            format!("--job={job}"),
            format!("--etcd-endpoints=http://{address}"),
            format!("--listen={}", settings.master_listen),
            format!("--admin-listen={}", settings.admin_listen),
        ];
        flags.extend(settings.advertise.map(|host| format!("--advertise={host}")));
        if !settings.master_listen.ip().is_loopback() || !settings.admin_listen.ip().is_loopback() {
            // The user allowed it.
            flags.push("--insecure-allow-plaintext".to_owned());
        }
        let args = steadfast_master::Args::try_parse_from(flags)
            .map_err(|error| Failure::internal(format!("the master's settings: {error}")))?;
        let request = Request::Elastic(ElasticRequest { spec: settings.spec });
        let id = random::uuid();
        let identity = LogIdentity::new("master", &job, id);
        let shutdown = Shutdown::manual();
        let drain = shutdown.clone();
        let master = spawn(steadfast_master::run_process(args, Some(request), id, identity, drain));
        Ok(Self { address, shutdown, master: Some(master), etcd, _data })
    }

    /// Completes when the master has ended: the job is over, or it failed.
    ///
    /// # Errors
    /// The failure of the master.
    pub async fn master_ended(&mut self) -> Result<(), Failure> {
        let Some(master) = &mut self.master else { return Ok(()) };
        let ended = master.await;
        self.master = None;
        ended.map_err(Failure::from)?
    }

    /// Returns the result of the job, if it is over.
    async fn result(&self, job: &str) -> Result<Option<ResultRecord>, Failure> {
        let etcd = Etcd::connect(&self.options()).await?;
        Ok(etcd.get_json(&Keys::of_job(job).result()).await?)
    }

    fn options(&self) -> EtcdOptions {
        let endpoints = vec![format!("http://{}", self.address)];
        EtcdOptions { endpoints, ..EtcdOptions::default() }
    }

    /// Waits until all agents have left. They learn from etcd that the job is over.
    async fn all_have_left(&self, job: &str) {
        let options = self.options();
        let prefix = Keys::of_job(job).agents_prefix();
        let leaving = async {
            let etcd = Etcd::connect(&options).await?;
            while !etcd.list(&prefix).await?.entries.is_empty() {
                sleep(LEAVE_CHECK).await;
            }
            Ok::<(), CoordError>(())
        };
        match timeout(LEAVE_TIMEOUT, leaving).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "cannot see whether agents have left"),
            Err(_) => warn!("some agents did not leave in time"),
        }
    }

    /// Ends the master, then etcd.
    pub async fn end(self) {
        self.shutdown.trigger();
        if let Some(master) = self.master {
            let _ = timeout(END_TIMEOUT, master).await;
        }
        self.etcd.abort();
    }
}
