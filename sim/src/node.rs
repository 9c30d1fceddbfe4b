//! A node of a simulated elastic job: the membership of a real agent, and a worker that takes steps together
//! with those of the other nodes.
//!
//! The worker stands for a program that uses `steadfast.elastic`. A step is a barrier; a step that was passed
//! is committed to the memory of the agent. At the beginning of a round all members continue from the newest
//! commit of any of them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use prometheus_client::registry::Registry;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Phase};
use steadfast_common::records::rendezvous::{AgentRecord, Runner};
use steadfast_common::role::Role;
use steadfast_coord::Etcd;
use steadfast_elastic_client::{
    Entered, Exited, JoinedRound, Membership, NodeError, NodeIdentity, RoundOver, Terms, until_over,
};
use steadfast_host::random;
use steadfast_host::time::sleep;
use steadfast_process::{Admin, AdminContent, CommonArgs, Failure, Readiness, Shutdown};
use steadfast_proto::v1::NodeReport;
use uuid::Uuid;

use crate::checks::Observed;
use crate::workload::ElasticJob;

/// The tag of the barrier of a step.
const STEP_TAG: &str = "step";

/// How long the first registration waits for a master.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How long one call of the watch of a round waits at most.
const WATCH: Duration = Duration::from_secs(5);

/// Longest time from the last step of a worker to its end, in milliseconds.
const LAST_MS: u64 = 2000;

/// How a round ended for the worker.
enum RoundEnd {
    Succeeded,
    /// The worker asks for another round.
    Left,
    Unregistered,
    JobEnded,
}

/// Runs an agent with one worker until the job has ended, or `shutdown` is triggered.
///
/// # Errors
/// Those of an agent.
pub async fn run(
    job: ElasticJob,
    args: CommonArgs,
    id: Uuid,
    shutdown: Shutdown,
    observed: Arc<Mutex<Observed>>,
) -> Result<(), Failure> {
    let exposure = args.security.exposure(Role::Trainer)?;
    let tls = exposure.identity();
    let admin = Admin::bind(args.admin_listen, exposure).await?;
    let address = args.admin_advertised(admin.local_addr())?;
    let _admin = admin.serve(AdminContent {
        role: "agent",
        job: args.job.clone(),
        id: Box::new(move || id),
        readiness: Readiness::new("joins a round"),
        metrics: Registry::default(),
        token: None,
        shutdown: shutdown.clone(),
        status: Box::new(|| serde_json::Value::Null),
        page: None,
    });
    let etcd = Etcd::connect(&args.etcd_options()).await?;
    let slots = 1 + (random::seed() % 2) as u32;
    let record =
        AgentRecord { admin: address.clone(), ..AgentRecord::new(Runner::Agent, address, slots) };
    let identity = NodeIdentity { node: NodeId(id), record, tls };
    let terms = Terms { nodes_min: job.nodes.min(), nodes_max: job.nodes.max() };
    let (keys, ttl) = (args.keys(), args.lease_ttl);
    let membership = Membership::new(etcd, keys, ttl, identity, terms, START_TIMEOUT);
    let mut node = Node { job, membership, committed: 0, observed };
    let ended = tokio::select! {
        biased;
        () = shutdown.drain() => Ok(()),
        ended = node.rounds() => ended,
    };
    node.membership.leave().await;
    ended.map_err(|error| Failure::new(error.kind(), error.to_string()))
}

struct Node {
    job: ElasticJob,
    membership: Membership,
    /// Steps that the worker has committed; lost with this process.
    committed: u64,
    observed: Arc<Mutex<Observed>>,
}

impl Node {
    async fn rounds(&mut self) -> Result<(), NodeError> {
        loop {
            let own = Bytes::from(self.committed.to_string());
            let joined = match self.membership.join(|| Ok(((), own.clone()))).await {
                Err(NodeError::JobEnded) => return Ok(()),
                joined => joined?,
            };
            let newest = joined.data.iter().filter_map(number).max();
            self.committed = newest.unwrap_or(0);
            match self.round(&joined).await? {
                RoundEnd::Left => {}
                RoundEnd::Unregistered => self.membership.forget(),
                RoundEnd::JobEnded => return Ok(()),
                RoundEnd::Succeeded => match self.membership.exit(None).await? {
                    Exited::All => return Ok(()),
                    Exited::Again => {}
                },
            }
        }
    }

    async fn round(&mut self, joined: &JoinedRound<()>) -> Result<RoundEnd, NodeError> {
        let round = joined.record.round;
        let Some(session) = self.membership.session() else { return Ok(RoundEnd::Unregistered) };
        let mut over =
            std::pin::pin!(until_over(session, round, NodeReport::default, WATCH).fuse());
        // Some workers notice a change only when their barrier ends.
        let is_watched = !random::seed().is_multiple_of(4);
        let first = self.committed;
        while self.committed < self.job.steps {
            if random::seed().is_multiple_of(self.job.failures) {
                return Ok(RoundEnd::Left);
            }
            sleep(Duration::from_millis(random::seed() % 200)).await;
            let phase = Phase(self.committed - first);
            let own = Bytes::from(self.committed.to_string());
            let entered = tokio::select! {
                biased;
                over = &mut over, if is_watched => return end_of(over),
                entered = session.enter(round, STEP_TAG, phase, own) => entered,
            };
            match entered {
                Ok(Entered::Waits(_)) => {}
                Ok(Entered::Ended(_)) => return Ok(RoundEnd::Left),
                Ok(Entered::Released(entries)) => {
                    let others = entries.values().map(number);
                    let members = joined.record.members.len();
                    if entries.len() != members
                        || others.into_iter().any(|it| it != Some(self.committed))
                    {
                        let text = format!(
                            "step {} of round {round} was passed by {entries:?}; the round has {members} members",
                            self.committed
                        );
                        self.observed.lock().expect("one thread").broken.push(text);
                    }
                    self.committed += 1;
                }
                Err(NodeError::Unregistered) => return Ok(RoundEnd::Unregistered),
                Err(NodeError::JobEnded) => return Ok(RoundEnd::JobEnded),
                Err(error) if error.kind() == ErrorKind::Stale => return Ok(RoundEnd::Left),
                Err(error) => return Err(error),
            }
        }
        // Workers end one after the other, such as after they have written a model; until then they can fail.
        let last = Duration::from_millis(random::seed() % LAST_MS);
        tokio::select! {
            biased;
            over = &mut over, if is_watched => return end_of(over),
            () = sleep(last) => {}
        }
        Ok(match random::seed().is_multiple_of(self.job.failures) {
            true => RoundEnd::Left,
            false => RoundEnd::Succeeded,
        })
    }
}

fn end_of(over: RoundOver) -> Result<RoundEnd, NodeError> {
    match over {
        RoundOver::Changed(_) => Ok(RoundEnd::Left),
        RoundOver::Unregistered => Ok(RoundEnd::Unregistered),
        RoundOver::JobEnded => Ok(RoundEnd::JobEnded),
        RoundOver::Failed(error) => Err(error),
    }
}

fn number(data: &Bytes) -> Option<u64> {
    std::str::from_utf8(data).ok()?.parse().ok()
}
