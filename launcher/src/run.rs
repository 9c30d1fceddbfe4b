//! The life of a launcher: reads its settings, starts what the job needs, and runs the driver until the job has ended.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use steadfast_agent::{OwnRendezvous, OwnRendezvousSettings};
use steadfast_common::job::durations::parse_or_seconds;
use steadfast_common::job::elastic::{AnyJobRecord, ElasticSpec};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{NODES_MAX, NodeRange};
use steadfast_coord::{CoordError, Etcd, Mirror, Range};
use steadfast_host::random;
use steadfast_launcher_core::settings::{Settings, WorkerRange};
use steadfast_launcher_core::source::Source;
use steadfast_process::{Failure, Shutdown, init_logging};
use steadfast_supervise::{GuardProgram, Supervisor};
use tokio::time::timeout;
use tracing::info;

use crate::admin::{self, LauncherView};
use crate::agents::Agents;
use crate::args::LaunchArgs;
use crate::driver::Driver;
use crate::own_machine::{OwnMachine, advertised};
use crate::poll::{HostSource, Poller, Script};
use crate::store::Store;
use crate::template::Template;

/// The variable of horovodrun for the flag of the same name.
const ELASTIC_TIMEOUT: &str = "HOROVOD_ELASTIC_TIMEOUT";

/// How long etcd may take to start, and then the job's master.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a launcher until its job has ended, or a signal arrives.
///
/// # Errors
/// Every error that needs user action.
pub async fn launch(args: LaunchArgs) -> Result<ExitCode, Failure> {
    let machine = OwnMachine::own();
    let workers = workers(&args)?;
    let settings = settings(&args, workers)?;
    let (hosts, script) = (args.hosts.as_deref(), args.host_discovery_script.as_deref());
    let source = Source::of(hosts, script, args.slots_per_host)
        .map_err(|error| Failure::new(error.kind(), error.to_string()))?;
    let nodes = nodes(&args, &source, workers)?;
    let listen = listen(&args, &source, &machine);
    // Before anything is started, so that an error is the only output.
    let workers_max = workers_max(&args, &source);
    Template::new(&args, machine.clone(), &[], nodes, workers_max)?;
    let source = host_source(&args, source, listen, &machine)?;
    let id = random::uuid();
    init_logging("launcher", &args.rdzv_id, id, &args.log)?;
    let shutdown = Shutdown::install()?;
    let view = LauncherView::new();
    let _admin = admin::serve(&args, id, &view, &shutdown).await?;
    let mut endpoints: Vec<String> =
        args.rdzv_endpoint.iter().map(|it| args.auth.url(it)).collect();
    let mut served = endpoints.clone();
    let mut rendezvous = None;
    if let Some(listen) = listen {
        let settings = rendezvous_settings(&args, nodes, listen)?;
        let started = rendezvous.insert(OwnRendezvous::start(settings, &shutdown).await?);
        endpoints = vec![format!("http://{}", own(started.address))];
        served = vec![advertised(args.advertise.as_deref(), started.address)?];
    }
    let options = args.auth.options(endpoints, &args.security.tls);
    let waits = |error: &CoordError| info!(%error, "waiting for etcd");
    let etcd = Etcd::connect_within(&options, START_TIMEOUT, waits).await?;
    let keys = Keys::of_job(&args.rdzv_id);
    let nodes = match (listen, args.nnodes) {
        (None, None) => nodes_of_job(&etcd, &keys).await?,
        (Some(_), _) | (_, Some(_)) => nodes,
    };
    let supervisor = Supervisor::new(GuardProgram::this_program())
        .map_err(|error| Failure::new(error.kind(), error.to_string()))?;
    let template = Template::new(&args, machine, &served, nodes, workers_max)?;
    let times = (args.grace, args.lease_ttl);
    let agents = Agents::new(supervisor, template, times, &etcd, &keys, &shutdown).await?;
    let store = Store { etcd, keys, lease_ttl: args.lease_ttl, holder: id.to_string() };
    let driver = Driver::new(settings, store, agents, Poller::start(source), view);
    let ended = driver.run(&mut rendezvous, &shutdown).await;
    if let Some(rendezvous) = rendezvous {
        rendezvous.end().await;
    }
    ended
}

fn workers(args: &LaunchArgs) -> Result<WorkerRange, Failure> {
    let (min_np, max_np) = (args.min_np, args.max_np.unwrap_or(u32::MAX));
    WorkerRange::new(min_np, max_np).ok_or_else(|| {
        Failure::invalid(match max_np < min_np {
            true => format!("--min-np {min_np} is more than --max-np {max_np}"),
            false => "--min-np must be at least 1".to_owned(),
        })
    })
}

/// Returns the most workers that a round can have, if there is a limit.
fn workers_max(args: &LaunchArgs, source: &Source) -> Option<u32> {
    let slots = match source {
        Source::Script(_) => None,
        Source::Fixed(hosts) => Some(hosts.iter().map(|host| host.slots).sum()),
    };
    args.max_np.or(slots)
}

fn settings(args: &LaunchArgs, workers: WorkerRange) -> Result<Settings, Failure> {
    let mut settings = Settings::new(workers);
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    match (args.elastic_timeout, std::env::var(ELASTIC_TIMEOUT)) {
        (Some(time), _) => settings.elastic_timeout_ms = ms(time),
        (None, Ok(text)) => {
            let time = parse_or_seconds(&text);
            let time =
                time.map_err(|error| Failure::invalid(format!("{ELASTIC_TIMEOUT}: {error}")))?;
            settings.elastic_timeout_ms = ms(time);
        }
        (None, Err(_)) => {}
    }
    settings.reset_limit = args.reset_limit;
    settings.cooldown = args.blacklist_cooldown_range;
    Ok(settings)
}

/// Returns how many nodes a round may have. All agents and the master must agree on it.
fn nodes(args: &LaunchArgs, source: &Source, workers: WorkerRange) -> Result<NodeRange, Failure> {
    if let Some(nodes) = args.nnodes {
        return Ok(nodes);
    }
    let (min, max) = match source {
        Source::Script(_) => (1, workers.max_np().min(NODES_MAX)),
        Source::Fixed(hosts) => {
            let mut slots: Vec<u32> = hosts.iter().map(|host| host.slots).collect();
            slots.sort_unstable();
            let mut missing = workers.min_np();
            let fewest = slots.iter().rev().take_while(|slots| {
                let is_missing = 0 < missing;
                missing = missing.saturating_sub(**slots);
                is_missing
            });
            let fewest = fewest.count() as u32;
            if 0 < missing {
                let (found, min_np) = (slots.iter().sum::<u32>(), workers.min_np());
                let message = format!("--hosts has {found} slots, fewer than --min-np {min_np}");
                return Err(Failure::invalid(message));
            }
            (fewest, (hosts.len() as u32).min(workers.max_np()))
        }
    };
    NodeRange::new(min, max).ok_or_else(|| {
        Failure::invalid(format!("no round can have from {min} to {max} nodes; set --nnodes"))
    })
}

/// Returns how many nodes a round of the job in etcd may have; waits for its master.
async fn nodes_of_job(etcd: &Etcd, keys: &Keys) -> Result<NodeRange, Failure> {
    let mirror = Mirror::start(etcd, Range::Key(keys.job())).await?;
    let mut changes = mirror.subscribe();
    let exists = changes.wait_for(|view| !view.entries.is_empty());
    let view = match timeout(START_TIMEOUT, exists).await {
        Ok(Ok(view)) => view.clone(),
        Ok(Err(_)) | Err(_) => {
            let key = keys.job();
            return Err(Failure::unavailable(format!(
                "no master has accepted the job: etcd has no key {key}; is its master running?"
            )));
        }
    };
    match view.single::<AnyJobRecord>()? {
        Some(AnyJobRecord::Elastic(record)) => {
            let range = record.spec.range();
            range.ok_or_else(|| Failure::invalid("the job has an invalid number of nodes"))
        }
        Some(AnyJobRecord::Training(_)) | None => {
            Err(Failure::invalid("the job is a training job of Steadfast, not an elastic one"))
        }
    }
}

/// Returns where etcd is served; `None` if the job has an etcd of its own.
fn listen(args: &LaunchArgs, source: &Source, machine: &OwnMachine) -> Option<SocketAddr> {
    if !args.rdzv_endpoint.is_empty() {
        return None;
    }
    let is_local = match source {
        Source::Fixed(hosts) => machine.has_all(hosts).is_ok(),
        Source::Script(_) => false,
    };
    let address = match args.security.insecure_allow_plaintext && !is_local {
        true => Ipv4Addr::UNSPECIFIED,
        false => Ipv4Addr::LOCALHOST,
    };
    Some(args.listen.unwrap_or(SocketAddr::from((address, 0))))
}

/// Returns where polls find the hosts. Without a flag, only hosts are allowed that are this machine, if this launcher
/// serves etcd: others do not reach it.
fn host_source(
    args: &LaunchArgs,
    source: Source,
    listen: Option<SocketAddr>,
    machine: &OwnMachine,
) -> Result<HostSource, Failure> {
    let is_allowed = args.security.insecure_allow_plaintext;
    if let Some(listen) = listen.filter(|it| !it.ip().is_loopback() && !is_allowed) {
        return Err(Failure::invalid(format!(
            "--listen {listen} is not a loopback address, and etcd in the launcher has neither TLS nor users; \
             run etcd and steadfast-master instead, or pass --insecure-allow-plaintext"
        )));
    }
    let only_local = listen.filter(|_| !is_allowed).map(|_| machine.clone());
    match source {
        Source::Script(line) => {
            let (slots, timeout) = (args.slots_per_host, args.discovery_timeout);
            Ok(HostSource::Script(Script::new(&line, slots, timeout, only_local)?))
        }
        Source::Fixed(hosts) => {
            let checked = only_local.map_or(Ok(()), |machine| machine.has_all(&hosts));
            checked.map_err(Failure::invalid)?;
            Ok(HostSource::Fixed(hosts))
        }
    }
}

fn rendezvous_settings(
    args: &LaunchArgs,
    nodes: NodeRange,
    listen: SocketAddr,
) -> Result<OwnRendezvousSettings, Failure> {
    let mut spec = ElasticSpec::new(&args.rdzv_id, nodes);
    spec.nodes.last_call = args.last_call;
    args.data.describe(&mut spec);
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let url = advertised(args.advertise.as_deref(), listen)?;
    let host = url.trim_start_matches("http://").rsplit_once(':').map(|(host, _)| host.to_owned());
    Ok(OwnRendezvousSettings {
        spec,
        listen,
        master_listen: SocketAddr::new(listen.ip(), 0),
        advertise: host,
        admin_listen: any,
        data_dir: args.data_dir.clone(),
    })
}

/// Returns the address at which this process reaches its own etcd.
fn own(bound: SocketAddr) -> SocketAddr {
    match bound.ip().is_unspecified() {
        true => SocketAddr::from((Ipv4Addr::LOCALHOST, bound.port())),
        false => bound,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        args: LaunchArgs,
    }

    fn range(more: &[&str]) -> Result<(u32, u32), String> {
        let words = ["launch", "--rdzv-id", "job"].iter().chain(more).chain(&["--", "true"]);
        let args = Only::parse_from(words).args;
        let (hosts, script) = (args.hosts.as_deref(), args.host_discovery_script.as_deref());
        let source = Source::of(hosts, script, 1).unwrap();
        let workers = workers(&args).map_err(|it| it.message)?;
        let nodes = nodes(&args, &source, workers).map_err(|it| it.message)?;
        Ok((nodes.min(), nodes.max()))
    }

    #[test]
    fn the_most_workers_are_those_of_the_flag_or_of_all_hosts() {
        let max = |more: &[&str]| {
            let words = ["launch", "--rdzv-id", "job"].iter().chain(more).chain(&["--", "true"]);
            let args = Only::parse_from(words).args;
            let (hosts, script) = (args.hosts.as_deref(), args.host_discovery_script.as_deref());
            workers_max(&args, &Source::of(hosts, script, 2).unwrap())
        };
        assert_eq!(max(&["--hosts", "a:2,b:4"]), Some(6));
        assert_eq!(max(&["--hosts", "a:2,b:4", "--max-np", "4"]), Some(4));
        assert_eq!(max(&["--host-discovery-script", "x", "--max-np", "4"]), Some(4));
        assert_eq!(max(&["--host-discovery-script", "x"]), None);
    }

    #[test]
    fn the_number_of_nodes_follows_from_the_hosts_and_the_number_of_workers() {
        assert_eq!(range(&["--hosts", "a:2,b:4,c:4"]), Ok((1, 3)));
        assert_eq!(range(&["--hosts", "a:2,b:4,c:4", "--min-np", "9"]), Ok((3, 3)));
        assert_eq!(range(&["--hosts", "a:2,b:4,c:4", "--min-np", "8"]), Ok((2, 3)));
        assert_eq!(range(&["--hosts", "a:2,b:4,c:4", "--max-np", "2"]), Ok((1, 2)));
        assert_eq!(range(&["--hosts", "a:2,b:2", "--nnodes", "1:9"]), Ok((1, 9)));
        assert_eq!(range(&["--host-discovery-script", "x", "--max-np", "8"]), Ok((1, 8)));
        assert_eq!(range(&["--host-discovery-script", "x"]), Ok((1, NODES_MAX)));
        let error = range(&["--hosts", "a,b", "--min-np", "3"]).unwrap_err();
        assert_eq!(error, "--hosts has 2 slots, fewer than --min-np 3");
        let error = range(&["--hosts", "a,b", "--min-np", "3", "--max-np", "2"]).unwrap_err();
        assert_eq!(error, "--min-np 3 is more than --max-np 2");
    }
}
