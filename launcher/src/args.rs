//! The settings of a launcher. Where horovodrun or torchrun has a flag, it has the same name here.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use steadfast_agent::{DataArgs, HangTimeout};
use steadfast_common::job::durations::{self, parse_or_seconds};
use steadfast_common::records::rendezvous::{NodeRange, SLOTS_MAX};
use steadfast_launcher_core::blacklist::Cooldown;
use steadfast_process::{EtcdAuthArgs, LogArgs, SecurityArgs, job_name, lease_ttl};

/// By default only what the launcher itself does is logged.
const LOG: &str = "warn,steadfast_launcher=info,steadfast_agent=info";

/// Run a program on several hosts, as an elastic job: start an agent on each host, and follow hosts that come
/// and go.
///
/// The hosts are a fixed list, or what a script prints, which is called each second. Each agent is
/// `steadfast run`, started through ssh; hosts that are this machine need no ssh.
#[derive(Clone, Debug, Args)]
#[command(
    mut_arg("filter", |arg| arg.default_value(LOG)),
    after_help = "Exit codes: 0 the job succeeded; 1 the agents of all hosts failed; 2 bad usage, or the first \
                  discovery of hosts failed; 4 another launcher runs this job; 6 too few slots, discovery \
                  fails, or etcd cannot be reached: try again; 7 the reset limit; 129, 130, 131, 143 interrupted.\n\n\
                  Example: steadfast launch --hosts a:2,b:2 --rdzv-endpoint etcd:2379 --rdzv-id digits \
                  -- python train.py"
)]
pub struct LaunchArgs {
    /// Hosts and their slots, at least two: a slot runs one worker.
    #[arg(short = 'H', long, value_name = "HOST[:SLOTS],…")]
    pub(crate) hosts: Option<String>,
    /// Command that prints the hosts, one `host` or `host:slots` a line. It is called each second.
    #[arg(long, value_name = "CMD")]
    pub(crate) host_discovery_script: Option<String>,
    /// How long one call of the script may take; then it is killed, and counts as failed.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_or_seconds)]
    pub(crate) discovery_timeout: Duration,
    /// Slots of hosts that are listed without.
    #[arg(long, alias = "slots", value_name = "N", default_value_t = 1, value_parser = slots)]
    pub(crate) slots_per_host: u32,
    /// Fewest workers with which agents are started.
    #[arg(long, alias = "min-num-proc", value_name = "N", default_value_t = 1)]
    pub(crate) min_np: u32,
    /// Most workers [default: all slots].
    #[arg(long, alias = "max-num-proc", value_name = "N")]
    pub(crate) max_np: Option<u32>,
    /// Number of nodes of the job [default: that of the job's master; if this launcher serves it, the fewest
    /// hosts that have --min-np slots, to all hosts of --hosts; with a script 1 to --max-np, at most 2048].
    #[arg(long, value_name = "MIN:MAX", value_parser = NodeRange::parse)]
    pub(crate) nnodes: Option<NodeRange>,
    /// How long too few slots are found, or discovery fails, before the job ends [default:
    /// HOROVOD_ELASTIC_TIMEOUT, or 10m].
    #[arg(long, value_name = "TIME", value_parser = parse_or_seconds)]
    pub(crate) elastic_timeout: Option<Duration>,
    /// How often the set of agents may change before the job ends; without a limit by default.
    #[arg(long, value_name = "N")]
    pub(crate) reset_limit: Option<u32>,
    /// How long a host whose agent failed gets no other: LOWER at first, doubled with each failure, at most
    /// UPPER.
    #[arg(long, value_name = "LOWER:UPPER", default_value = "1s:1h", value_parser = cooldown)]
    pub(crate) blacklist_cooldown_range: Cooldown,
    /// Command that runs a command line on a host: the host and the line are appended to it [default: ssh,
    /// and nothing for hosts that are this machine].
    #[arg(long, value_name = "CMD")]
    pub(crate) remote_shell: Option<String>,
    /// Path of steadfast on the hosts [default: the path of this program].
    #[arg(long, value_name = "PATH")]
    pub(crate) agent_program: Option<PathBuf>,
    /// Directory of the agents on the hosts [default: the current directory].
    #[arg(long, value_name = "DIR")]
    pub(crate) directory: Option<PathBuf>,
    /// Network interface at whose address the hosts reach each other, by its name on each host [default: hosts are
    /// reached under their names in the list].
    #[arg(long, value_name = "NAME")]
    pub(crate) nic: Option<String>,
    /// Variable for agents and workers on hosts that are reached through a remote shell, which pass none on: with the
    /// value given, or that of this process. Others can read it in the list of processes [default: none].
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// Name of the job.
    #[arg(long, value_name = "NAME", value_parser = job_name)]
    pub(crate) rdzv_id: String,
    /// Addresses of the etcd members, for a job with a master of its own [default: this launcher serves etcd
    /// and a master].
    #[arg(long, value_name = "HOST:PORT,…", value_delimiter = ',')]
    pub(crate) rdzv_endpoint: Vec<String>,
    /// Address at which this launcher serves etcd [default: a free port of 127.0.0.1, or of all addresses with
    /// --insecure-allow-plaintext].
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "rdzv_endpoint")]
    pub(crate) listen: Option<SocketAddr>,
    /// Host, or host and port, at which the hosts reach that address [default: the address of this machine on
    /// the default route].
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "rdzv_endpoint")]
    pub(crate) advertise: Option<String>,
    /// Directory of that etcd's data: a launcher that is started again goes on with it [default: a temporary
    /// one].
    #[arg(long, value_name = "DIR", conflicts_with = "rdzv_endpoint")]
    pub(crate) data_dir: Option<PathBuf>,
    /// How long the first round is kept open after each arrival, if the job has no master of its own.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = durations::parse)]
    pub(crate) last_call: Duration,
    #[command(flatten)]
    pub(crate) data: DataArgs,
    /// How often each agent restarts its failed workers before it fails.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) max_restarts: u32,
    /// Warm workers of each host, as for `steadfast run`.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) warm_workers: u32,
    /// Modules that warm workers import, as for `steadfast run`.
    #[arg(long, value_name = "MODULE,…", requires = "warm_workers")]
    pub(crate) warm_imports: Option<String>,
    /// As for `steadfast run`.
    #[arg(long, value_name = "TIME", default_value_t)]
    pub(crate) hang_timeout: HangTimeout,
    /// Directory on the hosts for the workers' output, as for `steadfast run`.
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,
    /// How long workers may take to end after SIGTERM; then they are killed.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = durations::parse)]
    pub(crate) grace: Duration,
    /// Address of the admin port: health, metrics, status.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    pub(crate) admin_listen: SocketAddr,
    /// Time to live of the leases in etcd of this launcher and of the agents.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = lease_ttl)]
    pub(crate) lease_ttl: Duration,
    #[command(flatten)]
    pub(crate) auth: EtcdAuthArgs,
    #[command(flatten)]
    pub(crate) security: SecurityArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

fn slots(text: &str) -> Result<u32, String> {
    let slots = text.parse().ok().filter(|slots| (1..=SLOTS_MAX).contains(slots));
    slots.ok_or_else(|| format!("use a number from 1 to {SLOTS_MAX}"))
}

fn cooldown(text: &str) -> Result<Cooldown, String> {
    let (lower, upper) = text.split_once(':').ok_or("use two times, as `1s:1h`")?;
    let ms = |text| {
        Ok::<_, String>(u64::try_from(parse_or_seconds(text)?.as_millis()).unwrap_or(u64::MAX))
    };
    let (lower_ms, upper_ms) = (ms(lower)?, ms(upper)?);
    Cooldown::new(lower_ms, upper_ms).ok_or_else(|| format!("{lower} is more than {upper}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_cool_downs_is_two_times_in_order() {
        assert_eq!(cooldown("1s:1h"), Ok(Cooldown::default()));
        assert_eq!(cooldown("10:100"), Ok(Cooldown::new(10_000, 100_000).unwrap()));
        for text in ["", "1s", "2s:1s", "0:1", "a:b"] {
            assert!(cooldown(text).is_err(), "{text}");
        }
    }
}
