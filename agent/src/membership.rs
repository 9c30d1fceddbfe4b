//! This node's membership in rounds.

use std::time::Duration;

use bytes::Bytes;
use steadfast_client::{Entered, Joined, NodeError, NodeIdentity, NodeSession, Terms};
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::keys::Keys;
use steadfast_common::rendezvous::{AgentRecord, EXIT_TAG, PORTS_TAG, RoundRecord};
use steadfast_coord::Etcd;
use steadfast_host::time::{Instant, sleep};
use steadfast_net::TlsIdentity;
use steadfast_process::Failure;
use tracing::{info, warn};

use crate::environment::Place;
use crate::ports::{HeldPorts, NodePorts};

/// Time between attempts to register while the node's former lease has not ended.
const RETRY: Duration = Duration::from_millis(200);

/// How long such attempts are made, beyond the time to live of the lease.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(20);

/// How this node takes part in the job.
#[derive(Debug)]
pub(crate) struct Membership {
    pub etcd: Etcd,
    pub keys: Keys,
    pub lease_ttl: Duration,
    pub node: NodeId,
    pub record: AgentRecord,
    pub tls: TlsIdentity,
    pub terms: Terms,
    pub session: Option<NodeSession>,
    /// The last round of this registration; 0 if there is none.
    pub last: Round,
}

/// How the exit barrier ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exited {
    /// The job has succeeded.
    All,
    /// Another round has to be formed.
    Again,
}

/// How one attempt ended that failed.
enum Attempt {
    /// Register, or ask for another round, and try again.
    Again,
    Failed(Failure),
}

impl From<NodeError> for Attempt {
    fn from(error: NodeError) -> Self {
        match error {
            NodeError::Unregistered => Self::Again,
            // The round is over, or another phase was released meanwhile.
            NodeError::Rejected { kind: ErrorKind::Stale, .. } => Self::Again,
            error => Self::Failed(failure(&error)),
        }
    }
}

pub(crate) fn failure(error: &NodeError) -> Failure {
    Failure::new(error.kind(), error.to_string())
}

impl Membership {
    /// Registers, if the node is not registered, and announces that it is starting.
    ///
    /// # Errors
    /// If etcd or the master refuses it.
    pub async fn register(&mut self) -> Result<(), Failure> {
        if self.session.is_some() {
            return Ok(());
        }
        let mut give_up: Option<Instant> = None;
        let session = loop {
            let identity = NodeIdentity {
                node: self.node,
                record: self.record.clone(),
                tls: self.tls.clone(),
            };
            let registered =
                NodeSession::register(&self.etcd, &self.keys, self.lease_ttl, identity).await;
            match registered {
                Ok(session) => break session,
                // The former registration of this node has not ended yet.
                Err(error) if error.kind() == ErrorKind::Conflict => {
                    let limit = self.lease_ttl + REGISTER_TIMEOUT;
                    let give_up = *give_up.get_or_insert_with(|| Instant::now() + limit);
                    if give_up <= Instant::now() {
                        return Err(failure(&error));
                    }
                    sleep(RETRY).await;
                }
                Err(error) => return Err(failure(&error)),
            }
        };
        self.last = Round(0);
        match session.announce().await {
            Ok(()) | Err(NodeError::Unregistered) => {}
            Err(error) => return Err(failure(&error)),
        }
        self.session = Some(session);
        Ok(())
    }

    /// Waits until this node is a member of another round, and its members have told each other their ports.
    /// The ports of this node are held until the caller drops them.
    ///
    /// # Errors
    /// If too few nodes join, or the job refuses this node.
    pub async fn join(
        &mut self,
        take_ports: impl Fn() -> Result<HeldPorts, Failure>,
    ) -> Result<(Place, HeldPorts), Failure> {
        loop {
            self.register().await?;
            let held = take_ports()?;
            match self.try_join(&held.ports).await {
                Ok(place) => return Ok((place, held)),
                Err(Attempt::Again) => {}
                Err(Attempt::Failed(failure)) => return Err(failure),
            }
        }
    }

    async fn try_join(&mut self, ports: &NodePorts) -> Result<Place, Attempt> {
        let record = self.next_round().await.inspect_err(|_| self.session = None)?;
        self.last = record.round;
        let rank = record.members.iter().position(|member| member.node == self.node);
        let rank = rank.ok_or_else(|| {
            let message = format!("round {} does not have this node", record.round);
            Attempt::Failed(Failure::internal(message))
        })?;
        let ports = self.exchange(&record, ports).await?;
        Ok(Place { record, ports, rank })
    }

    async fn next_round(&self) -> Result<RoundRecord, Attempt> {
        let Some(session) = &self.session else { return Err(Attempt::Again) };
        let mut shown = String::new();
        loop {
            match session.join(self.last, self.terms).await? {
                Joined::Round(record) => return Ok(record),
                Joined::TooFew(reason) => {
                    return Err(Attempt::Failed(Failure::unavailable(reason)));
                }
                Joined::Waits(reason) => {
                    if shown != reason {
                        info!("{reason}");
                        shown = reason;
                    }
                }
            }
        }
    }

    /// Tells the other members of a round the ports of this node; returns those of all by rank.
    async fn exchange(
        &self,
        record: &RoundRecord,
        ports: &NodePorts,
    ) -> Result<Vec<NodePorts>, Attempt> {
        let Some(session) = &self.session else { return Err(Attempt::Again) };
        let data = serde_json::to_vec(ports).expect("ports are plain data");
        let data = Bytes::from(data);
        let entries = loop {
            match session.enter(record.round, PORTS_TAG, Phase(0), data.clone()).await? {
                Entered::Released(entries) => break entries,
                Entered::Ended(reason) => {
                    info!(round = record.round.0, "round ended before it began: {reason}");
                    return Err(Attempt::Again);
                }
                Entered::Waits(reason) => info!("{reason}"),
            }
        };
        let of_member = |node: &NodeId| {
            let ports = entries.get(node).map(|data| serde_json::from_slice(data));
            match ports {
                Some(Ok(ports)) => Ok(ports),
                Some(Err(_)) | None => Err(Attempt::Failed(Failure::invalid(format!(
                    "node {node} runs another version of Steadfast: its ports cannot be read"
                )))),
            }
        };
        record.members.iter().map(|member| of_member(&member.node)).collect()
    }

    /// Waits until all members of the round have succeeded.
    ///
    /// # Errors
    /// If the job refuses this node, or the time is over.
    pub async fn exit(&mut self, limit: Option<Duration>) -> Result<Exited, Failure> {
        let end = limit.map(|limit| Instant::now() + limit);
        let mut shown = String::new();
        loop {
            let Some(session) = &self.session else { return Ok(Exited::Again) };
            let entered = session.enter(self.last, EXIT_TAG, Phase(0), Bytes::new()).await;
            match entered {
                Ok(Entered::Released(_)) => return Ok(Exited::All),
                // It was not a member any more when it entered.
                Ok(Entered::Ended(reason)) => {
                    warn!("this node's workers succeeded, but {reason}; they run again");
                    return Ok(Exited::Again);
                }
                Ok(Entered::Waits(reason)) if end.is_some_and(|end| end <= Instant::now()) => {
                    return Err(Failure::unavailable(format!("gave up at the exit: {reason}")));
                }
                Ok(Entered::Waits(reason)) => {
                    if shown != reason {
                        info!("this node's workers succeeded; {reason}");
                        shown = reason;
                    }
                }
                Err(NodeError::JobEnded) => return Ok(Exited::All),
                Err(NodeError::Unregistered) => {
                    self.session = None;
                    return Ok(Exited::Again);
                }
                Err(NodeError::Rejected { kind: ErrorKind::Stale, .. }) => {
                    return Ok(Exited::Again);
                }
                Err(error) => return Err(failure(&error)),
            }
        }
    }

    /// Leaves the job: the others form a round without this node at once.
    pub async fn leave(&mut self) {
        if let Some(session) = self.session.take() {
            session.close().await;
        }
    }
}
