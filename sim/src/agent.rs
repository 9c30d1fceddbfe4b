//! The agent of a node of a simulated elastic job: the real one, over simulated workers.

use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use clap::{Args, Command, FromArgMatches};
use steadfast_agent::{Ended, RunArgs, run_process};
use steadfast_common::ids::NodeId;
use steadfast_host::random;
use steadfast_process::{Failure, Shutdown};

use crate::checks::Observed;
use crate::workers::{Node, SimulatedWorkers};
use crate::workload::{ElasticJob, RESTARTS_ENOUGH};

/// How long workers may take to end when they are stopped.
const GRACE: Duration = Duration::from_secs(3);

/// The flags that have no default. A simulated machine replaces all of them, and has no program.
const REQUIRED: [&str; 4] = ["agent", "--rdzv-endpoint=etcd", "--rdzv-id=job", "program"];

/// The settings of an agent by default.
static DEFAULTS: LazyLock<RunArgs> = LazyLock::new(|| {
    let command = RunArgs::augment_args(Command::new("agent"));
    let matches = command.try_get_matches_from(REQUIRED).expect("the flags are valid");
    RunArgs::from_arg_matches(&matches).expect("the flags are those of an agent")
});

/// Runs an agent until the job has ended, no restart is left, or `shutdown` is triggered.
///
/// # Errors
/// Those of an agent. One without restarts fails as well, so that its supervisor starts it again.
pub async fn run(
    job: ElasticJob,
    node: Node,
    etcd: String,
    lease_ttl: Duration,
    id: NodeId,
    shutdown: Shutdown,
    observed: Arc<Mutex<Observed>>,
) -> Result<(), Failure> {
    let args = args(&job, &node, &etcd, lease_ttl);
    let mut workers = SimulatedWorkers::new(job, node, etcd, id, observed.clone());
    let ended = run_process(&args, id, &mut workers, &shutdown).await?;
    let mut observed = observed.lock().expect("one thread");
    match ended {
        Ended::Succeeded => observed.workers.has_agent_succeeded = true,
        Ended::JobFailed(_) | Ended::JobWasOver { .. } => {}
        Ended::Exhausted if args.max_restarts == RESTARTS_ENOUGH => {
            observed.broken.push(format!("the agent of node {id} has used up all restarts"));
        }
        Ended::Exhausted => {
            observed.workers.has_agent_given_up = true;
            return Err(Failure::unavailable("no restart is left".to_owned()));
        }
        Ended::Interrupted if shutdown.is_draining() => {}
        Ended::Interrupted => {
            observed.broken.push(format!("the agent of node {id} ended without a reason"));
        }
    }
    Ok(())
}

fn args(job: &ElasticJob, node: &Node, etcd: &str, lease_ttl: Duration) -> RunArgs {
    let mut args = DEFAULTS.clone();
    args.nnodes = job.nodes;
    args.nproc_per_node = 1 + (random::seed() % 2) as u32;
    args.max_restarts = job.restarts_max;
    args.rdzv_endpoint = vec![etcd.to_owned()];
    args.rdzv_id = Some(job.spec.name.clone());
    args.address = Some(node.host());
    (args.grace, args.lease_ttl) = (GRACE, lease_ttl);
    (args.reset_timeout, args.hang_timeout) = (job.reset_timeout, job.hang_timeout);
    args
}
