//! The settings of an agent. Where torchrun has a flag, it has the same name here.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use steadfast_agent_core::round::HangTimeout;
use steadfast_common::job::durations::{self, parse_or_seconds};
use steadfast_common::job::elastic::{ElasticSpec, RECORDS_MAX};
use steadfast_common::records::commits::RecordOrder;
use steadfast_common::records::rendezvous::{NodeRange, SLOTS_MAX};
use steadfast_process::{EtcdAuthArgs, LogArgs, SecurityArgs, job_name, lease_ttl};

use crate::gpus;
use crate::streams::{Streams, streams};

/// By default only what the agent itself does is logged.
const LOG: &str = "warn,steadfast_agent=info,steadfast_elastic_client::membership=info";

/// Run a program on this node, as part of an elastic job: restart its workers when nodes come and go.
///
/// Every node runs this command. `--standalone` needs nothing else; otherwise etcd and a master of an elastic
/// job must be running.
#[derive(Clone, Debug, Args)]
#[command(
    mut_arg("filter", |arg| arg.default_value(LOG)),
    after_help = "Exit codes: 0 the job succeeded; 1 the workers failed and no restart is left, or the job \
                  failed; 2 bad usage; 3 the program does not exist, or cannot be executed; 4 the job exists \
                  with other settings; 6 too few nodes, or etcd or the master cannot be reached: try again; \
                  9 the job was over before; 129, 130, 131, 143 interrupted.\n\n\
                  Example: steadfast run --standalone --nproc-per-node 2 train.py --epochs 3"
)]
pub struct RunArgs {
    /// Number of nodes of the job; must be the same on each node, and that of the job file.
    #[arg(long, value_name = "MIN:MAX", default_value = "1:1", value_parser = NodeRange::parse)]
    pub nnodes: NodeRange,
    /// Number of workers of this node: a number, or `gpu` (the GPUs that this process may see), `cpu` (the
    /// processors), or `auto` (the former if there are any, otherwise the latter).
    #[arg(long, value_name = "N", default_value = "1", value_parser = workers)]
    pub nproc_per_node: u32,
    /// How often failed workers are restarted. Restarts because nodes come and go do not count.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub max_restarts: u32,
    /// Warm workers of this node: Python processes that have imported the modules of --warm-imports, and become workers
    /// when a round starts some, instead of new processes; at most as many as the node has workers.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub warm_workers: u32,
    /// Modules that warm workers import [default: torch and torch._dynamo, if PyTorch is installed].
    #[arg(long, value_name = "MODULE,…", value_delimiter = ',', requires = "warm_workers")]
    pub warm_imports: Vec<String>,
    /// How often the state of the workers is reported to the master. Failures and changes of the round are
    /// noticed at once.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_or_seconds)]
    pub monitor_interval: Duration,
    /// Addresses of the etcd members, as `host:port` or URL, separated by commas.
    #[arg(
        long,
        value_name = "HOST:PORT,…",
        value_delimiter = ',',
        required_unless_present = "standalone"
    )]
    pub rdzv_endpoint: Vec<String>,
    /// Name of the job.
    #[arg(
        long,
        value_name = "NAME",
        value_parser = job_name,
        required_unless_present = "standalone"
    )]
    pub rdzv_id: Option<String>,
    /// Run etcd and a master inside of this process, for a job on this node alone.
    #[arg(long, conflicts_with_all = ["rdzv_endpoint", "rdzv_id"])]
    pub standalone: bool,
    /// Where the other nodes reach this one: `host:port`, or `host`, or a port. Without a port, the workers
    /// get free ports in each round; with one, worker i gets port + i [default: the address of this machine
    /// on the route to etcd].
    #[arg(long, alias = "local-addr", value_name = "HOST[:PORT]")]
    pub address: Option<String>,
    /// Network interface at whose address the other nodes reach this one, if --address names no host; also for Gloo and
    /// NCCL [default: that of the route to etcd].
    #[arg(long, value_name = "NAME")]
    pub nic: Option<String>,
    /// Directory for the workers' output: `<job>-<run>/<round>/<rank>/stdout.log` and `stderr.log`.
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Do not print the workers' output; needs --log-dir.
    #[arg(long, requires = "log_dir", conflicts_with_all = ["tee", "redirects"])]
    pub quiet: bool,
    /// Streams that are printed, and also written to files with --log-dir: 0 none, 1 stdout, 2 stderr, 3 both, or
    /// `LOCAL_RANK:N,…` [default: with --log-dir both].
    #[arg(short, long, value_name = "N", value_parser = streams)]
    pub(crate) tee: Option<Streams>,
    /// Streams that are written to files and not printed, as for --tee, which wins; needs --log-dir.
    #[arg(short, long, value_name = "N", requires = "log_dir", value_parser = streams)]
    pub(crate) redirects: Option<Streams>,
    /// Print the output of these workers only, by local rank; files are written for all.
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub local_ranks_filter: Vec<u32>,
    /// Name of the workers' role, for their ROLE_NAME.
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub role: String,
    /// Port for MASTER_PORT in rounds whose first node this is [default: a free one in each round].
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub master_port: Option<u16>,
    /// Nodes that a round takes in together are ranked by this number, and others by their age.
    #[arg(long, value_name = "N")]
    pub node_rank: Option<u32>,
    /// Without effect, as in torchrun for programs: every worker is a new process.
    #[arg(long, value_name = "METHOD", value_parser = ["spawn", "fork", "forkserver"])]
    pub start_method: Option<String>,
    /// CMD is a Python module, to be run as by `python -m`.
    #[arg(short, long, conflicts_with = "no_python")]
    pub module: bool,
    /// Run CMD itself also if its name ends in `.py`.
    #[arg(long)]
    pub no_python: bool,
    /// If no worker of this node prints or reports anything for this long, dump their stacks (SIGUSR1, if they
    /// handle it), and restart them as after a failure. `progress`: after ten minutes, if they report progress as
    /// `steadfast.elastic` does; `off`: never.
    #[arg(long, value_name = "TIME", default_value_t)]
    pub hang_timeout: HangTimeout,
    /// How long workers may take to end after SIGTERM; then they are killed.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = durations::parse)]
    pub grace: Duration,
    /// How long workers that use `steadfast.elastic` may take to leave a round; then they are killed.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = durations::parse)]
    pub reset_timeout: Duration,
    /// How long etcd, and then a master of the job, may take to answer when the agent starts. Later the agent
    /// waits for them without a limit.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = durations::parse)]
    pub start_timeout: Duration,
    /// How long a node that has succeeded waits for the others; without a limit by default.
    #[arg(long, value_name = "TIME", value_parser = durations::parse)]
    pub exit_barrier_timeout: Option<Duration>,
    /// Address of the admin port: health, metrics, status.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    pub admin_listen: SocketAddr,
    /// Time to live of this node's lease in etcd: how long after its last keep-alive it counts as alive.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = lease_ttl)]
    pub lease_ttl: Duration,
    /// Set by a launcher: its name for this host. The agent ends when its standard input ends.
    #[arg(long, value_name = "HOST", hide = true)]
    pub launched_on: Option<String>,
    /// Set by a launcher: the most workers that a round can have.
    #[arg(long, value_name = "N", hide = true)]
    pub max_workers: Option<u32>,
    #[command(flatten)]
    pub(crate) data: DataArgs,
    #[command(flatten)]
    pub auth: EtcdAuthArgs,
    #[command(flatten)]
    pub security: SecurityArgs,
    #[command(flatten)]
    pub log: LogArgs,
    /// The program and its arguments. Python runs a program whose name ends in `.py`, unless that is executable and
    /// names its interpreter.
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// The data of a job that is created by a command.
#[derive(Clone, Debug, Default, Args)]
pub struct DataArgs {
    /// Number of records of the data: commits then count each of them once in a pass (`records` of the job file).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=RECORDS_MAX))]
    pub records: Option<u64>,
    /// Deals the records in this order: `fixed` uses the same ones for each update, whatever the workers, and `dynamic`
    /// deals them as workers ask (`order` of the job file).
    #[arg(long, requires = "records", value_name = "ORDER", value_parser = orders())]
    pub order: Option<RecordOrder>,
}

impl DataArgs {
    /// Adds the data to a job.
    pub fn describe(&self, spec: &mut ElasticSpec) {
        spec.records = self.records;
        spec.order = self.order.unwrap_or_default();
    }
}

fn orders() -> impl TypedValueParser<Value = RecordOrder> {
    PossibleValuesParser::new(["fixed", "dynamic"]).map(|order| match order.as_str() {
        "dynamic" => RecordOrder::Dynamic,
        _ => RecordOrder::Fixed,
    })
}

impl RunArgs {
    /// Returns the name of the job.
    pub(crate) fn job(&self) -> &str {
        self.rdzv_id.as_deref().unwrap_or("standalone")
    }
}

fn workers(text: &str) -> Result<u32, String> {
    let processors = || std::thread::available_parallelism().map_or(1, |it| it.get() as u32);
    match text {
        "cpu" => Ok(processors()),
        "auto" => Ok(Some(gpus::count()).filter(|count| 0 < *count).unwrap_or_else(processors)),
        "gpu" => Some(gpus::count()).filter(|count| 0 < *count).ok_or_else(|| {
            "there is no GPU that this process may see (/dev/nvidia0, /dev/kfd; CUDA_VISIBLE_DEVICES, \
             ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES may hide some)"
                .to_owned()
        }),
        number => match number.parse() {
            Ok(workers) if (1..=SLOTS_MAX).contains(&workers) => Ok(workers),
            Ok(_) | Err(_) => {
                Err(format!("use a number from 1 to {SLOTS_MAX}, `auto`, `cpu` or `gpu`"))
            }
        },
    }
}
